"""Arguments of compiled operators by name, and the backward operators with what they return."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moelora import _C
from moelora.operators.torch_private import arguments_of

# "moelora"; a copy of the package under another name, as the Hub's, has another one.
NAMESPACE = _C.NAMESPACE
OPERATORS = getattr(torch.ops, NAMESPACE)


@functools.cache
def names_of(op: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in arguments_of(op))


def by_name(op: Any, args: Sequence[Any]) -> dict[str, Any]:
    """The first arguments of `op` by name; the others have defaults."""
    return dict(zip(names_of(op), args, strict=False))


def in_order(op: Any, given: Mapping[str, Any]) -> list[Any]:
    """The arguments of `op` by name; those that `given` lacks are its last, and have defaults."""
    return [given[name] for name in names_of(op) if name in given]


def is_absent(value: Tensor) -> bool:
    """Whether a tensor stands for None; sizes may be symbolic."""
    return value.dim() == 1 and isinstance(value.size(0), int) and value.size(0) == 0


@dataclass(frozen=True)
class Backward:
    """A backward operator that returns new tensors. NAME_out writes to buffers instead.

    `places` has the number of outputs for each argument with a gradient, in their order; those of
    factors are one for each slice that there can be. `saved` names what its forward has saved.
    """

    name: str
    places: Mapping[str, int]
    saved: tuple[str, ...] = ()

    @functools.cached_property
    def bits(self) -> dict[str, int]:
        """Bits of the operator's argument `wanted`, by argument."""
        return {name: 1 << n for n, name in enumerate(self.places)}

    @functools.cached_property
    def factors(self) -> list[str]:
        return [name for name in self.places if "lora" in name]

    def op(self, suffix: str = "") -> Any:
        return getattr(OPERATORS, self.name + suffix).default

    def by_argument(self, found: Sequence[Tensor], given: Mapping[str, Any]) -> dict[str, Any]:
        """The operator's outputs by argument, of factors a list as long as theirs."""
        values, grads = iter(found), {}
        for name, count in self.places.items():
            each = [next(values) for _ in range(count)]
            grads[name] = each[: len(given[name])] if name in self.factors else each[0]
        return grads


OF_LAYER = Backward(
    "fused_experts_lora_backward",
    {
        "hidden_states": 1,
        "topk_weights": 1,
        "w13_lora_a": 2,
        "w13_lora_b": 2,
        "w2_lora_a": 1,
        "w2_lora_b": 1,
        "w13_bias": 1,
        "w2_bias": 1,
    },
    ("gate_up", "w13_shrink", "w2_shrink"),
)
OF_PROJECTION = Backward(
    "fused_moe_lora_gemm_backward", {"x": 1, "topk_weights": 1, "lora_a": 4, "lora_b": 4, "bias": 1}
)
# The backward of each operator that autograd records.
BACKWARDS = {
    **dict.fromkeys(("fused_experts_lora", "fused_experts_lora_saving"), OF_LAYER),
    **dict.fromkeys(
        ("fused_moe_lora_gemm", "moe_lora_gate_up_delta", "moe_lora_down_delta"), OF_PROJECTION
    ),
}
