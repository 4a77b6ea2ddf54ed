"""An adapter in one slot of all `MultiLoraExperts` of a model: opened, moved to the host, saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from moelora.adapters import checkpoint
from moelora.adapters.layers import Adapter, LinearLayer, MoELayer, Projection
from moelora.adapters.shards import whole
from moelora.adapters.stacks import whole_pairs
from moelora.adapters.write import peft_tensors
from moelora.operators.checks import check_count, check_number
from moelora.operators.torch_private import tree_flatten, tree_unflatten
from moelora.training.multi import FACTORS, MultiLoraExperts
from moelora.training.tenants import files
from moelora.training.tenants.factors import Factor, padded
from moelora.training.tenants.new import new_adapter
from moelora.training.tenants.trained import Trained, host_copies, like, padded_like

Source: TypeAlias = "str | Path | Mapping[str, Tensor]"


@dataclass(frozen=True)
class Held:
    """An adapter in host memory: `LoraSlot.take` returns it, `LoraSlot.put` takes it, repeatedly.

    If the slot is on a GPU, its tensors are in pinned memory, which is not swapped out, and which
    torch keeps for later copies.

    Attributes
    ----------
    adapter : Adapter
        Factors without padding, float32.
    state : dict or None
        Optimizer and accumulated gradients, as `Tenants.save` writes them.
    """

    adapter: Adapter
    state: dict[str, Any] | None


class LoraSlot(Trained):
    """One slot of all `MultiLoraExperts` of a model: an adapter that trains.

    Parameters
    ----------
    model : nn.Module
        With `MultiLoraExperts` in it, or one itself. Names of layers are those of these modules.
    slot : int

    Raises
    ------
    ValueError
        The model has no such module, or one has no such slot.

    Notes
    -----
    Parameters belong to the slot, whatever adapter is in it: an optimizer of `parameters()` serves
    the adapters that come and go, or each has its own. With FSDP2 all ranks call each method.
    """

    linears: Mapping[str, LinearLayer] = {}
    max_linear_rank = 0

    def __init__(self, model: nn.Module, slot: int) -> None:
        check_count("slot", slot, 0)
        self.slot = slot
        self._modules = {
            name or "experts": module
            for name, module in model.named_modules()
            if isinstance(module, MultiLoraExperts)
        }
        if not self._modules:
            raise ValueError(f"{type(model).__name__} has no MultiLoraExperts")
        for name, module in self._modules.items():
            if slot >= len(module.slots):
                last = len(module.slots) - 1
                raise ValueError(f"slot is {slot}, wanted 0 to {last}, those of {name}")
        self.layers: Mapping[str, MoELayer] = {
            n: replace(m.layer, name=n) for n, m in self._modules.items()
        }
        self.max_rank = min(module.max_rank for module in self._modules.values())

    @property
    def is_open(self) -> bool:
        return any(rank > 0 for rank, _ in self._ranks_and_scalings())

    def open(
        self,
        source: Source | None = None,
        *,
        rank: int = 8,
        alpha: float | None = None,
        config: Mapping[str, Any] | None = None,
        generator: torch.Generator | None = None,
    ) -> LoraSlot:
        """Begin with a new adapter, or one of a checkpoint. Returns the slot.

        Parameters
        ----------
        source : path or state dict, optional
            A PEFT folder, or tensors with `config`; absent: a new adapter of `rank` and `alpha`
            (absent: twice the rank), A uniform within 1 / sqrt(in), drawn by `generator`, B 0.

        Raises
        ------
        ValueError, FileNotFoundError
            The slot is open, or the adapter does not fit; nothing is written.
        """
        self._check_free()
        if source is None:
            check_count("rank", rank)
            if alpha is not None:
                check_number("alpha", alpha, positive=True)
            adapter = new_adapter(self, rank, alpha, None, generator)
        else:
            layers = list(self.layers.values())
            adapter = checkpoint.load(source, config, layers, max_rank=self.max_rank)
        self._write(adapter)
        return self

    def put(self, held: Held, optimizer: Optimizer | None = None) -> None:
        """Bring back what `take` or `read` returned, into this slot, whichever it was in.

        Copies from pinned memory are launched on the current stream: what is launched there later
        sees them, and `held` may be dropped at once. Its tensors may be read and put elsewhere;
        before they are written, the stream must be synchronized.

        Parameters
        ----------
        held : Held
        optimizer : Optimizer, optional
            Of `parameters()`; gets the state that was taken.

        Raises
        ------
        ValueError
            The slot is open, the adapter does not fit it, or the state is of another optimizer;
            nothing is written.
        """
        self._check_free()
        if optimizer is not None and held.state is None:
            raise ValueError("held has no state of an optimizer: take(optimizer) has")
        self._write(held.adapter)
        if held.state is None:
            return
        try:
            if optimizer is not None:
                self._of_slot(optimizer)
                self._load(held.state)
        except Exception:
            self.close()
            raise
        for key, factor in self._keyed().items():
            of = held.state["factors"].get(key)  # None: of a layer that the adapter lacks
            if of is not None and of["gradient"] is not None:
                factor.parameter.grad = padded_like(factor.parameter, of["gradient"])

    def take(self, optimizer: Optimizer | None = None) -> Held:
        """`read`, then `close`, and drop the state that `optimizer` has of the slot."""
        held = self.read(optimizer)
        if optimizer is not None:
            for parameter in self.parameters():
                optimizer.state.pop(parameter, None)
        self.close()
        return held

    def read(self, optimizer: Optimizer | None = None) -> Held:
        """The adapter in host memory, with the state of an optimizer of its parameters and its
        accumulated gradients. Returns when the host has all of it. ValueError if the slot is not
        open."""
        if optimizer is None:
            return Held(self._now(), None)
        self._refresh()
        self._of_slot(optimizer)
        factors, parameters = self.factors(), self.parameters()
        values = [f.own(whole(p.detach())) for f, p in zip(factors, parameters, strict=True)]
        grads = [None if p.grad is None else whole(p.grad) for p in parameters]
        counts = {"updates": 0, "pending": int(any(g is not None for g in grads))}
        state = self._state_of(grads, whole, **counts, accumulation=1, max_norm=None)
        leaves, spec = tree_flatten((values, state))
        places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        for n, copy in zip(places, host_copies([leaves[n] for n in places]), strict=True):
            leaves[n] = copy
        values, state = tree_unflatten(leaves, spec)
        return Held(self._adapter_of(values, host=False), state)

    def save(
        self, folder: str | Path, optimizer: Optimizer | None = None, *, base: str | None = None
    ) -> None:
        """Write a PEFT folder of the experts, with `optimizer` for `Tenants.add(resume=True)`.

        Parameters and errors are those of `Tenants.save`; `base` is its `base_model`. With FSDP2
        the process of rank 0 writes.
        """
        held = self.read(optimizer)
        if hasattr(self.parameters()[0], "placements") and torch.distributed.get_rank() > 0:
            return
        files.save(folder, held.adapter, held.state, self.layers, {}, base)

    def tensors(self, *, host: bool = True) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The adapter as (config, tensors) of a PEFT folder, as `update_adapters` takes it.

        Parameters
        ----------
        host : bool
            Copies in host memory; False: on the slot's device, views where that is possible, for
            an engine in the same process, which copies them itself.

        Raises
        ------
        ValueError
            The slot is not open.
        """
        return peft_tensors(self._now(host), self.layers, {}, copy=host)

    def close(self) -> None:
        """Free the slot: its rows are those of the base model, its parameters 0. Optimizers keep
        their state: `take(optimizer)` drops it."""
        with torch.no_grad():
            for module in self._modules.values():
                for parameter in module.slots[self.slot].parameters():
                    parameter.zero_()
                    parameter.grad = None
                module.lora_ranks[self.slot].fill_(0)  # type: ignore[index] # a buffer

    # -- inside --

    def _ranks_and_scalings(self) -> list[tuple[float, float]]:
        """Rank and scaling of each layer, by one transfer."""
        modules = list(self._modules.values())
        device = modules[0].lora_ranks.device
        numbers = [
            getattr(m, name)[self.slot].to(device, torch.float32)
            for m in modules
            for name in ("lora_ranks", "lora_scalings")
        ]
        found = torch.stack(numbers).tolist()
        return list(zip(found[::2], found[1::2], strict=True))

    def _refresh(self) -> None:
        """Set the factors by the ranks and scalings in the layers; ValueError if it is not open."""
        numbers = self._ranks_and_scalings()
        if not any(rank > 0 for rank, _ in numbers):
            raise ValueError(f"slot {self.slot} has no adapter: open it, or put one")
        self._set_pairs(numbers)

    def _now(self, host: bool = True) -> Adapter:
        self._refresh()
        return self._adapter_of([whole(p.detach()) for p in self.parameters()], host)

    def parameters(self) -> list[Tensor]:
        """Those of the slot in all layers, for an optimizer: the same ones whatever is in it."""
        modules = self._modules.values()
        return [factor for m in modules for _, *pair in self._factors_of(m) for factor in pair]

    def _factors_of(self, module: MultiLoraExperts) -> list[tuple[Projection, Tensor, Tensor]]:
        """The projections of a layer, with A and B of the slot."""
        a13, b13, a2, b2 = (getattr(module.slots[self.slot], name) for name in FACTORS)
        return [("gate_up" if module.layer.gated else "up", a13, b13), ("down", a2, b2)]

    def _of_slot(self, optimizer: Optimizer) -> None:
        others = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if others != set(map(id, self.parameters())):
            raise ValueError(
                f"optimizer has other parameters than slot {self.slot}, wanted one of parameters()"
            )
        self.optimizer = optimizer

    def _check_free(self) -> None:
        if self.is_open:
            raise ValueError(f"slot {self.slot} has an adapter: take it or close the slot before")

    def _set_pairs(self, numbers: list[tuple[float, float]]) -> None:
        """Set the factors and scalings that `Trained` reads, from each layer's rank and scaling."""
        self._pairs, self._scalings = {}, {}
        for (name, module), (rank, scaling) in zip(self._modules.items(), numbers, strict=True):
            for projection, a, b in self._factors_of(module):
                one, two = ((f, self.slot, f, 1.0, int(rank)) for f in (a, b))
                self._pairs[name, projection] = Factor(*one, 1), Factor(*two, 2)
                self._scalings[name, projection] = scaling

    @torch.no_grad()
    def _write(self, adapter: Adapter) -> None:
        """Write an adapter to the slot; what it lacks becomes 0. ValueError before any write."""
        if others := [*(adapter.experts.keys() - self.layers.keys()), *adapter.linears]:
            raise ValueError(
                f"the adapter has factors of {others[0]}, wanted those of {list(self.layers)}"
            )
        found = {n: whole_pairs(self.layers[n], pairs) for n, pairs in adapter.experts.items()}
        for name, pairs in found.items():
            layer = self.layers[name]
            for projection, pair in pairs.items():
                sizes, experts = layer.shape(projection), {len(pair.a), len(pair.b)}
                fits = (pair.a.shape[-1], pair.b.shape[-2]) == sizes
                if not fits or not experts <= {1, layer.num_experts}:
                    raise ValueError(
                        f"the adapter's {projection} of {name} is {tuple(pair.a.shape)} and "
                        f"{tuple(pair.b.shape)}, wanted {sizes[0]} columns of A, {sizes[1]} rows "
                        f"of B and {layer.num_experts} experts"
                    )
        rank = max((pair.rank for pairs in found.values() for pair in pairs.values()), default=1)
        if rank > self.max_rank:
            raise ValueError(f"the adapter has rank {rank}, wanted at most {self.max_rank}")
        scalings = {}
        for name, pairs in found.items():
            scalings[name], *others = {pair.scalings[0] for pair in pairs.values()}
            if others:
                raise ValueError(f"{name} has several scalings, wanted one for both projections")
        for parameter in self.parameters():
            parameter.grad = None  # zeros, of backwards of other slots
            parameter.zero_()  # an optimizer with moments may have stepped a free slot
        numbers: list[tuple[float, float]] = []
        for name, module in self._modules.items():
            for projection, *own in self._factors_of(module):
                if (pair := found.get(name, {}).get(projection)) is None:
                    continue
                for parameter, value in zip(own, (pair.a, pair.b), strict=True):
                    value = value.to(parameter.device, torch.float32, non_blocking=True)
                    value = value.expand(module.layer.num_experts, -1, -1)
                    if hasattr(parameter, "placements"):
                        parameter.copy_(like(parameter, padded(value, parameter.shape)))
                    else:
                        parameter[tuple(map(slice, value.shape))].copy_(value)
            ranks = [pair.rank for pair in found.get(name, {}).values()]
            numbers.append((max(ranks, default=rank), scalings.get(name, 1.0)))
            module.lora_ranks[self.slot].fill_(numbers[-1][0])  # type: ignore[index] # buffers
            module.lora_scalings[self.slot].fill_(numbers[-1][1])  # type: ignore[index]
        self._set_pairs(numbers)
