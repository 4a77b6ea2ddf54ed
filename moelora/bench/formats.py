"""Weight formats that a layer can be measured in: what a checkpoint of each holds, at random."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from moelora.quantized import QuantizedWeights

INT4_GROUP = 128


def draw_mxfp4(experts, rows, columns, generator, dtype):
    """Blocks [E, N, K/2] and scales [E, N, K/32], for a standard deviation of about 0.02."""
    return (
        _integers((experts, rows, columns // 2), 0, 256, generator),
        _integers((experts, rows, columns // 32), 119, 121, generator),
    )


def draw_int4(experts, rows, columns, generator, dtype):
    """GPTQ's qweight [E, K/8, N] and scales [E, K/128, N], likewise."""
    words = _integers((experts, columns // 8, rows, 4), 0, 256, generator)
    scales = torch.rand(
        (experts, columns // INT4_GROUP, rows), generator=generator, device=generator.device
    )
    return words.view(torch.int32).squeeze(-1), scales.add_(0.5).mul_(0.02 / 4.6).to(dtype)


def _integers(shape, low, high, generator):
    options = {"device": generator.device, "dtype": torch.uint8}
    return torch.randint(low, high, shape, generator=generator, **options)


@dataclass(frozen=True)
class Format:
    """One way to hold quantised weights, as checkpoints do."""

    about: str
    bits: float  # of a weight, its share of the scales included
    multiple: int  # of both sizes of a layer
    draw: Callable  # of experts, rows, columns, generator, dtype: what `pack` takes
    pack: Callable  # makes QuantizedWeights of that


FORMATS = {
    "mxfp4": Format(
        "MXFP4, a scale of 8 bits for 32", 4.25, 32, draw_mxfp4, QuantizedWeights.from_mxfp4
    ),
    "int4": Format(
        f"INT4 as of GPTQ, a scale of 16 bits for {INT4_GROUP}",
        4 + 16 / INT4_GROUP,
        INT4_GROUP,
        draw_int4,
        QuantizedWeights.from_gptq,
    ),
}
