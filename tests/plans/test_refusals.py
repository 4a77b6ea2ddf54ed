"""Launchers refuse nothing: what cannot run is refused by a check or a plan, before anything is
queued. What plans know of the limits of kernels: tests/c/test_limits.c.
"""

import re

from c_programs import ROOT

CUDA = ROOT / "csrc/cuda"
SOURCES = [p for p in sorted(CUDA.rglob("*")) if p.suffix in (".cu", ".cuh", ".h", ".inc")]
# What CUDA itself says, and where no variant of a launcher's is left: a mistake in the plan.
DEVICE_ERRORS = {"backend.cu": 1, "gemm/sm90/tensor_map.cu": 2}
NO_KERNEL = {
    "align/align.cu": 1,
    "backward/steps.cuh": 1,
    "decode/decode.cu": 1,
    "delta/expand.cu": 1,
    "delta/windows.cu": 1,
    "gemm/sm90/launch.cuh": 1,
    "layer/experts.cu": 1,
    "layer/quantized.cu": 2,
    "layer/sum.cu": 1,
    "shrink/blocks.cu": 1,
    "shrink/segments.cu": 1,
    "shrink/segments_sm90.cu": 1,
}


def found(pattern):
    counts = {str(p.relative_to(CUDA)): len(re.findall(pattern, p.read_text())) for p in SOURCES}
    return {name: count for name, count in counts.items() if count}


def test_launchers_raise_what_cuda_says():
    assert len(SOURCES) > 60
    assert found(r"moelora_fail\(MOELORA_DEVICE_ERROR,") == DEVICE_ERRORS
    assert found(r"moelora_fail\(") == DEVICE_ERRORS
    assert found(r"MOELORA_(INVALID_ARGUMENT|UNSUPPORTED|WORKSPACE_TOO_SMALL|REQUIRE)\b") == {}


def test_a_variant_that_a_launcher_does_not_have_is_a_mistake_of_the_plan():
    """Past a switch over variants or their table, or in Hopper's launch without an epilogue."""
    assert found(r"moelora_no_kernel\(") == NO_KERNEL
    behind = found(r"\n  }\n  return moelora_no_kernel\(")
    others = ("backward/steps.cuh", "gemm/sm90/launch.cuh", "layer/experts.cu")
    assert behind == {k: v for k, v in NO_KERNEL.items() if k not in others}
