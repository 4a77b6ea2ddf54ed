"""Experts class of quantized vLLM layers with weights in moelora's tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moelora.integrations.vllm import SWITCH
from moelora.integrations.vllm.experts import TritonExpertsWithLoRA
from moelora.integrations.vllm.served import Call
from moelora.weights import QuantizedWeights


class QuantizedExpertsWithLoRA(TritonExpertsWithLoRA):
    """`TritonExpertsWithLoRA` with the tiles of `QuantizedWeights` as w1 and w2.

    Activations and adapters use the unquantized hidden states. Since vLLM cannot read tiles,
    unsupported layers are detected before their weights are packed; afterwards this class raises.

    Parameters
    ----------
    moe_config, quant_config
        Configurations of an unquantized layer, with its biases.
    w13, w2 : QuantizedWeights, optional
        Description of the tiles passed to `apply`. Absent: only for `reason_against`.
    """

    def __init__(
        self,
        moe_config: Any,
        quant_config: Any,
        w13: QuantizedWeights | None = None,
        w2: QuantizedWeights | None = None,
    ):
        super().__init__(moe_config, quant_config)
        # The layer's parameters hold the tiles, and may be moved or replaced.
        self._w13, self._w2 = (w and replace(w, data=torch.empty(0)) for w in (w13, w2))

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    def set_lora_context(self, ctx: Any) -> None:
        super().set_lora_context(ctx)
        if reason := self.reason_against(self.moe_config.activation):
            self._step_aside(reason)

    def _is_ours(self, call: Call) -> bool:
        """vLLM cannot read tiles: which side runs a layer is decided before it is packed."""
        return True

    def _may_leave(self, tokens: int) -> bool:
        return False

    def _interleaved(self, activation: Any) -> bool:
        """As packed: rows that alternate in the checkpoint are put apart for adapters with factors
        for each."""
        together = self._w13 is None or self._w13.gate_up == "interleaved"
        return together and super()._interleaved(activation)

    def moe_problem_size(
        self, a1: Tensor, w1: Tensor, w2: Tensor, topk_ids: Tensor
    ) -> tuple[int, int, int, int, int]:
        assert self._w13
        m, k = a1.shape
        return w1.size(0), m, self._w13.shape[1], k, topk_ids.size(1)

    def _weights(self, w1: Tensor, w2: Tensor) -> tuple[QuantizedWeights, QuantizedWeights]:
        assert self._w13 and self._w2
        return replace(self._w13, data=w1), replace(self._w2, data=w2)

    def _step_aside(self, reason: str) -> None:
        self._refusal = None  # of this call only
        raise RuntimeError(f"moelora: {reason}; start vLLM with {SWITCH}=0")
