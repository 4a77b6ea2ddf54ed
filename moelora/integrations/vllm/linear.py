"""Adapters of vLLM's linear layers by moelora's deltas: those of attention, dense MLPs and logits.

vLLM adds them by `add_lora_linear` and `add_lora_logits` of `PunicaWrapperGPU`, which torch.compile
traces. Here each is one operator that it does not trace, over a delta of one expert that all tokens
choose. With `fully_sharded_loras`, column and row parallel layers exchange data between shrink and
expand: vLLM's kernels add these.

They run on the cards that moelora was measured on, elsewhere under `MOELORA_VLLM_LINEAR=1`.

Each layer has the true rank of every slot in a device tensor that is updated in place, so that
captured graphs read it; 0 if the slot's adapter has no factors for the layer.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from moelora import _C
from moelora.adapters.transfer import is_capturing
from moelora.integrations import reason_against_device, switched_off, switched_on
from moelora.integrations.vllm import listed, race, say_once, wrap
from moelora.operators.delta import moe_lora_gate_up_delta
from moelora.operators.opaque import opaque

SWITCH = "MOELORA_VLLM_LINEAR"
OWN_KERNELS = "vLLM's own kernels add the adapters of its linear layers"
SERVED = f"deltas add the adapters of linear layers; {SWITCH}=0 leaves them to vLLM"
ARGUMENTS = (
    "Tensor(a!) y, Tensor x, Tensor[] lora_a, Tensor[] lora_b, Tensor token_lora_mapping, "
    "Tensor no_lora, Tensor[] meta, float scale, bool add_inputs"
)


class SlotRanks:
    """The true rank of each slot of a layer, on its device and on the host."""

    def __init__(self, stack: Tensor):
        self.most = stack.size(-2)
        self.on_host = [0] * stack.size(0)
        with torch.inference_mode(False):
            self.tensor = torch.zeros(stack.size(0), dtype=torch.int32, device=stack.device)

    def put(self, slot: int, rank: int) -> None:
        self.on_host[slot] = rank
        self.tensor[slot].fill_(rank)  # an assignment would wait for the copies before it

    def recorded(self, recorder: Callable[[Any], Any]) -> SlotRanks:
        """The same with recorders (`activation`), for the writes of an adapter."""
        twin = copy.copy(self)
        twin.on_host, twin.tensor = recorder(self.on_host), recorder(self.tensor)
        return twin


# By the address of a layer's first A, as the operator only gets tensors. Layers own them.
_ranks: WeakValueDictionary[int, SlotRanks] = WeakValueDictionary()


def off_here() -> str | None:
    """Why vLLM's own kernels add them in this environment, or None."""
    from vllm.platforms import current_platform

    if said := switched_off(SWITCH):
        return said
    # asks NVML: CUDA stays uninitialized
    if not switched_on(SWITCH) and not race.is_measured(current_platform.get_device_name()):
        return f"moelora was not measured on this card, and {SWITCH} is not 1"
    return None


def install() -> None:
    from vllm.compilation import caching
    from vllm.lora.layers import column_parallel_linear as column
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
    from vllm.lora.layers.logits_processor import LogitsProcessorWithLoRA
    from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU

    add = opaque("vllm_add_lora_linear", ARGUMENTS, _add)
    wrap(PunicaWrapperGPU, "add_lora_linear", functools.partial(_linear, add))
    wrap(PunicaWrapperGPU, "add_lora_logits", functools.partial(_logits, add))
    wrap(caching, "aot_compile_hash_factors", _with_version)
    merged = column.MergedColumnParallelLinearWithLoRA
    for layer in (BaseLinearLayerWithLoRA, merged, LogitsProcessorWithLoRA):
        wrap(layer, "create_lora_weights", _with_ranks)
        wrap(layer, "set_lora", _recording_rank)
    for layer in (BaseLinearLayerWithLoRA, LogitsProcessorWithLoRA):
        wrap(layer, "reset_lora", _clearing_rank)


def _with_version(aot_compile_hash_factors: Callable[..., list[str]], config: Any) -> list[str]:
    """vLLM finds a compiled model by these, and not by the files of other packages that it traced:
    with moelora's operator in it, it is another one."""
    return [*aot_compile_hash_factors(config), f"moelora {_C.version()}"]


# -- ranks --


def _with_ranks(
    create_lora_weights: Callable[..., Any],
    self: Any,
    max_loras: int,
    lora_config: Any,
    model_config: Any = None,
) -> None:
    create_lora_weights(self, max_loras, lora_config, model_config)
    if "Sharded" in type(self).__name__:
        say_once(f"fully_sharded_loras is on; {OWN_KERNELS}")
        return
    stack = listed(self.lora_a_stacked)[0]
    self._moelora_ranks = _ranks[stack.data_ptr()] = SlotRanks(stack)


