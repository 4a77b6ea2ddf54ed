"""Checks of the arguments of `Tenants.add`, before the pool is touched."""

from __future__ import annotations

from moelora.operators.checks import check_count, check_number

LARGEST_COUNT = 2**53  # of batches or updates, which optimizers and losses have as floats


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
        check_accumulation(accumulation)
    if alpha is not None:
        check_number("alpha", alpha, positive=True)
    check_number("lr", lr, positive=sparse)  # SparseAdam refuses 0
    check_number("weight_decay", weight_decay)
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


def check_accumulation(value: object) -> None:
    """ValueError unless it is a number of batches that a float holds: a step divides the losses of
    all tenants at once, and would fail for all."""
    check_count("accumulation", value)
    if value > LARGEST_COUNT:  # type: ignore[operator] # an integer
        raise ValueError(f"accumulation is {value!r:.40}, wanted at most {LARGEST_COUNT} batches")
