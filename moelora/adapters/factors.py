"""One factor of a checkpoint: its header, its configuration, and its tensor.

Everything that can be checked without values is checked before the first tensor is read, so that a
wrong name, shape or rank costs no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from moelora.operators.storage import check_held
from moelora.operators.torch_private import foreach_norm

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Stored(NamedTuple):
    """A tensor of an adapter's file or state dict, read on access.

    `dtype` is the file's name for a dtype that adapters cannot have.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | str
    read: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Factor:
    """A checked factor that has not been read yet.

    `read` returns its tensor; for experts, (E or 1, r, in) or (E or 1, out, r). `finite`: whether
    it is known to contain neither NaN nor infinities.
    """

    key: str
    dtype: torch.dtype
    rank: int
    scaling: float
    read: Callable[[], torch.Tensor]
    finite: Callable[[], bool] = bool

    def tensor(self) -> torch.Tensor:
        """Read it; ValueError if it contains NaN or infinities."""
        tensor = self.read()
        if not self.finite() and not torch.isfinite(tensor).all():
            raise ValueError(f"{self.key} holds NaN or Inf")
        return tensor


class Sides:
    """Factors found of one layer or projection, by part: an expert, or a layer that was joined to
    others; None: all parts at once."""

    def __init__(self) -> None:
        self.a: dict[int | None, Factor] = {}
        self.b: dict[int | None, Factor] = {}

    def add(self, side: Literal["A", "B"], part: int | None, factor: Factor) -> None:
        """ValueError if there is one of the same part."""
        there = self.a if side == "A" else self.b
        taken = there.get(part)
        if taken is None and (part is None) != (None in there) and there:
            taken = next(iter(there.values()))
        if taken is not None:
            raise ValueError(f"{factor.key} and {taken.key} are the same factor")
        there[part] = factor

    def check(self, shared: bool) -> None:
        """ValueError for one without its partner; `shared`: that may be of all parts."""
        for here, there in ((self.a, self.b), (self.b, self.a)):
            for part, factor in here.items():
                if part not in there and not (shared and there and None in (part, *there)):
                    raise ValueError(f"{factor.key} has no {partner(factor.key)}")

    def parts(self) -> list[int]:
        """Those with a factor of their own."""
        return sorted(part for part in {*self.a, *self.b} if part is not None)


def first_not_finite(tensors: Sequence[torch.Tensor]) -> int | None:
    """Index of the first tensor with NaN or infinities, or None.

    For many tensors of one GPU: one pass over all, and one synchronization with the host.
    """
    filled = [number for number, tensor in enumerate(tensors) if tensor.numel()]
    if not filled:
        return None
    largest = foreach_norm([tensors[number] for number in filled], float("inf"))
    finite = torch.stack(list(largest)).isfinite().tolist()
    return next((n for n, ok in zip(filled, finite, strict=True) if not ok), None)


def have_one_a(gate: torch.Tensor | None, up: torch.Tensor | None) -> bool:
    """Whether gate and up have the same A, of which one is then read; None has no factors.

    Two tensors on a GPU are not compared, which would synchronize with the host.
    """
    if gate is up:
        return True
    if gate is None or up is None:
        return False
    on_host = gate.device.type == up.device.type == "cpu"
    return on_host and gate.dtype == up.dtype and torch.equal(gate, up)


def common_dtype(factors: Sequence[Factor]) -> torch.dtype:
    """Common dtype of all, or float32 if they differ."""
    dtypes = {factor.dtype for factor in factors}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def check_shape(
    key: str, shape: tuple[int, ...], wanted: Sequence[tuple[int | None, ...]], hint: str = ""
) -> None:
    """Raise ValueError unless the shape is one of those wanted; None matches any size.

    `hint` ends the message.
    """
    for form in wanted:
        if len(form) == len(shape) and all(
            w in (None, n) for w, n in zip(form, shape, strict=True)
        ):
            return
    forms = " or ".join(str(form).replace("None", "rows") for form in dict.fromkeys(wanted))
    raise ValueError(f"{key}: shape is {shape}, wanted {forms}{hint}")


def check_dtype(key: str, dtype: torch.dtype | str) -> torch.dtype:
    """Raise ValueError for an unsupported dtype."""
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        raise ValueError(f"{key}: dtype is {dtype}, wanted float32, bfloat16 or float16")
    return dtype


def check_plain(key: str, tensor: object) -> None:
    """Raise ValueError for what is no tensor with elements in memory."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{key} is a {type(tensor).__name__}, wanted a tensor")
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
        raise ValueError(f"{key} is a sparse, nested or meta tensor, wanted a plain one")
    check_held(key, tensor)


def check_rank(what: str, rank: int, max_rank: int, name: str = "max_rank") -> None:
    """Raise ValueError for a rank that does not fit a pool.

    Checked first, since padding to all experts and slots takes memory proportional to the rank.
    """
    if rank > max_rank:
        raise ValueError(f"{what} has rank {rank}, but {name} of the pool is {max_rank}")


def partner(key: str) -> str:
    """Key of the other factor of a pair."""
    before, lora, after = key.rpartition(".lora_")
    name, _, rest = after.partition(".")
    other = {"A": "B", "B": "A"}[name[-1]]
    return f"{before}{lora}{name[:-1]}{other}" + (f".{rest}" if rest else "")
