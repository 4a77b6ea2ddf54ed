"""The API of SGLang that this integration uses."""

from __future__ import annotations

from moelora.integrations.interface import Interface as Interface
from moelora.integrations.interface import interface
from moelora.integrations.interface import problem as problem

LAYER = "sglang.srt.lora.layers.FusedMoEWithLoRA"
RUNNER = "sglang.srt.lora.moe.runner"

_TOKENS = """
    sglang.srt.layers.moe.token_dispatcher.standard
        called StandardCombineInput hidden_states
        fields StandardDispatchOutput hidden_states topk_output
    sglang.srt.layers.moe.topk
        fields StandardTopKOutput topk_weights topk_ids
"""

# Of all layers: where the plugin registers.
HOOKS = interface("""
    sglang.srt.plugins.hook_registry
        called HookRegistry.register target hook hook_type
""")

# Layers of the backends `triton` and `csgmv`, the only ones before 0.5.23.
LEGACY = interface(f"""
    sglang.srt.layers.moe.moe_runner.runner
        replaced MoeRunner.run self dispatch_output quant_info lora_info
    {_TOKENS}
    sglang.srt.lora.lora_moe_runners
        fields LoRAInfo gate_up_lora_a_weights gate_up_lora_b_weights \
            down_lora_a_weights down_lora_b_weights lora_ranks has_active_lora
""")

# Layers of the backend `triton_v2`.
TRITON_V2 = interface(f"""
    {RUNNER}
        replaced MoeLoraRunner.run self dispatch_output batch
    {_TOKENS}
    sglang.srt.lora.backend.base_backend
        called BaseLoRABackend.get_batch_info self layout
    {RUNNER}
        fields MoeLoraBatch gate_up_lora_a gate_up_lora_b down_lora_a down_lora_b token_lora_mapping
""")
