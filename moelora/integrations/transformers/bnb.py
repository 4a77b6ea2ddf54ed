"""Schemes of bitsandbytes: NF4 and FP4 of linear layers, as `save_pretrained` writes them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from moelora.integrations.transformers.scheme import Scheme, unread
from moelora.weights import QuantizedWeights
from moelora.weights.bnb import PARTS as BESIDE
from moelora.weights.bnb import STATE, tensor_of

PREFIX = "weight."  # names of a weight's statistics begin with it
PARTS = frozenset(f"{PREFIX}{part}" for part in BESIDE)


def split(name: str) -> tuple[str, str] | None:
    """(linear layer, suffix) of the name of a statistic; None of other tensors."""
    linear, _, part = name.partition(f".{PREFIX}")
    part = f"{PREFIX}{part}"
    return (linear, part) if part in PARTS or part.startswith(f"{PREFIX}{STATE}") else None


def scheme(config: Mapping[str, Any], linear: str, parts: Collection[str]) -> Scheme:
    states = sorted(part for part in parts if part.startswith(f"{PREFIX}{STATE}"))
    if not states:
        name = f"{'INT8' if 'SCB' in parts else 'four bits without a quant_state'} of bitsandbytes"
        refusal = (
            f"experts of bitsandbytes are read in NF4 or FP4, with a tensor {PREFIX}{STATE}nf4"
        )
        return Scheme(name, tuple(sorted(parts)), (), unread, {}, refusal=refusal)
    kind = states[0].removeprefix(f"{PREFIX}{STATE}")
    required = ("weight", f"{PREFIX}absmax", f"{PREFIX}quant_map", *states)
    optional = tuple(f"{PREFIX}{part}" for part in BESIDE if part.startswith("nested"))
    name = f"{kind.upper()} of bitsandbytes"
    return Scheme(name, required, optional, _dequantize, {}, _experts, are_apart=True)


def _dequantize(weight: Tensor, **parts: Tensor) -> Tensor:
    """The float32 products that bitsandbytes rounds to its dtype."""
    found = tensor_of(weight, {name.removeprefix(PREFIX): part for name, part in parts.items()})
    codes = torch.stack((found.codes >> 4, found.codes & 15), 1).flatten()
    scales = found.absmax.repeat_interleave(found.blocksize)[: codes.numel()]
    numbers = parts[f"{PREFIX}quant_map"].float().reshape(-1)[codes.int()]
    return (numbers * scales).reshape(found.shape)


def _experts(weight: Any, gate_up: Any, dtype: torch.dtype, **parts: Any) -> QuantizedWeights:
    """Each argument has a list for each expert: of one tensor, or of gate's and up's."""
    names = [name.removeprefix(PREFIX) for name in parts]
    states = [
        [dict(zip(names, one, strict=True)) for one in zip(*of_expert, strict=True)]
        for of_expert in zip(*parts.values(), strict=True)
    ]
    if gate_up is None:
        weight, states = [one for (one,) in weight], [one for (one,) in states]
    return QuantizedWeights.from_bnb(weight, states, gate_up=gate_up, dtype=dtype)
