"""Versions of adapters in slots, and which of them batches hold."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from moelora.adapters.transfer import Arrival


class Change:
    """Makes what was staged for several adapters current, all at once, when `done` is set."""

    done = False


class Unwritten(NamedTuple):
    """A version of a trainer that is in no slot yet, although it is current if `change` is done.

    `write` copies the factors of a device to a slot, on the current stream; `place` is another slot
    than that of the version before, if batches hold that.
    """

    change: Change
    write: Callable[[int, torch.device], None]
    place: Reservation | None


@dataclass(eq=False)
class Lineage:
    """What all versions of an adapter share until its name is removed or replaced."""

    version: int = 1  # the newest, from 1
    enabled: bool = True


@dataclass(eq=False)
class Loaded:
    """A version of an adapter in its slot.

    Attributes
    ----------
    trainer : object or None
        Who writes the next versions: all of its versions have it, and those of others do not.
    trained : bool
        A trainer wrote the slot: neither a folder nor host memory has these factors.
    unwritten : Unwritten or None
        The next version of the trainer, until all of it is in a slot.
    """

    slot: int
    pinned: bool
    version: int = 1
    arrival: Arrival | None = None  # None: all of it is there
    lineage: Lineage = field(default_factory=Lineage)
    users: weakref.WeakSet[Held] = field(default_factory=weakref.WeakSet)
    trainer: object | None = None
    trained: bool = False
    unwritten: Unwritten | None = None

    @property
    def batches(self) -> int:
        return sum(1 for _ in self.users)

    def arriving(self) -> Arrival | None:
        """Copies that may still be under way."""
        if self.arrival is not None and self.arrival.done():
            self.arrival = None
        return self.arrival


class Held:
    """The versions that a batch holds; they are released when the last reference goes.

    A pool returns it (`hold`, `keep`) and takes it (`mapping`, `lookup`). `owner` identifies the
    pool.
    """

    def __init__(self, owner: object) -> None:
        self._owner = owner
        self._released = False
        self._loaded: dict[str, Loaded] = {}
        self._next: dict[str, Loaded] = {}  # versions to switch to

    def add(self, name: str, loaded: Loaded) -> None:
        loaded.users.add(self)
        self._loaded[name] = loaded

    def check(self, owner: object) -> None:
        """RuntimeError if it is of another pool, or was released."""
        if owner is not self._owner:
            raise RuntimeError("held= is of another pool, wanted that of hold or keep of this one")
        if self._released:
            raise RuntimeError("this batch was released; its adapters may be in other slots by now")

    def names(self) -> list[str]:
        """Adapters that are held."""
        return list(self._loaded)

    def check_held(self, names: Sequence[str]) -> None:
        """KeyError names what is held."""
        for name in names:
            self._of(name)

    def slot(self, name: str) -> int:
        """The slot of an adapter from the next step on. KeyError names what is held.

        Switches to the version that `update(in_flight="switch")` has put in place of this one.
        """
        old = self._of(name)
        if (new := self._next.get(name)) is None:
            return old.slot
        self._loaded[name] = new
        del self._next[name]
        old.users.discard(self)
        return new.slot

    def version(self, name: str) -> int:
        """The version that is held. KeyError names what is held, RuntimeError after `release`."""
        self.check(self._owner)
        return self._of(name).version

    def follow(self, old: Loaded, new: Loaded) -> None:
        """Switch from `old`, which is held or about to be switched to, in the next `slot`."""
        for name, loaded in self._loaded.items():
            between = self._next.get(name)
            if old is loaded or old is between:
                new.users.add(self)
                self._next[name] = new
                if between is not None:
                    between.users.discard(self)

    def wait(self, layer: str | None = None) -> None:
        """Make the current streams wait for the factors of one layer, or of all.

        Only needed after `hold` or `keep` with `layerwise=True`, and on streams other than those
        that were current then. The host does not wait.
        """
        for loaded in (*self._loaded.values(), *self._next.values()):
            if (arrival := loaded.arriving()) is not None:
                arrival.wait(layer)

    def synchronize(self) -> None:
        """Make the host wait for all factors: for use on streams that are not known."""
        for loaded in self._loaded.values():
            if (arrival := loaded.arriving()) is not None:
                arrival.synchronize()

    def is_behind(self) -> bool:
        """Whether the next step takes a new version, after `update(in_flight="switch")`."""
        return bool(self._next)

    def release(self) -> None:
        """Let go of all."""
        self._released = True
        for one in (*self._loaded.values(), *self._next.values()):
            one.users.discard(self)
        self._loaded.clear()
        self._next.clear()

    def _of(self, name: str) -> Loaded:
        if name not in self._loaded:
            raise KeyError(f"adapter {name!r} is not held; held are {sorted(self._loaded)}")
        return self._loaded[name]


@dataclass(eq=False)
class Reservation:
    """A slot that a version of an adapter is being written to.

    It ends when the last reference goes, or by `free`.
    """

    name: str
    slot: int


class Residents:
    """The adapters in slots by name, least recently used first, and what else occupies slots.

    The latter are replaced versions that batches still hold, and reservations. Not thread-safe: the
    pool's lock is held. `keeps_trained`: factors that only a slot has may be evicted, since host
    memory then has them.
    """

    def __init__(self, max_loras: int, keeps_trained: bool) -> None:
        self.max_loras = max_loras
        self.keeps_trained = keeps_trained
        self.loaded: OrderedDict[str, Loaded] = OrderedDict()
        self._retired: list[tuple[str, Loaded]] = []
        self._reserved: weakref.WeakSet[Reservation] = weakref.WeakSet()
        self.wanted: set[str] = set()

    def free_slots(self) -> set[int]:
        """Slots that no version of an adapter is in, and none is written to."""
        taken = {one.slot for one in self.loaded.values()}
        taken |= {one.slot for _, one in self.retired()} | {one.slot for one in self._reserved}
        return set(range(self.max_loras)) - taken

    def keeps_slot(self, one: Loaded) -> bool:
        """Whether an update writes over this version, instead of to another slot."""
        return not one.batches and (one.pinned or not self.free_slots())

    def free_slot(
        self, name: str, ahead: bool = False, staying: Collection[str] = (), after: int = 0
    ) -> tuple[int, str | None]:
        """A slot that no batch uses, and the name of the adapter to evict from it, if any.

        Adapters that are `wanted` soon are evicted last, and `ahead` of a batch not at all; those
        that are `staying` are not evicted. `after`: others take this many slots before. Raises
        NoSlot, which says what is to be written, if there is none.
        """
        idle = [
            other
            for other, one in self.loaded.items()
            if not one.pinned and not one.batches and other not in staying
        ]
        kept = [one for one in idle if self.loaded[one].trained and not self.keeps_trained]
        leaving = [one for one in idle if one not in kept and one not in self.wanted]
        if not ahead:
            leaving += [one for one in idle if one not in kept and one in self.wanted]
        spare: list[tuple[int, str | None]] = [(slot, None) for slot in sorted(self.free_slots())]
        spare += [(self.loaded[one].slot, one) for one in leaving]
        if len(spare) <= after:
            another = name in self.loaded or self.batches(name)
            what = f"{'the new version of ' if another else ''}adapter {name!r}"
            message = f"no slot for {what}: all {self.max_loras} are pinned or in use"
            if kept:
                message += (
                    f", or have factors that were trained and are nowhere else: remove one of "
                    f"{kept}, or make the pool with host="
                )
            raise NoSlot(message)
        return spare[after]

    def reserve(self, name: str, slot: int) -> Reservation:
        """Reserve a slot of `free_slot`, or that of the version before."""
        reservation = Reservation(name, slot)
        self._reserved.add(reservation)
        return reservation

    def free(self, reservation: Reservation) -> None:
        """End a reservation, to which the traceback of an exception may refer."""
        self._reserved.discard(reservation)

    def want(self, names: Sequence[str]) -> list[str]:
        """Adapters that batches will use soon, the first one first; returns those that fit."""
        others = {
            one.slot
            for name, one in self.loaded.items()
            if (one.pinned or one.batches) and name not in names
        }
        others |= {one.slot for _, one in self.retired()}
        fitting = list(names)[: max(0, self.max_loras - len(others))]
        self.wanted = set(fitting)
        return fitting

    def check_free(self, name: str) -> None:
        """RuntimeError while a batch holds a version of an adapter."""
        if batches := self.batches(name):
            raise RuntimeError(f"adapter {name!r} is in use by {batches} batches")

    def batches(self, name: str) -> int:
        """Number of batches that hold a version of an adapter."""
        newest = self.loaded.get(name)
        every = self.older(name) if newest is None else [*self.older(name), newest]
        return len({held for one in every for held in one.users})

    def retire(self, name: str) -> Loaded | None:
        """Take an adapter off the list; batches that hold this version go on with it."""
        old = self.loaded.get(name)
        if old is not None:
            self._retired.append((name, old))
            del self.loaded[name]
        return old

    def succeed(self, name: str, new: Loaded) -> None:
        """List `new` in place of its version before, which batches that hold it go on with."""
        old = self.loaded[name]
        if old.batches:
            self._retired.append((name, old))
        self.loaded[name] = new

    def switch(self, name: str, new: Loaded) -> None:
        """Batches that hold an older version take `new` in their next step."""
        for loaded in self.older(name):
            for held in list(loaded.users):
                held.follow(loaded, new)

    def older(self, name: str) -> list[Loaded]:
        """Replaced versions of an adapter that batches still hold."""
        return [loaded for other, loaded in self.retired() if other == name]

    def retired(self) -> list[tuple[str, Loaded]]:
        """Replaced versions that batches still hold, by name."""
        self._retired = [(name, loaded) for name, loaded in self._retired if loaded.batches]
        return self._retired


class NoSlot(RuntimeError):
    """No slot can be freed now: all are pinned, in use or being written. Try again later."""
