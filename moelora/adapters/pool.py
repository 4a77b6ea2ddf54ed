"""A fixed number of adapter slots for all MoE layers of a model, filled and emptied while serving.

Per layer the pool holds the stacks that the operators read, R being `max_rank` rounded up to 8:

    w13_lora_a  one tensor per slice, (max_loras, E or 1, R, K)
    w13_lora_b  one tensor per slice, (max_loras, E,      N, R)   N = I, or 2I with one slice
    w2_lora_a   (max_loras, E,      R, I)
    w2_lora_b   (max_loras, E or 1, K, R)

and for all layers together `lora_ranks`, `lora_scalings` and `adapter_enabled`, (max_loras,) each.
All of them are allocated once and only ever written in place, so a captured CUDA graph sees every
adapter that comes and goes. A load is staged and checked outside the stacks; when anything is wrong
with it nothing in the pool has changed.

A signal can raise between any two statements. So a name is listed in one step, only while the slot
holds all of its factors: it goes before the first of them is overwritten and comes after the last.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch

from moelora.adapters import checkpoint
from moelora.adapters.columns import Layout
from moelora.adapters.factors import check_rank
from moelora.adapters.layers import MoELayer, Pair, Projection

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class _Stacks:
    """The factors of one layer, all slots."""

    w13_lora_a: list[torch.Tensor]
    w13_lora_b: list[torch.Tensor]
    w2_lora_a: torch.Tensor
    w2_lora_b: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        return [*self.w13_lora_a, *self.w13_lora_b, self.w2_lora_a, self.w2_lora_b]


class _Use:
    """A batch that holds adapters; gone with the call that made it, however that ends."""


@dataclass
class _Loaded:
    """An adapter that is in the pool."""

    slot: int
    pinned: bool
    users: weakref.WeakSet[_Use] = field(default_factory=weakref.WeakSet)

    @property
    def batches(self) -> int:
        return sum(1 for _ in self.users)


@dataclass
class _Staged:
    """A checked adapter in the pool's dtype: per layer one (A, B) per stack, None = all zero."""

    rank: int
    scaling: float
    factors: dict[str, list[tuple[torch.Tensor, torch.Tensor] | None]]


class LayerFactors(TypedDict):
    """Keyword arguments of `fused_experts_lora`: the adapters that one layer may apply."""

    w13_lora_a: torch.Tensor | tuple[torch.Tensor, ...]
    w13_lora_b: torch.Tensor | tuple[torch.Tensor, ...]
    w2_lora_a: torch.Tensor
    w2_lora_b: torch.Tensor
    lora_ranks: torch.Tensor
    lora_scalings: torch.Tensor
    adapter_enabled: torch.Tensor


