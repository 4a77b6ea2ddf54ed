"""Adapters that vLLM activates: their writes are recorded once, and done on a stream of their own.

vLLM activates an adapter on the stream that computes: `set_lora` of each module clears a slot and
copies factors to it, and waits for that stream twice in each layer of experts. Here:

    load       set_lora of each module runs on recorders instead of its stacks, which note
               (stack, part of a slot, factor); factors become contiguous and pinned
    activate   another stream waits until no batch reads the slot, then does what was noted, layer
               by layer
    a batch    the stream that computes waits for the adapters in it that are still on the way, or
               each layer waits for its own part of them (`layers`)

No wait is in a captured graph. vLLM decides which adapter leaves its slot; modules that use their
stacks otherwise are written by vLLM. Where `is_wanted` is false, vLLM writes all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from moelora.adapters.transfer import Arrival, Streams
from moelora.integrations import shown, switched_on
from moelora.integrations.vllm import PREFETCH, layers, listed, say_once, travel, wrap
from moelora.operators.torch_private import foreach_copy_, foreach_zero_

SLOT = 0  # that `set_lora` is called for on recorders
MAX_WAIT_S = 0.02  # of a batch for its last layers, from when it is scheduled
Noted: TypeAlias = tuple[Any, tuple[Any, ...], Any]  # (stack, part of a slot, factor)
Copy: TypeAlias = tuple[Tensor, tuple[Any, ...], Tensor]  # the same, staged for a copy


def install() -> None:
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.lora.worker_manager import WorkerLoRAManager

    wrap(LoRAModelManager, "_create_merged_loras_inplace", _recording)
    wrap(LoRAModelManager, "activate_adapter", _activate)
    wrap(WorkerLoRAManager, "set_active_adapters", _waiting)


def is_wanted(lora_config: Any, several: bool) -> bool:
    """Whether host memory has more adapters than slots, on one GPU: with tensor parallelism each
    rank pins its parts beside the whole factors. The switch wants it anyway."""
    return switched_on(PREFETCH) or (
        lora_config.max_cpu_loras > lora_config.max_loras and not several
    )


# -- what an adapter writes to a slot --


@dataclass
class _Recorder:
    """Stands for a stack, or another sequence with an entry for each slot, in `set_lora`."""

    _target: Any
    _noted: list[Noted]

    def __getattr__(self, name: str) -> Any:
        if name in ("shape", "size", "dim", "ndim", "dtype", "device"):
            return getattr(self._target, name)
        raise AttributeError(f"a recorder has no {name}")

    def __getitem__(self, index: Any) -> _Part:
        return _Part(self, _part(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        self.note(_part(index), value)

    def note(self, part: tuple[Any, ...], value: Any) -> None:
        self._noted.append((self._target, part, value))


@dataclass
class _Part:
    """A part of a slot: only what is written to it is known."""

    of: _Recorder
    part: tuple[Any, ...]

    def copy_(self, value: Tensor | float, non_blocking: bool = False) -> None:
        self.of.note(self.part, value)

    fill_ = copy_


def _part(index: Any) -> tuple[Any, ...]:
    slot, *part = index if isinstance(index, tuple) else (index,)
    if type(slot) is not int or slot != SLOT:
        raise TypeError(f"{index!r} is not of one slot")
    return tuple(part)


@dataclass
class Writes:
    """What an adapter writes to a slot, from host memory.

    zeros: stacks whose slot is cleared, since factors fill a part of it or none
    copies: by the layer, (stack, part of a slot, factor)
    on_host: (list with an entry for each slot, value)
    own: modules that vLLM writes
    """

    zeros: list[Tensor] = field(default_factory=list)
    copies: dict[layers.Layer, list[Copy]] = field(default_factory=dict)
    on_host: list[tuple[list[Any], Any]] = field(default_factory=list)
    own: dict[str, Any] = field(default_factory=dict)

    def add(self, noted: list[Noted], layer: layers.Layer) -> None:
        """What a module of a layer noted, without writes that later ones cover."""
        last: dict[int, list[Noted]] = {}
        for target, part, value in noted:
            covers = isinstance(target, list) or _covers(target, part)
            before = [] if covers else last.get(id(target), [])
            last[id(target)] = [*before, (target, part, value)]
        for target, part, value in (one for writes in last.values() for one in writes):
            if isinstance(target, list):
                self.on_host.append((target, value))
            elif not isinstance(value, Tensor) and value == 0 and not part and target.dim() > 1:
                self.zeros.append(target)
            else:
                like = _part_of(target, SLOT, part)
                value = _staged(torch.as_tensor(value, device="cpu"), like)
                if _covers(target, part):
                    part, value = (), value.view(target.shape[1:])
                self.copies.setdefault(layer, []).append((target, part, value))


def _clear(zeros: list[Tensor], slot: int) -> None:
    if zeros:
        foreach_zero_([stack[slot] for stack in zeros])


def _copy(copies: list[Copy], slot: int) -> None:
    parts = [_part_of(stack, slot, part) for stack, part, _ in copies]
    foreach_copy_(parts, [value for *_, value in copies], non_blocking=True)


def _part_of(stack: Tensor, slot: int, part: tuple[Any, ...]) -> Tensor:
    return stack[slot][part] if part else stack[slot]


def _covers(stack: Tensor, part: tuple[Any, ...]) -> bool:
    """Whether the part of a slot is all of it."""
    return _part_of(stack, SLOT, part).numel() == stack[SLOT].numel()


def _staged(value: Tensor, like: Tensor) -> Tensor:
    """Factors as a copy to a slot wants them: of its dtype and shape, contiguous, pinned."""
    value = value.to(like.dtype).expand(like.shape).contiguous()
    return value.pin_memory() if like.is_cuda and not value.is_pinned() else value


def record(manager: Any, model: Any) -> Writes | None:
    """What `activate_adapter` of a merged LoRA writes; None for one with factors on a GPU, which
    vLLM copies there in a millisecond."""
    found = Writes()
    for name, module in manager.modules.items():
        lora = manager._get_lora_layer_weights(model, name)
        factors = [] if lora is None else [*listed(lora.lora_a), *listed(lora.lora_b)]
        if any(factor is not None and factor.is_cuda for factor in factors):
            return None
        noted: list[Noted] = []
        try:
            if hasattr(module, "set_module_to_save"):
                raise TypeError("it has a full module, too")
            twin = _twin(module, noted)
            if lora is None:
                twin.reset_lora(SLOT)
            else:
                twin.set_lora(SLOT, lora.lora_a, lora.lora_b)
        except (AttributeError, TypeError):
            found.own[name] = module
        else:
            found.add(noted, layers.layer_of(name))
    return found


def _twin(module: Any, noted: list[Noted]) -> Any:
    """A module with recorders instead of its tensors."""

    def recorder(value: Any) -> Any:
        if isinstance(value, Tensor):
            return _Recorder(value, noted)
        if isinstance(value, tuple) and value and all(isinstance(one, Tensor) for one in value):
            return tuple(map(recorder, value))
        if hasattr(value, "recorded"):
            return value.recorded(lambda target: _Recorder(target, noted))
        return value

    twin = object.__new__(type(module))
    twin.__dict__.update({name: recorder(value) for name, value in vars(module).items()})
    return twin


# -- slots of a worker --


class Activations:
    """Which slots of a worker are read by which batches, and written by copies on the way."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = Streams([device])
        self._held: dict[int, int] = {}  # ids of adapters in slots that copies wrote
        self._arrivals: dict[int, Arrival] = {}  # by slot
        self._reading: set[int] = set()  # ids in the last batch
        self._before: Any = None  # when all batches before that one are done
        self._rate = 0.0  # of the last copies, bytes in a second
        self.progress = layers.Progress()

    def begin(self, ids: set[int], is_batch: bool) -> None:
        """A batch reads the slots of these from now on, or a part of it."""
        if is_batch:
            self._before, self._reading = self._streams.record(self._device), set()
            self.progress.begin()
        self._reading |= ids

    def copy(self, writes: Writes, lora_id: int, slot: int) -> None:
        """Write to a slot as soon as no batch reads it."""
        held = self._held.pop(slot, None)
        self._arrivals.pop(slot, None)
        idle = held is not None and held not in self._reading and not travel.is_on
        after = self._before if idle else None
        if after is None:
            after = self._streams.record(self._device)
        number = self.progress.number
        blocks = sorted(writes.copies.items(), key=lambda block: number(block[0]))
        # Clearing has kernels, which wait for those of batches: all of it goes before the copies.
        work = [partial(_clear, writes.zeros, slot)]
        work += [partial(_copy, copies, slot) for _, copies in blocks]
        events = self._streams.run_each(self._device, work, after, timed=True)
        for target, value in writes.on_host:
            target[slot] = value
        self._held[slot] = lora_id
        if events:
            by_number = {layers.NO_LAYER: (self._device, events[0])}
            portions = [(events[0], 0)]
            for (layer, copies), event in zip(blocks, events[1:], strict=True):
                by_number[number(layer)] = self._device, event
                portions.append((event, sum(value.nbytes for *_, value in copies)))
            self._arrivals[slot] = Arrival(by_number, {self._device: events[-1]}, portions)

    def forget(self, ids: Sequence[int | None]) -> None:
        """vLLM writes to one of the slots without an adapter, on the stream that computes."""
        for slot in (slot for slot, number in enumerate(ids) if number is None):
            self._held.pop(slot, None)
            self._arrivals.pop(slot, None)

    def wait(self, ids: set[int] | None = None, by_layer: bool = False) -> None:
        """Let what is launched from now on wait for copies: of these adapters, or of all. A batch
        may wait for each layer's own."""
        wanted = None if travel.is_on else ids
        coming = [
            self._arrivals[slot]
            for slot in list(self._arrivals)
            if not self.has_arrived(slot) and (wanted is None or self._held[slot] in wanted)
        ]
        if by_layer and self._is_by_layer():
            self.progress.wait(coming)
            return
        for arrival in coming:
            arrival.wait()

    def can_schedule(self, slot: int) -> bool:
        """Whether the adapter in a slot has arrived, or will within MAX_WAIT_S."""
        if self.has_arrived(slot):
            return True
        if not self._is_by_layer():
            return False
        slots = [*self._arrivals]  # in the order of their copies
        before = slots[: slots.index(slot) + 1]
        nbytes = sum(self._arrivals[slot].bytes_left() for slot in before)
        return nbytes <= MAX_WAIT_S * self._rate

    def _is_by_layer(self) -> bool:
        return self.progress.is_known and not travel.is_on

    def has_arrived(self, slot: int) -> bool:
        arrival = self._arrivals.get(slot)
        if arrival is not None and arrival.done():
            self._rate = arrival.rate() or self._rate
            del self._arrivals[slot]
        return slot not in self._arrivals


