"""Folders that lie: which files are read, what damaged ones say, what memory they ask for."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from checks import largest_allocation
from folder_cases import (
    INDEX,
    LAYER,
    change_json,
    change_quantization,
    change_tensors,
    put,
    refused,
    split,
)
from folder_cases import TENSORS as SINGLE
from hf_models import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quantized_folders import make_folder
from safetensors.torch import load_file, save_file

import moelora.integrations.transformers as moelora_hf
from moelora.integrations.transformers.folder import Folder
from moelora.integrations.transformers.folder_experts import LayerOfFolder
from moelora.integrations.transformers.names import expert_linears

Q_PROJ = "model.layers.1.self_attn.q_proj"
E4M3 = torch.float8_e4m3fn
SCALE = int(os.environ.get("MOELORA_FUZZ", "1"))
KINDS = {"mxfp4": 32, "gptq": 64, "awq": 64, "compressed-tensors": 32, "fp8": 128}
KINDS |= {"float-quantized": 0}


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """A folder of each kind, made when it is asked for."""
    made = {}

    def original(kind):
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            make_folder(made[kind], kind, KINDS[kind])
        return made[kind]

    return original


@pytest.fixture
def folder(originals, tmp_path):
    """A copy of the FP8 one, to be damaged."""
    return Path(shutil.copytree(originals("fp8"), tmp_path / "folder"))


def zeros(path):
    save_file({"lm_head.weight": torch.zeros(128, 128)}, path)


# ---- which files ----


@pytest.mark.parametrize("named", [None, "other.safetensors", "other.safetensors.index.json"])
@pytest.mark.parametrize("there", range(8))
def test_the_files_are_those_of_transformers(tmp_path, there, named):
    choose = pytest.importorskip("transformers.modeling_utils")._get_resolved_checkpoint_files
    for bit, name in enumerate((SINGLE, INDEX, "consolidated.safetensors")):
        if there & 1 << bit:
            zeros(tmp_path / name)
    for file in ("one.safetensors", "two.safetensors", "other.safetensors"):
        zeros(tmp_path / file)
    weight_map = {"b": "two.safetensors", "a": "one.safetensors"}
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    for index in (INDEX, "other.safetensors.index.json"):
        if index != INDEX or there & 2:
            (tmp_path / index).write_text(text)
    (tmp_path / "config.json").write_text(json.dumps({"transformers_weights": named}))
    try:
        theirs, _ = choose(str(tmp_path), None, None, True, None, False, named)
    except OSError:
        with pytest.raises(ValueError, match="has no safetensors files that transformers would"):
            Folder(tmp_path)
        return
    assert Folder(tmp_path)._weight_files(named) == [Path(file).name for file in theirs]


def test_a_tensor_of_two_files_is_that_of_the_last(folder):
    """As in transformers, whose order is that of names; other files are not read."""
    split(folder)
    (folder / "damaged.safetensors").write_bytes(b"x")
    state = load_file(folder / "b.safetensors")
    save_file(state | {"lm_head.weight": torch.zeros(128, 128)}, folder / "b.safetensors")
    assert not Folder(folder)["lm_head.weight"].any()


@pytest.mark.parametrize("name", ["variant", "subfolder", "revision", "gguf_file"])
def test_options_that_choose_other_files(folder, name):
    refused(folder, f"{name} is 'x', wanted none; give the folder", **{name: "x"})
    refused(folder, "use_safetensors is False", use_safetensors=False)


# ---- nothing outside the folder ----


SECRET = "secret.safetensors"


@pytest.mark.parametrize(
    "name", [f"../{SECRET}", f"sub/../../{SECRET}", "", ".", "a\0b", "ABSOLUTE"]
)
def test_names_that_lead_out_of_the_folder(folder, name):
    secret = folder.parent / SECRET
    zeros(secret)
    weight_map = split(folder)
    weight_map["lm_head.weight"] = str(secret) if name == "ABSOLUTE" else name
    change_json(folder / INDEX, lambda index: index | {"weight_map": weight_map})
    refused(folder, r"is no name of a file in the folder|has no file \.")
    change_json(folder / "config.json", lambda c: c | {"transformers_weights": str(secret)})
    refused(folder, "is no name of a file in the folder")


@pytest.mark.parametrize("name", [SINGLE, "config.json", "a.safetensors", INDEX])
def test_links_out_of_the_folder(folder, name):
    if name not in (SINGLE, "config.json"):
        split(folder)
    shutil.move(folder / name, folder.parent / "elsewhere")
    (folder / name).symlink_to("../elsewhere")
    refused(folder, rf"{name} is a link out of the folder, to .*elsewhere; ")


def test_links_in_a_circle(folder):
    (folder / SINGLE).unlink()
    (folder / SINGLE).symlink_to(SINGLE)
    with pytest.raises(ValueError, match="cannot be found|no safetensors files"):
        Folder(folder)


def test_links_within_the_folder_and_to_it(folder):
    (folder / "sub").mkdir()
    shutil.move(folder / SINGLE, folder / "sub" / "weights")
    (folder / SINGLE).symlink_to("sub/weights")
    link = folder.parent / "link"
    link.symlink_to(folder)
    assert "lm_head.weight" in Folder(link)
    split(folder)
    (folder / "sub" / "c.safetensors").symlink_to("../a.safetensors")

    def below(index):
        index["weight_map"]["lm_head.weight"] = "sub/c.safetensors"

    change_json(folder / INDEX, below)
    assert "lm_head.weight" in Folder(link)


def in_the_cache(folder, root):
    """A snapshot as huggingface_hub lays it out: links to blobs of the repository."""
    repository = root / "hub" / "models--org--name"
    snapshot, blobs = repository / "snapshots" / "0a1b", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.copy(file, blobs / f"{number:064x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:064x}")
    return snapshot


def test_snapshots_of_the_cache_of_the_hub(folder, tmp_path):
    zeros(tmp_path / "elsewhere")
    split(folder)
    snapshot = in_the_cache(folder, tmp_path)
    assert "lm_head.weight" in Folder(snapshot)
    (tmp_path / "moved").symlink_to(tmp_path / "hub")  # caches on other disks are links
    assert "lm_head.weight" in Folder(tmp_path / "moved" / snapshot.relative_to(tmp_path / "hub"))
    for target in ("../../elsewhere", "../../../../elsewhere"):
        (snapshot / "a.safetensors").unlink()
        (snapshot / "a.safetensors").symlink_to(target)
        with pytest.raises(ValueError, match="a.safetensors is a link out of the folder"):
            Folder(snapshot)


# ---- damaged files ----


@pytest.mark.parametrize("name", ["config.json", INDEX, "generation_config.json"])
@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"3", b"\xff", b"[" * 100_000, b'{"a": 1e}'])
def test_files_that_are_not_json(folder, name, text):
    if name == INDEX:
        split(folder)
    (folder / name).write_bytes(text)
    refused(folder, name)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (None, "weight_map is a NoneType, wanted files by names of tensors"),
        ([], "weight_map is a list"),
        ({}, "weight_map is empty"),
        ({"a": 3}, "the file of a is 3"),
        ({"a": None}, "the file of a is None"),
        ({"a": ["b"]}, r"the file of a is \['b'\]"),
        ({"a": "gone.safetensors"}, "has no file gone.safetensors, which its model.safetensors."),
        ({"a": "config.json"}, "config.json cannot be read"),
        ({"a": "sub"}, "has no file sub"),
    ],
)
def test_indices_that_name_no_files(folder, weight_map, message):
    split(folder)
    (folder / "sub").mkdir()
    change_json(folder / INDEX, lambda index: index | {"weight_map": weight_map})
    refused(folder, message)


@pytest.mark.parametrize("size", [0, 7, 8, 100, -1, -100_000])
def test_truncated_shards(folder, size):
    split(folder)
    content = (folder / "b.safetensors").read_bytes()
    (folder / "b.safetensors").write_bytes(content[:size])
    refused(folder, r"b\.safetensors cannot be read: ")


def test_a_dtype_that_torch_has_not(folder):
    content = (folder / SINGLE).read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    begin, stop = header["lm_head.weight"]["data_offsets"]
    header["lm_head.weight"] |= {"dtype": "F6_E2M3", "shape": [(stop - begin) * 8 // 6]}
    text = json.dumps(header).encode()
    (folder / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + content[end:])
    refused(folder, rf"{SINGLE}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["AutoConfig"]}, "architectures is .*AutoConfig.*; pass model_class"),
        ({"architectures": ["os"]}, "architectures is .*; pass model_class"),
        ({"architectures": None}, "architectures is None; pass model_class"),
        ({"model_type": "none"}, "config.json is refused by transformers"),
        ({"model_type": 3}, "config.json is refused by transformers"),
        ({"num_hidden_layers": "two"}, "config.json is refused by transformers"),
        ({"quantization_config": [1]}, "quantization_config is a list, wanted an object"),
        ({"quantization_config": "fp8"}, "quantization_config is a str, wanted an object"),
        ({"transformers_weights": 3}, "transformers_weights is 3, wanted a name that ends in"),
        ({"transformers_weights": "a.bin"}, "transformers_weights is 'a.bin', wanted a name"),
        ({"vocab_size": 64}, r"has shape \(128, 128\), wanted \(64, 128\)"),
    ],
)
def test_configs_of_other_things(folder, changes, message):
    change_json(folder / "config.json", lambda config: config | changes)
    refused(folder, message)


def test_no_code_of_the_folder_is_run(folder):
    """Nor is the user asked whether it may."""
    (folder / "ours.py").write_text("raise SystemExit('ran')")

    def mapped(config):
        return config | {"model_type": "ours", "auto_map": {"AutoConfig": "ours.Config"}}

    change_json(folder / "config.json", mapped)
    refused(folder, "config.json is refused by transformers")


# ---- FP8 of attention ----


def spoilt(value):
    def change(tensor):
        tensor = tensor.float()
        tensor[0, 0] = value
        return tensor

    return change


@pytest.mark.parametrize("kind", ["fp8", "float-quantized"])
@pytest.mark.parametrize(
    ("own", "change", "message"),
    [
        ("SCALE", spoilt(float("nan")), "has a scale that is NaN or infinite"),
        ("SCALE", spoilt(float("inf")), "has a scale that is NaN or infinite"),
        ("SCALE", spoilt(-float("inf")), "has a scale that is NaN or infinite"),
        ("SCALE", spoilt(3e38), "is beyond torch.bfloat16"),
        ("SCALE", lambda t: t[:, :0], r"has shape \(.*\), wanted \("),
        ("SCALE", lambda t: t[None], r"has shape \(.*\), wanted \("),
        ("SCALE", lambda t: t.to(torch.complex64), "has dtype torch.complex64, wanted float32"),
        ("SCALE", lambda t: t.int(), "has dtype torch.int32, wanted float32"),
        ("weight", lambda t: spoilt(float("nan"))(t).to(E4M3), "has a NaN, wanted numbers"),
        ("weight", lambda t: t[0], r"has shape \(128,\), wanted a matrix"),
        ("weight", lambda t: t[None], r"has shape \(1, 128, 128\), wanted a matrix"),
    ],
)
def test_weights_of_attention_that_are_not_numbers(originals, tmp_path, kind, own, change, message):
    folder = Path(shutil.copytree(originals(kind), tmp_path / "folder"))
    own = own.replace("SCALE", "weight_scale_inv" if kind == "fp8" else "weight_scale")
    change_tensors(folder, put(f"{Q_PROJ}.{own}", change))
    refused(folder, rf"{SINGLE}: {Q_PROJ}\.\w+ {message}")


# ---- memory and settings ----


@pytest.mark.parametrize("sides", [[2**30, 128], [128, 2**30], [2**31 - 1, 2**31 - 1]])
def test_blocks_larger_than_weights_take_no_memory(folder, sides):
    """The scales of one block are spread over the weight, not over the block."""
    plain = Folder(folder).plain(torch.bfloat16)
    change_quantization(folder, weight_block_size=sides)
    largest = max(tensor.nbytes for tensor in load_file(folder / SINGLE).values())
    with largest_allocation() as took:
        try:
            tensors = Folder(folder).plain(torch.bfloat16)
        except ValueError:
            tensors = {}
    assert took.nbytes <= 4 * largest, "one weight in float32"
    if sides[0] == sides[1]:  # all of a weight is one block, as it is of 128 x 128
        for name, tensor in plain.items():
            assert torch.equal(tensor, tensors[name]), name


@pytest.mark.parametrize(
    "sides", [[0, 0], [128, 0], [-1, 128], [128], [1, 2, 3], "ab", {"a": 1, "b": 2}, 128, 1.5]
    + [[128.0, 128], ["a", "b"], [True, True], [None, None], [2**31, 1], [10**30, 1]]
)  # fmt: skip
def test_blocks_that_are_none(folder, sides):
    change_quantization(folder, weight_block_size=sides)
    refused(folder, "weight_block_size is .*, wanted two sizes: rows and col")


def read_all(folder):
    """All that `load_quantized` reads, without a model."""
    opened = Folder(folder)
    opened.check()
    opened.plain(torch.bfloat16)
    with torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(folder)
        del config.quantization_config
        model = transformers.AutoModelForCausalLM.from_config(config)
    linears = expert_linears(model, moelora_hf.moe_layers(model), opened.linears)[LAYER]
    return LayerOfFolder(opened, LAYER, model.get_submodule(LAYER), linears).read(torch.bfloat16)


def test_what_is_damaged_below_is_right(originals):
    for kind in KINDS:
        read_all(originals(kind))


BESIDE = [None, True, False, 0, -1, 64, 2**70, 1.5, float("inf"), "x", "", [], [1, "x"], {}]
BESIDE += [{"x": 1}, {"weights": 3}, {"a": {"weights": {"num_bits": []}}}]
SETTINGS = ["bits", "group_size", "sym", "checkpoint_format", "version", "zero_point", "fmt"]
SETTINGS += ["activation_scheme", "weight_block_size", "format", "config_groups", "quant_method"]
WEIGHTS = ["num_bits", "type", "strategy", "group_size", "symmetric", "block_structure"]
REFUSED = (ValueError, NotImplementedError)


@settings(max_examples=40 * SCALE, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_settings_of_any_kind_are_taken_or_refused(originals, tmp_path_factory, data):
    """ValueError or NotImplementedError, in words, never whatever Python makes of a value."""
    kind = data.draw(st.sampled_from(sorted(KINDS)))
    folder = tmp_path_factory.mktemp("settings")
    (folder / SINGLE).symlink_to("weights")
    os.link(originals(kind) / SINGLE, folder / "weights")
    config = json.loads((originals(kind) / "config.json").read_text())
    quantization = config["quantization_config"]
    if "config_groups" in quantization and data.draw(st.booleans()):
        group = quantization["config_groups"]["group_0"]
        name = data.draw(st.sampled_from([*WEIGHTS, "weights", "input_activations"]))
        inside = group["weights"] if name in WEIGHTS else group
        inside[name] = data.draw(st.sampled_from(BESIDE))
    else:
        quantization[data.draw(st.sampled_from(SETTINGS))] = data.draw(st.sampled_from(BESIDE))
    (folder / "config.json").write_text(json.dumps(config))
    with largest_allocation() as took:
        try:
            read_all(folder)
        except REFUSED as error:
            assert len(str(error)) > 20
    assert took.nbytes < 4 << 20


DTYPES = [torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool]
DTYPES += [torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.float8_e8m0fnu]


@settings(max_examples=50 * SCALE, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_tensors_of_any_kind_are_taken_or_refused(originals, tmp_path_factory, data):
    kind = data.draw(st.sampled_from(sorted(KINDS)))
    folder = tmp_path_factory.mktemp("tensors")
    shutil.copy(originals(kind) / "config.json", folder)
    state = load_file(originals(kind) / SINGLE)
    ours = sorted(n for n in state if n.startswith((f"{LAYER}.1.", f"{LAYER}.0.", Q_PROJ)))
    ours += sorted(n for n in state if n.startswith(f"{LAYER}.") and n.endswith(("ks", "es")))
    name = data.draw(st.sampled_from(ours))
    tensor = state[name]
    change = data.draw(st.sampled_from(["drop", "shape", "dtype", "dims", "bytes"]))
    if change == "drop":
        del state[name]
    elif change == "shape":
        shape = data.draw(st.lists(st.integers(0, 9), max_size=4))
        state[name] = torch.zeros(shape).to(tensor.dtype)
    elif change == "dtype":
        state[name] = tensor.float().to(data.draw(st.sampled_from(DTYPES)))
    elif change == "dims":
        state[name] = data.draw(st.sampled_from([tensor[None], tensor[..., None], tensor[:1]]))
    else:
        raw = tensor.clone().reshape(-1).view(torch.uint8)
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        state[name] = raw.view(tensor.dtype).reshape(tensor.shape)
    save_file({n: t.contiguous() for n, t in state.items()}, folder / SINGLE)
    try:
        read_all(folder)
    except REFUSED as error:
        assert len(str(error)) > 20


@pytest.mark.parametrize(
    ("method", "wanted"),
    [
        ("gguf", r"GGUF is not read; .*gguf_file=...\) and call .*enable\(model\)$"),
        ("hqq", "of HQQ are not read; quantize the experts to MXFP4, INT4, .*or load the mod"),
        ("torchao", "weights of torchao are not read; quantize the experts to .*, or load the"),
        ("quark", "folders of Quark are not read; quantize the experts to .*, or load the mod"),
    ],
)
def test_other_methods_name_the_way_out(folder, method, wanted):
    change_quantization(folder, quant_method=method)
    refused(folder, wanted, NotImplementedError)
