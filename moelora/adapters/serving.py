"""What batches use of a pool: adapters by name in their slots, and the factors of layers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from moelora.adapters import arguments
from moelora.adapters.bringing import Bringing
from moelora.adapters.held import Held
from moelora.adapters.layers import LinearLayer, MoELayer
from moelora.adapters.linears import LinearFactors
from moelora.adapters.names import check_name, distinct, listed
from moelora.adapters.shards import Shard
from moelora.adapters.slots import LayerFactors, Slots
from moelora.operators.checks import check_flag


class ServingPool:
    """The methods of `AdapterPool` that change nothing but which adapters are in slots."""

    layers: dict[str, MoELayer]
    linears: dict[str, LinearLayer]
    device: torch.device
    shards: Mapping[str, Shard]
    _slots: Slots
    _versions: Bringing
    _pinned: bool  # host memory that is copied to slots

    def lookup(self, name: str, *, held: Held | None = None) -> int:
        """The slot of an adapter, which counts as a use. KeyError names what is loaded.

        `held` as of `mapping`. ValueError for what is no name of an adapter, such as None.
        """
        check_name(name)
        return self._slots_of([name], held)[name]

    def mapping(
        self,
        names: Iterable[str | None],
        *,
        held: Held | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`token_lora_mapping` for one name (None = no adapter) per token, int32 on the device.

        `held`, from `hold` or `keep`, gives the versions that it holds, whatever `update` does; a
        call with it begins a step, in which `in_flight="switch"` takes effect. Without it, adapters
        that are known and in no slot are brought, as by `hold`.
        `out` is filled in place, for a captured graph; tokens beyond the names get -1. The host
        does not wait for the device.
        """
        names = listed(names)
        if out is not None:
            arguments.check_out(out, len(names), self.device)
        slots = {None: -1, **self._slots_of(names, held)}
        numbers = [slots[name] for name in names]
        ids = torch.tensor(numbers, dtype=torch.int32, device="cpu", pin_memory=self._pinned)
        if out is None:
            return ids.to(self.device, non_blocking=True)
        out[: len(names)].copy_(ids, non_blocking=True)
        out[len(names) :].fill_(-1)
        return out

    @contextmanager
    def hold(
        self, names: Iterable[str | None], *, timeout: float = 0.0, layerwise: bool = False
    ) -> Iterator[Held]:
        """Keeps adapters in their slots for as long as the context lasts.

        Those that are known and in no slot are brought to one: from host memory or their folder,
        by copies on a stream of their own. The host does not wait for the copies.

        Parameters
        ----------
        names : iterable of str or None
            Adapters; None: none.
        timeout : float
            Seconds to wait until slots are free, if all are pinned or in use. Batches that wait
            get slots in the order of their calls (`turns.py`).
        layerwise : bool
            The current streams do not wait for copies: before the kernels of a layer that read a
            slot the caller calls `held.wait(layer)`, before a captured graph `held.wait()`. Without
            it, the current streams wait for all.

        Raises
        ------
        KeyError
            An adapter is not known.
        NoSlot
            A RuntimeError: no slot can be freed.
        ValueError, FileNotFoundError
            A folder is refused, as by `add`.
        """
        held = None
        try:
            held = self.keep(names, timeout=timeout, layerwise=layerwise)
            self._versions.enter(held)
            yield held
        finally:
            if held is not None:
                self._versions.release(held)

    def keep(
        self, names: Iterable[str | None], *, timeout: float = 0.0, layerwise: bool = False
    ) -> Held:
        """As `hold`, for as long as the object that it returns is referred to."""
        if not isinstance(timeout, (int, float)) or math.isnan(timeout):
            raise ValueError(f"timeout is {timeout!r}, wanted seconds, 0 not to wait")
        check_flag("layerwise", layerwise)
        held = self._versions.take(distinct(names), timeout)
        self._slots.streams.note()
        if not layerwise:
            held.wait()
        return held

    def note_stream(self) -> None:
        """Kernels on the current streams read slots from now on, wherever `hold` was called."""
        self._slots.streams.note()

    def layer(self, name: str) -> LayerFactors:
        """Keyword arguments of `fused_experts_lora` for one layer, except `token_lora_mapping`.
        KeyError for what is none of the pool's layers of experts."""
        return self._slots.layer(name)

    def linear(self, name: str) -> LinearFactors:
        """Factors of one linear layer or embedding, including scalings (`linears.py`). KeyError for
        what is none of the pool's."""
        return self._slots.linear(name)

    def names(self) -> list[str]:
        """Adapters in slots, least recently used first."""
        with self._versions.lock:
            return list(self._versions.loaded)

    def __contains__(self, name: object) -> bool:
        with self._versions.lock:
            return name in self._versions.loaded

    def __len__(self) -> int:
        with self._versions.lock:
            return len(self._versions.loaded)

    def describe(self) -> dict[str, str]:
        """What this process holds of every layer's factors: "whole", or its part of the weight's
        axis, with the shapes of A and B for one adapter."""
        held: dict[str, str] = {}
        for name in (*self.layers, *self.linears):
            is_linear = name in self.linears  # its stacks have one expert, which is left out
            factors: dict[str, Any] = {**(self.linear(name) if is_linear else self.layer(name))}
            shapes = {
                side: tuple(
                    (stack[0] if isinstance(stack, tuple) else stack).shape[1 + is_linear :]
                )
                for side, stack in factors.items()
                if side.endswith(("lora_a", "lora_b"))
            }
            held[name] = f"{self.shards.get(name, 'whole')}: {shapes}"
        return held

    def memory_bytes(self) -> int:
        """Device memory of all slots, used or not."""
        return sum(t.nbytes for t in self._tensors())

    def _tensors(self) -> list[torch.Tensor]:
        return self._slots.tensors()

    def _slots_of(self, names: Iterable[str | None], held: Held | None) -> dict[str | None, int]:
        """The slots of names, which counts as a use of them."""
        wanted = distinct(names)
        if held is not None and not isinstance(held, Held):
            raise ValueError(f"held is {held!r}, wanted what hold or keep returned")
        own = self._versions.take(wanted, 0.0, passing=True) if held is None else held
        self._slots.streams.note()
        if held is None:
            own.wait()
        return self._versions.slots_of(wanted, own)
