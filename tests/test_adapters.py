"""AdapterPool: every checkpoint form against the product B A that it stands for, and failures."""

import json
import math
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moelora.adapters import AdapterPool, MoELayer, peek

E, K, N = 4, 16, 24
LAYERS = [MoELayer(f"model.layers.{n}.mlp.experts", E, K, N) for n in range(2)]
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
SIZES = {"gate": (K, N), "up": (K, N), "down": (N, K), "gate_up": (K, 2 * N)}
WIDE = {"gate_up_proj": "gate_up", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
MIXTRAL = {"w1": "gate", "w3": "up", "w2": "down"}


def rand(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype)


def per_expert(layer=0, names=WIDE, r=4, block="mlp", seed=0):
    """State dict of one pair per expert, and delta[projection][e] = B A without scaling."""
    torch.manual_seed(seed)
    state, delta = {}, {}
    for name, projection in names.items():
        if projection == "gate_up":
            continue
        wide, tall = SIZES[projection]
        delta[projection] = []
        for e in range(E):
            a, b = rand(r, wide), rand(tall, r)
            key = f"base_model.model.model.layers.{layer}.{block}.experts.{e}.{name}"
            state |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
            delta[projection].append(b @ a)
    return state, {p: torch.stack(d) for p, d in delta.items()}


def wrapped(layer=0, r=4, r_down=None, seed=0):
    """State dict in PEFT's `target_parameters` form."""
    torch.manual_seed(seed)
    r_down = r_down or r
    key = f"base_model.model.model.layers.{layer}.mlp.experts"
    state, delta = {}, {}
    for prefix, projection, rank in (
        (f"{key}.base_layer", "gate_up", r),
        (key, "down", r_down),
    ):
        wide, tall = SIZES[projection]
        a, b = rand(E * rank, wide), rand(tall, rank * E)
        state |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
        delta[projection] = torch.stack(
            [b[:, e::E] @ a[e * rank : (e + 1) * rank] for e in range(E)]
        )
    delta["gate"], delta["up"] = delta.pop("gate_up").chunk(2, dim=1)
    return state, delta


def delta_of(pool, name, layer=0):
    """What the pool will add to the weights: s B A per projection and expert."""
    slot = pool.lookup(name)
    rank = int(pool.lora_ranks[slot])
    scale = float(pool.lora_scalings[slot])
    stacks = pool.layer(LAYERS[layer].name)

    def product(a, b):
        a, b = a[slot].expand(E, -1, -1), b[slot].expand(E, -1, -1)
        # Beyond its rank an adapter must not have anything.
        assert not a[:, rank:].any() and not b[:, :, rank:].any()
        return scale * b.float() @ a.float()

    a, b = stacks["w13_lora_a"], stacks["w13_lora_b"]
    if isinstance(a, torch.Tensor):
        gate, up = product(a, b).chunk(2, dim=1)
    else:
        gate, up = (product(x, y) for x, y in zip(a, b, strict=True))
    down = product(stacks["w2_lora_a"], stacks["w2_lora_b"])
    return {"gate": gate, "up": up, "down": down}


def check(pool, name, delta, scaling, layer=0):
    got = delta_of(pool, name, layer)
    for projection in ("gate", "up", "down"):
        wanted = torch.zeros_like(got[projection])
        if projection in delta:
            wanted = scaling * delta[projection]
        torch.testing.assert_close(got[projection], wanted, rtol=1e-5, atol=1e-5)


def make_pool(max_loras=3, max_rank=8, dtype=torch.float32, **options):
    return AdapterPool(LAYERS, max_loras, max_rank, dtype=dtype, **options)


def write(folder: Path, state, config=CONFIG):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({k: v.clone() for k, v in state.items()}, folder / "adapter_model.safetensors")
    return folder


def snapshot(pool):
    return [t.clone() for t in pool._tensors()], pool.names()


def assert_unchanged(pool, before):
    tensors, names = before
    assert pool.names() == names
    for old, new in zip(tensors, pool._tensors(), strict=True):
        assert torch.equal(old, new)


# ---- forms ----


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("form", ["per_expert", "mixtral", "wrapped"])
def test_forms(tmp_path, form, slices):
    if form == "mixtral":
        state, delta = per_expert(names=MIXTRAL, block="block_sparse_moe")
    else:
        state, delta = {"per_expert": per_expert, "wrapped": wrapped}[form]()
    pool = make_pool(w13_slices=slices)
    assert pool.add("a", write(tmp_path / "a", state)) == 0
    check(pool, "a", delta, 2.0)
    check(pool, "a", {}, 1.0, layer=1)  # a layer that the adapter leaves alone


@pytest.mark.parametrize("interleaved", [False, True])
def test_split_checkpoint_in_one_slice(interleaved):
    layer = MoELayer(LAYERS[0].name, E, K, N, interleaved=interleaved)
    pool = AdapterPool([layer], 1, 8, dtype=torch.float32, w13_slices=1)
    state, delta = per_expert()
    pool.add("a", state, config=CONFIG)
    stacks = pool.layer(layer.name)
    got = 2.0 * stacks["w13_lora_b"][0] @ stacks["w13_lora_a"][0]
    wanted = torch.cat([delta["gate"], delta["up"]], dim=1)
    if interleaved:
        wanted = torch.stack([delta["gate"], delta["up"]], dim=2).flatten(1, 2)
    torch.testing.assert_close(got, 2.0 * wanted, rtol=1e-5, atol=1e-5)
    assert pool.lora_ranks.tolist() == [8]


def test_layer_without_gate():
    layer = MoELayer("backbone.layers.1.mixer.experts", E, K, N, gated=False)
    pool = AdapterPool([layer], 1, 4, dtype=torch.float32)
    torch.manual_seed(0)
    a, b = rand(E * 4, K), rand(N, 4 * E)
    key = f"base_model.model.{layer.name}"
    state = {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
    config = CONFIG | {"target_parameters": ["experts.up_proj"]}
    pool.add("a", state, config=config)
    stacks = pool.layer(layer.name)
    got = stacks["w13_lora_b"][0, :, :, :4] @ stacks["w13_lora_a"][0, :, :4]
    wanted = torch.stack([b[:, e::E] @ a[e * 4 : e * 4 + 4] for e in range(E)])
    torch.testing.assert_close(got, wanted)
    assert not stacks["w2_lora_a"].any()
    with pytest.raises(ValueError, match=r"gate_proj of .*mixer.experts is not one of"):
        pool.add("b", {f"{key}.0.gate_proj.lora_A.weight": rand(4, K)}, config=CONFIG)


@pytest.mark.parametrize("names", [WIDE, MIXTRAL])
@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("shared_pool", [False, True])
@pytest.mark.parametrize("slices", [1, 2])
def test_shared_outer(tmp_path, names, dims, shared_pool, slices):
    torch.manual_seed(1)
    state, delta = {}, {}
    for name, projection in names.items():
        if projection == "gate_up":
            continue
        wide, tall = SIZES[projection]
        key = f"base_model.model.model.layers.0.mlp.experts.{name}"
        a, b = rand(E, 4, wide), rand(E, tall, 4)
        if projection == "down":
            b = b[:1]
        else:
            a = a[:1]
        delta[projection] = b.expand(E, -1, -1) @ a.expand(E, -1, -1)
        for side, factor in (("A", a), ("B", b)):
            if factor.size(0) == 1:
                state[f"{key}.lora_{side}.weight"] = factor[0] if dims == 2 else factor
            elif dims == 3:
                state[f"{key}.lora_{side}.weight"] = factor
            else:
                for e in range(E):
                    inner = key.replace(f".{name}", f".{e}.{name}")
                    state[f"{inner}.lora_{side}.weight"] = factor[e]
    folder = write(tmp_path / "a", state)
    assert peek(folder, LAYERS).shared_outer
    pool = make_pool(shared_outer=shared_pool, w13_slices=slices)
    pool.add("a", folder)
    check(pool, "a", delta, 2.0)
    if shared_pool:
        assert pool.memory_bytes() < make_pool(w13_slices=slices).memory_bytes()
        state, _ = per_expert()
        with pytest.raises(ValueError, match="lora_A of .* differs between experts"):
            pool.add("b", state, config=CONFIG)


def test_stacked_gate_up():
    torch.manual_seed(0)
    key = "model.layers.1.mlp.experts.gate_up_proj"
    a, b = rand(E, 4, K), rand(E, 2 * N, 4)
    pool = make_pool()
    pool.add("a", {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}, config=CONFIG)
    gate, up = (b @ a).chunk(2, dim=1)
    check(pool, "a", {"gate": gate, "up": up}, 2.0, layer=1)


@pytest.mark.parametrize("parameter", ["gate_up_proj", "down_proj"])
def test_one_target_parameter_decides_what_the_key_means(parameter):
    """Both parameters of a layer with 2I == K, N == K would fit: only the configuration tells."""
    square = MoELayer("m.experts", E, 8, 8)
    pool = AdapterPool([square], 1, 4, dtype=torch.float32)
    projection = WIDE[parameter]
    tall = square.shape(projection)[1]
    a, b = rand(E * 4, 8), rand(tall, 4 * E)
    state = {"m.experts.lora_A.weight": a, "m.experts.lora_B.weight": b}
    pool.add("a", state, config=CONFIG | {"target_parameters": [f"experts.{parameter}"]})
    stacks = pool.layer("m.experts")
    filled = stacks["w2_lora_a"].any().item()
    assert filled == (parameter == "down_proj")
    assert stacks["w13_lora_a"][0].any().item() != filled


def test_experts_left_out_are_zero():
    state, delta = per_expert()
    state = {k: v for k, v in state.items() if ".experts.2." not in k}
    for d in delta.values():
        d[2] = 0
    pool = make_pool()
    pool.add("a", state, config=CONFIG)
    check(pool, "a", delta, 2.0)


# ---- scaling and rank ----


def test_rslora():
    state, delta = wrapped()
    pool = make_pool()
    pool.add("a", state, config=CONFIG | {"use_rslora": True})
    check(pool, "a", delta, 8 / math.sqrt(4))
    assert float(pool.lora_scalings[0]) == 4.0  # kept apart from the factors when there is one


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("slices", [1, 2])
def test_rank_and_alpha_patterns_of_parameters(rslora, slices):
    state, delta = wrapped(r=4, r_down=2)
    config = CONFIG | {
        "use_rslora": rslora,
        "rank_pattern": {"experts.down_proj": 2},
        "alpha_pattern": {r"layers\.0\.mlp\.experts\.gate_up_proj": 20},
    }
    pool = make_pool(w13_slices=slices)
    pool.add("a", state, config=config)
    root = math.sqrt if rslora else float
    delta["gate"] *= 20 / root(4)
    delta["up"] *= 20 / root(4)
    delta["down"] *= 8 / root(2)
    check(pool, "a", delta, 1.0)
    assert pool.lora_ranks[0] == 4


def test_rank_and_alpha_patterns_of_experts():
    state, delta = per_expert(r=4)
    small, small_delta = per_expert(r=2, seed=7)
    for key, value in small.items():
        if ".experts.1.up_proj" in key:
            state[key] = value
    delta["up"][1] = small_delta["up"][1]
    delta["down"][3] *= 3
    config = CONFIG | {
        "rank_pattern": {r"experts\.1\.up_proj": 2},
        "alpha_pattern": {r"experts\.1\.up_proj": 4, r"3\.down_proj": 24},
    }
    pool = make_pool()
    pool.add("a", state, config=config)
    check(pool, "a", delta, 2.0)


def test_patterns_of_old_mixtral_names():
    state, delta = per_expert(names=MIXTRAL, block="block_sparse_moe")
    config = CONFIG | {"alpha_pattern": {r"block_sparse_moe\.experts\.\d+\.w2": 16}}
    pool = make_pool()
    pool.add("a", state, config=config)
    delta["down"] *= 2
    check(pool, "a", delta, 2.0)


def test_scaling_of_experts_with_shared_b():
    """Where B is shared the scaling of one expert can only go into its A."""
    torch.manual_seed(0)
    key = "model.layers.0.mlp.experts"
    a, b = rand(E, 4, N), rand(K, 4)
    state = {f"{key}.{e}.down_proj.lora_A.weight": a[e] for e in range(E)}
    state[f"{key}.down_proj.lora_B.weight"] = b
    pool = make_pool(shared_outer=True)
    pool.add("a", state, config=CONFIG | {"alpha_pattern": {r"2\.down_proj": 80}})
    delta = b @ a
    delta[2] *= 10
    check(pool, "a", {"down": delta}, 2.0)


def test_ranks_of_a_and_b_differ():
    key = "model.layers.0.mlp.experts"
    state = {f"{key}.{e}.up_proj.lora_B.weight": rand(N, 2) for e in range(E)}
    state[f"{key}.up_proj.lora_A.weight"] = rand(4, K)
    config = CONFIG | {"rank_pattern": {r"\d\.up_proj": 2}}
    with pytest.raises(ValueError, match=r"experts\.up_proj\.lora_A\.weight has rank 4, .* rank 2"):
        make_pool().add("a", state, config=config)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_of_the_pool(dtype):
    state, _ = wrapped()
    pool = make_pool(dtype=dtype)
    pool.add("a", state, config=CONFIG)
    stacks = pool.layer(LAYERS[0].name)
    a = state["base_model.model.model.layers.0.mlp.experts.lora_A.weight"]
    assert torch.equal(stacks["w2_lora_a"][0, :, :4], a.view(E, 4, N).to(dtype))


# ---- what is refused ----


def broken(change):
    state, _ = wrapped()
    key = "base_model.model.model.layers.0.mlp.experts.lora_B.weight"
    change(state, key)
    return state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s, k: s.update(
                {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": rand(4, K)}
            ),
            r"layers\.0\.self_attn\.q_proj\.lora_A\.weight is not a LoRA factor of an expert",
        ),
        (
            lambda s, k: s.update({k.replace("lora_B.weight", "lora_magnitude_vector"): rand(K)}),
            r"lora_magnitude_vector is not a LoRA factor",
        ),
        (
            lambda s, k: s.update({"base_model.model.lm_head.weight": rand(2, 2)}),
            r"lm_head\.weight",
        ),
        (
            lambda s, k: s.update({k.replace("layers.0", "layers.7"): s[k]}),
            r"layers\.7\.mlp\.experts\.lora_B\.weight is not a LoRA factor",
        ),
        (
            lambda s, k: s.update({k.replace("experts.", "experts.router."): s[k]}),
            r"experts\.router\.lora_B\.weight: router of .* is not one of",
        ),
        (
            lambda s, k: s.update({k.replace("experts.", "experts.9.up_proj."): rand(N, 4)}),
            r"9\.up_proj\.lora_B\.weight: expert 9 of 4 experts",
        ),
        (
            lambda s, k: s.update({k: rand(K, 3 * E)}),
            r"experts\.lora_B\.weight: shape is \(16, 12\), wanted \(16, 16\)",
        ),
        (
            lambda s, k: s[k].view(-1)[3:4].fill_(math.nan),
            r"experts\.lora_B\.weight holds NaN or Inf",
        ),
        (lambda s, k: s[k].view(-1)[3:4].fill_(-math.inf), r"experts\.lora_B\.weight holds NaN"),
        (lambda s, k: s.update({k: s[k].int()}), r"lora_B\.weight: dtype is torch.int32"),
        (lambda s, k: s.pop(k), r"experts\.lora_A\.weight has no .*experts\.lora_B\.weight"),
        (lambda s, k: s.clear(), "holds no tensors"),
        (
            lambda s, k: s.update(per_expert(names={"down_proj": "down"})[0]),
            r"experts\.lora_A\.weight and .*0\.down_proj\.lora_A\.weight are the same factor",
        ),
        (
            lambda s, k: s.update(per_expert(names={"up_proj": "up"})[0]),
            r"has factors of gate_up_proj and of gate or up alone",
        ),
        (
            lambda s, k: s.update({k.replace("experts.", "experts.base_layer.base_layer."): s[k]}),
            r"base_layer\.base_layer\.lora_B\.weight wraps parameter 3",
        ),
    ],
)
@pytest.mark.parametrize("from_folder", [False, True])
def test_bad_checkpoint_names_the_key_and_changes_nothing(tmp_path, change, message, from_folder):
    pool = make_pool(max_loras=1)
    pool.add("good", wrapped(seed=3)[0], config=CONFIG)
    before = snapshot(pool)
    state = broken(change)
    with pytest.raises(ValueError, match=message):
        if from_folder:
            pool.add("bad", write(tmp_path / "bad", state))
        else:
            pool.add("bad", state, config=CONFIG)
    assert_unchanged(pool, before)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"use_dora": True}, "option use_dora=True is not supported"),
        ({"bias": "all"}, "option bias='all' is not supported"),
        ({"lora_bias": True}, "option lora_bias=True"),
        ({"modules_to_save": ["lm_head"]}, r"option modules_to_save=\['lm_head'\]"),
        ({"fan_in_fan_out": True}, "option fan_in_fan_out=True"),
        ({"option_of_the_future": 3}, "option option_of_the_future=3 is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4'"),
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"r": 0}, "rank r is 0"),
        ({"r": "4"}, "rank r is '4'"),
        ({"lora_alpha": math.nan}, "alpha lora_alpha is nan"),
        ({"rank_pattern": {"x": -1}}, "rank x is -1"),
        ({"rank_pattern": {"(": 1}}, "is not a regular expression"),
        ({"rank_pattern": [1]}, "rank_pattern is a list"),
        ({"target_parameters": "experts.down_proj"}, "wanted a list of names"),
        ({"target_parameters": ["experts.down_proj"]}, "wraps parameter 2"),
        ({"r": 16}, r"shape is \(16, 16\), wanted \(64, 16\)"),
    ],
)
def test_bad_config_names_the_option(tmp_path, option, message):
    pool = make_pool()
    with pytest.raises(ValueError, match=message):
        pool.add("a", write(tmp_path / "a", wrapped()[0], CONFIG | option))
    assert len(pool) == 0


