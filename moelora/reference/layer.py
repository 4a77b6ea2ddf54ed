"""A projection and a whole layer, row by row in float64. Autograd records both."""

from __future__ import annotations

from typing import TYPE_CHECKING, overload

import torch
from torch import Tensor

from moelora.operators.experts import ACTIVATIONS
from moelora.reference.fp8 import numbers_of, rule_of
from moelora.reference.routing import (
    Factors,
    adapter_per_token,
    as_list,
    expert_per_choice,
    max_loras_of,
    optional_list,
    pair_of,
)

if TYPE_CHECKING:
    from moelora.operators.experts import Activation, Weights

OAI = ("swigluoai", "swigluoai_uninterleave")
ALPHAS = dict.fromkeys(OAI, 1.702) | {"situ": 1.0}
LIMITS = dict.fromkeys((*OAI, "swiglustep"), 7.0) | {"silu": None, "situ": None}


def activate(
    x: Tensor, activation: Activation, alpha: float | None = None, limit: float | None = None
) -> Tensor:
    """Apply an expert's activation to the columns (last dimension) of the w13 projection.

    - `silu`:      x = [gate | up];  silu(gate) * up
    - `gelu`:      x = [gate | up];  gelu_tanh(gate) * up
    - `swigluoai`: even columns are gate, odd ones up; (up + 1) * gate * sigmoid(alpha * gate)
    - `swigluoai_uninterleave`: the same of x = [gate | up]
    - `relu2`:     not gated; relu(x) ** 2
    - `situ`:      x = [gate | up];  alpha * tanh(gate / alpha) * sigmoid(gate) * up', with
      up' = limit * tanh(up / limit): `SituAndMul` of Kimi-K3, the soft-capped SwiGLU of Inkling-2
    - `swiglustep`: x = [gate | up]; min(silu(gate), limit) * up, of Step-3.7

    `silu` with a limit and the two of swigluoai first clamp gate to at most the limit and up to
    [-limit, limit]; `swiglustep` clamps up so. Absent: alpha 1.702, 1 for `situ`; no clamp for
    `silu`, up' = up for `situ`, 7 for the others.

    Works in the dtype of `x`, `situ` as its sources in float32 if that has 16 bits; the gated
    ones return half of the columns.
    """
    if alpha is not None and activation not in ALPHAS:
        raise ValueError(f"activation_alpha is {alpha}, but {activation} takes none")
    if limit is not None and activation not in LIMITS:
        raise ValueError(f"activation_limit is {limit}, but {activation} takes none")
    if activation == "relu2":
        return torch.relu(x).square()
    if activation == "swigluoai":
        gate, up = x[..., 0::2], x[..., 1::2]
    else:
        gate, up = x.chunk(2, dim=-1)
    if alpha is None:
        alpha = ALPHAS.get(activation, 1.0)
    if limit is None:
        limit = LIMITS.get(activation)
    if activation == "situ":
        wide = torch.promote_types(x.dtype, torch.float32)
        gate, up = gate.to(wide), up.to(wide)
        up = up if limit is None else limit * torch.tanh(up / limit)
        return (alpha * torch.tanh(gate / alpha) * torch.sigmoid(gate) * up).to(x.dtype)
    if limit is not None:
        limit = min(limit, torch.finfo(x.dtype).max)  # torch refuses what the dtype cannot hold
        up = up.clamp(-limit, limit)
        if activation == "swiglustep":
            return torch.nn.functional.silu(gate).clamp(max=limit) * up
        gate = gate.clamp(max=limit)
    if activation in OAI:
        return (up + 1) * gate * torch.sigmoid(alpha * gate)
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    if activation == "gelu":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    raise ValueError(f"activation is {activation!r}, expected one of {', '.join(ACTIVATIONS)}")


