"""Adapters of a pool: read, checked against its layers and ranks, and refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from moelora.adapters import checkpoint
from moelora.adapters.checkpoint import Own
from moelora.adapters.columns import Layout
from moelora.adapters.factors import check_rank
from moelora.adapters.fits import check_parts
from moelora.adapters.layers import Adapter, LinearLayer, MoELayer
from moelora.adapters.slots import Slots, Staged

AdapterSource: TypeAlias = "str | Path | Mapping[str, torch.Tensor] | Adapter"


class Given(NamedTuple):
    """An adapter as `AdapterPool.add` is given it; other methods get some of it."""

    name: str
    source: Any  # an AdapterSource
    config: Mapping[str, Any] | None = None
    layout: Layout | None = None


class Reader:
    """Reads adapters for layers of a pool, to be written to `slots`; `others` are layers of the
    model that it lacks, with the reason. `own` is that of `AdapterPool`.
    """

    def __init__(
        self,
        slots: Slots,
        layers: Iterable[MoELayer | LinearLayer],
        others: Mapping[MoELayer | LinearLayer, str],
        own: Own | None,
    ) -> None:
        self._slots = slots
        self.max_rank = slots.experts.max_rank
        self.max_linear_rank = slots.linears.max_rank
        self._own = own
        self._others = {layer.name: why for layer, why in others.items()}
        every = [*layers, *others]
        experts = [layer for layer in every if isinstance(layer, MoELayer)]
        self._every = experts, [layer for layer in every if isinstance(layer, LinearLayer)]

    def read(self, given: Given) -> Adapter:
        """Read a checkpoint whose factors all fit the pool."""
        with _errors_of(given.name, given.source):
            adapter = checkpoint.load(
                given.source,
                given.config,
                *self._every,
                max_rank=self.max_rank,
                max_linear_rank=self.max_linear_rank,
                layout=given.layout,
                own=self._own,
            )
            self._check_served(*adapter.experts, *adapter.linears)
            return adapter

    def peek(self, given: Given) -> None:
        """Refuse a folder whose configuration or header shows that it does not fit the pool."""
        with _errors_of(given.name, given.source):
            checkpoint.check_config(given.config)
            info = checkpoint.peek(given.source, *self._every, layout=given.layout)
            check_rank("its factors of experts", info.max_rank, self.max_rank)
            for layer, rank in info.linear_ranks.items():
                check_rank(layer, rank, self.max_linear_rank, "max_linear_rank")
            self._check_served(*info.expert_ranks, *info.linear_ranks)
            self._slots.experts.check_info(info)

    def stage(self, given: Given) -> Staged:
        """An adapter in the dtypes of its stacks."""
        adapter = given.source if isinstance(given.source, Adapter) else self.read(given)
        with _errors_of(given.name, adapter):
            check_parts(adapter)
            self._check_served(*adapter.experts, *adapter.linears)
            return self._slots.stage(adapter)

    def _check_served(self, *layers: str) -> None:
        for layer in layers:
            if layer in self._others:
                raise ValueError(f"factors of {layer}, {self._others[layer]}")


@contextmanager
def _errors_of(name: str, source: AdapterSource) -> Iterator[None]:
    """Errors say whose adapter they are about."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"adapter {name!r}: {error}") from None
    except ValueError as error:
        raise ValueError(f"adapter {name!r}: {error}{checkpoint.hint(source)}") from None
