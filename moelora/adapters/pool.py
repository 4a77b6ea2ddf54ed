"""Adapter slots for all layers of a model, allocated once and filled while serving.

Expert layers have the stacks that `fused_experts_lora` reads (`stacks.py`), linear layers and
embeddings those that a delta reads (`linears.py`); all share `adapter_enabled`, (max_loras,).
Everything is allocated once and only written in place, so that captured CUDA graphs see later
adapters. A load is staged and checked outside the stacks; if it fails, the pool is unchanged.

A signal may raise between any two statements. So a name is registered in a single step, and only
while its slot holds all factors: it is removed before the first of them is overwritten and added
after the last.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict

import torch

from moelora.adapters import checkpoint
from moelora.adapters.checkpoint import Own
from moelora.adapters.columns import Layout
from moelora.adapters.held import Held, Loaded, Retired
from moelora.adapters.layers import Adapter, LinearLayer, MoELayer
from moelora.adapters.linears import LinearFactors, LinearStacks, StagedLinears
from moelora.adapters.stacks import DTYPES, ExpertStacks, Place, StagedExperts

BASE = "__base__"  # PEFT's name for rows without an adapter


def check_name(name: object) -> None:
    """Raises ValueError for what no adapter can be called."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"name is {name!r}, wanted a non-empty string")
    if name == BASE:
        raise ValueError(f"name is {name!r}, which stands for no adapter; wanted another one")


@dataclass
class _Staged:
    """A checked adapter in the dtypes of its stacks."""

    experts: StagedExperts
    linears: StagedLinears


class _Tables(NamedTuple):
    """Tensors shared by all layers of a device, (max_loras,) each; the first two for experts."""

    ranks: torch.Tensor
    scalings: torch.Tensor
    enabled: torch.Tensor


class LayerFactors(TypedDict):
    """Keyword arguments of `fused_experts_lora`: the adapters of one layer."""

    w13_lora_a: torch.Tensor | tuple[torch.Tensor, ...]
    w13_lora_b: torch.Tensor | tuple[torch.Tensor, ...]
    w2_lora_a: torch.Tensor
    w2_lora_b: torch.Tensor
    lora_ranks: torch.Tensor
    lora_scalings: torch.Tensor
    adapter_enabled: torch.Tensor


