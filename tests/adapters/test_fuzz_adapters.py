"""Random damage to adapters: a load is right, or refused in words with nothing changed.

MOELORA_FUZZ multiplies the number of examples (`make fuzz`).
"""

import contextlib
import json
import os
import shutil
import struct

import adapter_cases
import pytest
import torch
from adapter_cases import LAYERS, K, of_rank, per_expert, rand, wrapped
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moelora.adapters import AdapterPool, LinearLayer, peek

SCALE = int(os.environ.get("MOELORA_FUZZ", "1"))
R = 2
LINEARS = [
    LinearLayer("model.layers.0.self_attn.q_proj", K, 5),
    LinearLayer("model.embed_tokens", 7, K, embedding=True),
]
CONFIG = of_rank(R)
CLEAR = (ValueError, OSError, RuntimeError)

fuzz = settings(
    max_examples=60 * SCALE,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def valid_state():
    """One pair per expert and projection in the first layer, PEFT's wrapped form in the second, a
    linear layer and an embedding."""
    state = per_expert(r=R)[0] | wrapped(layer=1, r=R)[0]
    for layer, kind in zip(LINEARS, ("lora_{}.default.weight", "lora_embedding_{}"), strict=True):
        for side, shape in (("A", (R, layer.in_features)), ("B", (layer.out_features, R))):
            state[f"base_model.model.{layer.name}.{kind.format(side)}"] = rand(*shape)
    return state


@pytest.fixture(scope="module")
def pool():
    """Two of three slots in use, in a pool that every example shares."""
    pool = AdapterPool(LAYERS, 3, 4, dtype=torch.float32, linears=LINEARS)
    for name in ("kept", "pinned"):
        pool.add(name, valid_state(), config=CONFIG, pin=True)
    return pool


def write(folder, state):
    shutil.rmtree(folder, ignore_errors=True)
    return adapter_cases.write(folder, {k: v.contiguous() for k, v in state.items()}, CONFIG)


def add_and_check(pool, source, **kwargs):
    """Adds an adapter under damage; whether it was taken."""
    before = tensors, _ = adapter_cases.snapshot(pool)
    try:
        slot = pool.add("new", source, **kwargs)
    except CLEAR as error:
        assert len(str(error)) > 10, "an error must say what is wrong"
        adapter_cases.assert_unchanged(pool, before)
        return False
    try:
        assert slot == 2
        assert 0 < pool.lora_ranks[slot] <= pool.max_rank
        for old, new in zip(tensors, pool._tensors(), strict=True):
            assert torch.equal(old[:2], new[:2]), "other slots must not change"
            assert not new.is_floating_point() or new.isfinite().all()
    finally:
        pool.remove("new")
    return True


def test_the_undamaged_adapter_is_taken(pool, tmp_path):
    assert add_and_check(pool, write(tmp_path / "a", valid_state()))
    assert add_and_check(pool, valid_state(), config=CONFIG)


# ---- files ----


@fuzz
@given(data=st.data(), of_torch=st.booleans())
def test_damaged_bytes(pool, tmp_path, data, of_torch):
    """Bytes of a file overwritten, cut off, or appended, at random or where they tell the most.

    That is safetensors' header and its length field, and the pickle and directory of an archive.
    """
    path = write(tmp_path / "a", valid_state()) / "adapter_model.safetensors"
    if of_torch:
        path.unlink()
        path = path.with_suffix(".bin")
        torch.save(valid_state(), path)
    content = bytearray(path.read_bytes())
    if of_torch:
        pickle, directory = content.index(b"\x80\2}"), content.index(b"PK\1\2")
        spans = {"pickle": (pickle, content.index(b"u.PK") + 2)}
        spans["directory"] = (directory, len(content))
    else:
        header = struct.unpack("<Q", content[:8])[0]
        spans = {"flip": (8, len(content)), "header": (8, 8 + header), "length": None}
    kind = data.draw(st.sampled_from([*spans, "cut", "append"]))
    if kind == "length":
        other = st.integers(0, 2**64 - 1).filter(lambda length: length != header)
        content[:8] = struct.pack("<Q", data.draw(other))
    elif kind == "cut":
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    elif kind == "append":
        content += data.draw(st.binary(min_size=1, max_size=20))
    else:
        start, end = spans[kind]
        for at in data.draw(st.lists(st.integers(start, end - 1), min_size=1, max_size=6)):
            content[at] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    taken = add_and_check(pool, tmp_path / "a")
    assert not taken or kind not in ("length", "cut", "append")
    with contextlib.suppress(*CLEAR):
        peek(tmp_path / "a", LAYERS, LINEARS)


PATTERNS = st.sampled_from(["gate_proj", "(?i)gate", ".*", "(", "0.*", "[", "(?P<x>a)(?P<x>b)", ""])
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**400), 10**400)
    | st.floats()
    | st.sampled_from(["LORA", "none", "gaussian", "(", ".*", "(?i)gate", "mlp.experts.up_proj"])
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(PATTERNS | st.text(max_size=8), inner)
    ),
    max_leaves=6,
)
OPTIONS = st.sampled_from(
    [
        *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"),
        *("target_parameters", "target_modules", "init_lora_weights", "bias", "use_dora"),
        *("peft_version", "auto_mapping", "lora_B_layout", "unsloth_fused_expert_lora"),
    ]
)


