"""vLLM's adapter state in device tensors that kernels and captured graphs can read.

Two device tensors are updated in place, once per step or per load, so that layers launch nothing
for them:

token_lora_mapping, int32, slot of each token
    vLLM does not update its mapping if no token has an adapter, nor the entries past the last
    token, which a graph captured for more tokens reads. Here both become -1.
lora_ranks, (max_loras,) int32
    True rank of the adapter in each slot; vLLM only has the maximum of the stacks, and zero-pads.
w13_one_a, (max_loras,) int32
    Whether gate and up of the adapter have the same A, as PEFT trains them for fused weights: then
    one of both is read. Compared when the adapter is loaded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from moelora.adapters.factors import have_one_a
from moelora.integrations.vllm import deltas, say_once, travel, wrap


def install() -> None:
    from vllm.lora.layers.fused_moe import FusedMoE3DWithLoRA, FusedMoEWithLoRA
    from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta

    wrap(LoRAKernelMeta, "prepare_tensors", _no_stale_slots)
    wrap(FusedMoEWithLoRA, "_build_lora_context", _with_ranks)
    for layer in (FusedMoEWithLoRA, FusedMoE3DWithLoRA):
        wrap(layer, "create_lora_weights", _unsharded)
        wrap(layer, "set_lora", _recording_rank)


def arguments(ctx: Any, num_tokens: int) -> dict[str, Any]:
    """Arguments of `fused_experts_lora` from a `MoELoRAContext`; none if no token has an adapter.

    The host flag that no token has an adapter is read when vLLM's own path reads it, in eager calls
    and captures: vLLM only replays a graph captured without adapters for batches without.
    """
    # After an exchange of tokens between ranks, those of other ranks may have adapters.
    mapping = deltas.mapping_of(ctx.punica_wrapper, num_tokens, ctx.local_token_lora_mapping)
    if mapping is None:
        return {}
    return {
        "token_lora_mapping": mapping,
        "w13_lora_a": ctx.w13_lora_a_stacked,
        "w13_lora_b": ctx.w13_lora_b_stacked,
        "w2_lora_a": ctx.w2_lora_a_stacked,
        "w2_lora_b": ctx.w2_lora_b_stacked,
        "lora_ranks": ctx.lora_ranks,
        "w13_one_a": ctx.w13_one_a,
        "adapter_enabled": ctx.adapter_enabled,
    }


def _no_stale_slots(
    prepare_tensors: Callable[..., Any], self: Any, token_lora_mapping: torch.Tensor
) -> None:
    prepare_tensors(self, token_lora_mapping)
    written = 0 if self.no_lora_flag_cpu.item() else token_lora_mapping.size(0)
    self.token_lora_mapping[written:].fill_(-1)


def _unsharded(
    create_lora_weights: Callable[..., Any],
    self: Any,
    max_loras: int,
    lora_config: Any,
    model_config: Any = None,
) -> None:
    """Layers that moelora runs have whole adapters on every rank, as without `fully_sharded_loras`:
    nothing is exchanged between the two factors, which are part of one operator. They take the
    memory that vLLM's own take without that option.
    """
    _expect_ranks(self.moe_config)
    kernel = getattr(self, "_moe_kernel", None)
    experts = getattr(kernel, "fused_experts", None)
    if lora_config.fully_sharded_loras and serves(experts, self.moe_config.activation):
        lora_config = copy.copy(lora_config)
        lora_config.fully_sharded_loras = False
        say_once("adapters of experts are not sharded over ranks: fully_sharded_loras is off")
    create_lora_weights(self, max_loras, lora_config, model_config)


ranks_mix = ""  # why data-parallel ranks send each other slots, which each gives out by itself


def _expect_ranks(moe_config: Any) -> None:
    """Note that a layer has tokens of other data-parallel ranks, before slots are filled."""
    if getattr(getattr(moe_config, "moe_parallel_config", None), "dp_size", 1) == 1:
        return
    travel.is_on = True
    if ranks_mix:
        say_once(
            f"{ranks_mix}: data-parallel ranks of vLLM number adapters by themselves, and in "
            "batches of several adapters requests can get each other's, with moelora and without"
        )


def serves(experts: Any, activation: Any) -> bool:
    """Whether a vLLM experts object is one of ours and runs in moelora."""
    reason_against = getattr(experts, "reason_against", None)
    return reason_against is not None and reason_against(activation) is None


def _with_ranks(build_lora_context: Callable[..., Any], self: Any) -> Any:
    ctx = build_lora_context(self)
    if not hasattr(self, "lora_ranks"):
        stack = ctx.w2_lora_a_stacked[0]
        with torch.inference_mode(False):
            self.lora_ranks = torch.full(
                stack.shape[:1], stack.size(2), dtype=torch.int32, device=stack.device
            )
            self.w13_one_a = torch.zeros_like(self.lora_ranks)
        self.stack_rank = stack.size(2)
    ctx.lora_ranks, ctx.w13_one_a = self.lora_ranks, self.w13_one_a
    deltas.remember_ranks(ctx, self.lora_ranks)
    return ctx


def _recording_rank(
    set_lora: Callable[..., Any],
    self: Any,
    index: int,
    lora_a: Sequence[torch.Tensor | None],
    lora_b: Sequence[torch.Tensor | None],
) -> None:
    if not hasattr(self, "lora_ranks"):
        return set_lora(self, index, lora_a, lora_b)
    # If vLLM fails midway, the slot is enabled with what was written. Reset slots are disabled.
    rank, one_a = self.stack_rank, False
    try:
        set_lora(self, index, lora_a, lora_b)
        rank = max(a.size(1) for a in lora_a if a is not None)  # (experts or 1, rank, columns)
        # Gate, down and up, or two tensors for a layer whose gate and up are one stack.
        one_a = len(lora_a) == 3 and have_one_a(lora_a[0], lora_a[2])
    finally:
        # An assignment would wait for the copies before it.
        self.lora_ranks[index].fill_(rank)
        self.w13_one_a[index].fill_(one_a)
