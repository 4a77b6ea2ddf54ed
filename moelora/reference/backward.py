"""Gradients of layers and projections: autograd through the loops of their forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from moelora.reference.layer import (
    fused_experts_lora_ref,
    fused_moe_lora_gemm_ref,
    naive_fused_experts_lora,
    naive_fused_moe_lora_gemm,
)

# Arguments with gradients.
TRAINED = (
    *("hidden_states", "topk_weights", "w13_lora_a", "w13_lora_b", "w2_lora_a", "w2_lora_b"),
    *("w13_bias", "w2_bias"),
)

TRAINED_OF_PROJECTION = ("x", "topk_weights", "lora_a", "lora_b", "bias")

GradientsByName: TypeAlias = "dict[str, Tensor | list[Tensor]]"


def _gradients(
    function: Callable[..., Tensor],
    grad_out: Tensor,
    arguments: dict[str, Any],
    convert: Callable[[Tensor], Tensor],
    names: tuple[str, ...] = TRAINED,
) -> GradientsByName:
    """Gradients by argument, in its form; zeros where nothing contributes."""
    leaves: list[Tensor] = []

    def leaf(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return [leaf(v) for v in value]
        leaves.append(convert(value.detach()).clone().requires_grad_())
        return leaves[-1]

    present = [name for name in names if arguments.get(name) is not None]
    trained = {name: leaf(arguments[name]) for name in present}
    with torch.enable_grad():
        out = function(**arguments | trained)
    found: tuple[Tensor | None, ...] = (None,) * len(leaves)
    if out.requires_grad:
        found = torch.autograd.grad(out, leaves, grad_out.to(out), allow_unused=True)
    pairs = zip(leaves, found, strict=True)
    grads = iter([torch.zeros_like(t) if g is None else g for t, g in pairs])
    return {
        name: [next(grads) for _ in value] if isinstance(value, list) else next(grads)
        for name, value in trained.items()
    }


def _naive(
    function: Callable[..., Tensor],
    grad_out: Tensor,
    arguments: dict[str, Any],
    factors: tuple[str, ...],
    dtype: torch.dtype,
    names: tuple[str, ...],
) -> GradientsByName:
    """In the form of the arguments; float32 `factors` beside activations of 16 bits are rounded to
    `dtype` on their way in, and have gradients in float32."""

    def rounded(**given: Any) -> Tensor:
        for name in factors:
            if (value := given.get(name)) is not None:
                is_list = isinstance(value, list)
                given[name] = [v.to(dtype) for v in value] if is_list else value.to(dtype)
        return function(**given)

    return _gradients(rounded, grad_out, arguments, lambda t: t, names)


def fused_experts_lora_backward_ref(grad_out: Tensor, **arguments: Any) -> GradientsByName:
    """Gradients of `fused_experts_lora_ref`, whose arguments these are, for `grad_out` (M, K): in
    float64 on the CPU, by the name of each of `TRAINED` that is given."""

    def layer(**given: Any) -> Tensor:
        # With W8A8 weights, activations are first rounded to the compute dtype, which this
        # specifies.
        return fused_experts_lora_ref(**given, dtype=arguments["hidden_states"].dtype)

    return _gradients(layer, grad_out, arguments, lambda t: t.cpu().double())


def naive_fused_experts_lora_backward(grad_out: Tensor, **arguments: Any) -> GradientsByName:
    """Gradients of `naive_fused_experts_lora`, in the dtype and on the device of the input."""
    dtype, factors = arguments["hidden_states"].dtype, TRAINED[2:6]
    return _naive(naive_fused_experts_lora, grad_out, arguments, factors, dtype, TRAINED)


def fused_moe_lora_gemm_backward_ref(grad_out: Tensor, **arguments: Any) -> GradientsByName:
    """Gradients of `fused_moe_lora_gemm_ref`, whose arguments these are, for `grad_out` (M, top_k,
    N): in float64 on the CPU, by the name of each of `TRAINED_OF_PROJECTION` that is given."""
    names, convert = TRAINED_OF_PROJECTION, lambda t: t.cpu().double()
    return _gradients(fused_moe_lora_gemm_ref, grad_out, arguments, convert, names)


def naive_fused_moe_lora_gemm_backward(grad_out: Tensor, **arguments: Any) -> GradientsByName:
    """Gradients of `naive_fused_moe_lora_gemm`, in the dtype and on the device of the input."""
    names, dtype = TRAINED_OF_PROJECTION, arguments["x"].dtype
    return _naive(naive_fused_moe_lora_gemm, grad_out, arguments, names[2:4], dtype, names)
