"""Slow, obvious versions of every operator: what the fast ones are tested against.

`*_ref` functions work in float64 on the CPU and never round, so their result is the mathematical
value of the definition, whatever dtype the inputs had. Alignment references work on plain Python
lists.

`naive_*` functions compute the same values in the dtype and on the device of the inputs, the way a
torch user would write them without this package: one expert at a time, `index_select`, `mm`, and
separate LoRA matrix products. Each product is rounded to that dtype; only the sum over `top_k` is
fp32. Their error against `*_ref` says how much accuracy a dtype allows, and their time is a
baseline.

All take the keyword arguments of the operator whose name they carry. Quantized weights have the
values of `unpack()`, each rounded once; with FP8 activations their exact values, and activations
the values that they are quantized to. Ids out of range mean the same everywhere: a row whose expert
id (after `expert_map`) is not in [0, E) is skipped, and a row whose adapter id is not in [0,
max_loras), or whose adapter is disabled or has rank 0, is a base row.
"""

from moelora.reference.align import (
    align_max_blocks_ref,
    moe_align_block_size_ref,
    moe_lora_align_block_size_ref,
    moe_sorting_ref,
)
from moelora.reference.backward import (
    fused_experts_lora_backward_ref,
    fused_moe_lora_gemm_backward_ref,
    naive_fused_experts_lora_backward,
    naive_fused_moe_lora_gemm_backward,
)
from moelora.reference.delta import moe_lora_align_lists_ref, moe_lora_delta_ref, run_moe_lora_ref
from moelora.reference.layer import (
    activate,
    fused_experts_lora_ref,
    fused_moe_lora_gemm_ref,
    naive_fused_experts_lora,
    naive_fused_moe_lora_gemm,
)
from moelora.reference.routing import Factors, active_adapter, local_expert

__all__ = [
    "Factors",
    "activate",
    "active_adapter",
    "align_max_blocks_ref",
    "fused_experts_lora_backward_ref",
    "fused_experts_lora_ref",
    "fused_moe_lora_gemm_backward_ref",
    "fused_moe_lora_gemm_ref",
    "local_expert",
    "moe_align_block_size_ref",
    "moe_lora_align_block_size_ref",
    "moe_lora_align_lists_ref",
    "moe_lora_delta_ref",
    "moe_sorting_ref",
    "naive_fused_experts_lora",
    "naive_fused_experts_lora_backward",
    "naive_fused_moe_lora_gemm",
    "naive_fused_moe_lora_gemm_backward",
    "run_moe_lora_ref",
]
