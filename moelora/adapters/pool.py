"""Adapters by name, in slots of all layers of a model that are filled while serving.

    folder or tensors     a slot of all layers     batches
    host.py            ->  slots.py             ->  held.py        names and slots: versions.py

The tensors of slots are allocated once and only written in place, so that captured CUDA graphs see
later adapters. A load is staged and checked outside of them; if it fails, the pool is unchanged.

A signal may raise between any two statements. So a name is registered in a single step, and only
while its slot holds all factors, or copies of all are under way: it is removed before the first of
them is overwritten and added after the last. A slot that is written without the lock is reserved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch

from moelora.adapters import arguments
from moelora.adapters.bringing import Bringing
from moelora.adapters.checkpoint import Own
from moelora.adapters.columns import Layout
from moelora.adapters.host import Host, Source
from moelora.adapters.layers import Adapter, LinearLayer, MoELayer
from moelora.adapters.names import check_name, distinct
from moelora.adapters.ranks import Ranks, on_all_ranks
from moelora.adapters.reader import AdapterSource, Given, Reader
from moelora.adapters.serving import ServingPool
from moelora.adapters.shards import Shard
from moelora.adapters.slots import Slots, Staged
from moelora.operators.checks import check_count, check_flag, check_mapping


class AdapterPool(ServingPool):
    """Stacked LoRA adapters of the layers of one model, by name, in `max_loras` slots.

    Parameters
    ----------
    layers : sequence of MoELayer
        Expert layers, in any order.
    max_loras : int
        Number of slots. Adding to a full pool evicts the least recently used adapter that is
        neither pinned nor held, which the log says (`moelora.adapters`). Factors that `Tenants`
        trained are taken to host memory; without it they are not evicted.
    host : int, optional
        Number of adapters in host memory, pinned if there are slots on a GPU; 0: none. With it, an
        evicted adapter stays known, `register` makes others known by a folder that is read when it
        is needed, and `hold` brings what is not in a slot.
    max_rank : int
        Maximum rank of experts' factors.
    dtype : torch.dtype
        Dtype of the factors; must be that of the activations.
    device : torch.device or str
        Device of the stacks.
    w13_slices : {2, 1}
        2 keeps gate and up as two pairs (the natural form of per-expert checkpoints), 1 as one
        pair whose A both share (the natural form of PEFT's `target_parameters`: half the memory;
        two pairs would have this A twice, of which layers read one). Either pool takes either
        checkpoint: two pairs in one slice need the sum of their ranks. Layers without a gate or
        with interleaved rows always have one slice.
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
    shards : mapping, optional
        Layers, by name, whose weights several processes share, with the part of this one. `layers`
        and `linears` have the sizes of whole weights, as do adapters.
    ranks : Ranks, optional
        The processes that share them. Methods that change the pool are then called by all in the
        same order: what they read and return is compared, and all raise if one fails or differs.

    Notes
    -----
    Every method may be called from any thread. An adapter in use by `hold` or `keep` is neither
    evicted, removed nor replaced; the slots that `mapping` and `lookup` return are only valid as
    long as the adapter is held or pinned, or no other adapter is brought to a slot.

    A forked process has a copy of the pool, which it may use unless another thread was using the
    pool as it forked. A pool is not copied or pickled.

    On a GPU, launch what reads slots on a stream on which `hold`, `keep`, `mapping`, `lookup` or
    `note_stream` was called: a slot is overwritten after what such streams have been given. No
    graph may be captured while another thread adds, updates or holds adapters.
    """

    def __init__(
        self,
        layers: Sequence[MoELayer],
        max_loras: int,
        max_rank: int,
        *,
        host: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        w13_slices: Literal[1, 2] = 2,
        shared_outer: bool = False,
        linears: Sequence[LinearLayer] = (),
        max_linear_rank: int | None = None,
        places: Mapping[str, tuple[torch.device | str, torch.dtype]] | None = None,
        others: Mapping[MoELayer | LinearLayer, str] | None = None,
        own: Own | None = None,
        shards: Mapping[str, Shard] | None = None,
        ranks: Ranks | None = None,
    ):
        layers = arguments.layers_of("layers", layers, MoELayer)
        linears = arguments.layers_of("linears", linears, LinearLayer)
        every: list[MoELayer | LinearLayer] = [*layers, *linears]
        names = [layer.name for layer in every]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"layers are {names}, wanted at least one and no name twice")
        linear_rank = max_rank if max_linear_rank is None else max_linear_rank
        check_count("max_loras", max_loras)
        check_count("max_rank", max_rank)
        check_count("max_linear_rank", linear_rank)
        check_count("host", host, 0)
        check_flag("shared_outer", shared_outer)
        others = {} if others is None else others
        check_mapping("others", others)
        if own is not None and not callable(own):
            raise ValueError(f"own is {own!r}, wanted a function")
        self.device = arguments.device_of("device", device)
        self.places = arguments.places(names, self.device, dtype, places)
        if isinstance(w13_slices, bool) or w13_slices not in (1, 2):
            raise ValueError(f"w13_slices is {w13_slices}, wanted 1 or 2")
        self.layers = {layer.name: layer for layer in layers}
        self.linears = {layer.name: layer for layer in linears}
        self.max_loras = max_loras
        self.host = host
        self.max_rank = max_rank
        self.max_linear_rank = linear_rank
        self.dtype = dtype
        self.devices = tuple(
            dict.fromkeys([self.device, *(place.device for place in self.places.values())])
        )
        self.shared_outer = shared_outer
        self.shards = dict(shards or {})
        self.ranks = ranks
        self.is_split = bool(shards)  # whether processes share the model's weights in any way
        self._slots = Slots(
            self.layers,
            self.linears,
            max_loras,
            (max_rank, linear_rank),
            self.places,
            self.devices,
            w13_slices,
            shared_outer,
            self.shards,
        )
        self._reader = Reader(self._slots, [*layers, *linears], others, own)
        tables = self._slots.tables[self.device]
        self.lora_ranks, self.lora_scalings = tables.ranks, tables.scalings
        self.adapter_enabled = tables.enabled
        self._pinned = any(device.type == "cuda" for device in self.devices)
        self._host = Host(host, self._staged_folder, self._pinned) if host else None
        self._versions = Bringing(self._slots, max_loras, self._host)
        self._lock = self._versions.lock

    # -- adapters in and out --

    @on_all_ranks
    def add(
        self,
        name: str,
        source: AdapterSource,
        *,
        config: Mapping[str, Any] | None = None,
        layout: Layout | None = None,
        pin: bool = False,
        replace: bool = False,
    ) -> int:
        """Load an adapter; if its checkpoint is refused, the pool is unchanged.

        If an interrupt (Ctrl-C) ends the call, `name` is either completely loaded or not; the
        adapter that it replaces or evicts may be gone, all others are unchanged. Batches of other
        adapters do not wait for the copies, unless `name` is replaced in its slot.

        Parameters
        ----------
        name : str
            Name of the adapter.
        source : path, state dict or Adapter
            A PEFT folder (`adapter_config.json`, `adapter_model.safetensors`), or the tensors; or
            an `Adapter` from `load`.
        config : mapping, optional
            The content of `adapter_config.json` that goes with a state dict, or PEFT's
            `LoraConfig`.
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
        NoSlot
            A RuntimeError: no slot can be freed.
        RuntimeError
            There is no place in host memory.
        """
        check_name(name)
        check_flag("pin", pin)
        check_flag("replace", replace)
        return self._add(Given(name, source, config, layout), pin, replace)

    @on_all_ranks
    def register(
        self,
        name: str,
        source: AdapterSource,
        *,
        config: Mapping[str, Any] | None = None,
        layout: Layout | None = None,
    ) -> None:
        """Make an adapter known without a slot; `hold` and `prefetch` bring it to one.

        Of a folder, only the configuration and the header of its tensors are read; the folder must
        stay as it is (`update` takes a new version of it). Tensors are read, and stay in host
        memory. Parameters are those of `add`.

        Raises
        ------
        ValueError, FileNotFoundError
            The name is known already, or the checkpoint does not fit; the message names the key or
            option.
        RuntimeError
            The pool has no host memory, or no place in it for tensors.
        """
        check_name(name)
        host = self._with_host("register")
        with self._lock:
            self._versions.check_new(name)
        given = Given(name, source, config, layout)
        if isinstance(source, (str, Path)):
            self._reader.peek(given)
            origin = Source.of(source, layout)
        else:
            host.check_room(name)
            staged = self._stage("register", given)
            origin = Source.of(source, layout, host.copied(staged))
        with self._lock:
            self._versions.check_new(name)
            host.put(name, origin)

    def prefetch(self, names: Iterable[str | None]) -> None:
        """Begin to bring adapters to slots; `ready` says when one is there.

        `names` are those of all requests that wait, the first one first; the next call replaces
        them. As many as fit beside adapters in use get or keep slots, and only `hold` evicts them.
        Copies from host memory to GPUs are launched by this call, and complete later in the order
        of the names; threads read folders, and write slots on a CPU. Call it from the thread that
        runs the model: launches of two threads wait for each other.

        An adapter that cannot be brought, such as one whose folder is refused, is left out from
        then on: `ready` raises what is wrong, and `hold`, which tries again. KeyError for an
        unknown name.
        """
        self._with_host("prefetch")
        self._versions.bring_ahead(distinct(names))

    def ready(self, name: str, *, within: float = 0.0) -> bool:
        """Whether a batch of this adapter starts at once: it is in a slot, all copies are complete.

        With `within`, in seconds, also if they will be complete after this time, at the pace of
        those that are. If that is what a pass of all layers takes, a batch that is held with
        `layerwise=True` gets each layer before it needs it.

        KeyError for an unknown name; ValueError or FileNotFoundError if its folder was refused,
        RuntimeError if it could not be copied, MemoryError or whatever else ended the attempt.
        """
        if not isinstance(within, (int, float)) or not within >= 0:
            raise ValueError(f"within is {within!r}, wanted seconds, 0 if all copies are complete")
        check_name(name)
        return self._versions.ready(name, within)

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
        return self._reader.read(Given(name, source, config, layout))

    @on_all_ranks
    def update(
        self,
        name: str,
        source: AdapterSource,
        *,
        config: Mapping[str, Any] | None = None,
        layout: Layout | None = None,
        in_flight: Literal["finish", "switch"] = "finish",
    ) -> int:
        """Load a new version of an adapter while batches use the old one.

        Batches that hold it from now on have the new version. While others hold the old one the
        new one is in a slot of its own, for which another adapter may be evicted. No batch ever
        computes with parts of both. Captured graphs stay as they are. As of `add`, an interrupt may
        leave no version of an adapter that no batch holds.

        Batches of other adapters do not wait for the copies, unless the new version takes the slot
        of the old one: if no batch holds the adapter, and it is pinned or no slot is free.

        Parameters
        ----------
        name : str
            An adapter that is known. It stays pinned or disabled if it is.
        source, config, layout
            As of `add`. Tensors of a state dict that are all on one GPU are read there; they may
            be overwritten when the call returns.
        in_flight : {"finish", "switch"}
            What batches do that hold the old version: "finish" with it, or "switch" to the new one
            in their next step, which begins with their next call of `mapping` or `lookup`. Also
            those switch that an earlier update let finish.

        Returns
        -------
        int
            The version, 2 for the first update of an adapter that was added.

        Raises
        ------
        KeyError
            There is no such adapter, or another thread removed or replaced it during the call, or,
            without host memory, evicted it.
        ValueError, FileNotFoundError, RuntimeError
            As `add`; the old version stays.
        """
        if in_flight not in ("finish", "switch"):
            raise ValueError(f"in_flight is {in_flight!r}, wanted 'finish' or 'switch'")
        check_name(name)
        switch = in_flight == "switch"
        with self._lock:
            lineage = self._versions.lineage(name)
        given = Given(name, source, config, layout)
        staged = self._stage("update", given)
        origin = self._origin(given, staged)
        return self._versions.replace(name, staged, switch, origin, lineage)

    def version(self, name: str) -> int:
        """How often an adapter has been loaded or trained under this name since it was added,
        from 1."""
        check_name(name)
        with self._lock:
            return self._versions.lineage(name).version

    @on_all_ranks
    def remove(self, name: str) -> None:
        """Forget an adapter, and free its slot. RuntimeError while a batch holds a version."""
        check_name(name)
        self._versions.remove(name)

    @on_all_ranks
    def enable(self, name: str) -> None:
        """Undo `disable`."""
        check_name(name)
        self._versions.enable(name, True)

    @on_all_ranks
    def disable(self, name: str) -> None:
        """Keep the adapter loaded, but make its tokens base tokens from the next launch on."""
        check_name(name)
        self._versions.enable(name, False)

    @on_all_ranks
    def pin(self, name: str, pinned: bool = True) -> None:
        """Protect an adapter in a slot from eviction, or stop protecting it."""
        check_name(name)
        check_flag("pinned", pinned)
        with self._lock:
            self._versions.entry(name).pinned = pinned

    def registered(self) -> list[str]:
        """All adapters that are known, in slots or not."""
        return self.names() if self._host is None else self._host.names()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "an AdapterPool is neither copied nor pickled: graphs and modules have its slots; make "
            "one for each model and process, and add the adapters to it"
        )

    def host_bytes(self) -> int:
        """Host memory of the factors of at most `host` adapters.

        Pinned memory is that of torch's allocator, which rounds each tensor up to a power of two.
        """
        return 0 if self._host is None else self._host.nbytes()

    # -- inside --

    def _add(
        self, given: Given, pin: bool = True, replace: bool = False, trainer: object | None = None
    ) -> int:
        """As `add`; `trainer` identifies who writes the next versions."""
        with self._lock:
            self._versions.check_new(given.name, replace)
        staged = self._stage("add", given)
        origin = self._origin(given, staged)
        return self._versions.put(given.name, staged, pin, origin, replace, trainer)

    def _stage(self, method: str, given: Given) -> Staged:
        """An adapter in the dtypes of its stacks, the same on all ranks."""
        stage = partial(self._reader.stage, given)
        if self.ranks is None:
            return stage()
        call = f"{method} of adapter {given.name!r}"
        return self.ranks.together(call, stage, lambda staged: staged.facts)

    def _with_host(self, method: str) -> Host:
        if self._host is None:
            raise RuntimeError(f"{method} needs a pool with host memory: AdapterPool(..., host=64)")
        return self._host

    def _origin(self, given: Given, staged: Staged) -> Source | None:
        """What a name stands for, with its factors in host memory; None for a pool without."""
        if self._host is None:
            return None
        return Source.of(given.source, given.layout, self._host.copied(staged))

    def _staged_folder(self, name: str, folder: Path, layout: Layout | None) -> Staged:
        return self._reader.stage(Given(name, folder, layout=layout))