class AdapterPool:
    """Stacked LoRA adapters of the layers of one model, by name, in `max_loras` slots.

    Parameters
    ----------
    layers : sequence of MoELayer
        Expert layers, in any order.
    max_loras : int
        Number of slots. Adding to a full pool evicts the least recently used adapter that is
        neither pinned nor held.
    max_rank : int
        Maximum rank of experts' factors.
    dtype : torch.dtype
        Dtype of the factors; must be that of the activations.
    device : torch.device or str
        Device of the stacks.
    w13_slices : {2, 1}
        2 keeps gate and up as two pairs (the natural form of per-expert checkpoints), 1 as one
        pair whose A both share (the natural form of PEFT's `target_parameters`: half the shrink
        work and memory). Either pool takes either checkpoint: two pairs in one slice need the sum
        of their ranks. Layers without a gate or with interleaved rows always have one slice.
    shared_outer : bool
        A of gate and up and B of down have no expert dimension (SGLang's
        `experts_shared_outer_loras`, vLLM's `enable_moe_shared_loras`); an adapter that has its
        own per expert is refused. Without it shared factors are copied to every expert.
    linears : sequence of LinearLayer
        Linear layers and embeddings to allocate slots for, too.
    max_linear_rank : int, optional
        Maximum rank of their factors; by default `max_rank`.
    places : mapping, optional
        Layers, by name, on another device or in another dtype: (device, dtype) of each.
    others : mapping, optional
        Layers of the model that the pool does not cover, with the reason. An adapter that has
        factors of one is refused with this reason, instead of for an unknown key.
    own : callable, optional
        Returns the weight of a linear layer or embedding of the model by name, None if it has no
        plain one. An adapter may contain such a weight next to its factors, as it was in training;
        it is refused unless that is the model's own.

    Notes
    -----
    Every method may be called from any thread. An adapter in use by `hold` or `keep` is neither
    evicted, removed nor replaced; the slots that `mapping` and `lookup` return are only valid as
    long as the adapter is held or pinned, or nobody adds adapters meanwhile.
    """

    def __init__(
        self,
        layers: Sequence[MoELayer],
        max_loras: int,
        max_rank: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        w13_slices: Literal[1, 2] = 2,
        shared_outer: bool = False,
        linears: Sequence[LinearLayer] = (),
        max_linear_rank: int | None = None,
        places: Mapping[str, tuple[torch.device | str, torch.dtype]] | None = None,
        others: Mapping[MoELayer | LinearLayer, str] | None = None,
        own: Own | None = None,
    ):
        every: list[MoELayer | LinearLayer] = [*layers, *linears]
        names = [layer.name for layer in every]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"layers are {names}, wanted at least one and no name twice")
        linear_rank = max_rank if max_linear_rank is None else max_linear_rank
        if max_loras < 1 or max_rank < 1 or linear_rank < 1:
            raise ValueError(
                f"max_loras is {max_loras}, max_rank is {max_rank}, max_linear_rank is "
                f"{linear_rank}, wanted >= 1"
            )
        self.places = {name: Place(torch.device(device), dtype) for name in names}
        for name, (where, stored) in (places or {}).items():
            if name not in self.places:
                raise ValueError(f"places names {name}, which is none of the layers")
            self.places[name] = Place(torch.device(where), stored)
        for stored in (dtype, *(place.dtype for place in self.places.values())):
            if stored not in DTYPES:
                raise ValueError(f"dtype is {stored}, wanted one of {DTYPES}")
        if w13_slices not in (1, 2):
            raise ValueError(f"w13_slices is {w13_slices}, wanted 1 or 2")
        self.layers = {layer.name: layer for layer in layers}
        self.linears = {layer.name: layer for layer in linears}
        self.max_loras = max_loras
        self.max_rank = max_rank
        self.max_linear_rank = linear_rank
        self.dtype = dtype
        self.device = torch.device(device)
        self.devices = tuple(
            dict.fromkeys([self.device, *(place.device for place in self.places.values())])
        )
        self.shared_outer = shared_outer
        self._own = own
        self._others = {layer.name: (layer, why) for layer, why in (others or {}).items()}
        self._experts = ExpertStacks(
            self.layers, max_loras, max_rank, self.places, w13_slices, shared_outer
        )
        self._linears = LinearStacks(self.linears, max_loras, linear_rank, self.places)
        self._tables = {where: _tables(max_loras, where) for where in self.devices}
        self.lora_ranks, self.lora_scalings, self.adapter_enabled = self._tables[self.device]
        self._loaded: OrderedDict[str, Loaded] = OrderedDict()  # least recently used first
        self._retired = Retired()
        self._lock = threading.RLock()

    # -- adapters in and out --

    def add(
        self,
        name: str,
        source: str | Path | Mapping[str, torch.Tensor] | Adapter,
        *,
        config: Mapping[str, Any] | None = None,
        layout: Layout | None = None,
        pin: bool = False,
        replace: bool = False,
    ) -> int:
        """Load an adapter; if its checkpoint is refused, the pool is unchanged.

        If an interrupt (Ctrl-C) ends the call, `name` is either completely loaded or not; the
        adapter that it replaces or evicts may be gone, all others are unchanged.

        Parameters
        ----------
        name : str
            Name of the adapter.
        source : path, state dict or Adapter
            A PEFT folder (`adapter_config.json`, `adapter_model.safetensors`), or the tensors; or
            an `Adapter` from `load`.
        config : mapping, optional
            The content of `adapter_config.json` that goes with a state dict.
        layout : {"rank_major", "grouped_by_expert"}, optional
            Column order of `lora_B` of `target_parameters`, if the adapter does not state
            it: older adapters of Unsloth are grouped by expert.
        pin : bool
            Never evict it.
        replace : bool
            Replace an adapter of that name, in its slot, instead of refusing.

        Returns
        -------
        int
            The slot.

        Raises
        ------
        ValueError, FileNotFoundError
            The checkpoint cannot be loaded; the message names the key or option.
        RuntimeError
            No slot can be freed.
        """
        check_name(name)
        with self._lock:
            self._check_add(name, replace)
        staged = self._staged(name, source, config, layout)
        with self._lock:
            self._check_add(name, replace)
            slot, leaving = self._choose_slot(name)
            loaded = Loaded(slot, pin)
            if leaving is not None:
                del self._loaded[leaving]
            self._commit(slot, staged)
            self._loaded[name] = loaded
            return slot

    def read(
        self,
        name: str,
        source: str | Path | Mapping[str, torch.Tensor],
        *,
        config: Mapping[str, Any] | None = None,
        layout: Layout | None = None,
    ) -> Adapter:
        """Read a checkpoint whose factors all fit the pool, without adding it.

        Parameters and errors are those of `add`; `name` is only for messages.
        """
        with _errors_of(name, source):
            return self._read(source, config, layout)

    def update(
        self,
        name: str,
        source: str | Path | Mapping[str, torch.Tensor],
        *,
        config: Mapping[str, Any] | None = None,
        layout: Layout | None = None,
    ) -> int:
        """Loads a new version of an adapter while batches use the old one.

        Batches that hold the adapter finish with the version that they began with; those that hold
        it from now on have the new one. While there are such batches the new version is in a slot
        of its own, for which another adapter may be evicted. Captured graphs stay as they are. As
        of `add`, an interrupt may leave no version of an adapter that no batch holds.

        Parameters
        ----------
        name : str
            An adapter that is loaded. It stays pinned if it is.
        source, config, layout
            As of `add`.

        Returns
        -------
        int
            The version, 2 for the first update of an adapter that was added.

        Raises
        ------
        KeyError
            There is no such adapter.
        ValueError, FileNotFoundError, RuntimeError
            As `add`; the old version stays.
        """
        with self._lock:
            self._entry(name)
        staged = self._staged(name, source, config, layout)
        with self._lock:
            old = self._entry(name)
            new = Loaded(old.slot, old.pinned, old.version + 1)
            if old.batches:
                new.slot, leaving = self._free_slot(f"the new version of adapter {name!r}")
                if leaving is not None:
                    del self._loaded[leaving]
                self._commit(new.slot, staged)
                self._retired.add(name, old)
            else:
                del self._loaded[name]
                self._commit(new.slot, staged)
            self._loaded[name] = new
            return new.version

    def version(self, name: str) -> int:
        """How often an adapter has been loaded under this name since it was added, from 1."""
        with self._lock:
            return self._entry(name).version

    def remove(self, name: str) -> None:
        """Free the slot of an adapter. RuntimeError while a batch holds it."""
        with self._lock:
            loaded = self._entry(name)
            self._check_free(name, loaded)
            del self._loaded[name]
            self._enable(loaded.slot, False)
            for tables in self._tables.values():
                tables.ranks[loaded.slot] = 0

    def enable(self, name: str) -> None:
        """Undo `disable`."""
        with self._lock:
            self._enable(self._entry(name).slot, True)

    def disable(self, name: str) -> None:
        """Keep the adapter loaded, but make its tokens base tokens from the next launch on."""
        with self._lock:
            self._enable(self._entry(name).slot, False)
            for other, loaded in self._retired:
                if other == name:
                    self._enable(loaded.slot, False)

    def pin(self, name: str, pinned: bool = True) -> None:
        """Protect an adapter from eviction, or stop protecting it."""
        with self._lock:
            self._entry(name).pinned = pinned

    # -- serving --

    def lookup(self, name: str, *, held: Held | None = None) -> int:
        """The slot of an adapter, which counts as a use. KeyError names what is loaded.

        `held` as of `mapping`.
        """
        with self._lock:
            if held is None or name in self._loaded:
                self._entry(name)
                self._loaded.move_to_end(name)
            return self._loaded[name].slot if held is None else held.slot(name)

    def mapping(
        self,
        names: Iterable[str | None],
        *,
        held: Held | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`token_lora_mapping` for one name (None = no adapter) per token, int32 on the device.

        `held`, from `hold` or `keep`, gives the versions that it holds, whatever `update` does.
        `out` is filled in place, for a captured graph; tokens beyond the names get -1.
        """
        names = list(names)
        with self._lock:
            wanted = [name for name in dict.fromkeys(names) if name is not None]
            slots: dict[str | None, int] = {
                None: -1,
                **{name: self.lookup(name, held=held) for name in wanted},
            }
        ids = torch.tensor([slots[name] for name in names], dtype=torch.int32)
        if out is None:
            return ids.to(self.device)
        if out.dtype != torch.int32 or out.dim() != 1 or out.numel() < len(names):
            raise ValueError(
                f"out is {out.dtype} {tuple(out.shape)}, wanted int32 ({len(names)},) or longer"
            )
        out[: len(names)].copy_(ids)
        out[len(names) :].fill_(-1)
        return out

    @contextmanager
    def hold(self, names: Iterable[str | None]) -> Iterator[Held]:
        """Keeps adapters in their slots for as long as the context lasts."""
        held = None
        try:
            held = self.keep(names)
            yield held
        finally:
            if held is not None:
                with self._lock:
                    held.release()

    def keep(self, names: Iterable[str | None]) -> Held:
        """As `hold`, for as long as the object that it returns is referred to."""
        with self._lock:
            return Held({name: self._entry(name) for name in set(names) if name is not None})

    def layer(self, name: str) -> LayerFactors:
        """Keyword arguments of `fused_experts_lora` for one layer, except `token_lora_mapping`."""
        stacks, tables = self._experts.of(name), self._tables[self.places[name].device]
        a, b = stacks.w13_lora_a, stacks.w13_lora_b
        return {
            "w13_lora_a": tuple(a) if len(a) > 1 else a[0],
            "w13_lora_b": tuple(b) if len(b) > 1 else b[0],
            "w2_lora_a": stacks.w2_lora_a,
            "w2_lora_b": stacks.w2_lora_b,
            "lora_ranks": tables.ranks,
            "lora_scalings": tables.scalings,
            "adapter_enabled": tables.enabled,
        }

    def linear(self, name: str) -> LinearFactors:
        """Factors of one linear layer or embedding, including scalings (`linears.py`)."""
        a, b, ranks = self._linears.of(name)
        enabled = self._tables[self.places[name].device].enabled
        return {"lora_a": a, "lora_b": b, "lora_ranks": ranks, "adapter_enabled": enabled}

    def names(self) -> list[str]:
        """Loaded adapters, least recently used first."""
        with self._lock:
            return list(self._loaded)

    def __contains__(self, name: object) -> bool:
        with self._lock:
            return name in self._loaded

    def __len__(self) -> int:
        with self._lock:
            return len(self._loaded)

    def memory_bytes(self) -> int:
        """Device memory of all slots, used or not."""
        return sum(t.nbytes for t in self._tensors())

    # -- inside --

    def _tensors(self) -> list[torch.Tensor]:
        tables = [t for tables in self._tables.values() for t in tables]
        return [*self._experts.tensors(), *self._linears.tensors(), *tables]

    def _entry(self, name: str) -> Loaded:
        loaded = self._loaded.get(name)
        if loaded is None:
            raise KeyError(f"no adapter {name!r} is loaded; loaded are {sorted(self._loaded)}")
        return loaded

    @staticmethod
    def _check_free(name: str, loaded: Loaded) -> None:
        if loaded.batches:
            raise RuntimeError(f"adapter {name!r} is in use by {loaded.batches} batches")

    def _check_add(self, name: str, replace: bool) -> None:
        loaded = self._loaded.get(name)
        if loaded is None:
            return
        if not replace:
            raise ValueError(f"adapter {name!r} is already loaded; remove it or pass replace=True")
        self._check_free(name, loaded)

    def _choose_slot(self, name: str) -> tuple[int, str | None]:
        """Slot for an adapter, and name of the one that must be evicted from it."""
        if name in self._loaded:
            return self._loaded[name].slot, name
        return self._free_slot(f"adapter {name!r}")

    def _free_slot(self, what: str) -> tuple[int, str | None]:
        """A slot that no batch uses, and the name of the adapter to evict from it, if any."""
        taken = {loaded.slot for loaded in self._loaded.values()}
        free = set(range(self.max_loras)) - taken - {loaded.slot for _, loaded in self._retired}
        if free:
            return min(free), None
        for other, loaded in self._loaded.items():
            if not loaded.pinned and not loaded.batches:
                return loaded.slot, other
        raise RuntimeError(f"no slot for {what}: all {self.max_loras} are pinned or in use")

    def _read(
        self,
        source: str | Path | Mapping[str, torch.Tensor],
        config: Mapping[str, Any] | None,
        layout: Layout | None,
    ) -> Adapter:
        """Read a checkpoint whose factors all fit the pool."""
        others = [layer for layer, _ in self._others.values()]
        adapter = checkpoint.load(
            source,
            config,
            [*self.layers.values(), *(x for x in others if isinstance(x, MoELayer))],
            [*self.linears.values(), *(x for x in others if isinstance(x, LinearLayer))],
            max_rank=self.max_rank,
            max_linear_rank=self.max_linear_rank,
            layout=layout,
            own=self._own,
        )
        for name in (*adapter.experts, *adapter.linears):
            if name in self._others:
                raise ValueError(f"factors of {name}, {self._others[name][1]}")
        return adapter

    def _staged(
        self,
        name: str,
        source: str | Path | Mapping[str, torch.Tensor] | Adapter,
        config: Mapping[str, Any] | None,
        layout: Layout | None,
    ) -> _Staged:
        """An adapter, read and checked; a ValueError says whose it is."""
        with _errors_of(name, source):
            if not isinstance(source, Adapter):
                source = self._read(source, config, layout)
            return self._stage(source)

    def _stage(self, adapter: Adapter) -> _Staged:
        experts = self._experts.stage(adapter.experts)
        return _Staged(experts, self._linears.stage(adapter.linears))

    def _enable(self, slot: int, enabled: bool) -> None:
        for tables in self._tables.values():
            tables.enabled[slot] = enabled

    def _commit(self, slot: int, staged: _Staged) -> None:
        # Kernels of an earlier batch may still be reading the slot on another stream.
        self._synchronize()
        self._enable(slot, False)
        self._experts.write(slot, staged.experts)
        self._linears.write(slot, staged.linears)
        for tables in self._tables.values():
            tables.ranks[slot] = staged.experts.rank
            tables.scalings[slot] = staged.experts.scaling
        self._enable(slot, True)
        self._synchronize()

    def _synchronize(self) -> None:
        for device in self.devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)


@contextmanager
def _errors_of(
    name: str, source: str | Path | Mapping[str, torch.Tensor] | Adapter
) -> Iterator[None]:
    """ValueErrors say whose adapter they are about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"adapter {name!r}: {error}{checkpoint.hint(source)}") from None


def _tables(max_loras: int, device: torch.device) -> _Tables:
    return _Tables(
        torch.zeros(max_loras, dtype=torch.int32, device=device),
        torch.zeros(max_loras, dtype=torch.float32, device=device),
        torch.zeros(max_loras, dtype=torch.bool, device=device),
    )
