"""In which order batches that wait for slots get them.

First come, first served: while a batch waits, no later one takes a slot. Batches whose adapters are
all in slots go on, but not forever: after OVERTAKEN of them no new batch may use the adapters that
have to leave for the first one that waits.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moelora.adapters.held import Loaded, NoSlot

OVERTAKEN = 32  # batches that may begin while another one waits for a slot


@dataclass(eq=False)
class Turn:
    """The place in the queue of a batch of some adapters, or of a call that is `passing`."""

    names: Sequence[str]
    passing: bool = False
    overtaken: int = 0
    leaving: set[str] = field(default_factory=set)  # adapters that no new batch may use


class Turns:
    """The queue of batches that wait. Not thread-safe: the pool's lock is held."""

    def __init__(self) -> None:
        # Weak, as an interrupt may end a call anywhere; in the order of insertion.
        self._waiting: weakref.WeakKeyDictionary[Turn, None] = weakref.WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._waiting)

    def wait(self, turn: Turn) -> None:
        """Join the queue, at its end, if the batch is not in it."""
        self._waiting.setdefault(turn)

    def leave(self, turn: Turn) -> bool:
        """Leave the queue. Returns whether the batch was in it."""
        was_there = turn in self._waiting
        self._waiting.pop(turn, None)
        return was_there

    def begin(self, turn: Turn) -> None:
        """The batch has all slots; it may have overtaken others."""
        for other in self._waiting if not turn.passing else ():
            other.overtaken += other is not turn

    def check_slot(self, turn: Turn | None, what: str) -> None:
        """NoSlot if other batches have waited longer for a slot; `turn` None: ahead of a batch."""
        first = self._first()
        if first is not None and first is not turn:
            raise NoSlot(f"no slot for {what}: {len(self)} batches have waited longer")

    def check_use(self, turn: Turn, loaded: Mapping[str, Loaded], own: set[str]) -> None:
        """NoSlot if the batch has an adapter that leaves its slot for one that waits.

        `own` may be used all the same.
        """
        if turn is not self._first() and not turn.passing:
            for name in sorted(self.leaving(loaded).intersection(turn.names) - own):
                raise NoSlot(f"no slot for adapter {name!r}: it leaves for a batch that waits")

    def leaving(self, loaded: Mapping[str, Loaded]) -> set[str]:
        """Adapters whose slots the first batch gets when no batch uses them any more."""
        first = self._first()
        if first is None or first.overtaken < OVERTAKEN:
            return set()
        missing = sum(name not in loaded for name in first.names)
        first.leaving.intersection_update(loaded)
        for name, one in loaded.items():
            if len(first.leaving) >= missing:
                break
            if not one.pinned and name not in first.names:
                first.leaving.add(name)
        return first.leaving

    def _first(self) -> Turn | None:
        return next(iter(self._waiting), None)
