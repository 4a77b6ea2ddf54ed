"""One factor of a checkpoint: what its header and its configuration say, and its tensor.

Everything that can be refused without numbers is, before the first tensor is read, so that a name,
a shape or a rank that is wrong costs no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Factor:
    """A factor that has been checked and not been read.

    `read` gives its tensor: of experts (E or 1, r, in) or (E or 1, out, r).
    """

    key: str
    dtype: torch.dtype
    rank: int
    scaling: float
    read: Callable[[], torch.Tensor]

    def tensor(self) -> torch.Tensor:
        """Reads it; ValueError if it holds NaN or infinities."""
        tensor = self.read()
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{self.key} holds NaN or Inf")
        return tensor


def common_dtype(factors: Sequence[Factor]) -> torch.dtype:
    """The dtype that all have, float32 if they differ."""
    dtypes = {factor.dtype for factor in factors}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def check_shape(key: str, shape: tuple[int, ...], wanted: Sequence[tuple[int | None, ...]]) -> None:
    """Raises ValueError for a shape that is none of those wanted; None fits every size."""
    for form in wanted:
        if len(form) == len(shape) and all(
            w in (None, n) for w, n in zip(form, shape, strict=True)
        ):
            return
    forms = " or ".join(str(form).replace("None", "rows") for form in dict.fromkeys(wanted))
    raise ValueError(f"{key}: shape is {shape}, wanted {forms}")


def check_dtype(key: str, dtype: torch.dtype | str) -> torch.dtype:
    """Raises ValueError for a dtype that factors do not have."""
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        raise ValueError(f"{key}: dtype is {dtype}, wanted float32, bfloat16 or float16")
    return dtype


def check_rank(what: str, rank: int, max_rank: int, name: str = "max_rank") -> None:
    """Raises ValueError for a rank that does not fit a pool.

    Padding to all experts and slots takes memory by the rank, so this comes before it.
    """
    if rank > max_rank:
        raise ValueError(f"{what} has rank {rank}, but {name} of the pool is {max_rank}")


def partner(key: str) -> str:
    """The key of the other factor of a pair."""
    before, lora, after = key.rpartition(".lora_")
    name, _, rest = after.partition(".")
    other = {"A": "B", "B": "A"}[name[-1]]
    return f"{before}{lora}{name[:-1]}{other}" + (f".{rest}" if rest else "")
