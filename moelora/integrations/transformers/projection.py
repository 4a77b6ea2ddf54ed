"""Weights of an experts module: parameters, or quantized weights that replace them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn, TypeGuard

import torch
from torch import Tensor, nn

from moelora.weights import QuantizedWeights


class Experts(nn.Module):
    """The type of transformers' experts modules: the attributes that are used here."""

    config: Any
    has_gate: bool
    is_transposed: bool  # parameters are (E, in, out)
    down_proj: Any  # a parameter or QuantizedProjection, like gate_up_proj or up_proj
    down_proj_bias: Tensor
    act_fn: nn.Module
    block_size: Sequence[int] | None  # only with FP8, like activation_scheme
    activation_scheme: str
    _apply_gate: Callable[[Tensor], Tensor]
    _is_hf_initialized: bool
    _moelora: Any  # set while the model has adapters
    _moelora_layer: str
    _moelora_quantized: bool


class QuantizedProjection(nn.Module):
    """Replaces a parameter of an experts module by quantized weights.

    Tiles are a buffer, so that they are moved and copied with the model. They are not in state
    dicts: transformers could not load such a checkpoint.

    Parameters
    ----------
    shape : sequence of int
        (E, N, K) of the weights, rows first.
    dtype : torch.dtype
        Dtype of activations, bfloat16 or float16.
    """

    tiles: Tensor

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__()
        self.shape, self.dtype = tuple(shape), dtype
        self._empty: QuantizedWeights | None = None
        self.register_buffer("tiles", None, persistent=False)

    @property
    def weights(self) -> QuantizedWeights:
        """The weights; raises RuntimeError before `load_quantized_experts` has read them."""
        if self._empty is None:
            raise RuntimeError("the experts have no weights yet; call load_quantized_experts")
        return replace(self._empty, data=self.tiles)

    @weights.setter
    def weights(self, weights: QuantizedWeights) -> None:
        self._empty = replace(weights, data=torch.empty(0))
        self.tiles = weights.data

    def __getattr__(self, name: str) -> Any:
        if hasattr(Tensor, name):  # as of the parameter; AttributeError, so that hasattr works
            raise AttributeError(
                f"these experts have weights in tiles, which have no {name!r} of a parameter; PEFT "
                "adapts them only through moelora.integrations.peft.attach(model)"
            )
        return super().__getattr__(name)

    def __getitem__(self, expert: object) -> NoReturn:
        raise RuntimeError(
            "these experts have weights in tiles, which other implementations cannot read; "
            'call model.set_experts_implementation("moelora")'
        )

    def extra_repr(self) -> str:
        kind = "no weights yet" if self._empty is None else self._empty.format
        return f"{self.shape}, {kind}"


OF_FP8 = ("_scale_inv", "_activation_scale")  # suffixes of parameters other than weights


def refuse_fsdp1(module: nn.Module, name: str) -> None:
    """Raises RuntimeError for a weight that FSDP of version 1 has replaced.

    It joins parameters to one and leaves views of it as attributes, of which one requires a
    gradient as soon as another does.
    """
    if isinstance(module.__dict__.get(name), Tensor):
        raise RuntimeError(
            f"{name} of {type(module).__name__} is no parameter but a view of those that FSDP of "
            "version 1 (FullyShardedDataParallel) has joined, which moelora does not train or "
            "serve; take FSDP2: torch.distributed.fsdp.fully_shard, or fsdp_version: 2 in "
            "accelerate's configuration"
        )


def refuse_zero3(name: str, weight: object) -> None:
    """Raises NotImplementedError for a weight that DeepSpeed has split over processes."""
    if hasattr(weight, "ds_id"):
        raise NotImplementedError(
            f"{name} is split by DeepSpeed's ZeRO-3, which gathers a weight only for calls of its "
            "module, while moelora reads all weights of a layer at once; take ZeRO-1 or 2, or "
            "FSDP2: fsdp_version: 2 in accelerate's configuration"
        )


def no_experts(model: nn.Module) -> str:
    """What is wrong with a model of which no module is `is_experts`."""
    return f"{type(model).__name__} has no experts that use transformers' experts interface"


def is_experts(module: nn.Module) -> TypeGuard[Experts]:
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate")


def up_name(experts: Experts) -> str:
    return "gate_up_proj" if experts.has_gate else "up_proj"


def is_interleaved(experts: Experts) -> bool:
    """Whether rows of gate and up alternate."""
    return experts.has_gate and not getattr(experts, "is_concatenated", True)


def is_quantized(experts: Experts) -> bool:
    """Whether `remove_weights` was called. Reads no weight, which torch.compile would guard on."""
    return getattr(experts, "_moelora_quantized", False)


def is_loaded_fp8(module: nn.Module) -> TypeGuard[Experts]:
    """Whether experts are in transformers' FP8 format (`FP8Experts`)."""
    return is_experts(module) and f"{up_name(module)}_scale_inv" in module._parameters


def not_packed(name: str) -> str:
    return (
        f"{name} has weights of FP8 as transformers loads them, which moelora runs from tiles of "
        "its own; call moelora.integrations.transformers.enable(model), which packs them"
    )


def remove_weights(experts: Experts, dtype: torch.dtype) -> None:
    """Replaces parameters by empty `QuantizedProjection`s, and removes FP8 scales."""
    shapes = sizes(experts)
    for name, shape in zip((up_name(experts), "down_proj"), shapes, strict=True):
        delattr(experts, name)
        setattr(experts, name, QuantizedProjection(shape, dtype))
    for name in [name for name in experts._parameters if name.endswith(OF_FP8)]:
        delattr(experts, name)
    experts._moelora_quantized = True


def set_weights(experts: Experts, weights: Any, shared: bool = False) -> None:
    """Sets the weights of both projections: quantized ones, or tensors (E, N, K), which become
    parameters. With `shared`, these keep the storages and strides of the tensors."""
    of_tensors = isinstance(weights[1], Tensor)
    if not of_tensors and not is_quantized(experts):
        remove_weights(experts, weights[1].dtype)
    for name, found in zip((up_name(experts), "down_proj"), weights, strict=True):
        if not of_tensors:
            getattr(experts, name).weights = found
            continue
        delattr(experts, name)
        stored = found.transpose(1, 2) if experts.is_transposed else found
        stored = stored if shared else stored.contiguous()
        setattr(experts, name, nn.Parameter(stored, requires_grad=False))
    experts._moelora_quantized = not of_tensors


def sizes(experts: Experts) -> tuple[torch.Size, torch.Size]:
    """Shapes (E, N, K) of both projections' weights, independent of their storage order."""
    shapes = getattr(experts, up_name(experts)).shape, experts.down_proj.shape
    if experts.is_transposed and not is_quantized(experts):
        shapes = tuple((e, n, k) for e, k, n in shapes)
    up, down = map(torch.Size, shapes)
    return up, down


def expert_weights(
    experts: Experts,
) -> tuple[Tensor, Tensor] | tuple[QuantizedWeights, QuantizedWeights]:
    """The weights as stored, (E, in, out) if the module `is_transposed`; quantized weights are
    always rows first."""
    up, down = getattr(experts, up_name(experts)), experts.down_proj
    return (up.weights, down.weights) if is_quantized(experts) else (up, down)
