"""Explicit backward of a projection, and of deltas (LoRA without a base product).

Autograd runs both, for `fused_moe_lora_gemm` and the two deltas. Call them directly without
autograd, or to accumulate gradients into given buffers.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from torch import Tensor

from moelora.operators.call import absent_tensor, operators, typed
from moelora.operators.delta import delta_arguments, moe_lora_gate_up_delta
from moelora.operators.experts import Weights, fused_moe_lora_gemm, projection_arguments
from moelora.operators.schema import OF_PROJECTION, by_name
from moelora.training.gradients import FactorGradients, Options, gradients


class ProjectionGradients(NamedTuple):
    """Gradients by argument of `fused_moe_lora_gemm` or of a delta; None if absent or not
    requested.

    Those of factors are a list if the factors are a sequence.
    """

    x: Tensor | None = None
    topk_weights: Tensor | None = None
    lora_a: FactorGradients = None
    lora_b: FactorGradients = None
    bias: Tensor | None = None


OPTIONS = Options(fused_moe_lora_gemm)
DELTA_OPTIONS = Options(moe_lora_gate_up_delta, without=("out", "add_inputs"))


@typed
@OPTIONS
def fused_moe_lora_gemm_backward(
    grad_out: Tensor,
    x: Tensor,
    w: Weights,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    wanted: Collection[str] | None = None,
    float32: bool = False,
    grads: ProjectionGradients | None = None,
    accumulate: bool = False,
    pairs: Tensor | None = None,
    **options: Any,
) -> ProjectionGradients:
    """Gradients of `fused_moe_lora_gemm`, which saves nothing but its arguments.

    For routed row `p` with expert `e`, adapter `l` and `t` its routing weight with
    `mul_routed_weight`, otherwise 1, and with `v = grad_out[p] w[e] + s (grad_out[p] B) A`::

        x[p or m]     = t v, summed over the rows that share a row of x
        topk_weights  = <v, x> + <grad_out[p], bias[e]>, zero without mul_routed_weight
        lora_b[l, e]  = sum over rows of grad_out[p]^T (t s x A^T)
        lora_a[l, e]  = sum over rows of (t s grad_out[p] B)^T x
        bias[e]       = sum over rows of t grad_out[p]

    Factors and biases that no row uses get zeros, and so does what lies beyond a true rank.

    Parameters
    ----------
    grad_out : Tensor, shape (M, top_k, N)
        Gradient of the result, in the dtype of `x`.
    x, w, topk_weights, topk_ids
        As the forward had them.
    {wanted}
    {float32}
    {projection_grads} Those of the bias are as those of factors.
    {accumulate}
    {projection_pairs}
    {options}

    Returns
    -------
    ProjectionGradients
        `grads`, or new tensors; that of `topk_weights` in its dtype.

    Raises
    ------
    {backward_errors}

    Notes
    -----
    Sums, rounding and the isolation of adapters are those of `fused_experts_lora_backward`.
    """
    args, last = projection_arguments(x, w, topk_weights, topk_ids, **OPTIONS.values(options))
    given = by_name(operators.fused_moe_lora_gemm.default, (*args, *last)) | {"num_experts": 0}
    given |= {"grad_out": grad_out}
    leaves = {"x": x, "topk_weights": topk_weights, **options}
    return _gradients(
        given, leaves, grads, wanted=wanted, float32=float32, accumulate=accumulate, pairs=pairs
    )


@typed
@DELTA_OPTIONS
def moe_lora_delta_backward(
    grad_out: Tensor,
    x: Tensor,
    topk_weights: Tensor | None,
    topk_ids: Tensor,
    *,
    wanted: Collection[str] | None = None,
    float32: bool = False,
    grads: ProjectionGradients | None = None,
    accumulate: bool = False,
    pairs: Tensor | None = None,
    **options: Any,
) -> ProjectionGradients:
    """Gradients of what `moe_lora_gate_up_delta` and `moe_lora_down_delta` add to `out`.

    They are those of `fused_moe_lora_gemm_backward` with weights of zero. The gradient of `out`
    itself is `grad_out` with `add_inputs`, otherwise zero.

    Parameters
    ----------
    grad_out : Tensor, shape (M, top_k, N)
        Gradient of `out`, in the dtype of `x`.
    x, topk_weights, topk_ids
        As the forward had them.
    {wanted}
    {float32}
    {projection_grads}
    {accumulate}
    {projection_pairs}
    {options} Without `add_inputs` and `out`.

    Returns
    -------
    ProjectionGradients
        `grads`, or new tensors; that of `topk_weights` in its dtype. There is no bias.

    Raises
    ------
    {backward_errors}
    """
    args = delta_arguments(x, topk_weights, topk_ids, **DELTA_OPTIONS.values(options))
    absent = absent_tensor(x)
    # `out` comes first; a backward does not take it.
    given = by_name(operators.moe_lora_gate_up_delta.default, (None, *args))
    given |= {"w": absent, "bias": absent, "grad_out": grad_out}
    leaves = {"x": x, "topk_weights": topk_weights, **options}
    return _gradients(
        given, leaves, grads, wanted=wanted, float32=float32, accumulate=accumulate, pairs=pairs
    )


def _gradients(
    given: dict[str, Any], arguments: dict[str, Any], grads: ProjectionGradients | None, **how: Any
) -> ProjectionGradients:
    """As `gradients`; that of `x` in its shape."""
    x, to = arguments["x"], grads
    if grads is not None and grads.x is not None:
        to = grads._replace(x=_in_rows(grads.x, x))
    found = gradients(OF_PROJECTION, ProjectionGradients, given, arguments, grads=to, **how)
    if grads is not None:
        return grads
    return found if found.x is None else found._replace(x=found.x.view(x.shape))


def _in_rows(grad: Tensor, x: Tensor) -> Tensor:
    """`grads.x` (M, top_k, K) as (M * top_k, K), in its own memory."""
    if grad.shape != x.shape:
        raise ValueError(f"grads.x has shape {tuple(grad.shape)}, expected {tuple(x.shape)} as x")
    if grad.dim() != 3:
        return grad
    if grad.stride(0) != grad.size(1) * grad.stride(1) and grad.size(0) > 1 < grad.size(1):
        raise ValueError(f"grads.x has strides {grad.stride()}, expected equally spaced rows")
    return grad.flatten(0, 1)
