"""The interface of SGLang's first design of MoE LoRA: run_moe_lora beside the base layer."""

from types import SimpleNamespace

import pytest
import torch
from cases import Spec
from checks import assert_close_to_ref

import moelora
from moelora import AdapterPool, MoELayer
from moelora.integrations.sglang import MoELoRABackend
from moelora.reference import fused_experts_lora_ref, naive_fused_experts_lora
from moelora.reference.delta import run_moe_lora_ref

EXPERTS, HIDDEN, INTER, NAMES = 4, 64, 32, ("a", "b")


def make_backend(device, dtype):
    layers = [MoELayer(f"model.layers.{n}.mlp.experts", EXPERTS, HIDDEN, INTER) for n in (1, 3)]
    pool = AdapterPool(layers, 3, 8, dtype=dtype, device=device, w13_slices=1)
    for seed, name in enumerate(NAMES):
        generator = torch.Generator().manual_seed(seed)
        rank = 3 + 5 * seed

        def rand(*shape, generator=generator):
            return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

        state = {
            f"{layer.name}.{projection}.lora_{side}.weight": rand(EXPERTS, *shape)
            for layer in layers
            for projection, wide, tall in (
                ("gate_up_proj", HIDDEN, 2 * INTER),
                ("down_proj", INTER, HIDDEN),
            )
            for side, shape in (("A", (rank, wide)), ("B", (tall, rank)))
        }
        pool.add(name, state, config={"peft_type": "LORA", "r": rank, "lora_alpha": rank / 2})
    return MoELoRABackend(pool)


def forward_batch(lora_ids, lengths=None, tokens=None, device="cpu"):
    tokens = tokens or (sum(lengths) if lengths else len(lora_ids))
    return SimpleNamespace(
        lora_ids=lora_ids,
        input_ids=torch.zeros(tokens, dtype=torch.int64, device=device),
        forward_mode=SimpleNamespace(is_extend=lambda: lengths is not None),
        extend_seq_lens_cpu=lengths,
    )


@pytest.mark.parametrize(
    ("names", "which"),
    [(("experts", "layers.1.experts"), "experts"), (("layers.1.a", "layers.1.b"), "layers.1.b")],
)
def test_layers_without_numbers_of_their_own_are_named(names, which):
    pool = AdapterPool([MoELayer(n, EXPERTS, HIDDEN, INTER) for n in names], 1, 8)
    with pytest.raises(ValueError, match=f"layer '{which}' has no number of its own; give layers="):
        MoELoRABackend(pool)
    assert MoELoRABackend(pool, dict(enumerate(names))).layers == dict(enumerate(names))


def test_prepare_moe_lora_batch(device):
    backend = make_backend(device, torch.bfloat16)
    prepare = backend.prepare_moe_lora_batch

    def mapping(*args, **kwargs):
        return prepare(forward_batch(*args, **kwargs, device=device), 3).weight_indices.tolist()

    assert mapping(["b", None, "a"]) == [1, -1, 0]
    assert mapping(["b", None, "a"], [2, 1, 3]) == [1, 1, -1, 0, 0, 0]
    assert mapping(["b", "a"], tokens=6) == [1, 1, 1, 0, 0, 0]  # drafts to verify
    assert mapping(["b", "a"], [1, 2], tokens=5) == [1, 0, 0, -1, -1]  # a padded graph
    assert prepare(forward_batch([None, None]), 1) is None
    assert prepare(forward_batch(["a"]), 2) is None, "a dense layer"
    with pytest.raises(KeyError, match="no adapter 'c' is loaded"):
        prepare(forward_batch(["c"], device=device), 1)
    with pytest.raises(ValueError, match="5 tokens do not divide among 2 requests"):
        prepare(forward_batch(["a", "b"], tokens=5, device=device), 1)

    batch = forward_batch(["a", "b"], device=device)
    first, third = prepare(batch, 1), prepare(batch, 3)
    assert first.weight_indices.data_ptr() == third.weight_indices.data_ptr(), "made once"
    assert (first.layer, third.layer) == tuple(backend.pool.layers)
    batch.lora_ids = ["b", "a"]
    backend.reset_batch_state()
    assert prepare(batch, 1).weight_indices.tolist() == [1, 0]


def test_backend(device_and_dtype):
    """The sum beside the base layer, and the exact layer, from the same pool and batch."""
    device, dtype = device_and_dtype
    backend = make_backend(device, dtype)
    p = Spec(tokens=11, hidden=HIDDEN, inter=INTER, experts=EXPERTS, mix="absent", dtype=dtype)
    p = p.build()
    there = p.to(device)
    routing = {"topk_weights": there.topk_weights, "topk_ids": there.topk_ids}
    layer = {"hidden_states": there.hidden_states, "w13_weight": there.w13, "w2_weight": there.w2}
    batch = forward_batch(["a", None, "b"], [4, 3, 4], device=device)
    for layer_id in (1, 3):
        info = backend.prepare_moe_lora_batch(batch, layer_id)
        base = backend.fused_experts(**layer, **routing, moe_lora_info=None)
        assert torch.equal(base, moelora.fused_experts_lora(**there.kwargs()))
        output = base.clone()
        got = backend.run_moe_lora(
            there.hidden_states, **routing, moe_lora_info=info, output=output
        )
        assert got.data_ptr() == output.data_ptr()
        on_cpu = [
            t.cpu()
            for t in (
                info.weight_indices,
                info.lora_ranks,
                info.scalings,
                *moelora.moe_lora_buffers(backend.pool, info.layer).values(),
            )
        ]
        arguments = (p.hidden_states, p.topk_ids, p.topk_weights, *on_cpu)
        delta, touched = run_moe_lora_ref(*arguments)
        naive, _ = run_moe_lora_ref(*arguments, dtype=dtype)
        assert touched.tolist() == [True] * 4 + [False] * 3 + [True] * 4
        assert_close_to_ref(output, base.cpu().double() + delta, base.cpu() + naive, dtype)

        exact = backend.fused_experts(**layer, **routing, moe_lora_info=info)
        stacks = {name: stack.cpu() for name, stack in backend.pool.layer(info.layer).items()}
        del stacks["w13_one_a"]  # the reference multiplies by every factor
        mapping = info.weight_indices.cpu().int()
        exact_layer = {**p.kwargs(), **stacks, "token_lora_mapping": mapping}
        exact_layer.pop("w13_one_a", None)  # says how to read them, not what they are
        wanted = fused_experts_lora_ref(**exact_layer)
        assert_close_to_ref(exact, wanted, naive_fused_experts_lora(**exact_layer), dtype)
        assert torch.equal(exact[4:7], base[4:7])
        assert (exact - output).abs().max() > 0.1, "two functions"
