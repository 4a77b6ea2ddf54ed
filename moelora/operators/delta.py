"""LoRA without a base product: the delta that an engine adds to its own.

An engine whose experts are FP8, INT4 or MXFP4 has a grouped GEMM of its own. These operators add
the adapter part to its output, given routing and mapping: `moe_lora_gate_up_delta`
before the activation, `moe_lora_down_delta` after it. vLLM's form of them is `fused_moe_lora`.

Both have a backward: of x, topk_weights and the factors, and of the base product, to which they add
in place.

The result of the shrink is rounded once to the compute dtype, as it feeds the next product, and the
sum with the base product is rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moelora.operators.call import (
    Factors,
    absent_tensor,
    check_dimensions,
    enabled_or_absent,
    factor_list,
    ids_or_absent,
    is_freed,
    operators,
    run,
    typed,
    weights_or_absent,
)
from moelora.operators.storage import check_held


def known_experts(factors: Sequence[Tensor], num_experts: int | None) -> int | None:
    """The number of experts; None if all factors are shared and the caller does not pass it."""
    if num_experts is not None:
        return num_experts
    largest = max([1, *(f.size(1) for f in factors if f.dim() == 4)])
    return largest if largest > 1 else None


def one_expert(
    topk_ids: Tensor, expert_map: Tensor | None, num_experts: int | None
) -> tuple[Tensor, Tensor | None, int]:
    """Map every id from 0 on to one expert, if an unknown number of experts share factors."""
    if num_experts is not None:
        return topk_ids, expert_map, num_experts
    clamped = topk_ids if expert_map is None else expert_map
    if is_freed(clamped) or clamped.is_complex() or clamped.dtype == torch.bool:
        return topk_ids, expert_map, 1  # which is refused later, by name
    if expert_map is not None:
        return topk_ids, expert_map.clamp_max(0), 1
    return topk_ids.clamp_max(0), None, 1


def delta_arguments(
    x: Tensor,
    topk_weights: Tensor | None,
    topk_ids: Tensor,
    *,
    token_lora_mapping: Tensor,
    lora_a: Factors,
    lora_b: Factors,
    lora_ranks: Tensor | None,
    lora_scalings: Tensor | None,
    adapter_enabled: Tensor | None,
    expert_map: Tensor | None,
    num_experts: int | None,
    mul_routed_weight: bool,
) -> tuple[Any, ...]:
    """The arguments of a delta from `x` to `mul_routed_weight`, in the order of its schema."""
    a, b = factor_list(lora_a), factor_list(lora_b)
    if not a or not b:
        raise ValueError(f"lora_a has {len(a)} slices, lora_b has {len(b)}, expected at least 1")
    absent = absent_tensor(x)
    experts = known_experts((*a, *b), num_experts)
    topk_ids, expert_map, experts = one_expert(topk_ids, expert_map, experts)
    check_held("x", x)
    return (
        x.flatten(0, 1) if x.dim() == 3 else x,
        a,
        b,
        weights_or_absent("topk_weights", topk_weights, absent),
        topk_ids,
        token_lora_mapping,
        ids_or_absent("lora_ranks", lora_ranks, absent),
        weights_or_absent("lora_scalings", lora_scalings, absent),
        enabled_or_absent(adapter_enabled, absent),
        ids_or_absent("expert_map", expert_map, absent),
        experts,
        mul_routed_weight,
    )


def _delta(op: Any, add_inputs: bool, out: Tensor | None, **arguments: Any) -> Tensor:
    args = delta_arguments(**arguments)
    if out is None:
        add_inputs = False
        x, b, topk_ids = args[0], args[2], args[4]
        for at, factor in enumerate(b):
            check_dimensions(f"lora_b[{at}]", factor, 4)
        out = x.new_empty((*topk_ids.shape, sum(f.size(-2) for f in b)))
    run(op, out, *args, add_inputs)
    return out


@typed
def moe_lora_gate_up_delta(
    x: Tensor,
    topk_weights: Tensor | None,
    topk_ids: Tensor,
    *,
    token_lora_mapping: Tensor,
    lora_a: Factors,
    lora_b: Factors,
    lora_ranks: Tensor | None = None,
    lora_scalings: Tensor | None = None,
    adapter_enabled: Tensor | None = None,
    expert_map: Tensor | None = None,
    num_experts: int | None = None,
    mul_routed_weight: bool = False,
    add_inputs: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """Compute what adapters add to the gate and up projections, before the activation.

    For token `m`, choice `j`, expert `e = topk_ids[m, j]`, adapter `l = token_lora_mapping[m]`::

        out[m, j] += lora_scalings[l] (x lora_a[l, e]^T) lora_b[l, e]^T

    Parameters
    ----------
    x : Tensor, shape (M, K) or (M * top_k, K)
        Input of each token, or of each routed row. float32, bfloat16 or float16 (CUDA: the
        latter two); the dtype of the result. Factors have it too, or are float32 and rounded to
        it in every call.
    {topk_weights?} Read if `mul_routed_weight`.
    {topk_ids} A row whose id is out of range is skipped.
    {token_lora_mapping}
    lora_a : Tensor or sequence of tensors, shape (max_loras, E or 1, R, K)
        Shrink factors: one for all columns, or one for gate and one for up. An expert dimension of
        1 is one factor shared by all experts.
    lora_b : Tensor or sequence of tensors, shape (max_loras, E or 1, 2 I / slices, R)
        Expand factors, as many. Their numbers of columns may differ (query, key and value of an
        attention, with E = top_k = 1), if they add up to those of `out`; gradients need equal ones.
    {lora_ranks?}
    {lora_scalings?}
    {adapter_enabled?}
    {expert_map?} Their rows are skipped.
    {num_experts?}
    {mul_routed_weight}
    add_inputs : bool
        Add to `out`, where rows without an adapter keep their bits. False: `out` becomes the delta,
        0 in those rows.
    out : Tensor, shape (M, top_k, 2 I), optional
        The base product. None: the delta in a new tensor.

    Returns
    -------
    Tensor, shape (M, top_k, 2 I)
        `out`, or a new tensor.

    Raises
    ------
    {errors}

    Notes
    -----
    Added before the activation, this and `moe_lora_down_delta` give the exact MoE LoRA of
    `fused_experts_lora`.
    """
    return _delta(
        operators.moe_lora_gate_up_delta.default,
        add_inputs,
        out,
        x=x,
        topk_weights=topk_weights,
        topk_ids=topk_ids,
        token_lora_mapping=token_lora_mapping,
        lora_a=lora_a,
        lora_b=lora_b,
        lora_ranks=lora_ranks,
        lora_scalings=lora_scalings,
        adapter_enabled=adapter_enabled,
        expert_map=expert_map,
        num_experts=num_experts,
        mul_routed_weight=mul_routed_weight,
    )


@typed
def moe_lora_down_delta(
    x: Tensor,
    topk_weights: Tensor | None,
    topk_ids: Tensor,
    *,
    token_lora_mapping: Tensor,
    lora_a: Factors,
    lora_b: Factors,
    lora_ranks: Tensor | None = None,
    lora_scalings: Tensor | None = None,
    adapter_enabled: Tensor | None = None,
    expert_map: Tensor | None = None,
    num_experts: int | None = None,
    mul_routed_weight: bool = False,
    add_inputs: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """Compute what adapters add to the down projection, before the sum over `top_k`.

    Parameters
    ----------
    x : Tensor, shape (M, top_k, I) or (M * top_k, I)
        The activation of each routed row. Dtypes are those of `moe_lora_gate_up_delta`.
    {topk_weights?} Read if `mul_routed_weight`.
    {topk_ids} A row whose id is out of range is skipped.
    {token_lora_mapping}
    lora_a : Tensor, shape (max_loras, E or 1, R, I)
        Shrink factors.
    lora_b : Tensor, shape (max_loras, E or 1, K, R)
        Expand factors.
    {lora_ranks?}
    {lora_scalings?}
    {adapter_enabled?}
    {expert_map?} Their rows are skipped.
    {num_experts?}
    {mul_routed_weight} For a base product that includes the weight.
    add_inputs : bool
        As in `moe_lora_gate_up_delta`.
    out : Tensor, shape (M, top_k, K), optional
        The base product. None: the delta in a new tensor.

    Returns
    -------
    Tensor, shape (M, top_k, K)
        `out`, or a new tensor.

    Raises
    ------
    {errors}
    """
    return _delta(
        operators.moe_lora_down_delta.default,
        add_inputs,
        out,
        x=x,
        topk_weights=topk_weights,
        topk_ids=topk_ids,
        token_lora_mapping=token_lora_mapping,
        lora_a=lora_a,
        lora_b=lora_b,
        lora_ranks=lora_ranks,
        lora_scalings=lora_scalings,
        adapter_enabled=adapter_enabled,
        expert_map=expert_map,
        num_experts=num_experts,
        mul_routed_weight=mul_routed_weight,
    )
