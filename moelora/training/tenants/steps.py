"""What `Tenants.step` takes and returns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from types import CodeType, FrameType
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from moelora.operators.checks import check_number

Loss: TypeAlias = "Tensor | Callable[[], Tensor]"


class Step(NamedTuple):
    """What a call of `Tenants.step` did for one tenant.

    Attributes
    ----------
    loss : float or None
        Its loss; None if computing it raised.
    norm : float or None
        Norm of its gradients before clipping; None if they were only accumulated.
    updated : bool
        Whether its optimizer made a step.
    stopped : str or None
        Why this call stopped the tenant, None if it did not.
    """

    loss: float | None
    norm: float | None = None
    updated: bool = False
    stopped: str | None = None


def check_loss(name: str, loss: object) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"the loss of {name!r} is {what}, wanted a tensor of one element")
    if loss.is_complex():
        raise ValueError(f"the loss of {name!r} is {str(loss.dtype)[6:]}, wanted a real one")
    if not loss.requires_grad:
        raise ValueError(
            f"the loss of {name!r} requires no gradient: do its rows have its adapter?"
        )


def check_weights(weights: Mapping[str, float], losses: Mapping[str, Loss]) -> None:
    for name, weight in weights.items():
        if name not in losses:
            raise ValueError(f"weights names {name!r}, which has no loss; there are {list(losses)}")
        check_number(f"the weight of {name!r}", weight, positive=True)


def is_within(code: CodeType, instance: object) -> bool:
    """Whether this thread runs a method of an instance; the stack tells, right after any interrupt,
    too."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code and frame.f_locals["self"] is instance:
            return True
        frame = frame.f_back
    return False


def numbers(scalars: Iterable[Tensor]) -> list[float]:
    """Values of tensors of one element, with one transfer for each device."""
    found = [s.detach().reshape(()).float() for s in scalars]
    return torch.stack([s.to(found[0].device) for s in found]).tolist() if found else []


def named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
