"""Adapters of tokens that travel between data-parallel ranks, by ids that all ranks know.

    rank 0: slots [law, code]              tokens [law, law] -> slots [0, 0] -> ids [L, L]
    rank 1: slots [code, law]                                 ids [L, L] -> slots [1, 1]

vLLM sends the slots of the sender, and every rank fills its slots in an order of its own. Here the
exchange (`prepare` of the naive DP + EP kernels) sends ids, and each rank looks up its slots. An id
is a hash of an adapter's name and path, since numbers are given out by each API server. The table
of a rank's slots is a device tensor, updated in place as a slot is filled: a captured graph reads
it. vLLM removes all adapters where it replaces base weights, but leaves their factors in the slots:
so they stay in the table, and an adapter goes back to its slot, or to one that has none.

A rank without requests runs dummy batches while others have some. vLLM fills all slots with dummy
adapters for each, and then removes all adapters: the next request would load its adapter again
while all ranks wait. Here tokens of such a batch have no adapter, and the rank keeps its adapters.
Profiling, warm-up and graph capture have vLLM's dummies.

Tokens of an adapter that a rank has in no slot get the base model's experts there; the rank counts
them on the device. It reads the count when it fills a slot, and at every 128th batch as it was 128
batches before, so that none waits for it; its log says so once.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from moelora.integrations.vllm import say_once, wrap
from moelora.operators.setting import setting

NONE = -1  # no adapter; ids of dummies are below it
TAKEN = 0  # no adapter of vLLM has this id
LOOK_EVERY = 128  # batches between copies of the lost-token count to the host
_NAME, _IDLE = "_moelora_slots", "_moelora_idle"
_batches = itertools.count(1)
is_on = False  # whether a layer of this process has tokens of other data-parallel ranks


class Slots:
    """Ids of the adapters in a rank's slots, and how many tokens came with another one."""

    def __init__(self, count: int, device: Any):
        with torch.inference_mode(False):
            self.ids = torch.full((count,), NONE, dtype=torch.int64, device=device)
            self.lost = torch.zeros(1, dtype=torch.int64, device=device)
            self.seen = torch.zeros(1, dtype=torch.int64, pin_memory=self.lost.is_cuda)
        self.here = [NONE] * count  # the same on the host
        self.is_lost_said = False

    def fill(self, slot: int, number: int) -> None:
        """A slot has another adapter from now on, and no other slot has it."""
        for old, held in enumerate(self.here):
            if held == number:
                self._set(old, NONE)
        self._set(slot, number)

    def _set(self, slot: int, number: int) -> None:
        self.here[slot] = number
        self.ids[slot].fill_(number)

    def best(self, number: int, free: Sequence[int]) -> int | None:
        """The free slot that an adapter should go to: its own, or one without."""
        own = (slot for slot in free if self.here[slot] == number)
        return next(own, next((slot for slot in free if self.here[slot] < 0), None))

    def to_ids(self, slots: Tensor) -> Tensor:
        """Ids of tokens from slots, NONE from -1."""
        found = self.ids[slots.clamp(min=0).long()]
        return torch.where(slots < 0, NONE, found)

    def to_slots(self, ids: Tensor) -> Tensor:
        """Slots of tokens here, int32; -1 for NONE and for adapters in no slot, which count unless
        they are dummies."""
        same = (ids[:, None] == self.ids) & (ids != NONE)[:, None]
        here = same.any(1)
        self.lost += ((ids >= 0) & ~here).sum()
        return torch.where(here, same.int().argmax(1), -1).int()


def global_id(name: str, path: str) -> int:
    """Of an adapter, alike in all processes: 63 bits."""
    return int.from_bytes(hashlib.sha256(f"{name}\0{path}".encode()).digest()[:8], "little") >> 1


def install() -> None:
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.lora.worker_manager import WorkerLoRAManager
    from vllm.model_executor.layers.fused_moe.prepare_finalize import naive_dp_ep
    from vllm.v1.worker.gpu_worker import Worker
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    wrap(naive_dp_ep.MoEPrepareAndFinalizeNaiveDPEPModular, "prepare", _sending_ids)
    wrap(LoRAModelManager, "activate_adapter", _noting_slot)
    wrap(WorkerLoRAManager, "_load_adapter", _noting_id)
    wrap(Worker, "execute_dummy_batch", _idle)
    for name in ("execute_dummy_batch", "execute_model"):
        wrap(Worker, name, _reporting_lost)
    wrap(LoRAModelRunnerMixin, "maybe_dummy_run_with_lora", _without_dummies)


