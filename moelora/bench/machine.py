"""Peaks of a machine, hence bounds of cases, and its description in result files."""

import os
import pathlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from moelora import _C
from moelora.operators.tuned import cpu_name

# Bytes per second read and written, bf16 flops per second; measured once with long runs.
KNOWN = {"NVIDIA H200": (4.3e12, 790e12)}


@dataclass(frozen=True)
class Peaks:
    """Memory bytes per second, flops per second; None if the case does not need it."""

    bytes: float
    flops: float | None

    def bound(self, flops: float, moved: float) -> float:
        """Lower bound of the time, in seconds."""
        return max(moved / self.bytes, flops / self.flops if self.flops else 0.0)


def gpu_peaks() -> Peaks:
    """Peaks of the current GPU: known values, or measured with a long copy and a large product."""
    known = KNOWN.get(torch.cuda.get_device_name())
    if known:
        return Peaks(*known)
    free, _ = torch.cuda.mem_get_info()
    source = torch.empty(int(min(2 << 30, free // 8)), dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    square = torch.ones(8192, 8192, dtype=torch.bfloat16, device="cuda")
    copy, product = (
        min(elapsed_ms(call) for _ in range(20)) / 1e3
        for call in (lambda: target.copy_(source), lambda: torch.mm(square, square))
    )
    return Peaks(2 * source.numel() / copy, 2.0 * 8192**3 / product)


def elapsed_ms(call: Callable[[], Any]) -> float:
    """Milliseconds of a call on the current GPU, by events around it."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


class CpuYardsticks:
    """CPU peaks: a streaming read, which also evicts the caches, and torch.mm."""

    LEAST = 256 << 20  # bytes per read, enough to hide its start

    def __init__(self, mm_size: int):
        self.buffer = torch.ones(max(4 * last_cache_bytes(), self.LEAST) // 4)
        self.mm_size = mm_size

    def read(self) -> float:
        """Bytes per second of one multi-threaded read."""
        started = time.perf_counter()
        self.buffer.sum()
        return 4 * self.buffer.numel() / (time.perf_counter() - started)

    def mm(self, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        """Time torch.mm with weights in the layout of layers, (out, in)."""
        x, w = torch.ones(2, self.mm_size, self.mm_size, dtype=dtype)
        return lambda: torch.mm(x, w.t())


def last_cache_bytes() -> int:
    """Size of the largest cache of this processor; 32 MiB if unknown."""
    sizes = [32 << 20]
    for path in pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text.rstrip("KM")) * {"K": 1 << 10, "M": 1 << 20}.get(text[-1], 1))
    return max(sizes)


def processor() -> dict[str, Any]:
    """Description of a CPU for result files."""
    return {
        "device": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_features": _C.cpu_features().split(),
        "last_cache_bytes": last_cache_bytes(),
        "load_average": round(os.getloadavg()[0], 2),
    }
