"""Where the weights of an experts module are: parameters, or quantized ones in their place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard

import torch
from torch import Tensor, nn

from moelora import QuantizedWeights

if TYPE_CHECKING:

    class Experts(nn.Module):
        """An experts module behind transformers' interface: what is read of it, and left on it."""

        config: Any
        has_gate: bool
        is_transposed: bool  # parameters are (E, in, out)
        down_proj: Any  # a parameter, or a QuantizedProjection, as gate_up_proj or up_proj
        down_proj_bias: Tensor
        act_fn: nn.Module
        block_size: Sequence[int] | None  # of FP8, as the next
        activation_scheme: str
        _is_hf_initialized: bool
        _moelora: Any  # what serves the model; there while it has adapters
        _moelora_layer: str
        _moelora_quantized: bool

        def _apply_gate(self, gate_up: Tensor) -> Tensor: ...


class QuantizedProjection(nn.Module):
    """What an experts module has in place of a parameter: the same weights, quantized.

    Its tiles are a buffer, so that they move between devices and are copied with the model. They
    are in no state dict: a checkpoint of them would be none of transformers'.

    Parameters
    ----------
    shape : sequence of int
        (E, N, K), rows first, of the weights to come.
    dtype : torch.dtype
        Of the activations, bfloat16 or float16.
    """

    tiles: Tensor

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
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
            "these experts have weights in tiles, which other implementations cannot read; "
            'call model.set_experts_implementation("moelora")'
        )

    def extra_repr(self) -> str:
        kind = "no weights yet" if self._empty is None else self._empty.format
        return f"{self.shape}, {kind}"


OF_FP8 = ("_scale_inv", "_activation_scale")  # what parameters beside the weights end in


def is_experts(module: nn.Module) -> TypeGuard[Experts]:
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate")


def up_name(experts: Experts) -> str:
    return "gate_up_proj" if experts.has_gate else "up_proj"


def is_quantized(experts: Experts) -> bool:
    """Whether `take_off` has been here. Looks at no weight, which torch.compile would notice."""
    return getattr(experts, "_moelora_quantized", False)


def is_loaded_fp8(module: nn.Module) -> TypeGuard[Experts]:
    """Whether experts are FP8 as transformers loads them (`FP8Experts`)."""
    return is_experts(module) and f"{up_name(module)}_scale_inv" in module._parameters


def not_packed(name: str) -> str:
    return (
        f"{name} has weights of FP8 as transformers loads them, which moelora runs from tiles of "
        "its own; call moelora.integrations.transformers.enable(model), which packs them"
    )


def take_off(experts: Experts, dtype: torch.dtype) -> None:
    """Puts places for quantized weights where the parameters are; scales of FP8 go, too."""
    shapes = sizes(experts)
    for name, shape in zip((up_name(experts), "down_proj"), shapes, strict=True):
        delattr(experts, name)
        setattr(experts, name, QuantizedProjection(shape, dtype))
    for name in [name for name in experts._parameters if name.endswith(OF_FP8)]:
        delattr(experts, name)
    experts._moelora_quantized = True


def put_plain(experts: Experts, weights: tuple[Tensor, Tensor]) -> None:
    """Both projections, (E, N, K), as parameters in place of what the module has."""
    for name, found in zip((up_name(experts), "down_proj"), weights, strict=True):
        delattr(experts, name)
        stored = found.transpose(1, 2).contiguous() if experts.is_transposed else found
        setattr(experts, name, nn.Parameter(stored, requires_grad=False))
    experts._moelora_quantized = False


def put_on(experts: Experts, weights: tuple[QuantizedWeights, QuantizedWeights]) -> None:
    """Both projections in place of what the module has."""
    if not is_quantized(experts):
        take_off(experts, weights[1].dtype)
    for name, found in zip((up_name(experts), "down_proj"), weights, strict=True):
        getattr(experts, name).weights = found


def sizes(experts: Experts) -> tuple[torch.Size, torch.Size]:
    """Shapes of both projections' weights, (E, N, K), however the module stores them."""
    shapes = getattr(experts, up_name(experts)).shape, experts.down_proj.shape
    if experts.is_transposed and not is_quantized(experts):
        shapes = tuple((e, n, k) for e, k, n in shapes)
    up, down = map(torch.Size, shapes)
    return up, down


def expert_weights(
    experts: Experts,
) -> tuple[Tensor, Tensor] | tuple[QuantizedWeights, QuantizedWeights]:
    """The weights as the module stores them, (E, in, out) if it `is_transposed`; rows first if
    they are quantized."""
    up, down = getattr(experts, up_name(experts)), experts.down_proj
    return (up.weights, down.weights) if is_quantized(experts) else (up, down)
