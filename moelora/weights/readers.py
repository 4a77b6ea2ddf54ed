"""Read 4-bit weights of an expert from checkpoints: values, scales and zeros by rows.

Packing takes values (N, K / 2) uint8, the even column in the low nibble; scales (N, K / group);
zeros (N, K / group) uint8, or None. quantized_fp8.py reads FP8 weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn, TypeAlias

import torch
from torch import Tensor

from moelora.operators.checks import dtype_name
from moelora.operators.storage import check_held

PerExpert: TypeAlias = Tensor | Sequence[Tensor]
Numbers: TypeAlias = tuple[Tensor, Tensor, Tensor | None]
Format: TypeAlias = Literal["mxfp4", "nvfp4", "int4", "fp8", "nf4", "bnb_fp4"]  # type of a value

BLOCK = 32  # columns that share an MXFP4 scale
NVFP4_BLOCK = 16  # that share one of NVFP4
LARGEST_E8M0 = 128  # a scale of 2
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each nibble of a word
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}  # offset of stored zeros


@dataclass(frozen=True)
class Checkpoint:
    """Quantized weights to be packed, expert by expert."""

    format: Format
    shape: tuple[int, int, int]
    group_size: int
    has_zeros: bool
    read: Callable[[int], Numbers]
    row_scales: bool = False  # of FP8, as `block`
    block: tuple[int, int] = (0, 0)
    tensor_scales: Tensor | None = None  # of NVFP4: (E, 1) or (E, 2) float32


class Stack:
    """One tensor for all experts, or one each, with its name in messages."""

    def __init__(self, name: str, tensors: PerExpert):
        self.name = name
        self.is_tensor = isinstance(tensors, Tensor)
        if isinstance(tensors, Tensor) and tensors.dim() == 0:
            raise ValueError(f"{name} has no dimensions, expected one for experts")
        self.tensors = tensors if self.is_tensor else list(tensors)
        if not len(self.tensors):
            raise ValueError(f"{name} has no experts, expected at least 1")
        for expert, tensor in enumerate([tensors] if self.is_tensor else self.tensors):
            check_held(self._name(expert), tensor)

    def __len__(self) -> int:
        return len(self.tensors)

    def __getitem__(self, expert: int) -> Tensor:
        return self.tensors[expert]

    def fail(self, expert: int, got: str, wanted: str) -> NoReturn:
        raise ValueError(f"{self._name(expert)} {got}, expected {wanted}")

    def _name(self, expert: int) -> str:
        return self.name if self.is_tensor else f"{self.name}[{expert}]"

    def check(self, like: Stack, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
        """Check that every expert of `like` is present, with this shape and one of these dtypes."""
        if len(self) != len(like):
            raise ValueError(
                f"{self.name} has {len(self)} experts, expected {len(like)} as {like.name}"
            )
        for expert in range(1 if self.is_tensor else len(self)):
            tensor = self[expert]
            if tuple(tensor.shape) != shape:
                self.fail(expert, f"has shape {self._shape(tensor)}", self._text(shape))
            if tensor.dtype not in dtypes:
                wanted = " or ".join(dtype_name(d) for d in dtypes)
                got = dtype_name(tensor.dtype)
                self.fail(expert, f"has dtype {got}", wanted)
            if tensor.device != like[0].device:
                self.fail(expert, f"is on {tensor.device}", f"{like[0].device} as {like.name}")

    def matrix(self, wanted: str) -> tuple[int, int]:
        """Shape of the first expert, which must have two non-empty dimensions."""
        if self[0].dim() != 2:
            self.fail(0, f"has shape {self._shape(self[0])}", wanted)
        self.refuse_empty()
        rows, columns = self[0].shape
        return rows, columns

    def refuse_empty(self) -> None:
        if not self[0].numel():
            self.fail(0, f"has shape {self._shape(self[0])}", "no empty dimension")

    def _shape(self, tensor: Tensor) -> str:
        return self._text(tuple(tensor.shape))

    def _text(self, shape: tuple[int, ...]) -> str:
        return str((len(self), *shape) if self.is_tensor else shape)


SCALES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_SCALE = 65504.0  # largest float16 value


def group_of(scales: Stack, columns: int, groups: int, group_size: int | None) -> int:
    """Columns per group; -1: all columns."""
    group = columns // groups if groups and columns % groups == 0 else 0
    if group not in (32, columns) and (group == 0 or group % 64):
        got = f"has {groups} groups for {columns} columns"
        scales.fail(0, got, "groups of 32, of a multiple of 64, or of all columns")
    if group_size is not None and group != (columns if group_size == -1 else group_size):
        scales.fail(0, f"has groups of {group}", f"groups of {group_size}, the group_size")
    return group


def check_scales(scales: Stack, expert: int, largest: float = LARGEST_SCALE) -> None:
    if not (scales[expert].to(torch.float32).abs() <= largest).all():
        got = f"has a scale that is NaN, infinite or beyond {largest:g}"
        scales.fail(expert, got, "smaller ones")


def nibbles(bytes_: Tensor) -> Tensor:
    """(..., n) uint8 -> (..., 2 n), the low nibble first."""
    return torch.stack((bytes_ & 15, bytes_ >> 4), dim=-1).flatten(-2)


def words(packed: Tensor) -> Tensor:
    """(..., n) int32 -> (..., 4 n) uint8, the low byte first."""
    # contiguous() keeps any stride of a dimension of size one; that of a vector then becomes 1
    return packed.contiguous().reshape(-1).view(torch.uint8).reshape(*packed.shape[:-1], -1)


def mxfp4(blocks: PerExpert, scales: PerExpert) -> Checkpoint:
    blocks, scales = Stack("blocks", blocks), Stack("scales", scales)
    wanted = "[N, K/32, 16] or [N, K/2] for each expert"
    first = blocks[0]
    if first.dim() == 3 and first.size(2) == BLOCK // 2:
        rows, columns = first.size(0), first.size(1) * BLOCK
    elif first.dim() == 2 and first.size(1) % (BLOCK // 2) == 0:
        rows, columns = first.size(0), first.size(1) * 2
    else:
        blocks.fail(0, f"has shape {tuple(first.shape)} for each expert", wanted)
    blocks.refuse_empty()
    blocks.check(blocks, tuple(first.shape), torch.uint8)
    scales.check(blocks, (rows, columns // BLOCK), torch.uint8, torch.float8_e8m0fnu)

    def read(expert: int) -> Numbers:
        bits = scales[expert].view(torch.uint8)
        largest = int(bits.max())
        if largest > LARGEST_E8M0:
            what = "NaN" if largest == 255 else f"2^{largest - 127}"
            scales.fail(expert, f"has the e8m0 byte {largest}, {what}", "at most 128, a scale of 2")
        return blocks[expert].reshape(rows, columns // 2), bits, None

    return Checkpoint("mxfp4", (len(blocks), rows, columns), BLOCK, False, read)


def nvfp4(
    weight: PerExpert,
    weight_scale: PerExpert,
    weight_scale_2: PerExpert | None,
    weight_global_scale: PerExpert | None,
    gate_up: str | None,
) -> Checkpoint:
    values, scales = Stack("weight", weight), Stack("weight_scale", weight_scale)
    rows, half = values.matrix("[N, K/2] for each expert")
    columns = 2 * half
    if columns % NVFP4_BLOCK:
        values.fail(0, f"has {columns} columns (K)", f"a multiple of {NVFP4_BLOCK}")
    values.check(values, (rows, half), torch.uint8, torch.float4_e2m1fn_x2)
    wanted = rows, columns // NVFP4_BLOCK
    scales.check(values, wanted, torch.uint8, torch.float8_e4m3fn)
    given = {"weight_scale_2": weight_scale_2, "weight_global_scale": weight_global_scale}
    there = {name: of for name, of in given.items() if of is not None}
    if len(there) != 1:
        got = "both are there" if there else "neither is there"
        raise ValueError(f"{got}, expected one of weight_scale_2 and weight_global_scale")
    ((name, of_tensors),) = there.items()
    stack = Stack(name, of_tensors)
    tensor_scales = _tensor_scales(stack, values, 2 if gate_up else 1)
    if name == "weight_global_scale":
        tensor_scales = 1 / tensor_scales
        for expert in (~tensor_scales.isfinite()).any(1).nonzero().flatten().tolist():
            got = f"is {stack[expert].flatten().tolist()}"
            stack.fail(expert, got, "numbers with a finite reciprocal")

    def read(expert: int) -> Numbers:
        bits = scales[expert].view(torch.uint8)
        bits = bits.masked_fill(bits == 0x80, 0)  # minus zero
        largest = int(bits.max())
        if largest >= 0x7F:
            what = "NaN" if largest & 0x7F == 0x7F else "negative"
            scales.fail(expert, f"has the e4m3 byte {largest}, {what}", "scales of 0 to 448")
        return values[expert].view(torch.uint8), bits, None

    shape = len(values), rows, columns
    return Checkpoint(
        "nvfp4", shape, NVFP4_BLOCK, False, read, tensor_scales=tensor_scales.contiguous()
    )


def _tensor_scales(scales: Stack, values: Stack, halves: int) -> Tensor:
    """(E, 1) or (E, 2) float32 >= 0, from numbers or vectors per expert."""
    if len(scales) != len(values):
        got = f"{scales.name} has {len(scales)} experts"
        raise ValueError(f"{got}, expected {len(values)} as {values.name}")
    found = []
    for expert in range(len(scales)):
        scale = scales[expert]
        if scale.is_meta:
            scales.fail(expert, "is on meta", "a device with memory")
        if scale.numel() not in (1, halves) or scale.dtype != torch.float32:
            got = f"has shape {tuple(scale.shape)} and dtype {str(scale.dtype)[6:]}"
            wanted = "a float32" + (", or two of gate and up" if halves == 2 else "")
            scales.fail(expert, got, wanted)
        if not (scale.isfinite() & (scale >= 0)).all():
            scales.fail(expert, f"is {scale.flatten().tolist()}", "finite numbers >= 0")
        found.append(scale.flatten())
    counts = {scale.numel() for scale in found}
    return torch.stack([scale.expand(max(counts)) for scale in found]).to(values[0].device)


def gptq(
    qweight: PerExpert,
    scales: PerExpert,
    qzeros: PerExpert | None,
    g_idx: PerExpert | None,
    group_size: int | None,
    sym: bool | None,
    offset: int,
) -> Checkpoint:
    values, scales = Stack("qweight", qweight), Stack("scales", scales)
    depth, rows = values.matrix("[K/8, N] for each expert")
    columns, groups = 8 * depth, scales.matrix("[K/group, N] for each expert")[0]
    values.check(values, (depth, rows), torch.int32)
    scales.check(values, (groups, rows), *SCALES)
    group = group_of(scales, columns, groups, group_size)
    zeros = None
    if qzeros is not None:
        stored = Stack("qzeros", qzeros)
        stored.check(values, (groups, -(-rows // 8)), torch.int32)
        zeros = stored if _differ_from_8(stored, rows, offset) else None
        if sym and zeros is not None:
            raise ValueError("qzeros has zero points other than 8, expected none, as sym is True")
    elif sym is False:
        raise ValueError("qzeros is None, expected zero points, as sym is False")
    if g_idx is not None:
        _check_order(Stack("g_idx", g_idx), values, columns, group)

    def read(expert: int) -> Numbers:
        check_scales(scales, expert)
        points = None
        if zeros is not None:
            points = (nibbles(words(zeros[expert]))[:, :rows] + offset).t().contiguous()
        return words(values[expert].t()), scales[expert].t().contiguous(), points

    return Checkpoint("int4", (len(values), rows, columns), group, zeros is not None, read)


def _differ_from_8(zeros: Stack, rows: int, offset: int) -> bool:
    stored = 8 - offset
    return any(
        bool((nibbles(words(zeros[expert]))[:, :rows] != stored).any())
        for expert in range(len(zeros))
    )


def _check_order(g_idx: Stack, values: Stack, columns: int, group: int) -> None:
    if all(g_idx[expert].numel() == 0 for expert in range(len(g_idx))):
        return
    g_idx.check(values, (columns,), torch.int32, torch.int64)
    in_order = torch.arange(columns, device=g_idx[0].device) // group
    for expert in range(len(g_idx)):
        if not torch.equal(g_idx[expert].long(), in_order):
            got = "is of weights in the order of their activations (desc_act)"
            g_idx.fail(expert, got, "k // group_size")


def awq(
    qweight: PerExpert,
    scales: PerExpert,
    qzeros: PerExpert | None,
    group_size: int | None,
) -> Checkpoint:
    values, scales = Stack("qweight", qweight), Stack("scales", scales)
    columns, eighth = values.matrix("[K, N/8] for each expert")
    rows, groups = 8 * eighth, scales.matrix("[K/group, N] for each expert")[0]
    if columns % 8:
        values.fail(0, f"has {columns} columns (K)", "a multiple of 8")
    values.check(values, (columns, eighth), torch.int32)
    scales.check(values, (groups, rows), *SCALES)
    group = group_of(scales, columns, groups, group_size)
    zeros = None
    if qzeros is not None:
        stored = Stack("qzeros", qzeros)
        stored.check(values, (groups, eighth), torch.int32)
        zeros = stored if _differ_from_8(stored, rows, 0) else None

    def by_columns(packed: Tensor) -> Tensor:
        stored = nibbles(words(packed)).unflatten(1, (-1, 8))
        inverse = torch.tensor(AWQ_ORDER, device=packed.device).argsort()
        return stored[:, :, inverse].flatten(1)

    def read(expert: int) -> Numbers:
        check_scales(scales, expert)
        numbers = by_columns(values[expert]).t()
        packed = numbers[:, 0::2] | numbers[:, 1::2] << 4
        points = None if zeros is None else by_columns(zeros[expert]).t().contiguous()
        return packed.contiguous(), scales[expert].t().contiguous(), points

    return Checkpoint("int4", (len(values), rows, columns), group, zeros is not None, read)


def compressed_tensors(
    weight_packed: PerExpert,
    weight_scale: PerExpert,
    weight_zero_point: PerExpert | None,
    weight_shape: PerExpert | None,
    group_size: int | None,
) -> Checkpoint:
    values, scales = Stack("weight_packed", weight_packed), Stack("weight_scale", weight_scale)
    rows, depth = values.matrix("[N, K/8] for each expert")
    columns, groups = 8 * depth, scales.matrix("[N, K/group] for each expert")[1]
    values.check(values, (rows, depth), torch.int32)
    scales.check(values, (rows, groups), *SCALES)
    group = group_of(scales, columns, groups, group_size)
    zeros = None
    if weight_zero_point is not None:
        zeros = Stack("weight_zero_point", weight_zero_point)
        zeros.check(values, (-(-rows // 8), groups), torch.int32)
    if weight_shape is not None:
        shapes = weight_shape.reshape(-1, 2) if isinstance(weight_shape, Tensor) else weight_shape
        for shape in shapes:
            if tuple(map(int, shape)) != (rows, columns):
                raise ValueError(
                    f"weight_shape is {tuple(map(int, shape))}, expected {(rows, columns)} as "
                    "weight_packed"
                )

    def read(expert: int) -> Numbers:
        check_scales(scales, expert)
        points = None
        if zeros is not None:
            points = nibbles(words(zeros[expert].t()))[:, :rows].t().contiguous()
        return words(values[expert]), scales[expert], points

    return Checkpoint("int4", (len(values), rows, columns), group, zeros is not None, read)
