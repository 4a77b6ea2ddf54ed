"""One adapter in training: its factors, its optimizer, and what is saved of both."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from traceback import format_exception
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer, SparseAdam

from moelora.adapters.layers import Adapter, LinearPair, Pair, Projection
from moelora.adapters.pool import AdapterPool
from moelora.checks import check_count, check_number
from moelora.files import file_in
from moelora.tenants.factors import Factor, padded
from moelora.tenants.rows import is_sparse

STATE_FILE = "training.pt"  # beside a saved adapter, what is not in PEFT's files

# Stacks or factors (A, B) by layer and projection; "" is that of linear layers and embeddings.
Place: TypeAlias = "tuple[str, Projection | str]"
Key: TypeAlias = "tuple[str, Projection | str, str]"  # a place, and "A" or "B"
FORMAT = 1  # of STATE_FILE


def stacks_of(pool: AdapterPool) -> dict[Place, tuple[Tensor, Tensor]]:
    """All stacks of a pool of one slice."""
    found: dict[Place, tuple[Tensor, Tensor]] = {}
    for name, layer in pool.layers.items():
        of: Any = pool.layer(name)
        up = "gate_up" if layer.gated else "up"
        found[name, up] = of["w13_lora_a"], of["w13_lora_b"]
        found[name, "down"] = of["w2_lora_a"], of["w2_lora_b"]
    for name in pool.linears:
        linear = pool.linear(name)
        found[name, ""] = linear["lora_a"], linear["lora_b"]
    return found


def own_factors(pool: AdapterPool, adapter: Adapter) -> dict[Place, tuple[Tensor, Tensor, float]]:
    """(A, B, scaling) of an adapter of whole pairs as its stacks have them, without padding.

    In the order of the stacks, whatever that of the adapter is.
    """
    found: dict[Place, tuple[Tensor, Tensor, float]] = {}
    for layer, projection in stacks_of(pool):
        if projection == "":
            if (linear := adapter.linears.get(layer)) is not None:
                a = linear.a.T if pool.linears[layer].embedding else linear.a
                found[layer, ""] = a[None], linear.b[None], linear.scaling
        elif (pair := adapter.experts.get(layer, {}).get(projection)) is not None:  # type: ignore[call-overload] # not ""
            e = pool.layers[layer].num_experts
            a, b = pair.a.expand(e, -1, -1), pair.b.expand(e, -1, -1)
            found[layer, projection] = a, b, pair.scalings[0]
    return found


class Tenant:
    """An adapter that trains; made by `Tenants.add`.

    Attributes
    ----------
    name : str
    optimizer : torch.optim.Optimizer
        Its own: `torch.optim.lr_scheduler` may be attached to it.
    accumulation : int
        Batches of which gradients are summed for an update; each loss counts 1 / accumulation.
        May be set between updates; ValueError unless it is at least 1.
    max_norm : float or None
        Norm that its gradients are clipped to. May be set; ValueError unless it is above 0.
    pending, updates : int
        Batches accumulated since the last update, and all updates so far.
    stopped : str or None
        Why it was stopped: it is not trained any more, and its rows are those of the base model.
    error : Exception or None
        What stopped it, if an exception did. Its traceback, which would keep the batch in memory,
        is the last of its `__notes__`.
    """

    optimizer: Optimizer

    def __init__(self, name: str, pool: AdapterPool, adapter: Adapter) -> None:
        """Of an adapter of whole pairs that `pool` has under that name."""
        self.name = name
        self.accumulation = 1
        self.max_norm = None
        self.pending = 0
        self.updates = 0
        self.stopped: str | None = None
        self.error: Exception | None = None
        self._pool = pool
        self._slot = pool.lookup(name)
        self._loaded = pool._entry(name)
        self._scalings: dict[Place, float] = {}
        self._pairs: dict[Place, tuple[Factor, Factor]] = {}
        own, stacks = own_factors(pool, adapter), stacks_of(pool)
        folded = len({own[place][2] for place in own if place[1]}) > 1  # into B, by the pool
        for place, (a, b, scaling) in own.items():
            layer, projection = place
            dim = 2 if projection == "" and pool.linears[layer].embedding else 1
            scale = scaling if folded or projection == "" else 1.0
            stack_a, stack_b = stacks[place]
            self._scalings[place] = scaling
            self._pairs[place] = (
                Factor.of(stack_a, self._slot, a, dim, 1.0),
                Factor.of(stack_b, self._slot, b, 2, scale),
            )

    @property
    def accumulation(self) -> int:
        return self._accumulation

    @accumulation.setter
    def accumulation(self, value: int) -> None:
        check_count("accumulation", value)
        self._accumulation = value

    @property
    def max_norm(self) -> float | None:
        return self._max_norm

    @max_norm.setter
    def max_norm(self, value: float | None) -> None:
        if value is not None:
            check_number("max_norm", value, positive=True)
        self._max_norm = value

    def factors(self) -> list[Factor]:
        return [factor for pair in self._pairs.values() for factor in pair]

    def _keyed(self) -> dict[Key, Factor]:
        return {
            (*place, side): factor
            for place, pair in self._pairs.items()
            for side, factor in zip("AB", pair, strict=True)
        }

    def _groups(self) -> list[list[Key]]:
        """The factors that each group of the optimizer has."""
        keys = {id(factor.parameter): key for key, factor in self._keyed().items()}
        return [[keys[id(p)] for p in group["params"]] for group in self.optimizer.param_groups]

    def parameters(self) -> list[Tensor]:
        """What the optimizer has, A and B in turns, padded to the ranks of the pool."""
        return [factor.parameter for factor in self.factors()]

    def is_here(self) -> bool:
        """Whether the pool still has the adapter that was added."""
        return self.name in self._pool and self._pool._entry(self.name) is self._loaded

    def _check_here(self) -> None:
        if not self.is_here():
            raise RuntimeError(f"adapter {self.name!r} has left the pool: nothing to save")

    def stop(self, why: str, error: Exception | None = None) -> None:
        self.stopped, self.error = why, error
        if error is not None:
            _release(error)

    def clear(self) -> None:
        """Zero the gradients of the slot."""
        for factor in self.factors():
            factor.held = None
        for pair in stacks_of(self._pool).values():
            for stack in pair:
                if stack.grad is not None and not is_sparse(stack.grad):
                    stack.grad[self._slot].zero_()

    def is_sparse(self) -> bool:
        """Whether its gradients are those of experts that its rows reached."""
        return isinstance(self.optimizer, SparseAdam)

    def adapter(self) -> Adapter:
        """The factors as they are now, float32 on the CPU. RuntimeError if they left the pool."""
        self._check_here()
        experts: dict[str, dict[Projection, Pair]] = {}
        linears = {}
        for (layer, projection), pair in self._pairs.items():
            a, b = (f.own(f.parameter).to("cpu", copy=True) for f in pair)
            scaling = self._scalings[layer, projection]
            if projection == "":
                embedding = self._pool.linears[layer].embedding
                linears[layer] = LinearPair(a[0].T if embedding else a[0], b[0], scaling)
            else:
                experts.setdefault(layer, {})[projection] = Pair(a, b, [scaling])  # type: ignore[index] # not ""
        return Adapter(experts, linears)

    def state(self) -> dict[str, Any]:
        """What continues the training beside the factors, by key and without padding."""
        self._check_here()
        state, groups = self.optimizer.state_dict(), self._groups()
        numbers = {key: n for n, key in enumerate(chain.from_iterable(groups))}
        factors = {}
        for key, factor in self._keyed().items():
            grad = factor.gradient(self.is_sparse()) if self.pending else None
            values = state["state"].get(numbers.get(key), {})
            factors[key] = {
                "shape": tuple(factor.own(factor.parameter).shape),
                "gradient": None if grad is None else factor.own(grad).clone(),
                "state": {name: _copy_of(value, factor) for name, value in values.items()},
            }
        return {
            "format": FORMAT,
            "optimizer": type(self.optimizer).__name__,
            "groups": [
                group | {"params": keys}
                for group, keys in zip(state["param_groups"], groups, strict=True)
            ],
            "updates": self.updates,
            "pending": self.pending,
            "accumulation": self.accumulation,
            "max_norm": self.max_norm,
            "factors": factors,
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Undo `state`. `check_state` is to be called before, for `saved`."""
        check_optimizer(saved, type(self.optimizer).__name__)
        groups, factors = self._groups(), self._keyed()
        theirs = [group["params"] for group in saved["groups"]]
        if [set(keys) for keys in theirs] != [set(keys) for keys in groups]:
            raise ValueError(f"{STATE_FILE} has other groups of parameters than the optimizer")
        numbers = {key: n for n, key in enumerate(chain.from_iterable(groups))}
        states = {}
        for key, n in numbers.items():
            factor, of = factors[key], saved["factors"][key]
            states[n] = {
                name: padded(value, factor.parameter.shape)
                if isinstance(value, Tensor) and tuple(value.shape) == of["shape"]
                else value
                for name, value in of["state"].items()
            }
        self.optimizer.load_state_dict(
            {
                "state": {n: values for n, values in states.items() if values},
                "param_groups": [
                    group | {"params": [numbers[key] for key in keys]}
                    for group, keys in zip(saved["groups"], groups, strict=True)
                ],
            }
        )
        self.updates, self.pending = saved["updates"], saved["pending"]
        # Files of before these were saved have none.
        self.accumulation = saved.get("accumulation", self.accumulation)
        self.max_norm = saved.get("max_norm", self.max_norm)
        for key, factor in factors.items():
            if (grad := saved["factors"][key]["gradient"]) is not None:
                factor.put_gradient(grad)


