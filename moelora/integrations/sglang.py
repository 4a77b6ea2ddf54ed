"""moelora inside SGLang: a MoE layer and its LoRA adapters in one operator.

To install moelora is all: SGLang loads `register` from the entry points of the group
`sglang.srt.plugins` in every process. From then on the MoE layers of

    python -m sglang.launch_server --enable-lora --lora-backend triton_v2 \\
        --moe-runner-backend lora_triton ...

run `moelora.fused_experts_lora` over SGLang's own weights, adapter buffers and slots, captured CUDA
graphs included. `MOELORA_SGLANG=0` in the environment turns it off. A layer that moelora does not
have (quantised weights, clamped activations, biases; `reason_against` has them) runs SGLang's own
path, and the log, `sglang.moelora`, says why, once for each reason.

`experts_with_lora` is that path by itself, for layers of other engines with such buffers, and
`MoELoRABackend` the interface of SGLang's first design of MoE LoRA, over an `AdapterPool`.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import moelora
from moelora.adapters import AdapterPool

SWITCH = "MOELORA_SGLANG"
# Where SGLang keeps its runner, newest first.
RUNNERS = ("sglang.srt.lora.moe.runner", "sglang.srt.lora.moe.moe_lora_runner")
LAYER = "sglang.srt.lora.layers.FusedMoEWithLoRA"

log = logging.getLogger("sglang.moelora")


def experts_with_lora(
    hidden_states: Tensor,
    w13_weight: Tensor,
    w2_weight: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    batch: Any,
    *,
    lora_ranks: Tensor | None = None,
    activation: str = "silu",
    routed_scaling_factor: float | None = None,
    apply_router_weight_on_input: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """A whole MoE layer, exactly, with adapters in the buffers of SGLang's memory pool.

    Parameters
    ----------
    hidden_states : Tensor, shape (T, H)
        Input of each token.
    w13_weight, w2_weight : Tensor, shapes (E, S I, H) and (E, H, I)
        Experts of this rank, gate rows first; S is 2 with a gate, 1 without.
    topk_weights, topk_ids : Tensor, shape (T, top_k)
        Experts of each token by their local ids; others, such as -1, are skipped.
    batch : MoeLoraBatch, or any object with its tensors
        With L slots of R ranks; an expert dimension of 1 is one factor shared by all experts
        (`experts_shared_outer_loras`), and scalings are already in the B factors:
        `gate_up_lora_a` (L, E or 1, S R, H), where the up rows begin at row R;
        `gate_up_lora_b` (L, E or 1, S I, R); `down_lora_a` (L, E or 1, R, I);
        `down_lora_b` (L, E or 1, H, R); `token_lora_mapping` (T,) slot of each token, -1 for none.
    lora_ranks : Tensor, shape (L,), int32, optional
        True rank of each slot, which spares reading the zeros beyond it.
    activation : {"silu", "relu2"}
        With a gate and without.
    routed_scaling_factor : float, optional
        Of all routing weights.
    apply_router_weight_on_input, out
        As in `fused_experts_lora`.

    Returns
    -------
    Tensor, shape (T, H)
        `out`, or a new tensor; no reduction over ranks is in it.

    Raises
    ------
    ValueError
        A shape, dtype, stride or value is not as above, or the tensors are on different devices.
    NotImplementedError
        This build or this device has no kernel for it.
    """
    slices = 1 if activation == "relu2" else 2
    if routed_scaling_factor not in (None, 1.0):
        topk_weights = topk_weights.float() * routed_scaling_factor
    return moelora.fused_experts_lora(
        hidden_states,
        w13_weight,
        w2_weight,
        topk_weights,
        topk_ids,
        token_lora_mapping=batch.token_lora_mapping,
        # Views: the slices of one pair lie below each other in SGLang's buffers.
        w13_lora_a=batch.gate_up_lora_a.chunk(slices, dim=2),
        w13_lora_b=batch.gate_up_lora_b.chunk(slices, dim=2),
        w2_lora_a=batch.down_lora_a,
        w2_lora_b=batch.down_lora_b,
        lora_ranks=lora_ranks,
        activation=activation,
        apply_router_weight_on_input=apply_router_weight_on_input,
        out=out,
    )


class MoeLoraRunner:
    """One layer, with the interface of SGLang's class of this name."""

    def __init__(self, base_layer: Any) -> None:
        config = base_layer.moe_runner_config
        self.base_layer = base_layer
        self.lora_backend: Any = None  # whose batch knows the true ranks
        self.activation = config.activation
        self.apply_router_weight_on_input = config.apply_router_weight_on_input
        fused = base_layer.should_fuse_routed_scaling_factor_in_topk
        self.routed_scaling_factor = None if fused else config.routed_scaling_factor

    @classmethod
    def from_layer(
        cls,
        base_layer: Any,
        *,
        workspace: Any = None,
        is_shared_outer: bool,
        physical_rank: int,
    ) -> MoeLoraRunner:
        """The runner of one layer; NotImplementedError where `reason_against` has one.

        moelora needs no workspace, and reads off the buffers whether factors are shared.
        """
        reason = reason_against(base_layer)
        if reason:
            raise NotImplementedError(reason)
        return cls(base_layer)

    def run(self, dispatch_output: Any, batch: Any) -> Any:
        """The layer between dispatch and combine."""
        from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput

        topk = dispatch_output.topk_output
        out = experts_with_lora(
            dispatch_output.hidden_states,
            self.base_layer.w13_weight,
            self.base_layer.w2_weight,
            topk.topk_weights,
            topk.topk_ids,
            batch,
            lora_ranks=self.lora_backend and self.lora_backend.batch_info.lora_ranks,
            activation=self.activation,
            routed_scaling_factor=self.routed_scaling_factor,
            apply_router_weight_on_input=self.apply_router_weight_on_input,
        )
        return StandardCombineInput(hidden_states=out)


