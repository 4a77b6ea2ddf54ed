"""The public operators: torch.ops.moelora.* with keyword arguments and checks.

`None` stands for an absent argument.
All functions work on CPU and CUDA tensors, all on one device, never synchronize with the host,
and can be captured in a CUDA graph and traced by torch.compile. `fused_experts_lora` has a
backward (autograd.py), and so have `fused_moe_lora_gemm` and the deltas; the others raise where
autograd would need one.
"""

from typing import Any, Literal, TypeAlias, get_args

from torch import Tensor

from moelora.operators.call import (
    Factors,
    absent_tensor,
    choose,
    enabled_or_absent,
    factor_list,
    ids_or_absent,
    number_or_absent,
    operators,
    or_absent,
    run,
    typed,
    weights_or_absent,
)
from moelora.operators.checks import dtype_name
from moelora.operators.tiles import NOT_QUANTIZED, TiledWeights

# In the order of moelora_activation in csrc/moelora.h.
Activation: TypeAlias = Literal[
    "silu", "gelu", "swigluoai", "relu2", "swigluoai_uninterleave", "situ", "swiglustep"
]
ACTIVATIONS = {name: number for number, name in enumerate(get_args(Activation))}


Weights: TypeAlias = Tensor | TiledWeights


def _data(weights: Weights) -> Tensor:
    return weights if isinstance(weights, Tensor) else weights.data


def _layout_of(name: str, weights: Weights, x: Tensor, columns: int | None) -> tuple[float, ...]:
    """The layout of weights with `columns` columns; zeros if they are not quantized.

    Tiles do not record their dtype and number of columns.
    """
    if isinstance(weights, Tensor) or weights.layout == NOT_QUANTIZED:
        return NOT_QUANTIZED
    if weights.dtype != x.dtype:
        made, got = (dtype_name(d) for d in (weights.dtype, x.dtype))
        raise ValueError(f"{name} was quantized for {made}, expected {got} as of the activations")
    if columns is not None and weights.shape[2] != columns:
        raise ValueError(f"{name}.shape[2] is {weights.shape[2]}, expected {columns} columns")
    return weights.layout


def _last(w: Weights, x: Tensor) -> tuple[float, ...]:
    """Trailing arguments of an operator: none in most calls."""
    if isinstance(w, Tensor):
        return ()
    return _layout_of("w", w, x, x.size(1) if x.dim() == 2 else None)


def _last_of_layer(
    w13: Weights, w2: Weights, x: Tensor, activation: Activation
) -> tuple[float, ...]:
    """The same for a layer: the layout of w13, then that of w2, whose row order is fixed."""
    if isinstance(w13, Tensor) and isinstance(w2, Tensor):
        return ()
    hidden = x.size(1) if x.dim() == 2 else None
    gated = 1 if activation == "relu2" else 2
    inter = w13.shape[1] // gated if len(w13.shape) == 3 else None
    first, (format2, _, *rest2) = _layout_of("w13", w13, x, hidden), _layout_of("w2", w2, x, inter)
    return *first, format2, *rest2


def projection_arguments(
    x: Tensor,
    w: Weights,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    token_lora_mapping: Tensor | None,
    lora_a: Factors | None,
    lora_b: Factors | None,
    lora_ranks: Tensor | None,
    lora_scalings: Tensor | None,
    adapter_enabled: Tensor | None,
    bias: Tensor | None,
    expert_map: Tensor | None,
    mul_routed_weight: bool,
) -> tuple[tuple[Any, ...], tuple[float, ...]]:
    """The arguments of `fused_moe_lora_gemm` except `out`, as `layer_arguments` has a layer's."""
    absent = absent_tensor(x)
    args = (
        x,
        _data(w),
        weights_or_absent("topk_weights", topk_weights, absent),
        topk_ids,
        or_absent(token_lora_mapping, absent),
        factor_list(lora_a),
        factor_list(lora_b),
        ids_or_absent("lora_ranks", lora_ranks, absent),
        weights_or_absent("lora_scalings", lora_scalings, absent),
        enabled_or_absent(adapter_enabled, absent),
        or_absent(bias, absent),
        ids_or_absent("expert_map", expert_map, absent),
        mul_routed_weight,
    )
    return args, _last(w, x)


