"""A new adapter with PEFT's initial factors: its product is zero."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from moelora.adapters.layers import Adapter, LinearLayer, LinearPair, MoELayer, Pair, Projection
from moelora.adapters.names import is_called


class Layers(Protocol):
    """Layers that adapters have factors of, and the largest ranks of these: an `AdapterPool`."""

    @property
    def layers(self) -> Mapping[str, MoELayer]: ...
    @property
    def linears(self) -> Mapping[str, LinearLayer]: ...

    max_rank: int
    max_linear_rank: int


def new_adapter(
    pool: Layers,
    rank: int,
    alpha: float | None,
    targets: Sequence[str] | None,
    generator: torch.Generator | None,
) -> Adapter:
    """An adapter of the layers of `pool` that `targets` names; arguments as of `Tenants.add`."""
    chosen = _chosen(pool, targets)
    for name in chosen:
        limit = pool.max_rank if name in pool.layers else pool.max_linear_rank
        if not 1 <= rank <= limit:
            raise ValueError(f"rank is {rank}, wanted 1 to {limit}, the pool's for {name}")
    scaling = 2.0 if alpha is None else alpha / rank

    def uniform(*shape: int) -> Tensor:
        bound = 1 / math.sqrt(shape[-1])
        return torch.empty(shape, device="cpu").uniform_(-bound, bound, generator=generator)

    experts: dict[str, dict[Projection, Pair]] = {}
    linears = {}
    for name in chosen:
        if name in pool.linears:
            linear = pool.linears[name]
            a = uniform(rank, linear.in_features)
            b = a.new_zeros(linear.out_features, rank)
            if linear.embedding:
                a, b = a.zero_(), b.normal_(generator=generator)
            linears[name] = LinearPair(a, b, scaling)
            continue
        layer = pool.layers[name]
        e, experts[name] = layer.num_experts, {}
        projections: tuple[Projection, ...] = ("gate_up" if layer.gated else "up", "down")
        for projection in projections:
            wide, tall = layer.shape(projection)
            a = uniform(e, rank, wide)
            experts[name][projection] = Pair(a, a.new_zeros(e, tall, rank), [scaling])
    return Adapter(experts, linears)


def _chosen(pool: Layers, targets: Sequence[str] | None) -> list[str]:
    every = [*pool.layers, *pool.linears]
    if targets is None:
        return every
    for target in targets:
        if not any(is_called(name, target) for name in every):
            raise ValueError(f"targets names {target!r}, which no layer of the pool is called")
    return [name for name in every if any(is_called(name, target) for target in targets)]