def read_state(folder: Path) -> dict[str, Any]:
    """What `Tenants.save` wrote beside an adapter."""
    path = file_in(folder, STATE_FILE)
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no {STATE_FILE}: it was saved without optimizer")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # of the archive, of pickle, or of what it calls
        raise ValueError(f"{path} is damaged, or not by Tenants.save: {_line(error)}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        version = found.get("format") if isinstance(found, dict) else None
        raise ValueError(
            f"{path} is of format {version}, wanted {FORMAT}: add the adapter without resume=True"
        )
    if missing := {"optimizer", "groups", "updates", "pending", "factors"} - found.keys():
        raise ValueError(f"{path} is damaged: it has no {sorted(missing)}")
    try:
        _check_content(found)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    return found


def _check_content(found: Mapping[str, Any]) -> None:
    """ValueError for a value of another type than that of `Tenant.state`."""
    check_count("updates", found["updates"], 0)
    check_count("pending", found["pending"], 0)
    check_count("accumulation", found.get("accumulation", 1))
    if found.get("max_norm") is not None:
        check_number("max_norm", found["max_norm"], positive=True)
    groups, factors = found["groups"], found["factors"]
    if not isinstance(groups, list) or not all(
        isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups
    ):
        raise ValueError("groups are not those of an optimizer")
    if not isinstance(factors, dict):
        raise ValueError(f"factors is a {type(factors).__name__}, wanted a dict")
    for key, factor in factors.items():
        if not isinstance(factor, dict) or {"shape", "gradient", "state"} - factor.keys():
            got = list(factor) if isinstance(factor, dict) else type(factor).__name__
            raise ValueError(f"{key} of factors has {got}, wanted shape, gradient and state")
        shape, grad = factor["shape"], factor["gradient"]
        if not isinstance(shape, tuple):
            raise ValueError(f"shape of {key} is {shape!r}, wanted a tuple")
        if grad is not None and not (isinstance(grad, Tensor) and tuple(grad.shape) == shape):
            got = tuple(grad.shape) if isinstance(grad, Tensor) else type(grad).__name__
            raise ValueError(f"gradient of {key} is {got}, wanted a tensor of shape {shape}")
        if not isinstance(factor["state"], dict):
            kind = type(factor["state"]).__name__
            raise ValueError(f"state of {key} is a {kind}, wanted a dict")


def check_state(saved: Mapping[str, Any], pool: AdapterPool, adapter: Adapter) -> None:
    """ValueError unless what `read_state` found is of the factors of an adapter of whole pairs."""
    shapes = {
        (*place, side): tuple(tensor.shape)
        for place, (a, b, _) in own_factors(pool, adapter).items()
        for side, tensor in (("A", a), ("B", b))
    }
    theirs = {key: factor["shape"] for key, factor in saved["factors"].items()}
    for key in shapes.keys() | theirs.keys():
        if shapes.get(key) != theirs.get(key):
            raise ValueError(
                f"{STATE_FILE} is not of this adapter: {key} is {theirs.get(key)} there, and "
                f"{shapes.get(key)} in the adapter"
            )


def check_optimizer(saved: Mapping[str, Any], name: str) -> None:
    if saved["optimizer"] != name:
        raise ValueError(f"{STATE_FILE} is of the optimizer {saved['optimizer']}, not of {name}")


def _release(error: Exception) -> None:
    """Turn the traceback of an exception that is kept, and what it is chained to, into a note.

    Frames have the losses of the step among their variables, and those of its callers.
    """
    text = "".join(format_exception(error)).rstrip()
    error.__traceback__ = error.__cause__ = error.__context__ = None
    notes: list[str] = getattr(error, "__notes__", [])
    error.__notes__ = [*notes, text]  # type: ignore[attr-defined] # before Python 3.11


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n", 1)[0]


def _copy_of(value: Any, factor: Factor) -> Any:
    """A value of an optimizer's state, without padding if it is of the factor's shape."""
    if not isinstance(value, Tensor):
        return value
    return (factor.own(value) if value.shape == factor.parameter.shape else value).clone()
