"""Checks of numbers among arguments: ValueError names the argument, what was got and wanted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral, Real
from typing import Any, TypeGuard

import torch

LARGEST = torch.finfo(torch.float32).max


@contextmanager
def errors_about(what: object, *kinds: type[Exception]) -> Iterator[None]:
    """Prefix the message of errors of these kinds with `what`, which they are about."""
    try:
        yield
    except kinds as error:
        kind = next(one for one in kinds if isinstance(error, one))
        raise kind(f"{what}: {error}") from error.__cause__


def check_count(name: str, value: object, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name} is {value!r}, wanted an integer >= {least}")


def is_number(value: object) -> TypeGuard[float]:
    """Whether float32 holds it; not for NaN, infinities and bool."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    number: Any = value  # an integer may be too large for float(value)
    return bool(-LARGEST <= number <= LARGEST)


def dtype_name(dtype: torch.dtype) -> str:
    """Without torch's name, as messages have it."""
    return str(dtype).removeprefix("torch.")


def check_mapping(name: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is a {type(value).__name__}, wanted a mapping")


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}, wanted True or False")


def check_number(name: str, value: object, positive: bool = False) -> None:
    if not is_number(value) or value < 0 or (positive and value == 0):
        raise ValueError(
            f"{name} is {value!r}, wanted a finite number {'>' if positive else '>='} 0"
        )
