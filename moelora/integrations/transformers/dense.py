"""Dequantization of linear layers, from the tensors of a checkpoint folder.

Every function takes the tensors of one linear layer by their names in a checkpoint, and returns the
weight, float32 of shape (N, K). With 16-bit scales, the product of a quantized value and its scale
is exact in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moelora.weights.fp8 import FP8_SCALES
from moelora.weights.readers import AWQ_ORDER, E2M1, SCALES, nibbles


def unpack(words: Tensor, bits: int) -> Tensor:
    """Unpacks (..., n) int32 to (..., 32 n / bits) int32, lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return (words[..., None] >> shifts & (1 << bits) - 1).flatten(-2)


def plain(weight: Tensor) -> Tensor:
    """Of a layer that is not quantized."""
    matrix("weight", weight, *SCALES)
    return weight.float()


def gptq(
    qweight: Tensor,
    scales: Tensor,
    qzeros: Tensor | None = None,
    g_idx: Tensor | None = None,
    *,
    bits: int,
    offset: int,
    group_size: int | None,
) -> Tensor:
    """`(q - zero) scale`: qweight (K bits / 32, N), scales (groups, N), qzeros along N.

    `g_idx` maps each column to its group, in any order (`desc_act`). `offset` is added to stored
    zero points.
    """
    matrix("qweight", qweight, torch.int32)
    q = unpack(qweight.t(), bits)
    rows, columns = q.shape
    zeros = None
    if qzeros is not None:
        matrix("qzeros", qzeros, torch.int32)
        zeros = unpack(qzeros, bits)[:, :rows].t() + offset
    matrix("scales", scales, *SCALES)
    return _grouped(q, scales.t(), zeros, g_idx, 1 << bits - 1, group_size)


def awq(
    qweight: Tensor, scales: Tensor, qzeros: Tensor | None = None, *, group_size: int | None
) -> Tensor:
    """`(q - zero) scale`: qweight (K, N / 8), scales (groups, N), qzeros (groups, N / 8)."""
    inverse = torch.tensor(AWQ_ORDER, device=qweight.device).argsort()

    def by_rows(packed: Tensor) -> Tensor:
        return unpack(packed, 4).unflatten(-1, (-1, 8))[..., inverse].flatten(-2).t()

    matrix("qweight", qweight, torch.int32)
    matrix("scales", scales, *SCALES)
    if qzeros is not None:
        matrix("qzeros", qzeros, torch.int32)
    zeros = None if qzeros is None else by_rows(qzeros)
    return _grouped(by_rows(qweight), scales.t(), zeros, None, 8, group_size)


