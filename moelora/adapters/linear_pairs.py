"""Pairs of factors of linear layers and embeddings, from the tensors of an adapter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from moelora.adapters.factors import Factor, partner
from moelora.adapters.layers import LinearLayer, LinearPair
from moelora.adapters.places import JOINED, LinearPlace


@dataclass
class _Sides:
    """What was found for one layer, or for one of those that it joins."""

    a: Factor | None = None
    b: Factor | None = None


@dataclass
class _Found:
    linear: LinearLayer
    whole: _Sides | None = None
    parts: dict[int, _Sides] = field(default_factory=dict)


def shapes(place: LinearPlace, rank: int) -> list[tuple[int | None, ...]]:
    """The shapes that a factor may have; None is any number of rows."""
    rows = place.linear.out_features if place.part is None else None
    return [(rank, place.linear.in_features) if place.key.side == "A" else (rows, rank)]


class LinearPairs:
    """Collects factors and joins them."""

    def __init__(self) -> None:
        self._found: dict[str, _Found] = {}

    def add(self, place: LinearPlace, factor: Factor) -> None:
        found = self._found.setdefault(place.linear.name, _Found(place.linear))
        if place.part is None:
            sides = found.whole = found.whole or _Sides()
        else:
            sides = found.parts.setdefault(place.part, _Sides())
        taken = sides.a if place.key.side == "A" else sides.b
        if taken is not None:
            raise ValueError(f"{factor.key} and {taken.key} are the same factor")
        if place.key.side == "A":
            sides.a = factor
        else:
            sides.b = factor

    def join(self) -> dict[str, LinearPair]:
        return {name: _pair(found) for name, found in self._found.items()}


def _pair(found: _Found) -> LinearPair:
    if found.whole is None:
        return _joined(found)
    a, b = _both(found.whole)
    if found.parts:
        other = next(iter(found.parts.values()))
        key = (other.a or other.b or a).key
        raise ValueError(f"{a.key} and {key} are both of {found.linear.name}")
    return LinearPair(a.tensor, b.tensor, a.scaling)


def _both(sides: _Sides) -> tuple[Factor, Factor]:
    if sides.a is None or sides.b is None:
        there = sides.a or sides.b
        assert there is not None
        raise ValueError(f"{there.key} has no {partner(there.key)}")
    a, b = sides.a, sides.b
    if a.tensor.dtype != b.tensor.dtype:
        dtype = torch.float32
        a.tensor, b.tensor = a.tensor.to(dtype), b.tensor.to(dtype)
    return a, b


def _joined(found: _Found) -> LinearPair:
    """The pairs of the parts of a layer as one: ranks side by side, each with its own rows."""
    linear = found.linear
    whole = linear.name.rpartition(".")[2]
    names = JOINED[whole]
    pairs = {number: _both(found.parts[number]) for number in sorted(found.parts)}
    key = next(iter(pairs.values()))[0].key
    rows = [pairs[n][1].tensor.size(0) if n in pairs else None for n in range(len(names))]
    if whole == "gate_up_proj":  # halves, so that one of them may be alone
        rows = [linear.out_features // 2 if n is None else n for n in rows]
    if None in rows:
        missing = [name for name, n in zip(names, rows, strict=True) if n is None]
        raise ValueError(f"{key}: {linear.name} joins {names}, but {missing} have no factors")
    sizes = [n for n in rows if n is not None]
    covered = sum(sizes)
    if covered > linear.out_features or (covered < linear.out_features and whole != "in_proj"):
        raise ValueError(
            f"{key}: {names} have {sizes} rows together, wanted {linear.out_features}, those of "
            f"{linear.name}"
        )
    scalings = {a.scaling for a, _ in pairs.values()}
    fold = len(scalings) > 1
    dtypes = {factor.tensor.dtype for pair in pairs.values() for factor in pair}
    dtype = torch.float32 if fold or len(dtypes) > 1 else dtypes.pop()
    rank = sum(a.rank for a, _ in pairs.values())
    joined_a = torch.cat([a.tensor.to(dtype) for a, _ in pairs.values()])
    joined_b = torch.zeros(linear.out_features, rank, dtype=dtype)
    column = 0
    for number, (a, b) in pairs.items():
        row = sum(sizes[:number])
        block = b.tensor.to(dtype) * (a.scaling if fold else 1)
        joined_b[row : row + sizes[number], column : column + a.rank] = block
        column += a.rank
    return LinearPair(joined_a, joined_b, 1.0 if fold else scalings.pop())


def ranks(places: Iterable[tuple[LinearPlace, int]]) -> dict[str, int]:
    """The rank of each layer, of factors with these ranks: of parts together."""
    by_part: dict[str, dict[int | None, int]] = {}
    for place, rank in places:
        by_part.setdefault(place.linear.name, {})[place.part] = rank
    return {name: sum(parts.values()) for name, parts in by_part.items()}
