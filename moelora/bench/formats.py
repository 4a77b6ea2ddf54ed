"""Weight formats for benchmarks: random weights in the layout of checkpoints."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from torch import Generator, Tensor

from moelora.operators.formats import FORMATS as ROWS
from moelora.weights.quantized import QuantizedWeights
from moelora.weights.readers import NVFP4_BLOCK

Drawn: TypeAlias = tuple[Tensor, ...]

INT4_GROUP = 128
NF4_BLOCK = 64
FP8_BLOCK = 128


def draw_mxfp4(e: int, n: int, k: int, generator: Generator, dtype: torch.dtype) -> Drawn:
    """Blocks [E, N, K/2] and scales [E, N, K/32], for a standard deviation of about 0.02."""
    return _bytes((e, n, k // 2), generator), _bytes((e, n, k // 32), generator, 119, 121)


def draw_nvfp4(e: int, n: int, k: int, generator: Generator, dtype: torch.dtype) -> Drawn:
    """Values [E, N, K/2], scales [E, N, K/16] and [E], for a standard deviation of about 0.02."""
    values = _bytes((e, n, k // 2), generator)
    scales = _bytes((e, n, k // NVFP4_BLOCK), generator, 100, 124)
    return values, scales, torch.full((e,), 5e-5, device=generator.device)


def draw_nf4(e: int, n: int, k: int, generator: Generator, dtype: torch.dtype) -> Drawn:
    """Codes [E, N, K/2] and absmax [E, N, K/64], with the same deviation."""
    absmax = _scales((e, n, k // NF4_BLOCK), generator, 0.02 / 0.56)
    return _bytes((e, n, k // 2), generator), absmax


def draw_int4(e: int, n: int, k: int, generator: Generator, dtype: torch.dtype) -> Drawn:
    """GPTQ's qweight [E, K/8, N] and scales [E, K/128, N], with the same deviation."""
    words = _bytes((e, k // 8, n, 4), generator).view(torch.int32).squeeze(-1)
    return words, _scales((e, k // INT4_GROUP, n), generator, 0.02 / 4.6).to(dtype)


def draw_fp8_block(e: int, n: int, k: int, generator: Generator, dtype: torch.dtype) -> Drawn:
    """e4m3 [E, N, K] and scales [E, N/128, K/128], with the same deviation."""
    values = torch.empty((e, n, k), dtype=torch.float8_e4m3fn, device=generator.device)
    for one in values:  # at most one expert exists in float32
        numbers = torch.randn((n, k), generator=generator, device=generator.device)
        one.copy_(numbers.mul_(112).clamp_(-448, 448))
    return values, _scales((e, n // FP8_BLOCK, k // FP8_BLOCK), generator, 0.02 / 112)


def _bytes(shape: tuple[int, ...], generator: Generator, low: int = 0, high: int = 256) -> Tensor:
    options: dict[str, Any] = {"device": generator.device, "dtype": torch.uint8}
    return torch.randint(low, high, shape, generator=generator, **options)


def _scales(shape: tuple[int, ...], generator: Generator, mean: float) -> Tensor:
    """Uniform from half of the mean to one and a half."""
    return torch.rand(shape, generator=generator, device=generator.device).add_(0.5).mul_(mean)


def _pack_nvfp4(
    values: Tensor, scales: Tensor, of_tensor: Tensor, **options: Any
) -> QuantizedWeights:
    return QuantizedWeights.from_nvfp4(values, scales, weight_scale_2=of_tensor, **options)


def _pack_nf4(codes: Tensor, absmax: Tensor, **options: Any) -> QuantizedWeights:
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
    draw: Callable[..., Drawn]  # (E, N, K, generator, dtype) -> the arguments of `pack`
    pack: Callable[..., QuantizedWeights]
    rate: float = 1.0  # peak of its products relative to 16 bits


Weights = QuantizedWeights
FORMATS = {
    "mxfp4": Format("MXFP4, a scale of 8 bits for 32", 4.25, 32, draw_mxfp4, Weights.from_mxfp4),
    "nvfp4": Format("NVFP4, a scale of 8 bits for 16", 4.5, NVFP4_BLOCK, draw_nvfp4, _pack_nvfp4),
    "nf4": Format("NF4, a float32 scale for 64", 4.5, NF4_BLOCK, draw_nf4, _pack_nf4),
    "int4": Format(
        "INT4 of GPTQ, a 16-bit scale for 128", 4.125, INT4_GROUP, draw_int4, Weights.from_gptq
    ),
    "fp8_block": Format(
        "FP8 of blocks of 128 x 128, with activations in FP8",
        *(8 + 32 / FP8_BLOCK**2, FP8_BLOCK, draw_fp8_block, Weights.from_fp8_block),
        rate=2.0,
    ),
}