@overload
def _float64(t: Tensor) -> Tensor: ...
@overload
def _float64(t: None) -> None: ...
def _float64(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.cpu().double()


def _project_row(
    x: Tensor,  # (K,) float64, of adapters
    base_x: Tensor,  # the same, of w
    w: Tensor,  # (E, N, K)
    bias: Tensor | None,  # (E, N)
    lora_a: list[Tensor],  # per slice (max_loras, E or 1, R, K)
    lora_b: list[Tensor],  # per slice (max_loras, E or 1, N / slices, R)
    expert: int,
    adapter: int,
    ranks: list[int] | None,
    scalings: list[float] | None,
) -> Tensor:
    """x W^T + s (x A^T) B^T + bias for one row, in float64: (N,)."""
    y = w[expert] @ base_x
    if adapter >= 0:
        scaling = 1.0 if scalings is None else scalings[adapter]
        first = 0
        for stack_a, stack_b in zip(lora_a, lora_b, strict=True):
            a = pair_of(stack_a, adapter, expert)
            b = pair_of(stack_b, adapter, expert)
            rank = a.size(0) if ranks is None else min(ranks[adapter], a.size(0))
            last = first + b.size(0)
            y[first:last] += scaling * (b[:, :rank] @ (a[:rank] @ x))
            first = last
    if bias is not None:
        y += bias[expert]
    return y


def fused_moe_lora_gemm_ref(
    x: Tensor,
    w: Weights,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    token_lora_mapping: Tensor | None = None,
    lora_a: Factors = None,
    lora_b: Factors = None,
    lora_ranks: Tensor | None = None,
    lora_scalings: Tensor | None = None,
    adapter_enabled: Tensor | None = None,
    bias: Tensor | None = None,
    expert_map: Tensor | None = None,
    mul_routed_weight: bool = False,
) -> Tensor:
    """One projection of an MoE layer with adapters, row by row in float64.

    For routed row (m, j) with local expert e and adapter l of token m::

        out[m, j] = x W[e]^T + s[l] (x A[l,e]^T) B[l,e]^T + bias[e]     (* topk_weights[m, j])

    where x is row m of an (M, K) input or row m * top_k + j of an (M * top_k, K) one.

    Returns (M, top_k, N), float64, on the CPU; rows of skipped experts are zero.
    """
    rule, w = rule_of(w, x.dtype), numbers_of(w)
    num_tokens, top_k = topk_ids.shape
    experts = expert_per_choice(topk_ids, w.size(0), expert_map)
    adapters = adapter_per_token(
        num_tokens, max_loras_of(lora_a), token_lora_mapping, adapter_enabled, lora_ranks
    )
    row_per_choice = x.size(0) != num_tokens
    x, w, bias = _float64(x), _float64(w), _float64(bias)
    base_x = rule(x)
    lora_a = [_float64(a) for a in as_list(lora_a)]
    lora_b = [_float64(b) for b in as_list(lora_b)]
    ranks, scalings = optional_list(lora_ranks), optional_list(lora_scalings)
    weights = _float64(topk_weights) if mul_routed_weight else None

    out = torch.zeros(num_tokens, top_k, w.size(1), dtype=torch.float64)
    for m in range(num_tokens):
        for j in range(top_k):
            e = experts[m][j]
            if e < 0:
                continue
            row = m * top_k + j if row_per_choice else m
            rows = x[row], base_x[row]
            y = _project_row(*rows, w, bias, lora_a, lora_b, e, adapters[m], ranks, scalings)
            out[m, j] = y if weights is None else y * weights[m, j]
    return out


def fused_experts_lora_ref(
    hidden_states: Tensor,
    w13: Weights,
    w2: Weights,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    token_lora_mapping: Tensor | None = None,
    w13_lora_a: Factors = None,
    w13_lora_b: Factors = None,
    w2_lora_a: Factors = None,
    w2_lora_b: Factors = None,
    lora_ranks: Tensor | None = None,
    lora_scalings: Tensor | None = None,
    adapter_enabled: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    activation: Activation = "silu",
    activation_alpha: float | None = None,
    activation_limit: float | None = None,
    expert_map: Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """A whole MoE layer with adapters, row by row in float64.

    For routed row (m, j) with local expert e and adapter l of token m::

        gu = x[m] W13[e]^T + s[l] (x[m] A13[l,e]^T) B13[l,e]^T + b13[e]
        h  = activation(gu)
        z  = h W2[e]^T + s[l] (h A2[l,e]^T) B2[l,e]^T + b2[e]
        out[m] = sum over j of topk_weights[m, j] * z

    The adapter enters before the activation. LoRA slices cover the columns of gu in memory order:
    with two slices, slice 0 covers rows 0..I-1 of W13 and slice 1 rows I..2I-1, whatever the
    activation makes of those rows; a single slice covers all of them with one A.
    With `apply_router_weight_on_input` (top_k == 1) the weight multiplies x instead of z.

    `dtype` is that to which activations of W8A8 weights are rounded, by default their own.

    Returns (M, K), float64, on the CPU; skipped experts contribute nothing.
    """
    dtype = hidden_states.dtype if dtype is None else dtype
    rule13, rule2 = rule_of(w13, dtype), rule_of(w2, dtype)
    w13, w2 = numbers_of(w13), numbers_of(w2)
    num_tokens, top_k = topk_ids.shape
    experts = expert_per_choice(topk_ids, w13.size(0), expert_map)
    adapters = adapter_per_token(
        num_tokens,
        max_loras_of(w13_lora_a, w2_lora_a),
        token_lora_mapping,
        adapter_enabled,
        lora_ranks,
    )
    x, w13, w2 = _float64(hidden_states), _float64(w13), _float64(w2)
    w13_bias, w2_bias, weights = _float64(w13_bias), _float64(w2_bias), _float64(topk_weights)
    a13, b13 = ([_float64(t) for t in as_list(f)] for f in (w13_lora_a, w13_lora_b))
    a2, b2 = ([_float64(t) for t in as_list(f)] for f in (w2_lora_a, w2_lora_b))
    ranks, scalings = optional_list(lora_ranks), optional_list(lora_scalings)

    out = torch.zeros_like(x)
    base_x = None if apply_router_weight_on_input else rule13(x)
    for m in range(num_tokens):
        for j in range(top_k):
            e, adapter = experts[m][j], adapters[m]
            if e < 0:
                continue
            row = x[m] * weights[m, j] if apply_router_weight_on_input else x[m]
            base = rule13(row) if base_x is None else base_x[m]
            gu = _project_row(row, base, w13, w13_bias, a13, b13, e, adapter, ranks, scalings)
            h = activate(gu, activation, activation_alpha, activation_limit)
            z = _project_row(h, rule2(h), w2, w2_bias, a2, b2, e, adapter, ranks, scalings)
            out[m] += z if apply_router_weight_on_input else weights[m, j] * z
    return out
