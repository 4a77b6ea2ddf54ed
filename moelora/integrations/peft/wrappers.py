"""PEFT's wrappers around the parameters of experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor, nn

from moelora.integrations.transformers.projection import refuse_zero3
from moelora.operators.storage import check_held

if TYPE_CHECKING:
    from moelora.integrations.transformers.projection import Experts

    class Wrapper(nn.Module):
        """The attributes of PEFT's `ParamWrapper` that are read, and those that are set on the
        outermost one.
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
        _moelora: Any  # AttachedExperts
        _moelora_layer: str

        def get_base_layer(self) -> Experts: ...

        def unmerge(self) -> None: ...


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
