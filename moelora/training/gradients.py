"""What backward operators have in common: options of the forward, and which gradients go where."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, ParamSpec, TypeAlias, TypeVar

from torch import Tensor

from moelora.operators.call import absent_tensor, factor_list, or_absent, run
from moelora.operators.schema import Backward, in_order

P = ParamSpec("P")
T = TypeVar("T")
G = TypeVar("G", bound="Any")  # a named tuple of gradients by argument

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


def gradients(
    backward: Backward,
    kind: type[G],
    given: Mapping[str, Any],
    arguments: Mapping[str, Any],
    *,
    wanted: Collection[str] | None,
    float32: bool,
    grads: G | None,
    accumulate: bool,
    pairs: Tensor | None,
) -> G:
    """Run a backward: `grads`, or a `kind` with new tensors.

    `given` are the operator's arguments by name, but for those that say what is wanted;
    `arguments` those of the forward that have gradients, in the form of the caller. Others are
    those of the public backwards.

    Raises
    ------
    ValueError
        `wanted` is not names of gradients, or beside `grads`; `pairs` is not of two dimensions;
        `pairs` or `accumulate` without `grads`.
    """
    bits = backward.bits
    if grads is not None:
        if wanted is not None:
            raise ValueError("wanted and grads both say which gradients to compute: pass one")
        if pairs is not None and pairs.dim() != 2:  # operators take an empty one for none
            raise ValueError(f"pairs has shape {tuple(pairs.shape)}, expected (max_loras, E)")
        absent = absent_tensor(given["grad_out"])
        to: dict[str, Any] = {"grad_pairs": or_absent(pairs, absent), "accumulate": accumulate}
        for name, value in grads._asdict().items():
            to[f"grad_{name}"] = (
                # A sparse one (S, rows, columns) gets a dimension of adapters.
                [b if pairs is None or b.dim() != 3 else b.unsqueeze(0) for b in factor_list(value)]
                if name in backward.factors
                else or_absent(value, absent)
            )
        op = backward.op("_out")
        run(op, *in_order(op, {**given, **to}))
        return grads
    if accumulate:
        raise ValueError("accumulate adds to what grads holds, which is None")
    if pairs is not None:
        raise ValueError("pairs has the indices of gradients in grads, which is None")
    if isinstance(wanted, str):
        raise ValueError(f"wanted is {wanted!r}, expected a collection of names: [{wanted!r}]")
    present = [n for n in backward.places if n in arguments and factor_list(arguments[n])]
    names = set(present if wanted is None else wanted)
    if unknown := names - set(bits):
        raise ValueError(f"wanted has {sorted(unknown)}, expected some of {list(bits)}")
    op, sum_of_bits = backward.op(), sum(bits[name] for name in names)
    found = run(op, *in_order(op, {**given, "wanted": sum_of_bits, "float32": float32}))
    results = backward.by_argument(found, given)
    return kind(**{n: _in_form(n, results[n], arguments[n]) for n in present if n in names})


def _in_form(name: str, grad: Any, argument: Any) -> Any:
    """A gradient in the form of its argument: a factor or a sequence; weights in their dtype."""
    if isinstance(grad, list):
        return grad[0] if isinstance(argument, Tensor) else grad
    return grad.to(argument.dtype) if name == "topk_weights" else grad