def reason_against(base_layer: Any) -> str | None:
    """Why moelora cannot run SGLang's `FusedMoE` layer, or None."""
    config = base_layer.moe_runner_config
    dtype = base_layer.w13_weight.dtype
    dispatcher = base_layer.dispatcher
    factor = config.routed_scaling_factor
    gated = {"silu": True, "relu2": False}
    on_input = config.apply_router_weight_on_input
    rules = (
        (dtype not in (torch.bfloat16, torch.float16, torch.float32), f"its weights are {dtype}"),
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


@functools.cache
def _say(reason: str) -> None:
    log.warning("moelora: %s; SGLang's own path runs", reason)


def from_layer(
    original: Callable[..., Any], cls: type, base_layer: Any, *args: Any, **kwargs: Any
) -> Any:
    """Around `MoeLoraRunner.from_layer` of SGLang: moelora's runner where it can be."""
    reason = reason_against(base_layer)
    if reason:
        _say(f"a MoE layer is not moelora's: {reason}")
        return original(cls, base_layer, *args, **kwargs)
    return MoeLoraRunner(base_layer)


def after_initialize(result: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
    """After `FusedMoEWithLoRA._initialize_moe_lora_execution`: where the true ranks are."""
    if isinstance(layer._moe_lora_runner, MoeLoraRunner):
        layer._moe_lora_runner.lora_backend = layer.lora_backend


def register() -> None:
    """SGLang's plugin entry point: run its MoE LoRA layers from now on in this process."""
    if os.environ.get(SWITCH) == "0":
        log.info("moelora: off, as %s=0 says", SWITCH)
        return
    runner = next((name for name in RUNNERS if _exists(name)), None)
    if runner is None:
        _say("this SGLang has no MoeLoraRunner")
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{runner}.MoeLoraRunner.from_layer", from_layer, HookType.AROUND)
    HookRegistry.register(
        f"{LAYER}._initialize_moe_lora_execution", after_initialize, HookType.AFTER
    )


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent
        return False


@dataclass(frozen=True, eq=False)
class LayerBatchInfo(moelora.MoELoRABatchInfo):
    """The adapters of a batch, and the layer that it is in."""

    layer: str = ""


class MoELoRABackend:
    """`run_moe_lora` and `prepare_moe_lora_batch` for the MoE layers of one model.

    Parameters
    ----------
    pool : AdapterPool
        The adapters, by the names that requests carry in `lora_ids`. `run_moe_lora` needs one with
        `w13_slices=1`.
    layers : mapping of int to str, optional
        Name in the pool of each `layer_id`; by default the first number in the names.
    """

    def __init__(self, pool: AdapterPool, layers: Mapping[int, str] | None = None) -> None:
        self.pool = pool
        if layers is None:
            layers = {int(re.search(r"\d+", name)[0]): name for name in pool.layers}
        self.layers = dict(layers)
        self.reset_batch_state()

    def reset_batch_state(self) -> None:
        """Forgets the batch that was prepared last; needed where an object is used for the next."""
        self._prepared: tuple[Any, moelora.MoELoRABatchInfo | None] = (None, None)

    def prepare_moe_lora_batch(self, forward_batch: Any, layer_id: int) -> LayerBatchInfo | None:
        """Which token carries which adapter: once for a batch, whatever the number of layers.

        Parameters
        ----------
        forward_batch : ForwardBatch
            `lora_ids` of its requests (None = no adapter), `input_ids` and, while it extends,
            `extend_seq_lens_cpu`; otherwise every request has the same number of tokens. The
            adapters must stay in their slots (`AdapterPool.hold`) while it is under way.
        layer_id : int
            The layer that asks.

        Returns
        -------
        LayerBatchInfo or None
            None where no request has an adapter, or the layer is none of the pool's.

        Raises
        ------
        KeyError
            An adapter is not in the pool.
        ValueError
            The tokens do not divide among the requests.
        """
        if layer_id not in self.layers:
            return None
        if self._prepared[0] is not forward_batch:
            self._prepared = (forward_batch, self._prepare(forward_batch))
        info = self._prepared[1]
        return info and LayerBatchInfo(**vars(info), layer=self.layers[layer_id])

    def _prepare(self, forward_batch: Any) -> moelora.MoELoRABatchInfo | None:
        names = forward_batch.lora_ids
        if not any(name is not None for name in names):
            return None
        tokens = forward_batch.input_ids.shape[0]
        lengths = None
        if forward_batch.forward_mode.is_extend():
            lengths = getattr(forward_batch, "extend_seq_lens_cpu", None)
        if lengths is None:
            if tokens % len(names):
                raise ValueError(f"{tokens} tokens do not divide among {len(names)} requests")
            lengths = [tokens // len(names)] * len(names)
        return moelora.prepare_moe_lora_batch_of_pool(
            self.pool, names, seq_lens=lengths, num_tokens=tokens
        )

    def run_moe_lora(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        moe_lora_info: LayerBatchInfo,
        output: Tensor,
    ) -> Tensor:
        """`moelora.run_moe_lora` with the layer's buffers: added to `output`, not exact."""
        buffers = moelora.moe_lora_buffers(self.pool, moe_lora_info.layer)
        return moelora.run_moe_lora(
            hidden_states, topk_ids, topk_weights, moe_lora_info, **buffers, output=output
        )

    def fused_experts(
        self,
        hidden_states: Tensor,
        w13_weight: Tensor,
        w2_weight: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        moe_lora_info: LayerBatchInfo | None,
        **options: Any,
    ) -> Tensor:
        """The exact layer: `moelora.fused_experts_lora` with its `options`, adapters or none."""
        arguments = {}
        if moe_lora_info is not None:
            arguments = self.pool.layer(moe_lora_info.layer)
            arguments["token_lora_mapping"] = moe_lora_info.weight_indices
        return moelora.fused_experts_lora(
            hidden_states, w13_weight, w2_weight, topk_weights, topk_ids, **arguments, **options
        )
