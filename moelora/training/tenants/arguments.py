"""Checks of the arguments of `Tenants` and of `Tenants.add`, before the pool is touched."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moelora.adapters.pool import AdapterPool
from moelora.operators.checks import check_count, check_flag, check_number

LARGEST_COUNT = 2**53  # of batches or updates, which optimizers and losses have as floats


def check_pool(pool: object) -> None:
    """ValueError or NotImplementedError for a pool whose adapters `Tenants` does not train."""
    if not isinstance(pool, AdapterPool):
        raise ValueError(f"pool is a {type(pool).__name__}, wanted an AdapterPool")
    if pool.shared_outer:
        raise ValueError("the pool has shared_outer=True: factors that experts share are tied")
    for name in pool.layers:
        if not isinstance(pool.layer(name)["w13_lora_a"], Tensor):
            raise ValueError(
                f"the pool has two slices of w13 of {name}, wanted one, as in PEFT's folders: "
                "pass w13_slices=1 to AdapterPool or load_adapters"
            )
    if pool.is_split:
        raise NotImplementedError(
            f"the pool is of a model that processes share by tensors, by experts or by FSDP, such "
            f"as {next(iter(pool.layers or pool.linears))}: Tenants does not train such a model; "
            "train with PEFT and moelora.integrations.peft.attach, or load the whole model in each "
            "process and pass group="
        )


def check_new(rank: object, alpha: object, targets: object) -> None:
    """ValueError for what no new adapter has, whatever the pool is; it names the argument."""
    check_count("rank", rank)
    if alpha is not None:
        check_number("alpha", alpha, positive=True)
    if targets is not None:
        listed = isinstance(targets, (list, tuple)) and targets
        if not listed or not all(isinstance(target, str) for target in listed):
            raise ValueError(f"targets is {targets!r}, wanted a list of names, None for all")


def check_settings(lr: object, weight_decay: object, optimizer: object, sparse: Any) -> None:
    """ValueError for what no optimizer of a tenant has; it names the argument."""
    check_flag("sparse", sparse)
    check_number("lr", lr, positive=sparse)  # SparseAdam refuses 0
    check_number("weight_decay", weight_decay)
    if optimizer is not None and not callable(optimizer):
        raise ValueError(
            f"optimizer is {optimizer!r}, wanted a function of the parameters that makes one"
        )
    if sparse and (weight_decay or optimizer is not None):
        raise ValueError("sparse=True takes neither weight_decay nor optimizer")


def check_max_norm(value: object) -> None:
    if value is not None:
        check_number("max_norm", value, positive=True)


def check_accumulation(value: object) -> None:
    """ValueError unless it is a number of batches that a float holds: a step divides the losses of
    all tenants at once, and would fail for all."""
    check_count("accumulation", value)
    if value > LARGEST_COUNT:  # type: ignore[operator] # an integer
        raise ValueError(f"accumulation is {value!r:.40}, wanted at most {LARGEST_COUNT} batches")
