"""Training of experts' adapters: PEFT's own parameters as factors.

A served adapter has a copy in a pool. A trained one has none: the operator reads views of PEFT's
parameters, and gradients are theirs, in their dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moelora.integrations.peft.wrappers import factors_of

if TYPE_CHECKING:
    from moelora.integrations.peft.parallel import Part
    from moelora.integrations.peft.wrappers import Wrapper


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
    wrappers: Sequence[Wrapper],
    names: Sequence[str],
    mapping: Tensor,
    dtype: torch.dtype,
    part: Part | None = None,
) -> dict[str, Any]:
    """The adapter arguments of `fused_experts_lora` for one call of one layer.

    `names` are the adapters of slots 0, 1, ..., `mapping` (M,) the slot of each token. Float32
    factors are kept; others are converted to `dtype`, that of the experts. `part`: of the experts
    that this process has.
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
