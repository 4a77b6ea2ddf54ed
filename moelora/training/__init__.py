"""Explicit backwards of operators; `Tenants`, which trains several adapters in one step; and
`MultiLoraExperts`, a module whose slots train with any optimizer."""

from moelora.training.layer import (
    Gradients,
    Saved,
    fused_experts_lora_backward,
    fused_experts_lora_saving,
    touched_pairs,
)
from moelora.training.lora_slot import Held, LoraSlot
from moelora.training.multi import MultiLoraExperts, set_adapters
from moelora.training.projection import (
    ProjectionGradients,
    fused_moe_lora_gemm_backward,
    moe_lora_delta_backward,
)
from moelora.training.tenants import Step, Tenant, Tenants

__all__ = [
    "Gradients",
    "Held",
    "LoraSlot",
    "MultiLoraExperts",
    "ProjectionGradients",
    "Saved",
    "Step",
    "Tenant",
    "Tenants",
    "fused_experts_lora_backward",
    "fused_experts_lora_saving",
    "fused_moe_lora_gemm_backward",
    "moe_lora_delta_backward",
    "set_adapters",
    "touched_pairs",
]