def _recording_rank(
    set_lora: Callable[..., Any], self: Any, index: int, lora_a: Any, lora_b: Any
) -> None:
    ranks = getattr(self, "_moelora_ranks", None)
    if ranks is None:
        return set_lora(self, index, lora_a, lora_b)
    rank = ranks.most  # if vLLM fails midway, what was written counts
    try:
        set_lora(self, index, lora_a, lora_b)
        rank = max((a.size(0) for a in listed(lora_a) if a is not None), default=0)
    finally:
        ranks.put(index, rank)


def _clearing_rank(reset_lora: Callable[..., Any], self: Any, index: int) -> None:
    reset_lora(self, index)
    if ranks := getattr(self, "_moelora_ranks", None):
        ranks.put(index, 0)


# -- the products: torch.compile traces these two functions, so they only call the operator --


def _linear(
    add: Any,
    add_lora_linear: Callable[..., Any],
    self: Any,
    y: Tensor,
    x: Tensor,
    lora_a_stacked: Sequence[Tensor],
    lora_b_stacked: Sequence[Tensor],
    scale: float,
    output_slices: Sequence[int],
    *,
    buffer: None = None,
    add_inputs: bool = True,
    meta: Any = None,
    **unused: Any,
) -> None:
    meta = self.token_mapping_meta if meta is None else meta
    y, x = y.view(-1, y.size(-1)), x.view(-1, x.size(-1))
    tokens, factors = x.size(0), ([*lora_a_stacked], [*lora_b_stacked])
    of_kernels = meta.meta_args(tokens, self.lora_config.specialize_active_lora)
    mapping = meta.token_lora_mapping[:tokens]
    add(y, x, *factors, mapping, meta.no_lora_flag_cpu, [*of_kernels], scale, add_inputs)


def _logits(
    add: Any,
    add_lora_logits: Callable[..., Any],
    self: Any,
    y: Tensor,
    x: Tensor,
    lora_a_stacked: Tensor,
    lora_b_stacked: Tensor,
    scale: float,
    *,
    buffer: None = None,
    **unused: Any,
) -> None:
    factors, meta = ([lora_a_stacked], [lora_b_stacked]), self.prompt_mapping_meta
    _linear(add, add_lora_logits, self, y, x, *factors, scale, (), meta=meta)


@functools.cache
def _first_expert(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.zeros((1, 1), dtype=torch.int32, device=device)


def _add(
    y: Tensor,
    x: Tensor,
    lora_a: list[Tensor],
    lora_b: list[Tensor],
    token_lora_mapping: Tensor,
    no_lora: Tensor,
    meta: list[Tensor],
    scale: float,
    add_inputs: bool,
) -> None:
    """y[m] (+)= (x A^T) B^T of the adapter of token m, slices side by side.

    The host flag that no token has an adapter is read when vLLM's kernels read it (`adapters`).
    """
    if no_lora.item():
        return
    ranks = _ranks.get(lora_a[0].data_ptr())
    if ranks is not None and not any(ranks.on_host) and not (x.is_cuda and is_capturing()):
        return  # a graph is replayed with other adapters
    reason = reason_against_device() or (None if scale == 1 else f"adapters have the scale {scale}")
    if reason is None:
        try:
            moe_lora_gate_up_delta(
                x,
                None,
                _first_expert(x.device).expand(x.size(0), 1),
                token_lora_mapping=token_lora_mapping,
                lora_a=lora_a,
                lora_b=lora_b,
                lora_ranks=None if ranks is None else ranks.tensor,
                num_experts=1,
                add_inputs=add_inputs,
                out=y.unsqueeze(1),
            )
            say_once(SERVED, logging.INFO)
            return
        except (ValueError, NotImplementedError) as refusal:  # nothing is written yet
            reason = str(refusal)
    say_once(f"{reason}; {OWN_KERNELS}")
    from vllm.lora.ops.triton_ops.lora_expand_op import _lora_expand
    from vllm.lora.ops.triton_ops.lora_shrink_op import _lora_shrink

    h = x.new_zeros((len(lora_a), x.size(0), lora_b[0].size(-1)), dtype=torch.float32)
    _lora_shrink(x, lora_a, h, *meta, scale)
    _lora_expand(h, lora_b, y, *meta, offset_start=0, add_inputs=add_inputs)
