"""Time baselines in turn, so that all run under the same conditions.

On a GPU: CUDA graphs of many calls over rotating batches, with cold L2 for weights and events
around each replay. On a CPU: one call per turn, after a read that evicts the caches.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch

from moelora.bench.cases import Batch
from moelora.bench.layer import Layer
from moelora.bench.machine import CpuYardsticks, Peaks, elapsed_ms, gpu_peaks

COLD_BYTES = 192e6  # three times the L2 of an H200

Key: TypeAlias = tuple[str, int]  # who, rank; 0 is the layer without adapters
Name = TypeVar("Name")


@dataclass
class Run:
    """One baseline on a case."""

    call: Callable[[int], Any]  # of a batch's index; returns the output
    # the checked call, instead of `call(0)`: of the seconds that it may take; may raise Skipped
    first: Callable[[float], torch.Tensor] | None = None
    eager: bool = False  # synchronizes with the host, so CUDA graphs cannot capture it
    of: Layer | None = None  # the layer it computes, if not the case's


Runs: TypeAlias = dict[Key, Run]


def on(batches: Sequence[Any], run: Callable[..., Any], *more: Any) -> Callable[[int], Any]:
    """`call` of a Run: `run(batch, *more)` with a batch's index."""
    return lambda i: run(batches[i], *more)


@dataclass(frozen=True)
class Times:
    """Microseconds of one call: the median, and the bounds of the middle 80 % of the turns."""

    median: float
    low: float
    high: float
    turns: int

    @classmethod
    def of(cls, samples: list[float]) -> Times:
        ordered, edge = sorted(samples), len(samples) // 10
        found = statistics.median(ordered), ordered[edge], ordered[-1 - edge]
        median, low, high = (round(us, 2) for us in found)
        return cls(median, low, high, len(ordered))


def calls_in_graph(batches: int, moved: float) -> int:
    """Enough calls that weights come from memory and the launch of the graph is negligible."""
    return max(batches, min(48, math.ceil(COLD_BYTES / max(moved, 1.0))))


class GraphTimer:
    """Captures baselines as CUDA graphs and replays them in turn."""

    def __init__(self) -> None:
        self.peaks = gpu_peaks()
        self.stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()
        # The pool lives as long as a graph uses it.
        scratch = torch.zeros(1, device="cuda")
        self.keeper = self.capture([lambda: scratch.add_(1)])

    def capture(self, calls: Sequence[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
        """Capture one graph of `calls` back-to-back calls, after one eager run of each."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            for call in calls:
                call()
            torch.cuda.synchronize()
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                for call in calls:
                    call()
            finally:
                graph.capture_end()
        return graph

    def compare(
        self, runs: Mapping[Name, Run], batches: Sequence[Batch], moved: float, budget_ms: float
    ) -> tuple[dict[Name, Times], Peaks]:
        """Time one call of each of `runs`, which moves so many bytes, and the peaks of this GPU.

        Each graph contains `calls_in_graph` calls over rotating batches.
        """
        calls = calls_in_graph(len(batches), moved)
        graphs, turns = [], {}
        for key, run in runs.items():
            rotation = [lambda i=i, run=run: run.call(i % len(batches)) for i in range(calls)]
            if not run.eager:
                try:
                    graphs.append(self.capture(rotation))
                except RuntimeError:  # unexpected synchronization
                    run.eager = True
            turns[key] = (rotation[0], 1) if run.eager else (graphs[-1].replay, calls)
        samples: dict[Name, list[float]] = {key: [] for key in turns}
        with torch.cuda.stream(self.stream):
            spent, rounds = 0.0, 0
            while rounds < 5 or (spent < budget_ms * len(turns) and rounds < 40):
                for key, (turn, calls_of_turn) in turns.items():
                    elapsed = elapsed_ms(turn)
                    spent += elapsed
                    if rounds > 0:  # the first round warms up
                        samples[key].append(1000.0 * elapsed / calls_of_turn)
                rounds += 1
        for graph in graphs:
            graph.reset()
        return {key: Times.of(found) for key, found in samples.items()}, self.peaks


class TurnTimer:
    """One call of each baseline per round. The reads that evict the caches measure streaming
    bandwidth, and torch.mm in the dtype of x and in float32, which have turns too, arithmetic.

    A baseline ends after its time and its rounds; one that is far slower ends after its time.
    """

    ROUNDS = range(3, 15)
    FAR_BEHIND = 5.0
    STREAMED = 8  # maximum number of tokens at which only weights bound a layer

    def __init__(self, mm_size: int = 2048):
        self.yardsticks = CpuYardsticks(mm_size)

    def compare(
        self, runs: Mapping[Key, Run], batches: Sequence[Batch], moved: float, budget_ms: float
    ) -> tuple[dict[Key, Times], Peaks]:
        """Time one call of each of `runs`, "ours" among them, and the peaks of this machine."""
        x = batches[0].x
        waiting: dict[Key, Callable[[], Any]] = {k: partial(run.call, 0) for k, run in runs.items()}
        if len(x) > self.STREAMED:
            for i, dtype in enumerate(dict.fromkeys((x.dtype, torch.float32))):
                waiting["mm", i] = self.yardsticks.mm(dtype)
        samples: dict[Key, list[float]] = {key: [] for key in waiting}
        reads = []
        while waiting:
            for key, call in list(waiting.items()):
                reads.append(self.yardsticks.read())
                started = time.perf_counter()
                call()
                samples[key].append(1e6 * (time.perf_counter() - started))
                if self.has_enough(key, samples, 1e3 * budget_ms):
                    del waiting[key]
        # Whichever is faster: without 16-bit instructions torch's products are slow in 16 bits.
        mm = [statistics.median(samples.pop(key)) for key in list(samples) if key[0] == "mm"]
        rate = 2e6 * self.yardsticks.mm_size**3 / min(mm) if mm else None
        times = {key: Times.of(found) for key, found in samples.items()}
        return times, Peaks(statistics.median(reads), rate)

    def has_enough(self, key: Key, samples: Mapping[Key, list[float]], budget: float) -> bool:
        rounds, spent = len(samples[key]), sum(samples[key])
        enough = self.ROUNDS.start
        if spent > rounds * self.FAR_BEHIND * min(samples.get(("ours", key[1])) or [spent]):
            enough = 1
        return rounds >= self.ROUNDS.stop or (rounds >= enough and spent > budget)