def test_options_without_effect_are_accepted(tmp_path):
    config = CONFIG | {
        "use_dora": False,
        "modules_to_save": None,
        "option_of_the_future": None,
        "lora_dropout": 0.1,
        "megatron_core": "megatron.core",
        "init_lora_weights": "gaussian",
        "task_type": "CAUSAL_LM",
    }
    make_pool().add("a", write(tmp_path / "a", wrapped()[0], config))


def test_broken_folders(tmp_path):
    pool = make_pool()
    state = wrapped()[0]
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        pool.add("a", tmp_path / "nowhere")
    folder = write(tmp_path / "a", state)
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        pool.add("a", folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"adapter 'a': .*adapter_config.json is not JSON"):
        pool.add("a", folder)
    (folder / "adapter_config.json").write_text("[]")
    with pytest.raises(ValueError, match="is a list, wanted an object"):
        pool.add("a", folder)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"holds no adapter_config.json"):
        pool.add("a", folder)
    write(folder, state)
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"adapter_model.safetensors cannot be read"):
        pool.add("a", folder)
    weights.unlink()
    torch.save(state, folder / "adapter_model.bin")
    with pytest.raises(FileNotFoundError, match="is a pickle and is never loaded"):
        pool.add("a", folder)
    assert len(pool) == 0