def packed(
    weight_packed: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor | None = None,
    weight_shape: Tensor | None = None,
    weight_g_idx: Tensor | None = None,
    *,
    bits: int,
    group_size: int | None,
) -> Tensor:
    """`(q - zero) scale` of compressed-tensors: weight_packed (N, K bits / 32), scale (N, groups).

    Zero points are packed along N. `weight_shape` holds N and K without the padding of packed
    words.
    """
    matrix("weight_packed", weight_packed, torch.int32)
    q = unpack(weight_packed, bits)
    if weight_shape is not None:
        shape = tuple(map(int, weight_shape.reshape(-1)))
        fits = len(shape) == 2 and shape[0] == q.size(0)
        if not (fits and q.size(1) - 32 // bits < shape[1] <= q.size(1)):
            wanted = f"numbers in weight_packed, {tuple(q.shape)}"
            raise ValueError(f"weight_shape is {shape}, wanted the {wanted}")
        q = q[:, : shape[1]]
    zeros = None
    if weight_zero_point is not None:
        matrix("weight_zero_point", weight_zero_point, torch.int32)
        zeros = unpack(weight_zero_point.t(), bits)[:, : q.size(0)].t()
    scales = weight_scale.expand(q.size(0), 1) if weight_scale.numel() == 1 else weight_scale
    matrix("weight_scale", scales, *SCALES)
    return _grouped(q, scales, zeros, weight_g_idx, 1 << bits - 1, group_size)


def int8(weight: Tensor, weight_scale: Tensor, weight_zero_point: Tensor | None = None) -> Tensor:
    """`(q - zero) scale` of int8 weights (N, K), with scales per row, per group or per tensor."""
    matrix("weight", weight, torch.int8)
    rows = weight.size(0)
    scales = weight_scale.expand(rows, 1) if weight_scale.numel() == 1 else weight_scale
    matrix("weight_scale", scales, *SCALES)
    zeros = None
    if weight_zero_point is not None:
        zeros = weight_zero_point.expand(scales.shape).int()
    return _grouped(weight.int(), scales, zeros, None, 0, None)


def fp8(
    weight: Tensor,
    weight_scale_inv: Tensor | None = None,
    weight_scale: Tensor | None = None,
    input_scale: Tensor | None = None,
    *,
    block: tuple[int, int] | None = None,
) -> Tensor:
    """e4m3 (N, K) with scales per block (under either name), per row, or per tensor.

    `input_scale` is unused: it scales FP8 activations, and a dequantized layer has none.
    """
    matrix("weight", weight, torch.float8_e4m3fn)
    own = "weight_scale" if weight_scale_inv is None else "weight_scale_inv"
    scale = weight_scale if weight_scale_inv is None else weight_scale_inv
    if scale is None:
        raise ValueError("there is no weight_scale")
    if scale.dtype not in FP8_SCALES:
        raise ValueError(f"{own} has dtype {scale.dtype}, wanted float32 or shorter")
    rows, columns = weight.shape
    high, wide = block or (1, columns)
    shape = (-(-rows // high), -(-columns // wide))
    if tuple(scale.shape) != shape and (block or scale.numel() != 1):
        also = "" if block else ", or one"
        raise ValueError(f"{own} has shape {tuple(scale.shape)}, wanted {shape}{also}")
    factors = scale.float()
    if not factors.isfinite().all():
        raise ValueError(f"{own} has a scale that is NaN or infinite")
    if block:  # expanded to the weight's size, for any block size
        device = weight.device
        factors = factors[torch.arange(rows, device=device) // high]
        factors = factors[:, torch.arange(columns, device=device) // wide]
    numbers = weight.float()
    if numbers.isnan().any():
        raise ValueError("weight has a NaN, wanted numbers")
    return numbers.mul_(factors if factors.dim() == 2 else factors.reshape(1, 1))


def mxfp8(weight: Tensor, weight_scale: Tensor) -> Tensor:
    """e4m3 (N, K) with an e8m0 scale per 32 columns."""
    matrix("weight", weight, torch.float8_e4m3fn)
    return weight.float() * spread(_powers(weight_scale), weight.shape)


def mxfp4(weight_packed: Tensor, weight_scale: Tensor) -> Tensor:
    """e2m1 (N, K / 2), even columns in the low bits, with an e8m0 scale per 32 columns."""
    numbers = e2m1(weight_packed)
    return numbers * spread(_powers(weight_scale), numbers.shape)


def e2m1(blocks: Tensor, name: str = "weight_packed") -> Tensor:
    matrix(name, blocks, torch.uint8)
    return torch.tensor(E2M1, device=blocks.device)[nibbles(blocks).long()]


def _powers(scale: Tensor) -> Tensor:
    matrix("weight_scale", scale, torch.uint8, torch.float8_e8m0fnu)
    return torch.exp2(scale.view(torch.uint8).float() - 127)


def spread(scales: Tensor, shape: torch.Size) -> Tensor:
    if scales.size(0) != shape[0] or shape[1] % scales.size(1):
        raise ValueError(f"weight_scale has shape {tuple(scales.shape)} for {tuple(shape)} numbers")
    return scales.repeat_interleave(shape[1] // scales.size(1), 1)


def _grouped(
    q: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    groups: Tensor | None,
    middle: int,
    group_size: int | None,
) -> Tensor:
    """Dequantizes q (N, K) by scales and zeros (N, groups); `groups` maps columns to groups."""
    rows, columns = q.shape
    count = scales.size(1)
    if scales.size(0) != rows or (zeros is not None and zeros.shape != scales.shape):
        got = [tuple(t.shape) for t in (scales, zeros) if t is not None]
        raise ValueError(f"scales and zero points are of {got}, wanted {rows} rows")
    if not scales.float().isfinite().all():
        raise ValueError("a scale is NaN or infinite")
    if groups is None or not groups.numel():
        wide = columns if group_size in (None, -1, 0) and count == 1 else group_size
        wide = wide or -(-columns // count)
        if wide < 0 or -(-columns // wide) != count:
            got = f"{count} groups for {columns} columns"
            raise ValueError(f"there are {got}, wanted groups of {group_size}")
        groups = torch.arange(columns, device=q.device) // min(wide, columns)
    elif tuple(groups.shape) != (columns,):
        raise ValueError(f"g_idx has shape {tuple(groups.shape)}, wanted ({columns},)")
    elif not 0 <= int(groups.min()) <= int(groups.max()) < count:
        got = f"groups {int(groups.min())} to {int(groups.max())}"
        raise ValueError(f"g_idx has {got}, wanted some of {count}")
    groups = groups.long()
    shift: Any = middle if zeros is None else zeros[:, groups]
    return (q - shift).float().mul_(scales.float()[:, groups])


def matrix(name: str, tensor: Tensor, *dtypes: torch.dtype) -> None:
    if tensor.dim() != 2:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, wanted a matrix")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name} has dtype {tensor.dtype}, wanted {wanted}")
