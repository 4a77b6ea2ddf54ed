"""Checks of the arguments of `Tenants.add`, before the pool is touched."""

from __future__ import annotations

from numbers import Integral, Real

import torch

LARGEST = torch.finfo(torch.float32).max


def check_arguments(
    *,
    rank: object,
    alpha: object,
    targets: object,
    lr: object,
    weight_decay: object,
    optimizer: object,
    sparse: bool,
    accumulation: object,
    max_norm: object,
) -> None:
    """ValueError for what is wrong whatever the pool is; it names the argument."""
    _count("rank", rank)
    if accumulation is not None:
        _count("accumulation", accumulation)
    if alpha is not None:
        _number("alpha", alpha, positive=True)
    _number("lr", lr, positive=sparse)  # SparseAdam refuses 0
    _number("weight_decay", weight_decay)
    if max_norm is not None:
        _number("max_norm", max_norm, positive=True)
    if targets is not None:
        listed = isinstance(targets, (list, tuple)) and targets
        if not listed or not all(isinstance(target, str) for target in listed):
            raise ValueError(f"targets is {targets!r}, wanted a list of names, None for all")
    if optimizer is not None and not callable(optimizer):
        raise ValueError(
            f"optimizer is {optimizer!r}, wanted a function of the parameters that makes one"
        )
    if sparse and (weight_decay or optimizer is not None):
        raise ValueError("sparse=True takes neither weight_decay nor optimizer")


def _count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name} is {value!r}, wanted an integer >= 1")


def _number(name: str, value: object, positive: bool = False) -> None:
    good = isinstance(value, Real) and not isinstance(value, bool) and 0 <= float(value) <= LARGEST
    if not good or (positive and value == 0):
        raise ValueError(
            f"{name} is {value!r}, wanted a finite number {'>' if positive else '>='} 0"
        )
