"""Mixture-of-experts operators with LoRA adapters fused into the grouped GEMM.

Notation in all docstrings: `M` tokens, `top_k` experts per token, `E` experts on this rank, `K`
hidden size, `I` intermediate size of an expert, `R` maximum rank of a stack of adapters,
`max_loras` adapter slots.
"""

import torch  # noqa: F401  loads the libraries that moelora._C is linked against

from moelora.operators import startup as _startup  # noqa: F401  explains why the extension does not load

# isort: split
from moelora import _C
from moelora.adapters import AdapterPool, LinearLayer, MoELayer
from moelora.integrations.sglang.batch import MoELoRABatchInfo
from moelora.integrations.sglang.ops import (
    moe_lora_a,
    moe_lora_down_combine,
    moe_lora_fused,
    moe_lora_gate_up_b,
    run_moe_lora,
)
from moelora.integrations.vllm.ops import (
    fused_moe_lora,
    fused_moe_lora_expand,
    fused_moe_lora_shrink,
)
from moelora.operators import fake as _fake  # noqa: F401  registers the shape functions
from moelora.operators import tuned as _tuned
from moelora.operators.align import moe_align_block_size, moe_lora_align_block_size, moe_sorting
from moelora.operators.delta import moe_lora_down_delta, moe_lora_gate_up_delta
from moelora.operators.experts import fused_experts_lora, fused_moe_lora_gemm
from moelora.training import (
    Gradients,
    ProjectionGradients,
    Saved,
    fused_experts_lora_backward,
    fused_experts_lora_saving,
    fused_moe_lora_gemm_backward,
    moe_lora_delta_backward,
)
from moelora.weights import PackedWeights, QuantizedWeights, prepack_weights

__version__ = _C.version()
_tuned.load_configured()

__all__ = [
    "AdapterPool",
    "Gradients",
    "LinearLayer",
    "MoELayer",
    "MoELoRABatchInfo",
    "PackedWeights",
    "ProjectionGradients",
    "QuantizedWeights",
    "Saved",
    "__version__",
    "fused_experts_lora",
    "fused_experts_lora_backward",
    "fused_experts_lora_saving",
    "fused_moe_lora",
    "fused_moe_lora_expand",
    "fused_moe_lora_gemm",
    "fused_moe_lora_gemm_backward",
    "fused_moe_lora_shrink",
    "moe_align_block_size",
    "moe_lora_a",
    "moe_lora_align_block_size",
    "moe_lora_delta_backward",
    "moe_lora_down_combine",
    "moe_lora_down_delta",
    "moe_lora_fused",
    "moe_lora_gate_up_b",
    "moe_lora_gate_up_delta",
    "moe_sorting",
    "prepack_weights",
    "run_moe_lora",
]