def _noting_id(load_adapter: Callable[..., Any], self: Any, lora_request: Any) -> Any:
    """`_load_adapter`, whose adapters remember their ids."""
    model = load_adapter(self, lora_request)
    model._moelora_id = global_id(lora_request.lora_name, lora_request.lora_path)
    return model


def _idle(execute_dummy_batch: Callable[..., None], self: Any) -> None:
    """`execute_dummy_batch`, which a worker of a rank without requests runs."""
    with setting(self.model_runner, _IDLE, is_on):
        execute_dummy_batch(self)


def _reporting_lost(execute: Callable[..., Any], self: Any, *args: Any, **named: Any) -> Any:
    """Run a batch; at every LOOK_EVERYth log lost tokens."""
    done = execute(self, *args, **named)
    outer = getattr(self.model_runner, "lora_manager", None)
    if is_on and outer is not None and next(_batches) % LOOK_EVERY == 0:
        for slots in _tables(outer._adapter_manager):
            _say_lost(slots, slots.seen)
            slots.seen.copy_(slots.lost, non_blocking=True)
    return done


def _without_dummies(
    dummy_run: Callable[..., AbstractContextManager[None]],
    self: Any,
    lora_config: Any,
    num_scheduled_tokens: Any,
    num_sampled_tokens: Any,
    *args: Any,
    **named: Any,
) -> AbstractContextManager[None]:
    """`maybe_dummy_run_with_lora`, in whose context a runner executes a dummy batch."""
    tokens = num_scheduled_tokens, num_sampled_tokens
    if not getattr(self, _IDLE, False):
        return dummy_run(self, lora_config, *tokens, *args, **named)
    selected: AbstractContextManager[None] = self.maybe_select_dummy_loras(
        lora_config, num_scheduled_tokens, num_sampled_tokens=num_sampled_tokens
    )
    return selected


def _noting_slot(activate: Callable[..., Any], self: Any, lora_id: int) -> Any:
    if not is_on:
        return activate(self, lora_id)
    model = self._registered_adapters.get(lora_id)
    tables = _tables(self)
    if model is None or not tables:
        return activate(self, lora_id)
    number: int = getattr(model, "_moelora_id", NONE - lora_id)
    there = self.lora_index_to_id
    free = [slot for slot, held in enumerate(there) if held is None]
    best = tables[0].best(number, free)
    others = [slot for slot in free if best is not None and slot != best]
    for slot in others:  # vLLM takes the first that is None
        there[slot] = TAKEN
    try:
        done = activate(self, lora_id)
    finally:
        for slot in others:
            there[slot] = None
    if done and lora_id in there:
        for slots in tables:
            _say_lost(slots, slots.lost)
            slots.fill(there.index(lora_id), number)
    return done


def _tables(manager: Any) -> list[Slots]:
    """Of a LoRAModelManager: one for each of its Punica wrappers."""
    every = {id(p): p for p in manager.punica_wrapper_mapping.values()}.values()
    return [slots_of(punica, manager.lora_slots) for punica in every]


def slots_of(punica: Any, count: int) -> Slots:
    """The table of a rank, which is that of its Punica wrapper."""
    if not hasattr(punica, _NAME):
        device = punica.token_mapping_meta.token_lora_mapping.device
        setattr(punica, _NAME, Slots(count, device))
    found: Slots = getattr(punica, _NAME)
    return found


def _say_lost(slots: Slots, count: Tensor) -> None:
    """Log lost tokens, once."""
    if not slots.is_lost_said and int(count):
        slots.is_lost_said = True
        say_once(
            "tokens of other data-parallel ranks had adapters that were in no slot here: this "
            "rank's experts answered them as the base model; set --max-loras to the number of "
            "adapters in use, and load them before requests come (/v1/load_lora_adapter)"
        )


def _sending_ids(
    prepare: Callable[..., Any], self: Any, a1: Tensor, *args: Any, **named: Any
) -> Any:
    ctx = self._lora_context
    if ctx is None:
        return prepare(self, a1, *args, **named)
    slots = slots_of(ctx.punica_wrapper, ctx.w2_lora_a_stacked[0].size(0))
    meta = ctx.punica_wrapper.token_mapping_meta
    own = meta.token_lora_mapping
    meta.token_lora_mapping = slots.to_ids(own[: a1.shape[0]])
    try:
        prepared = prepare(self, a1, *args, **named)
    finally:
        meta.token_lora_mapping = own
    if ctx.local_token_lora_mapping is not None:
        ctx.local_token_lora_mapping = slots.to_slots(ctx.local_token_lora_mapping)
    return prepared
