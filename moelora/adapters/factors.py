"""One factor of a checkpoint: the checks of its tensor, and what its configuration says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Factor:
    """A checked tensor; of experts (E or 1, r, in) or (E or 1, out, r)."""

    key: str
    tensor: torch.Tensor
    rank: int
    scaling: float


def check_shape(key: str, shape: tuple[int, ...], wanted: Sequence[tuple[int | None, ...]]) -> None:
    """Raises ValueError for a shape that is none of those wanted; None fits every size."""
    for form in wanted:
        if len(form) == len(shape) and all(
            w in (None, n) for w, n in zip(form, shape, strict=True)
        ):
            return
    forms = " or ".join(str(form).replace("None", "rows") for form in dict.fromkeys(wanted))
    raise ValueError(f"{key}: shape is {shape}, wanted {forms}")


def check_dtype(key: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{key}: dtype is {tensor.dtype}, wanted float32, bfloat16 or float16")


def check_finite(key: str, tensor: torch.Tensor) -> None:
    if not torch.isfinite(tensor).all():
        raise ValueError(f"{key} holds NaN or Inf")


def partner(key: str) -> str:
    """The key of the other factor of a pair."""
    before, lora, after = key.rpartition(".lora_")
    name, _, rest = after.partition(".")
    other = {"A": "B", "B": "A"}[name[-1]]
    return f"{before}{lora}{name[:-1]}{other}" + (f".{rest}" if rest else "")
