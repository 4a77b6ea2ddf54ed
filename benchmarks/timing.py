"""Times GPU work in CUDA graphs, rivals interleaved, inputs rotated past the L2 cache."""

import math
import statistics

import torch

COLD_BYTES = 192e6  # three times the L2 of an H200


class GraphTimer:
    """Captures rivals as CUDA graphs and replays them in turn, so that all meet the same clocks."""

    def __init__(self):
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

    def compare(self, rivals, batches, bytes_per_call, budget_ms=60.0):
        """Median microseconds of one call of each rival.

        `rivals`: {name: function of a batch's index}. Each graph holds so many calls over rotating
        batches that weights come from memory and the launch of the graph does not count.
        """
        calls = max(len(batches), min(48, math.ceil(COLD_BYTES / max(bytes_per_call, 1.0))))
        graphs = {}
        for name, run in rivals.items():
            graphs[name] = self.capture(
                [lambda i=i, run=run: run(i % len(batches)) for i in range(calls)]
            )
        times = {name: [] for name in graphs}
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self.stream):
            spent, rounds = 0.0, 0
            while rounds < 5 or (spent < budget_ms * len(graphs) and rounds < 40):
                for name, graph in graphs.items():
                    start.record()
                    graph.replay()
                    stop.record()
                    stop.synchronize()
                    elapsed = start.elapsed_time(stop)
                    spent += elapsed
                    if rounds > 0:  # the first round warms up
                        times[name].append(1000.0 * elapsed / calls)
                rounds += 1
        for graph in graphs.values():
            graph.reset()
        return {name: round(statistics.median(t), 2) for name, t in times.items()}
