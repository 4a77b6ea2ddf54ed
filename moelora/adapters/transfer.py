"""Copies to slots on a stream of their own, with an event for each layer.

    side stream    waits for what readers have launched, then: layer 0, event, layer 1, event, ...
    a reader       waits for the event of a layer before that layer's kernels

Nothing makes the host wait. Devices without streams are written at once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch


def is_capturing() -> bool:
    """Whether the current stream of the current CUDA device is being captured into a graph."""
    return torch.cuda.is_current_stream_capturing()


class Arrival:
    """The copies of one adapter: an event for each layer, and the last one of each device.

    `portions`: events in the order of the launches, with the bytes that each adds.
    """

    def __init__(
        self,
        layers: Mapping[Any, tuple[torch.device, torch.cuda.Event]],
        last: Mapping[torch.device, torch.cuda.Event],
        portions: Sequence[tuple[torch.cuda.Event, int]],
    ) -> None:
        self._layers = layers
        self._last = last
        self._begun = time.monotonic()
        self._portions = portions
        self._left = list(portions)

    def wait(self, layer: Any = None) -> None:
        """Make the current streams wait for one layer, or for all.

        A capture is not made to wait: what is captured runs later, after a wait outside of it.
        """
        if is_capturing():
            return
        if layer is None:
            for device, event in self._last.items():
                torch.cuda.current_stream(device).wait_event(event)
        elif layer in self._layers:
            device, event = self._layers[layer]
            torch.cuda.current_stream(device).wait_event(event)

    def wait_up_to(self, layer: int) -> None:
        """Make the current streams wait for the layers up to one, where layers are numbers in the
        order of their copies."""
        before = [number for number in self._layers if number <= layer]
        if before:
            self.wait(before[-1])

    def done(self) -> bool:
        """Whether all copies are complete; False during a capture, which must not ask."""
        return not is_capturing() and all(event.query() for event in self._last.values())

    def seconds_left(self) -> float:
        """Estimate of the time until all copies are complete; infinite before the first one is.

        It assumes the rate of the copies so far, counted from their launch, and so is too long
        rather than too short.
        """
        if is_capturing():
            return math.inf
        left = self.bytes_left()
        copied = sum(nbytes for _, nbytes in self._portions) - left
        if not self._left:
            return 0.0
        return (time.monotonic() - self._begun) * left / copied if copied else math.inf

    def bytes_left(self) -> int:
        """Of portions that are not complete."""
        while self._left and self._left[0][0].query():
            self._left.pop(0)
        return sum(nbytes for _, nbytes in self._left)

    def rate(self) -> float:
        """Bytes in a second, on the GPU's clock, from the end of the first portion to that of the
        last one, where all copies are complete and their events are timed; 0.0 if none is known."""
        (first, _), *others = self._portions
        seconds = first.elapsed_time(others[-1][0]) / 1000 if others else 0.0
        return sum(nbytes for _, nbytes in others) / seconds if seconds > 0 else 0.0

    def synchronize(self) -> None:
        """Make the host wait for all copies."""
        for event in self._last.values():
            event.synchronize()


class Streams:
    """The stream of copies of each CUDA device, and the streams whose kernels read slots."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = [device for device in devices if device.type == "cuda"]
        self._side: dict[torch.device, torch.cuda.Stream] = {}
        self._readers: dict[tuple[torch.device, int], torch.cuda.Stream] = {}

    def note(self) -> None:
        """The current streams read slots from now on."""
        if not self._devices or is_capturing():
            return
        for device in self._devices:
            stream = torch.cuda.current_stream(device)
            self._readers.setdefault((device, stream.cuda_stream), stream)

    def fence(self) -> None:
        """Make copies wait for everything that readers have launched so far."""
        self.note()
        for device in self._devices:
            self._of(device).wait_stream(torch.cuda.default_stream(device))
        for (device, _), reader in list(self._readers.items()):
            self._of(device).wait_stream(reader)

    def record(self, device: torch.device) -> torch.cuda.Event | None:
        """An event after what the current stream has launched; None on a CPU or in a capture."""
        if device.type != "cuda" or is_capturing():
            return None
        return torch.cuda.current_stream(device).record_event()

    def run(
        self, device: torch.device, copy: Callable[[], None], after: torch.cuda.Event | None = None
    ) -> torch.cuda.Event | None:
        """Run `copy` on the stream of copies of `device`, which waits for `after`; the event after
        it, None on a CPU."""
        events = self.run_each(device, [copy], after)
        return events[0] if events else None

    def run_each(
        self,
        device: torch.device,
        copies: Iterable[Callable[[], None]],
        after: torch.cuda.Event | None = None,
        timed: bool = False,
    ) -> list[torch.cuda.Event]:
        """Run `copies` as `run` does, one after the other; the event after each, none on a CPU."""
        events: list[torch.cuda.Event] = []
        if device.type != "cuda":
            for copy in copies:
                copy()
            return events
        here, before = torch.cuda.current_stream(), torch.cuda.current_stream(device)
        # Not torch.cuda.stream(): an interrupt as it begins would leave the stream current.
        try:
            torch.cuda.set_stream(self._of(device))
            if after is not None:
                self._of(device).wait_event(after)
            for copy in copies:
                copy()
                event = torch.cuda.Event(enable_timing=timed)
                events.append(self._of(device).record_event(event))
        finally:
            torch.cuda.set_stream(before)
            torch.cuda.set_stream(here)
        return events

    def _of(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._side:
            # Its small kernels go between those of readers, which fill the GPU.
            # One for all threads: only copies of one stream follow each other.
            self._side.setdefault(device, torch.cuda.Stream(device, priority=-1))
        return self._side[device]
