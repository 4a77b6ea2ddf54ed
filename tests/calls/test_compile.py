"""torch.compile(fullgraph=True) gives the same bits as the eager call, static and dynamic."""

import pytest
import torch
from glue_cases import DEVICES, LORAS, E, inputs
from torch._dynamo.testing import CompileCounterWithBackend

import moelora

# Inductor needs a C++ compiler on the CPU, which is not ours to demand; the graph is ours.
BACKEND = "aot_eager"


def same(a, b):
    return torch.equal(a, b)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("adapters", [True, False])
def test_layer(device, adapters):
    given = inputs(device, torch.bfloat16)
    if not adapters:
        names = ("hidden_states", "w13", "w2", "topk_weights", "topk_ids")
        given = {name: given[name] for name in names}

    def layer(**kwargs):
        return moelora.fused_experts_lora(**kwargs).relu()

    compiled = torch.compile(layer, fullgraph=True, backend=BACKEND)
    assert same(compiled(**given), layer(**given))


@pytest.mark.parametrize("device", DEVICES)
def test_layer_writes_into_its_input(device):
    given = inputs(device, torch.bfloat16)
    want = moelora.fused_experts_lora(**given)

    def layer(hidden_states, **kwargs):
        return moelora.fused_experts_lora(hidden_states, **kwargs, out=hidden_states)

    compiled = torch.compile(layer, fullgraph=True, backend=BACKEND)
    got = compiled(**given)
    assert same(got, want)
    assert same(given["hidden_states"], want)


@pytest.mark.parametrize("device", DEVICES)
def test_dynamic_number_of_tokens(device):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(BACKEND)
    compiled = torch.compile(
        moelora.fused_experts_lora, fullgraph=True, backend=counter, dynamic=True
    )
    for tokens in (6, 9, 17):
        given = inputs(device, torch.bfloat16, tokens)
        assert same(compiled(**given), moelora.fused_experts_lora(**given))
    assert counter.frame_count == 1


@pytest.mark.parametrize("device", DEVICES)
def test_packed_weights(device):
    given = inputs(device, torch.bfloat16)
    given["w13"] = moelora.prepack_weights(given["w13"])
    given["w2"] = moelora.prepack_weights(given["w2"])
    compiled = torch.compile(moelora.fused_experts_lora, fullgraph=True, backend=BACKEND)
    assert same(compiled(**given), moelora.fused_experts_lora(**given))


@pytest.mark.parametrize("device", DEVICES)
def test_gemm(device):
    given = inputs(device, torch.bfloat16)

    def project(x, w, weights, ids, mapping, a, b, out):
        packed = moelora.prepack_weights(w)
        moelora.fused_moe_lora_gemm(
            x, packed, weights, ids, token_lora_mapping=mapping, lora_a=a, lora_b=b, out=out
        )
        return out * 2

    args = [
        given[name]
        for name in (
            *("hidden_states", "w13", "topk_weights", "topk_ids", "token_lora_mapping"),
            *("w13_lora_a", "w13_lora_b"),
        )
    ]
    x, w, ids = args[0], args[1], args[3]
    outs = [x.new_empty(*ids.shape, w.size(1)) for _ in range(2)]
    compiled = torch.compile(project, fullgraph=True, backend=BACKEND)
    assert same(compiled(*args, outs[0]), project(*args, outs[1]))
    assert same(outs[0], outs[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["uniform", "segmented"])
def test_alignments(device, mode):
    given = inputs(device, torch.bfloat16)
    ids, weights = given["topk_ids"], given["topk_weights"]
    mapping = given["token_lora_mapping"]

    def align(ids, weights, mapping):
        zeroed = torch.ones(4, 8, device=ids.device)
        return (
            *moelora.moe_align_block_size(ids, 4, E),
            *moelora.moe_lora_align_block_size(ids, mapping, E, 4, LORAS, mode=mode),
            *moelora.moe_sorting(ids, weights, E, 4, out_to_zero=zeroed),
            zeroed,
        )

    compiled = torch.compile(align, fullgraph=True, backend=BACKEND, dynamic=True)
    got, want = compiled(ids, weights, mapping), align(ids, weights, mapping)
    assert len(got) == len(want) == 12
    assert all(same(a, b) for a, b in zip(got, want, strict=True))
    assert not want[-1].any()


def test_export():
    """torch.export sees one operator with its shapes, and the program gives the same bits."""

    class Layer(torch.nn.Module):
        def forward(self, hidden_states, w13, w2, topk_weights, topk_ids):
            return moelora.fused_experts_lora(hidden_states, w13, w2, topk_weights, topk_ids)

    given = inputs()
    names = ("hidden_states", "w13", "w2", "topk_weights", "topk_ids")
    args = tuple(given[name] for name in names)
    program = torch.export.export(Layer(), args)
    assert "moelora.fused_experts_lora" in str(program.graph)
    assert same(program.module()(*args), Layer()(*args))