@typed
def fused_moe_lora_gemm(
    x: Tensor,
    w: Weights,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    token_lora_mapping: Tensor | None = None,
    lora_a: Factors | None = None,
    lora_b: Factors | None = None,
    lora_ranks: Tensor | None = None,
    lora_scalings: Tensor | None = None,
    adapter_enabled: Tensor | None = None,
    bias: Tensor | None = None,
    expert_map: Tensor | None = None,
    mul_routed_weight: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """One projection of all routed rows, base product and adapters in one pass.

    For token `m`, choice `j`, expert `e = topk_ids[m, j]`, adapter `l = token_lora_mapping[m]`::

        out[m, j] = x w[e]^T + lora_scalings[l] (x lora_a[l, e]^T) lora_b[l, e]^T + bias[e]

    A row with adapter -1, or whose adapter is disabled, has the same bits as without adapters.

    Parameters
    ----------
    x : Tensor, shape (M, K) or (M * top_k, K)
        Input of each token, or of each routed row. float32, bfloat16 or float16 (CUDA: the
        latter two); the dtype of all weights, biases and of the result. Factors have it too, or
        are float32 and rounded to it in every call.
    w : Tensor, shape (E, N, K), or PackedWeights or QuantizedWeights
        Expert weights.
    {topk_weights} Read if `mul_routed_weight`.
    {topk_ids} A row whose id is out of range becomes 0.
    {token_lora_mapping?} Factors without it are refused.
    lora_a : Tensor or sequence of tensors, shape (max_loras, E or 1, R, K), optional
        Shrink factors, one for each slice of the output columns. An expert dimension of 1 is
        one factor shared by all experts.
    lora_b : Tensor or sequence of tensors, shape (max_loras, E or 1, N / slices, R), optional
        Expand factors, one for each slice.
    {lora_ranks?}
    {lora_scalings?}
    {adapter_enabled?}
    bias : Tensor, shape (E, N), optional
        Added to each row of an expert.
    {expert_map?} Their rows become 0.
    {mul_routed_weight}
    out : Tensor, shape (M, top_k, N), optional
        Where to write the result.

    Returns
    -------
    Tensor, shape (M, top_k, N)
        `out`, or a new tensor.

    Raises
    ------
    {errors}

    Notes
    -----
    Rows are grouped by (expert, adapter) as in Punica (Chen et al., 2023, arXiv:2310.18547) and
    S-LoRA (Sheng et al., 2023, arXiv:2311.03285); the low-rank product joins the accumulators of
    the base product instead of being added to its output by further kernels.
    """
    args, last = projection_arguments(
        x,
        w,
        topk_weights,
        topk_ids,
        token_lora_mapping=token_lora_mapping,
        lora_a=lora_a,
        lora_b=lora_b,
        lora_ranks=lora_ranks,
        lora_scalings=lora_scalings,
        adapter_enabled=adapter_enabled,
        bias=bias,
        expert_map=expert_map,
        mul_routed_weight=mul_routed_weight,
    )
    if out is None:
        return run(operators.fused_moe_lora_gemm.default, *args, *last)
    run(operators.fused_moe_lora_gemm_out.default, *args, out, *last)
    return out


def layer_arguments(
    hidden_states: Tensor,
    w13: Weights,
    w2: Weights,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    token_lora_mapping: Tensor | None,
    w13_lora_a: Factors | None,
    w13_lora_b: Factors | None,
    w2_lora_a: Factors | None,
    w2_lora_b: Factors | None,
    lora_ranks: Tensor | None,
    lora_scalings: Tensor | None,
    adapter_enabled: Tensor | None,
    w13_one_a: Tensor | None,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    activation: Activation,
    activation_alpha: float | None,
    activation_limit: float | None,
    expert_map: Tensor | None,
    apply_router_weight_on_input: bool,
) -> tuple[tuple[Any, ...], tuple[float, ...]]:
    """The arguments of `fused_experts_lora` except `out`, for its compiled operators.

    In the order of its schema. Returns those of every call, and the trailing ones, which most calls
    omit.
    """
    absent = absent_tensor(hidden_states)
    args = (
        hidden_states,
        _data(w13),
        _data(w2),
        weights_or_absent("topk_weights", topk_weights, absent),
        topk_ids,
        or_absent(token_lora_mapping, absent),
        factor_list(w13_lora_a),
        factor_list(w13_lora_b),
        factor_list(w2_lora_a),
        factor_list(w2_lora_b),
        ids_or_absent("lora_ranks", lora_ranks, absent),
        weights_or_absent("lora_scalings", lora_scalings, absent),
        enabled_or_absent(adapter_enabled, absent),
        ids_or_absent("w13_one_a", w13_one_a, absent),
        or_absent(w13_bias, absent),
        or_absent(w2_bias, absent),
        choose("activation", activation, ACTIVATIONS),
        number_or_absent("activation_alpha", activation_alpha),
        number_or_absent("activation_limit", activation_limit),
        ids_or_absent("expert_map", expert_map, absent),
        apply_router_weight_on_input,
    )
    return args, _last_of_layer(w13, w2, hidden_states, activation)


@typed
def fused_experts_lora(
    hidden_states: Tensor,
    w13: Weights,
    w2: Weights,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    token_lora_mapping: Tensor | None = None,
    w13_lora_a: Factors | None = None,
    w13_lora_b: Factors | None = None,
    w2_lora_a: Factors | None = None,
    w2_lora_b: Factors | None = None,
    lora_ranks: Tensor | None = None,
    lora_scalings: Tensor | None = None,
    adapter_enabled: Tensor | None = None,
    w13_one_a: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    activation: Activation = "silu",
    activation_alpha: float | None = None,
    activation_limit: float | None = None,
    expert_map: Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """A whole mixture-of-experts layer, with every token's own adapter inside both projections.

    For token `m`, choice `j`, expert `e = topk_ids[m, j]`, adapter `l = token_lora_mapping[m]`
    and `s = lora_scalings[l]`::

        g = x Wg[e]^T + s (x Ag[l, e]^T) Bg[l, e]^T + bias         (u likewise)
        h = activation(g, u)
        z = h W2[e]^T + s (h A2[l, e]^T) B2[l, e]^T + bias
        out[m] = sum over j of topk_weights[m, j] * z

    Accumulation and the sum over `j` are in float32. A token with adapter -1, or whose adapter is
    disabled, gets the same bits as without adapters, whatever the other tokens carry. Without
    adapters this is a complete fused MoE layer.

    Parameters
    ----------
    hidden_states : Tensor, shape (M, K)
        Input. float32, bfloat16 or float16 (CUDA: the latter two); the dtype of all weights,
        biases and of the result. Factors have it too, or are float32 and rounded to it in every
        call.
    w13 : Tensor, shape (E, 2 I, K) ((E, I, K) for "relu2"), or PackedWeights or QuantizedWeights
        Gate rows, then up rows of each expert ("swigluoai": interleaved). Quantized ones must be
        created with the matching `gate_up`.
    w2 : Tensor, shape (E, K, I), or PackedWeights or QuantizedWeights
        Down projection of each expert. May be quantized independently of `w13`.
    {topk_weights}
    {topk_ids} A choice whose id is out of range contributes nothing.
    {token_lora_mapping?} Factors without it are refused.
    w13_lora_a : Tensor or sequence of tensors, shape (max_loras, E or 1, R, K), optional
        Shrink factors of `w13`: one for all its columns, or one for gate and one for up. An
        expert dimension of 1 is one factor shared by all experts.
    w13_lora_b : Tensor or sequence of tensors, shape (max_loras, E or 1, 2 I / slices, R), optional
        Expand factors of `w13`, as many.
    w2_lora_a : Tensor, shape (max_loras, E or 1, R, I), optional
        Shrink factors of `w2`.
    w2_lora_b : Tensor, shape (max_loras, E or 1, K, R), optional
        Expand factors of `w2`.
    {lora_ranks?}
    {lora_scalings?}
    {adapter_enabled?}
    w13_one_a : Tensor, shape (max_loras,), int32, optional
        Nonzero: gate and up of this adapter have the same A, as PEFT trains them for fused weights,
        and that of gate may be read for both. The result is the same. Not checked. Absent: none
        have.
    w13_bias : Tensor, shape (E, 2 I), optional
        Bias of `w13`.
    w2_bias : Tensor, shape (E, K), optional
        Bias of `w2`.
    activation : {"silu", "gelu", "swigluoai", "swigluoai_uninterleave", "relu2", "situ", \
            "swiglustep"}
        `silu(g) * u`; `gelu_tanh(g) * u`; `g sigmoid(alpha g) (u + 1)` of gpt-oss, whose rows of
        `w13` are interleaved, and of MiniMax-M3, whose are not; `relu(g)^2` without up rows;
        `alpha tanh(g / alpha) sigmoid(g) * limit tanh(u / limit)` of Kimi-K3 (SiTU) and Inkling-2,
        which have alpha 4 and limit 25; `min(silu(g), limit) * u` of Step-3.7, `u` clamped.
    activation_alpha : float, optional
        `alpha` of the two "swigluoai" and "situ"; others take none. Absent: 1.702, 1 for "situ".
    activation_limit : float, optional
        Clamps before "silu" or "swigluoai": `g` to at most the limit, `u` to within plus or minus
        the limit; "swiglustep" clamps `silu(g)` in place of `g`, and "situ" bounds `u` by tanh;
        others take none. Absent: no clamp for "silu", `u` itself for "situ", 7 for the others.
    {expert_map?} They contribute nothing.
    apply_router_weight_on_input : bool
        Multiply the input instead of the output by the routing weight; needs `top_k == 1`.
    out : Tensor, shape (M, K), optional
        Where to write the result; `hidden_states` itself is allowed.

    Returns
    -------
    Tensor, shape (M, K)
        `out`, or a new tensor.

    Raises
    ------
    {ValueError}
    {TypeError}
    RuntimeError
        `w13`, `w2` or `lora_scalings` requires a gradient, and grad mode is on: they are frozen. Or
        another argument does, and `out` is given.
    {NotImplementedError}

    Notes
    -----
    Differentiable in `hidden_states`, `topk_weights`, the factors and the biases; see
    `fused_experts_lora_backward`. Calls that autograd does not record save nothing.

    The exact MoE LoRA that PEFT trains: the adapters of gate and up enter before the activation.
    For the method see `fused_moe_lora_gemm`.

    Examples
    --------
    >>> import torch, moelora
    >>> x, router = torch.randn(4, 64), torch.randn(4, 8)
    >>> w13, w2 = torch.randn(8, 256, 64), torch.randn(8, 64, 128)
    >>> topk_weights, topk_ids = router.softmax(-1).topk(2)
    >>> moelora.fused_experts_lora(x, w13, w2, topk_weights, topk_ids).shape
    torch.Size([4, 64])
    """
    args, last = layer_arguments(
        hidden_states,
        w13,
        w2,
        topk_weights,
        topk_ids,
        token_lora_mapping=token_lora_mapping,
        w13_lora_a=w13_lora_a,
        w13_lora_b=w13_lora_b,
        w2_lora_a=w2_lora_a,
        w2_lora_b=w2_lora_b,
        lora_ranks=lora_ranks,
        lora_scalings=lora_scalings,
        adapter_enabled=adapter_enabled,
        w13_one_a=w13_one_a,
        w13_bias=w13_bias,
        w2_bias=w2_bias,
        activation=activation,
        activation_alpha=activation_alpha,
        activation_limit=activation_limit,
        expert_map=expert_map,
        apply_router_weight_on_input=apply_router_weight_on_input,
    )
    if out is None:
        return run(operators.fused_experts_lora.default, *args, *last)
    run(operators.fused_experts_lora_out.default, *args, out, *last)
    return out
