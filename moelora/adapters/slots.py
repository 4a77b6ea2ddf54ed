"""The slots of a pool: stacks of all layers, and the tables that they share.

Everything is allocated once and only written in place, so that captured CUDA graphs see later
adapters. An adapter is staged first: checked, and converted to the dtypes of its stacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, TypedDict

import torch

from moelora.adapters.fits import check_experts, check_linears
from moelora.adapters.layers import Adapter, LinearLayer, MoELayer
from moelora.adapters.linears import LinearFactors, LinearStacks
from moelora.adapters.ranks import facts_of
from moelora.adapters.shards import Shard
from moelora.adapters.stacks import (
    Conversions,
    Converted,
    Copies,
    ExpertStacks,
    Factors,
    Place,
    padded,
)
from moelora.adapters.transfer import Arrival, Streams

PORTION = 32 << 20  # bytes of copies that share an event, and the calls that launch them


class Tables(NamedTuple):
    """Tensors shared by all layers of a device, (max_loras,) each; all but the last for experts."""

    ranks: torch.Tensor
    scalings: torch.Tensor
    one_a: torch.Tensor  # A of gate and of up are equal in all layers
    enabled: torch.Tensor

    @classmethod
    def of(cls, max_loras: int, device: torch.device) -> Tables:
        dtypes = torch.int32, torch.float32, torch.int32, torch.bool
        return cls(*(torch.zeros(max_loras, dtype=of, device=device) for of in dtypes))


class LayerFactors(TypedDict):
    """Keyword arguments of `fused_experts_lora`: the adapters of one layer."""

    w13_lora_a: torch.Tensor | tuple[torch.Tensor, ...]
    w13_lora_b: torch.Tensor | tuple[torch.Tensor, ...]
    w2_lora_a: torch.Tensor
    w2_lora_b: torch.Tensor
    lora_ranks: torch.Tensor
    lora_scalings: torch.Tensor
    w13_one_a: torch.Tensor
    adapter_enabled: torch.Tensor


@dataclass
class Staged:
    """A checked adapter in the dtypes of its stacks; `facts` are what ranks compare of it."""

    factors: Converted
    rank: int  # of experts' factors, as the rest but facts
    scaling: float
    one_a: bool  # of two slices of w13, in all layers
    facts: Mapping[str, object] = field(default_factory=dict)

    def nbytes(self) -> int:
        pairs = (pair for pairs in self.factors.values() for pair in pairs)
        return sum(t.nbytes for pair in pairs if pair is not None for t in pair)

    def in_host_memory(self, pinned: bool) -> Staged:
        """A copy that a stream can read; `pinned` if there is a CUDA device to copy to."""

        def copied(t: torch.Tensor) -> torch.Tensor:
            host = torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=pinned)
            return host.copy_(t)

        factors: Converted = {
            name: [pair and (copied(pair[0]), copied(pair[1])) for pair in pairs]
            for name, pairs in self.factors.items()
        }
        return replace(self, factors=factors, facts={})


class Slots:
    """The tensors of a pool. Arguments are those of `AdapterPool`, checked."""

    def __init__(
        self,
        layers: Mapping[str, MoELayer],
        linears: Mapping[str, LinearLayer],
        max_loras: int,
        ranks: tuple[int, int],
        places: Mapping[str, Place],
        devices: Sequence[torch.device],
        slices: int,
        shared_outer: bool,
        shards: Mapping[str, Shard],
    ) -> None:
        self.devices = devices
        self._whole = layers, linears
        self._shards = shards
        layers = {n: shards[n].local(x) if n in shards else x for n, x in layers.items()}
        linears = {n: shards[n].local(x) if n in shards else x for n, x in linears.items()}
        with torch.inference_mode(False):  # threads write to them, in any mode
            self.experts = ExpertStacks(layers, max_loras, ranks[0], places, slices, shared_outer)
            self.linears = LinearStacks(linears, max_loras, ranks[1], places)
            self.tables = {device: Tables.of(max_loras, device) for device in devices}
        self.streams = Streams(devices)
        # Whether copies are launched, and complete later, on all devices.
        self.asynchronous = all(device.type == "cuda" for device in devices)
        self._places, self._most = places, max(map(padded, ranks))
        self._order = sorted(places, key=_depth)
        # Per slot and layer: the rank past which factors are zero. Absent if unknown.
        self._used = [dict.fromkeys(self._order, 0) for _ in range(max_loras)]
        # The last write to the tables of a device and slot, on the stream of copies.
        self._filled: dict[tuple[torch.device, int], torch.cuda.Event] = {}

    def tensors(self) -> list[torch.Tensor]:
        tables = [t for tables in self.tables.values() for t in tables]
        return [*(t for name in self._order for t in self._of(name)), *tables]

    def layer(self, name: str) -> LayerFactors:
        """The factors of a layer of experts, all slots."""
        stacks, tables = self.experts.of(name), self.tables[self._places[name].device]
        a, b = stacks.w13_lora_a, stacks.w13_lora_b
        return {
            "w13_lora_a": tuple(a) if len(a) > 1 else a[0],
            "w13_lora_b": tuple(b) if len(b) > 1 else b[0],
            "w2_lora_a": stacks.w2_lora_a,
            "w2_lora_b": stacks.w2_lora_b,
            "lora_ranks": tables.ranks,
            "lora_scalings": tables.scalings,
            "w13_one_a": tables.one_a,
            "adapter_enabled": tables.enabled,
        }

    def linear(self, name: str) -> LinearFactors:
        """The factors of a linear layer or embedding, all slots."""
        a, b, ranks = self.linears.of(name)
        enabled = self.tables[self._places[name].device].enabled
        return {"lora_a": a, "lora_b": b, "lora_ranks": ranks, "adapter_enabled": enabled}

    def stage(self, adapter: Adapter) -> Staged:
        """Check an adapter and convert it; ValueError says what does not fit."""
        convert = Conversions()
        facts = {}
        if self._shards:
            check_experts(adapter.experts, self._whole[0], self.experts.max_rank)
            check_linears(adapter.linears, self._whole[1], self.linears.max_rank)
            facts = facts_of(adapter)
            adapter = self._part(adapter)
        factors, rank, scaling, one_a = self.experts.stage(adapter.experts, convert)
        factors |= self.linears.stage(adapter.linears, convert)
        convert.check()
        return Staged(factors, rank, scaling, one_a, facts)

    def _part(self, adapter: Adapter) -> Adapter:
        """The factors that this process holds."""
        layers, shards = self._whole[0], self._shards
        return Adapter(
            {
                name: shards[name].experts(layers[name], pairs) if name in shards else pairs
                for name, pairs in adapter.experts.items()
            },
            {
                name: shards[name].linear(pair) if name in shards else pair
                for name, pair in adapter.linears.items()
            },
        )

    def enable(self, slot: int, enabled: bool) -> None:
        self.streams.note()  # the next adapter of this slot is written after this
        for device, tables in self.tables.items():
            if (filled := self._filled.get((device, slot))) is not None:
                torch.cuda.current_stream(device).wait_event(filled)
            tables.enabled[slot].fill_(enabled)

    def clear(self, slot: int) -> None:
        """Mark a slot as empty."""
        self.enable(slot, False)
        self._used[slot] = {}  # training may have written all of it
        for tables in self.tables.values():
            tables.ranks[slot].fill_(0)

    def write(self, slot: int, staged: Staged, enabled: bool = True) -> Arrival | None:
        """Write an adapter to a slot that no batch uses.

        Copies follow what the streams of readers have been given so far. They are under way when
        this returns, in the order of the model's layers; None: all are complete. `staged` must stay
        until they are, unless it is pinned memory.
        """
        self.streams.fence()
        layers, last, portions = {}, {}, []
        used: dict[str, int] = {}
        before, self._used[slot] = self._used[slot], {}
        try:
            for device, tables in self.tables.items():
                event = self.streams.run(device, partial(_fill, tables, slot, staged, enabled))
                if event is not None:
                    self._filled[device, slot] = event
            for device, names, copies in self._portions(slot, staged, before, used):
                if (event := self.streams.run(device, copies.run)) is not None:
                    layers.update(dict.fromkeys(names, (device, event)))
                    last[device] = event
                    portions.append((event, copies.nbytes))
        except BaseException:
            self.enable(slot, False)
            raise
        self._used[slot] = used
        return Arrival(layers, last, portions) if last else None

    def renew(
        self, slot: int, before: int, write: Callable[[int, torch.device], None]
    ) -> Arrival | None:
        """Let a trainer `write` its factors to a slot that no batch uses, as `write` does.

        `before` is the slot of the previous version. What `write` does not write, such as ranks and
        scalings, is copied from it.
        """
        self.streams.fence()
        self._used[slot] = {}  # training may write all of it
        layers, last = {}, {}
        for device in self.devices:
            names = [name for name in self._order if self._places[name].device == device]
            event = self.streams.run(device, partial(self._renew, slot, before, device, write))
            if event is not None:
                layers.update(dict.fromkeys(names, (device, event)))
                last[device] = self._filled[device, slot] = event
        arrival = Arrival(layers, last, []) if last else None
        if arrival is not None:
            arrival.wait()  # the current streams may overwrite what was copied
        return arrival

    def _renew(
        self,
        slot: int,
        before: int,
        device: torch.device,
        write: Callable[[int, torch.device], None],
    ) -> None:
        if slot != before:
            names = [name for name in self._order if self._places[name].device == device]
            of_layers = (t for name in names for t in self._of(name))
            for tensor in (*of_layers, *self.tables[device]):
                tensor.detach()[slot].copy_(tensor.detach()[before])
        write(slot, device)

    def _of(self, name: str) -> Iterable[torch.Tensor]:
        return (
            self.experts.of(name).tensors()
            if name in self.experts.layers
            else self.linears.of(name)
        )

    def read(self, slot: int, like: Staged, pinned: bool) -> Staged:
        """What is in a slot, in host memory: the inverse of `write`. Waits for the device.

        `like` has the layers, ranks and scaling of what was written first.
        """
        self.synchronize()

        def cut(a: torch.Tensor, b: torch.Tensor, pair: Factors | None) -> Factors | None:
            rank = 0 if pair is None else pair[0].size(-2)
            return pair and (a.narrow(-2, 0, rank), b.narrow(-1, 0, rank))

        factors: Converted = {
            name: [cut(*w, p) for w, p in zip(self._pairs(name, slot), pairs, strict=True)]
            for name, pairs in like.factors.items()
        }
        return replace(like, factors=factors).in_host_memory(pinned)

    def _pairs(self, name: str, slot: int) -> list[Factors]:
        return (self.experts if name in self.experts.layers else self.linears).pairs(name, slot)

    def _portions(
        self, slot: int, staged: Staged, before: Mapping[str, int], used: dict[str, int]
    ) -> Iterator[tuple[torch.device, list[str], Copies]]:
        """Copies to layers of one device, with their names; `used` gets the ranks of layers."""
        begun: dict[torch.device, tuple[list[str], Copies]] = {}
        for name in self._order:
            device = self._places[name].device
            names, copies = begun.setdefault(device, ([], Copies()))
            names.append(name)
            into, most = self._pairs(name, slot), before.get(name, self._most)
            pairs = staged.factors.get(name) or [None] * len(into)
            ranks = [copies.pair(*w, p, most) for w, p in zip(into, pairs, strict=True)]
            used[name] = max(ranks)
            if name in self.linears.layers:
                copies.fill(self.linears.of(name)[2][slot], used[name])
            if copies.nbytes >= PORTION:
                yield device, *begun.pop(device)
        for device, (names, copies) in begun.items():
            yield device, names, copies

    def synchronize(self) -> None:
        for device in self.devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)


def _fill(tables: Tables, slot: int, staged: Staged, enabled: bool) -> None:
    # An assignment to [slot] would be a copy that the host waits for.
    tables.ranks[slot].fill_(staged.rank)
    tables.scalings[slot].fill_(staged.scaling)
    tables.one_a[slot].fill_(staged.one_a)
    tables.enabled[slot].fill_(enabled)


def _depth(name: str) -> list[tuple[int, str]]:
    """Sorts names of layers by the numbers in them."""
    return [(int(p), "") if p.isdigit() else (-1, p) for p in name.split(".")]
