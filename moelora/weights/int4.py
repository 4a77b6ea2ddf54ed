"""Read INT4 expert weights from checkpoints, for `QuantizedWeights`."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from moelora.operators.call import typed
from moelora.weights.readers import (
    AWQ_ORDER,
    SCALES,
    ZERO_OFFSETS,
    Checkpoint,
    GateUp,
    Made,
    Numbers,
    Packable,
    PerExpert,
    Stack,
    check_scales,
    nibbles,
    words,
)


class FromINT4(Packable):
    """The constructors of `QuantizedWeights` for unsigned 4-bit values minus a zero point."""

    @classmethod
    @typed
    def from_gptq(
        cls: type[Made],
        qweight: PerExpert,
        scales: PerExpert,
        qzeros: PerExpert | None = None,
        g_idx: PerExpert | None = None,
        *,
        bits: int = 4,
        group_size: int | None = None,
        sym: bool | None = None,
        checkpoint_format: Literal["gptq", "gptq_v2"] = "gptq",
        gate_up: GateUp | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Made:
        """INT4 as in GPTQ checkpoints: `value = (q - zero) * scale`.

        Experts are packed one by one: the additional memory is that of one expert.

        Parameters
        ----------
        qweight : Tensor, shape (E, K / 8, N), int32, or one for each expert
            Eight consecutive columns of a row per word, the first in the lowest bits. Gate and up
            of a `w13` are concatenated along N.
        scales : Tensor, shape (E, K / group, N), or one for each expert
            float32, bfloat16 or float16; rounded to `dtype`.
        qzeros : Tensor, shape (E, K / group, N / 8), int32, or one for each expert, optional
            Zero points of eight rows per word. Dropped if all are 8, as in symmetric checkpoints.
        g_idx : Tensor, shape (E, K), int32 or int64, or one for each expert, optional
            Group of each column. Must be `k // group_size`: weights with activation order
            (`desc_act`) are refused.
        bits : int
            4.
        group_size : int, optional
            32, a multiple of 64, or -1 for all columns; must be that of `scales`. Absent: that of
            `scales`.
        sym : bool, optional
            True: all zero points are 8. False: there are zero points. Absent: determined by
            `qzeros`.
        checkpoint_format : {"gptq", "gptq_v2"}
            In the former, stored zero points are smaller by one than their meaning.
        gate_up, dtype
            As in `from_mxfp4`.

        Raises
        ------
        {int4_errors}

        Notes
        -----
        Frantar et al., GPTQ, 2022 (arXiv:2210.17323).
        """
        if bits != 4:
            raise ValueError(f"bits is {bits}, expected 4")
        if checkpoint_format not in ZERO_OFFSETS:
            known = " or ".join(map(repr, ZERO_OFFSETS))
            raise ValueError(f"checkpoint_format is {checkpoint_format!r}, expected {known}")
        offset = ZERO_OFFSETS[checkpoint_format]
        values, scales = Stack("qweight", qweight), Stack("scales", scales)
        depth, rows = values.matrix("[K/8, N] for each expert")
        columns, groups = 8 * depth, scales.matrix("[K/group, N] for each expert")[0]
        values.check(values, (depth, rows), torch.int32)
        scales.check(values, (groups, rows), *SCALES)
        group = group_of(scales, columns, groups, group_size)
        zeros = _zero_points(qzeros, values, groups, rows, offset)
        if sym and zeros is not None:
            raise ValueError("qzeros has zero points other than 8, expected none, as sym is True")
        if sym is False and qzeros is None:
            raise ValueError("qzeros is None, expected zero points, as sym is False")
        if g_idx is not None:
            _check_order(Stack("g_idx", g_idx), values, columns, group)

        def read(expert: int) -> Numbers:
            check_scales(scales, expert)
            points = None
            if zeros is not None:
                points = (nibbles(words(zeros[expert]))[:, :rows] + offset).t().contiguous()
            return words(values[expert].t()), scales[expert].t().contiguous(), points

        found = Checkpoint("int4", (len(values), rows, columns), group, zeros is not None, read)
        return cls._pack(found, gate_up, dtype)

    @classmethod
    @typed
    def from_awq(
        cls: type[Made],
        qweight: PerExpert,
        scales: PerExpert,
        qzeros: PerExpert | None = None,
        *,
        group_size: int | None = None,
        gate_up: GateUp | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Made:
        """INT4 as in AWQ checkpoints: `value = (q - zero) * scale`.

        Experts are packed one by one: the additional memory is that of one expert.

        Parameters
        ----------
        qweight : Tensor, shape (E, K, N / 8), int32, or one for each expert
            Eight consecutive rows of a column per word, in the order 0, 2, 4, 6, 1, 3, 5, 7.
        scales : Tensor, shape (E, K / group, N), or one for each expert
            float32, bfloat16 or float16; rounded to `dtype`.
        qzeros : Tensor, shape (E, K / group, N / 8), int32, or one for each expert, optional
            Zero points in the order of `qweight`. Dropped if all are 8, as in symmetric checkpoints
            (`zero_point: false`).
        group_size, gate_up, dtype
            As in `from_gptq`.

        Raises
        ------
        {int4_errors}

        Notes
        -----
        Lin et al., AWQ, 2023 (arXiv:2306.00978).
        """
        values, scales = Stack("qweight", qweight), Stack("scales", scales)
        columns, eighth = values.matrix("[K, N/8] for each expert")
        rows, groups = 8 * eighth, scales.matrix("[K/group, N] for each expert")[0]
        if columns % 8:
            values.fail(0, f"has {columns} columns (K)", "a multiple of 8")
        values.check(values, (columns, eighth), torch.int32)
        scales.check(values, (groups, rows), *SCALES)
        group = group_of(scales, columns, groups, group_size)
        zeros = _zero_points(qzeros, values, groups, rows, 0)

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

        found = Checkpoint("int4", (len(values), rows, columns), group, zeros is not None, read)
        return cls._pack(found, gate_up, dtype)

    @classmethod
    @typed
    def from_compressed_tensors(
        cls: type[Made],
        weight_packed: PerExpert,
        weight_scale: PerExpert,
        weight_zero_point: PerExpert | None = None,
        weight_shape: PerExpert | None = None,
        *,
        group_size: int | None = None,
        gate_up: GateUp | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Made:
        """INT4 as in the format "pack-quantized" of compressed-tensors.

        Experts are packed one by one: the additional memory is that of one expert.

        Parameters
        ----------
        weight_packed : Tensor, shape (E, N, K / 8), int32, or one for each expert
            Eight consecutive columns of a row per word, the first in the lowest bits, plus 8.
        weight_scale : Tensor, shape (E, N, K / group), or one for each expert
            float32, bfloat16 or float16; rounded to `dtype`.
        weight_zero_point : Tensor, shape (E, N / 8, K / group), int32, or one for each, optional
            Zero points of eight consecutive rows per word, plus 8. Absent: 0 (stored as 8).
        weight_shape : Tensor, shape (E, 2) or (2,), or one for each expert, optional
            N and K; a mismatch is refused, e.g. if K was padded to fill words.
        group_size, gate_up, dtype
            As in `from_gptq`.

        Raises
        ------
        {int4_errors}

        Notes
        -----
        Layout of the compressed-tensors library (`pack_to_int32`).
        """
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
            shapes = Stack("weight_shape", weight_shape).tensors
            for shape in shapes.reshape(-1, 2) if isinstance(shapes, Tensor) else shapes:
                if (got := tuple(map(int, shape))) != (rows, columns):
                    wanted = f"{(rows, columns)} as weight_packed"
                    raise ValueError(f"weight_shape is {got}, expected {wanted}")

        def read(expert: int) -> Numbers:
            check_scales(scales, expert)
            points = None
            if zeros is not None:
                points = nibbles(words(zeros[expert].t()))[:, :rows].t().contiguous()
            return words(values[expert]), scales[expert], points

        found = Checkpoint("int4", (len(values), rows, columns), group, zeros is not None, read)
        return cls._pack(found, gate_up, dtype)


# ---- groups and zero points of a checkpoint ----


def group_of(scales: Stack, columns: int, groups: int, group_size: int | None) -> int:
    """Columns per group; -1: all columns."""
    group = columns // groups if groups and columns % groups == 0 else 0
    if group not in (32, columns) and (group == 0 or group % 64):
        got = f"has {groups} groups for {columns} columns"
        scales.fail(0, got, "groups of 32, of a multiple of 64, or of all columns")
    if group_size is not None and group != (columns if group_size == -1 else group_size):
        scales.fail(0, f"has groups of {group}", f"groups of {group_size}, the group_size")
    return group


def _zero_points(
    qzeros: PerExpert | None, values: Stack, groups: int, rows: int, offset: int
) -> Stack | None:
    """Those of GPTQ and AWQ, stored smaller by `offset`; None if there are none, or all are 8."""
    if qzeros is None:
        return None
    zeros = Stack("qzeros", qzeros)
    zeros.check(values, (groups, -(-rows // 8)), torch.int32)
    points = (nibbles(words(zeros[expert]))[:, :rows] for expert in range(len(zeros)))
    return zeros if any(bool((of_expert != 8 - offset).any()) for of_expert in points) else None


def _check_order(g_idx: Stack, values: Stack, columns: int, group: int) -> None:
    if all(g_idx[expert].numel() == 0 for expert in range(len(g_idx))):
        return
    g_idx.check(values, (columns,), torch.int32, torch.int64)
    in_order = torch.arange(columns, device=g_idx[0].device) // group
    for expert in range(len(g_idx)):
        if not torch.equal(g_idx[expert].long(), in_order):
            got = "is of weights in the order of their activations (desc_act)"
            g_idx.fail(expert, got, "k // group_size")
