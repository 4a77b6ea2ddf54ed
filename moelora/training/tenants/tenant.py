"""One adapter in training: its factors, its optimizer, and what is saved of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from traceback import format_exception
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SparseAdam

from moelora.adapters.folders import reading
from moelora.adapters.held import Change
from moelora.adapters.layers import Adapter
from moelora.adapters.pool import AdapterPool
from moelora.adapters.reader import Given
from moelora.adapters.stacks import whole_pairs
from moelora.operators.checks import check_count, errors_about
from moelora.operators.sparse import sparse_tensor
from moelora.operators.torch_private import sparse_parts
from moelora.training.tenants import files
from moelora.training.tenants.arguments import check_accumulation, check_max_norm
from moelora.training.tenants.factors import Factor
from moelora.training.tenants.files import STATE_FILE
from moelora.training.tenants.resumed import check_resumed, of_tenant
from moelora.training.tenants.rows import Rows
from moelora.training.tenants.trained import FORMAT, Place, Trained

ENTRIES = {"optimizer", "groups", "updates", "pending", "accumulation", "max_norm", "factors"}


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


@dataclass(frozen=True)
class Progress:
    """What is current of a tenant: float32 factors, sums of gradients, and the counts of both.

    Until `Tenant.settle`, a sparse update has only the experts that it has reached in `values`.
    """

    values: tuple[Tensor, ...]
    held: tuple[Rows | None, ...]
    pending: int = 0
    updates: int = 0


class Update(NamedTuple):
    """What was current when an update began, and the experts of each factor that it reaches."""

    values: tuple[Tensor, ...]
    updates: int
    states: dict[Any, dict[str, Any]]  # of the optimizer
    experts: list[Tensor | None]  # int64 on the device of the factor; None: all


class Tenant(Trained):
    """An adapter that trains; made by `Tenants.add`.

    Attributes
    ----------
    name : str
    optimizer : torch.optim.Optimizer
        Its own: `torch.optim.lr_scheduler` may be attached to it.
    accumulation : int
        Batches of which gradients are summed for an update; each loss counts 1 / accumulation.
        May be set between updates; ValueError unless it is 1 to 2**53.
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

    def __init__(self, name: str, pool: AdapterPool, adapter: Adapter, trainer: object) -> None:
        """Of an adapter of whole pairs that `pool` has under that name, for `trainer`."""
        self.name = name
        self.accumulation = 1
        self.max_norm = None
        self.stopped: str | None = None
        self.error: Exception | None = None
        self.ended = False  # what stopped it has been dealt with
        self._pool = pool
        self._trainer = trainer  # not itself: its pool outlives it
        slot = pool.lookup(name)
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
                Factor.of(stack_a, slot, a, dim, 1.0),
                Factor.of(stack_b, slot, b, 2, scale),
            )
        factors = self.factors()
        self._devices = [pool.places[place[0]].device for place in self._pairs for _ in "AB"]
        self._update: Update | None = None  # begun, and not yet finished by `settle`
        self.become(Progress(tuple(f.parameter.data for f in factors), (None,) * len(factors)))
        self._check_here()

    @property
    def current(self) -> Progress:
        change, after = self._staged
        return after if change.done else self._before

    def stage(self, change: Change, after: Progress) -> None:
        """Let `after` be current when `change` is done."""
        self._before = self.current
        self._staged = change, after

    def become(self, now: Progress) -> None:
        change = Change()
        change.done = True
        self._staged = change, now

    @property
    def pending(self) -> int:
        return self.current.pending

    @property
    def updates(self) -> int:
        return self.current.updates

    @property
    def accumulation(self) -> int:
        return self._accumulation

    @accumulation.setter
    def accumulation(self, value: int) -> None:
        check_accumulation(value)
        self._accumulation = value

    @property
    def max_norm(self) -> float | None:
        return self._max_norm

    @max_norm.setter
    def max_norm(self, value: float | None) -> None:
        check_max_norm(value)
        self._max_norm = value

    def is_here(self) -> bool:
        """Whether the pool still has the adapter that was added."""
        return self._pool._versions.of_trainer(self.name, self._trainer) is not None

    def is_running(self) -> bool:
        """Whether it is not stopped; one that has left the pool is stopped."""
        if self.stopped is None and not self.is_here():
            self.stop("the pool has removed or replaced its adapter")
        return self.stopped is None

    def version(self) -> int:
        """That of the pool."""
        return self._pool.version(self.name)

    def check_free(self) -> None:
        """RuntimeError while a batch holds the adapter."""
        with self._pool._versions.lock:
            if self.is_here():
                self._pool._versions.residents.check_free(self.name)

    def leave(self) -> None:
        """Free the slot, if it is this tenant's still."""
        with self._pool._versions.lock:
            if self.is_here():
                self._pool.remove(self.name)

    def disable(self) -> None:
        """Make its rows those of the base model."""
        with self._pool._versions.lock:
            if self.is_here():
                self._pool.disable(self.name)

    def _check_here(self) -> None:
        if not self.is_here():
            raise RuntimeError(f"adapter {self.name!r} has left the pool: nothing to save or train")

    def stop(self, why: str, error: Exception | None = None) -> None:
        self.stopped, self.error = why, error
        if error is not None:
            _release(error)

    def begin(self, held: Sequence[Rows | None]) -> None:
        """Give the optimizer copies of what is current to update, and gradients.

        Of a sparse tenant both, and what the optimizer keeps of each expert, are only of experts
        that have a gradient: the copies are the rows that the update replaces.
        """
        states = {key: {**state} for key, state in self.optimizer.state.items()}
        values = self.current.values
        self._update = Update(values, self.updates, states, [None] * len(values))
        for n, (factor, value, rows) in enumerate(zip(self.factors(), values, held, strict=True)):
            parameter, index = factor.parameter, None
            grad = factor.gradient(rows, self.is_sparse())
            if self.is_sparse():
                index = torch.zeros(0, dtype=torch.int64, device=value.device)
                if grad is not None:
                    indices, numbers = sparse_parts(grad)
                    index, rest = indices[0], value.shape[1:]
                    among = torch.arange(index.numel(), device=index.device)[None]
                    grad = sparse_tensor(among, numbers, (index.numel(), *rest))
                for key, kept in states.get(parameter, {}).items():
                    if isinstance(kept, Tensor) and kept.shape == value.shape:
                        self.optimizer.state[parameter][key] = kept[index]
            self._update.experts[n] = index
            parameter.data = value.clone() if index is None else value[index]
            parameter.grad = grad

    def after_update(self) -> Progress:
        """What the optimizer has made of `begin`, once it is current."""
        factors = self.factors()
        values = tuple(factor.parameter.data for factor in factors)
        return Progress(values, (None,) * len(factors), 0, self.updates + 1)

    def writer(self, progress: Progress) -> Callable[[int, torch.device], None]:
        """Writes the factors of a device, or the experts that an update has reached, to a slot."""
        assert self._update is not None
        parts = list(
            zip(self.factors(), progress.values, self._update.experts, self._devices, strict=True)
        )

        def write(slot: int, device: torch.device) -> None:
            for factor, value, experts, where in parts:
                if where == device:
                    factor.publish(value, slot, experts)

        return write

    def settle(self) -> None:
        """After `begin`, let parameters be what is current, in memory of the slot where that has
        it. If an interrupt ends it, the next call does all of it."""
        if self._update is None:
            return
        before, loaded = self._update, self._pool._versions.of_trainer(self.name, self._trainer)
        if loaded is not None:
            if (arrival := loaded.arriving()) is not None:
                arrival.wait()  # another thread may have settled the pool, on its own stream
            for factor in self.factors():
                factor.slot = loaded.slot
        if before.updates == self.updates:
            # An update that did not end may have made half of a state.
            state = self.optimizer.state
            for key in [key for key in state if key not in before.states]:
                del state[key]
            state.update(before.states)
        else:
            self._join_states(before)
        values = []
        for factor, now, old, experts in zip(
            self.factors(), self.current.values, before.values, before.experts, strict=True
        ):
            if factor.is_served():
                now = old if loaded is None else factor.view()
            elif experts is not None and now is not old:
                now = old.index_copy_(0, experts, now)
            values.append(now)
        self.become(replace(self.current, values=tuple(values)))
        for factor, value in zip(self.factors(), values, strict=True):
            factor.parameter.grad, factor.parameter.data = None, value
        self._update = None

    def _join_states(self, before: Update) -> None:
        """Put what the optimizer keeps of experts that an update has reached beside the rest."""
        for factor, old, experts in zip(self.factors(), before.values, before.experts, strict=True):
            if experts is None:
                continue
            parameter, shape = factor.parameter, (experts.numel(), *old.shape[1:])
            kept, state = before.states.get(parameter, {}), self.optimizer.state.get(parameter, {})
            for key, part in state.items():
                whole = kept.get(key)
                if isinstance(part, Tensor) and part.shape == shape and part is not whole:
                    whole = part.new_zeros(old.shape) if whole is None else whole
                    state[key] = whole.index_copy_(0, experts, part)

    def drop(self) -> None:
        """Drop the gradients that are accumulated."""
        held = (None,) * len(self.current.held)
        self.become(replace(self.current, held=held, pending=0))

    def gradients(self) -> list[Tensor | None]:
        """Accumulated float32 gradients of `parameters`."""
        held = zip(self.factors(), self.current.held, strict=True)
        return [factor.gradient(rows, self.is_sparse()) for factor, rows in held]

    def is_sparse(self) -> bool:
        """Whether its gradients are those of experts that its rows reached."""
        return isinstance(self.optimizer, SparseAdam)

    def adapter(self) -> Adapter:
        """The factors as they are now, float32 on the CPU. RuntimeError if they left the pool."""
        with self._pool._versions.lock:  # of other threads that write to the slot
            self._check_here()
            return self._adapter_of(self.current.values)

    def state(self) -> dict[str, Any]:
        """What continues the training beside the factors, by key and without padding."""
        self._check_here()
        return self._state_of(
            self.gradients(),
            updates=self.updates,
            pending=self.pending,
            accumulation=self.accumulation,
            max_norm=self.max_norm,
        )

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Undo `state`. `check_state` is to be called before, for `saved`."""
        self._load(saved)
        factors = self._keyed()
        grads = (saved["factors"][key]["gradient"] for key in factors)
        held = tuple(
            None if grad is None else factor.rows(grad)
            for factor, grad in zip(factors.values(), grads, strict=True)
        )
        counts = saved["pending"], saved["updates"]
        self.become(Progress(self.current.values, held, *counts))
        self.accumulation, self.max_norm = saved["accumulation"], saved["max_norm"]


def read_adapter(
    pool: AdapterPool, given: Given, resume: bool
) -> tuple[Adapter, dict[str, Any] | None]:
    """An adapter of a checkpoint in whole pairs and, with `resume`, the state that `Tenants.save`
    wrote beside it, checked."""

    def read(source: Any) -> tuple[Adapter, dict[str, Any] | None]:
        with of_tenant(given.name):
            saved = read_state(source) if resume else None
        return pool._reader.read(given._replace(source=source)), saved

    is_folder = isinstance(given.source, (str, Path))
    adapter, saved = reading(Path(given.source), read) if is_folder else read(given.source)
    experts = {n: whole_pairs(pool.layers[n], pairs) for n, pairs in adapter.experts.items()}
    adapter = Adapter(experts, adapter.linears)
    if saved is not None:
        with of_tenant(given.name):
            check_state(saved, pool, adapter)
            check_resumed(saved)
    return adapter, saved


def read_state(folder: Path) -> dict[str, Any]:
    """What `Tenants.save` wrote beside an adapter."""
    found, path = files.read_state(folder), folder / STATE_FILE
    if (version := found.get("format")) != FORMAT:
        raise ValueError(
            f"{path} is of format {version!r:.80}, wanted {FORMAT}: add the adapter without "
            "resume=True"
        )
    if missing := ENTRIES - found.keys():
        raise ValueError(f"{path} is damaged: it has no {sorted(missing)}")
    with errors_about(f"{path} is damaged", ValueError):
        _check_content(found)
    return found


def _check_content(found: Mapping[str, Any]) -> None:
    """ValueError for a value of another type than that of `Tenant.state`."""
    check_count("updates", found["updates"], 0)
    check_count("pending", found["pending"], 0)
    check_accumulation(found["accumulation"])
    check_max_norm(found["max_norm"])
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


def _release(error: Exception) -> None:
    """Turn the traceback of an exception that is kept, and what it is chained to, into a note.

    Frames have the losses of the step among their variables, and those of its callers.
    """
    text = "".join(format_exception(error)).rstrip()
    error.__traceback__ = error.__cause__ = error.__context__ = None
    notes: list[str] = getattr(error, "__notes__", [])
    error.__notes__ = [*notes, text]  # type: ignore[attr-defined] # before Python 3.11
