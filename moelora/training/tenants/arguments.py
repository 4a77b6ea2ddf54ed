"""Checks of the arguments of `Tenants.add`, before the pool is touched."""

from __future__ import annotations

from moelora.operators.checks import check_count, check_number

# Beyond it updates overflow float16, or a large `eps` makes them zero.
LARGEST_SETTING = 1e6


def check_arguments(
    *,
    rank: object,
    alpha: object,
    targets: object,
    lr: object,
    weight_decay: object,
    optimizer: object,
    sparse: object,
    accumulation: object,
    max_norm: object,
) -> None:
    """ValueError for what is wrong whatever the pool is; it names the argument."""
    if not isinstance(sparse, bool):
        raise ValueError(f"sparse is {sparse!r}, wanted True or False")
    check_count("rank", rank)
    if accumulation is not None:
        check_count("accumulation", accumulation)
    if alpha is not None:
        check_number("alpha", alpha, positive=True)
    check_setting("lr", lr, positive=sparse)  # SparseAdam refuses 0
    check_setting("weight_decay", weight_decay)
    if max_norm is not None:
        check_number("max_norm", max_norm, positive=True)
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


def check_setting(name: str, value: object, positive: bool = False) -> None:
    """ValueError unless it is a number that an optimizer may be set to."""
    check_number(name, value, positive)
    if value > LARGEST_SETTING:  # type: ignore[operator] # a number
        raise ValueError(f"{name} is {value!r}, wanted at most {LARGEST_SETTING:g}")
