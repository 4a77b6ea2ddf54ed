"""What backward operators have in common: options of the forward, and which gradients go where."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor

from moelora.operators.call import Factors, absent_tensor, factor_list, or_absent

P = ParamSpec("P")
T = TypeVar("T")

FactorGradients: TypeAlias = Tensor | list[Tensor] | None


class Options:
    """Keywords of a forward that its backward takes, too."""

    def __init__(self, forward: Callable[..., Any], without: Collection[str] = ("out",)) -> None:
        hints = typing.get_type_hints(forward)
        self.parameters = {
            p.name: p
            for p in inspect.signature(forward).parameters.values()
            if p.kind is p.KEYWORD_ONLY and p.name not in without
        }
        self._hints = {name: hints[name] for name in self.parameters}

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """Replace `**options` in the signature by these."""
        own = inspect.signature(function)
        taken = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        function.__signature__ = own.replace(  # type: ignore[attr-defined]
            parameters=[*taken, *self.parameters.values()]
        )
        function.__annotations__ |= self._hints
        return function

    def values(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """By name, with defaults. TypeError for an unknown or a missing one."""
        for name in given:
            if name not in self.parameters:
                raise TypeError(f"got an unexpected keyword argument {name!r}")
        for name, parameter in self.parameters.items():
            if parameter.default is parameter.empty and name not in given:
                raise TypeError(f"missing a required argument: {name!r}")
        return {name: given.get(name, p.default) for name, p in self.parameters.items()}


def requested(
    wanted: Collection[str] | None,
    present: Collection[str],
    bits: Mapping[str, int],
    pairs: Tensor | None,
    accumulate: bool,
) -> tuple[list[str], int]:
    """Gradients to return in new tensors: names of those of arguments, and their bits.

    Raises
    ------
    ValueError
        `wanted` is not names of gradients; `pairs` or `accumulate` without buffers.
    """
    if accumulate:
        raise ValueError("accumulate adds to what grads holds, which is None")
    if pairs is not None:
        raise ValueError("pairs has the indices of gradients in grads, which is None")
    if isinstance(wanted, str):
        raise ValueError(f"wanted is {wanted!r}, expected a collection of names: [{wanted!r}]")
    names = set(present if wanted is None else wanted)
    if unknown := names - set(bits):
        raise ValueError(f"wanted has {sorted(unknown)}, expected some of {list(bits)}")
    return [name for name in present if name in names], sum(bits[name] for name in names)


def buffers(
    given: Mapping[str, Any],
    factors: Collection[str],
    wanted: Collection[str] | None,
    pairs: Tensor | None,
    like: Tensor,
) -> list[Any]:
    """Gradients to write to, as operators have them.

    Raises
    ------
    ValueError
        `wanted` is given, too, or `pairs` is not of two dimensions.
    """
    if wanted is not None:
        raise ValueError("wanted and grads both say which gradients to compute: pass one")
    if pairs is not None and pairs.dim() != 2:  # operators take an empty one for none
        raise ValueError(f"pairs has shape {tuple(pairs.shape)}, expected (max_loras, E)")
    absent = absent_tensor(like)
    return [
        [_with_pairs(buffer, pairs) for buffer in factor_list(value)]
        if name in factors
        else or_absent(value, absent)
        for name, value in given.items()
    ]


def _with_pairs(buffer: Tensor, pairs: Tensor | None) -> Tensor:
    """A sparse gradient (S, rows, columns) with a dimension of adapters, as the operator has it."""
    return buffer if pairs is None or buffer.dim() != 3 else buffer.unsqueeze(0)


def in_form(found: Any, argument: Tensor | Factors | None, dtype: torch.dtype | None = None) -> Any:
    """Gradient in the form of its argument: a factor or a sequence of them, in `dtype` if given."""
    if isinstance(found, list):
        return found[0] if isinstance(argument, Tensor) else found
    return found if dtype is None else found.to(dtype)
