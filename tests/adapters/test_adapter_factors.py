"""Whole adapters read from checkpoints: factors of linear layers, names of trainers, refusals."""

import math

import pytest
import torch
from adapter_cases import CONFIG, rand, write
from linear_cases import (
    EXPERTS,
    GATE,
    HEAD,
    LINEARS,
    PREFIX,
    E,
    I,
    K,
    Q,
    R,
    assert_pair,
    pair,
    read,
)

from moelora.adapters import LinearLayer, MoELayer, peek
from moelora.adapters.keys import canonical, parse

# ---- linear layers and embeddings ----


def test_an_embedding_has_factors_of_its_own_name():
    a, b = rand(R, 20), rand(K, R)
    key = f"{PREFIX}model.embed_tokens.lora_embedding_"
    assert_pair(read({f"{key}A": a, f"{key}B": b}).linears["model.embed_tokens"], (a, b))
    with pytest.raises(ValueError, match=r"embed_tokens is an embedding, wanted lora_embedding_A"):
        read(pair("model.embed_tokens", 20, K)[0])
    with pytest.raises(ValueError, match=r"lm_head is a linear layer, wanted lora_A"):
        read({f"{PREFIX}lm_head.lora_embedding_A": rand(R, K)})


def test_ranks_and_scalings_of_linear_layers():
    state, q = pair(Q, K, 10, r=2)
    more, head = pair(HEAD, K, 20)
    config = CONFIG | {"rank_pattern": {"self_attn.q_proj": 2}, "alpha_pattern": {"lm_head": 24}}
    adapter = read(state | more, config)
    assert_pair(adapter.linears[Q], q, 8 / 2)
    assert_pair(adapter.linears[HEAD], head, 24 / 4)
    adapter = read(state | more, config | {"use_rslora": True})
    assert_pair(adapter.linears[Q], q, 8 / math.sqrt(2))


def test_patterns_are_matched_with_names_of_training():
    """As the trained model had them, wrappers included, and without these."""
    prefix = f"{PREFIX}_orig_mod."
    for key in ("_orig_mod.model.layers.0.self_attn.q_proj", "^model.layers.0.self_attn.q_proj"):
        state, q = pair(Q, K, 10, prefix=prefix)
        adapter = read(state, CONFIG | {"alpha_pattern": {key: 40}})
        assert_pair(adapter.linears[Q], q, 10.0)


def test_a_router_is_a_parameter_to_peft():
    """Its factors have the module's name, its patterns the parameter's."""
    state, gate = pair(GATE, K, E)
    config = CONFIG | {"target_parameters": ["mlp.gate.weight"]}
    config |= {"alpha_pattern": {r".*\.gate\.weight": 12}}
    assert_pair(read(state, config).linears[GATE], gate, 3.0)


def test_dtypes_of_a_pair_may_differ():
    state, (a, b) = pair(Q, K, 10)
    state[f"{PREFIX}{Q}.lora_A.weight"] = a.bfloat16()
    got = read(state).linears[Q]
    assert got.a.dtype == got.b.dtype == torch.float32
    assert torch.equal(got.a, a.bfloat16().float())


def test_peek_has_the_rank_of_every_linear_layer(tmp_path):
    state, _ = pair(Q, K, 10)
    more, _ = pair(HEAD, K, 20, r=2)
    folder = write(tmp_path / "a", state | more, CONFIG | {"rank_pattern": {"lm_head": 2}})
    info = peek(folder, EXPERTS, LINEARS)
    assert info.linear_ranks == {Q: 4, HEAD: 2}
    assert info.max_rank == 0


# ---- names ----


