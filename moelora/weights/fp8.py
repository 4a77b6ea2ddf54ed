"""Read FP8 expert weights from checkpoints, for `QuantizedWeights`."""

from __future__ import annotations

from typing import Literal, TypeAlias, TypeVar, get_args

import torch
from torch import Tensor

from moelora.operators.call import typed
from moelora.operators.storage import check_held
from moelora.weights.readers import (
    SCALES,
    Checkpoint,
    GateUp,
    Numbers,
    Packable,
    PerExpert,
    Stack,
    XFormat,
    check_scales,
)

TILE = 64  # rows of a tile
DEPTH = 128  # columns of a tile
NAN = 0x7F  # of e4m3, without the sign
LARGEST_SCALE = 255.0
FP8_SCALES = (*SCALES, torch.float8_e8m0fnu)

Activations: TypeAlias = Literal["fp8", "native", "bf16"]
ACTIVATIONS: tuple[Activations, ...] = get_args(Activations)
MadeFP8 = TypeVar("MadeFP8", bound="FromFP8")


class FromFP8(Packable):
    """The constructors of `QuantizedWeights` for weights of e4m3.

    All of them take `activations`. "fp8" (W8A8): activations are quantized to e4m3 as well, with
    scales of their own, as engines do; adapters read them unquantized. "native" (W8A16):
    activations stay in `dtype`, to which weights are dequantized, rounding once. "bf16" is
    "native" with a `dtype` of bfloat16.
    """

    @classmethod
    def _pack_fp8(
        cls: type[MadeFP8],
        checkpoint: Checkpoint,
        activations: Activations,
        x_format: XFormat,
        x_scale: float,
        gate_up: GateUp | None,
        dtype: torch.dtype,
    ) -> MadeFP8:
        if activations not in ACTIVATIONS:
            known = " or ".join(map(repr, ACTIVATIONS))
            raise ValueError(f"activations is {activations!r}, expected {known}")
        if activations == "bf16" and dtype == torch.float16:
            wanted = "dtype torch.bfloat16, or activations 'native'"
            raise ValueError(f"activations is 'bf16' and dtype is {dtype}, expected {wanted}")
        if activations != "fp8":
            x_format, x_scale = "native", 0.0
        return cls._pack(checkpoint, gate_up, dtype, x_format, x_scale)

    @classmethod
    @typed
    def from_fp8_block(
        cls: type[MadeFP8],
        weight: PerExpert,
        weight_scale_inv: PerExpert,
        *,
        block: tuple[int, int] = (128, 128),
        activations: Activations = "fp8",
        gate_up: GateUp | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> MadeFP8:
        """FP8 as DeepSeek-V3 and Qwen3-FP8 have it: `value = e4m3 * scale of its block`.

        Activations become `e4m3(x * (1 / s))` with a scale `s = max(|x|, 1e-10) / 448` for every
        128 columns of a token; for every 64 if blocks have fewer columns than `K`, and not a
        multiple of 128.

        Parameters
        ----------
        weight : Tensor, shape (E, N, K), float8_e4m3fn, or one for each expert
            None of them NaN.
        weight_scale_inv : Tensor, shape (E, N / rows, K / columns), or one for each expert
            Scales of the blocks, both sizes rounded up; float32, bfloat16, float16 or
            float8_e8m0fnu; finite, at most 255. With a concatenated gate and up, blocks may begin
            anew at the first up row, in 2 ceil(N / 2 / rows) rows of scales, as of two weights that
            were quantized separately; otherwise they continue across it.
        block : (int, int)
            Rows and columns of a block. Columns are a multiple of 64; of 128 where blocks of rows
            begin within a tile of 64 rows.
        activations : {"fp8", "native", "bf16"}
            Format of `x` in the product: FP8, or unquantized; "bf16" requires bfloat16.
        gate_up : {None, "concatenated", "interleaved"}
            Of a gated `w13`: whether gate rows come before up rows, or alternate with them. None
            for any other weight.
        dtype : torch.dtype
            bfloat16 or float16: that of the activations.

        Raises
        ------
        ValueError
            A shape, a dtype or a value is not as above, or `activations` is "bf16" and `dtype` not.
        {other_type}
        {no_kernel}

        Notes
        -----
        DeepSeek-AI, DeepSeek-V3 Technical Report, 2024 (arXiv:2412.19437), section 3.3.
        """
        found = read_block(weight, weight_scale_inv, block, gate_up)
        return cls._pack_fp8(found, activations, "group", 0.0, gate_up, dtype)

    @classmethod
    @typed
    def from_fp8_channel(
        cls: type[MadeFP8],
        weight: PerExpert,
        weight_scale: PerExpert,
        *,
        activations: Activations = "fp8",
        gate_up: GateUp | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> MadeFP8:
        """FP8 with a scale for each row, as compressed-tensors has it ("float-quantized").

        Activations get a scale `s` for each token, `max|x| / 448`, at least `1 / (448 * 512)`, and
        become `e4m3(x / s)`.

        Parameters
        ----------
        weight : Tensor, shape (E, N, K), float8_e4m3fn, or one for each expert
            None of them NaN.
        weight_scale : Tensor, shape (E, N, 1) or (E, N), or one for each expert
            float32, bfloat16, float16 or float8_e8m0fnu; finite, at most 255.
        activations, gate_up, dtype
            As of `from_fp8_block`.

        Raises
        ------
        {packing_errors}

        Notes
        -----
        Layout of the compressed-tensors library.
        """
        weight, scales = _weight(weight), Stack("weight_scale", weight_scale)
        rows, columns = weight.matrix("[N, K] for each expert")
        scales.check(weight, (rows, 1) if scales[0].dim() == 2 else (rows,), *FP8_SCALES)
        found = _checkpoint(weight, scales, torch.arange(rows, device="cpu"), (1, columns), gate_up)
        return cls._pack_fp8(found, activations, "token", 0.0, gate_up, dtype)

    @classmethod
    @typed
    def from_fp8_tensor(
        cls: type[MadeFP8],
        weight: PerExpert,
        weight_scale: PerExpert,
        input_scale: PerExpert | float | None = None,
        *,
        activations: Activations = "fp8",
        gate_up: GateUp | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> MadeFP8:
        """FP8 with a scale for each expert, or one for its gate and one for its up rows.

        Activations become `e4m3(x * (1 / input_scale))`, of the largest if there are several.
        Without one, they get a scale for each token, as of `from_fp8_channel`: a scale of a whole
        batch would let a token depend on its neighbors.

        Parameters
        ----------
        weight : Tensor, shape (E, N, K), float8_e4m3fn, or one for each expert
            None of them NaN.
        weight_scale : Tensor, shape (E,), (E, 1) or (E, 2), or one for each expert
            float32, bfloat16, float16 or float8_e8m0fnu; finite, at most 255. Two are those of gate
            and of up.
        input_scale : float or Tensor, or one for each expert, optional
            Above 0.
        activations, gate_up, dtype
            As of `from_fp8_block`.

        Raises
        ------
        {packing_errors}

        Notes
        -----
        Layout of vLLM's `fp8` and of compressed-tensors ("float-quantized", strategy "tensor").
        """
        found = read_tensor(weight, weight_scale, gate_up)
        scale = 0.0 if input_scale is None else largest_scale(input_scale)
        kind: XFormat = "token" if input_scale is None else "static"
        return cls._pack_fp8(found, activations, kind, scale, gate_up, dtype)


# ---- checkpoints -> values, scales by rows of blocks ----


def read_block(
    weight: PerExpert, scales: PerExpert, block: tuple[int, ...], gate_up: GateUp | None
) -> Checkpoint:
    weight, scales = _weight(weight), Stack("weight_scale_inv", scales)
    rows, columns = weight.matrix("[N, K] for each expert")
    are_two = isinstance(block, tuple | list) and len(block) == 2
    if not are_two or not all(type(side) is int and 0 < side < 2**31 for side in block):
        raise ValueError(f"block is {block!r:.80}, expected two sizes: rows and columns")
    high, wide = block
    found = scales.matrix("[N/rows, K/columns] for each expert")[0]
    of_rows = torch.arange(rows, device="cpu") // high
    half = rows // 2
    halves = 2 * -(-half // high)
    if gate_up == "concatenated" and rows % 2 == 0 and found == halves:
        row = torch.arange(rows, device="cpu")
        of_rows = row // half * (halves // 2) + row % half // high
    scales.check(weight, (int(of_rows[-1]) + 1, -(-columns // wide)), *FP8_SCALES)
    return _checkpoint(weight, scales, of_rows, (high, wide), gate_up)


def read_tensor(weight: PerExpert, scales: PerExpert, gate_up: GateUp | None) -> Checkpoint:
    weight, scales = _weight(weight), Stack("weight_scale", scales)
    rows, columns = weight.matrix("[N, K] for each expert")
    row, count = torch.arange(rows, device="cpu"), scales[0].numel()
    if count == 2 and gate_up:
        of_rows = row % 2 if gate_up == "interleaved" else row // max(1, rows // 2)
        high = max(1, rows // 2)
        scales.check(weight, (2,), *FP8_SCALES)
    else:
        of_rows, high = torch.zeros_like(row), rows
        scales.check(weight, tuple(scales[0].shape) if count == 1 else (1,), *FP8_SCALES)
    return _checkpoint(weight, scales, of_rows, (high, columns), gate_up)


def largest_scale(input_scale: PerExpert | float) -> float:
    several = input_scale if isinstance(input_scale, list | tuple) else [input_scale]
    for expert, scale in enumerate(several):
        if isinstance(scale, Tensor):
            check_held(f"input_scale[{expert}]" if several is input_scale else "input_scale", scale)
    scales = torch.cat(
        [torch.as_tensor(scale, device="cpu").float().reshape(-1) for scale in several]
    )
    if not scales.numel():
        raise ValueError("input_scale has no numbers, expected at least 1")
    smallest = torch.finfo(torch.float32).tiny
    if not ((scales >= smallest) & scales.isfinite()).all():
        raise ValueError(f"input_scale is {scales.tolist()}, expected normal numbers above 0")
    return scales.max().item()


def _weight(weight: PerExpert) -> Stack:
    stack = Stack("weight", weight)
    shape = stack.matrix("[N, K] for each expert")
    stack.check(stack, shape, torch.float8_e4m3fn)
    return stack


def _checkpoint(
    weight: Stack, scales: Stack, of_rows: Tensor, block: tuple[int, int], gate_up: GateUp | None
) -> Checkpoint:
    """`of_rows` maps each row of the weight to a row of scales."""
    rows, columns = weight[0].shape
    high, wide = block
    narrow = wide % DEPTH != 0 and wide < columns
    row_scales = not _fill_tiles(of_rows, gate_up)
    if narrow and (row_scales or wide % TILE):
        wanted = f"columns that are a multiple of {DEPTH if row_scales else TILE}"
        if row_scales:
            wanted += ", as rows of a tile of 64 are of several blocks"
        raise ValueError(f"block is {block}, expected {wanted}")
    # packing takes blocks with this many rows, or one scale per row
    taken = None if torch.equal(of_rows, torch.arange(rows, device="cpu") // high) else of_rows
    high = high if taken is None else 1

    def read(expert: int) -> Numbers:
        values = weight[expert].contiguous().view(torch.uint8)
        if (values & NAN == NAN).any():
            weight.fail(expert, "has a NaN", "numbers")
        check_scales(scales, expert, LARGEST_SCALE)
        found = scales[expert].to(torch.float32).reshape(int(of_rows.max()) + 1, -1)
        if taken is not None:
            found = found[taken.to(found.device)]
        return values, found.contiguous(), None

    shape = (len(weight), rows, columns)
    return Checkpoint("fp8", shape, min(wide, columns), False, read, row_scales, (high, wide))


def _fill_tiles(of_rows: Tensor, gate_up: GateUp | None) -> bool:
    """Whether all rows of each tile use one row of scales."""
    rows = len(of_rows)
    row, half = torch.arange(rows, device="cpu"), max(1, rows // 2)
    up, i = torch.zeros_like(row), row
    if gate_up == "concatenated":
        up, i = row // half, row % half
    elif gate_up == "interleaved":
        up, i = row % 2, row // 2
    tile = up * -(-half // TILE) + i // TILE if gate_up else i // TILE
    first = tile.new_full((int(tile.max()) + 1,), rows).scatter_reduce(0, tile, of_rows, "amin")
    return torch.equal(first[tile], of_rows)
