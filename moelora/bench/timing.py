"""Times baselines in turn, so that all meet the same clocks and the same neighbours.

On a GPU: CUDA graphs of many calls over rotating batches, weights past the L2 cache, events around
each replay. On a CPU: one call a turn, after a read that empties the caches.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from moelora.bench.machine import CpuYardsticks, Peaks, gpu_peaks

COLD_BYTES = 192e6  # three times the L2 of an H200


@dataclass
class Run:
    """One baseline on a case."""

    call: Callable  # of a batch's index; returns the output
    first: Callable | None = None  # the checked call instead of `call(0)`; may raise Skipped
    eager: bool = False  # it synchronises with the host, so no CUDA graph can hold it
    of: object | None = None  # the `Layer` that it computes, where that is not the case's


@dataclass(frozen=True)
class Times:
    """Microseconds of one call: the median, and the bounds of the middle 80 % of the turns."""

    median: float
    low: float
    high: float
    turns: int

    @classmethod
    def of(cls, samples: list[float]) -> "Times":
        ordered = sorted(samples)
        edge = len(ordered) // 10
        low, high = ordered[edge], ordered[-1 - edge]
        median = statistics.median(ordered)
        return cls(round(median, 2), round(low, 2), round(high, 2), len(ordered))


def calls_in_graph(batches: int, bytes_per_call) -> int:
    """So many that weights come from memory and the launch of the graph does not count."""
    return max(batches, min(48, math.ceil(COLD_BYTES / max(bytes_per_call, 1.0))))


class GraphTimer:
    """Captures baselines as CUDA graphs and replays them in turn."""

    def __init__(self):
        self.peaks = gpu_peaks()
        self.stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()
        # The pool lives as long as a graph that uses it.
        scratch = torch.zeros(1, device="cuda")
        self.keeper = self.capture([lambda: scratch.add_(1)])

    def capture(self, calls):
        """One graph of `calls` back to back, after one plain run of each."""
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

    def compare(self, runs: dict, batches, bytes_per_call, budget_ms) -> tuple[dict, Peaks]:
        """{key: Times} of one call of each of `runs`, {key: Run}; and the peaks of this GPU.

        Each graph holds `calls_in_graph`, over rotating batches.
        """
        calls = calls_in_graph(len(batches), bytes_per_call)
        graphs, turns = [], {}
        for key, run in runs.items():
            rotation = [lambda i=i, run=run: run.call(i % len(batches)) for i in range(calls)]
            if not run.eager:
                try:
                    graphs.append(self.capture(rotation))
                except RuntimeError:  # it synchronises where nobody expected it
                    run.eager = True
            turns[key] = (rotation[0], 1) if run.eager else (graphs[-1].replay, calls)
        samples = {key: [] for key in turns}
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self.stream):
            spent, rounds = 0.0, 0
            while rounds < 5 or (spent < budget_ms * len(turns) and rounds < 40):
                for key, (turn, calls_of_turn) in turns.items():
                    start.record()
                    turn()
                    stop.record()
                    stop.synchronize()
                    elapsed = start.elapsed_time(stop)
                    spent += elapsed
                    if rounds > 0:  # the first round warms up
                        samples[key].append(1000.0 * elapsed / calls_of_turn)
                rounds += 1
        for graph in graphs:
            graph.reset()
        return {key: Times.of(found) for key, found in samples.items()}, self.peaks

    def medians(self, calls: dict, batches, bytes_per_call, budget_ms) -> dict:
        """{name: median microseconds} of {name: function of a batch's index}."""
        runs = {name: Run(call) for name, call in calls.items()}
        times, _ = self.compare(runs, batches, bytes_per_call, budget_ms)
        return {name: t.median for name, t in times.items()}


class TurnTimer:
    """One call of each baseline a round; the reads that empty the caches measure streaming
    bandwidth, and torch.mm, which takes its turn too, arithmetic.

    A baseline leaves once it has had its time and its rounds; one far behind leaves after its time.
    """

    ROUNDS = range(3, 15)
    FAR_BEHIND = 5.0
    STREAMED = 8  # up to so many tokens the layer is bound by its weights alone

    def __init__(self, mm_size=2048):
        self.yardsticks = CpuYardsticks(mm_size)

    def compare(self, runs: dict, batches, bytes_per_call, budget_ms) -> tuple[dict, Peaks]:
        """{key: Times} of one call of each of `runs`, {key: Run}; and the peaks of this machine.
        A key is (who, rank), and "ours" is among them."""
        x = batches[0].x
        waiting = {key: lambda run=run: run.call(0) for key, run in runs.items()}
        if len(x) > self.STREAMED:
            waiting["mm", 0] = self.yardsticks.mm(x.dtype)
        samples, reads = {key: [] for key in waiting}, []
        while waiting:
            for key, call in list(waiting.items()):
                reads.append(self.yardsticks.read())
                started = time.perf_counter()
                call()
                samples[key].append(1e6 * (time.perf_counter() - started))
                if self.has_enough(key, samples, 1e3 * budget_ms):
                    del waiting[key]
        mm = samples.pop(("mm", 0), None)
        rate = 2e6 * self.yardsticks.mm_size**3 / statistics.median(mm) if mm else None
        times = {key: Times.of(found) for key, found in samples.items()}
        return times, Peaks(statistics.median(reads), rate)

    def has_enough(self, key, samples, budget):
        rounds, spent = len(samples[key]), sum(samples[key])
        enough = self.ROUNDS.start
        if spent > rounds * self.FAR_BEHIND * min(samples.get(("ours", key[1])) or [spent]):
            enough = 1
        return rounds >= self.ROUNDS.stop or (rounds >= enough and spent > budget)
