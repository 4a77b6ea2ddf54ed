"""Checkpoints in an AdapterPool: every form against the B A that it stands for, and failures."""

import math

import pytest
import torch
from adapter_cases import (
    CONFIG,
    LAYERS,
    MIXTRAL,
    SIZES,
    WIDE,
    E,
    K,
    N,
    assert_unchanged,
    check,
    make_pool,
    per_expert,
    rand,
    snapshot,
    wrapped,
    write,
)
from checks import largest_allocation

from moelora.adapters import AdapterPool, peek

EXPERTS = "base_model.model.model.layers.0.mlp.experts"

# ---- forms ----


@pytest.mark.parametrize("names", [WIDE, MIXTRAL])
@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("shared_pool", [False, True])
@pytest.mark.parametrize("slices", [1, 2])
def test_shared_outer(tmp_path, names, dims, shared_pool, slices):
    torch.manual_seed(1)
    state, delta = {}, {}
    for name, projection in names.items():
        wide, tall = SIZES[projection]
        of_a, of_b = (E, 1) if projection == "down" else (1, E)
        a, b = rand(of_a, 4, wide), rand(of_b, tall, 4)
        delta[projection] = b.expand(E, -1, -1) @ a.expand(E, -1, -1)
        for side, factor in (("A", a), ("B", b)):
            key = f"{name}.lora_{side}.weight"
            if dims == 3:
                state[f"{EXPERTS}.{key}"] = factor
            elif factor.size(0) == 1:
                state[f"{EXPERTS}.{key}"] = factor[0]
            else:
                state |= {f"{EXPERTS}.{e}.{key}": factor[e] for e in range(E)}
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


def test_experts_left_out_are_zero():
    state, delta = per_expert()
    state = {k: v for k, v in state.items() if ".experts.2." not in k}
    for d in delta.values():
        d[2] = 0
    pool = make_pool()
    pool.add("a", state, config=CONFIG)
    check(pool, "a", delta, 2.0)
    check(pool, "a", {}, 2.0, layer=1)


# ---- scaling and rank ----


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


@pytest.mark.parametrize(("names", "block"), [(WIDE, "mlp"), (MIXTRAL, "block_sparse_moe")])
def test_rank_and_alpha_patterns_of_experts(names, block):
    """By the names of the trained model."""
    up, down = (next(n for n in names if names[n] == own) for own in ("up", "down"))
    state, delta = per_expert(r=4, names=names, block=block)
    small, small_delta = per_expert(r=2, seed=7, names=names, block=block)
    state |= {key: value for key, value in small.items() if f".experts.1.{up}" in key}
    delta["up"][1] = small_delta["up"][1]
    delta["down"][3] *= 3
    config = CONFIG | {
        "rank_pattern": {rf"{block}\.experts\.1\.{up}": 2},
        "alpha_pattern": {rf"experts\.1\.{up}": 4, rf"3\.{down}": 24},
    }
    pool = make_pool()
    pool.add("a", state, config=config)
    check(pool, "a", delta, 2.0)


def test_scaling_of_experts_with_shared_b():
    """Where B is shared the scaling of one expert can only go into its A."""
    torch.manual_seed(0)
    a, b = rand(E, 4, N), rand(K, 4)
    state = {f"{EXPERTS}.{e}.down_proj.lora_A.weight": a[e] for e in range(E)}
    state[f"{EXPERTS}.down_proj.lora_B.weight"] = b
    pool = make_pool(shared_outer=True)
    pool.add("a", state, config=CONFIG | {"alpha_pattern": {r"2\.down_proj": 80}})
    delta = b @ a
    delta[2] *= 10
    check(pool, "a", {"down": delta}, 2.0)


def test_ranks_of_a_and_b_differ():
    state = {f"{EXPERTS}.{e}.up_proj.lora_B.weight": rand(N, 2) for e in range(E)}
    state[f"{EXPERTS}.up_proj.lora_A.weight"] = rand(4, K)
    config = CONFIG | {"rank_pattern": {r"\d\.up_proj": 2}}
    with pytest.raises(ValueError, match=r"experts\.up_proj\.lora_A\.weight has rank 4, .* rank 2"):
        make_pool().add("a", state, config=config)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_of_the_pool(dtype):
    state, _ = wrapped()
    pool = make_pool(dtype=dtype)
    pool.add("a", state, config=CONFIG)
    stacks = pool.layer(LAYERS[0].name)
    a = state[f"{EXPERTS}.lora_A.weight"]
    assert torch.equal(stacks["w2_lora_a"][0, :, :4], a.view(E, 4, N).to(dtype))
    assert float(pool.lora_scalings[0]) == 2.0  # kept apart from the factors when there is one