@fuzz
@given(options=st.dictionaries(OPTIONS | st.text(max_size=8), JSON, min_size=1, max_size=3))
def test_damaged_options(pool, tmp_path, options):
    path = write(tmp_path / "a", valid_state())
    (path / "adapter_config.json").write_text(json.dumps(CONFIG | options))
    add_and_check(pool, path)
    add_and_check(pool, valid_state(), config=CONFIG | options)


@fuzz
@given(text=st.binary(max_size=64) | st.sampled_from([b"[" * 100_000, b"{}", b"[]", b"nul"]))
def test_a_config_that_is_not_one(pool, tmp_path, text):
    path = write(tmp_path / "a", valid_state())
    (path / "adapter_config.json").write_bytes(text)
    assert not add_and_check(pool, path)


# ---- tensors ----

DTYPES = [getattr(torch, name) for name in ("float64", "int32", "bool", "uint8", "complex64")]
DTYPES += [torch.bfloat16, torch.float16, torch.float8_e4m3fn]
NAMES = st.sampled_from(
    [
        *("", ".", "..", "../../etc/passwd", "a\0b", "lora_A.weight", ".lora_A.weight"),
        f"base_model.model.{LAYERS[0].name}.0.gate_proj.lora_C.weight",
        f"base_model.model.{LAYERS[0].name}.99.gate_proj.lora_A.weight",
        f"base_model.model.{LAYERS[0].name}.{'9' * 5000}.gate_proj.lora_A.weight",
        f"base_model.model.{LAYERS[0].name}.00.gate_proj.lora_A.weight",
        f"{LAYERS[0].name}.0.gate_proj.lora_A.weight",
        f"{LAYERS[1].name}.base_layer.base_layer.lora_A.weight",
        f"{LAYERS[0].name}.../.gate_proj.lora_A.weight",
        f"module.{LAYERS[0].name}.gate_up_projs.7.lora_A.weight",
        f"base_model.model.{LINEARS[1].name}.lora_A.weight",
        f"base_model.model.{LINEARS[0].name}.base_layer.weight",
        f"base_model.model.{LINEARS[0].name}.lora_A.other.weight",
    ]
)


def damage(data, state):
    """One change; False where it may be harmless."""
    key = data.draw(st.sampled_from(sorted(state)))
    tensor = state[key]
    kind = data.draw(
        st.sampled_from(["remove", "rename", "dtype", "shape", "transpose", "value", "add"])
    )
    if kind == "remove":
        del state[key]
        return True
    if kind == "rename":
        new = data.draw(NAMES | st.text(max_size=20))
        state[new] = state.pop(key)
        return new != key.removeprefix("base_model.model.")
    if kind == "dtype":
        dtype = data.draw(st.sampled_from(DTYPES))
        state[key] = tensor.to(dtype)
        return dtype not in (torch.bfloat16, torch.float16)
    if kind == "shape":
        shape = data.draw(st.lists(st.integers(0, 9), max_size=4))
        state[key] = torch.zeros(shape)
        return tuple(shape) != tuple(tensor.shape)
    if kind == "transpose":
        state[key] = tensor.t()
        return tensor.size(0) != tensor.size(1)
    if kind == "value":
        state[key] = tensor.clone()
        value = data.draw(st.sampled_from([float("nan"), float("inf"), -float("inf"), 3e38]))
        state[key].view(-1)[data.draw(st.integers(0, tensor.numel() - 1))] = value
        return value != 3e38
    new = data.draw(NAMES | st.text(max_size=20))
    state[new] = tensor.clone()
    return new not in (key, key.removeprefix("base_model.model."))


@fuzz
@given(data=st.data(), from_folder=st.booleans())
def test_damaged_tensors(pool, tmp_path, data, from_folder):
    state = valid_state()
    wrong = damage(data, state)
    if from_folder:
        try:
            source = write(tmp_path / "a", state)
        except Exception:  # safetensors does not even write it
            return
        taken = add_and_check(pool, source)
    else:
        taken = add_and_check(pool, state, config=CONFIG)
    assert not (taken and wrong)


@pytest.mark.parametrize(
    "state",
    [
        {},
        {1: torch.zeros(1)},
        {1: torch.zeros(1), "a": torch.zeros(1)},
        {f"{LAYERS[0].name}.0.gate_proj.lora_A.weight": [[1.0]]},
        {f"{LAYERS[0].name}.0.gate_proj.lora_A.weight": torch.empty(R, K, device="meta")},
        {f"{LAYERS[0].name}.0.gate_proj.lora_A.weight": torch.zeros(R, K).to_sparse()},
    ],
    ids=["empty", "number", "mixed", "list", "meta", "sparse"],
)
def test_state_dicts_that_are_none(pool, state):
    assert not add_and_check(pool, state, config=CONFIG)


@pytest.mark.parametrize("name", ["", "missing", "a\0b", "../" * 40, "x" * 5000, "adapter.bin"])
def test_paths_that_lead_nowhere(pool, tmp_path, name):
    (tmp_path / "adapter.bin").touch()
    for path in (tmp_path / name, str(tmp_path / name)):
        if name != "../" * 40:  # the root of the file system is a folder
            assert not add_and_check(pool, path)
    (tmp_path / "adapter_model.bin").touch()
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ValueError, match=r"adapter_model.bin cannot be read as only tensors"):
        pool.add("new", tmp_path)
    (tmp_path / "adapter_model.safetensors").mkdir()
    assert not add_and_check(pool, tmp_path)
