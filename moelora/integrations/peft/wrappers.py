"""PEFT's wrappers around the parameters of experts, and their factors as an operator takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from moelora.integrations.peft.parallel import Part
from moelora.integrations.transformers.projection import Experts, refuse_zero3
from moelora.operators.storage import check_held


class Wrapper(nn.Module):
    """The type of PEFT's `ParamWrapper`: the attributes that are read, and those that are set on
    the outermost one.
    """

    base_layer: nn.Module
    parameter_name: str
    num_experts: int
    lora_A: Mapping[str, nn.Linear]
    lora_B: Mapping[str, nn.Linear]
    scaling: Mapping[str, float | Tensor]
    merged: bool
    active_adapters: list[str]
    disable_adapters: bool
    get_base_layer: Callable[[], Experts]
    unmerge: Callable[[], None]
    _moelora: Any  # AttachedExperts
    _moelora_layer: str


def is_wrapper(module: nn.Module) -> TypeGuard[Wrapper]:
    return hasattr(module, "parameter_name")


def wrappers_of(outermost: nn.Module) -> Iterator[Wrapper]:
    """PEFT's wrappers around one experts module, one per targeted parameter."""
    while is_wrapper(outermost):
        yield outermost
        outermost = outermost.base_layer


def rank_of(wrapper: Wrapper, name: str) -> int:
    return wrapper.lora_A[name].weight.shape[0] // wrapper.num_experts


def factors_of(wrapper: Wrapper, name: str) -> tuple[Tensor, Tensor]:
    """An adapter's A (1, E, r, in) and B (1, E, out, r), as views of its parameters.

    ValueError if one of them has been freed.
    """
    a, b = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
    for side, weight in (("lora_A", a), ("lora_B", b)):
        shown = f"{side}.{name} of {wrapper.parameter_name}"
        refuse_zero3(shown, weight)
        check_held(shown, weight)
    a = a.reshape(1, wrapper.num_experts, -1, a.shape[1])
    return a, b.reshape(1, b.shape[0], -1, wrapper.num_experts).permute(0, 3, 1, 2)


# ---- training: a served adapter has a copy in a pool, a trained one has none ----


def is_trained(wrappers: Sequence[Wrapper], names: Sequence[str]) -> bool:
    """Whether a call of the layer may produce gradients of these adapters' factors.

    In training mode this includes `no_grad`: the first forward of activation checkpointing runs
    there, and must compute the same as the second one.
    """
    if not (torch.is_grad_enabled() or wrappers[0].training):
        return False
    return any(
        side[name].weight.requires_grad
        for wrapper in wrappers
        for side in (wrapper.lora_A, wrapper.lora_B)
        for name in names
        if name in side
    )


def trained_arguments(
    wrappers: Sequence[Wrapper],
    names: Sequence[str],
    mapping: Tensor,
    dtype: torch.dtype,
    part: Part | None = None,
) -> dict[str, Any]:
    """The adapter arguments of `fused_experts_lora` for one call of one layer, in training.

    Factors are views of PEFT's own parameters, whose gradients are theirs, in their dtype. `names`
    are the adapters of slots 0, 1, ..., `mapping` (M,) the slot of each token. Float32 factors are
    kept; others are converted to `dtype`, that of the experts. `part`: of the experts that this
    process has.
    """
    found: dict[str, Any] = {}
    scalings = [{w.scaling[name] for w in wrappers if name in w.scaling} for name in names]
    # Tensors, as PEFT makes them for hotswapping compiled models, are not read on the host.
    common = all(len(s) == 1 and not any(isinstance(x, Tensor) for x in s) for s in scalings)
    for wrapper in wrappers:
        w = "w2" if wrapper.parameter_name == "down_proj" else "w13"
        pairs = [factors_of(wrapper, name) for name in names]
        if not common:
            pairs = [
                (a, (b.float() * wrapper.scaling[name]).to(b.dtype))
                for name, (a, b) in zip(names, pairs, strict=True)
            ]
        if len(pairs) == 1:  # a view of A, and one copy of B
            a, b = pairs[0]
        else:
            rank = max(a.shape[2] for a, _ in pairs)
            a = torch.cat([nn.functional.pad(a, (0, 0, 0, rank - a.shape[2])) for a, _ in pairs])
            b = torch.cat([nn.functional.pad(b, (0, rank - b.shape[3])) for _, b in pairs])
        if not a.dtype == b.dtype == torch.float32:
            a, b = a.to(dtype), b.to(dtype)
        found[f"{w}_lora_a"], found[f"{w}_lora_b"] = a, b
    found = found if part is None else part.take(found)
    found = {name: factor.contiguous() for name, factor in found.items()}
    found["token_lora_mapping"] = mapping
    if common:  # filled on the device: a copy from the host would synchronize
        ones = [mapping.new_full((1,), float(*s), dtype=torch.float32) for s in scalings]
        found["lora_scalings"] = ones[0] if len(ones) == 1 else torch.cat(ones)
    return found
