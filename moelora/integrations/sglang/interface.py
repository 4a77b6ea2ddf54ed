"""The API of SGLang that this integration uses."""

from __future__ import annotations

from moelora.integrations.interface import Interface as Interface
from moelora.integrations.interface import problem as problem

LAYER = "sglang.srt.lora.layers.FusedMoEWithLoRA"
RUNNER = "sglang.srt.lora.moe.runner"
_STANDARD = "sglang.srt.layers.moe.token_dispatcher.standard"

_COMBINED = {_STANDARD: {"StandardCombineInput": "hidden_states"}}
_DISPATCHED = {
    _STANDARD: {"StandardDispatchOutput": "hidden_states topk_output"},
    "sglang.srt.layers.moe.topk": {"StandardTopKOutput": "topk_weights topk_ids"},
}

# Of all layers: where the plugin registers.
HOOKS = Interface(
    called={"sglang.srt.plugins.hook_registry": {"HookRegistry.register": "target hook hook_type"}}
)

# Layers of the backends `triton` and `csgmv`, the only ones before 0.5.23.
LEGACY = Interface(
    replaced={
        "sglang.srt.layers.moe.moe_runner.runner": {
            "MoeRunner.run": "self dispatch_output quant_info lora_info"
        }
    },
    called=_COMBINED,
    fields=_DISPATCHED
    | {
        "sglang.srt.lora.lora_moe_runners": {
            "LoRAInfo": (
                "gate_up_lora_a_weights gate_up_lora_b_weights down_lora_a_weights "
                "down_lora_b_weights lora_ranks has_active_lora"
            )
        }
    },
)

# Layers of the backend `triton_v2`.
TRITON_V2 = Interface(
    replaced={RUNNER: {"MoeLoraRunner.run": "self dispatch_output batch"}},
    called=_COMBINED
    | {"sglang.srt.lora.backend.base_backend": {"BaseLoRABackend.get_batch_info": "self layout"}},
    fields=_DISPATCHED
    | {
        RUNNER: {
            "MoeLoraBatch": (
                "gate_up_lora_a gate_up_lora_b down_lora_a down_lora_b token_lora_mapping"
            )
        }
    },
)
