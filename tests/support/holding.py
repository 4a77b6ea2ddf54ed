"""Layers and projections held against the loops in float64, of native and of quantized weights."""

from __future__ import annotations

import torch
from cases import Problem, same_bits
from checks import assert_close_to_ref, assert_unchanged, guarded_empty
from quantized_cases import STEPS, Quantized, dense, is_w8a8
from torch import Tensor

import moelora
from moelora.reference import (
    active_adapter,
    fused_experts_lora_ref,
    fused_moe_lora_gemm_ref,
    naive_fused_experts_lora,
    naive_fused_moe_lora_gemm,
)


def _hold(p, there, operator, ref, naive, arguments, steps: dict) -> Tensor:
    """Runs the operator between guard bands; its result, which is as accurate as the rule wants."""
    dtype = dense(p).spec.dtype
    inputs = {name: t.clone() for name, t in dense(there).tensors().items()}
    expected = ref(**arguments(p))
    out = guarded_empty(expected.shape, dtype, dense(there).topk_ids.device)
    y = operator(**arguments(there), out=out.tensor)
    out.check("out")
    assert y is out.tensor
    assert_unchanged(inputs, dense(there).tensors())
    if isinstance(p, Quantized) and not is_w8a8(p) and not y.is_cuda:
        assert same_bits(y, operator(**arguments(p.dense)))
    like = there if is_w8a8(p) else dense(there)
    assert_close_to_ref(y, expected, naive(**arguments(like)), dtype, **steps)
    return y


def hold_layer(p: Problem | Quantized, device: str, operator=moelora.fused_experts_lora) -> Tensor:
    steps = STEPS if is_w8a8(p) else {}
    functions = (operator, fused_experts_lora_ref, naive_fused_experts_lora)
    return _hold(p, p.to(device), *functions, lambda q: q.kwargs(), steps)


def hold_gemm(
    p: Problem | Quantized,
    device: str,
    projection: str,
    mul_routed_weight: bool,
    operator=moelora.fused_moe_lora_gemm,
) -> Tensor:
    functions = (operator, fused_moe_lora_gemm_ref, naive_fused_moe_lora_gemm)
    arguments = lambda q: q.gemm_kwargs(projection, mul_routed_weight)  # noqa: E731
    return _hold(p, p.to(device), *functions, arguments, {})


def base_rows(p: Problem | Quantized) -> Tensor:
    """Tokens without an adapter that counts."""
    d = dense(p)
    enabled, ranks = (None if t is None else t.tolist() for t in (d.adapter_enabled, d.lora_ranks))
    carried, slots = d.token_lora_mapping.tolist(), len(d.spec.ranks)
    return torch.tensor([active_adapter(a, slots, enabled, ranks) < 0 for a in carried])


def hold_base_rows(p: Problem | Quantized, device: str) -> None:
    """Base rows have the bits that the same call gives without adapters."""
    there, rows = p.to(device), base_rows(p)
    y = moelora.fused_experts_lora(**there.kwargs()).cpu()
    base = moelora.fused_experts_lora(**there.base().kwargs()).cpu()
    assert same_bits(y[rows], base[rows]), "a base row of the layer depends on adapters"
    for projection in ("w13", "w2"):
        y = moelora.fused_moe_lora_gemm(**there.gemm_kwargs(projection)).cpu()
        base = moelora.fused_moe_lora_gemm(**there.base().gemm_kwargs(projection)).cpu()
        assert same_bits(y[rows], base[rows]), f"a base row of {projection} depends on adapters"
