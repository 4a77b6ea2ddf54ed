"""Alignment on plain Python lists."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moelora.reference.routing import adapter_per_token, expert_per_choice

if TYPE_CHECKING:
    from moelora.operators.align import AlignMode


def align_max_blocks_ref(
    mode: str, num_rows: int, num_experts: int, block_size: int, max_loras: int = 0
) -> int:
    """How many blocks the outputs of an alignment hold, whatever the ids turn out to be.

    `mode` is "base", "uniform", "segmented" or "sorting". Every non-empty group of rows wastes at
    most block_size - 1 places, a group has at least one row, and no more groups than rows exist;
    `sorting` gives each of the empty experts one block too.
    """
    if mode == "sorting":
        return num_experts + num_rows // block_size
    groups = num_experts * (max_loras + 1) if mode == "uniform" else num_experts
    groups = min(groups, num_rows)
    return min(num_rows, (num_rows + groups * (block_size - 1)) // block_size)


def _int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _pad(values: list[Any], length: int, padding: float) -> list[Any]:
    return values + [padding] * (length - len(values))


def moe_lora_align_block_size_ref(
    topk_ids: Tensor,
    token_lora_mapping: Tensor,
    num_experts: int,
    block_size: int,
    max_loras: int,
    *,
    mode: AlignMode = "uniform",
    adapter_enabled: Tensor | None = None,
    expert_map: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sort routed rows by (local expert, adapter) and pad each group to whole blocks.

    `uniform`: a group is one (expert, adapter) pair, so a block holds one pair; `lora_ids` has one
    entry per block. `segmented`: a group is one expert, its rows ordered by adapter; `lora_ids` has
    one entry per row. Adapter -1 (base rows) sorts first; equal keys keep the order of the flat row
    index m * top_k + j.

    Returns int32 (sorted_token_ids, expert_ids, lora_ids, num_tokens_post_padded) of the sizes of
    `align_max_blocks_ref`; padding is M * top_k in the row ids and -1 elsewhere.
    """
    num_tokens, top_k = topk_ids.shape
    experts = expert_per_choice(topk_ids, num_experts, expert_map)
    adapters = adapter_per_token(num_tokens, max_loras, token_lora_mapping, adapter_enabled, None)
    padding = num_tokens * top_k

    groups: dict[tuple[int, ...], list[tuple[int, int]]] = {}  # key -> [(adapter, row)]
    for m in range(num_tokens):
        for j in range(top_k):
            e = experts[m][j]
            if e >= 0:
                key: tuple[int, ...] = (e, adapters[m]) if mode == "uniform" else (e,)
                groups.setdefault(key, []).append((adapters[m], m * top_k + j))

    sorted_token_ids: list[int] = []
    expert_ids: list[int] = []
    lora_per_row: list[int] = []
    lora_per_block: list[int] = []
    for key in sorted(groups):
        rows = sorted(groups[key])
        num_blocks = -(-len(rows) // block_size)
        sorted_token_ids += _pad([row for _, row in rows], num_blocks * block_size, padding)
        lora_per_row += _pad([adapter for adapter, _ in rows], num_blocks * block_size, -1)
        expert_ids += [key[0]] * num_blocks
        lora_per_block += [rows[0][0]] * num_blocks

    max_blocks = align_max_blocks_ref(mode, padding, num_experts, block_size, max_loras)
    max_rows = max_blocks * block_size
    if mode == "uniform":
        lora_ids = _pad(lora_per_block, max_blocks, -1)
    else:
        lora_ids = _pad(lora_per_row, max_rows, -1)
    return (
        _int32(_pad(sorted_token_ids, max_rows, padding)),
        _int32(_pad(expert_ids, max_blocks, -1)),
        _int32(lora_ids),
        _int32([len(sorted_token_ids)]),
    )


def moe_align_block_size_ref(
    topk_ids: Tensor, block_size: int, num_experts: int, *, expert_map: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort routed rows by local expert and pad each expert's rows to whole blocks.

    Returns int32 (sorted_token_ids, expert_ids, num_tokens_post_padded) like
    `moe_lora_align_block_size_ref` without adapters. An empty expert gets no block.
    """
    mapping = torch.full((topk_ids.size(0),), -1, dtype=torch.int32)
    sorted_token_ids, expert_ids, _, num_tokens_post_padded = moe_lora_align_block_size_ref(
        topk_ids, mapping, num_experts, block_size, 0, mode="segmented", expert_map=expert_map
    )
    return sorted_token_ids, expert_ids, num_tokens_post_padded


def moe_sorting_ref(
    topk_ids: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    block_size: int,
    *,
    out_to_zero: Tensor | None = None,
    expert_map: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """CK-tile's alignment: rows sorted by local expert, with token ids and routing weights.

    `sorted_token_ids` holds tokens m, not flat rows m * top_k + j; `sorted_weights` the matching
    routing weights, 0 in padding. Every local expert without rows gets one block of padding (with
    `expert_map` the local experts are the ids that occur in it). `out_to_zero` is zeroed.

    Returns (sorted_token_ids int32, sorted_weights fp32, sorted_expert_ids int32,
    num_tokens_post_padded int32).
    """
    num_tokens, top_k = topk_ids.shape
    experts = expert_per_choice(topk_ids, num_experts, expert_map)
    weights = topk_weights.tolist()
    padding = num_tokens * top_k
    here = range(num_experts) if expert_map is None else set(expert_map.tolist())

    sorted_token_ids: list[int] = []
    sorted_weights: list[float] = []
    expert_ids: list[int] = []
    for e in range(num_experts):
        if e not in here:
            continue
        rows = [(m, j) for m in range(num_tokens) for j in range(top_k) if experts[m][j] == e]
        num_blocks = max(1, -(-len(rows) // block_size))
        sorted_token_ids += _pad([m for m, _ in rows], num_blocks * block_size, padding)
        sorted_weights += _pad([weights[m][j] for m, j in rows], num_blocks * block_size, 0.0)
        expert_ids += [e] * num_blocks

    if out_to_zero is not None:
        out_to_zero.zero_()
    max_blocks = align_max_blocks_ref("sorting", padding, num_experts, block_size)
    max_rows = max_blocks * block_size
    return (
        _int32(_pad(sorted_token_ids, max_rows, padding)),
        torch.tensor(_pad(sorted_weights, max_rows, 0.0), dtype=torch.float32),
        _int32(_pad(expert_ids, max_blocks, -1)),
        _int32([len(sorted_token_ids)]),
    )
