"""Adapters that a pool knows by name, with the factors of some of them in host memory.

A name stands for a folder, which is read when its factors are needed and not in host memory, or
for tensors that have no folder and so stay there. The least recently used ones that have a folder
make room for others.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moelora.adapters.columns import Layout
from moelora.adapters.held import Lineage
from moelora.adapters.slots import Staged


class Visit:
    """A thread brings or replaces the factors of a source, or waits to."""


@dataclass(eq=False)
class Source:
    """Where the factors of a name come from; without a folder `staged` stays.

    `lock` is held while a version is read or brought to a slot, never under the lock of the pool.
    """

    folder: Path | None
    layout: Layout | None
    staged: Staged | None = None
    lineage: Lineage = field(default_factory=Lineage)
    # Weak, as an interrupt may end a visit anywhere.
    visits: weakref.WeakSet[Visit] = field(default_factory=weakref.WeakSet)
    failure: Exception | None = None  # why it could not be brought the last time
    lock: Any = field(default_factory=threading.RLock)

    @classmethod
    def of(cls, given: object, layout: Layout | None, staged: Staged | None = None) -> Source:
        """Source of an argument of `add`. A folder is made absolute, so that it does not depend on
        the current one; without a folder `staged` is required.
        """
        folder = Path(given).absolute() if isinstance(given, (str, Path)) else None
        return cls(folder, layout, staged)

    def check(self) -> None:
        """Raises why the adapter could not be brought."""
        if self.failure is not None:
            raise self.failure.with_traceback(None)


class Host:
    """Known adapters by name; at most `places` of them are in host memory.

    `read` returns the factors of a folder; `pinned` says whether host memory is pinned.

    An interrupt may end a call between any two statements. So a source without a folder has its
    factors from when a name stands for it until none does, and `_used` has every name whose factors
    are in host memory, and after an interrupt maybe others.
    """

    def __init__(
        self, places: int, read: Callable[[str, Path, Layout | None], Staged], pinned: bool
    ) -> None:
        self.places = places
        self._read = read
        self._pinned = pinned
        self._sources: dict[str, Source] = {}
        self._used: OrderedDict[str, None] = OrderedDict()  # least recently used first
        self._lock = threading.RLock()

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    def names(self) -> list[str]:
        return list(self._sources)

    def source(self, name: str) -> Source:
        """KeyError if the name is not known."""
        if (source := self._sources.get(name)) is None:
            raise KeyError(
                f"no adapter {name!r} is registered; {len(self._sources)} others are"
                f"{_some(list(self._sources))}"
            )
        return source

    def copied(self, staged: Staged) -> Staged:
        return staged.in_host_memory(self._pinned)

    def put(self, name: str, source: Source) -> None:
        """Let `name` stand for a new source, whose factors are in host memory if they were read.

        Raises RuntimeError if it has no folder, and host memory is full of such adapters.
        """
        with self._lock:
            if source.folder is None:
                self.check_room(name)
            if source.staged is not None:
                self._use(name)
            self._sources[name] = source
            self._make_room()

    def renew(self, name: str, read: Callable[[Staged, bool], Staged]) -> None:
        """Replace factors that have no folder by what `read` returns, which gets those and whether
        to pin memory."""
        source = self.source(name)
        assert source.staged is not None
        source.staged = read(source.staged, self._pinned)

    def check_room(self, name: str) -> None:
        """Raises RuntimeError if tensors of `name` that have no folder would not fit."""
        with self._lock:
            staying = self._staying()
            if len({*staying, name}) > self.places:
                raise RuntimeError(
                    f"no host memory for adapter {name!r}: all {self.places} places have adapters "
                    f"without a folder{_some(staying)}; remove one, register folders, or make the "
                    "pool with a larger host="
                )

    def is_full(self) -> bool:
        """Whether adapters without a folder fill all places, so that no other can be kept."""
        with self._lock:
            return len(self._staying()) >= self.places

    def staged(self, name: str, source: Source) -> Staged:
        """The factors of a name, read from its folder if they are not in host memory.

        Errors are those of `AdapterPool.read`.
        """
        with source.lock:
            staged = source.staged
            if staged is None:
                assert source.folder is not None
                try:
                    staged = self.copied(self._read(name, source.folder, source.layout))
                except Exception as error:
                    source.failure = error
                    raise
                source.failure = None
            with self._lock:
                if self._sources.get(name) is source:
                    self._use(name)
                    source.staged = staged
                    self._make_room()
            return staged

    def in_memory(self, name: str, source: Source) -> Staged | None:
        """The factors of a name if they are in host memory, which counts as a use."""
        with self._lock:
            if self._sources.get(name) is not source or source.staged is None:
                return None
            self._use(name)
            return source.staged

    def fail(self, name: str, error: Exception) -> None:
        """Record why the adapter of this name could not be brought."""
        if (source := self._sources.get(name)) is not None:
            source.failure = error

    def remove(self, name: str) -> None:
        with self._lock:
            self._sources.pop(name, None)
            self._used.pop(name, None)

    def nbytes(self) -> int:
        with self._lock:
            found = [source.staged for _, source in self._in_memory()]
        return sum(staged.nbytes() for staged in found if staged is not None)

    def __len__(self) -> int:
        """How many adapters are in host memory."""
        with self._lock:
            return len(self._in_memory())

    def _use(self, name: str) -> None:
        self._used[name] = None
        self._used.move_to_end(name)

    def _make_room(self) -> None:
        """Drop factors of folders, the least recently used first, until `places` are left."""
        if len(self._used) > self.places:
            held = self._in_memory()
            of_folders = [(name, source) for name, source in held if source.folder is not None]
            for name, source in of_folders[: max(0, len(held) - self.places)]:
                source.staged = None
                del self._used[name]

    def _in_memory(self) -> list[tuple[str, Source]]:
        """Names whose factors are in host memory, least recently used first."""
        known = [(name, self._sources[name]) for name in self._used if name in self._sources]
        return [(name, source) for name, source in known if source.staged is not None]

    def _staying(self) -> list[str]:
        return [name for name, source in self._in_memory() if source.folder is None]


def _some(names: list[str]) -> str:
    if not names:
        return ""
    more = ", ..." if len(names) > 5 else ""
    return f" ({', '.join(repr(name) for name in sorted(names)[:5])}{more})"
