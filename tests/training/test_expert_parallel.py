"""Experts spread over ranks by `expert_map`: what each computes, and its gradients, add up."""

from dataclasses import replace

import pytest
import torch
from cases import Spec, same_bits
from conftest import on_gpu

import moelora

PLACES = [
    pytest.param(("cpu", torch.float32), id="cpu-float32"),
    pytest.param(("cpu", torch.bfloat16), id="cpu-bfloat16"),
    on_gpu(("cuda", torch.bfloat16), id="cuda-bfloat16"),
]
RANKS = ((0, 3, 4), (5, 1, 2))  # the experts of each, in its own order
FACTORS = ("w13_lora_a", "w13_lora_b", "w2_lora_a", "w2_lora_b")
SPEC = Spec(tokens=40, top_k=3, experts=6, hidden=64, inter=32, ranks=(8, 3), mix="many", slices=1)


def leaves(kwargs):
    """The same arguments, of which hidden states, routing weights and factors have gradients."""
    found = dict(kwargs)
    for name in ("hidden_states", "topk_weights", *FACTORS):
        value = found[name]
        if isinstance(value, list):
            (value,) = value
        found[name] = value.detach().clone().requires_grad_()
    return found


def backward(kwargs, grad):
    out = moelora.fused_experts_lora(**kwargs)
    out.backward(grad)
    return out.detach()


@pytest.mark.parametrize("place", PLACES)
def test_gradients_of_all_ranks_are_those_of_one(place):
    device, dtype = place
    p = replace(SPEC, dtype=dtype).build().to(device)
    whole = leaves(p.kwargs())
    generator = torch.Generator().manual_seed(5)
    grad = torch.randn(p.hidden_states.shape, generator=generator).to(device, dtype)
    out = backward(whole, grad)
    parts, outs = [], []
    for experts in RANKS:
        own = torch.tensor(experts, device=device)
        local = torch.full((6,), -1, dtype=torch.int32, device=device)
        local[own] = torch.arange(len(experts), dtype=torch.int32, device=device)
        kwargs = dict(whole) | {
            "expert_map": local,
            "w13": whole["w13"][own],
            "w2": whole["w2"][own],
        }
        kwargs |= {name: whole[name].detach()[:, own] for name in FACTORS}
        parts.append(leaves(kwargs))
        outs.append(backward(parts[-1], grad))
    tolerance = (
        {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.02}
    )
    torch.testing.assert_close(sum(outs), out, **tolerance)
    for name in ("hidden_states", "topk_weights"):
        found = sum(part[name].grad for part in parts)
        torch.testing.assert_close(found, whole[name].grad, **tolerance)
    for name in FACTORS:  # each expert's are of one rank alone, and its bits are those of all
        for experts, part in zip(RANKS, parts, strict=True):
            assert part[name].grad.any()
            assert same_bits(part[name].grad, whole[name].grad[:, list(experts)]), name
