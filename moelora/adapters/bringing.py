"""Adapters are brought to slots: for batches that hold them, and ahead of those.

Batches that wait for slots take turns (turns.py). What is brought ahead evicts no adapter that a
batch will use soon.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from moelora.adapters.held import Held, Loaded, NoSlot
from moelora.adapters.host import Host, Source
from moelora.adapters.slots import Slots, Staged
from moelora.adapters.turns import Turn, Turns
from moelora.adapters.versions import Versions

READERS = 4  # threads that bring adapters ahead of their requests
POLL_S = 0.02  # how often to look for a slot of a batch that was dropped without `release`


class Bringing(Versions):
    """The versions in slots, and the batches that hold them."""

    def __init__(self, slots: Slots, max_loras: int, host: Host | None) -> None:
        super().__init__(slots, max_loras, host)
        self._turns = Turns()
        self._here = threading.local()
        self._coming: set[str] = set()  # names that threads bring
        self._readers: ThreadPoolExecutor | None = None
        self._process = os.getpid()

    def ready(self, name: str, within: float) -> bool:
        """Whether all copies of an adapter in a slot are complete, or will be `within` seconds.

        Raises the error that kept it from being brought.
        """
        with self.lock:
            self.check_known(name)
            loaded = self.loaded.get(name)
            if loaded is None and self.host is not None:
                self.host.source(name).check()
            if loaded is None or name in self._turns.leaving(self.loaded):
                return False
            arrival = loaded.arriving()
            return arrival is None or (within > 0 and arrival.seconds_left() <= within)

    def slots_of(self, names: Sequence[str], held: Held) -> dict[str | None, int]:
        """The slots of adapters that are held; it counts as a use, and begins a step."""
        with self.lock:
            held.check(self)
            held.check_held(names)
            for name in names:
                if name in self.loaded:
                    self.loaded.move_to_end(name)
            return {name: held.slot(name) for name in names}

    def take(self, names: Sequence[str], timeout: float, passing: bool = False) -> Held:
        """Hold adapters, which are brought to slots if they are in none.

        `passing`: for a single call, during which no batch can wait for the slots.
        """
        with self.lock:
            for name in names:
                self.check_known(name)
        if len(names) > self.residents.max_loras:
            raise RuntimeError(
                f"a batch names {len(names)} adapters, the pool has {self.residents.max_loras} "
                "slots; split the batch, or make the pool with a larger max_loras="
            )
        end, turn = time.monotonic() + timeout, Turn(names, passing)
        try:
            while True:
                held = Held(self)
                try:
                    self._take_all(turn, held)
                    return held
                except BaseException as error:
                    # Release at once: the traceback keeps `held` alive, and two batches could wait
                    # for each other's slots.
                    self.release(held)
                    left = end - time.monotonic()
                    if not isinstance(error, NoSlot) or left <= 0:
                        raise
                with self.lock:
                    self._turns.wait(turn)
                    self._freed.wait(min(left, POLL_S))
        finally:
            with self.lock:
                if self._turns.leave(turn):
                    self._freed.notify_all()

    def enter(self, held: Held) -> None:
        """Record what a `with` block of this thread holds, until it is released."""
        self._blocks().add(held)

    def _blocks(self) -> weakref.WeakSet[Held]:
        blocks: weakref.WeakSet[Held] | None = getattr(self._here, "blocks", None)
        if blocks is None:
            blocks = self._here.blocks = weakref.WeakSet()
        return blocks

    def release(self, held: Held) -> None:
        with self.lock:
            held.release()
            self._freed.notify_all()

    def _take_all(self, turn: Turn, held: Held) -> None:
        """Hold the adapters that are in slots, then bring others, which evict none of these."""
        with self.lock:
            # An inner `with` block must not wait for an outer one of its thread, which ends later.
            own = {name for held in self._blocks() for name in held.names()}
            self._turns.check_use(turn, self.loaded, own)
            absent = [name for name in turn.names if not self._use(name, held)]
            for name in absent:
                self.check_known(name)
                self._turns.check_slot(turn, f"adapter {name!r}")
        for name in absent:
            self.bring(name, held)
        with self.lock:
            self._turns.begin(turn)

    def _use(self, name: str, held: Held | None) -> bool:
        """Hold an adapter that is in a slot, which counts as a use; False if it is in none."""
        self.settle(name)
        loaded = self.loaded.get(name)
        if loaded is not None and held is not None:
            self.residents.wanted.discard(name)
            self.loaded.move_to_end(name)
            held.add(name, loaded)
        return loaded is not None

    def bring(self, name: str, held: Held | None) -> None:
        """Bring a registered adapter to a slot if it is in none, and hold it.

        On return its copies are launched. Without `held`, ahead of a batch, adapters that are
        wanted soon keep their slots.
        """
        while True:  # until no other thread adds, removes or evicts it in between
            with self.locked(name) as source:
                with self.lock:
                    if self._use(name, held):
                        return
                    if held is not None and self._known().is_full():
                        # Fail before reading: what is read would not be kept for the next try.
                        self.residents.free_slot(name)
                staged = self._known().staged(name, source)
                self._copy(name, source, staged, ahead=held is None)
            with self.lock:
                if self._use(name, held):
                    return

    def _copy(self, name: str, source: Source, staged: Staged, ahead: bool) -> None:
        """Launch copies to a slot, and list the adapter; call with the lock of its source."""
        with self.lock:
            if ahead:
                self._turns.check_slot(None, f"adapter {name!r}")
            version = source.lineage.version
            place = self._reserve(name, ahead)
        enabled = source.lineage.enabled
        with self._reserved(place):
            arrival = self.slots.write(place.slot, staged, enabled)
            with self.lock:
                if self._known().source(name) is source and name not in self.loaded:
                    if source.lineage.enabled != enabled:
                        self.slots.enable(place.slot, not enabled)
                    self._list(place, Loaded(place.slot, False, version, arrival, source.lineage))
                    source.failure = None

    # -- ahead of batches --

    def bring_ahead(self, names: Sequence[str]) -> None:
        """Begin to bring adapters, in order, for as many as slots can be freed.

        Copies from host memory to GPUs are launched here, in order: in a thread, each call of CUDA
        would wait for those of the thread that runs the model. All else is left to threads.
        """
        with self.lock:
            if self._process != os.getpid():  # forked: without the threads of its parent
                self._process, self._readers = os.getpid(), None
                self._coming.clear()
            sources = {name: self._known().source(name) for name in names}
            readable = [name for name, source in sources.items() if source.failure is None]
            absent = [
                name
                for name in self.residents.want(readable)
                if name not in self.loaded and name not in self._coming
            ]
        for name in absent:
            with self._ahead(name):
                if not self._launch(name, sources[name]):
                    self._submit(name)

    def _launch(self, name: str, source: Source) -> bool:
        """Launch copies from host memory, unless a thread has to bring the adapter."""
        if not self.slots.asynchronous or source.visits:
            return False
        with source.lock:
            if (staged := self._known().in_memory(name, source)) is None:
                return False
            if name not in self.loaded:
                self._copy(name, source, staged, ahead=True)
            return True

    def _submit(self, name: str) -> None:
        with self.lock:
            if name in self._coming:
                return
            if self._readers is None:
                self._readers = ThreadPoolExecutor(READERS, "moelora-adapters")
            self._coming.add(name)
            try:
                self._readers.submit(_bring, weakref.ref(self), name)
            except BaseException:
                self._coming.discard(name)
                raise

    @contextmanager
    def _ahead(self, name: str) -> Iterator[None]:
        """Keep an error for `ready` to raise; an adapter without a slot is tried again later."""
        try:
            yield
        except (KeyError, NoSlot):
            self.residents.wanted.discard(name)
        except Exception as error:
            self.residents.wanted.discard(name)
            self._known().fail(name, error)


def _bring(versions: weakref.ref[Bringing], name: str) -> None:
    """Body of a reader thread: bring an adapter if a batch still wants it. Its errors are kept;
    `take` tries again, and raises its own."""
    if (found := versions()) is not None:
        try:
            with found._ahead(name):
                if name in found.residents.wanted:
                    found.bring(name, None)
        finally:
            found._coming.discard(name)
