"""The same values as a torch user would compute them: a loop over experts, in the inputs' dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moelora.reference.fp8 import is_w8a8, numbers_of, rule_of
from moelora.reference.layer import activate
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


def _naive_project(
    x: Tensor,  # (rows, K), rows of one expert
    rule: Callable[[Tensor], Tensor],  # quantization of x for w
    w: Tensor,
    bias: Tensor | None,
    lora_a: list[Tensor],
    lora_b: list[Tensor],
    expert: int,
    adapters: Tensor,  # (rows,) int64, -1 = base
    ranks: list[int] | None,
    scalings: list[float] | None,
) -> Tensor:
    y = torch.mm(rule(x).to(w.dtype), w[expert].t()).to(x.dtype)
    if bias is not None:
        y += bias[expert]
    for adapter in adapters.unique().tolist() if lora_a else []:
        if adapter < 0:
            continue
        rows = (adapters == adapter).nonzero().squeeze(1)
        x_adapter = x.index_select(0, rows)
        deltas = []
        for stack_a, stack_b in zip(lora_a, lora_b, strict=True):
            a = pair_of(stack_a, adapter, expert)
            b = pair_of(stack_b, adapter, expert)
            rank = a.size(0) if ranks is None else min(ranks[adapter], a.size(0))
            delta = torch.mm(torch.mm(x_adapter, a[:rank].t()), b[:, :rank].t())
            deltas.append(delta if scalings is None else delta * scalings[adapter])
        y.index_add_(0, rows, torch.cat(deltas, dim=1))
    return y


def _naive_rows(
    topk_ids: Tensor, num_experts: int, expert_map: Tensor | None
) -> list[tuple[int, Tensor]]:
    """(expert, flat row indices) for every expert that has rows."""
    experts = expert_per_choice(topk_ids, num_experts, expert_map)
    flat = torch.tensor([e for row in experts for e in row], dtype=torch.int64)
    rows = ((e, (flat == e).nonzero().squeeze(1)) for e in flat.unique().tolist() if e >= 0)
    return [(e, r.to(topk_ids.device)) for e, r in rows]


def _numbers(weights: Weights) -> Tensor:
    """In the dtype of their product: float32 if both operands are FP8."""
    numbers = numbers_of(weights)
    return numbers.float().to(weights.device) if is_w8a8(weights) else numbers


def naive_fused_moe_lora_gemm(
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
    """`fused_moe_lora_gemm_ref` as a loop over experts in the dtype and on the device of `x`."""
    rule, w = rule_of(w, x.dtype), _numbers(w)
    num_tokens, top_k = topk_ids.shape
    adapters = torch.tensor(
        adapter_per_token(
            num_tokens, max_loras_of(lora_a), token_lora_mapping, adapter_enabled, lora_ranks
        ),
        dtype=torch.int64,
        device=x.device,
    )
    lora_a, lora_b = as_list(lora_a), as_list(lora_b)
    ranks, scalings = optional_list(lora_ranks), optional_list(lora_scalings)
    out = x.new_zeros(num_tokens * top_k, w.size(1))
    for expert, rows in _naive_rows(topk_ids, w.size(0), expert_map):
        tokens = rows // top_k
        x_rows = x.index_select(0, tokens if x.size(0) == num_tokens else rows)
        y = _naive_project(
            x_rows, rule, w, bias, lora_a, lora_b, expert, adapters[tokens], ranks, scalings
        )
        if mul_routed_weight:
            y = (y.float() * topk_weights.reshape(-1)[rows].unsqueeze(1)).to(y.dtype)
        out[rows] = y
    return out.view(num_tokens, top_k, w.size(1))


def naive_fused_experts_lora(
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
) -> Tensor:
    """`fused_experts_lora_ref` as a loop over experts in the dtype and on the device of the input.

    The products, the activation and the scaling round to that dtype; the sum over top_k is fp32.
    """
    x = hidden_states
    rule13, rule2 = rule_of(w13, x.dtype), rule_of(w2, x.dtype)
    w13, w2 = _numbers(w13), _numbers(w2)
    num_tokens, top_k = topk_ids.shape
    adapters = torch.tensor(
        adapter_per_token(
            num_tokens,
            max_loras_of(w13_lora_a, w2_lora_a),
            token_lora_mapping,
            adapter_enabled,
            lora_ranks,
        ),
        dtype=torch.int64,
        device=x.device,
    )
    a13, b13, a2, b2 = map(as_list, (w13_lora_a, w13_lora_b, w2_lora_a, w2_lora_b))
    ranks, scalings = optional_list(lora_ranks), optional_list(lora_scalings)
    sums = torch.promote_types(x.dtype, torch.float32)
    out = torch.zeros(x.shape, dtype=sums, device=x.device)
    for expert, rows in _naive_rows(topk_ids, w13.size(0), expert_map):
        tokens = rows // top_k
        weights = topk_weights.reshape(-1)[rows].unsqueeze(1)
        x_rows = x.index_select(0, tokens)
        if apply_router_weight_on_input:
            x_rows = (x_rows.to(sums) * weights).to(x.dtype)
        carried = adapters[tokens]
        gu = _naive_project(
            x_rows, rule13, w13, w13_bias, a13, b13, expert, carried, ranks, scalings
        )
        h = activate(gu, activation, activation_alpha, activation_limit)
        z = _naive_project(h, rule2, w2, w2_bias, a2, b2, expert, carried, ranks, scalings)
        z = z.to(sums)
        out.index_add_(0, tokens, z if apply_router_weight_on_input else z * weights)
    return out.to(x.dtype)
