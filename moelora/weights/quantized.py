"""Quantized expert weights in the tiles that kernels read (layout: csrc/moelora.h)."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast, get_args

import torch
from torch import Tensor

from moelora.operators.call import operators, run, typed
from moelora.operators.fake import COMPUTE_DTYPES
from moelora.operators.formats import CODES, FORMATS, code_of
from moelora.operators.storage import check_held
from moelora.operators.tiles import TiledWeights
from moelora.weights import bnb, readers, rounding
from moelora.weights.fp4 import FromFP4
from moelora.weights.fp8 import Activations, FromFP8
from moelora.weights.int4 import FromINT4
from moelora.weights.readers import GateUp, PerExpert, XFormat
from moelora.weights.rounding import Rounding

ORDERS: dict[GateUp | None, int] = {None: 0, "concatenated": 1, "interleaved": 2}
X_FORMATS: tuple[XFormat, ...] = get_args(XFormat)
ALIGNMENT = 16  # alignment of a tile in bytes
FIELDS = ("format", "order", "rows", "columns", "group_size", "dtype", "x_format", "x_scale")


@dataclass(frozen=True, eq=False)
class QuantizedWeights(FromFP4, FromFP8, FromINT4, TiledWeights):
    """Quantized expert weights: 4-bit (MXFP4, NVFP4, INT4, NF4) or FP8.

    Created by `from_mxfp4`, `from_nvfp4`, `from_gptq`, `from_awq`, `from_compressed_tensors`,
    `from_bnb`, `from_fp8_block`, `from_fp8_channel` and `from_fp8_tensor` from checkpoint tensors;
    accepted wherever `w13`, `w2` or `w` is. On a CPU the result is bit-identical to that with
    `unpack()`, with a quarter or half of the memory, unless activations are quantized to FP8.

    Attributes
    ----------
    data : Tensor, shape (E, tiles of rows, tiles of depth, bytes of a tile), uint8
        Tiles of 64 rows by 64 columns (FP8: 128), values before their scales.
    format : {"mxfp4", "nvfp4", "int4", "fp8", "nf4", "bnb_fp4"}
        Type of a value: e2m1, with power-of-two or e4m3 scales; unsigned 4-bit minus 8 or minus its
        zero point; e4m3; the 16 numbers of NF4, or of bitsandbytes' FP4.
    group_size : int
        Columns that share a scale.
    has_zeros : bool
        Whether groups have zero points.
    gate_up : {None, "concatenated", "interleaved"}
        Row order: a single projection; gate rows before as many up rows; or both interleaved.
    shape : torch.Size
        The logical shape (E, N, K).
    dtype : torch.dtype
        Dtype of the activations, bfloat16 or float16.
    row_scales : bool
        FP8: whether each row of a tile has its own scale.
    x_format : {"native", "group", "token", "static"}
        Format of `x` in the product: unquantized, or FP8 with a scale per group of columns of a
        token, per token, or with `x_scale`.
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
        """moelora_layout of csrc/moelora.h: format, order, rows, and format of x."""
        x_format = X_FORMATS.index(self.x_format)
        x_scale = self.x_scale if self.x_format == "static" else 0.0  # supported by torch.compile
        code = code_of(self.format, self._group_columns(), self.has_zeros, self.row_scales)
        return code, ORDERS[self.gate_up], self.shape[1], x_format, x_scale

    def _group_columns(self) -> int:
        """Columns of a tile that share a scale: at most those of the tile."""
        if self.format == "fp8":
            narrow = self.group_size % 128 != 0 and self.group_size < self.shape[2]
            return 64 if narrow and not self.row_scales else 128
        columns = {f.group_columns for f in FORMATS if f.kernel == self.format}
        return self.group_size if self.group_size in columns else 64

    def to(self, device: torch.device | str) -> QuantizedWeights:
        """These weights on another device."""
        return replace(self, data=self.data.to(device))

    def unpack(self) -> Tensor:
        """The weights as one tensor of shape (E, N, K) and of `dtype`; each element is rounded
        once.

        An element is its value times its scale, where the scale is first rounded to `dtype`.
        """
        code = COMPUTE_DTYPES.index(self.dtype)
        op = operators.unpack_quantized.default
        return run(op, self.data, *self.layout[:3], self.shape[2], code)

    def state_dict(self, prefix: str = "") -> dict[str, Tensor]:
        """Two tensors for safetensors or torch.save: `data`, and numbers that describe it.

        Parameters
        ----------
        prefix : str
            Prefix of both names.
        """
        code, order, rows, x_format, x_scale = self.layout
        (bits,) = struct.unpack("<i", struct.pack("<f", x_scale))
        dtype = COMPUTE_DTYPES.index(self.dtype)
        numbers = (code, order, rows, self.shape[2], self.group_size, dtype, x_format, bits)
        layout = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        return {f"{prefix}data": self.data, f"{prefix}layout": layout}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor], prefix: str = "") -> QuantizedWeights:
        """Restore weights from `state_dict`.

        Raises
        ------
        ValueError
            `layout` is invalid, or does not match `data`.
        KeyError
            One of the tensors is missing.
        TypeError
            One of them is no tensor.
        """
        data, layout = state[f"{prefix}data"], state[f"{prefix}layout"]
        for name, tensor in (("data", data), ("layout", layout)):
            if not isinstance(tensor, Tensor):
                kind = type(tensor).__name__
                raise TypeError(f"{prefix}{name} is a {kind}, expected Tensor")
            check_held(f"{prefix}{name}", tensor)
        if layout.dtype != torch.int64 or layout.dim() != 1 or layout.is_meta:
            where = " on meta" if layout.is_meta else ""
            got = f"has dtype {layout.dtype} and shape {tuple(layout.shape)}{where}"
            raise ValueError(f"{prefix}layout {got}, expected int64 and {len(FIELDS)} numbers")
        if data.dim() == 0:
            raise ValueError(f"{prefix}data has no dimensions, expected [E, ...]")
        numbers = layout.tolist()
        if data.data_ptr() % ALIGNMENT:  # safetensors returns views of a file
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
        properties = of.kernel, weights._group_columns(), of.has_zeros, of.row_scales
        if CODES.get(properties) != code:
            raise ValueError(f"{prefix}layout has format {code} and group_size {group_size}")
        if (weights.x_format == "static") != (weights.x_scale > 0):
            raise ValueError(f"{prefix}layout has x_format {x_format}, x_scale {weights.x_scale}")
        tiles = data.new_empty(data.shape, device="meta")
        run(operators.unpack_quantized.default, tiles, code, order, rows, columns, dtype)
        return weights

    @classmethod
    @typed
    def from_dense(
        cls,
        w: PerExpert,
        format: Rounding,
        *,
        gate_up: GateUp | None = None,
        dtype: torch.dtype = torch.bfloat16,
        activations: Activations = "native",
    ) -> QuantizedWeights:
        """Rounds weights to the nearest values of a format, without calibration.

        Scales come from the largest magnitude of a group: of 64 columns (NF4 and FP4, as
        bitsandbytes), 32 (MXFP4), 16 and the tensor (NVFP4), 128 or the largest of 64 and 32 that
        divides K (INT4), a row (FP8).

        Parameters
        ----------
        w : Tensor, shape (E, N, K), float32, bfloat16 or float16, or one for each expert
            Experts are read and rounded one by one: a sequence may make each when it is asked for.
        format : {"nf4", "fp4", "mxfp4", "nvfp4", "int4", "fp8"}
            `"fp4"` is that of bitsandbytes.
        gate_up, dtype
            As in `from_mxfp4`.
        activations : {"native", "fp8", "bf16"}
            Of FP8 weights, as in `from_fp8_channel`.

        Raises
        ------
        ValueError
            A shape or a dtype is not as above, or a number is not finite or larger than the format
            allows: 12 for MXFP4, as scales are at most 2.
        {other_type}
        {no_kernel}
        """
        made = rounding.checkpoint(w, format)
        if format == "fp8":
            return cls._pack_fp8(made, activations, "token", 0.0, gate_up, dtype)
        if activations != "native":
            raise ValueError(
                f"activations is {activations!r}, expected 'native': only FP8 has others"
            )
        return cls._pack(made, gate_up, dtype)

    @classmethod
    @typed
    def from_bnb(
        cls,
        weight: Any,
        quant_state: Any,
        *,
        gate_up: GateUp | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> QuantizedWeights:
        """NF4 or FP4 as in bitsandbytes: `value = code[q] * absmax`.

        Nested statistics (double quantization) are dequantized to float32, so that values are
        those of `bitsandbytes.functional.dequantize_4bit`. Experts are packed one by one: the
        additional memory is that of one expert.

        Parameters
        ----------
        weight : Tensor, or a list
            Packed codes, two in a byte, of any shape and storage dtype: of the whole stack, whose
            flattened elements bitsandbytes has quantized; or a list with one tensor for each
            expert, or with a pair for each, gate and up.
        quant_state : QuantState or mapping, or a list as `weight`
            bitsandbytes' statistics of each tensor; or the tensors that a checkpoint has beside it:
            `absmax`, `quant_map`, `quant_state.bitsandbytes__nf4` (or fp4) and, if nested,
            `nested_absmax` and `nested_quant_map`. Blocks are of 64 to 4096 elements; none may end
            within 64 columns of a row, so that K is a multiple of 64.
        gate_up, dtype
            As in `from_mxfp4`. GEMMs on a GPU round the numbers of codes to `dtype`.

        Raises
        ------
        ValueError
            A shape, a dtype, a setting or an absmax is not as above.
        TypeError
            An argument is of another type.
        {no_kernel}

        Notes
        -----
        Dettmers et al., QLoRA, 2023 (arXiv:2305.14314). Layouts of bitsandbytes 0.50.
        """
        return cls._pack(bnb.checkpoint(weight, quant_state), gate_up, dtype)

    @classmethod
    def _pack(
        cls,
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
