"""Join the factors of experts into pairs: stacked, ranks padded with zeros."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from moelora.adapters.columns import Layout
from moelora.adapters.config import LoraConfig
from moelora.adapters.factors import Factor, Sides, common_dtype
from moelora.adapters.layers import MoELayer, Pair, Projection
from moelora.adapters.places import ExpertPlace


def shapes(place: ExpertPlace, rank: int, exchanged: bool) -> list[tuple[int | None, ...]]:
    """Shapes that a factor may have."""
    if place.parameter is not None:
        return [place.wrapped_shape(rank, exchanged)]
    wide, tall = place.layer.shape(place.projection)
    matrix = (rank, wide) if place.key.side == "A" else (tall, rank)
    if place.expert is not None:
        return [matrix]
    return [(place.layer.num_experts, *matrix), (1, *matrix), matrix]


def stacked(
    place: ExpertPlace, tensor: torch.Tensor, rank: int, exchanged: bool, columns: Layout
) -> torch.Tensor:
    """Convert a checked tensor to (E or 1, r, in) or (E or 1, out, r)."""
    if place.parameter is None:
        return tensor.unsqueeze(0) if tensor.dim() == 2 else tensor
    experts = place.layer.num_experts
    if place.key.side == "A":
        tensor = tensor.reshape(experts, rank, -1)
    elif columns == "rank_major":
        tensor = tensor.reshape(-1, rank, experts).permute(2, 0, 1)
    else:
        tensor = tensor.reshape(-1, experts, rank).permute(1, 0, 2)
    return tensor.transpose(1, 2) if exchanged else tensor


def exchanges(
    wrapped: Mapping[ExpertPlace, tuple[int, ...]], ranks: Mapping[str, int], lora: LoraConfig
) -> bool:
    """Whether the factors of `target_parameters` have in and out swapped; all or none.

    Until 0.19.0 PEFT stored A (E*r, out) and B (in, r*E) with delta^T = B A. Shapes tell if in and
    out differ; an adapter has one layout, so one factor decides for all. If all factors are square,
    as those of gate_up_proj with 2I = K, the version in adapter_config.json decides; without one
    the adapter is refused.
    """
    layouts = {False, True}
    for place, shape in wrapped.items():
        rank = ranks[place.key.text]
        wanted = {layout: place.wrapped_shape(rank, layout) for layout in sorted(layouts)}
        layouts = {layout for layout in wanted if wanted[layout] == shape}
        if not layouts:
            forms = " or ".join(str(form) for form in dict.fromkeys(wanted.values()))
            hint = place.hint(shape, rank)
            raise ValueError(f"{place.key.text}: shape is {shape}, wanted {forms}{hint}")
    if not wrapped:
        return False
    if len(layouts) == 1:
        return layouts.pop()
    place = next(iter(wrapped))
    exchanged = lora.exchanges_in_and_out(place.layer.transposed or place.layer.interleaved)
    if exchanged is None:
        raise ValueError(
            f"{place.key.text}: the shape {wrapped[place]} fits both layouts that PEFT has had for "
            f"target_parameters, and peft_version {lora.peft_version!r:.60} does not tell which; "
            "set it to the release that wrote them (from 0.19.1 on A is over the inputs)"
        )
    return exchanged


class ExpertPairs:
    """Collects factors and joins them."""

    def __init__(self) -> None:
        self._layers: dict[str, MoELayer] = {}
        self._found: dict[str, dict[Projection, Sides]] = {}

    def add(self, place: ExpertPlace, factor: Factor, exchanged: bool) -> None:
        self._layers[place.layer.name] = place.layer
        sides = self._found.setdefault(place.layer.name, {}).setdefault(place.projection, Sides())
        turned = place.parameter is not None and exchanged
        sides.add("A" if (place.key.side == "A") != turned else "B", place.expert, factor)

    def check(self) -> None:
        """Raise ValueError unless all factors have their partners and do not overlap."""
        for name, of_layer in self._found.items():
            for sides in of_layer.values():
                _check(sides)
            if "gate_up" in of_layer and not of_layer.keys().isdisjoint(("gate", "up")):
                key = next(iter(of_layer["gate_up"].a.values())).key
                raise ValueError(
                    f"{key}: {name} has factors of gate_up_proj and of only gate or up"
                )

    def ranks(self) -> dict[str, dict[Projection, int]]:
        """The rank of each pair, by layer and projection."""
        return {
            name: {p: max(f.rank for f in sides.a.values()) for p, sides in of_layer.items()}
            for name, of_layer in self._found.items()
        }

    def join(self) -> dict[str, dict[Projection, Pair]]:
        """Read the factors: pairs by layer and projection."""
        return {
            name: {p: _pair(self._layers[name], sides) for p, sides in of_layer.items()}
            for name, of_layer in self._found.items()
        }


def _check(sides: Sides) -> None:
    """Raise ValueError unless both factors of every pair exist, with the same rank."""
    sides.check(shared=True)
    a, b = sides.a, sides.b
    for expert in sides.parts() or (None,):
        left, right = a.get(expert) or a[None], b.get(expert) or b[None]
        if left.rank != right.rank:
            raise ValueError(f"{left.key} has rank {left.rank}, {right.key} has rank {right.rank}")


def _pair(layer: MoELayer, sides: Sides) -> Pair:
    """Join the factors of one projection; experts without factors become zero."""
    a, b, experts = sides.a, sides.b, sides.parts()
    if experts:
        scalings = [0.0] * layer.num_experts
        for expert in experts:
            # A shared side has no expert in its path; the other side determines it.
            scalings[expert] = (a.get(expert) or b[expert]).scaling
        used = {scalings[e] for e in experts}
        if len(used) == 1:
            scalings = [used.pop()]
    else:
        scalings = [a[None].scaling]
    every = [*a.values(), *b.values()]
    rank, dtype = max(f.rank for f in every), common_dtype(every)
    number = layer.num_experts
    return Pair(_stack(a, number, 1, rank, dtype), _stack(b, number, 2, rank, dtype), scalings)


def _stack(
    factors: dict[int | None, Factor], experts: int, rank_dim: int, rank: int, dtype: torch.dtype
) -> torch.Tensor:
    """One tensor (E or 1, ...) of all experts, ranks zero-padded to the largest."""
    if None in factors:
        return factors[None].tensor().to(dtype)
    stack = torch.empty(0)
    for expert, factor in factors.items():
        tensor = factor.tensor()[0]
        if not stack.numel():
            shape = [experts, *tensor.shape]
            shape[rank_dim] = rank
            stack = torch.zeros(shape, dtype=dtype, device=tensor.device)
        stack[expert].narrow(rank_dim - 1, 0, factor.rank).copy_(tensor)
    return stack
