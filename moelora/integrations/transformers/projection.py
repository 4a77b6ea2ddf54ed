"""Where the weights of an experts module are: parameters, or four bits in their place."""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

import torch
from torch import Tensor, nn

from moelora import QuantizedWeights


class QuantizedProjection(nn.Module):
    """What an experts module has in place of a parameter: the same weights in four bits.

    Its tiles are a buffer, so that they move between devices and are copied with the model. They
    are in no state dict: a checkpoint of them would be none of transformers'.

    Parameters
    ----------
    shape : sequence of int
        (E, N, K), rows first, of the weights to come.
    dtype : torch.dtype
        Of the activations, bfloat16 or float16.
    """

    def __init__(self, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.dtype = tuple(shape), dtype
        self._empty: QuantizedWeights | None = None
        self.register_buffer("tiles", None, persistent=False)

    @property
    def weights(self) -> QuantizedWeights:
        """The weights; RuntimeError before `load_quantized_experts` has read them."""
        if self._empty is None:
            raise RuntimeError("the experts have no weights yet; call load_quantized_experts")
        return replace(self._empty, data=self.tiles)

    @weights.setter
    def weights(self, weights: QuantizedWeights) -> None:
        self._empty = replace(weights, data=torch.empty(0))
        self.tiles = weights.data

    def __getitem__(self, expert: object) -> NoReturn:
        raise RuntimeError(
            "these experts have weights of four bits, which other implementations cannot read; "
            'call model.set_experts_implementation("moelora")'
        )

    def extra_repr(self) -> str:
        kind = "no weights yet" if self._empty is None else self._empty.format
        return f"{self.shape}, {kind}"


def up_name(experts: nn.Module) -> str:
    return "gate_up_proj" if experts.has_gate else "up_proj"


def is_quantized(experts: nn.Module) -> bool:
    """Whether `take_off` has been here. Looks at no weight, which torch.compile would notice."""
    return getattr(experts, "_moelora_quantized", False)


def take_off(experts: nn.Module, dtype: torch.dtype) -> None:
    """Puts places for weights of four bits where the parameters are."""
    shapes = sizes(experts)
    for name, shape in zip((up_name(experts), "down_proj"), shapes, strict=True):
        delattr(experts, name)
        setattr(experts, name, QuantizedProjection(shape, dtype))
    experts._moelora_quantized = True


def sizes(experts: nn.Module) -> tuple[torch.Size, torch.Size]:
    """Shapes of both projections' weights, (E, N, K), however the module stores them."""
    up, down = getattr(experts, up_name(experts)), experts.down_proj
    if experts.is_transposed and not is_quantized(experts):
        return tuple(torch.Size((w.shape[0], w.shape[2], w.shape[1])) for w in (up, down))
    return torch.Size(up.shape), torch.Size(down.shape)


def expert_weights(
    experts: nn.Module,
) -> tuple[Tensor, Tensor] | tuple[QuantizedWeights, QuantizedWeights]:
    """The weights as the module stores them, (E, in, out) if it `is_transposed`; rows first if
    they are quantised."""
    up, down = getattr(experts, up_name(experts)), experts.down_proj
    return (up.weights, down.weights) if is_quantized(experts) else (up, down)
