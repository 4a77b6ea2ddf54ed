"""Rounds 16-bit experts to a format: to the nearest value, with scales from the largest magnitudes.

Nothing is calibrated: as bitsandbytes quantizes NF4, vLLM FP8 while loading, and the OCP
specification MXFP4. Experts are rounded one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from moelora.operators.formats import codes_of
from moelora.operators.storage import check_held
from moelora.weights.fp8 import LARGEST_SCALE as LARGEST_FP8_SCALE
from moelora.weights.readers import LARGEST_SCALE, SCALES, Checkpoint, Numbers

Rounding: TypeAlias = Literal["nf4", "fp4", "mxfp4", "nvfp4", "int4", "fp8"]
ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)
INT4_GROUP = 128  # columns, where they divide K
LARGEST_FP8 = 448.0
LARGEST_E2M1 = 6.0
# Largest magnitudes: their scales are the largest that checkpoints may have. NVFP4 has no limit.
LARGEST = {
    "nf4": LARGEST_SCALE,
    "fp4": LARGEST_SCALE,
    "mxfp4": 2 * LARGEST_E2M1,
    "int4": 7 * LARGEST_SCALE,
    "fp8": LARGEST_FP8_SCALE * LARGEST_FP8,
}


def _nearest(x: Tensor, codes: Sequence[float]) -> Tensor:
    """Codes (uint8) of the nearest numbers, the first where several codes have the same number."""
    first = {number: codes.index(number) for number in sorted(codes)}
    numbers, order = (torch.tensor([*each], device=x.device) for each in (first, first.values()))
    return order.to(torch.uint8)[torch.bucketize(x, (numbers[1:] + numbers[:-1]) / 2)]


def _pairs(q: Tensor) -> Tensor:
    """(N, K) codes -> (N, K / 2), the even column in the low nibble."""
    return q[:, 0::2] | q[:, 1::2] << 4


def _groups(w: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """(N, groups, group), and the largest magnitudes (N, groups)."""
    groups = w.unflatten(1, (-1, group))
    return groups, groups.abs().amax(2)


def _of_bnb(kernel: str) -> Callable[[Tensor, int], Numbers]:
    def rounded(w: Tensor, group: int) -> Numbers:
        groups, absmax = _groups(w, group)
        unit = torch.where(absmax > 0, absmax, 1)[..., None]
        return _pairs(_nearest(groups / unit, codes_of(kernel)).flatten(1)), absmax, None

    return rounded


def _e2m1(x: Tensor) -> Tensor:
    """Codes of the nearest e2m1; ties go to the even mantissa, which `round` gives at each step."""
    magnitude = x.abs().clamp(max=LARGEST_E2M1)
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    number = torch.round(magnitude / step) * step
    codes = torch.tensor(codes_of("mxfp4")[:8], device=x.device)
    return torch.bucketize(number, codes).to(torch.uint8) | (x < 0).to(torch.uint8) << 3


def _mxfp4(w: Tensor, group: int) -> Numbers:
    groups, largest = _groups(w, group)
    _, exponent = torch.frexp(largest)  # largest < 2^exponent
    scale = (exponent - 3 + 127).clamp(0, 128)  # e2m1 goes to 6 < 2^3
    q = _e2m1(groups / torch.exp2(scale[..., None] - 127.0))
    return _pairs(q.flatten(1)), scale.to(torch.uint8), None


def _int4(w: Tensor, group: int) -> Numbers:
    groups, largest = _groups(w, group)
    scale = largest / 7
    unit = torch.where(scale > 0, scale, 1)[..., None]
    q = (torch.round(groups / unit) + 8).clamp(1, 15).to(torch.uint8)
    return _pairs(q.flatten(1)), scale, None


def _fp8(w: Tensor, group: int) -> Numbers:
    scale = w.abs().amax(1, keepdim=True) / LARGEST_FP8
    q = (w / torch.where(scale > 0, scale, 1)).clamp(-LARGEST_FP8, LARGEST_FP8)
    return q.to(torch.float8_e4m3fn).view(torch.uint8), scale, None


def _group_of(rounding: Rounding, columns: int) -> int:
    """Columns that share a scale."""
    if rounding == "fp8":
        return columns
    if rounding == "int4":
        return INT4_GROUP if columns % INT4_GROUP == 0 else 64 if columns % 64 == 0 else 32
    return {"mxfp4": 32, "nvfp4": 16}.get(rounding, 64)


def checkpoint(w: Sequence[Tensor] | Tensor, rounding: Any) -> Checkpoint:
    """`w`: (E, N, K), or (N, K) for each expert; a sequence may make each when it is asked for."""
    if rounding not in ROUNDINGS:
        known = ", ".join(map(repr, ROUNDINGS))
        raise ValueError(f"format is {rounding!r:.80}, expected one of {known}")
    if not len(w):
        raise ValueError("w has no experts, expected at least one")
    first = w[0]
    if first.dim() != 2 or not first.numel():
        raise ValueError(f"w[0] has shape {tuple(first.shape)}, expected [N, K], not empty")
    rows, columns = first.shape
    device = first.device
    group = _group_of(rounding, columns)
    if columns % group:
        raise ValueError(f"K is {columns}, expected a multiple of {group} for {rounding}")
    of_tensor = None
    if rounding == "nvfp4":
        of_tensor = torch.empty((len(w), 1), dtype=torch.float32, device=device)

    def nvfp4(expert: int, one: Tensor) -> Numbers:
        groups, largest = _groups(one, group)
        tensor = largest.max() / (LARGEST_E2M1 * LARGEST_FP8)
        assert of_tensor is not None
        of_tensor[expert] = tensor
        unit = torch.where(tensor > 0, tensor, 1)
        scale = (largest / LARGEST_E2M1 / unit).clamp(max=LARGEST_FP8).to(torch.float8_e4m3fn)
        by = scale.float()[..., None] * unit
        q = _e2m1(groups / torch.where(by > 0, by, 1))
        return _pairs(q.flatten(1)), scale.view(torch.uint8), None

    def read(expert: int) -> Numbers:
        one = w[expert]
        if tuple(one.shape) != (rows, columns):
            got = f"w[{expert}] has shape {tuple(one.shape)}"
            raise ValueError(f"{got}, expected {(rows, columns)} as w[0]")
        check_held(f"w[{expert}]", one)
        if one.dtype not in SCALES:
            wanted = "float32, bfloat16 or float16"
            raise ValueError(f"w[{expert}] has dtype {one.dtype}, expected {wanted}")
        exact = one.detach().to(torch.float32).contiguous()
        if not exact.isfinite().all():
            raise ValueError(f"w[{expert}] has a NaN or an infinity, expected numbers")
        largest, limit = float(exact.abs().max()), LARGEST.get(rounding, math.inf)
        if largest > limit:
            got = f"w[{expert}] has a number of magnitude {largest:g}"
            raise ValueError(f"{got}, expected at most {limit:g} for {rounding}")
        return nvfp4(expert, exact) if rounding == "nvfp4" else ROUND[rounding](exact, group)

    kernel: Any = "bnb_fp4" if rounding == "fp4" else rounding
    block = (1, columns) if rounding == "fp8" else (0, 0)
    shape = (len(w), rows, columns)
    is_fp8 = rounding == "fp8"
    return Checkpoint(kernel, shape, group, False, read, is_fp8, block, of_tensor)


ROUND: dict[str, Callable[[Tensor, int], Numbers]] = {
    "nf4": _of_bnb("nf4"),
    "fp4": _of_bnb("bnb_fp4"),
    "mxfp4": _mxfp4,
    "int4": _int4,
    "fp8": _fp8,
}
