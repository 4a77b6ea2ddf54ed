"""Checks of what a tenant resumes: one bad number or index would stop every tenant of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from moelora.operators.checks import check_number, dtype_name, errors_about, is_number
from moelora.operators.torch_private import sparse_parts
from moelora.training.tenants.arguments import LARGEST_COUNT
from moelora.training.tenants.files import STATE_FILE
from moelora.training.tenants.rows import is_sparse

# Per optimizer of `Tenants.add`, and others that torch has: moments of the shape of the factor.
MOMENTS = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"}
SQUARES = {"exp_avg_sq", "max_exp_avg_sq"}
ADAM = {"step", "exp_avg", "exp_avg_sq"}  # of AdamW and SparseAdam, after an update


def of_tenant(name: str) -> AbstractContextManager[None]:
    """Errors say whose state they are about."""
    return errors_about(f"tenant {name!r}", FileNotFoundError, ValueError)


def check_resumed(saved: Mapping[str, Any]) -> None:
    """Check gradients, moments and settings of an optimizer as `Tenant.state` returns them.

    Parameters
    ----------
    saved : mapping
        `groups`: settings of each group of parameters. `factors`: by key, `shape` as a tuple,
        `gradient` (None, or float32 of this shape, dense or sparse in its first dimension) and
        `state`, the optimizer's by name.

    Raises
    ------
    ValueError
        A tensor has another shape or dtype, is not contiguous or not finite; an index is not one
        of the experts, or not above the one before; a setting is out of range. The message names
        the key.
    """
    names = list(saved["factors"])
    for number, group in enumerate(saved["groups"]):
        for key, value in group.items():
            if key != "params":
                _check_setting(f"{key} of group {number}", key, value)
        if unknown := [key for key in group["params"] if key not in names]:
            raise ValueError(f"params of group {number} has {unknown[0]!r:.80}, which is no factor")
    for key, factor in saved["factors"].items():
        where = _named(key)
        if factor["gradient"] is not None:
            _check_gradient(f"the gradient of {where}", factor["gradient"], factor["shape"])
        for entry, value in factor["state"].items():
            _check_state(f"{entry} of {where}", entry, value, factor["shape"])


def check_adam(saved: Mapping[str, Any], optimizer: Optimizer) -> None:
    """ValueError unless AdamW or SparseAdam of all factors can continue with a checked state."""
    check_optimizer(saved, optimizer)
    check_groups(saved, [list(saved["factors"])], optimizer)
    kept = ADAM | ({"max_exp_avg_sq"} if saved["groups"][0].get("amsgrad") else set())
    for key, factor in saved["factors"].items():
        if factor["state"] and (missing := kept - factor["state"].keys()):
            raise ValueError(f"{STATE_FILE} has no {min(missing)} of {_named(key)}")


def check_optimizer(saved: Mapping[str, Any], optimizer: Optimizer) -> None:
    if saved["optimizer"] != (name := type(optimizer).__name__):
        raise ValueError(
            f"{STATE_FILE} is of the optimizer {saved['optimizer']!s:.80}, not of {name}: pass "
            "sparse= or optimizer= as before save, or add the adapter without resume=True"
        )


def check_groups(saved: Mapping[str, Any], keys: list[list[Any]], optimizer: Optimizer) -> None:
    """ValueError unless the groups are those of an optimizer that has `keys` in its groups, with
    its settings. Flags may be missing: an optimizer has values for those of later versions."""
    if [set(group["params"]) for group in saved["groups"]] != [set(of_group) for of_group in keys]:
        raise ValueError(f"{STATE_FILE} has other groups of parameters than the optimizer")
    for number, group in enumerate(saved["groups"]):
        for key, default in optimizer.defaults.items():
            if isinstance(default, bool):
                if not isinstance(group.get(key, default), (bool, NoneType)):
                    raise ValueError(
                        f"{key} of group {number} is {group[key]!r:.80}, wanted True or False"
                    )
            elif default is not None and key not in group:
                raise ValueError(
                    f"group {number} in {STATE_FILE} has no {key}, as {type(optimizer).__name__} "
                    "has: add the adapter without resume=True"
                )


def _named(key: Any) -> str:
    return key if isinstance(key, str) else ".".join(part for part in key if part)


def _check_setting(what: str, key: str, value: Any) -> None:
    if key in ("lr", "weight_decay", "eps", "initial_lr"):
        # As the constructors of torch's optimizers. One that makes an update overflow stops its
        # tenant, in the step.
        check_number(what, value.item() if _is_scalar(value) else value)
    elif key == "betas":
        if not _are_betas(value):
            raise ValueError(f"{what} is {value!r}, wanted two numbers from 0 to below 1")
    else:
        _check_plain(what, value)


def _are_betas(value: Any) -> bool:
    return (
        isinstance(value, Sequence)
        and len(value) == 2
        and all(is_number(beta) and 0 <= beta < 1 for beta in value)
    )


def _check_gradient(what: str, grad: Tensor, shape: tuple[int, ...]) -> None:
    values = grad
    if is_sparse(grad):
        index, values = sparse_parts(grad)
        if grad.sparse_dim() != 1 or tuple(values.shape[1:]) != shape[1:]:
            raise ValueError(
                f"{what} is sparse in {grad.sparse_dim()} dimensions with values "
                f"{tuple(values.shape)}, wanted the first dimension of {shape}"
            )
        _check_experts(what, index[0], shape[0])
    elif tuple(grad.shape) != shape:
        raise ValueError(f"{what} is {tuple(grad.shape)}, wanted {shape}")
    _check_tensor(what, values, (torch.float32,))
    if not bool(values.isfinite().all()):
        raise ValueError(f"{what} has numbers that are not finite")


def _check_experts(what: str, index: Tensor, experts: int) -> None:
    outside = index[(index < 0) | (index >= experts)]
    if outside.numel():
        raise ValueError(
            f"{what} has index {int(outside[0])} of an expert, wanted 0 to {experts - 1}"
        )
    if bool((index[1:] <= index[:-1]).any()):
        raise ValueError(f"{what} has indices out of order or twice, wanted each expert once")


def _check_state(what: str, entry: str, value: Any, shape: tuple[int, ...]) -> None:
    if entry == "step":
        count = value.item() if _is_scalar(value) else value
        if not is_number(count) or not 0 <= count <= LARGEST_COUNT or count != math.floor(count):
            got = f"a tensor of shape {tuple(count.shape)}" if isinstance(count, Tensor) else count
            raise ValueError(f"{what} is {got!s:.80}, wanted a number of updates")
    elif entry in MOMENTS and value is not None:
        if not isinstance(value, Tensor) or tuple(value.shape) != shape:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{what} is {got}, wanted a tensor of shape {shape}")
        _check_tensor(what, value, (torch.float32, torch.bfloat16, torch.float16))
        if entry in SQUARES and bool((value < 0).any()):
            raise ValueError(f"{what} has negative numbers, wanted a mean of squares")
    else:
        _check_plain(what, value)


def _check_plain(what: str, value: Any) -> None:
    """A value of a setting or state that only its optimizer knows."""
    if isinstance(value, Tensor):
        _check_tensor(what, value)
    elif isinstance(value, (list, tuple)):
        for one in value:
            _check_plain(what, one)
    elif isinstance(value, Mapping):
        for key, one in value.items():
            _check_plain(f"{key} in {what}", one)
    elif not (value is None or isinstance(value, (bool, str)) or is_number(value)):
        raise ValueError(f"{what} is {value!r:.80}, wanted a finite number, text or a tensor")


def _check_tensor(what: str, value: Tensor, dtypes: tuple[torch.dtype, ...] = ()) -> None:
    """Dense, real, without NaN, and with memory for each of its numbers."""
    dtype = dtype_name(value.dtype)
    if dtypes and value.dtype not in dtypes:
        raise ValueError(f"{what} is {dtype}, wanted {' or '.join(map(dtype_name, dtypes))}")
    if value.layout != torch.strided or value.is_quantized or value.is_complex():
        raise ValueError(f"{what} is {dtype} in layout {value.layout}, wanted real and strided")
    if not value.is_contiguous():
        raise ValueError(f"{what} has strides {value.stride()}, wanted contiguous memory")
    if value.is_floating_point() and bool(value.isnan().any()):
        raise ValueError(f"{what} has NaN")


def _is_scalar(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and not value.is_quantized
        and value.numel() == 1
    )
