"""Which adapters batches hold: each keeps the version that it began with until it is done."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(eq=False)
class Loaded:
    """A version of an adapter in its slot; `version` counts from 1 while the name is loaded."""

    slot: int
    pinned: bool
    version: int = 1
    users: weakref.WeakSet[Held] = field(default_factory=weakref.WeakSet)

    @property
    def batches(self) -> int:
        return sum(1 for _ in self.users)


class Held:
    """What a batch holds. It is released when the last reference goes, however the call ends."""

    def __init__(self, loaded: Mapping[str, Loaded]) -> None:
        self._loaded = dict(loaded)
        for one in self._loaded.values():
            one.users.add(self)

    def slot(self, name: str) -> int:
        """The slot of the version that is held. KeyError names what is held."""
        if name not in self._loaded:
            raise KeyError(f"adapter {name!r} is not held; held are {sorted(self._loaded)}")
        return self._loaded[name].slot

    def release(self) -> None:
        """Lets go of all."""
        for one in self._loaded.values():
            one.users.discard(self)


class Retired:
    """Versions that have been replaced, while batches hold them still: their slots are taken."""

    def __init__(self) -> None:
        self._found: list[tuple[str, Loaded]] = []

    def add(self, name: str, loaded: Loaded) -> None:
        self._found.append((name, loaded))

    def __iter__(self) -> Iterator[tuple[str, Loaded]]:
        self._found = [(name, loaded) for name, loaded in self._found if loaded.batches]
        return iter(self._found)
