"""A training step on a GPU: captured in a CUDA graph, without waiting for it, and what it refuses.

What gradients are, and what they promise, is tested on every device elsewhere.
"""

from dataclasses import replace

import pytest
import torch
from cases import Spec, same_bits
from conftest import CUDA_DTYPES, needs_gpu
from gradient_cases import assert_bits, flat, grad_like, leaves
from quantized_cases import ALL_FORMATS, NATIVE, build, dense, made
from streams import Captured, no_waits

import moelora

pytestmark = [pytest.mark.gpu, needs_gpu]

SPEC = Spec(tokens=90, top_k=2, experts=4, hidden=136, inter=72, ranks=(8, 16, 4), mix="many")
# More tiles of gradients, of pairs with few rows or none, than a GPU takes at once.
MANY_PAIRS = replace(SPEC, tokens=400, experts=64, ranks=(8, 16, 4, 12) * 6)
CHANGING = ("hidden_states", "topk_ids", "topk_weights", "token_lora_mapping")


def step(arguments, grad_out):
    """All that a step computes, by name."""
    out, saved = moelora.fused_experts_lora_saving(**arguments)
    grads = moelora.fused_experts_lora_backward(grad_out, saved, **arguments)
    return {"out": out} | flat(grads._asdict())


@pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize(
    ("spec", "form"),
    [
        *((replace(SPEC, tokens=tokens), NATIVE) for tokens in (2, 90, 700)),
        (MANY_PAIRS, NATIVE),
        *((SPEC, form) for form in ("mxfp4", "int4_g64_zp", "fp8_block_w8a8")),
    ],
)
def test_a_captured_step_serves_any_routing(spec, form, dtype):
    first, *others = (made(replace(spec, seed=s), form, dtype).to("cuda") for s in range(3))
    arguments = first.kwargs()
    grad_out = grad_like(arguments["hidden_states"].shape, dtype, "cuda")
    captured = Captured(lambda: step(arguments, grad_out))
    with no_waits():
        step(arguments, grad_out)
    for other in others:
        for name in CHANGING:
            arguments[name].copy_(getattr(dense(other), name))
        found = captured.replay()
        assert_bits(step(arguments, grad_out), found)


@pytest.mark.parametrize("tokens", [1, 3, 40, 600])
@pytest.mark.parametrize("form", [NATIVE, *ALL_FORMATS])
def test_the_forward_has_the_bits_of_serving_as_planned(form, tokens):
    """Whatever kernel serves so many tokens: few ones with weights of four bits take one launch."""
    for dtype in CUDA_DTYPES:
        arguments = made(replace(SPEC, tokens=tokens), form, dtype).to("cuda").kwargs()
        saving, _ = moelora.fused_experts_lora_saving(**arguments)
        assert same_bits(saving, moelora.fused_experts_lora(**arguments))


@pytest.mark.parametrize("name", [None, "mxfp4", "fp8_block_w8a8"])
def test_a_large_batch_has_the_bits_of_smaller_ones(name):
    """Whatever order rows of the forward and of gradients have in memory."""
    spec = replace(SPEC, tokens=2200, top_k=8, experts=16, hidden=1024, inter=128)
    spec = replace(spec, dtype=torch.bfloat16)
    p = (build(spec, ALL_FORMATS[name], spec.dtype) if name else spec.build()).to("cuda")
    arguments = p.kwargs()
    grad_out = grad_like(arguments["hidden_states"].shape, spec.dtype, "cuda")
    whole = step(arguments, grad_out)
    served = moelora.fused_experts_lora(**arguments)
    saving, _ = moelora.fused_experts_lora_saving(**arguments)
    assert same_bits(saving, served)
    factors = {}
    for half in (slice(0, 1100), slice(1100, 2200)):
        part = arguments | {name: arguments[name][half].contiguous() for name in CHANGING}
        found = step(part, grad_out[half].contiguous())
        for name in ("hidden_states", "topk_weights"):
            assert same_bits(found[name], whole[name][half]), name
        for name in found:
            if "lora" in name:
                factors[name] = factors.get(name, 0) + found[name].float()
    for name, want in factors.items():
        off = (whole[name].float() - want).abs().max()
        assert off <= 0.02 * want.abs().max(), name


# ---- memory ----


def peak_of(arguments, grad_out):
    """Bytes that a step takes above what is there before, and those of its gradients."""
    given = leaves(arguments)
    each = (v if isinstance(v, list) else [v] for v in given.values())
    tensors = [t for v in each for t in v if isinstance(t, torch.Tensor) and t.requires_grad]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    moelora.fused_experts_lora(**given).backward(grad_out)
    torch.cuda.synchronize()
    took = torch.cuda.max_memory_allocated() - before
    return took, sum(t.grad.nbytes for t in tensors)


def test_the_peak_of_a_step():
    """At most gu, h, z and the result of the forward, the gradients, and one P x 2I buffer; no
    stack of quantized weights is ever dense."""
    tokens, top_k, experts, hidden, inter = sizes = 2048, 8, 32, 1024, 512
    spec = Spec(*sizes, ranks=(16, 16), dtype=torch.bfloat16)
    rows = tokens * top_k
    buffers = 2 * (2 * rows * 2 * inter + rows * inter + rows * hidden + tokens * hidden)
    native = 0
    for name in (None, "mxfp4", "int4_g64_zp", "fp8_block_w8a8"):
        p = (build(spec, ALL_FORMATS[name], spec.dtype) if name else spec.build()).to("cuda")
        arguments = p.kwargs()
        grad_out = grad_like((tokens, hidden), spec.dtype, "cuda")
        peak_of(arguments, grad_out)
        took, grads = peak_of(arguments, grad_out)
        assert took <= buffers + grads, (name, took, buffers, grads)
        native = native or took
        quantized = rows * (hidden + inter) if name == "fp8_block_w8a8" else 0
        smallest_stack = 2 * experts * hidden * inter
        assert took <= native + quantized + smallest_stack / 2, (name, took, native)
