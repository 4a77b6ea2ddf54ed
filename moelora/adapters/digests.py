"""Numbers that tell whether two places hold the same factors, whatever pads and stacks them.

A fingerprint is a sum over the elements of a factor, of their bits times an odd number that their
place gives: of the expert, the row, the column, and of what the factor is. Zeros add nothing, so
that padding of ranks does not matter; sums of a decoder layer do not depend on how its projections
are packed. Integers of 64 bits wrap around, alike on every device.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
_EXPERT, _ROW, _COLUMN = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_WRAP = 1 << 64


def fingerprint(factor: Tensor, what: str, first: int = 0) -> int:
    """Of a factor (rows, columns), or of several experts (E, rows, columns) from `first` on.

    `what` is the factor's side, and for experts its projection: "A", "down B".
    """
    total = 0
    salt = int.from_bytes(hashlib.sha256(what.encode()).digest()[:8], "little")
    for number, one in enumerate(factor if factor.dim() == 3 else factor[None], first):
        bits = one.detach().contiguous().view(_BITS[factor.dtype]).to(torch.int64)
        rows, columns = (torch.arange(n, device=bits.device) for n in bits.shape)
        place = rows[:, None] * _signed(_ROW) + columns * _signed(_COLUMN)
        place += _signed(salt + number * _EXPERT)
        total += int((bits * ((place ^ (place >> 29)) | 1)).sum())
    return total % _WRAP


def _signed(value: int) -> int:
    value %= _WRAP
    return value - _WRAP if value >= _WRAP >> 1 else value


def by_layer(found: Iterable[tuple[str, int]]) -> dict[str, str]:
    """Sums of fingerprints by decoder layer, or by module outside these, as text."""
    sums: dict[str, int] = defaultdict(int)
    for module, value in found:
        number = re.search(r"layers\.\d+(?=\.)", module)
        sums[number[0] if number else module.rpartition(".")[2]] += value
    return {layer: f"{value % _WRAP:016x}" for layer, value in sorted(sums.items())}
