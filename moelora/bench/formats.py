"""Weight formats for benchmarks: random weights in the layout of checkpoints."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from moelora.operators.formats import FORMATS as ROWS
from moelora.weights.quantized import QuantizedWeights
from moelora.weights.readers import NVFP4_BLOCK

INT4_GROUP = 128
NF4_BLOCK = 64
FP8_BLOCK = 128


def draw_mxfp4(
    experts: int, rows: int, columns: int, generator: torch.Generator, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """Blocks [E, N, K/2] and scales [E, N, K/32], for a standard deviation of about 0.02."""
    return (
        _integers((experts, rows, columns // 2), 0, 256, generator),
        _integers((experts, rows, columns // 32), 119, 121, generator),
    )


def draw_nvfp4(
    experts: int, rows: int, columns: int, generator: torch.Generator, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """Values [E, N, K/2], scales [E, N, K/16] and [E], for a standard deviation of about 0.02."""
    return (
        _integers((experts, rows, columns // 2), 0, 256, generator),
        _integers((experts, rows, columns // NVFP4_BLOCK), 100, 124, generator),
        torch.full((experts,), 5e-5, device=generator.device),
    )


def draw_nf4(
    experts: int, rows: int, columns: int, generator: torch.Generator, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """Codes [E, N, K/2] and absmax [E, N, K/64], with the same deviation."""
    absmax = torch.rand(
        (experts, rows, columns // NF4_BLOCK), generator=generator, device=generator.device
    )
    return (
        _integers((experts, rows, columns // 2), 0, 256, generator),
        absmax.add_(0.5).mul_(0.02 / 0.56),
    )


def draw_int4(
    experts: int, rows: int, columns: int, generator: torch.Generator, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """GPTQ's qweight [E, K/8, N] and scales [E, K/128, N], with the same deviation."""
    words = _integers((experts, columns // 8, rows, 4), 0, 256, generator)
    scales = torch.rand(
        (experts, columns // INT4_GROUP, rows), generator=generator, device=generator.device
    )
    return words.view(torch.int32).squeeze(-1), scales.add_(0.5).mul_(0.02 / 4.6).to(dtype)


def draw_fp8_block(
    experts: int, rows: int, columns: int, generator: torch.Generator, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """e4m3 [E, N, K] and scales [E, N/128, K/128], with the same deviation."""
    options: dict[str, Any] = {"generator": generator, "device": generator.device}
    values = torch.empty(
        (experts, rows, columns), dtype=torch.float8_e4m3fn, device=generator.device
    )
    for expert in range(experts):  # at most one expert exists in float32
        values[expert] = torch.randn((rows, columns), **options).mul_(112).clamp_(-448, 448)
    scales = torch.rand((experts, rows // FP8_BLOCK, columns // FP8_BLOCK), **options)
    return values, scales.add_(0.5).mul_(0.02 / 112)


def _integers(
    shape: tuple[int, ...], low: int, high: int, generator: torch.Generator
) -> torch.Tensor:
    options: dict[str, Any] = {"device": generator.device, "dtype": torch.uint8}
    return torch.randint(low, high, shape, generator=generator, **options)


def _pack_nvfp4(
    values: torch.Tensor, scales: torch.Tensor, of_tensor: torch.Tensor, **options: Any
) -> QuantizedWeights:
    return QuantizedWeights.from_nvfp4(values, scales, weight_scale_2=of_tensor, **options)


def _pack_nf4(codes: torch.Tensor, absmax: torch.Tensor, **options: Any) -> QuantizedWeights:
    state = SimpleNamespace(
        absmax=absmax.flatten(),
        shape=(*codes.shape[:2], 2 * codes.size(2)),
        code=torch.tensor(next(f.codes for f in ROWS if f.kernel == "nf4")),
        blocksize=NF4_BLOCK,
        quant_type="nf4",
    )
    return QuantizedWeights.from_bnb(codes, state, **options)


@dataclass(frozen=True)
class Format:
    """A checkpoint layout of quantized weights."""

    about: str
    bits: float  # bits per weight, including its share of the scales
    multiple: int  # required divisor of both sizes of a layer
    draw: Callable[
        ..., tuple[torch.Tensor, ...]
    ]  # draws (experts, rows, columns, generator, dtype): arguments of `pack`
    pack: Callable[..., QuantizedWeights]  # creates QuantizedWeights from them
    rate: float = 1.0  # peak of its products relative to 16 bits


FORMATS = {
    "mxfp4": Format(
        "MXFP4, a scale of 8 bits for 32", 4.25, 32, draw_mxfp4, QuantizedWeights.from_mxfp4
    ),
    "nvfp4": Format("NVFP4, a scale of 8 bits for 16", 4.5, NVFP4_BLOCK, draw_nvfp4, _pack_nvfp4),
    "nf4": Format("NF4, a float32 scale for 64", 4.5, NF4_BLOCK, draw_nf4, _pack_nf4),
    "int4": Format(
        f"INT4 as of GPTQ, a scale of 16 bits for {INT4_GROUP}",
        4 + 16 / INT4_GROUP,
        INT4_GROUP,
        draw_int4,
        QuantizedWeights.from_gptq,
    ),
    "fp8_block": Format(
        f"FP8 of blocks of {FP8_BLOCK} x {FP8_BLOCK}, with activations in FP8",
        8 + 32 / FP8_BLOCK**2,
        FP8_BLOCK,
        draw_fp8_block,
        QuantizedWeights.from_fp8_block,
        rate=2.0,
    ),
}
