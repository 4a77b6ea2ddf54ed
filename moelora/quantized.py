"""Quantized expert weights, in the tiles that kernels read (csrc/moelora.h has their layout)."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from moelora import quantized_readers as readers
from moelora.call import operators, run, typed
from moelora.fake import COMPUTE_DTYPES
from moelora.formats import FORMATS, code_of
from moelora.quantized_fp8 import ACTIVATIONS, Activations, FromFP8, GateUp, XFormat
from moelora.quantized_readers import PerExpert
from moelora.storage import check_held

ORDERS: dict[GateUp | None, int] = {None: 0, "concatenated": 1, "interleaved": 2}
X_FORMATS: tuple[XFormat, ...] = get_args(XFormat)
ALIGNMENT = 16  # bytes, of a tile
FIELDS = ("format", "order", "rows", "columns", "group_size", "dtype", "x_format", "x_scale")


@dataclass(frozen=True, eq=False)
class QuantizedWeights(FromFP8):
    """Expert weights of four bits, MXFP4, NVFP4 or INT4 with groups of columns, or of eight: FP8.

    Made by `from_mxfp4`, `from_nvfp4`, `from_gptq`, `from_awq`, `from_compressed_tensors`,
    `from_fp8_block`, `from_fp8_channel` and `from_fp8_tensor` from what checkpoints hold; accepted
    wherever `w13`, `w2` or `w` is. On a CPU a call gives the bits that it would with `unpack()`,
    from a quarter or half of the memory, unless activations become FP8 too.

    Attributes
    ----------
    data : Tensor, shape (E, tiles of rows, tiles of depth, bytes of a tile), uint8
        Tiles of 64 rows by 64 columns (FP8: 128), values before their scales.
    format : {"mxfp4", "nvfp4", "int4", "fp8"}
        What a number is: e2m1, with scales that are powers of two or e4m3; unsigned, of four bits,
        minus 8 or minus its zero point; e4m3.
    group_size : int
        Columns that share a scale.
    has_zeros : bool
        Whether groups have zero points.
    gate_up : {None, "concatenated", "interleaved"}
        What the rows are: those of one projection; gate rows, then as many up rows; or both in
        turns.
    shape : torch.Size
        The logical shape (E, N, K).
    dtype : torch.dtype
        bfloat16 or float16: that of the activations.
    row_scales : bool
        Of FP8: whether rows of a tile have scales of their own.
    x_format : {"native", "group", "token", "static"}
        What multiplies the weights: `x` as it is, or in FP8 with a scale for each group of columns
        of a token, for each token, or with `x_scale`.
    x_scale : float
        0 unless `x_format` is "static".
    """

    data: Tensor = field(repr=False)
    format: readers.Format
    group_size: int
    has_zeros: bool
    gate_up: GateUp | None
    shape: torch.Size
    dtype: torch.dtype
    row_scales: bool = False
    x_format: XFormat = "native"
    x_scale: float = 0.0

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of the tiles."""
        return self.data.nbytes

    @property
    def layout(self) -> tuple[int, int, int, int, float]:
        """moelora_layout of csrc/moelora.h: format, order, rows, and what multiplies them."""
        x_format = X_FORMATS.index(self.x_format)
        x_scale = self.x_scale if self.x_format == "static" else 0.0  # which torch.compile knows
        return self._code(), ORDERS[self.gate_up], self.shape[1], x_format, x_scale

    def _code(self) -> int:
        return code_of(self.format, self._group_columns(), self.has_zeros, self.row_scales)

    def _group_columns(self) -> int:
        """Columns of a tile that share a scale: all of its row, or as many as a group has."""
        if self.format == "fp8":
            narrow = self.group_size % 128 != 0 and self.group_size < self.shape[2]
            return 64 if narrow and not self.row_scales else 128
        if self.format == "nvfp4":
            return readers.NVFP4_BLOCK
        return 32 if self.group_size == 32 else 64

    def to(self, device: torch.device | str) -> QuantizedWeights:
        """These weights on another device."""
        return replace(self, data=self.data.to(device))

    def unpack(self) -> Tensor:
        """The weights as one tensor of shape (E, N, K) and of `dtype`, each number rounded once.

        A number is its value times its scale, which is rounded to `dtype` before.
        """
        code = COMPUTE_DTYPES.index(self.dtype)
        op = operators.unpack_quantized.default
        return run(op, self.data, *self.layout[:3], self.shape[2], code)

    def state_dict(self, prefix: str = "") -> dict[str, Tensor]:
        """Two tensors, that safetensors and torch.save take: `data`, and numbers that describe it.

        Parameters
        ----------
        prefix : str
            Put before both names.
        """
        code, order, rows, x_format, x_scale = self.layout
        (bits,) = struct.unpack("<i", struct.pack("<f", x_scale))
        dtype = COMPUTE_DTYPES.index(self.dtype)
        numbers = (code, order, rows, self.shape[2], self.group_size, dtype, x_format, bits)
        layout = torch.tensor(numbers, dtype=torch.int64)
        return {f"{prefix}data": self.data, f"{prefix}layout": layout}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor], prefix: str = "") -> QuantizedWeights:
        """What `state_dict` described.

        Raises
        ------
        ValueError
            `layout` is no description of weights, or not one of `data`.
        KeyError
            One of both is missing.
        """
        data, layout = state[f"{prefix}data"], state[f"{prefix}layout"]
        check_held(f"{prefix}data", data)
        check_held(f"{prefix}layout", layout)
        if layout.dtype != torch.int64 or layout.dim() != 1:
            got = f"has dtype {layout.dtype} and shape {tuple(layout.shape)}"
            raise ValueError(f"{prefix}layout {got}, expected int64 and {len(FIELDS)} numbers")
        if data.dim() == 0:
            raise ValueError(f"{prefix}data has no dimensions, expected [E, ...]")
        numbers = layout.tolist()
        if data.data_ptr() % ALIGNMENT:  # safetensors gives views of a file
            data = data.clone()
        if len(numbers) != len(FIELDS):
            raise ValueError(f"{prefix}layout has {len(numbers)} numbers, expected {FIELDS}")
        code, order, rows, columns, group_size, dtype, x_format, bits = numbers
        known = 0 < code < len(FORMATS) and 0 <= order < len(ORDERS) and dtype in (0, 1)
        if not (known and 0 <= x_format < len(X_FORMATS) and 0 <= bits < 2**31):
            raise ValueError(f"{prefix}layout is {numbers}, expected {FIELDS} in their ranges")
        of = FORMATS[code]
        weights = cls(
            data=data,
            format=cast(readers.Format, of.kernel),
            group_size=group_size,
            has_zeros=of.has_zeros,
            gate_up=list(ORDERS)[order],
            shape=torch.Size((len(data), rows, columns)),
            dtype=COMPUTE_DTYPES[dtype],
            row_scales=of.row_scales,
            x_format=X_FORMATS[x_format],
            x_scale=struct.unpack("<f", struct.pack("<i", bits))[0],
        )
        if weights.layout[0] != code:
            raise ValueError(f"{prefix}layout has format {code} and group_size {group_size}")
        if (weights.x_format == "static") != (weights.x_scale > 0):
            raise ValueError(f"{prefix}layout has x_format {x_format}, x_scale {weights.x_scale}")
        tiles = data.new_empty(data.shape, device="meta")
        run(operators.unpack_quantized.default, tiles, code, order, rows, columns, dtype)
        return weights

    @classmethod
    def _pack_fp8(
        cls,
        checkpoint: readers.Checkpoint,
        activations: Activations,
        x_format: XFormat,
        x_scale: float,
        gate_up: GateUp | None,
        dtype: torch.dtype,
    ) -> QuantizedWeights:
        if activations not in ACTIVATIONS:
            known = " or ".join(map(repr, ACTIVATIONS))
            raise ValueError(f"activations is {activations!r}, expected {known}")
        if activations == "bf16" and dtype == torch.float16:
            wanted = "dtype torch.bfloat16, or activations 'native'"
            raise ValueError(f"activations is 'bf16' and dtype is {dtype}, expected {wanted}")
        if activations != "fp8":
            x_format, x_scale = "native", 0.0
        return _pack(cls, checkpoint, gate_up, dtype, x_format, x_scale)

    @classmethod
    @typed
    def from_mxfp4(
        cls,
        blocks: PerExpert,
        scales: PerExpert,
        *,
        gate_up: GateUp | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> QuantizedWeights:
        """MXFP4 as gpt-oss has it: `value = e2m1 * 2^(scale - 127)`.

        Experts are brought into tiles one by one: beside the checkpoint's tensors and the result
        there is never more than one expert.

        Parameters
        ----------
        blocks : Tensor, shape (E, N, K / 32, 16) or (E, N, K / 2), uint8, or one for each expert
            Two numbers of a row in each byte, the even column in the low nibble.
        scales : Tensor, shape (E, N, K / 32), uint8 or float8_e8m0fnu, or one for each expert
            Exponents of the scales; at most 128, which is a scale of 2.
        gate_up : {None, "concatenated", "interleaved"}
            Of a gated `w13`: whether gate rows come before up rows, or alternate with them, as
            those of gpt-oss do. None for any other weight.
        dtype : torch.dtype
            bfloat16 or float16: that of the activations. In bfloat16 all numbers are exact.

        Raises
        ------
        ValueError
            A shape, a dtype or a scale is not as above.
        TypeError
            An argument is of another type than in the signature.
        NotImplementedError
            There is no kernel for this device.

        Notes
        -----
        OCP Microscaling Formats (MX) Specification, version 1.0, 2023.
        """
        return _pack(cls, readers.mxfp4(blocks, scales), gate_up, dtype)

    @classmethod
    @typed
    def from_nvfp4(
        cls,
        weight: PerExpert,
        weight_scale: PerExpert,
        weight_scale_2: PerExpert | None = None,
        weight_global_scale: PerExpert | None = None,
        *,
        gate_up: GateUp | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> QuantizedWeights:
        """NVFP4 (W4A16): `value = e2m1 * weight_scale * weight_scale_2`.

        Experts are brought into tiles one by one: beside the checkpoint's tensors and the result
        there is never more than one expert.

        Parameters
        ----------
        weight : Tensor, shape (E, N, K / 2), uint8, or one for each expert
            Two numbers of a row in each byte, the even column in the low nibble; `weight_packed` of
            compressed-tensors.
        weight_scale : Tensor, shape (E, N, K / 16), float8_e4m3fn or uint8, or one for each expert
            Scales of 16 columns of a row; not negative.
        weight_scale_2 : Tensor, shape (E,) or (E, 2), float32, or one for each expert
            Scale of an expert's tensor, or of its gate and its up rows, as ModelOpt has it.
        weight_global_scale : Tensor, shape (E,) or (E, 2), float32, or one for each expert
            The same as compressed-tensors has it, which divides: `1 / weight_scale_2`. One of both
            must be there.
        gate_up, dtype
            As of `from_mxfp4`. On a GPU products lack `weight_scale_2` up to the end of their sum,
            and all numbers are exact.

        Raises
        ------
        ValueError
            A shape, a dtype or a scale is not as above.
        TypeError
            An argument is of another type than in the signature.
        NotImplementedError
            There is no kernel for this device.

        Notes
        -----
        Layouts of NVIDIA's TensorRT Model Optimizer (`NVFP4QTensor`) and of the compressed-tensors
        library ("nvfp4-pack-quantized"). Scales of activations are not used.
        """
        found = readers.nvfp4(weight, weight_scale, weight_scale_2, weight_global_scale, gate_up)
        return _pack(cls, found, gate_up, dtype)

    @classmethod
    @typed
    def from_gptq(
        cls,
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
    ) -> QuantizedWeights:
        """INT4 as GPTQ checkpoints have it: `value = (q - zero) * scale`.

        Experts are brought into tiles one by one: beside the checkpoint's tensors and the result
        there is never more than one expert.

        Parameters
        ----------
        qweight : Tensor, shape (E, K / 8, N), int32, or one for each expert
            Eight consecutive columns of a row in each word, the first in the lowest bits. Gate and
            up of one `w13` follow each other along N.
        scales : Tensor, shape (E, K / group, N), or one for each expert
            float32, bfloat16 or float16; rounded to `dtype`.
        qzeros : Tensor, shape (E, K / group, N / 8), int32, or one for each expert, optional
            Zero points of eight rows in each word. If all are 8, as of symmetric checkpoints, they
            are dropped.
        g_idx : Tensor, shape (E, K), int32 or int64, or one for each expert, optional
            Group of each column. Only `k // group_size` is taken: weights quantized in the order of
            their activations (`desc_act`) are refused.
        bits : int
            4.
        group_size : int, optional
            32, a multiple of 64, or -1 for all columns; must be that of `scales`. Absent: that of
            `scales`.
        sym : bool, optional
            True: no zero points but 8. False: there are zero points. Absent: as `qzeros` says.
        checkpoint_format : {"gptq", "gptq_v2"}
            Of the former the stored zero points are smaller by one than what they mean.
        gate_up, dtype
            As of `from_mxfp4`.

        Raises
        ------
        ValueError
            A shape, a dtype or a value is not as above, or a scale is not finite or beyond
            65504 of either sign.
        TypeError
            An argument is of another type than in the signature.
        NotImplementedError
            There is no kernel for this device.

        Notes
        -----
        Frantar et al., GPTQ, 2022 (arXiv:2210.17323).
        """
        if bits != 4:
            raise ValueError(f"bits is {bits}, expected 4")
        if checkpoint_format not in readers.ZERO_OFFSETS:
            known = " or ".join(map(repr, readers.ZERO_OFFSETS))
            raise ValueError(f"checkpoint_format is {checkpoint_format!r}, expected {known}")
        offset = readers.ZERO_OFFSETS[checkpoint_format]
        found = readers.gptq(qweight, scales, qzeros, g_idx, group_size, sym, offset)
        return _pack(cls, found, gate_up, dtype)

    @classmethod
    @typed
    def from_awq(
        cls,
        qweight: PerExpert,
        scales: PerExpert,
        qzeros: PerExpert | None = None,
        *,
        group_size: int | None = None,
        gate_up: GateUp | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> QuantizedWeights:
        """INT4 as AWQ checkpoints have it: `value = (q - zero) * scale`.

        Experts are brought into tiles one by one: beside the checkpoint's tensors and the result
        there is never more than one expert.

        Parameters
        ----------
        qweight : Tensor, shape (E, K, N / 8), int32, or one for each expert
            Eight consecutive rows of a column in each word, in the order 0, 2, 4, 6, 1, 3, 5, 7.
        scales : Tensor, shape (E, K / group, N), or one for each expert
            float32, bfloat16 or float16; rounded to `dtype`.
        qzeros : Tensor, shape (E, K / group, N / 8), int32, or one for each expert, optional
            Zero points in the order of `qweight`. If all are 8, as of symmetric checkpoints
            (`zero_point: false`), they are dropped.
        group_size, gate_up, dtype
            As of `from_gptq`.

        Raises
        ------
        ValueError
            A shape or a dtype is not as above, or a scale is not finite or beyond
            65504 of either sign.
        TypeError
            An argument is of another type than in the signature.
        NotImplementedError
            There is no kernel for this device.

        Notes
        -----
        Lin et al., AWQ, 2023 (arXiv:2306.00978).
        """
        found = readers.awq(qweight, scales, qzeros, group_size)
        return _pack(cls, found, gate_up, dtype)

    @classmethod
    @typed
    def from_compressed_tensors(
        cls,
        weight_packed: PerExpert,
        weight_scale: PerExpert,
        weight_zero_point: PerExpert | None = None,
        weight_shape: PerExpert | None = None,
        *,
        group_size: int | None = None,
        gate_up: GateUp | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> QuantizedWeights:
        """INT4 as compressed-tensors has it in its format "pack-quantized".

        Experts are brought into tiles one by one: beside the checkpoint's tensors and the result
        there is never more than one expert.

        Parameters
        ----------
        weight_packed : Tensor, shape (E, N, K / 8), int32, or one for each expert
            Eight consecutive columns of a row in each word, the first in the lowest bits, plus 8.
        weight_scale : Tensor, shape (E, N, K / group), or one for each expert
            float32, bfloat16 or float16; rounded to `dtype`.
        weight_zero_point : Tensor, shape (E, N / 8, K / group), int32, or one for each, optional
            Zero points of eight consecutive rows in each word, plus 8. Absent: 0 before the 8.
        weight_shape : Tensor, shape (E, 2) or (2,), or one for each expert, optional
            N and K; refused if they are others, as of a K that was padded to fill words.
        group_size, gate_up, dtype
            As of `from_gptq`.

        Raises
        ------
        ValueError
            A shape or a dtype is not as above, or a scale is not finite or beyond
            65504 of either sign.
        TypeError
            An argument is of another type than in the signature.
        NotImplementedError
            There is no kernel for this device.

        Notes
        -----
        Layout of the compressed-tensors library (`pack_to_int32`).
        """
        found = readers.compressed_tensors(
            weight_packed, weight_scale, weight_zero_point, weight_shape, group_size
        )
        return _pack(cls, found, gate_up, dtype)


def _pack(
    cls: type[QuantizedWeights],
    checkpoint: readers.Checkpoint,
    gate_up: GateUp | None,
    dtype: torch.dtype,
    x_format: XFormat = "native",
    x_scale: float = 0.0,
) -> QuantizedWeights:
    if gate_up not in ORDERS:
        known = ", ".join(map(repr, ORDERS))
        raise ValueError(f"gate_up is {gate_up!r}, expected one of {known}")
    if dtype not in COMPUTE_DTYPES:
        raise ValueError(f"dtype is {dtype}, expected torch.bfloat16 or torch.float16")
    experts, rows, _ = checkpoint.shape
    if gate_up and rows % 2:
        raise ValueError(f"there are {rows} rows, expected as many of gate as of up")
    weights = cls(
        data=torch.empty(0),
        format=checkpoint.format,
        group_size=checkpoint.group_size,
        has_zeros=checkpoint.has_zeros,
        gate_up=gate_up,
        shape=torch.Size(checkpoint.shape),
        dtype=dtype,
        row_scales=checkpoint.row_scales,
        x_format=x_format,
        x_scale=x_scale,
    )
    layout = (*weights.layout[:2], COMPUTE_DTYPES.index(dtype), *checkpoint.block)
    for expert in range(experts):
        values, scales, zeros = checkpoint.read(expert)
        absent, of_tensor = values.new_empty(0), checkpoint.tensor_scales
        zeros = absent if zeros is None else zeros[None]
        of_tensor = absent if of_tensor is None else of_tensor[expert : expert + 1]
        op = operators.pack_quantized.default
        tiles = run(op, values[None], scales[None], zeros, of_tensor, *layout)
        if expert == 0:
            data = tiles.new_empty(experts, *tiles.shape[1:])
        data[expert] = tiles[0]
    return replace(weights, data=data)
