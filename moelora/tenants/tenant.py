"""One adapter in training: its factors, its optimizer, and what is saved of both."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from moelora.adapters.layers import Adapter, LinearPair, Pair, Projection
from moelora.adapters.pool import AdapterPool
from moelora.files import file_in
from moelora.tenants.factors import Factor, padded

STATE_FILE = "training.pt"  # beside a saved adapter, what is not in PEFT's files

# Stacks or factors (A, B) by layer and projection; "" is that of linear layers and embeddings.
Place: TypeAlias = "tuple[str, Projection | str]"


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


class Tenant:
    """An adapter that trains; made by `Tenants.add`.

    Attributes
    ----------
    name : str
    optimizer : torch.optim.Optimizer
        Its own: `torch.optim.lr_scheduler` may be attached to it.
    accumulation : int
        Batches of which gradients are summed for an update; each loss counts 1 / accumulation.
    max_norm : float or None
        Norm that its gradients are clipped to.
    pending, updates : int
        Batches accumulated since the last update, and all updates so far.
    stopped : str or None
        Why it was stopped: it is not trained any more, and its rows are those of the base model.
    error : Exception or None
        What stopped it, if an exception did.
    """

    optimizer: Optimizer

    def __init__(self, name: str, pool: AdapterPool, adapter: Adapter) -> None:
        """Of an adapter of whole pairs that `pool` has under that name."""
        self.name = name
        self.accumulation = 1
        self.max_norm: float | None = None
        self.pending = 0
        self.updates = 0
        self.stopped: str | None = None
        self.error: Exception | None = None
        self._pool = pool
        self._slot = pool.lookup(name)
        self._loaded = pool._entry(name)
        self._scalings: dict[Place, float] = {}
        self._pairs: dict[Place, tuple[Factor, Factor]] = {}
        pairs = [pair for found in adapter.experts.values() for pair in found.values()]
        folded = len({pair.scalings[0] for pair in pairs}) > 1  # into B, by the pool
        for layer, found in adapter.experts.items():
            for projection, pair in found.items():
                e = pool.layers[layer].num_experts
                a, b = pair.a.expand(e, -1, -1), pair.b.expand(e, -1, -1)
                self._take((layer, projection), a, 1, b, pair.scalings[0], folded)
        for layer, linear in adapter.linears.items():
            embedding = pool.linears[layer].embedding
            a = (linear.a.T if embedding else linear.a)[None]
            dim = 2 if embedding else 1
            self._take((layer, ""), a, dim, linear.b[None], linear.scaling, True)

    def _take(
        self, place: Place, a: Tensor, dim: int, b: Tensor, scaling: float, folded: bool
    ) -> None:
        stack_a, stack_b = stacks_of(self._pool)[place]
        self._scalings[place] = scaling
        self._pairs[place] = (
            Factor.of(stack_a, self._slot, a, dim, 1.0),
            Factor.of(stack_b, self._slot, b, 2, scaling if folded else 1.0),
        )

    def factors(self) -> list[Factor]:
        return [factor for pair in self._pairs.values() for factor in pair]

    def parameters(self) -> list[Tensor]:
        """What the optimizer has, A and B in turns, padded to the ranks of the pool."""
        return [factor.parameter for factor in self.factors()]

    def is_here(self) -> bool:
        """Whether the pool still has the adapter that was added."""
        return self.name in self._pool and self._pool._entry(self.name) is self._loaded

    def stop(self, why: str, error: Exception | None = None) -> None:
        self.stopped, self.error = why, error

    def clear(self) -> None:
        """Zero the gradients of the slot."""
        for pair in stacks_of(self._pool).values():
            for stack in pair:
                if stack.grad is not None:
                    stack.grad[self._slot].zero_()

    def adapter(self) -> Adapter:
        """The factors as they are now, float32 on the CPU."""
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
        """What continues the training beside the factors, without padding."""
        factors, state = self.factors(), self.optimizer.state_dict()
        state["state"] = {
            n: {
                key: factors[n].own(value).clone() if _is_like(value, factors[n]) else value
                for key, value in values.items()
            }
            for n, values in state["state"].items()
        }
        grads = [factor.gradient() if self.pending else None for factor in factors]
        return {
            "optimizer": state,
            "updates": self.updates,
            "pending": self.pending,
            "shapes": [tuple(factor.own(factor.parameter).shape) for factor in factors],
            "gradients": [
                None if grad is None else factor.own(grad).clone()
                for factor, grad in zip(factors, grads, strict=True)
            ],
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Undo `state`."""
        factors = self.factors()
        shapes = [tuple(factor.own(factor.parameter).shape) for factor in factors]
        if saved["shapes"] != shapes:
            raise ValueError(f"{STATE_FILE} is of factors of other shapes than the folder's")
        for n, values in saved["optimizer"]["state"].items():
            for key, value in values.items():
                if isinstance(value, Tensor) and value.shape == shapes[n]:
                    values[key] = padded(value, factors[n].parameter.shape)
        self.optimizer.load_state_dict(saved["optimizer"])
        self.updates, self.pending = saved["updates"], saved["pending"]
        for factor, grad in zip(factors, saved["gradients"], strict=True):
            if grad is not None:
                factor.put_gradient(grad)


def read_state(folder: Path) -> dict[str, Any]:
    """What `Tenants.save` wrote beside an adapter."""
    path = file_in(folder, STATE_FILE)
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no {STATE_FILE}: it was saved without optimizer")
    found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return found


def _is_like(value: object, factor: Factor) -> bool:
    return isinstance(value, Tensor) and value.shape == factor.parameter.shape
