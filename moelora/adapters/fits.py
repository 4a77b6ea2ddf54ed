"""Whether the pairs of an adapter fit the layers and ranks of a pool; values are not read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from moelora.adapters.factors import check_dtype, check_plain, check_rank, check_shape
from moelora.adapters.layers import Adapter, LinearLayer, LinearPair, MoELayer, Pair, Projection
from moelora.operators.checks import check_mapping, is_number


def check_parts(adapter: Adapter) -> None:
    """ValueError unless `experts` and `linears` are mappings."""
    check_mapping("experts of the Adapter", adapter.experts)
    check_mapping("linears of the Adapter", adapter.linears)


def check_experts(
    adapter: Mapping[str, Mapping[Projection, Pair]], layers: Mapping[str, MoELayer], max_rank: int
) -> None:
    """ValueError names the layer and projection that do not fit."""
    for name, pairs in adapter.items():
        if name not in layers:
            raise ValueError(f"factors of {name}, which is none of the pool's layers of experts")
        check_mapping(f"experts[{name!r}] of the Adapter", pairs)
        layer = layers[name]
        known = {"gate", "up", "gate_up", "down"} if layer.gated else {"up", "down"}
        if unknown := sorted(pairs.keys() - known):
            raise ValueError(f"{name} has no {unknown[0]}, wanted one of {sorted(known)}")
        if "gate_up" in pairs and not pairs.keys().isdisjoint({"gate", "up"}):
            raise ValueError(f"{name} has gate_up beside gate or up, wanted either")
        for projection, pair in pairs.items():
            where, experts = f"{name}.{projection}", (layer.num_experts, 1)
            _check_pair(where, pair, Pair)
            wide, tall = layer.shape(projection)
            rank = pair.rank if pair.a.dim() == 3 else None
            _check(f"lora_A of {where}", pair.a, [(e, rank, wide) for e in experts])
            _check(f"lora_B of {where}", pair.b, [(e, tall, rank) for e in experts])
            check_rank(where, pair.rank, max_rank)
            for scaling in pair.scalings:
                _check_scaling(where, scaling)
            if len(pair.scalings) not in experts:
                raise ValueError(
                    f"{where}: there are {len(pair.scalings)} scalings, wanted one or one for each "
                    f"of {layer.num_experts} experts"
                )


def check_linears(
    adapter: Mapping[str, LinearPair], layers: Mapping[str, LinearLayer], max_rank: int
) -> None:
    """ValueError names the layer that does not fit."""
    for name, pair in adapter.items():
        if name not in layers:
            raise ValueError(f"factors of {name}, which is none of the pool's linear layers")
        layer = layers[name]
        _check_pair(name, pair, LinearPair)
        _check_scaling(name, pair.scaling)
        rank = pair.rank if pair.a.dim() == 2 else None
        _check(f"lora_A of {name}", pair.a, [(rank, layer.in_features)])
        _check(f"lora_B of {name}", pair.b, [(layer.out_features, rank)])
        check_rank(name, pair.rank, max_rank, "max_linear_rank")


def _check_pair(where: str, pair: object, kind: type[Pair] | type[LinearPair]) -> None:
    """ValueError unless it is a pair of tensors with elements in memory."""
    if not isinstance(pair, kind):
        raise ValueError(f"{where} is a {type(pair).__name__}, wanted a {kind.__name__}")
    check_plain(f"lora_A of {where}", pair.a)
    check_plain(f"lora_B of {where}", pair.b)
    if isinstance(pair, Pair) and not isinstance(pair.scalings, list | tuple):
        raise ValueError(f"scalings of {where} are {pair.scalings!r}, wanted a list of numbers")


def _check_scaling(where: str, scaling: object) -> None:
    if not is_number(scaling):
        raise ValueError(f"a scaling of {where} is {scaling!r}, wanted a finite number")


def _check(where: str, factor: torch.Tensor, forms: Sequence[tuple[int | None, ...]]) -> None:
    check_shape(where, tuple(factor.shape), forms)
    check_dtype(where, factor.dtype)
