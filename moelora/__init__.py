"""Mixture-of-experts operators with LoRA adapters applied inside the grouped GEMM.

Notation of all docstrings: `M` tokens, `top_k` experts chosen per token, `E` experts on this
rank, `K` hidden size, `I` intermediate size of one expert, `R` maximum rank of a stack of
adapters, `max_loras` adapter slots.
"""

import torch  # noqa: F401  loads the libraries that moelora._C is linked against

from moelora import _C
from moelora import fake as _fake  # noqa: F401  registers the shape functions
from moelora import tuned as _tuned
from moelora.adapters import AdapterPool, MoELayer
from moelora.ops import (
    PackedWeights,
    fused_experts_lora,
    fused_moe_lora_gemm,
    moe_align_block_size,
    moe_lora_align_block_size,
    moe_sorting,
    prepack_weights,
)

__version__ = _C.version()
_tuned.load_configured()

__all__ = [
    "AdapterPool",
    "MoELayer",
    "PackedWeights",
    "__version__",
    "fused_experts_lora",
    "fused_moe_lora_gemm",
    "moe_align_block_size",
    "moe_lora_align_block_size",
    "moe_sorting",
    "prepack_weights",
]
