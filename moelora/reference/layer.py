"""A projection and a whole layer as loops over experts. Autograd records both.

In float64 on the CPU they are the references; in the dtype and on the device of the input they are
what a torch user would write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from moelora.operators.call import factor_list
from moelora.operators.experts import ACTIVATIONS
from moelora.reference.fp8 import is_w8a8, numbers_of, rule_of
from moelora.reference.routing import (
    Factors,
    adapter_per_token,
    expert_per_choice,
    max_loras_of,
    optional_list,
    pair_of,
)

if TYPE_CHECKING:
    from moelora.operators.experts import Activation, Weights

Rule: TypeAlias = Callable[[Tensor], Tensor]  # quantization of activations for some weights

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


def _float64(value: Any) -> Any:
    """Tensors in float64 on the CPU, also those of a list; integers and all else as they are."""
    if isinstance(value, list | tuple):
        return [_float64(one) for one in value]
    if not isinstance(value, Tensor):
        return value
    return value.cpu().double() if value.is_floating_point() else value.cpu()


def _numbers(weights: Weights) -> Tensor:
    """In the dtype of their product: float32 if both operands are FP8."""
    numbers = numbers_of(weights)
    return numbers.float().to(weights.device) if is_w8a8(weights) else numbers


class _Lora:
    """The adapters of a call, and its rows by expert."""

    def __init__(
        self,
        topk_ids: Tensor,
        num_experts: int,
        *factors: Factors,
        token_lora_mapping: Tensor | None = None,
        adapter_enabled: Tensor | None = None,
        lora_ranks: Tensor | None = None,
        lora_scalings: Tensor | None = None,
        expert_map: Tensor | None = None,
    ) -> None:
        adapters = adapter_per_token(
            topk_ids.size(0),
            max_loras_of(*factors),
            token_lora_mapping,
            adapter_enabled,
            lora_ranks,
        )
        experts = expert_per_choice(topk_ids, num_experts, expert_map)
        flat = torch.tensor([e for row in experts for e in row], dtype=torch.int64)
        found = ((e, (flat == e).nonzero().squeeze(1)) for e in flat.unique().tolist() if e >= 0)
        self.rows = [(e, rows.to(topk_ids.device)) for e, rows in found]  # flat indices
        self.adapters = torch.tensor(adapters, dtype=torch.int64, device=topk_ids.device)
        self.ranks, self.scalings = optional_list(lora_ranks), optional_list(lora_scalings)

    def project(
        self,
        x: Tensor,  # (rows, K), rows of one expert
        rule: Rule,
        w: Tensor,  # (E, N, K)
        bias: Tensor | None,  # (E, N)
        lora_a: Factors,  # per slice (max_loras, E or 1, R, K)
        lora_b: Factors,  # per slice (max_loras, E or 1, N / slices, R)
        expert: int,
        tokens: Tensor,
    ) -> Tensor:
        """x W^T + s (x A^T) B^T + bias: (rows, N)."""
        y = torch.mm(rule(x).to(w.dtype), w[expert].t()).to(x.dtype)
        if bias is not None:
            y += bias[expert]
        adapters = self.adapters[tokens]
        for adapter in adapters.unique().tolist() if lora_a is not None else []:
            if adapter < 0:
                continue
            rows = (adapters == adapter).nonzero().squeeze(1)
            own, deltas = x.index_select(0, rows), []
            for stack_a, stack_b in zip(factor_list(lora_a), factor_list(lora_b), strict=True):
                a, b = pair_of(stack_a, adapter, expert), pair_of(stack_b, adapter, expert)
                rank = a.size(0) if self.ranks is None else min(self.ranks[adapter], a.size(0))
                delta = torch.mm(torch.mm(own, a[:rank].t()), b[:, :rank].t())
                scalings = self.scalings
                deltas.append(delta if scalings is None else delta * scalings[adapter])
            y.index_add_(0, rows, torch.cat(deltas, dim=1))
        return y


def _gemm(
    x: Tensor,
    w: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    rule: Rule,
    lora_a: Factors = None,
    lora_b: Factors = None,
    bias: Tensor | None = None,
    mul_routed_weight: bool = False,
    **tables: Any,
) -> Tensor:
    num_tokens, top_k = topk_ids.shape
    lora = _Lora(topk_ids, w.size(0), lora_a, **tables)
    sums = torch.promote_types(x.dtype, torch.float32)
    out = x.new_zeros(num_tokens * top_k, w.size(1))
    for expert, rows in lora.rows:
        tokens = rows // top_k
        x_rows = x.index_select(0, tokens if x.size(0) == num_tokens else rows)
        y = lora.project(x_rows, rule, w, bias, lora_a, lora_b, expert, tokens)
        if mul_routed_weight:
            y = (y.to(sums) * topk_weights.reshape(-1)[rows].unsqueeze(1)).to(y.dtype)
        out[rows] = y
    return out.view(num_tokens, top_k, w.size(1))


def fused_moe_lora_gemm_ref(
    x: Tensor, w: Weights, topk_weights: Tensor, topk_ids: Tensor, **options: Any
) -> Tensor:
    """One projection of an MoE layer with adapters, in float64.

    For routed row (m, j) with local expert e and adapter l of token m::

        out[m, j] = x W[e]^T + s[l] (x A[l,e]^T) B[l,e]^T + bias[e]     (* topk_weights[m, j])

    where x is row m of an (M, K) input or row m * top_k + j of an (M * top_k, K) one.

    Parameters
    ----------
    x, w, topk_weights, topk_ids, **options
        Those of `fused_moe_lora_gemm`, but `out`.

    Returns
    -------
    Tensor, shape (M, top_k, N), float64, on the CPU
        Rows of skipped experts are zero.
    """
    given = _float64([x, numbers_of(w), topk_weights, topk_ids])
    named = {name: _float64(value) for name, value in options.items()}
    return _gemm(*given, rule=rule_of(w, x.dtype), **named)


def naive_fused_moe_lora_gemm(
    x: Tensor, w: Weights, topk_weights: Tensor, topk_ids: Tensor, **options: Any
) -> Tensor:
    """`fused_moe_lora_gemm_ref` in the dtype and on the device of `x`."""
    return _gemm(x, _numbers(w), topk_weights, topk_ids, rule=rule_of(w, x.dtype), **options)


def _experts(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    rules: tuple[Rule, Rule],
    w13_lora_a: Factors = None,
    w13_lora_b: Factors = None,
    w2_lora_a: Factors = None,
    w2_lora_b: Factors = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    activation: Activation = "silu",
    activation_alpha: float | None = None,
    activation_limit: float | None = None,
    apply_router_weight_on_input: bool = False,
    **tables: Any,
) -> Tensor:
    lora = _Lora(topk_ids, w13.size(0), w13_lora_a, w2_lora_a, **tables)
    sums = torch.promote_types(x.dtype, torch.float32)
    out = torch.zeros(x.shape, dtype=sums, device=x.device)
    for expert, rows in lora.rows:
        tokens = rows // topk_ids.size(1)
        weights = topk_weights.reshape(-1)[rows].unsqueeze(1)
        own = x.index_select(0, tokens)
        if apply_router_weight_on_input:
            own = (own.to(sums) * weights).to(x.dtype)
        of13, of2 = (w13, w13_bias, w13_lora_a, w13_lora_b), (w2, w2_bias, w2_lora_a, w2_lora_b)
        gu = lora.project(own, rules[0], *of13, expert, tokens)
        h = activate(gu, activation, activation_alpha, activation_limit)
        z = lora.project(h, rules[1], *of2, expert, tokens).to(sums)
        out.index_add_(0, tokens, z if apply_router_weight_on_input else z * weights)
    return out.to(x.dtype)


def fused_experts_lora_ref(
    hidden_states: Tensor,
    w13: Weights,
    w2: Weights,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Tensor:
    """A whole MoE layer with adapters, in float64.

    For routed row (m, j) with local expert e and adapter l of token m::

        gu = x[m] W13[e]^T + s[l] (x[m] A13[l,e]^T) B13[l,e]^T + b13[e]
        h  = activation(gu)
        z  = h W2[e]^T + s[l] (h A2[l,e]^T) B2[l,e]^T + b2[e]
        out[m] = sum over j of topk_weights[m, j] * z

    The adapter enters before the activation. LoRA slices cover the columns of gu in memory order:
    with two slices, slice 0 covers rows 0..I-1 of W13 and slice 1 rows I..2I-1, whatever the
    activation makes of those rows; a single slice covers all of them with one A.
    With `apply_router_weight_on_input` (top_k == 1) the weight multiplies x instead of z.

    Parameters
    ----------
    hidden_states, w13, w2, topk_weights, topk_ids, **options
        Those of `fused_experts_lora`, but `out`.
    dtype : torch.dtype, optional
        That to which activations of W8A8 weights are rounded, by default their own.

    Returns
    -------
    Tensor, shape (M, K), float64, on the CPU
        Skipped experts contribute nothing.
    """
    dtype = hidden_states.dtype if dtype is None else dtype
    rules = rule_of(w13, dtype), rule_of(w2, dtype)
    given = _float64([hidden_states, numbers_of(w13), numbers_of(w2), topk_weights, topk_ids])
    named = {name: _float64(value) for name, value in options.items()}
    return _experts(*given, rules=rules, **named)


def naive_fused_experts_lora(
    hidden_states: Tensor,
    w13: Weights,
    w2: Weights,
    topk_weights: Tensor,
    topk_ids: Tensor,
    **options: Any,
) -> Tensor:
    """`fused_experts_lora_ref` in the dtype and on the device of the input.

    The products, the activation and the scaling round to that dtype; the sum over top_k is fp32.
    """
    rules = rule_of(w13, hidden_states.dtype), rule_of(w2, hidden_states.dtype)
    numbers = _numbers(w13), _numbers(w2)
    return _experts(hidden_states, *numbers, topk_weights, topk_ids, rules=rules, **options)
