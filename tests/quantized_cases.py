"""Problems with quantised weights: those of cases.py, their weights brought to four bits here.

What a checkpoint holds is made with plain torch, so that packing has something to be held against.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from cases import Problem, Spec
from conftest import on_gpu
from torch import Tensor

from moelora import QuantizedWeights

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
HALVES = (torch.bfloat16, torch.float16)
DEVICES_AND_DTYPES = [
    *(("cpu", dtype) for dtype in HALVES),
    *(on_gpu("cuda", dtype) for dtype in HALVES),
]
GATE_UP = {"swigluoai": "interleaved", "relu2": None}  # others have gate rows before up rows


@dataclass(frozen=True)
class Format:
    """How a test quantises; group None is all columns."""

    name: str
    group: int | None
    zeros: bool = False


FORMATS = {
    "mxfp4": Format("mxfp4", 32),
    "int4_g32": Format("int4", 32),
    "int4_g64_zp": Format("int4", 64, zeros=True),
    "int4_g32_zp": Format("int4", 32, zeros=True),
    "int4_channel": Format("int4", None),
}


@dataclass
class Numbers:
    """Quantised numbers by rows: what every checkpoint says in its own order."""

    q: Tensor  # (E, N, K) int64, 0 to 15
    scales: Tensor  # (E, N, K / group): e8m0 bytes (MXFP4), or float32 that bfloat16 has, too
    zeros: Tensor | None  # (E, N, K / group) int64
    format: Format

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """In float64, rounded once. INT4 scales are those of the dtype."""
        columns = self.q.size(2)
        spread = columns // self.scales.size(2)
        if self.format.name == "mxfp4":
            values, scales = E2M1.double()[self.q], torch.exp2(self.scales.double() - 127)
        else:
            zeros = 8 if self.zeros is None else self.zeros.repeat_interleave(spread, 2)
            values, scales = (self.q - zeros).double(), self.scales.to(dtype).double()
        return (values * scales.repeat_interleave(spread, 2)).to(dtype)

    def pack(self, dtype: torch.dtype, gate_up: str | None = None) -> QuantizedWeights:
        if self.format.name == "mxfp4":
            return QuantizedWeights.from_mxfp4(
                by_bytes(self.q), self.scales, gate_up=gate_up, dtype=dtype
            )
        zeros = None if self.zeros is None else by_words(self.zeros.transpose(1, 2), pad=True)
        return QuantizedWeights.from_compressed_tensors(
            by_words(self.q),
            self.scales,
            None if zeros is None else zeros.transpose(1, 2),
            gate_up=gate_up,
            dtype=dtype,
        )


def by_bytes(q: Tensor) -> Tensor:
    """Two numbers of the last dimension in a byte, the first in the low nibble."""
    return (q[..., 0::2] | q[..., 1::2] << 4).to(torch.uint8)


def by_words(q: Tensor, order=range(8), pad: bool = False) -> Tensor:
    """Eight numbers of the last dimension in an int32; nibble i is number order[i] of them."""
    if pad:
        q = torch.nn.functional.pad(q, (0, -q.size(-1) % 8))
    eights = q.unflatten(-1, (-1, 8))
    total = sum(eights[..., number] << 4 * i for i, number in enumerate(order))
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


def quantise(w: Tensor, format: Format, seed: int = 0) -> Numbers:
    """Float weights (E, N, K) to the nearest numbers of a format, with scales for their groups."""
    group = format.group if format.group and w.size(2) % format.group == 0 else w.size(2)
    groups = w.float().unflatten(2, (-1, group))
    largest = groups.abs().amax(-1).clamp(min=2.0**-20)
    if format.name == "mxfp4":
        exponents = (torch.floor(torch.log2(largest)) - 2).clamp(-40, 1)
        scaled = groups / torch.exp2(exponents)[..., None]
        between = (E2M1[1:8] + E2M1[:7]) / 2
        q = torch.bucketize(scaled.abs(), between) | (scaled < 0).long() << 3
        return Numbers(q.flatten(2), (exponents + 127).to(torch.uint8), None, format)
    scales = (largest / 7).bfloat16().float()
    shift = 8
    zeros = None
    if format.zeros:
        make = torch.Generator().manual_seed(seed)
        zeros = torch.randint(5, 12, scales.shape, generator=make)
        shift = zeros[..., None]
    q = (torch.round(groups / scales[..., None]) + shift).clamp(0, 15).long()
    return Numbers(q.flatten(2), scales, zeros, format)


def fitted(spec: Spec, dtype: torch.dtype) -> Spec:
    """A spec whose sizes are multiples of 32, as a format's groups want."""
    hidden, inter = (-(-size // 32) * 32 for size in (spec.hidden, spec.inter))
    return replace(spec, hidden=hidden, inter=inter, dtype=dtype)


@dataclass
class Quantised:
    """A problem whose dense weights are the numbers that its quantised ones stand for."""

    dense: Problem
    w13: QuantizedWeights
    w2: QuantizedWeights
    w13_plain: QuantizedWeights  # rows in plain order, for a projection by itself

    def to(self, device) -> Quantised:
        weights = (w.to(device) for w in (self.w13, self.w2, self.w13_plain))
        return Quantised(self.dense.to(device), *weights)

    def base(self) -> Quantised:
        return replace(self, dense=self.dense.base())

    def kwargs(self) -> dict:
        return {**self.dense.kwargs(), "w13": self.w13, "w2": self.w2}

    def gemm_kwargs(self, projection: str = "w13", mul_routed_weight: bool = False) -> dict:
        arguments = self.dense.gemm_kwargs(projection, mul_routed_weight)
        return {**arguments, "w": self.w13_plain if projection == "w13" else self.w2}


def build(
    spec: Spec, format: Format, dtype: torch.dtype, format2: Format | None = None
) -> Quantised:
    """The problem of a spec with w13 of one format and w2 of the same, or of another."""
    p = fitted(spec, dtype).build()
    w13 = quantise(p.w13, format, spec.seed)
    w2 = quantise(p.w2, format2 or format, spec.seed + 1)
    dense = replace(p, w13=w13.dequantised(dtype), w2=w2.dequantised(dtype))
    gate_up = GATE_UP.get(spec.activation, "concatenated")
    return Quantised(dense, w13.pack(dtype, gate_up), w2.pack(dtype), w13.pack(dtype))
