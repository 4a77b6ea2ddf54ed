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
from typing import TypedDict

import torch

from moelora.adapters.fits import check_linears
from moelora.adapters.layers import LinearLayer, LinearPair
from moelora.adapters.stacks import Conversions, Copies, Place, cut, padded


class LinearFactors(TypedDict):
    """Adapters of one linear layer or embedding."""

    lora_a: torch.Tensor
    lora_b: torch.Tensor
    lora_ranks: torch.Tensor
    adapter_enabled: torch.Tensor


StagedLinears = dict[str, tuple[torch.Tensor, torch.Tensor]]  # (A, B), as LinearPair, by layer


class LinearStacks:
    """Stacks of all linear layers and embeddings of a pool."""

    def __init__(
        self,
        layers: Mapping[str, LinearLayer],
        max_loras: int,
        max_rank: int,
        places: Mapping[str, Place],
    ) -> None:
        self.layers = layers
        self.max_rank = max_rank
        self._a: dict[str, torch.Tensor] = {}
        self._b: dict[str, torch.Tensor] = {}
        self._ranks: dict[str, torch.Tensor] = {}
        r = padded(max_rank)
        for name, layer in layers.items():
            device, dtype = places[name]
            wide, tall = layer.in_features, layer.out_features
            shape = (wide, r) if layer.embedding else (r, wide)
            self._a[name] = torch.zeros(max_loras, 1, *shape, dtype=dtype, device=device)
            self._b[name] = torch.zeros(max_loras, 1, tall, r, dtype=dtype, device=device)
            self._ranks[name] = torch.zeros(max_loras, dtype=torch.int32, device=device)

    def tensors(self) -> list[torch.Tensor]:
        return [*self._a.values(), *self._b.values(), *self._ranks.values()]

    def of(self, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(lora_a, lora_b, lora_ranks) of a layer."""
        if name not in self._a:
            raise KeyError(f"{name!r} is none of the pool's linear layers")
        return self._a[name], self._b[name], self._ranks[name]

    def stage(self, adapter: Mapping[str, LinearPair], convert: Conversions) -> StagedLinears:
        """Check an adapter's pairs and convert them; ValueError says what does not fit."""
        check_linears(adapter, self.layers, self.max_rank)
        staged = {}
        for name, pair in adapter.items():
            dtype = self._a[name].dtype
            scaled = pair.b if pair.scaling == 1 else pair.b.float() * pair.scaling
            staged[name] = (
                convert.of(f"lora_A of {name}", pair.a, dtype),
                convert.of(f"lora_B of {name}", scaled, dtype),
            )
        return staged

    def write(
        self,
        name: str,
        slot: int,
        staged: tuple[torch.Tensor, torch.Tensor] | None,
        used: int,
        copies: Copies,
    ) -> int:
        """Add to `copies` the staged factors of a layer, None = zero; returns their rank.

        `used`: from this rank on the slot is zero already.
        """
        a, b = self._in(name, slot)
        rank = copies.pair(a, b, staged, min(used, a.size(0)))
        copies.fill(self._ranks[name][slot], rank)
        return rank

    def read(
        self, name: str, slot: int, like: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The factors of a layer in a slot, of the rank of `like`."""
        return cut(*self._in(name, slot), like)

    def _in(self, name: str, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(R, in) and (out, R) of a slot."""
        # Not under no_grad(): an interrupt as it begins would leave autograd disabled.
        a, b = self._a[name].detach()[slot, 0], self._b[name].detach()[slot, 0]
        return a.T if self.layers[name].embedding else a, b
