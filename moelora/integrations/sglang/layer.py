"""One MoE layer of SGLang: its weights, adapter buffers and slots in one operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moelora.integrations.sglang.quantized import Tiles, device_of, kind_of, reason_against_weights
from moelora.operators.call import typed, weights_or_absent
from moelora.operators.experts import Activation, fused_experts_lora
from moelora.operators.storage import check_held
from moelora.weights.quantized import QuantizedWeights

FACTORS = ("gate_up_lora_a", "gate_up_lora_b", "down_lora_a", "down_lora_b")


@typed
def experts_with_lora(
    hidden_states: Tensor,
    w13_weight: Tensor | QuantizedWeights,
    w2_weight: Tensor | QuantizedWeights,
    topk_weights: Tensor,
    topk_ids: Tensor,
    batch: Any,
    *,
    lora_ranks: Tensor | None = None,
    activation: Activation = "silu",
    routed_scaling_factor: float | None = None,
    apply_router_weight_on_input: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """A whole MoE layer, exactly, with adapters in the buffers of SGLang's memory pool.

    Parameters
    ----------
    hidden_states : Tensor, shape (T, H)
        Input of each token.
    w13_weight, w2_weight : Tensor or QuantizedWeights, shapes (E, S I, H) and (E, H, I)
        Experts of this rank, gate rows first; S is 2 with a gate, 1 without.
    topk_weights, topk_ids : Tensor, shape (T, top_k)
        Experts of each token by their local ids; others, such as -1, are skipped.
    batch : MoeLoraBatch, or any object with its tensors, or None for a layer without adapters
        With L slots of R ranks; an expert dimension of 1 is one factor shared by all experts
        (`experts_shared_outer_loras`), and scalings are already in the B factors:
        `gate_up_lora_a` (L, E or 1, S R, H), where the up rows begin at row R;
        `gate_up_lora_b` (L, E or 1, S I, R); `down_lora_a` (L, E or 1, R, I);
        `down_lora_b` (L, E or 1, H, R); `token_lora_mapping` (T,) slot of each token, -1 for none.
    lora_ranks : Tensor, shape (L,), int32, optional
        True rank of each slot; avoids reading the zero padding.
    activation : {"silu", "relu2"}
        With a gate and without.
    routed_scaling_factor : float, optional
        Factor of all routing weights.
    apply_router_weight_on_input, out
        As in `fused_experts_lora`.

    Returns
    -------
    Tensor, shape (T, H)
        `out`, or a new tensor; not reduced over ranks.

    Raises
    ------
    ValueError
        A shape, dtype, stride or value is not as above, or the tensors are on different devices.
    TypeError
        An argument is of another type than in the signature, or a tensor of `batch` is missing.
    NotImplementedError
        This build or this device has no kernel for it.
    """
    if routed_scaling_factor not in (None, 1.0):
        topk_weights = weights_or_absent("topk_weights", topk_weights, topk_weights)
        check_held("topk_weights", topk_weights)
        topk_weights = topk_weights * routed_scaling_factor
    adapters: dict[str, Any] = {}
    if batch is not None:
        for name in ("token_lora_mapping", *FACTORS):
            if not isinstance(getattr(batch, name, None), Tensor):
                raise TypeError(f"batch.{name} is {getattr(batch, name, None)!r}, expected Tensor")
        slices = 1 if activation == "relu2" else 2
        adapters = {
            "token_lora_mapping": batch.token_lora_mapping,
            # Views: the slices of a pair are stacked in SGLang's buffers.
            "w13_lora_a": batch.gate_up_lora_a.chunk(slices, dim=2),
            "w13_lora_b": batch.gate_up_lora_b.chunk(slices, dim=2),
            "w2_lora_a": batch.down_lora_a,
            "w2_lora_b": batch.down_lora_b,
            "lora_ranks": lora_ranks,
        }
    return fused_experts_lora(
        hidden_states,
        w13_weight,
        w2_weight,
        topk_weights,
        topk_ids,
        **adapters,
        activation=activation,
        apply_router_weight_on_input=apply_router_weight_on_input,
        out=out,
    )


class MoeLoraRunner:
    """One layer, with the interface of SGLang's class of this name.

    Quantized weights are packed into tiles, which replace the layer's tensors; ValueError if these
    are not what the format requires.
    """

    def __init__(self, base_layer: Any) -> None:
        config = base_layer.moe_runner_config
        self.base_layer = base_layer
        self.lora_backend: Any = None  # whose batch has the true ranks
        # Runs a batch in SGLang's own runner, given the reason; weights in tiles it cannot read.
        self.run_own: Callable[[str, Any, Any], Any] | None = None
        self.activation = config.activation
        self.apply_router_weight_on_input = config.apply_router_weight_on_input
        fused = base_layer.should_fuse_routed_scaling_factor_in_topk
        self.routed_scaling_factor = None if fused else config.routed_scaling_factor
        kind = kind_of(base_layer)
        self.tiles = None if kind is None else Tiles(base_layer, kind)

    @classmethod
    def from_layer(
        cls, base_layer: Any, *, workspace: Any = None, is_shared_outer: bool, physical_rank: int
    ) -> MoeLoraRunner:
        """Runner of a layer; NotImplementedError if `reason_against` returns a reason.

        moelora needs no workspace, and infers from the buffers whether factors are shared.
        """
        reason = reason_against(base_layer)
        if reason:
            raise NotImplementedError(reason)
        return cls(base_layer)

    def run(self, dispatch_output: Any, batch: Any) -> Any:
        """The layer between dispatch and combine."""
        adapters = (batch, self.true_ranks()) if self.has_adapters() else (None, None)
        try:
            return self.experts(dispatch_output, *adapters)
        except (ValueError, NotImplementedError) as refusal:  # nothing is written yet
            if self.run_own is None or self.tiles:
                raise
            return self.run_own(str(refusal), dispatch_output, batch)

    def run_base(self, dispatch_output: Any) -> Any:
        """The same without adapters."""
        return self.experts(dispatch_output, None, None)

    def experts(self, dispatch_output: Any, batch: Any, lora_ranks: Tensor | None) -> Any:
        """`experts_with_lora` for dispatched tokens, in the form that the dispatcher combines."""
        from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput

        topk = dispatch_output.topk_output
        if self.tiles:
            w13, w2 = self.tiles.weights()
        else:
            w13, w2 = self.base_layer.w13_weight, self.base_layer.w2_weight
        out = experts_with_lora(
            dispatch_output.hidden_states,
            w13,
            w2,
            topk.topk_weights,
            topk.topk_ids,
            batch,
            lora_ranks=lora_ranks,
            activation=self.activation,
            routed_scaling_factor=self.routed_scaling_factor,
            apply_router_weight_on_input=self.apply_router_weight_on_input,
        )
        return StandardCombineInput(hidden_states=out)

    def true_ranks(self) -> Tensor | None:
        """True rank of each slot, (L,) int32; None if unknown."""
        info = self.batch_info()
        return info and info.lora_ranks

    def has_adapters(self) -> bool:
        """Whether tokens may have adapters: in this batch, or when a graph that is captured now is
        replayed. SGLang captures decodes twice, for batches with adapters and without."""
        if getattr(self.batch_info(), "has_active_lora", True):
            return True
        try:
            from sglang.srt.lora.utils import capturing_lora_graph
        except ImportError:
            return True
        return bool(capturing_lora_graph())

    def batch_info(self) -> Any:
        """What SGLang's LoRA backend knows of the batch; None if there is no backend.

        With data-parallel attention, experts process the tokens of all ranks, and the batch with
        their adapters is not that of this rank's tokens.
        """
        if self.lora_backend is None:
            return None
        try:
            from sglang.srt.runtime_context import LoRABatchLayout
        except ImportError:
            return self.lora_backend.batch_info
        return self.lora_backend.get_batch_info(LoRABatchLayout.TP_GLOBAL)


def reason_against(base_layer: Any) -> str | None:
    """Why moelora cannot run SGLang's `FusedMoE` layer, or None."""
    config = base_layer.moe_runner_config
    device = device_of(base_layer)
    dispatcher = base_layer.dispatcher
    factor = config.routed_scaling_factor
    gated = {"silu": True, "relu2": False}
    on_input = config.apply_router_weight_on_input
    old = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
    weights = reason_against_weights(base_layer)
    rules = (
        (old, "the compute capability of its GPU is below 8.0"),
        (weights is not None, weights),
        (
            type(dispatcher).__name__ != "StandardDispatcher",
            f"its dispatcher is {type(dispatcher).__name__}",
        ),
        (getattr(dispatcher, "skip_local_expert_mapping", False), "its expert ids are global"),
        (
            gated.get(config.activation) is not bool(config.is_gated),
            f"its activation is {config.activation!r}, {'' if config.is_gated else 'not '}gated",
        ),
        (
            any(
                getattr(config, name, None) is not None
                for name in ("gemm1_alpha", "gemm1_clamp_limit", "swiglu_limit")
            ),
            "its activation is scaled or clamped",
        ),
        (getattr(base_layer, "with_bias", False), "its experts have biases"),
        (config.no_combine, "its experts' outputs are not summed"),
        (config.num_fused_shared_experts, "shared experts are fused into it"),
        (
            on_input and (config.top_k != 1 or factor not in (None, 1.0)),
            "its routing weights are for the input, and more than one or scaled",
        ),
    )
    return next((reason for applies, reason in rules if applies), None)