@pytest.mark.parametrize(
    "key",
    [
        f"{PREFIX}{Q}.lora_A.weight",
        f"{Q}.lora_A.weight",
        f"{PREFIX}{Q}.lora_A.default.weight",
        f"{PREFIX}{Q}.lora_A.my-adapter.weight",
        f"{PREFIX}{Q}.lora_A",
        f"{PREFIX}{Q}.lora_A.default",
        f"_orig_mod.{PREFIX}{Q}.lora_A.weight",
        f"module.{PREFIX}{Q}.lora_A.weight",
        f"module._orig_mod.base_model._fsdp_wrapped_module.model.module.{Q}.lora_A.weight",
        f"{PREFIX}model.layers._checkpoint_wrapped_module.0._fsdp_wrapped_module."
        "_checkpoint_wrapped_module.self_attn.q_proj._orig_mod.lora_A.weight",
        f"{PREFIX}{Q}.module.module.lora_A.weight",
    ],
)
def test_what_is_taken_off_a_name(key):
    parsed = parse(key)
    assert parsed.module == Q
    assert (parsed.side, parsed.embedding) == ("A", False)
    a, b = rand(R, K), rand(10, R)
    assert_pair(read({key: a, key.replace("lora_A", "lora_B"): b}).linears[Q], (a, b))


@pytest.mark.parametrize(
    ("trained", "served"),
    [
        ("model.language_model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj"),
        ("model.layers.0.self_attn.q_proj", "model.language_model.layers.0.self_attn.q_proj"),
        ("language_model.model.layers.0.mlp.gate", "model.language_model.layers.0.mlp.gate"),
        ("language_model.lm_head", "lm_head"),
        ("thinker.model.layers.0.mlp.gate", "model.layers.0.mlp.gate"),
        ("backbone.layers.0.mixer.in_proj", "model.layers.0.mixer.in_proj"),
        ("model.layers.0.block_sparse_moe.gate", "model.layers.0.mlp.gate"),
        ("model.layers.0.block_sparse_moe.gate", "model.layers.0.mlp.router"),
        ("model.layers.0.mlp.gate", "model.layers.0.mlp.router"),
        ("model.layers.0.block_sparse_moe.router.layer", "model.layers.0.block_sparse_moe.router"),
        ("model.layers.0.mlp.router.gate", "model.layers.0.mlp.gate"),
        ("model.layers.0.mlp.router.linear", "model.layers.0.mlp.router"),
        ("model.layers.0.moe.gate", "model.layers.0.mlp.gate"),
        ("model.layers.0.share_expert.up_proj", "model.layers.0.mlp.shared_experts.up_proj"),
        ("model.layers.0.mlp.shared_mlp.w2", "model.layers.0.mlp.shared_experts.down_proj"),
        ("layers.0.ffn.shared_experts.w1", "model.layers.0.mlp.shared_experts.gate_proj"),
        ("layers.0.attn.wq_a", "model.layers.0.self_attn.q_a_proj"),
        ("model.layers.0.attn.q_proj", "model.layers.0.self_attn.q_proj"),
        ("model.layers.0.attention.o_proj", "model.layers.0.self_attn.o_proj"),
        ("model.unembed_tokens", "lm_head"),
        ("model.llm.layers.0.attn.wq_du", "model.language_model.layers.0.self_attn.q_proj"),
    ],
)
def test_other_names_of_a_module(trained, served):
    assert canonical(trained) == canonical(served)
    state, factors = pair(trained, 5, 7)
    linears = [LinearLayer(served, 5, 7), LinearLayer("model.layers.9.self_attn.k_proj", 5, 7)]
    assert_pair(read(state, linears=linears).linears[served], factors)


BESIDE = "model.layers.0.experts"


