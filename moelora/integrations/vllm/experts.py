"""Experts classes of vLLM's MoE layers: unquantized ones, and those with weights in tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe import modular_kernel
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.oracle import unquantized

from moelora.integrations.vllm import OWN_PATH, SWITCH, adapters, interface, race, say_once, wrap
from moelora.integrations.vllm.served import Call, Served, quantization
from moelora.operators.experts import Weights, fused_experts_lora
from moelora.weights import QuantizedWeights

# vLLM classes that claim LoRA support but ignore it in apply.
DROPPING = ("TritonWNA16Experts",)


class TritonExpertsWithLoRA(Served, TritonExperts):  # type: ignore[misc] # vLLM is not there
    """`fused_experts_lora` in place of vLLM's Triton experts, in engines with and without LoRA.

    Same role in the layer: `apply` writes the weighted sum over the selected experts, (M, K), and
    takes adapters from the `MoELoRAContext` that `FusedMoEWithLoRA` sets; without one, the layer
    has none. Tensor parallel: weights and stacks are this rank's shards. Expert parallel:
    `expert_map` skips other ranks' experts.

    Two results differ from vLLM's by more than rounding, and match the merged model: a router
    weight on the input also scales the adapter's input, and the low-rank product is added to the
    accumulators of the base product unrounded.
    """

    def set_lora_context(self, ctx: Any) -> None:
        super().set_lora_context(ctx)
        self._reasons.clear()
        self._of = None

    def _weights(self, w1: Tensor, w2: Tensor) -> tuple[Weights, Weights]:
        """Arguments of `apply`."""
        return w1, w2

    def _serve(self, call: Call) -> None:
        w13, w2 = self._weights(call.w1, call.w2)
        topk_weights = call.topk_weights
        if call.apply_router_weight_on_input:  # vLLM's prepare step has scaled hidden_states
            topk_weights = torch.ones_like(topk_weights)
        ctx = self._lora_context
        lora = {} if ctx is None else adapters.arguments(ctx, call.hidden_states.size(0))
        fused_experts_lora(
            call.hidden_states,
            w13,
            w2,
            topk_weights,
            call.topk_ids,
            w13_bias=self.w1_bias,
            w2_bias=self.w2_bias,
            expert_map=call.expert_map,
            out=call.output,
            **self._activation(call.activation),
            **lora,
        )

    def _has_adapters(self, call: Call) -> bool:
        ctx = self._lora_context
        return ctx is not None and bool(adapters.arguments(ctx, call.hidden_states.size(0)))

    def _identity(self, call: Call) -> dict[str, Any]:
        ctx = self._lora_context
        stacks = () if ctx is None else (*ctx.w13_lora_a_stacked, *ctx.w2_lora_a_stacked)
        return race.identity(
            "unquantized",
            w13=tuple(call.w1.shape),
            w2=tuple(call.w2.shape),
            top_k=call.topk_ids.size(1),
            dtype=call.hidden_states.dtype,
            activation=call.activation.value,
            adapters=[tuple(stack.shape) for stack in stacks],
        )

    def _sides(self, call: Call, tokens: int, adapters: bool) -> race.Sides:
        ctx = self._lora_context
        local = getattr(ctx, "local_token_lora_mapping", None)  # of tokens of all ranks
        hidden = call.hidden_states[:tokens]
        part = call._replace(
            output=torch.empty_like(hidden),  # the call's shares memory with its workspace
            hidden_states=hidden,
            topk_weights=call.topk_weights[:tokens],
            topk_ids=call.topk_ids[:tokens],
            workspace13=hidden.new_empty(0),
            workspace2=hidden.new_empty(0),
        )
        part = self._with_workspaces(part)

        def side(run: Callable[[Call], None]) -> Callable[[], None]:
            def call_it() -> None:
                self._lora_context = ctx if adapters else None
                if local is not None:
                    ctx.local_token_lora_mapping = local[:tokens]
                try:
                    run(part)
                finally:
                    self._lora_context = ctx
                    if local is not None:
                        ctx.local_token_lora_mapping = local

            return call_it

        return race.Sides(side(self._serve), side(self._theirs))


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


def install() -> None:
    """Give unquantized layers these classes wherever vLLM selects its Triton experts."""
    served = {TritonExperts: TritonExpertsWithLoRA}
    if problem := interface.problem(interface.BATCHED):
        say_once(f"{problem}; {OWN_PATH} for tokens that are batched by expert")
    else:
        from vllm.model_executor.layers.fused_moe.experts import fused_batched_moe

        from moelora.integrations.vllm.batched import BatchedTritonExpertsServed

        served[fused_batched_moe.BatchedTritonExperts] = BatchedTritonExpertsServed

    def choose(backend_to_kernel_cls: Callable[..., Any], backend: Any) -> list[type]:
        return [served.get(cls, cls) for cls in backend_to_kernel_cls(backend)]

    wrap(unquantized, "backend_to_kernel_cls", choose)
    wrap(modular_kernel.FusedMoEKernel, "__init__", _name_others)


def _name_others(
    init: Callable[..., Any], self: Any, prepare_finalize: Any, fused_experts: Any
) -> None:
    """Say which layers stay with vLLM, by the class of their experts."""
    init(self, prepare_finalize, fused_experts)
    if not isinstance(fused_experts, Served):
        dtype = quantization(fused_experts)
        base = "unquantized" if dtype is None else f"quantized ({dtype})"
        name = type(fused_experts).__name__
        say_once(f"vLLM gives {base} layers to {name}; {OWN_PATH}")
        if name in DROPPING and getattr(fused_experts.moe_config, "is_lora_enabled", False):
            say_once(f"vLLM's {name} IGNORES ADAPTERS: answers are the base model's")