# ---- what is refused ----


B, ROW = f"{EXPERTS}.lora_B.weight", torch.tensor([0])
WRONG = [  # tensors of a checkpoint by name, or functions of B; None removes one
    ({f"{EXPERTS}.lora_magnitude_vector": rand(K)}, "lora_magnitude_vector is not a LoRA factor"),
    ({"base_model.model.lm_head.weight": rand(2, 2)}, r"lm_head\.weight"),
    ({B.replace("layers.0", "layers.7"): rand(K, E)}, r"layers\.7.* is not .* of an expert"),
    ({f"{EXPERTS}.router.lora_B.weight": rand(K, E)}, r"B\.weight: router of .* is not one of"),
    ({f"{EXPERTS}.9.up_proj.lora_B.weight": rand(N, 4)}, r"9\.up_.*: expert 9 of 4 experts"),
    ({B: rand(K, 3 * E)}, r"experts\.lora_B\.weight: shape is \(16, 12\), wanted \(16, 16\)"),
    ({B: lambda b: b.index_fill(0, ROW, math.nan)}, r"experts\.lora_B\.weight holds NaN or Inf"),
    ({B: lambda b: b.index_fill(0, ROW, -math.inf)}, r"experts\.lora_B\.weight holds NaN"),
    ({B: torch.Tensor.int}, r"lora_B\.weight: dtype is (torch.int32|I32)"),
    ({B: None}, r"experts\.lora_A\.weight has no .*experts\.lora_B\.weight"),
    (dict.fromkeys(wrapped()[0]), "holds no tensors"),
    (per_expert(names={"down_proj": "down"})[0], r"A\.weight and .*0\.down_.* are the same factor"),
    (per_expert(names={"up_proj": "up"})[0], "has factors of gate_up_proj and of only gate or up"),
    ({f"{EXPERTS}{2 * '.base_layer'}.lora_B.weight": rand(K, E)}, r"B\.weight wraps parameter 3"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
@pytest.mark.parametrize("from_folder", [False, True])
def test_bad_checkpoint_names_the_key_and_changes_nothing(tmp_path, change, message, from_folder):
    pool = make_pool(max_loras=1)
    pool.add("good", wrapped(seed=3)[0], config=CONFIG)
    before = snapshot(pool)
    state = wrapped()[0]
    state |= {key: t(state[B]) if callable(t) else t for key, t in change.items()}
    state = {key: tensor for key, tensor in state.items() if tensor is not None}
    with pytest.raises(ValueError, match=message):
        if from_folder:
            pool.add("bad", write(tmp_path / "bad", state))
        else:
            pool.add("bad", state, config=CONFIG)
    assert_unchanged(pool, before)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"use_dora": True}, "use_dora=True is not supported.* rows of the base weights; merge"),
        ({"bias": "all"}, "option bias='all' is not .* biases of .* were trained.* merge"),
        ({"lora_bias": True}, "option lora_bias=True.* more than low-rank products; merge"),
        ({"modules_to_save": ["head"]}, r"modules_to_save=\['head'\].* whole layers were .* merge"),
        ({"trainable_token_indices": [3]}, "_indices=.* rows of the embedding were .* merge"),
        ({"peft_type": None}, "peft_type is None"),
        ({"peft_version": 18}, "peft_version is 18, wanted a string"),
        ({"fan_in_fan_out": True}, "option fan_in_fan_out=True"),
        ({"option_of_the_future": 3}, "option option_of_the_future=3 is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4'"),
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"r": 0}, "rank r is 0"),
        ({"r": "4"}, "rank r is '4'"),
        ({"lora_alpha": math.nan}, "alpha lora_alpha is nan"),
        ({"rank_pattern": {"x": -1}}, "rank x is -1"),
        ({"rank_pattern": {"(": 1}}, r"rank_pattern: key .\(. is no regular expression"),
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
    config = CONFIG | {"use_dora": False, "modules_to_save": None, "option_of_the_future": None}
    config |= {"lora_dropout": 0.1, "init_lora_weights": "gaussian"}
    config |= {"megatron_core": "megatron.core", "task_type": "CAUSAL_LM"}
    make_pool().add("a", write(tmp_path / "a", wrapped()[0], config))