def activations(manager: Any) -> Activations | None:
    """Of a LoRAModelManager; None before a copy on another stream is known."""
    found: Activations | None = getattr(manager, "_moelora_activations", None)
    return found


def settle(manager: Any) -> None:
    """Let the current stream wait for all copies to slots, to read them."""
    if (found := activations(manager)) is not None:
        found.wait()


def touch(manager: Any, ids: Iterable[int]) -> None:
    """Let others leave their slots, and host memory, before these."""
    for cache in (manager._registered_adapters, manager._active_adapters):
        for number in ids:
            cache.touch(number)


# -- hooks --


def _is_several() -> bool:
    """Whether this worker's engine has other GPUs; the process group may be a trainer's."""
    from vllm.distributed import parallel_state as state

    groups = state.get_tp_group(), state.get_pp_group(), state.get_dp_group()
    return any(group.world_size > 1 for group in groups)


def _recording(merge: Callable[..., Any], self: Any, lora_model: Any) -> None:
    merge(self, lora_model)
    if hasattr(lora_model, "_moelora_writes") or not is_wanted(self.lora_config, _is_several()):
        return
    try:
        writes = record(self, lora_model)
    except RuntimeError as error:  # no memory to pin, or factors that vLLM refuses
        writes = None
        say_once(f"vLLM copies an adapter to slots by itself ({shown(error)})")
    lora_model._moelora_writes = writes
    blocks = [] if writes is None else writes.copies.values()
    stack = next((stack for copies in blocks for stack, *_ in copies), None)
    if stack is not None and activations(self) is None:
        device = stack.device
        if device.type == "cuda":
            from vllm.utils.torch_utils import current_stream

            current_stream()  # vLLM makes its stream by the first call, unless another one was set
        self._moelora_activations = Activations(device)


