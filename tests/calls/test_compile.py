"""torch.compile(fullgraph=True) gives the same bits as the eager call, static and dynamic."""

from dataclasses import replace

import pytest
import torch
from cases import OAI, Spec, same_bits
from glue_cases import LORAS, E, inputs
from quantized_cases import ALL_FORMATS, build
from torch._dynamo.testing import CompileCounterWithBackend

import moelora

# Inductor needs a C++ compiler on the CPU, which is not ours to demand; the graph is ours.
BACKEND = "aot_eager"
BASE = ("hidden_states", "w13", "w2", "topk_weights", "topk_ids")


def plain(device, tokens=6):
    return inputs(device, torch.bfloat16, tokens)


def without_adapters(device):
    given = plain(device)
    return {name: given[name] for name in BASE}


def packed(device):
    given = plain(device)
    return given | {name: moelora.prepack_weights(given[name]) for name in ("w13", "w2")}


def of_format(name):
    def given(device, tokens=9):
        p = build(Spec(tokens=17, hidden=96, inter=96), ALL_FORMATS[name], torch.bfloat16)
        return replace(p, dense=p.dense.prefix(tokens)).to(device).kwargs()

    return given


def with_numbers(activation):
    spec = Spec(tokens=3, hidden=72, inter=40, bias=True, activation=activation)
    spec = replace(spec, alpha=1.1, limit=0.5, dtype=torch.bfloat16)
    return lambda device: spec.build().to(device).kwargs()


LAYERS = {
    "plain": plain,
    "without adapters": without_adapters,
    "packed": packed,
    **{a: with_numbers(a) for a in OAI},
    **{n: of_format(n) for n in ("int4_g64_zp", "fp8_block_w8a8", "fp8_static_w8a8")},
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer(name, device):
    given = LAYERS[name](device)

    def layer(**kwargs):
        return moelora.fused_experts_lora(**kwargs).relu()

    compiled = torch.compile(layer, fullgraph=True, backend=BACKEND)
    assert same_bits(compiled(**given), layer(**given))


def test_layer_writes_into_its_input(device):
    given = inputs(device, torch.bfloat16)
    want = moelora.fused_experts_lora(**given)

    def layer(hidden_states, **kwargs):
        return moelora.fused_experts_lora(hidden_states, **kwargs, out=hidden_states)

    compiled = torch.compile(layer, fullgraph=True, backend=BACKEND)
    got = compiled(**given)
    assert same_bits(got, want)
    assert same_bits(given["hidden_states"], want)


@pytest.mark.parametrize("given", [plain, of_format("mxfp4"), of_format("fp8_block_w8a8")])
def test_dynamic_number_of_tokens(given, device):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(BACKEND)
    compiled = torch.compile(
        moelora.fused_experts_lora, fullgraph=True, backend=counter, dynamic=True
    )
    for tokens in (6, 9, 17):
        arguments = given(device, tokens)
        assert same_bits(compiled(**arguments), moelora.fused_experts_lora(**arguments))
    assert counter.frame_count == 1


def test_gemm(device):
    given = inputs(device, torch.bfloat16)

    def project(x, w, weights, ids, mapping, a, b, out):
        packed = moelora.prepack_weights(w)
        moelora.fused_moe_lora_gemm(
            x, packed, weights, ids, token_lora_mapping=mapping, lora_a=a, lora_b=b, out=out
        )
        return out * 2

    names = ("hidden_states", "w13", "topk_weights", "topk_ids", "token_lora_mapping")
    args = [given[name] for name in (*names, "w13_lora_a", "w13_lora_b")]
    x, w, ids = args[0], args[1], args[3]
    outs = [x.new_empty(*ids.shape, w.size(1)) for _ in range(2)]
    compiled = torch.compile(project, fullgraph=True, backend=BACKEND)
    assert same_bits(compiled(*args, outs[0]), project(*args, outs[1]))
    assert same_bits(outs[0], outs[1])


def test_gemm_of_quantized_weights_and_their_numbers(device):
    p = build(Spec(tokens=9, hidden=96, inter=96), ALL_FORMATS["mxfp4"], torch.bfloat16)
    given = p.to(device).gemm_kwargs()

    def project(**kwargs):
        return moelora.fused_moe_lora_gemm(**kwargs), kwargs["w"].unpack()

    compiled = torch.compile(project, fullgraph=True, backend=BACKEND)
    assert all(map(same_bits, compiled(**given), project(**given)))


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
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))
    assert not want[-1].any()


def test_export():
    """torch.export sees one operator with its shapes, and the program gives the same bits."""

    class Layer(torch.nn.Module):
        def forward(self, hidden_states, w13, w2, topk_weights, topk_ids):
            return moelora.fused_experts_lora(hidden_states, w13, w2, topk_weights, topk_ids)

    given = inputs()
    args = tuple(given[name] for name in BASE)
    program = torch.export.export(Layer(), args)
    assert "moelora.fused_experts_lora" in str(program.graph)
    assert same_bits(program.module()(*args), Layer()(*args))
