"""CUDA graphs, and what the host may not wait for."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch.utils._pytree import tree_leaves, tree_map


class Captured:
    """One call in a CUDA graph, which ran once before."""

    def __init__(self, run):
        self.run = run  # and the tensors it holds, which replays read
        with torch.cuda.stream(torch.cuda.Stream()):
            run()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = run()

    def replay(self):
        """The outputs of a replay, which must write all of them anew."""
        for t in tree_leaves(self.out):
            t.fill_(float("nan") if t.is_floating_point() else 0x5A5A5A5A)
        self.graph.replay()
        torch.cuda.synchronize()
        return tree_map(torch.clone, self.out)


@contextmanager
def no_waits():
    """Raises where the host waits for the GPU."""
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def busy_stream():
    """The current stream is busy for about a second, longer than what is inside."""
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    busy = torch.cuda.Event()
    busy.record()
    yield
    assert not busy.query(), "a call waited for the stream"
    torch.cuda.synchronize()