def test_adapter_that_does_not_fit(tmp_path):
    state, _ = wrapped(r=8)
    pool = make_pool(max_rank=7)
    with pytest.raises(ValueError, match=r"gate_proj has rank 8, but max_rank of the pool is 7"):
        pool.add("a", state, config=CONFIG | {"r": 8})
    half = make_pool(dtype=torch.float16)
    key = "base_model.model.model.layers.0.mlp.experts.lora_A.weight"
    state, _ = wrapped()
    state[key][0, 0] = 1e6
    with pytest.raises(ValueError, match=r"lora_A of .*experts.down_proj overflows torch.float16"):
        half.add("a", state, config=CONFIG)
    split, _ = per_expert()
    one = make_pool(max_rank=7, w13_slices=1)
    with pytest.raises(ValueError, match=r"gate_up_proj has rank 8, but max_rank"):
        one.add("a", split, config=CONFIG)


def test_bad_arguments():
    with pytest.raises(ValueError, match="no name twice"):
        AdapterPool([LAYERS[0], LAYERS[0]], 1, 1)
    with pytest.raises(ValueError, match="max_loras is 0"):
        AdapterPool(LAYERS, 0, 1)
    with pytest.raises(ValueError, match="dtype is torch.float64"):
        AdapterPool(LAYERS, 1, 1, dtype=torch.float64)
    with pytest.raises(ValueError, match="w13_slices is 3"):
        AdapterPool(LAYERS, 1, 1, w13_slices=3)
    pool = make_pool()
    with pytest.raises(ValueError, match="name is ''"):
        pool.add("", wrapped()[0], config=CONFIG)
    with pytest.raises(ValueError, match="a state dict needs config="):
        pool.add("a", wrapped()[0])
    with pytest.raises(ValueError, match="config= is for state dicts"):
        pool.add("a", "folder", config=CONFIG)