def _activate(activate: Callable[..., Any], self: Any, lora_id: int) -> Any:
    state = activations(self)
    if state is None or lora_id in self._active_adapters:
        return activate(self, lora_id)
    writes = getattr(self._registered_adapters.get(lora_id), "_moelora_writes", None)
    if writes is None or writes.own:
        state.wait()  # vLLM writes on the stream that computes
        state.forget(self.lora_index_to_id)
    every = self.modules
    self.modules = every if writes is None else writes.own
    try:
        done = activate(self, lora_id)
        if writes is not None:
            state.copy(writes, lora_id, self.lora_index_to_id.index(lora_id))
    except BaseException:
        self.deactivate_adapter(lora_id)
        raise
    finally:
        self.modules = every
    return done


def _waiting(
    set_active_adapters: Callable[..., Any], self: Any, requests: Any, mapping: Any
) -> None:
    manager = self._adapter_manager
    state = activations(manager)
    ids = {request.lora_int_id for request in requests if request}
    is_batch = getattr(getattr(mapping, "type", None), "name", "LANGUAGE") == "LANGUAGE"
    if state is None:
        set_active_adapters(self, requests, mapping)
        state = activations(manager)  # of the first adapter
    else:
        state.begin(ids, is_batch)
        touch(manager, ids)  # vLLM may evict one that the batch has, for another that it has
        set_active_adapters(self, requests, mapping)
    if state is not None:
        state.wait(ids, by_layer=is_batch)
