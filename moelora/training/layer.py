"""Explicit backward of a layer: the forward that saves for it, and the gradients.

Autograd runs both for `fused_experts_lora`. Call them directly without autograd, or to accumulate
gradients into given buffers.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moelora.operators.call import operators, run, typed
from moelora.operators.checks import check_count, dtype_name
from moelora.operators.experts import Weights, fused_experts_lora, layer_arguments
from moelora.operators.schema import OF_LAYER, by_name
from moelora.operators.sparse import index_of_pairs
from moelora.operators.storage import check_held
from moelora.training.gradients import FactorGradients, Options, gradients


class Saved(NamedTuple):
    """Tensors saved by a forward, by flat row `p = m * top_k + j`, in the dtype of `hidden_states`.

    Attributes
    ----------
    gate_up : Tensor, shape (M * top_k, 2 I) ((M * top_k, I) for "relu2")
        `x w13^T` with adapters and bias, before the activation, columns in the order of the rows
        of `w13`; 0 for rows of skipped experts.
    w13_shrink : Tensor, shape (M * top_k, slices, R), or (0,) without adapters of w13
        `s x A^T`; 0 from the true rank on and in rows without an adapter.
    w2_shrink : Tensor, shape (M * top_k, R), or (0,) without adapters of w2
        `s h A2^T`, likewise.
    """

    gate_up: Tensor
    w13_shrink: Tensor
    w2_shrink: Tensor


class Gradients(NamedTuple):
    """Gradients by argument of `fused_experts_lora`; None if absent or not requested.

    Those of factors are a list if the factors are a sequence.
    """

    hidden_states: Tensor | None = None
    topk_weights: Tensor | None = None
    w13_lora_a: FactorGradients = None
    w13_lora_b: FactorGradients = None
    w2_lora_a: FactorGradients = None
    w2_lora_b: FactorGradients = None
    w13_bias: Tensor | None = None
    w2_bias: Tensor | None = None


OPTIONS = Options(fused_experts_lora)


@typed
@OPTIONS
def fused_experts_lora_saving(
    hidden_states: Tensor,
    w13: Weights,
    w2: Weights,
    topk_weights: Tensor,
    topk_ids: Tensor,
    **options: Any,
) -> tuple[Tensor, Saved]:
    """`fused_experts_lora`, and what its backward needs.

    Parameters
    ----------
    hidden_states, w13, w2, topk_weights, topk_ids
        Those of `fused_experts_lora`.
    **options
        Its other arguments, token_lora_mapping, ..., apply_router_weight_on_input.

    Returns
    -------
    Tensor, shape (M, K)
        The bits of `fused_experts_lora`. Autograd records it in the same way.
    Saved
        Nothing else needs to be kept but the arguments.

    Raises
    ------
    ValueError, TypeError, RuntimeError
        As `fused_experts_lora`.
    NotImplementedError
        The device has no kernel for it.
    """
    args, last = layer_arguments(
        hidden_states, w13, w2, topk_weights, topk_ids, **OPTIONS.values(options)
    )
    out, *saved = run(operators.fused_experts_lora_saving.default, *args, *last)
    return out, Saved(*saved)


@typed
@OPTIONS
def fused_experts_lora_backward(
    grad_out: Tensor,
    saved: Saved,
    hidden_states: Tensor,
    w13: Weights,
    w2: Weights,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    wanted: Collection[str] | None = None,
    float32: bool = False,
    grads: Gradients | None = None,
    accumulate: bool = False,
    pairs: Tensor | None = None,
    **options: Any,
) -> Gradients:
    """Gradients of `fused_experts_lora`.

    For routed row `p` of token `m` with expert `e`, adapter `l`, routing weight `t`, and with
    `v = grad_out[m] W2eff`, `h = activation(gate_up)`, `dgu = activation'(gate_up) (t v)`, where
    `Weff = W + s B A`::

        topk_weights[p]   = <v, h> + <grad_out[m], w2_bias[e]>
        hidden_states[m]  = sum over the rows of m of dgu W13eff
        w2_lora_b[l, e]   = sum over rows of (t grad_out[m])^T (s h A2^T)
        w2_lora_a[l, e]   = sum over rows of s (t grad_out[m] B2)^T h
        w13_lora_b[l, e]  = sum over rows of dgu^T (s x A13^T)
        w13_lora_a[l, e]  = sum over rows of s (dgu B13)^T x[m]

    Factors and biases that no row uses get zeros, and so does what lies beyond a true rank.

    Parameters
    ----------
    grad_out : Tensor, shape (M, K)
        Gradient of the result, in the dtype of `hidden_states`.
    saved : Saved
        What `fused_experts_lora_saving` returned for the other arguments.
    hidden_states, w13, w2, topk_weights, topk_ids
        As the forward had them.
    {wanted}
    {float32}
    grads : Gradients, optional
        Where to write instead of returning new tensors: what is given says what is wanted. Those
        of factors and biases are in the dtype of `hidden_states` or in float32, of any strides
        whose last is 1; that of `topk_weights` is float32.
    {accumulate}
    pairs : Tensor, shape (max_loras, E), int32, optional
        Makes the gradients of factors in `grads` sparse: one matrix per pair of adapter and local
        expert that has an index, as `touched_pairs` returns them. Their shape is (S, R, K), for
        instance, instead of (max_loras, E, R, K). No two pairs may have the same index. Pairs whose
        index is not in 0 to S - 1 get no gradient, and matrices without a pair are not written.
        Factors that experts share are not sparse.
    **options
        The forward's other arguments, token_lora_mapping, ..., apply_router_weight_on_input.

    Returns
    -------
    Gradients
        `grads`, or new tensors; that of `topk_weights` in its dtype.

    Raises
    ------
    {backward_errors}

    Notes
    -----
    The weights of experts are frozen. Every sum is float32 in a fixed order: the same arguments
    give the same bits, an adapter's gradients do not depend on other adapters of the batch, and the
    gradient of a token without an adapter has the bits that it has without adapters. Activations
    that quantized weights round to FP8 have the gradient of the identity there.
    """
    args, last = layer_arguments(
        hidden_states, w13, w2, topk_weights, topk_ids, **OPTIONS.values(options)
    )
    given = by_name(operators.fused_experts_lora.default, (*args, *last))
    given |= zip(OF_LAYER.saved, saved, strict=True)
    return gradients(
        OF_LAYER,
        Gradients,
        given | {"grad_out": grad_out},
        {"hidden_states": hidden_states, "topk_weights": topk_weights, **options},
        wanted=wanted,
        float32=float32,
        grads=grads,
        accumulate=accumulate,
        pairs=pairs,
    )


@typed
def touched_pairs(
    topk_ids: Tensor,
    token_lora_mapping: Tensor,
    max_loras: int,
    num_experts: int,
    expert_map: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Indices of the pairs of adapter and expert that tokens reach, for sparse gradients.

    Parameters
    ----------
    topk_ids : Tensor, shape (M, top_k)
        Experts of each token; those out of range are skipped, as by `fused_experts_lora`.
    token_lora_mapping : Tensor, shape (M,)
        Adapter of each token; none if out of range.
    max_loras, num_experts : int
        Adapters and (local) experts of the factors.
    expert_map : Tensor, optional
        As of `fused_experts_lora`.

    Returns
    -------
    Tensor, shape (max_loras, num_experts), int32
        In the order of (adapter, expert), from 0 on; -1 where no token is. On the device of
        `topk_ids`, without waiting for it.
    Tensor, shape ()
        How many there are: at most `min(max_loras * num_experts, topk_ids.numel())`, which is the
        number of gradients to allocate where nothing may wait for a device.

    Raises
    ------
    ValueError
        A shape, dtype or number is not as above.
    {other_type}

    Examples
    --------
    >>> import torch
    >>> from moelora.training import touched_pairs
    >>> pairs, count = touched_pairs(torch.tensor([[0, 2], [2, 1]]), torch.tensor([1, -1]), 2, 3)
    >>> pairs.tolist(), count.item()
    ([[-1, -1, -1], [0, -1, 1]], 2)
    """
    _check_ids(topk_ids, token_lora_mapping, max_loras, num_experts, expert_map)
    if expert_map is not None and not expert_map.numel():
        expert_map = None
    return index_of_pairs(topk_ids, token_lora_mapping, max_loras, num_experts, expert_map)


