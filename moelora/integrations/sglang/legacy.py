"""MoE layers of SGLang's legacy LoRA backends (`triton`, `csgmv`), the only ones before 0.5.23."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from moelora.integrations.sglang.layer import MoeLoraRunner, reason_against
from moelora.integrations.sglang.quantized import kind_of


class Adapters(NamedTuple):
    """Adapters of a layer, with the attributes that `experts_with_lora` reads."""

    gate_up_lora_a: Tensor
    gate_up_lora_b: Tensor
    down_lora_a: Tensor
    down_lora_b: Tensor
    token_lora_mapping: Tensor

    @classmethod
    def of(cls, info: Any) -> Adapters:
        """From SGLang's `LoRAInfo`."""
        return cls(
            info.gate_up_lora_a_weights,
            info.gate_up_lora_b_weights,
            info.down_lora_a_weights,
            info.down_lora_b_weights,
            info.token_lora_mapping,
        )


class LegacyRunner:
    """One layer, with the interface of the `MoeRunner` that SGLang creates for layers with LoRA.

    Parameters
    ----------
    layer : FusedMoEWithLoRA
        The layer whose `_lora_runner` this becomes.
    say : callable
        Called with the reason if a batch runs SGLang's own path.
    """

    def __init__(self, layer: Any, say: Callable[[str], Any]) -> None:
        self.own = layer._lora_runner
        self.layer = MoeLoraRunner(layer.base_layer)
        self.lora_backend = layer.lora_backend
        self.say = say

    def run(self, dispatch_output: Any, quant_info: Any, lora_info: Any = None) -> Any:
        """The layer between dispatch and combine."""
        reason = self.reason_against(dispatch_output, lora_info)
        if reason:
            self.say(f"a batch is not supported: {reason}")
            return self.own.run(dispatch_output, quant_info, lora_info=lora_info)
        # A captured graph is replayed with adapters, even if captured without.
        active = lora_info.has_active_lora or self.lora_backend.batch_info.use_cuda_graph
        adapters = (Adapters.of(lora_info), lora_info.lora_ranks) if active else (None, None)
        try:
            return self.layer.experts(dispatch_output, *adapters)
        except (ValueError, NotImplementedError) as refusal:  # nothing is written yet
            self.say(f"a batch is not supported: {refusal}")
            return self.own.run(dispatch_output, quant_info, lora_info=lora_info)

    def reason_against(self, dispatch_output: Any, info: Any) -> str | None:
        """Why moelora cannot run this batch, or None."""
        experts = self.layer.base_layer.w13_weight.size(0)
        mapping = getattr(info, "token_lora_mapping", None)  # from 0.5.13 on
        if mapping is None:
            return "it has no adapter slots of tokens"
        if mapping.size(0) != dispatch_output.hidden_states.size(0):
            return "its adapters are those of other tokens"
        if any(factor.size(1) not in (1, experts) for factor in Adapters.of(info)[:4]):
            return "its adapters are of experts on other GPUs, too"
        return None


def reason_against_layer(layer: Any) -> str | None:
    """Why moelora cannot run SGLang's `FusedMoEWithLoRA` layer, or None."""
    backend = layer._lora_runner.runner_backend
    if not backend.is_triton():
        return f"its runner is {backend.value}"
    if reason := reason_against(layer.base_layer):
        return reason
    if kind_of(layer.base_layer) is not None:  # which run without adapters elsewhere
        return "its weights are quantized, and its backend is not triton_v2"
    return None
