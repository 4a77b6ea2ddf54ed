"""Slow, obvious versions of the deltas: LoRA without a base product.

Everything is a loop over routed rows on the CPU. `dtype` is that of every step: float64 gives the
mathematical value, the compute dtype the result of rounding after each product; their difference
shows the accuracy that a dtype allows.

A row is `None` (no adapter, or skipped) or `(expert, adapter)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moelora.operators.call import factor_list
from moelora.reference.align import align_max_blocks_ref, moe_align_block_size_ref
from moelora.reference.layer import activate
from moelora.reference.routing import (
    Factors,
    active_adapter,
    adapter_per_token,
    expert_per_choice,
    optional_list,
    pair_of,
)

Rows = list[tuple[int, int] | None]


def num_experts_of(factors: Sequence[Tensor], num_experts: int | None = None) -> int:
    """Number of experts of the factors; unlimited if they are shared by all."""
    largest = max(f.size(1) for f in factors)
    return num_experts or (largest if largest > 1 else 2**63)


def rows_of_routing(
    topk_ids: Tensor,
    token_lora_mapping: Tensor | None,
    num_experts: int,
    max_loras: int,
    *,
    lora_ranks: Tensor | None = None,
    adapter_enabled: Tensor | None = None,
    expert_map: Tensor | None = None,
) -> Rows:
    """(expert, adapter) of each routed row."""
    experts = expert_per_choice(topk_ids, num_experts, expert_map)
    adapters = adapter_per_token(
        topk_ids.size(0), max_loras, token_lora_mapping, adapter_enabled, lora_ranks
    )
    pairs = ((e, a) for row, a in zip(experts, adapters, strict=True) for e in row)
    return [None if min(pair) < 0 else pair for pair in pairs]


def shrink_ref(
    x: Tensor,
    lora_a: Factors,
    rows: Rows,
    top_k: int,
    *,
    lora_ranks: Tensor | None = None,
    lora_scalings: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """`h[slice, m, j] = s x A[slice]^T`, (slices, M, top_k, R); 0 past the true rank."""
    stacks = [a.cpu().to(dtype) for a in factor_list(lora_a)]
    x, ranks, scalings = x.cpu().to(dtype), lora_ranks, lora_scalings
    per_row = x.size(0) == len(rows)
    h = torch.zeros(len(stacks), len(rows), stacks[0].size(2), dtype=dtype)
    for p, work in enumerate(rows):
        if work is None:
            continue
        expert, adapter = work
        rank = h.size(2) if ranks is None else min(int(ranks[adapter]), h.size(2))
        scaling = 1.0 if scalings is None else float(scalings[adapter])
        row = x[p if per_row else p // top_k]
        for i, stack in enumerate(stacks):
            h[i, p, :rank] = scaling * (pair_of(stack, adapter, expert)[:rank] @ row)
    return h.view(len(stacks), -1, top_k, h.size(2))


def expand_ref(
    h: Tensor,
    lora_b: Factors,
    rows: Rows,
    *,
    lora_ranks: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """`z[m, j] = h[slice, m, j] B[slice]^T`, slices side by side; 0 in rows without an adapter."""
    stacks = [b.cpu().to(dtype) for b in factor_list(lora_b)]
    num_tokens, top_k, max_rank = h.shape[1:]
    h = h.cpu().to(dtype).reshape(len(stacks), len(rows), max_rank)
    parts = [torch.zeros(len(rows), b.size(2), dtype=dtype) for b in stacks]
    for p, work in enumerate(rows):
        if work is None:
            continue
        expert, adapter = work
        rank = max_rank if lora_ranks is None else min(int(lora_ranks[adapter]), max_rank)
        for i, stack in enumerate(stacks):
            parts[i][p] = pair_of(stack, adapter, expert)[:, :rank] @ h[i, p, :rank]
    return torch.cat(parts, 1).unflatten(0, (num_tokens, top_k))


def weighted(z: Tensor, topk_weights: Tensor) -> Tensor:
    """`topk_weights[m, j] * z[m, j]`, rounded to the dtype of z."""
    product = z.double() if z.dtype == torch.float64 else z.float()
    return (product * topk_weights.cpu().unsqueeze(-1)).to(z.dtype)


def active_rows(rows: Rows, top_k: int) -> Tensor:
    """(M, top_k) bool: rows that have an adapter and an expert."""
    return torch.tensor([w is not None for w in rows], dtype=torch.bool).view(-1, top_k)


def moe_lora_delta_ref(
    x: Tensor,
    topk_weights: Tensor | None,
    topk_ids: Tensor,
    *,
    token_lora_mapping: Tensor | None,
    lora_a: Factors,
    lora_b: Factors,
    lora_ranks: Tensor | None = None,
    lora_scalings: Tensor | None = None,
    adapter_enabled: Tensor | None = None,
    expert_map: Tensor | None = None,
    num_experts: int | None = None,
    mul_routed_weight: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """What `moe_lora_gate_up_delta` and `moe_lora_down_delta` add, and where: (delta, active)."""
    a, b = factor_list(lora_a), factor_list(lora_b)
    rows = rows_of_routing(
        topk_ids,
        token_lora_mapping,
        num_experts_of((*a, *b), num_experts),
        a[0].size(0),
        lora_ranks=lora_ranks,
        adapter_enabled=adapter_enabled,
        expert_map=expert_map,
    )
    top_k = topk_ids.size(1)
    x = x.flatten(0, 1) if x.dim() == 3 else x
    options: Any = {"lora_ranks": lora_ranks, "dtype": dtype}
    h = shrink_ref(x, a, rows, top_k, lora_scalings=lora_scalings, **options)
    z = expand_ref(h, b, rows, **options)
    if mul_routed_weight:
        assert topk_weights is not None, "mul_routed_weight needs topk_weights"
        z = weighted(z, topk_weights)
    return z, active_rows(rows, top_k)


def run_moe_lora_ref(
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    weight_indices: Tensor,
    lora_ranks: Tensor | None,
    scalings: Tensor | None,
    gate_up_a: Tensor,
    gate_up_b: Tensor,
    down_a: Tensor,
    down_b: Tensor,
    *,
    adapter_enabled: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """What SGLang's adapter MLP adds to a base layer, (M, K), and to which tokens, (M,)."""
    top_k = topk_ids.size(1)
    rows = rows_of_routing(
        topk_ids,
        weight_indices,
        num_experts_of((gate_up_a, gate_up_b, down_a, down_b)),
        gate_up_a.size(0),
        lora_ranks=lora_ranks,
        adapter_enabled=adapter_enabled,
    )
    options: Any = {"lora_ranks": lora_ranks, "dtype": dtype}
    h = shrink_ref(hidden_states, gate_up_a, rows, top_k, **options)
    activated = activate(expand_ref(h, gate_up_b, rows, **options), "silu").flatten(0, 1)
    h = shrink_ref(activated, down_a, rows, top_k, lora_scalings=scalings, **options)
    z = weighted(expand_ref(h, down_b, rows, **options), topk_weights)
    return z.sum(1), active_rows(rows, top_k).any(1)