# ---- serving ----


def add(pool, name, seed=0, **options):
    return pool.add(name, wrapped(seed=seed)[0], config=CONFIG, **options)


def test_hot_add_and_remove():
    pool = make_pool(max_loras=2)
    pointers = [t.data_ptr() for t in pool._tensors()]
    assert [add(pool, "a"), add(pool, "b", 1)] == [0, 1]
    with pytest.raises(ValueError, match="'a' is already loaded"):
        add(pool, "a", 2)
    pool.remove("a")
    assert "a" not in pool and pool.adapter_enabled.tolist() == [False, True]
    assert pool.lora_ranks.tolist() == [0, 4]
    with pytest.raises(KeyError, match=r"no adapter 'a' is loaded; loaded are \['b'\]"):
        pool.lookup("a")
    assert add(pool, "c", 5) == 0
    check(pool, "c", wrapped(seed=5)[1], 2.0)
    check(pool, "b", wrapped(seed=1)[1], 2.0)
    assert add(pool, "b", 6, replace=True) == 1
    check(pool, "b", wrapped(seed=6)[1], 2.0)
    assert pointers == [t.data_ptr() for t in pool._tensors()]


def test_slot_of_larger_adapter_leaves_nothing_behind():
    pool = make_pool(max_loras=1)
    pool.add("large", wrapped(r=8)[0], config=CONFIG | {"r": 8})
    pool.add("small", wrapped(r=4, r_down=2)[0], config=CONFIG | {"rank_pattern": {"down_proj": 2}})
    assert pool.names() == ["small"]
    stacks = pool.layer(LAYERS[0].name)
    assert not stacks["w2_lora_a"][0, :, 2:].any() and not stacks["w2_lora_b"][0, :, :, 2:].any()


