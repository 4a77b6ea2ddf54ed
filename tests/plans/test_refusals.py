"""Launchers refuse nothing: what cannot run is refused by a check or a plan, before anything is
queued. What plans know of the limits of kernels: tests/c/test_limits.c.
"""

import re

from c_programs import ROOT

CUDA = ROOT / "csrc/cuda"
SOURCES = [p for p in sorted(CUDA.rglob("*")) if p.suffix in (".cu", ".cuh", ".h", ".inc")]
# How many errors of CUDA itself each file reports.
DEVICE_ERRORS = {"backend.cu": 1, "gemm/sm90/tensor_map.cu": 2}


def found(pattern):
    counts = {str(p.relative_to(CUDA)): len(re.findall(pattern, p.read_text())) for p in SOURCES}
    return {name: count for name, count in counts.items() if count}


def test_launchers_raise_what_cuda_says():
    assert len(SOURCES) > 60
    assert found(r"moelora_fail\(MOELORA_DEVICE_ERROR,") == DEVICE_ERRORS
    assert found(r"moelora_fail\(") == DEVICE_ERRORS
    assert found(r"MOELORA_(INVALID_ARGUMENT|UNSUPPORTED|WORKSPACE_TOO_SMALL|REQUIRE)\b") == {}