@pytest.mark.parametrize(
    ("trained", "served"),
    [
        ("model.layers.0.mlp.experts", "model.language_model.layers.0.mlp.experts"),
        ("model.language_model.layers.0.mlp.experts", "model.layers.0.mlp.experts"),
        ("model.layers.0.block_sparse_moe.experts", "model.layers.0.mlp.experts"),
        ("model.layers.0.mlp.experts", "model.layers.0.block_sparse_moe.experts"),
        ("thinker.model.layers.0.mlp.experts", "model.layers.0.mlp.experts"),
        # Gemma-4's are beside the MLP in transformers, in or below a block of their own elsewhere.
        *((f"model.layers.0.{block}.experts", BESIDE) for block in ("moe", "mlp", "feed_forward")),
        ("model.layers.0.moe", BESIDE),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_other_names_of_experts(trained, served, wrapped):
    layer = MoELayer(served, E, K, I)
    key = f"{PREFIX}{trained}"
    if wrapped or trained == "model.layers.0.moe":  # whose own parameters are wrapped
        wrapped, a, b = True, rand(E * R, I), rand(K, R * E)
        wanted = a.view(E, R, I)
    else:
        key, a, b = f"{key}.down_proj", rand(E, R, I), rand(E, K, R)
        wanted = a
    target = f"{trained.split('.', 1)[1]}.down_proj"
    config = CONFIG | {"target_parameters": [target]} if wrapped else CONFIG
    state = {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
    adapter = read(state, config, [layer], ())
    assert torch.equal(adapter.experts[layer.name]["down"].a, wanted)


def test_a_name_of_two_modules_is_none():
    """A text model and a tower with layers of one name: only the exact name will do."""
    names = ["model.language_model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj"]
    linears = [LinearLayer(name, K, 10) for name in names]
    state, factors = pair(names[1], K, 10)
    assert_pair(read(state, linears=linears).linears[names[1]], factors)
    state, _ = pair("thinker.model.layers.0.self_attn.q_proj", K, 10)
    with pytest.raises(ValueError, match=r"thinker.* is not a LoRA factor of a layer of this"):
        read(state, linears=linears)


def test_adapters_in_one_file():
    state, _ = pair(Q, K, 10)
    renamed = {k.replace(".weight", f".{n}.weight"): v for k, v in state.items() for n in "ab"}
    with pytest.raises(ValueError, match="are of different adapters, wanted one of them"):
        read(renamed)


# ---- layers that join others ----


def test_halves_of_an_mlp():
    """MiniMax-M3 has gate and up in one layer."""
    linear = LinearLayer("model.layers.0.mlp.gate_up_proj", K, 2 * I)
    gate_state, (a1, b1) = pair("model.layers.0.mlp.gate_proj", K, I)
    up_state, (a2, b2) = pair("model.layers.0.mlp.up_proj", K, I, r=2)
    config = CONFIG | {"rank_pattern": {"up_proj": 2}, "alpha_pattern": {"up_proj": 6}}
    got = read(gate_state | up_state, config, linears=[linear]).linears[linear.name]
    wanted = torch.cat([2.0 * b1 @ a1, 3.0 * b2 @ a2])
    torch.testing.assert_close(got.scaling * got.b @ got.a, wanted)
    assert got.rank == 6
    got = read(up_state, config, linears=[linear]).linears[linear.name]
    torch.testing.assert_close(got.scaling * got.b @ got.a, torch.cat([0 * wanted[:I], wanted[I:]]))


def test_parts_of_linear_attention():
    """Qwen3.5's `in_proj_qkv` is trained in three parts by Tinker."""
    linear = LinearLayer("model.layers.0.linear_attn.in_proj_qkv", K, 10)
    state, products = {}, []
    for name, rows in (("q", 3), ("k", 3), ("v", 4)):
        more, (a, b) = pair(f"model.layers.0.linear_attn.in_proj_{name}", K, rows)
        state |= more
        products.append(2.0 * b @ a)
    got = read(state, linears=[linear]).linears[linear.name]
    assert got.scaling == 2.0
    torch.testing.assert_close(2.0 * got.b @ got.a, torch.cat(products))
    missing = {k: v for k, v in state.items() if "in_proj_k" not in k}
    with pytest.raises(ValueError, match=r"joins .* but \['in_proj_k'\] have no factors"):
        read(missing, linears=[linear])
    with pytest.raises(ValueError, match=r"have \[3, 3, 4\] rows, wanted 11 together"):
        read(state, linears=[LinearLayer(linear.name, K, 11)])
    whole, _ = pair(linear.name, K, 10)
    with pytest.raises(ValueError, match=r"in_proj_qkv.* are the same factor"):
        read(state | whole, linears=[linear])


def test_the_start_of_a_layer():
    """Nemotron's Mamba layers: gate and x come first in `in_proj`."""
    linear = LinearLayer("model.layers.0.mixer.in_proj", K, 10)
    gate_state, (a1, b1) = pair("backbone.layers.0.mixer.gate_proj", K, 3)
    x_state, (a2, b2) = pair("backbone.layers.0.mixer.x_proj", K, 4)
    got = read(gate_state | x_state, linears=[linear]).linears[linear.name]
    wanted = torch.cat([2.0 * b1 @ a1, 2.0 * b2 @ a2, torch.zeros(3, K)])
    torch.testing.assert_close(2.0 * got.b @ got.a, wanted)


# ---- experts ----


def test_experts_without_a_gate_in_tinkers_names():
    layer = MoELayer("model.layers.0.mixer.experts", E, K, I, gated=False)
    key = f"{PREFIX}backbone.layers.0.mixer.experts"
    up, down = (rand(1, R, K), rand(E, I, R)), (rand(E, R, I), rand(1, K, R))
    state = {}
    for name, (a, b) in (("w1", up), ("w2", down), ("w3", (rand(0, R, K), rand(0, I, R)))):
        state |= {f"{key}.{name}.lora_A.weight": a, f"{key}.{name}.lora_B.weight": b}
    adapter = read(state, {"r": R, "lora_alpha": 8}, [layer], ())
    assert set(adapter.experts[layer.name]) == {"up", "down"}
    assert torch.equal(adapter.experts[layer.name]["up"].b, up[1])
    with pytest.raises(ValueError, match=r"have no gate, wanted an empty tensor"):
        read(state | {f"{key}.w3.lora_A.weight": rand(E, R, K)}, CONFIG, [layer], ())


def test_stacks_in_modules_of_their_own():
    """Aria's experts were modules fc1 and fc2."""
    key = f"{PREFIX}{EXPERTS[0].name}.fc2"
    a, b = rand(E * R, I), rand(K, R * E)
    config = CONFIG | {"target_parameters": ["fc2.weight"], "alpha_pattern": {r"fc2\.weight": 4}}
    state = {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
    got = read(state, config).experts[EXPERTS[0].name]["down"]
    assert got.scalings == [1.0]
    assert torch.equal(got.b[1], b[:, 1::E])


# ---- columns of lora_B ----

WRAPPED = f"{PREFIX}{EXPERTS[0].name}"
PARAMETERS = {"target_parameters": ["experts.down_proj"]}
UNMARKED = CONFIG | PARAMETERS | {"auto_mapping": {"unsloth_fixed": True}}
BRIDGES = CONFIG | PARAMETERS | dict.fromkeys(("fan_in_fan_out", "use_dora"), False)
BRIDGES |= {"auto_mapping": None, "task_type": "CAUSAL_LM", "inference_mode": True}
RANKS, EXPERT = "rank_major", "grouped_by_expert"


def detail(**layouts):
    parameters = {name: {"lora_B_layout": layout} for name, layout in layouts.items()}
    return {"unsloth_fused_expert_lora": {"parameters": parameters}}


def stack():
    """State dict of one stack of experts, and its B."""
    b = rand(K, R * E)
    return {f"{WRAPPED}.lora_A.weight": rand(E * R, I), f"{WRAPPED}.lora_B.weight": b}, b


@pytest.mark.parametrize(
    ("config", "layout", "order"),
    [
        (CONFIG | PARAMETERS, None, RANKS),
        (CONFIG | PARAMETERS, EXPERT, EXPERT),
        (CONFIG | PARAMETERS | {"lora_B_layout": RANKS}, None, RANKS),
        (CONFIG | PARAMETERS | {"lora_B_layout": EXPERT}, None, EXPERT),
        (CONFIG | PARAMETERS | {"auto_mapping": {"lora_B_layout": EXPERT}}, None, EXPERT),
        (UNMARKED, RANKS, RANKS),
        (UNMARKED, EXPERT, EXPERT),
        (UNMARKED | {"lora_B_layout": RANKS}, None, RANKS),
        (UNMARKED | detail(down_proj=EXPERT, gate_up_proj=RANKS), None, EXPERT),
        (UNMARKED | detail(down_proj=RANKS), None, RANKS),
        (BRIDGES, EXPERT, EXPERT),
        (BRIDGES | {"layers_to_transform": None}, None, RANKS),
        (BRIDGES | {"peft_version": "0.21.2"}, None, RANKS),
    ],
)
def test_order_of_columns(config, layout, order):
    state, b = stack()
    got = read(state, config, layout=layout).experts[EXPERTS[0].name]["down"].b
    for expert in range(E):
        wanted = b[:, expert::E] if order == RANKS else b[:, expert * R : (expert + 1) * R]
        assert torch.equal(got[expert], wanted)


OTHER = {"unsloth_fused_expert_lora": {"lora_A_layout": "other"}}


@pytest.mark.parametrize(
    ("config", "layout", "message"),
    [
        (UNMARKED, None, r"lora_A\.weight: Unsloth wrote the adapter before .* pass layout="),
        (BRIDGES, None, r"like those of Megatron-Bridge.* pass layout="),
        (UNMARKED | {"lora_B_layout": RANKS}, EXPERT, "_expert', but the configuration says 'rank"),
        (CONFIG, "other", r"layout is 'other', wanted one of \['rank_major'"),
        (CONFIG | {"lora_B_layout": "mixed"}, None, "lora_B_layout is 'mixed', wanted one of"),
        (CONFIG | detail(down_proj="mixed"), None, "down_proj.lora_B_layout is 'mixed'"),
        (CONFIG | {"unsloth_fused_expert_lora": 3}, None, "expert_lora is 3, which is not"),
        (CONFIG | OTHER, None, "is not understood"),
    ],
)
def test_order_of_columns_is_never_guessed(config, layout, message):
    with pytest.raises(ValueError, match=message):
        read(stack()[0], config, layout=layout)


def test_other_factors_of_unmarked_adapters_are_read():
    """Only stacks of experts have columns that may lie in two orders."""
    state, q = pair(Q, K, 10)
    assert_pair(read(state, UNMARKED).linears[Q], q)


# ---- what is refused ----


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision.q_proj.lora_A.weight": rand(4, K)}, "vision.q_proj.lora_A.weight is not a LoRA"),
        ({f"{PREFIX}{Q}.lora_magnitude_vector": rand(10)}, r"DoRA \(use_dora\) is not supported"),
        ({f"{PREFIX}{Q}.lora_B.bias": rand(10)}, "trained biases are not supported"),
        ({f"{HEAD}.token_adapter.trainable_tokens_delta": rand(2, K)}, "trainable_token_indices"),
        ({f"{PREFIX}score.modules_to_save.default.weight": rand(2, K)}, "trained whole"),
        ({f"{PREFIX}model.norm.weight": rand(K)}, "norm.weight is not a LoRA factor: it is the"),
        ({f"{PREFIX}{Q}.lora_A.weight": rand(4, K + 1)}, r"shape is \(4, 9\), wanted \(4, 8\)"),
        ({f"{PREFIX}{Q}.lora_A.weight": rand(4, K).int()}, "dtype is torch.int32"),
        ({f"{PREFIX}{Q}.lora_A.weight": rand(4, K) / 0}, "holds NaN or Inf"),
        ({f"{PREFIX}{HEAD}.lora_A.weight": rand(4, K)}, r"lora_A.weight has no .*lora_B.weight"),
        ({f"{Q}.lora_A.weight": rand(4, K)}, "are the same factor"),
    ],
)
def test_what_is_no_whole_adapter_is_named(change, message):
    state, _ = pair(Q, K, 10)
    with pytest.raises(ValueError, match=message):
        read(state | change)