def moe_lora_align_lists_ref(
    topk_ids: Tensor,
    token_lora_mapping: Tensor,
    num_experts: int,
    block_size: int,
    max_loras: int,
    *,
    lora_ids: Tensor,
    adapter_enabled: Tensor | None = None,
    expert_map: Tensor | None = None,
    rows: int | None = None,
    blocks: int | None = None,
    untouched: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """vLLM's form of `moe_lora_align_block_size`: one list of blocks for each adapter.

    Returns int32 sorted_token_ids (max_loras, rows), expert_ids (max_loras, blocks) and
    num_tokens_post_padded (max_loras,). Lists that are not requested contain `untouched`.
    """
    padding = topk_ids.numel()
    if blocks is None:
        blocks = align_max_blocks_ref("base", padding, num_experts, block_size)
    rows = blocks * block_size if rows is None else rows
    sorted_token_ids = torch.full((max_loras, rows), untouched, dtype=torch.int32)
    expert_ids = torch.full((max_loras, blocks), untouched, dtype=torch.int32)
    used = torch.full((max_loras,), untouched, dtype=torch.int32)
    enabled = optional_list(adapter_enabled)
    for adapter in lora_ids.tolist():
        if active_adapter(adapter, max_loras, enabled) < 0:
            continue
        mine = torch.where((token_lora_mapping == adapter)[:, None], topk_ids, -1)
        ids, experts, used[adapter] = moe_align_block_size_ref(
            mine, block_size, num_experts, expert_map=expert_map
        )
        count = int(used[adapter])
        sorted_token_ids[adapter] = padding
        sorted_token_ids[adapter, :count] = ids[:count]
        expert_ids[adapter] = -1
        expert_ids[adapter, : count // block_size] = experts[: count // block_size]
    return sorted_token_ids, expert_ids, used
