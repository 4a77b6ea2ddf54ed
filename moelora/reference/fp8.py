"""FP8 weights and activations as numbers: the rules of `x_format` in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

from moelora.reference.routing import as_tensor

if TYPE_CHECKING:
    from moelora.operators.experts import Weights
    from moelora.weights.quantized import QuantizedWeights

ROWS, COLUMNS, LARGEST = 64, 128, 448.0


def is_w8a8(weights: Weights) -> TypeGuard[QuantizedWeights]:
    """Whether weights are quantized and activations are multiplied in FP8."""
    return getattr(weights, "x_format", "native") != "native"


def numbers_of(weights: Weights) -> Tensor:
    """Numbers of a weight in products: dequantized as by `unpack()`, or for FP8 x with their exact
    scales, in float64.
    """
    if not is_w8a8(weights):
        return as_tensor(weights)
    data = weights.data.cpu()
    experts, row_tiles, depth_tiles, _ = data.shape
    cut = ROWS * COLUMNS
    bytes_ = data[..., :cut].unflatten(-1, (ROWS, COLUMNS))
    row, column = torch.meshgrid(torch.arange(ROWS), torch.arange(COLUMNS), indexing="ij")
    within = column % 8 // 2 * 4 + column % 2 + column % 16 // 8 * 2
    place = (column // 16).bitwise_xor(row % 8) * 16 + within
    values = bytes_.gather(-1, place.expand_as(bytes_)).view(torch.float8_e4m3fn).double()
    scales = data[..., cut:].contiguous().view(torch.float32).double()
    if weights.row_scales:
        scales = scales[..., None]
    else:
        scales = scales[..., None, :2].repeat_interleave(COLUMNS // 2, -1)
    tiles = (values * scales).transpose(2, 3)
    rows, columns = weights.shape[1:]
    of_tiles = tiles.reshape(experts, row_tiles * ROWS, depth_tiles * COLUMNS)
    n = torch.arange(rows)
    up = row_tiles // 2 * ROWS
    if weights.gate_up == "concatenated":
        n = torch.where(n < rows // 2, n, up + n - rows // 2)
    elif weights.gate_up == "interleaved":
        n = n % 2 * up + n // 2
    return of_tiles[:, n, :columns]


def quantized(x: Tensor, weights: QuantizedWeights, dtype: torch.dtype) -> Tensor:
    """Rows (..., K) quantized to FP8: e4m3 times its scale, in float64.

    `x` is rounded to `dtype` first. Each number is divided by the scale of its token, or multiplied
    by the inverse of that of its group or of all, in float32, and rounded to the nearest even;
    values beyond 448 saturate, and NaN stays NaN.
    """
    device = x.device
    x = x.to(dtype).float().cpu()  # division by a scalar rounds differently on a GPU
    scale, size = _scales(x, weights)
    groups = torch.nn.functional.pad(x, (0, -x.size(-1) % size)).unflatten(-1, (-1, size))
    divided = groups / scale if weights.x_format == "token" else groups * (1 / scale)
    q = divided.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).double()
    return (q * scale.double()).flatten(-2)[..., : x.size(-1)].to(device)


def _scales(x: Tensor, weights: QuantizedWeights) -> tuple[Tensor, int]:
    """Scales (..., groups, 1) and the columns per group."""
    largest = x.nan_to_num(nan=0.0, posinf=float("inf"), neginf=-float("inf")).abs()
    if weights.x_format == "static":
        return torch.tensor(weights.x_scale, dtype=torch.float32), x.size(-1)
    if weights.x_format == "token":
        scale = largest.amax(-1)[..., None, None] / LARGEST
        return scale.clamp(min=1 / (LARGEST * 512)), x.size(-1)
    narrow = weights.group_size % COLUMNS != 0 and weights.group_size < weights.shape[2]
    size = COLUMNS // 2 if narrow and not weights.row_scales else COLUMNS
    padded = torch.nn.functional.pad(largest, (0, -x.size(-1) % size))
    return padded.unflatten(-1, (-1, size)).amax(-1, keepdim=True).clamp(min=1e-10) / LARGEST, size


def rule_of(weights: Weights, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Quantization of activations for these weights, with the gradient of the identity."""
    if not is_w8a8(weights):
        return lambda x: x

    def rule(x: Tensor) -> Tensor:
        numbers = quantized(x.detach(), weights, dtype)
        return numbers + (x - x.detach()) if x.requires_grad else numbers

    return rule