def test_broken_folders(tmp_path):
    pool, folder = make_pool(), write(tmp_path / "a", wrapped()[0])
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    text, cut = config.read_text(), weights.read_bytes()[:-8]
    renamed = folder / "adapters.safetensors"
    absent, wrong = FileNotFoundError, ValueError
    for act, source, error, why in (
        (lambda: None, tmp_path / "nowhere", absent, "is not a folder"),
        (lambda: None, weights, absent, "is not a folder"),
        (lambda: config.write_text("{"), folder, wrong, "adapter 'a': .*_config.json is not JSON"),
        (lambda: config.write_text("[]"), folder, wrong, "is a list, wanted an object"),
        (config.unlink, folder, absent, "holds no adapter_config.json"),
        (lambda: weights.write_bytes(cut), folder, wrong, "model.safetensors cannot be read"),
        (lambda: weights.rename(renamed), folder, absent, "no adapter_.*; it holds adapters"),
    ):
        config.write_text(text)
        act()
        with pytest.raises(error, match=why):
            pool.add("a", source)
    assert len(pool) == 0


# ---- memory ----


def one_large_expert(rank):
    """Factors of one expert, which padding would repeat for all of them."""
    key = f"{EXPERTS}.1.down_proj"
    state = {f"{key}.lora_A.weight": rand(rank, N), f"{key}.lora_B.weight": rand(K, rank)}
    return state, CONFIG | {"r": rank}


@pytest.mark.parametrize("slices", [1, 2])
def test_a_rank_is_refused_before_anything_is_padded_to_it(tmp_path, slices):
    rank = 8192
    folder = write(tmp_path / "a", *one_large_expert(rank))
    pool = make_pool(w13_slices=slices)
    with (
        largest_allocation() as largest,
        pytest.raises(ValueError, match=r"1\.down_proj\.lora_A\.weight has rank 8192, .* is 8"),
    ):
        pool.add("a", folder)
    assert largest.nbytes <= 4 * rank * max(K, N), "one factor, as the file has it"


def test_ranks_side_by_side_are_refused_before_they_are_joined():
    wide = AdapterPool(LAYERS, 1, 2000, dtype=torch.float32, w13_slices=1)
    state = {}
    for name in ("gate_proj", "up_proj"):
        key = f"{EXPERTS}.{name}"
        state |= {f"{key}.lora_A.weight": rand(1500, K), f"{key}.lora_B.weight": rand(N, 1500)}
    with (
        largest_allocation() as largest,
        pytest.raises(ValueError, match=r"gate_up_proj has rank 3000, but max_rank .* is 2000"),
    ):
        wide.add("a", state, config=CONFIG | {"r": 1500})
    assert largest.nbytes <= 4 * 1500 * max(K, N)


def test_peek_says_the_rank_of_what_is_there(tmp_path):
    """Not what the configuration says of modules that the checkpoint has not."""
    config = CONFIG | {"rank_pattern": {"q_proj": 1 << 20, "3.w1": 1 << 19}}
    assert peek(write(tmp_path / "a", per_expert()[0], config), LAYERS).max_rank == 4
    with pytest.raises(ValueError, match=r"shape is .*, wanted \(1048576, "):
        peek(write(tmp_path / "b", per_expert()[0], CONFIG | {"r": 1 << 20}), LAYERS)


# ---- files ----


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_links_out_of_the_folder(tmp_path, name):
    folder = write(tmp_path / "a", per_expert()[0])
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to("../elsewhere")
    for read in (lambda: make_pool().add("a", folder), lambda: peek(folder, LAYERS)):
        with pytest.raises(ValueError, match=rf"{name} is a link out of the folder, to .*elsewh"):
            read()
