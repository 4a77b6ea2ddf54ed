"""Which version of which adapter is in which slot: they are added, replaced and evicted.

    lock          of the tables of names; never held while a folder is read
    source.lock   while one name is brought or replaced; taken before `lock`

Each writer of a slot (threads that bring adapters, `add`, `update`, trainers) holds a reservation
of it. No batch uses the slot before the name is listed, so that it is written without `lock`. If
the new version takes the slot of the old one, it is written under `lock`, and all batches wait: in
`add(replace=True)`; in an update, if no batch holds the adapter and it is pinned or no slot is
free; and by a trainer, if no batch holds the adapter. What a trainer has written is only in the
slot: an eviction copies it to host memory; without host memory the adapter is not evicted.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch

from moelora.adapters.held import Change, Lineage, Loaded, Reservation, Residents, Unwritten
from moelora.adapters.host import Host, Source, Visit
from moelora.adapters.slots import Slots, Staged

REMEMBERED = 1000  # evicted names, for messages

log = logging.getLogger("moelora.adapters")


class Versions:
    """The adapters of a pool. `host` has all that are known; None: only those in slots are."""

    def __init__(self, slots: Slots, max_loras: int, host: Host | None) -> None:
        self.slots = slots
        self.host = host
        self.residents = Residents(max_loras, keeps_trained=host is not None)
        self.loaded = self.residents.loaded  # least recently used first
        self.lock = threading.RLock()
        self._freed = threading.Condition(self.lock)
        self._evicted: dict[str, str] = {}  # names that are not known any more, and for whom

    def entry(self, name: str) -> Loaded:
        """KeyError if the adapter is in no slot."""
        loaded = self.loaded.get(name)
        if loaded is None:
            why = f"no adapter {name!r} is loaded"
            if (another := self._evicted.get(name)) is not None:
                why += (
                    f": it was evicted for {another!r}, as the pool has "
                    f"{self.residents.max_loras} slots; add it again, pin it before, or make the "
                    "pool with host= or a larger max_loras="
                )
            raise KeyError(f"{why}; loaded are {sorted(self.loaded)}")
        return loaded

    def is_known(self, name: str) -> bool:
        return name in self.loaded or (self.host is not None and name in self.host)

    def check_known(self, name: str) -> None:
        """KeyError if the adapter is neither in a slot nor registered."""
        if self.host is None:
            self.entry(name)
        else:
            self.host.source(name)

    def lineage(self, name: str) -> Lineage:
        """KeyError for an unknown name."""
        return (self.entry(name) if self.host is None else self.host.source(name)).lineage

    def check_new(self, name: str, replace: bool = False) -> None:
        """ValueError for a known name, RuntimeError for one in use; call with `lock`."""
        if not self.is_known(name):
            return
        if not replace:
            state = "loaded" if name in self.loaded else "registered"
            raise ValueError(
                f"adapter {name!r} is already {state}; remove it, update it, or add it with "
                "replace=True"
            )
        self.residents.check_free(name)

    def _reserve(
        self, name: str, ahead: bool = False, staying: Collection[str] = ()
    ) -> Reservation:
        """Reserve a slot that no batch uses; call with `lock`. NoSlot if there is none.

        The adapter that it is taken from is evicted; factors that were trained go to host memory.
        """
        slot, leaving = self.residents.free_slot(name, ahead, staying)
        place = self.residents.reserve(name, slot)
        if leaving is not None:
            self._write_back(leaving)
            if self.host is None:
                self._evicted[leaving] = name
                if len(self._evicted) > REMEMBERED:
                    del self._evicted[next(iter(self._evicted))]
            level = logging.WARNING if self.host is None else logging.DEBUG
            log.log(level, "adapter %r is evicted from slot %d for %r", leaving, slot, name)
            del self.loaded[leaving]
        return place

    def _write_back(self, name: str) -> None:
        """Renew what host memory has of an adapter in a slot by what a trainer has written there.

        Call with `lock`, before the slot is overwritten.
        """
        self.settle(name)
        loaded = self.loaded[name]
        if loaded.trained and self.host is not None and name in self.host:
            self.host.renew(name, partial(self.slots.read, loaded.slot))
            loaded.trained = False

    # -- for trainers --

    def of_trainer(self, name: str, trainer: object) -> Loaded | None:
        """The version in a slot, the newest, if this trainer writes it; None if others have
        since."""
        with self.lock:
            self.settle(name)
            loaded = self.loaded.get(name)
            return loaded if loaded is not None and loaded.trainer is trainer else None

    def check_next(self, names: Collection[str], staying: Collection[str]) -> None:
        """NoSlot unless there are slots for the next versions of trainers, of all these names,
        without an eviction of those that are `staying`."""
        with self.lock:
            held = [name for name in names if name in self.loaded and self.loaded[name].batches]
            for number, name in enumerate(held):
                self.residents.free_slot(name, staying=staying, after=number)

    def stage(
        self,
        change: Change,
        writers: Mapping[str, Callable[[int, torch.device], None]],
        staying: Collection[str],
    ) -> None:
        """Reserve slots for the next versions of trainers: that of the version before or, while
        batches hold that, another. Call with `lock`; `settle` writes them when `change` is done.
        """
        self.slots.streams.note()  # the current streams have made what will be copied
        for name, write in writers.items():
            old = self.loaded[name]
            place = None
            if old.batches:
                place = self._reserve(name, staying=staying)
            old.unwritten = Unwritten(change, write, place)

    def settle(self, name: str) -> None:
        """Write the next version of a trainer that is current and in no slot; call with `lock`.

        Each user of the adapter calls it. If an interrupt ends it, the next call writes all of it.
        """
        old = self.loaded.get(name)
        if old is None or old.unwritten is None:
            return
        change, write, place = old.unwritten
        if not change.done:
            if place is not None:
                self.residents.free(place)
            old.unwritten = None
            return
        place = place or self.residents.reserve(name, old.slot)
        arrival = self.slots.renew(place.slot, old.slot, write)
        old.lineage.version = version = old.version + 1
        new = Loaded(place.slot, old.pinned, version, arrival, old.lineage)
        new.trainer, new.trained = old.trainer, True
        self.residents.succeed(name, new)
        self.residents.free(place)
        old.unwritten = None

    @contextmanager
    def _reserved(self, place: Reservation) -> Iterator[None]:
        """Until it is listed, or its write has failed, no other adapter gets the slot."""
        try:
            yield
        finally:
            with self.lock:
                self.residents.free(place)

    @contextmanager
    def locked(self, name: str) -> Iterator[Source]:
        """The source of a registered name; within the context no other thread brings or replaces
        it."""
        host, visit = self._known(), Visit()
        while True:
            source = host.source(name)
            try:
                source.visits.add(visit)
                with source.lock:
                    if host.source(name) is source:
                        yield source
                        return
            finally:
                source.visits.discard(visit)

    def _known(self) -> Host:
        if self.host is None:
            raise RuntimeError("this needs a pool with host memory: AdapterPool(..., host=64)")
        return self.host

    # -- changes --

    def put(
        self,
        name: str,
        staged: Staged,
        pinned: bool,
        source: Source | None,
        replace: bool,
        trainer: object | None,
    ) -> int:
        """Write an adapter to a slot. Returns the slot: its own one, written under the lock so that
        no batch has it during the write, or else a reserved one, written without.
        """
        with self.lock:
            self.check_new(name, replace)
            self._check_room(name, source)
            lineage = Lineage() if source is None else source.lineage
            if name in self.loaded:
                self._write_back(name)
                place = self.residents.reserve(name, self.loaded[name].slot)
                with self._reserved(place):
                    del self.loaded[name]
                    self._write(place, staged)
                    loaded = Loaded(place.slot, pinned, lineage=lineage, trainer=trainer)
                    return self._list(place, loaded, source)
            place = self._reserve(name)
        with self._reserved(place):
            self._write(place, staged)
            with self.lock:
                self.check_new(name, replace)
                self._check_room(name, source)
                loaded = Loaded(place.slot, pinned, lineage=lineage, trainer=trainer)
                return self._list(place, loaded, source)

    def _list(self, place: Reservation, loaded: Loaded, source: Source | None = None) -> int:
        """List an adapter whose slot has been written. Returns the slot."""
        if source is not None:
            self._known().put(place.name, source)
        self._evicted.pop(place.name, None)
        self.loaded[place.name] = loaded
        return loaded.slot

    def replace(
        self, name: str, staged: Staged, switch: bool, new: Source | None, lineage: Lineage
    ) -> int:
        """Replace the version of a name, in a slot or in none.

        `new` has the factors in host memory already; None in a pool without host memory. `lineage`
        is that of the name when the update began.
        """
        if new is None:
            return self._replace(name, staged, switch, None, lineage)
        with self.locked(name) as old:
            new.lineage, new.lock = old.lineage, old.lock
            return self._replace(name, staged, switch, new, lineage)

    def _replace(
        self, name: str, staged: Staged, switch: bool, new: Source | None, lineage: Lineage
    ) -> int:
        with self.lock:
            self._check_unchanged(name, lineage)
            loaded = self.loaded.get(name)
            if loaded is not None and self.residents.keeps_slot(loaded):
                place = self.residents.reserve(name, loaded.slot)
                with self._reserved(place):
                    return self._install(name, place, switch, new, staged)
            # Batches may hold older versions while the latest one is in no slot.
            if loaded is None and not (switch and self.residents.batches(name)):
                return self._install(name, None, switch, new)
            place = self._reserve(name)
            enabled = lineage.enabled
        with self._reserved(place):
            if (arrival := self.slots.write(place.slot, staged, enabled)) is not None:
                arrival.synchronize()
            with self.lock:
                self._check_unchanged(name, lineage)
                if lineage.enabled != enabled:
                    self.slots.enable(place.slot, not enabled)
                return self._install(name, place, switch, new)

    def _install(
        self,
        name: str,
        place: Reservation | None,
        switch: bool,
        new: Source | None,
        staged: Staged | None = None,
    ) -> int:
        """Register a version of a name in a slot, after writing `staged` to it, or in no slot."""
        self._check_room(name, new)
        if name in self.loaded:
            self._write_back(name)
        lineage, old = self.lineage(name), self.residents.retire(name)
        if place is not None and staged is not None:
            self._write(place, staged, lineage.enabled)
        lineage.version += 1
        if new is not None:
            self._known().put(name, new)
        if place is not None:
            pinned = old is not None and old.pinned
            loaded = Loaded(place.slot, pinned, lineage.version, lineage=lineage)
            self._list(place, loaded)
            if switch:
                self.residents.switch(name, loaded)
        return lineage.version

    def _check_unchanged(self, name: str, lineage: Lineage) -> None:
        """KeyError unless the name still has versions of this `lineage`."""
        if not self.is_known(name) or self.lineage(name) is not lineage:
            raise KeyError(f"adapter {name!r} was removed, evicted or replaced during the call")

    def _check_room(self, name: str, source: Source | None) -> None:
        if source is not None and source.folder is None:
            self._known().check_room(name)

    def remove(self, name: str) -> None:
        """Forget an adapter. RuntimeError while a batch holds it."""
        with self.lock:
            if name not in self.loaded:
                self.check_known(name)
            self.residents.check_free(name)
            # Host memory first: it may have older factors than the slot, which must not come back
            # if an interrupt ends this.
            if self.host is not None:
                self.host.remove(name)
            if (loaded := self.loaded.pop(name, None)) is not None:
                self.slots.clear(loaded.slot)
            self._freed.notify_all()

    def enable(self, name: str, enabled: bool) -> None:
        """Enable or disable all versions of an adapter."""
        with self.lock:
            self.lineage(name).enabled = enabled
            if name in self.loaded:
                self.slots.enable(self.loaded[name].slot, enabled)
            for loaded in self.residents.older(name):
                self.slots.enable(loaded.slot, enabled)

    def _write(self, place: Reservation, staged: Staged, enabled: bool = True) -> None:
        # Kernels of an earlier batch may still be reading the slot on a stream that is not known.
        self.slots.synchronize()
        if (arrival := self.slots.write(place.slot, staged, enabled)) is not None:
            arrival.synchronize()
