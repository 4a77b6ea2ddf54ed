"""What measurements ask of a GPU; on a CPU there is nothing to wait for or to free."""

import gc
import time

import torch


def capture(step):
    """A CUDA graph of one call, after three that warm up on a stream of their own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def wait():
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def timed(call):
    """(seconds until the GPU has done it, result) of a call."""
    wait()
    start = time.perf_counter()
    result = call()
    wait()
    return time.perf_counter() - start, result


def free():
    """Return unused memory to the GPU; the peak of torch's allocator starts anew."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
