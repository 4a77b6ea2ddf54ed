"""Training of experts' adapters: PEFT's own parameters as factors.

A served adapter has a copy in a pool. A trained one has none: the operator reads views of PEFT's
parameters, and gradients are theirs, in their dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moelora.storage import check_held

if TYPE_CHECKING:
    from moelora.integrations.peft.experts import Wrapper


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


def arguments(
    wrappers: Sequence[Wrapper], names: Sequence[str], mapping: Tensor, dtype: torch.dtype
) -> dict[str, Any]:
    """The adapter arguments of `fused_experts_lora` for one call of one layer.

    Parameters
    ----------
    wrappers : sequence of ParamWrapper
        PEFT's wrappers around the experts.
    names : sequence of str
        The adapters of slots 0, 1, ...
    mapping : Tensor, shape (M,)
        Slot of each token.
    dtype : torch.dtype
        Dtype of the experts. Float32 factors are kept; others are converted to it.
    """
    found: dict[str, Any] = {"token_lora_mapping": mapping}
    scalings = [{float(w.scaling[name]) for w in wrappers if name in w.scaling} for name in names]
    common = all(len(s) == 1 for s in scalings)
    for wrapper in wrappers:
        w = "w2" if wrapper.parameter_name == "down_proj" else "w13"
        pairs = [_factors(wrapper, name, not common) for name in names]
        rank = max(a.shape[1] for a, _ in pairs)
        a = torch.stack([nn.functional.pad(a, (0, 0, 0, rank - a.shape[1])) for a, _ in pairs])
        b = torch.stack([nn.functional.pad(b, (0, rank - b.shape[2])) for _, b in pairs])
        b = b.contiguous()  # compilers' stack may keep the strides of PEFT's B
        if not a.dtype == b.dtype == torch.float32:
            a, b = a.to(dtype), b.to(dtype)
        found[f"{w}_lora_a"], found[f"{w}_lora_b"] = a, b
    if common:  # filled on the device: a copy from the host would synchronize
        ones = [mapping.new_full((1,), *s, dtype=torch.float32) for s in scalings]
        found["lora_scalings"] = torch.cat(ones)
    return found


def weights(wrapper: Wrapper, name: str) -> tuple[Tensor, Tensor]:
    """Parameters A and B of an adapter; ValueError if one of them has been freed."""
    a, b = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
    for side, weight in (("lora_A", a), ("lora_B", b)):
        check_held(f"{side}.{name} of {wrapper.parameter_name}", weight)
    return a, b


def _factors(wrapper: Wrapper, name: str, scaled: bool) -> tuple[Tensor, Tensor]:
    """A (E, r, in) and B (E, out, r); if `scaled`, B is multiplied by the scaling of its
    projection.
    """
    a, b = weights(wrapper, name)
    a = a.reshape(wrapper.num_experts, -1, a.shape[1])
    b = b.reshape(b.shape[0], -1, wrapper.num_experts).permute(2, 0, 1)
    return a, (b.float() * float(wrapper.scaling[name])).to(b.dtype) if scaled else b