class AdapterPool:
    """Stacked LoRA adapters of every MoE layer of one model, by name, in `max_loras` slots.

    Parameters
    ----------
    layers : sequence of MoELayer
        The MoE layers, in any order.
    max_loras : int
        Number of slots. Adding to a full pool evicts the least recently used adapter that is
        neither pinned nor held.
    max_rank : int
        Largest rank that fits.
    dtype : torch.dtype
        Of the factors; must be that of the activations.
    device : torch.device or str
        Where the stacks live.
    w13_slices : {2, 1}
        2 keeps gate and up as two pairs (the natural form of per-expert checkpoints), 1 as one
        pair whose A both share (the natural form of PEFT's `target_parameters`: half the shrink
        work and memory). Either pool takes either checkpoint: two pairs in one slice need the sum
        of their ranks. Layers without a gate or with interleaved rows always have one slice.
    shared_outer : bool
        A of gate and up and B of down have no expert dimension (SGLang's
        `experts_shared_outer_loras`, vLLM's `enable_moe_shared_loras`); an adapter that has its
        own per expert is refused. Without it shared factors are copied to every expert.

    Notes
    -----
    Every method may be called from any thread. An adapter in use by `hold` is neither evicted,
    removed nor replaced; the slots that `mapping` and `lookup` return are only good for as long as
    the adapter is held or pinned, or nobody adds adapters meanwhile.
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
    ):
        names = [layer.name for layer in layers]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"layers are {names}, wanted at least one and no name twice")
        if max_loras < 1 or max_rank < 1:
            raise ValueError(f"max_loras is {max_loras}, max_rank is {max_rank}, wanted >= 1")
        if dtype not in _DTYPES:
            raise ValueError(f"dtype is {dtype}, wanted one of {_DTYPES}")
        if w13_slices not in (1, 2):
            raise ValueError(f"w13_slices is {w13_slices}, wanted 1 or 2")
        self.layers = {layer.name: layer for layer in layers}
        self.max_loras = max_loras
        self.max_rank = max_rank
        self.dtype = dtype
        self.device = torch.device(device)
        self.shared_outer = shared_outer
        self._w13_slices = w13_slices
        # Rows of B are 16-byte aligned when R is a multiple of 8.
        self._padded_rank = -(-max_rank // 8) * 8
        self._stacks = {layer.name: self._allocate(layer) for layer in layers}
        self.lora_ranks = torch.zeros(max_loras, dtype=torch.int32, device=self.device)
        self.lora_scalings = torch.zeros(max_loras, dtype=torch.float32, device=self.device)
        self.adapter_enabled = torch.zeros(max_loras, dtype=torch.bool, device=self.device)
        self._loaded: OrderedDict[str, _Loaded] = OrderedDict()  # least recently used first
        self._lock = threading.RLock()

    # -- adapters in and out --

    def add(
        self,
        name: str,
        source: str | Path | Mapping[str, torch.Tensor],
        *,
        config: Mapping[str, Any] | None = None,
        layout: Layout | None = None,
        pin: bool = False,
        replace: bool = False,
    ) -> int:
        """Loads an adapter; where its checkpoint is refused the pool is as it was.

        Where an interrupt (Ctrl-C) ends the call, `name` is either loaded or not, whole; the
        adapter that it replaces or evicts may be gone, all others are as they were.

        Parameters
        ----------
        name : str
            What the adapter will be called.
        source : path or state dict
            A PEFT folder (`adapter_config.json`, `adapter_model.safetensors`), or the tensors.
        config : mapping, optional
            The content of `adapter_config.json` that goes with a state dict.
        layout : {"rank_major", "grouped_by_expert"}, optional
            How columns of `lora_B` of `target_parameters` lie, where nothing in the adapter says
            so: older adapters of Unsloth are grouped by expert.
        pin : bool
            Never evict it.
        replace : bool
            Load over an adapter of that name, in its slot, instead of refusing.

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
        if not isinstance(name, str) or not name:
            raise ValueError(f"name is {name!r}, wanted a non-empty string")
        with self._lock:
            self._check_add(name, replace)
        try:
            layers = list(self.layers.values())
            adapter = checkpoint.load(
                source, config, layers, max_rank=self.max_rank, layout=layout
            ).experts
            staged = self._stage(adapter)
        except ValueError as error:
            raise ValueError(f"adapter {name!r}: {error}") from None
        with self._lock:
            self._check_add(name, replace)
            slot, leaving = self._choose_slot(name)
            loaded = _Loaded(slot, pin)
            if leaving is not None:
                del self._loaded[leaving]
            self._commit(slot, staged)
            self._loaded[name] = loaded
            return slot

    def remove(self, name: str) -> None:
        """Frees the slot of an adapter. RuntimeError while a batch holds it."""
        with self._lock:
            loaded = self._entry(name)
            self._check_free(name, loaded)
            del self._loaded[name]
            self.adapter_enabled[loaded.slot] = False
            self.lora_ranks[loaded.slot] = 0

    def enable(self, name: str) -> None:
        """Undoes `disable`."""
        with self._lock:
            self.adapter_enabled[self._entry(name).slot] = True

    def disable(self, name: str) -> None:
        """Keeps the adapter loaded but makes its tokens base tokens, from the next launch on."""
        with self._lock:
            self.adapter_enabled[self._entry(name).slot] = False

    def pin(self, name: str, pinned: bool = True) -> None:
        """Protects an adapter from eviction, or stops protecting it."""
        with self._lock:
            self._entry(name).pinned = pinned

    # -- serving --

    def lookup(self, name: str) -> int:
        """The slot of an adapter, which counts as a use. KeyError names what is loaded."""
        with self._lock:
            loaded = self._entry(name)
            self._loaded.move_to_end(name)
            return loaded.slot

    def mapping(
        self, names: Iterable[str | None], *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`token_lora_mapping` for one name (None = no adapter) per token, int32 on the device.

        `out` is filled in place, for a captured graph; tokens beyond the names get -1.
        """
        names = list(names)
        with self._lock:
            wanted = [name for name in dict.fromkeys(names) if name is not None]
            slots: dict[str | None, int] = {None: -1, **{n: self.lookup(n) for n in wanted}}
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
    def hold(self, names: Iterable[str | None]) -> Iterator[None]:
        """Keeps adapters in their slots for as long as the context lasts."""
        use, held = _Use(), []
        try:
            with self._lock:
                held = [self._entry(name) for name in set(names) if name is not None]
                for loaded in held:
                    loaded.users.add(use)
            yield
        finally:
            with self._lock:
                for loaded in held:
                    loaded.users.discard(use)

    def layer(self, name: str) -> LayerFactors:
        """Keyword arguments of `fused_experts_lora` for one layer, but for `token_lora_mapping`."""
        stacks = self._stacks[name]
        a, b = stacks.w13_lora_a, stacks.w13_lora_b
        return {
            "w13_lora_a": tuple(a) if len(a) > 1 else a[0],
            "w13_lora_b": tuple(b) if len(b) > 1 else b[0],
            "w2_lora_a": stacks.w2_lora_a,
            "w2_lora_b": stacks.w2_lora_b,
            "lora_ranks": self.lora_ranks,
            "lora_scalings": self.lora_scalings,
            "adapter_enabled": self.adapter_enabled,
        }

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

    def _slices(self, layer: MoELayer) -> int:
        return self._w13_slices if layer.gated and not layer.interleaved else 1

    def _allocate(self, layer: MoELayer) -> _Stacks:
        e, k, i = layer.num_experts, layer.hidden_size, layer.intermediate_size
        outer = 1 if self.shared_outer else e
        slices = self._slices(layer)
        n = 2 * i // slices if layer.gated else i

        def stack(experts: int, rows: int, columns: int) -> torch.Tensor:
            shape = (self.max_loras, experts, rows, columns)
            return torch.zeros(shape, dtype=self.dtype, device=self.device)

        r = self._padded_rank
        return _Stacks(
            [stack(outer, r, k) for _ in range(slices)],
            [stack(e, n, r) for _ in range(slices)],
            stack(e, r, i),
            stack(outer, k, r),
        )

    def _tensors(self) -> list[torch.Tensor]:
        stacks = [t for s in self._stacks.values() for t in s.tensors()]
        return [*stacks, self.lora_ranks, self.lora_scalings, self.adapter_enabled]

    def _entry(self, name: str) -> _Loaded:
        loaded = self._loaded.get(name)
        if loaded is None:
            raise KeyError(f"no adapter {name!r} is loaded; loaded are {sorted(self._loaded)}")
        return loaded

    @staticmethod
    def _check_free(name: str, loaded: _Loaded) -> None:
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
        """The slot for an adapter and the name of the one that has to leave it."""
        if name in self._loaded:
            return self._loaded[name].slot, name
        free = set(range(self.max_loras)) - {loaded.slot for loaded in self._loaded.values()}
        if free:
            return min(free), None
        for other, loaded in self._loaded.items():
            if not loaded.pinned and not loaded.batches:
                return loaded.slot, other
        raise RuntimeError(
            f"no slot for adapter {name!r}: all {self.max_loras} are pinned or in use"
        )

    def _stage(self, adapter: Mapping[str, Mapping[Projection, Pair]]) -> _Staged:
        scalings = {
            s for pairs in adapter.values() for pair in pairs.values() for s in pair.scalings
        }
        fold = len(scalings) != 1
        factors: dict[str, list[tuple[torch.Tensor, torch.Tensor] | None]] = {}
        rank = 0
        for name, pairs in adapter.items():
            layer = self.layers[name]
            if fold:
                pairs = {projection: _folded(pair) for projection, pair in pairs.items()}
            if self._slices(layer) == 1 and layer.gated and "gate_up" not in pairs:
                joined = sum(pair.rank for p, pair in pairs.items() if p in ("gate", "up"))
                check_rank(f"{name}.gate_up_proj", joined, self.max_rank)
            chosen = [*_w13_slices(layer, pairs, self._slices(layer)), _factors(pairs.get("down"))]
            factors[name] = []
            for place, factor in zip(self._places(layer), chosen, strict=True):
                factors[name].append(None if factor is None else self._fitted(name, place, factor))
                rank = max(rank, 0 if factor is None else factor[0].size(1))
        return _Staged(rank, 1.0 if fold else scalings.pop(), factors)

    def _places(self, layer: MoELayer) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """(name, A stack, B stack) of every pair of a layer."""
        s = self._stacks[layer.name]
        w13 = list(zip(s.w13_lora_a, s.w13_lora_b, strict=True))
        names = ["gate_proj", "up_proj"] if len(w13) == 2 else [layer.parameters[0]]
        return [
            *((n, a, b) for n, (a, b) in zip(names, w13, strict=True)),
            ("down_proj", s.w2_lora_a, s.w2_lora_b),
        ]

    def _fitted(
        self,
        layer: str,
        place: tuple[str, torch.Tensor, torch.Tensor],
        factor: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Checks a pair against its stacks and converts it to the pool's dtype."""
        projection, *stacks = place
        fitted = []
        for side, tensor, stack in zip("AB", factor, stacks, strict=True):
            if tensor.size(0) > stack.size(1):
                raise ValueError(
                    f"lora_{side} of {layer}.{projection} differs between experts, but the pool "
                    "has shared_outer=True"
                )
            converted = tensor.to(self.dtype)
            if not torch.isfinite(converted).all():
                raise ValueError(f"lora_{side} of {layer}.{projection} overflows {self.dtype}")
            fitted.append(converted)
        return fitted[0], fitted[1]

    def _commit(self, slot: int, staged: _Staged) -> None:
        # Kernels of an earlier batch may still be reading the slot on another stream.
        self._synchronize()
        self.adapter_enabled[slot] = False
        for name, layer in self.layers.items():
            chosen = staged.factors.get(name, [None] * len(self._places(layer)))
            for (_, a, b), factor in zip(self._places(layer), chosen, strict=True):
                a[slot].zero_()
                b[slot].zero_()
                if factor is not None:
                    rank = factor[0].size(1)
                    a[slot, :, :rank].copy_(factor[0])
                    b[slot, :, :, :rank].copy_(factor[1])
        self.lora_ranks[slot] = staged.rank
        self.lora_scalings[slot] = staged.scaling
        self.adapter_enabled[slot] = True
        self._synchronize()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _factors(pair: Pair | None) -> tuple[torch.Tensor, torch.Tensor] | None:
    return None if pair is None else (pair.a, pair.b)


def _folded(pair: Pair) -> Pair:
    """The same product with the scaling inside B (or A where only A differs between experts)."""
    scale = torch.tensor(pair.scalings, dtype=torch.float32).view(-1, 1, 1)
    if scale.size(0) in (1, pair.b.size(0)):
        return Pair(pair.a, pair.b.float() * scale, [1.0])
    return Pair(pair.a.float() * scale, pair.b, [1.0])


def _w13_slices(
    layer: MoELayer, pairs: Mapping[Projection, Pair], slices: int
) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
    """The pairs of gate and up as the stacks want them: one factor pair per slice."""
    if not layer.gated:
        return [_factors(pairs.get("up"))]
    fused = pairs.get("gate_up")
    if slices == 2:
        if fused is None:
            return [_factors(pairs.get("gate")), _factors(pairs.get("up"))]
        gate, up = fused.b.chunk(2, dim=1)
        return [(fused.a, gate), (fused.a, up)]
    if fused is not None:
        return [(fused.a, fused.b)]
    both: tuple[Projection, ...] = ("gate", "up")
    halves = [(n, pairs[p]) for n, p in enumerate(both) if p in pairs]
    return [_joined(layer, halves)] if halves else [None]


def _joined(
    layer: MoELayer, halves: Sequence[tuple[int, Pair]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate (0) and up (1) as one pair: ranks side by side, B zero where they do not meet."""
    experts = max(pair.a.size(0) for _, pair in halves)
    rows = max(pair.b.size(0) for _, pair in halves)
    rank = sum(pair.rank for _, pair in halves)
    i = layer.intermediate_size
    a = torch.cat([pair.a.float().expand(experts, -1, -1) for _, pair in halves], dim=1)
    b = torch.zeros(rows, 2 * i, rank)
    start = 0
    for half, pair in halves:
        own = b[:, half::2] if layer.interleaved else b[:, half * i : (half + 1) * i]
        own[:, :, start : start + pair.rank] = pair.b
        start += pair.rank
    return a, b
