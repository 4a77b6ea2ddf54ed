"""Steps as CUDA graphs."""

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


def wait(device):
    if device == "cuda":
        torch.cuda.synchronize()