def test_least_recently_used_is_evicted():
    pool = make_pool(max_loras=3)
    for seed, name in enumerate("abc"):
        add(pool, name, seed)
    pool.mapping(["a", None, "a"])
    pool.lookup("b")
    assert pool.names() == ["c", "a", "b"]
    assert add(pool, "d", 3) == 2
    assert pool.names() == ["a", "b", "d"]
    pool.pin("a")
    assert add(pool, "e", 4, pin=True) == 1
    assert pool.names() == ["a", "d", "e"]
    pool.pin("d")
    before = snapshot(pool)
    with pytest.raises(RuntimeError, match="no slot for adapter 'f': all 3 are pinned or in use"):
        add(pool, "f", 5)
    assert_unchanged(pool, before)
    pool.pin("a", False)
    assert add(pool, "f", 5) == 0


def test_held_adapters_stay():
    pool = make_pool(max_loras=1)
    add(pool, "a")
    with pool.hold(["a", None, "a"]):
        for act in (
            lambda: pool.remove("a"),
            lambda: add(pool, "b", 1),
            lambda: add(pool, "a", 1, replace=True),
        ):
            with pytest.raises(RuntimeError, match="in use"):
                act()
    with pytest.raises(KeyError), pool.hold(["a", "zzz"]):
        pass
    add(pool, "b", 1)
    assert pool.names() == ["b"]


