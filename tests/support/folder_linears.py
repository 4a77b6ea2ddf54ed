"""Linear layers as quantizers store them, made by hand: tensors by suffix, and what they mean.

Names and dtypes are those of llm-compressor 0.14.0 with compressed-tensors 0.19.0, AutoRound 0.16.1
(`export_to_autoround/export.py`, `auto_round_extension/torch`) and GPTQModel 7.7.0.
"""

from __future__ import annotations

import quantized_cases
import quantized_folders
import torch
from quantized_folders import nibbles_to_words
from torch import Tensor

GROUP = 64
Made = tuple[dict[str, Tensor], Tensor]  # tensors of a linear layer by suffix; what they mean


def bits(q: Tensor, width: int) -> Tensor:
    """Numbers of the last dimension in int32, the first in the lowest bits."""
    shifts = torch.arange(0, 32, width)
    total = (q.unflatten(-1, (-1, 32 // width)) << shifts).sum(-1)
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


def integers(w: Tensor, zero: int, width: int = 4, group: int = GROUP) -> tuple[Tensor, ...]:
    """(N, K) float -> numbers, float16 scales (N, groups), and what they mean."""
    groups = w.unflatten(-1, (-1, group))
    room = min(zero, 2**width - 1 - zero)
    scales = (groups.abs().amax(-1, keepdim=True) / room).half().float()
    q = (torch.round(groups / scales) + zero).clamp(0, 2**width - 1).long()
    return q.flatten(-2), scales.squeeze(-1), ((q - zero) * scales).flatten(-2)


def unquantized(w: Tensor) -> Made:
    return {".weight": w.bfloat16()}, w.bfloat16().float()


def gptq(w: Tensor, zero: int = 8, width: int = 4, offset: int = 1, order: bool = False) -> Made:
    """With `order`, columns lie as they were, and groups have those that were chosen for them."""
    columns = torch.arange(w.size(1))
    chosen = torch.randperm(w.size(1), generator=torch.Generator().manual_seed(1))
    sort = chosen if order else columns
    q, scales, meant = integers(w[:, sort], zero, width)
    back = sort.argsort()
    stored = torch.full((scales.size(1), w.size(0)), zero - offset)
    tensors = {
        ".qweight": bits(q[:, back], width).t(),
        ".scales": scales.t().half(),
        ".qzeros": bits(stored, width),
        ".g_idx": (columns // GROUP)[back].int(),
    }
    return tensors, meant[:, back]


def without_g_idx(made: Made) -> Made:
    tensors, meant = made
    return {name: t for name, t in tensors.items() if name != ".g_idx"}, meant


def awq(w: Tensor, zero: int = 8) -> Made:
    q, scales, meant = integers(w, zero)
    zeros = torch.full_like(scales.t().long(), zero)
    order = quantized_folders.AWQ_ORDER
    tensors = {
        ".qweight": nibbles_to_words(q.t(), order),
        ".scales": scales.t().half(),
        ".qzeros": nibbles_to_words(zeros, order),
    }
    return tensors, meant


def packed(w: Tensor, width: int = 4, zero: int | None = None) -> Made:
    middle = 2 ** (width - 1)
    q, scales, meant = integers(w, middle if zero is None else zero, width)
    tensors = {
        ".weight_packed": bits(q, width),
        ".weight_scale": scales.bfloat16(),
        ".weight_shape": torch.tensor(w.shape),
    }
    shift = middle if zero is None else zero
    meant = (q - shift).unflatten(-1, (-1, GROUP)) * scales.bfloat16().float()[..., None]
    if zero is not None:
        points = torch.full((scales.size(1), w.size(0)), zero)
        tensors[".weight_zero_point"] = bits(points, width).t()
    return tensors, meant.flatten(-2)


def packed_in_order(w: Tensor) -> Made:
    """Groups of columns that were chosen, which lie as they were (`actorder: group`)."""
    chosen = torch.randperm(w.size(1), generator=torch.Generator().manual_seed(1))
    tensors, meant = packed(w[:, chosen])
    back = chosen.argsort()
    q = (tensors[".weight_packed"][..., None] >> torch.arange(0, 32, 4) & 15).flatten(-2)
    tensors[".weight_packed"] = bits(q[:, back].long(), 4)
    tensors[".weight_g_idx"] = (torch.arange(w.size(1)) // GROUP)[back].int()
    return tensors, meant[:, back]


def fp8_rows(w: Tensor) -> Made:
    return quantized_folders.fp8_channel(w, 0)


def fp8_whole(w: Tensor) -> Made:
    """A scale for the weight and one for what it takes, as ModelOpt has them."""
    scale = (w.abs().max() / 448).float()
    q = (w / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    tensors = {".weight": q, ".weight_scale": scale, ".input_scale": torch.tensor(0.02)}
    return tensors, q.float() * scale


def fp8_blocks(w: Tensor) -> Made:
    tensors, meant = quantized_folders.fp8_block(w, 128)
    return {".weight": tensors[".weight"], ".weight_scale": tensors[".weight_scale_inv"]}, meant


def mxfp4(w: Tensor) -> Made:
    found, meant = quantized_folders.mxfp4(w)
    packed = found["_blocks"].flatten(-2)
    return {".weight_packed": packed, ".weight_scale": found["_scales"]}, meant


def int8_rows(w: Tensor) -> Made:
    scales = (w.abs().amax(1, keepdim=True) / 127).bfloat16()
    q = torch.round(w / scales.float()).clamp(-128, 127)
    return {".weight": q.to(torch.int8), ".weight_scale": scales}, q * scales.float()


def nvfp4(w: Tensor) -> Made:
    groups = w.unflatten(-1, (-1, 16))
    whole = 448 * 6 / w.abs().max()
    scales = (groups.abs().amax(-1) / 6 * whole).to(torch.float8_e4m3fn)
    factors = scales.float() / whole
    q = (groups / factors[..., None].clamp(min=1e-9)).unsqueeze(-1) - quantized_folders.E2M1
    q = q.abs().argmin(-1).flatten(-2)
    tensors = {
        ".weight_packed": (q[..., 0::2] | q[..., 1::2] << 4).to(torch.uint8),
        ".weight_scale": scales,
        ".weight_global_scale": whole.reshape(1),
    }
    numbers = quantized_folders.E2M1[q] * scales.float().repeat_interleave(16, 1)
    return tensors, numbers * (1 / whole)


def with_input_scale(made: Made) -> Made:
    tensors, meant = made
    return tensors | {".input_global_scale": torch.tensor([50.0])}, meant


def nvfp4_of_modelopt(w: Tensor) -> Made:
    tensors, meant = nvfp4(w)
    whole = tensors[".weight_global_scale"].reshape(())
    return {
        ".weight": tensors[".weight_packed"],
        ".weight_scale": tensors[".weight_scale"],
        ".weight_scale_2": 1 / whole,
        ".input_scale": torch.tensor(0.02),
    }, meant


def mxfp8(w: Tensor) -> Made:
    groups = w.unflatten(-1, (-1, 32))
    exponents = torch.floor(torch.log2(groups.abs().amax(-1))) - 8
    q = (groups / torch.exp2(exponents)[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    meant = (q.float() * torch.exp2(exponents)[..., None]).flatten(-2)
    return {".weight": q.flatten(-2), ".weight_scale": (exponents + 127).to(torch.uint8)}, meant


def bnb(w: Tensor, form: str = "nf4", storage: torch.dtype = torch.uint8) -> Made:
    """`storage`: as `bnb_4bit_quant_storage` has it for FSDP."""
    numbers = quantized_cases.quantize(w[None], quantized_cases.FORMATS[form])
    weight, state = quantized_cases.bnb_tensor(numbers.q[0], numbers.scales[0], numbers.format.name)
    parts = {f".weight.{name}": part for name, part in state.items()}
    tensors = {".weight": weight.flatten().view(storage)[:, None], **parts}
    return tensors, numbers.dequantized(torch.float32)[0]


def bnb_int8(w: Tensor) -> Made:
    scales = w.abs().amax(1)
    q = torch.round(w / scales[:, None] * 127).to(torch.int8)
    parts = {".SCB": scales, ".weight_format": torch.tensor(0, dtype=torch.uint8)}
    return {".weight": q, **parts}, q * scales[:, None] / 127
