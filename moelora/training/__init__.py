"""Explicit backwards of operators, and `Tenants`, which trains several adapters in one step."""

from moelora.training.layer import (
    Gradients,
    Saved,
    fused_experts_lora_backward,
    fused_experts_lora_saving,
    touched_pairs,
)
from moelora.training.projection import (
    ProjectionGradients,
    fused_moe_lora_gemm_backward,
    moe_lora_delta_backward,
)
from moelora.training.tenants import Step, Tenant, Tenants

__all__ = [
    "Gradients",
    "ProjectionGradients",
    "Saved",
    "Step",
    "Tenant",
    "Tenants",
    "fused_experts_lora_backward",
    "fused_experts_lora_saving",
    "fused_moe_lora_gemm_backward",
    "moe_lora_delta_backward",
    "touched_pairs",
]
