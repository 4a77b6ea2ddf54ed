"""Join the factors of linear layers and embeddings into pairs."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from moelora.adapters.factors import Factor, Sides, common_dtype
from moelora.adapters.layers import LinearLayer, LinearPair
from moelora.adapters.places import JOINED, LinearPlace


@dataclass
class _Found:
    """Factors found for one layer, or for the layers that it joins."""

    linear: LinearLayer
    sides: Sides = field(default_factory=Sides)
    rows: dict[int, int] = field(default_factory=dict)  # of parts


def shapes(place: LinearPlace, rank: int) -> list[tuple[int | None, ...]]:
    """Shapes that a factor may have; None: any number of rows."""
    rows = place.linear.out_features if place.part is None else None
    return [(rank, place.linear.in_features) if place.key.side == "A" else (rows, rank)]


class LinearPairs:
    """Collects factors and joins them."""

    def __init__(self) -> None:
        self._found: dict[str, _Found] = {}
        self._parts: dict[str, list[_Part]] = {}

    def add(self, place: LinearPlace, factor: Factor, shape: tuple[int, ...]) -> None:
        found = self._found.setdefault(place.linear.name, _Found(place.linear))
        found.sides.add(place.key.side, place.part, factor)
        if place.part is not None and place.key.side == "B":
            found.rows[place.part] = shape[0]

    def check(self) -> None:
        """Raise ValueError unless all factors have their partners and fill their layers."""
        self._parts = {name: _parts(found) for name, found in self._found.items()}

    def ranks(self) -> dict[str, int]:
        """Rank of each layer; the sum over its parts."""
        return {name: sum(p.a.rank for p in parts) for name, parts in self._parts.items()}

    def join(self) -> dict[str, LinearPair]:
        """Read the factors: pairs by layer."""
        return {name: _pair(self._found[name].linear, parts) for name, parts in self._parts.items()}


@dataclass(frozen=True)
class _Part:
    """A pair of factors for rows `start` to `start + rows` of a layer."""

    a: Factor
    b: Factor
    start: int
    rows: int


def _parts(found: _Found) -> list[_Part]:
    """Parts of a layer's pair; ValueError if factors are missing or do not fit."""
    sides = found.sides
    sides.check(shared=False)
    if None not in sides.a:
        return _joined(found)
    return [_Part(sides.a[None], sides.b[None], 0, found.linear.out_features)]


def _joined(found: _Found) -> list[_Part]:
    """Factors of a fused layer's parts, each with the rows of the layer that it covers."""
    linear = found.linear
    whole = linear.name.rpartition(".")[2]
    names = JOINED[whole]
    parts, sides = found.sides.parts(), found.sides
    key = sides.a[parts[0]].key
    rows = [found.rows.get(number) for number in range(len(names))]
    if whole == "gate_up_proj":  # halves, either of which may be absent
        rows = [linear.out_features // 2 if n is None else n for n in rows]
    if None in rows:
        missing = [name for name, n in zip(names, rows, strict=True) if n is None]
        raise ValueError(f"{key}: {linear.name} joins {names}, but {missing} have no factors")
    sizes = [n for n in rows if n is not None]
    covered = sum(sizes)
    if covered > linear.out_features or (covered < linear.out_features and whole != "in_proj"):
        raise ValueError(
            f"{key}: {names} have {sizes} rows, wanted {linear.out_features} together, those of "
            f"{linear.name}"
        )
    return [_Part(sides.a[n], sides.b[n], sum(sizes[:n]), sizes[n]) for n in parts]


def _pair(linear: LinearLayer, parts: list[_Part]) -> LinearPair:
    """Join pairs of parts: ranks are concatenated, B is zero in the rows of other parts."""
    dtype = common_dtype([factor for part in parts for factor in (part.a, part.b)])
    if len(parts) == 1 and parts[0].rows == linear.out_features:
        part = parts[0]
        return LinearPair(part.a.tensor().to(dtype), part.b.tensor().to(dtype), part.a.scaling)
    scalings = {part.a.scaling for part in parts}
    fold = len(scalings) > 1
    if fold:
        dtype = torch.float32
    a = torch.cat([part.a.tensor().to(dtype) for part in parts])
    b = torch.zeros(linear.out_features, a.size(0), dtype=dtype, device=a.device)
    column = 0
    for part in parts:
        own = b[part.start : part.start + part.rows, column : column + part.a.rank]
        own.copy_(part.b.tensor())
        if fold:
            own.mul_(part.a.scaling)
        column += part.a.rank
    return LinearPair(a, b, 1.0 if fold else scalings.pop())
