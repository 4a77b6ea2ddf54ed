"""Experts class of vLLM's unquantized layers whose tokens come batched by expert.

DeepEP's low-latency exchange and NIXL's hand over (E, T, K), and `expert_num_tokens`. vLLM refuses
LoRA with them, so that these layers never have adapters; `batched_experts_lora` would take them.
Quantized layers stay with vLLM: the exchange quantizes what it sends, in vLLM's own formats.
"""

from __future__ import annotations

from vllm.model_executor.layers.fused_moe.experts.fused_batched_moe import BatchedTritonExperts

from moelora.integrations.batched import batched_experts_lora
from moelora.integrations.vllm.served import Call, Served


class BatchedTritonExpertsServed(Served, BatchedTritonExperts):  # type: ignore[misc]
    """`batched_experts_lora` in place of vLLM's batched Triton experts.

    Same role in the layer: `apply` writes each row's result, (E, T, K), which the exchange weights
    and sums.
    """

    def _serve(self, call: Call) -> None:
        batched_experts_lora(
            call.hidden_states,
            call.w1,
            call.w2,
            call.expert_tokens_meta.expert_num_tokens,
            out=call.output,
            w13_bias=self.w1_bias,
            w2_bias=self.w2_bias,
            **self._activation(call.activation),
        )
