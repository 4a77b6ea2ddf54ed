"""Factors of linear layers and embeddings, for all slots of a pool.

R is the largest rank rounded up to 8. Per layer:

    lora_a      (max_loras, 1, R, in)       of an embedding (max_loras, 1, in, R)
    lora_b      (max_loras, 1, out, R)
    lora_ranks  (max_loras,), 0 if the adapter has no factors of the layer

in the layout of expert stacks with one expert. The scaling, which may differ between layers, is
folded into B, because lists of blocks are shared by all layers of a pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict

import torch

from moelora.adapters.fits import check_linears
from moelora.adapters.layers import LinearLayer, LinearPair
from moelora.adapters.stacks import Conversions, Converted, Factors, Place, padded


class LinearFactors(TypedDict):
    """Adapters of one linear layer or embedding."""

    lora_a: torch.Tensor
    lora_b: torch.Tensor
    lora_ranks: torch.Tensor
    adapter_enabled: torch.Tensor


@dataclass(eq=False)
class LinearStacks:
    """Stacks of all linear layers and embeddings of a pool."""

    layers: Mapping[str, LinearLayer]
    max_loras: int
    max_rank: int
    places: Mapping[str, Place]

    def __post_init__(self) -> None:
        self._stacks = {name: self._allocate(layer) for name, layer in self.layers.items()}

    def _allocate(self, layer: LinearLayer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        device, dtype = self.places[layer.name]
        wide, tall, r = layer.in_features, layer.out_features, padded(self.max_rank)
        shape = (wide, r) if layer.embedding else (r, wide)
        return (
            torch.zeros(self.max_loras, 1, *shape, dtype=dtype, device=device),
            torch.zeros(self.max_loras, 1, tall, r, dtype=dtype, device=device),
            torch.zeros(self.max_loras, dtype=torch.int32, device=device),
        )

    def of(self, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(lora_a, lora_b, lora_ranks) of a layer."""
        if name not in self._stacks:
            raise KeyError(f"{name!r} is none of the pool's linear layers")
        return self._stacks[name]

    def stage(self, adapter: Mapping[str, LinearPair], convert: Conversions) -> Converted:
        """Check an adapter's pairs and convert them; ValueError says what does not fit."""
        check_linears(adapter, self.layers, self.max_rank)
        staged: Converted = {}
        for name, pair in adapter.items():
            dtype = self._stacks[name][0].dtype
            scaled = pair.b if pair.scaling == 1 else pair.b.float() * pair.scaling
            a = convert.of(f"lora_A of {name}", pair.a, dtype)
            staged[name] = [(a, convert.of(f"lora_B of {name}", scaled, dtype))]
        return staged

    def pairs(self, name: str, slot: int) -> list[Factors]:
        """The stacks of a layer in a slot, as `stage` has their factors."""
        a, b = (stack.detach()[slot, 0] for stack in self._stacks[name][:2])
        return [(a.T if self.layers[name].embedding else a, b)]
