"""MoE layers of SGLang's legacy LoRA backends (`triton`, `csgmv`), the only ones before 0.5.23."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from moelora.integrations.sglang.layer import FACTORS, MoeLoraRunner, reason_against
from moelora.integrations.sglang.quantized import kind_of


def _factors(info: Any) -> dict[str, Tensor]:
    """The factors of SGLang's `LoRAInfo`, by the names that `experts_with_lora` reads."""
    return {name: getattr(info, f"{name}_weights") for name in FACTORS}


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
        if reason is None:
            # A captured graph is replayed with adapters, even if captured without.
            active = lora_info.has_active_lora or self.lora_backend.batch_info.use_cuda_graph
            batch = ranks = None
            if active:
                mapping, ranks = lora_info.token_lora_mapping, lora_info.lora_ranks
                batch = SimpleNamespace(token_lora_mapping=mapping, **_factors(lora_info))
            try:
                return self.layer.experts(dispatch_output, batch, ranks)
            except (ValueError, NotImplementedError) as refusal:  # nothing is written yet
                reason = str(refusal)
        self.say(f"a batch is not supported: {reason}")
        return self.own.run(dispatch_output, quant_info, lora_info=lora_info)

    def reason_against(self, dispatch_output: Any, info: Any) -> str | None:
        """Why moelora cannot run this batch, or None."""
        experts = self.layer.base_layer.w13_weight.size(0)
        mapping = getattr(info, "token_lora_mapping", None)  # from 0.5.13 on
        if mapping is None:
            return "it has no adapter slots of tokens"
        if mapping.size(0) != dispatch_output.hidden_states.size(0):
            return "its adapters are those of other tokens"
        if any(factor.size(1) not in (1, experts) for factor in _factors(info).values()):
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
