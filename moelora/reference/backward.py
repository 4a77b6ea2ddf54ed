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


def _with_rounded(
    function: Callable[..., Tensor], names: tuple[str, ...], dtype: torch.dtype
) -> Callable[..., Tensor]:
    """A function whose arguments of these names are first rounded to `dtype`."""

    def rounded(**given: Any) -> Tensor:
        for name in names:
            value = given.get(name)
            if isinstance(value, list):
                given[name] = [v.to(dtype) for v in value]
            elif value is not None:
                given[name] = value.to(dtype)
        return function(**given)

    return rounded


def fused_experts_lora_backward_ref(grad_out: Tensor, **arguments: Any) -> GradientsByName:
    """Gradients of `fused_experts_lora_ref` in float64, on the CPU.

    Parameters
    ----------
    grad_out : Tensor, shape (M, K)
        Gradient of the result.
    **arguments
        Those of `fused_experts_lora_ref`.

    Returns
    -------
    dict
        By the name of each argument of `TRAINED` that is given.
    """

    def layer(**given: Any) -> Tensor:
        # With W8A8 weights, activations are first rounded to the compute dtype, which this
        # specifies.
        return fused_experts_lora_ref(**given, dtype=arguments["hidden_states"].dtype)

    return _gradients(layer, grad_out, arguments, lambda t: t.cpu().double())


def naive_fused_experts_lora_backward(grad_out: Tensor, **arguments: Any) -> GradientsByName:
    """Gradients of `naive_fused_experts_lora`, in the dtype and on the device of the input.

    Float32 factors beside 16-bit activations are rounded on their way in, and have gradients in
    float32.
    """
    layer = _with_rounded(naive_fused_experts_lora, TRAINED[2:6], arguments["hidden_states"].dtype)
    return _gradients(layer, grad_out, arguments, lambda t: t)


def fused_moe_lora_gemm_backward_ref(grad_out: Tensor, **arguments: Any) -> GradientsByName:
    """Gradients of `fused_moe_lora_gemm_ref` in float64, on the CPU.

    Parameters
    ----------
    grad_out : Tensor, shape (M, top_k, N)
        Gradient of the result.
    **arguments
        Those of `fused_moe_lora_gemm_ref`.

    Returns
    -------
    dict
        By the name of each of x, topk_weights, lora_a, lora_b and bias that is given.
    """
    return _gradients(
        fused_moe_lora_gemm_ref,
        grad_out,
        arguments,
        lambda t: t.cpu().double(),
        TRAINED_OF_PROJECTION,
    )


def naive_fused_moe_lora_gemm_backward(grad_out: Tensor, **arguments: Any) -> GradientsByName:
    """Gradients of `naive_fused_moe_lora_gemm`, in the dtype and on the device of the input.

    Float32 factors are as of `naive_fused_experts_lora_backward`.
    """
    projection = _with_rounded(
        naive_fused_moe_lora_gemm, ("lora_a", "lora_b"), arguments["x"].dtype
    )
    return _gradients(projection, grad_out, arguments, lambda t: t, TRAINED_OF_PROJECTION)
