"""Read MXFP4 and NVFP4 expert weights from checkpoints, for `QuantizedWeights`."""

from __future__ import annotations

import torch
from torch import Tensor

from moelora.operators.call import typed
from moelora.weights.readers import (
    BLOCK,
    LARGEST_E8M0,
    NVFP4_BLOCK,
    Checkpoint,
    GateUp,
    Made,
    Numbers,
    Packable,
    PerExpert,
    Stack,
)


class FromFP4(Packable):
    """The constructors of `QuantizedWeights` for weights of e2m1."""

    @classmethod
    @typed
    def from_mxfp4(
        cls: type[Made],
        blocks: PerExpert,
        scales: PerExpert,
        *,
        gate_up: GateUp | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Made:
        """MXFP4 as in gpt-oss: `value = e2m1 * 2^(scale - 127)`.

        Experts are packed one by one: the additional memory is that of one expert.

        Parameters
        ----------
        blocks : Tensor, shape (E, N, K / 32, 16) or (E, N, K / 2), uint8, or one for each expert
            Two values of a row per byte, the even column in the low nibble.
        scales : Tensor, shape (E, N, K / 32), uint8 or float8_e8m0fnu, or one for each expert
            Exponents of the scales; at most 128, i.e. a scale of 2.
        gate_up : {None, "concatenated", "interleaved"}
            For a gated `w13`: whether gate rows precede up rows or alternate with them, as in
            gpt-oss. None for other weights.
        dtype : torch.dtype
            Dtype of the activations, bfloat16 or float16. In bfloat16 all values are exact.

        Raises
        ------
        {packing_errors}

        Notes
        -----
        OCP Microscaling Formats (MX) Specification, version 1.0, 2023.
        """
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
                scales.fail(
                    expert, f"has the e8m0 byte {largest}, {what}", "at most 128, a scale of 2"
                )
            return blocks[expert].reshape(rows, columns // 2), bits, None

        found = Checkpoint("mxfp4", (len(blocks), rows, columns), BLOCK, False, read)
        return cls._pack(found, gate_up, dtype)

    @classmethod
    @typed
    def from_nvfp4(
        cls: type[Made],
        weight: PerExpert,
        weight_scale: PerExpert,
        *,
        weight_scale_2: PerExpert | None = None,
        weight_global_scale: PerExpert | None = None,
        gate_up: GateUp | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Made:
        """NVFP4 (W4A16): `value = e2m1 * weight_scale * weight_scale_2`.

        Experts are packed one by one: the additional memory is that of one expert.

        Parameters
        ----------
        weight : Tensor, shape (E, N, K / 2), uint8 or float4_e2m1fn_x2, or one for each expert
            Two values of a row per byte, the even column in the low nibble; `weight_packed` of
            compressed-tensors.
        weight_scale : Tensor, shape (E, N, K / 16), float8_e4m3fn or uint8, or one for each expert
            Scales of 16 columns of a row; not negative.
        weight_scale_2 : Tensor, shape (E,) or (E, 2), float32, or one for each expert
            Scale of an expert's tensor, or of its gate and its up rows, as ModelOpt has it; 0 if
            all its weights are.
        weight_global_scale : Tensor, shape (E,) or (E, 2), float32, or one for each expert
            The reciprocal, as in compressed-tensors: `1 / weight_scale_2`. One of both is
            required.
        gate_up, dtype
            As in `from_mxfp4`. On a GPU, `weight_scale_2` is applied to the accumulators, so that
            all values are exact.

        Raises
        ------
        {packing_errors}

        Notes
        -----
        Layouts of NVIDIA's TensorRT Model Optimizer (`NVFP4QTensor`) and of the compressed-tensors
        library ("nvfp4-pack-quantized"). Scales of activations are not used.
        """
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
        found = Checkpoint(
            "nvfp4", shape, NVFP4_BLOCK, False, read, tensor_scales=tensor_scales.contiguous()
        )
        return cls._pack(found, gate_up, dtype)


# ---- scales of whole tensors ----


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
