"""Adapters of tokens that travel between data-parallel ranks, by ids that all ranks know.

    rank 0: slots [law, code]              tokens [law, law] -> slots [0, 0] -> ids [L, L]
    rank 1: slots [code, law]                                 ids [L, L] -> slots [1, 1]

vLLM sends the slots of the sender, and every rank fills its slots in an order of its own. Here the
exchange (`prepare` of the naive DP + EP kernels) sends ids, and each rank looks up its slots. An id
is a hash of an adapter's name and path, since numbers are given out by each API server. The table
of a rank's slots is a device tensor, updated in place as a slot is filled: a captured graph reads
it. A rank without requests runs dummy batches while others have some, with as many dummy adapters
as there are slots, and then removes all its adapters, but leaves their factors in the slots: so
they stay in the table, and an adapter goes back to its slot, or to one that has none. Dummies are
not copied to slots with an adapter's factors, which serve other ranks' tokens in the same step;
their tokens are sent with ids of dummies all the same.

Tokens of an adapter that a rank has in no slot get the base model's experts there; the rank counts
them on the device, and its log says so when it next fills a slot.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moelora.integrations.vllm import say_once, wrap

NONE = -1  # no adapter; ids of dummies are below it
TAKEN = 0  # no adapter of vLLM has this id
_NAME, _DUMMY = "_moelora_slots", "_moelora_dummy"
is_on = False  # whether a layer of this process has tokens of other data-parallel ranks


class Slots:
    """Ids of the adapters in a rank's slots, and how many tokens came with another one.

    `sent` has the ids that the rank's own tokens are sent with: those of `ids`, but of a dummy
    where one is in a slot in name only.
    """

    def __init__(self, count: int, device: Any):
        with torch.inference_mode(False):
            self.ids = torch.full((count,), NONE, dtype=torch.int64, device=device)
            self.sent = self.ids.clone()
            self.lost = torch.zeros(1, dtype=torch.int64, device=device)
        self.here = [NONE] * count  # the same on the host

    def fill(self, slot: int, number: int) -> None:
        """A slot has another adapter from now on, and no other slot has it."""
        for old, held in enumerate(self.here):
            if held == number:
                self._set(old, NONE)
        self._set(slot, number)

    def _set(self, slot: int, number: int) -> None:
        self.here[slot] = number
        self.ids[slot].fill_(number)
        self.sent[slot].fill_(number)

    def name(self, slot: int, number: int) -> None:
        """Tokens of a slot are sent with the id of a dummy; its factors remain an adapter's."""
        self.sent[slot].fill_(number)

    def best(self, number: int, free: Sequence[int]) -> int | None:
        """The free slot that an adapter should go to: its own, or one without."""
        own = (slot for slot in free if self.here[slot] == number)
        return next(own, next((slot for slot in free if self.here[slot] < 0), None))

    def to_ids(self, slots: Tensor) -> Tensor:
        """Ids of tokens from slots, NONE from -1."""
        found = self.sent[slots.clamp(min=0).long()]
        return torch.where(slots < 0, NONE, found)

    def to_slots(self, ids: Tensor) -> Tensor:
        """Slots of tokens here, int32; -1 for NONE and for adapters in no slot, which count, and
        for dummies in none."""
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

    wrap(naive_dp_ep.MoEPrepareAndFinalizeNaiveDPEPModular, "prepare", _sending_ids)
    wrap(LoRAModelManager, "activate_adapter", _noting_slot)
    wrap(WorkerLoRAManager, "_load_adapter", _noting_id)
    wrap(WorkerLoRAManager, "add_dummy_lora", _keeping_dummy)


def _noting_id(load_adapter: Callable[..., Any], self: Any, lora_request: Any) -> Any:
    """`_load_adapter`, whose adapters remember their ids."""
    model = load_adapter(self, lora_request)
    model._moelora_id = global_id(lora_request.lora_name, lora_request.lora_path)
    return model


def _keeping_dummy(
    add_dummy_lora: Callable[..., bool], self: Any, lora_request: Any, rank: int
) -> bool:
    """`add_dummy_lora`, which makes the first dummy of a batch and clones it for the other slots.
    Here it clones the previous batch's, so that steps without requests make and pin no memory."""
    first = getattr(self, _DUMMY, None)
    if is_on and first is not None and first.rank == rank and self._cached_dummy_lora is None:
        self._cached_dummy_lora = first
    done = add_dummy_lora(self, lora_request, rank)
    if is_on and self._cached_dummy_lora:
        setattr(self, _DUMMY, self._cached_dummy_lora)
    return done


def _noting_slot(activate: Callable[..., Any], self: Any, lora_id: int) -> Any:
    if not is_on:
        return activate(self, lora_id)
    model = self._registered_adapters.get(lora_id)
    every = {id(p): p for p in self.punica_wrapper_mapping.values()}.values()
    tables = [slots_of(punica, self.lora_slots) for punica in every]
    if model is None or not tables:
        return activate(self, lora_id)
    number: int = getattr(model, "_moelora_id", NONE - lora_id)
    there = self.lora_index_to_id
    free = [slot for slot, held in enumerate(there) if held is None]
    best = tables[0].best(number, free)
    if number < NONE and best is None and free and lora_id not in self._active_adapters:
        self._active_adapters[lora_id], there[free[0]] = None, lora_id
        for slots in tables:
            slots.name(free[0], number)
        return True
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
            _say_lost(slots)
            slots.fill(there.index(lora_id), number)
    return done


def slots_of(punica: Any, count: int) -> Slots:
    """The table of a rank, which is that of its Punica wrapper."""
    if not hasattr(punica, _NAME):
        device = punica.token_mapping_meta.token_lora_mapping.device
        setattr(punica, _NAME, Slots(count, device))
    found: Slots = getattr(punica, _NAME)
    return found


def _say_lost(slots: Slots) -> None:
    if int(slots.lost):
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
