"""Which part of a layer's factors a process holds, where ranks share the layer's weights.

    weight split by               A                 B
    experts                       its experts       its experts
    intermediate, gate and up     whole             its rows
    intermediate, down            its columns       whole
    out of a linear layer         whole             its rows
    in of a linear layer          its columns       whole

A product with a part of A or B is a part of the sum, or of the outputs, that the model's own
collective joins: sum_ranks (h_r A_r^T) B^T = (h A^T) B^T. So adapters need none of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch

from moelora.adapters.layers import LinearLayer, LinearPair, MoELayer, Pair, Projection

Axis = Literal["experts", "intermediate", "in", "out"]
Layer = TypeVar("Layer", MoELayer, LinearLayer)
_SIZES = {
    "experts": "num_experts",
    "intermediate": "intermediate_size",
    "in": "in_features",
    "out": "out_features",
}


def whole(tensor: Any) -> Any:
    """A tensor, gathered from all processes if it is a DTensor: then all call this."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@dataclass(frozen=True)
class Shard:
    """Part `rank` of `size` of a layer's weights along an axis, as `torch.chunk` divides it.

    `fused`: the axis has this many blocks, each of which is divided, as gate and up of one weight.
    """

    axis: Axis
    rank: int
    size: int
    fused: int = 1

    def local(self, layer: Layer) -> Layer:
        """The layer with the sizes of this part. ValueError if a rank would have none."""
        field = _SIZES[self.axis]
        whole = getattr(layer, field)
        part = -(-(whole // self.fused) // self.size)
        sizes = [min(part, whole // self.fused - n * part) for n in range(self.size)]
        even = isinstance(layer, LinearLayer) and self.fused == 1
        if min(sizes) < 1 or (not even and whole % (self.size * self.fused)):
            raise ValueError(
                f"{layer.name} has {field}={whole}, which {self.size} ranks cannot share"
            )
        return replace(layer, **{field: self.fused * sizes[self.rank]})

    def experts(self, layer: MoELayer, pairs: Mapping[Projection, Pair]) -> dict[Projection, Pair]:
        """The part of the pairs of a whole layer."""
        return {projection: self._expert(layer, projection, p) for projection, p in pairs.items()}

    def _expert(self, layer: MoELayer, projection: Projection, pair: Pair) -> Pair:
        if self.axis == "experts":
            a, b = (t if t.size(0) == 1 else self.take(t, 0) for t in (pair.a, pair.b))
            each = len(pair.scalings) // self.size  # 0: one scaling for all
            mine = pair.scalings[self.rank * each : (self.rank + 1) * each]
            return Pair(a, b, mine or pair.scalings)
        if projection == "down":
            return Pair(self.take(pair.a, 2), pair.b, pair.scalings)
        halves = 2 if projection == "gate_up" and not layer.interleaved else 1
        return Pair(pair.a, self.take(pair.b, 1, halves), pair.scalings)

    def linear(self, pair: LinearPair) -> LinearPair:
        """The part of the pair of a whole layer."""
        if self.axis == "out":
            return LinearPair(pair.a, self.take(pair.b, 0, self.fused), pair.scaling)
        return LinearPair(self.take(pair.a, 1, self.fused), pair.b, pair.scaling)

    def take(self, tensor: torch.Tensor, dim: int, fused: int = 1) -> torch.Tensor:
        """This part of a tensor along `dim`; a view of it without `fused` blocks."""
        parts = [block.chunk(self.size, dim)[self.rank] for block in tensor.chunk(fused, dim)]
        return parts[0] if fused == 1 else torch.cat(parts, dim)

    def __str__(self) -> str:
        return f"{self.axis}, part {self.rank + 1} of {self.size}"