def test_enable_and_disable():
    pool = make_pool()
    add(pool, "a")
    add(pool, "b", 1)
    pool.disable("a")
    assert pool.adapter_enabled.tolist() == [False, True, False]
    pool.enable("a")
    assert pool.adapter_enabled.tolist() == [True, True, False]
    with pytest.raises(KeyError, match="no adapter 'zzz'"):
        pool.enable("zzz")


def test_mapping():
    pool = make_pool()
    add(pool, "a")
    add(pool, "b", 1)
    got = pool.mapping(["b", None, "a", "b"])
    assert got.dtype == torch.int32 and got.tolist() == [1, -1, 0, 1]
    assert pool.mapping([]).tolist() == []
    out = torch.full((6,), 9, dtype=torch.int32)
    assert pool.mapping(["a", "b"], out=out) is out
    assert out.tolist() == [0, 1, -1, -1, -1, -1]
    with pytest.raises(KeyError, match="no adapter 'c'"):
        pool.mapping(["a", "c"], out=out)
    with pytest.raises(ValueError, match=r"out is torch.int32 \(6,\)"):
        pool.mapping(["a"] * 7, out=out)


def test_memory():
    pool = AdapterPool(LAYERS, 3, 8, dtype=torch.bfloat16)
    factors = 3 * E * 8 * (2 * (K + N) + (N + K)) * 2 * len(LAYERS)
    assert pool.memory_bytes() == factors + 3 * (4 + 4 + 1)
    # The expert dimension of the three outer factors is gone; R is rounded up to 8.
    shared = AdapterPool(LAYERS, 3, 5, dtype=torch.bfloat16, shared_outer=True)
    outer = 3 * (E - 1) * 8 * 3 * K * 2 * len(LAYERS)
    assert shared.memory_bytes() == pool.memory_bytes() - outer


def test_threads():
    """Adapters come and go in four threads; whoever holds one always reads that very adapter."""
    pool = make_pool(max_loras=3)
    states = {f"n{seed}": wrapped(r=2, seed=seed) for seed in range(6)}
    config = CONFIG | {"r": 2, "lora_alpha": 2}
    names = sorted(states)
    errors, verified = [], []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        try:
            for _ in range(40):
                name = names[int(torch.randint(len(names), (1,), generator=generator))]
                try:
                    pool.add(name, states[name][0], config=config)
                except (ValueError, RuntimeError) as error:
                    assert "already loaded" in str(error) or "no slot" in str(error)
                try:
                    with pool.hold([name]):
                        check(pool, name, states[name][1], 1.0)
                        verified.append(name)
                    if seed == 0:
                        pool.remove(name)
                except (KeyError, RuntimeError) as error:
                    assert "no adapter" in str(error) or "in use" in str(error)
        except BaseException as error:  # noqa: BLE001, reported by the main thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert len(verified) > 40 and len(pool) <= 3
