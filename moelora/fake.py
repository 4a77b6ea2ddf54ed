"""Shape functions of the compiled operators, for torch.compile, export and meta tensors."""

import torch
from torch import Tensor

PACK = 64
BASE, UNIFORM, SEGMENTED, SORTING = range(4)


def max_blocks(mode, num_rows, num_experts, max_loras, block_size):
    """moelora_align_max_blocks of csrc/moelora.h; sizes may be symbolic."""
    if mode == SORTING:
        return num_experts + num_rows // block_size
    groups = num_experts * (max_loras + 1) if mode == UNIFORM else num_experts
    groups = torch.sym_min(groups, num_rows)
    return groups + (num_rows - groups) // block_size


def _align(topk_ids: Tensor, blocks, block_size) -> tuple[Tensor, Tensor, Tensor]:
    def ids(size):
        return topk_ids.new_empty((size,), dtype=torch.int32)

    return ids(blocks * block_size), ids(blocks), ids(1)


@torch.library.register_fake("moelora::moe_align_block_size")
def _(topk_ids, block_size, num_experts, expert_map):
    blocks = max_blocks(BASE, topk_ids.numel(), num_experts, 0, block_size)
    return _align(topk_ids, blocks, block_size)


@torch.library.register_fake("moelora::moe_lora_align_block_size")
def _(
    topk_ids,
    token_lora_mapping,
    num_experts,
    block_size,
    max_loras,
    mode,
    adapter_enabled,
    expert_map,
):
    blocks = max_blocks(mode, topk_ids.numel(), num_experts, max_loras, block_size)
    rows, experts, num_post = _align(topk_ids, blocks, block_size)
    lora_ids = torch.empty_like(experts if mode == UNIFORM else rows)
    return rows, experts, lora_ids, num_post


@torch.library.register_fake("moelora::moe_sorting")
def _(topk_ids, topk_weights, num_experts, block_size, out_to_zero, expert_map):
    blocks = max_blocks(SORTING, topk_ids.numel(), num_experts, 0, block_size)
    rows, experts, num_post = _align(topk_ids, blocks, block_size)
    return rows, torch.empty_like(rows, dtype=torch.float32), experts, num_post


@torch.library.register_fake("moelora::fused_moe_lora_gemm")
def _(x, w, topk_weights, topk_ids, *others):
    columns = w.size(1) * (PACK if w.dim() == 5 else 1)
    return x.new_empty((topk_ids.size(0), topk_ids.size(1), columns))


@torch.library.register_fake("moelora::fused_experts_lora")
def _(hidden_states, *others):
    return torch.empty_like(hidden_states, memory_format=torch.contiguous_format)


def _writes_in_place(*args):
    return None


for _name in (
    *("fused_moe_lora_gemm_out", "fused_experts_lora_out", "moe_lora_align_block_size_out"),
    *("fused_moe_lora", "fused_moe_lora_shrink", "fused_moe_lora_expand"),
    *("moe_lora_gate_up_delta", "moe_lora_down_delta"),
    *("moe_lora_a", "moe_lora_gate_up_b", "moe_lora_down_combine", "moe_lora_fused"),
):
    torch.library.register_fake(f"moelora::{_name}", _writes_in_place)


@torch.library.register_fake("moelora::prepack_weights")
def _(w):
    return w.new_empty((w.size(0), w.size(1) // PACK, w.size(2) // PACK, PACK, PACK))