def _check_ids(
    ids: Tensor, mapping: Tensor, max_loras: int, num_experts: int, expert_map: Tensor | None
) -> None:
    """ValueError for arguments of `touched_pairs` that would broadcast, or be no indices."""
    rows = tuple(ids.shape[:1])
    for name, value, is_right, expected in (
        ("topk_ids", ids, ids.dim() == 2, "(M, top_k)"),
        ("token_lora_mapping", mapping, tuple(mapping.shape) == rows, f"{rows}"),
        ("expert_map", expert_map, expert_map is None or expert_map.dim() == 1, "1 dimension"),
    ):
        if value is None:
            continue
        check_held(name, value)
        if not is_right:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, expected {expected}")
        if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
            raise ValueError(f"{name} has dtype {dtype_name(value.dtype)}, expected an integer one")
        if value.device != ids.device:
            raise ValueError(f"{name} is on {value.device}, expected {ids.device} as topk_ids")
    for name, number in (("max_loras", max_loras), ("num_experts", num_experts)):
        check_count(name, number, 0)
    if max_loras * num_experts > torch.iinfo(torch.int32).max:
        raise ValueError(
            f"max_loras is {max_loras} and num_experts is {num_experts}, expected at most 2^31 - 1 "
            "pairs, whose indices are int32"
        )
