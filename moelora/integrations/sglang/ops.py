"""SGLang's design of MoE LoRA: a separate adapter MLP next to the base layer.

For token `m`, choice `j`, expert `e`, adapter `l`, with `gate_up` one pair of factors::

    output[m] += sum over j of topk_weights[m, j] * scalings[l]
                 * down_B[l, e] down_A[l, e] silu_and_mul(gate_up_B[l, e] gate_up_A[l, e] x[m])

**This is not the LoRA of the layer.** An adapter trained by PEFT changes gate and up *before* the
activation: `silu(W x + B A x)`. Here the activation sees only the adapter: `silu(B A x)`. A layer
of one expert with every size 1 shows it. Let `x = 1`, gate `W = 2`, up `W = 1`, down `W = 1`, and
an adapter that adds 1 to gate, 1 to up and nothing to down::

    base                        silu(2) * 1           = 1.762
    exact, the trained layer    silu(2 + 1) * (1 + 1) = 5.715
    this function               1.762 + 0 * ...       = 1.762

The adapter has no effect at all here, as its down factors are zero; and where they are not, say
`B A = 1` in down, the exact layer is `(1 + 1) * 5.715 = 11.43` and this one
`1.762 + 1 * silu(1) * 1 = 2.493`. Use it for adapters that were trained this way; for all others
`fused_experts_lora` is the exact layer, and `moe_lora_gate_up_delta` with `moe_lora_down_delta` the
exact deltas of a quantized one.

The staged operators are `moe_lora_a`, `moe_lora_gate_up_b` and `moe_lora_down_combine`;
`moe_lora_fused` is all of them at once, which `run_moe_lora` takes. The buffers are those of an
`AdapterPool` with `w13_slices=1`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from moelora.integrations.sglang.batch import MoELoRABatchInfo
from moelora.operators.call import (
    absent_tensor,
    check_dimensions,
    enabled_or_absent,
    ids_or_absent,
    operators,
    run,
    typed,
    weights_or_absent,
)
from moelora.operators.delta import known_experts, one_expert
from moelora.operators.storage import check_held


def _routes(
    factors: Sequence[Tensor],
    expert_ids: Tensor,
    adapters: tuple[Tensor, Tensor | None, Tensor | None],
    num_experts: int | None,
    *weights: Tensor | None,
) -> tuple[Any, ...]:
    """Routing and mapping; `weights` are routing weights and scalings, if a stage uses them.

    adapters: (weight_indices, lora_ranks, adapter_enabled)
    """
    weight_indices, lora_ranks, adapter_enabled = adapters
    absent = absent_tensor(expert_ids)
    expert_ids, _, experts = one_expert(expert_ids, None, known_experts(factors, num_experts))
    names = ("routing_weights", "scalings")
    weights = tuple(weights_or_absent(n, w, absent) for n, w in zip(names, weights, strict=False))
    ranks = ids_or_absent("lora_ranks", lora_ranks, absent)
    enabled = enabled_or_absent(adapter_enabled, absent)
    return (expert_ids, *weights[:1], weight_indices, ranks, *weights[1:], enabled, experts)


@typed
def moe_lora_a(
    x: Tensor,
    expert_ids: Tensor,
    lora_a: Tensor,
    weight_indices: Tensor,
    lora_ranks: Tensor | None = None,
    *,
    adapter_enabled: Tensor | None = None,
    num_experts: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The first stage: `out[m, j] = lora_a[l, e] x[m]`, up to the true rank and 0 beyond it.

    Parameters
    ----------
    x : Tensor, shape (M, K)
        Input of each token. float32, bfloat16 or float16 (CUDA: the latter two).
    expert_ids : Tensor, shape (M, top_k), int32 or int64
        Experts of each token; a row whose id is out of range is skipped.
    lora_a : Tensor, shape (max_loras, E or 1, R, K)
        Shrink factors of gate and up.
    weight_indices : Tensor, shape (M,), int32 or int64
        Adapter slot of each token, -1 for none.
    {lora_ranks?}
    {adapter_enabled?}
    {num_experts?}
    out : Tensor, shape (M, top_k, R), optional
        Where to write; rows without an adapter keep their bits. None: a new tensor, 0 there.

    Returns
    -------
    Tensor, shape (M, top_k, R)
        `out`, or a new tensor; no scaling is in it.

    Raises
    ------
    {errors}
    """
    check_dimensions("lora_a", lora_a, 4)
    if out is None:
        out = x.new_zeros((*expert_ids.shape, lora_a.size(-2)))
    adapters = weight_indices, lora_ranks, adapter_enabled
    routes = _routes([lora_a], expert_ids, adapters, num_experts)
    op = operators.moe_lora_a.default
    check_held("out", out)
    run(op, out.unsqueeze(0), x, [lora_a], *routes)
    return out


@typed
def moe_lora_gate_up_b(
    intermediate_a: Tensor,
    expert_ids: Tensor,
    gate_up_b: Tensor,
    weight_indices: Tensor,
    lora_ranks: Tensor | None = None,
    *,
    adapter_enabled: Tensor | None = None,
    num_experts: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The second stage: gate and up from `moe_lora_a`'s result, then `silu(gate) * up`.

    Parameters
    ----------
    intermediate_a : Tensor, shape (M, top_k, R)
        What `moe_lora_a` returned.
    expert_ids, weight_indices, lora_ranks, adapter_enabled, num_experts
        As in `moe_lora_a`.
    gate_up_b : Tensor, shape (max_loras, E or 1, 2 I, R)
        Expand factors: gate rows, then up rows.
    out : Tensor, shape (M, top_k, I), optional
        Where to write; rows without an adapter keep their bits. None: a new tensor, 0 there.

    Returns
    -------
    Tensor, shape (M, top_k, I)
        `out`, or a new tensor.

    Raises
    ------
    {errors}
    """
    check_held("intermediate_a", intermediate_a)
    check_dimensions("gate_up_b", gate_up_b, 4)
    if out is None:
        out = intermediate_a.new_zeros((*expert_ids.shape, gate_up_b.size(-2) // 2))
    adapters = weight_indices, lora_ranks, adapter_enabled
    routes = _routes([gate_up_b], expert_ids, adapters, num_experts)
    op = operators.moe_lora_gate_up_b.default
    run(op, out, intermediate_a.unsqueeze(0), [gate_up_b], *routes)
    return out


@typed
def moe_lora_down_combine(
    activated: Tensor,
    expert_ids: Tensor,
    routing_weights: Tensor,
    down_a: Tensor,
    down_b: Tensor,
    weight_indices: Tensor,
    lora_ranks: Tensor | None,
    scalings: Tensor | None,
    output: Tensor,
    *,
    adapter_enabled: Tensor | None = None,
    num_experts: int | None = None,
) -> Tensor:
    """The third stage: the down factors, and their weighted sum over `top_k` added to `output`.

    `output[m] += sum over j of routing_weights[m, j] * scalings[l] * down_b down_a activated[m, j]`

    Parameters
    ----------
    activated : Tensor, shape (M, top_k, I)
        What `moe_lora_gate_up_b` returned.
    expert_ids, weight_indices, lora_ranks, adapter_enabled, num_experts
        As in `moe_lora_a`.
    routing_weights : Tensor, shape (M, top_k)
        Cast to float32 if they are not.
    down_a, down_b : Tensor, shapes (max_loras, E or 1, R, I) and (max_loras, E or 1, K, R)
        The down factors.
    scalings : Tensor, shape (max_loras,), float32, optional
        Scaling of each adapter. None: 1.
    output : Tensor, shape (M, K)
        The base layer's output, added to in place: summed in float32, in the order of `top_k`, and
        rounded once. Tokens without an adapter keep their bits.

    Returns
    -------
    Tensor, shape (M, K)
        `output`.

    Raises
    ------
    {errors}
    """
    factors, adapters = (down_a, down_b), (weight_indices, lora_ranks, adapter_enabled)
    routes = _routes(factors, expert_ids, adapters, num_experts, routing_weights, scalings)
    check_held("activated", activated)
    x = activated.flatten(0, 1) if activated.dim() == 3 else activated
    op = operators.moe_lora_down_combine.default
    run(op, output, x, [down_a], [down_b], *routes)
    return output


@typed
def moe_lora_fused(
    x: Tensor,
    expert_ids: Tensor,
    routing_weights: Tensor,
    gate_up_a: Tensor,
    gate_up_b: Tensor,
    down_a: Tensor,
    down_b: Tensor,
    weight_indices: Tensor,
    lora_ranks: Tensor | None,
    scalings: Tensor | None,
    output: Tensor,
    *,
    adapter_enabled: Tensor | None = None,
    num_experts: int | None = None,
) -> Tensor:
    """All three stages in one operator: rows are sorted once, without intermediate tensors.

    Parameters
    ----------
    x : Tensor, shape (M, K)
        Input of each token. float32, bfloat16 or float16 (CUDA: the latter two).
    expert_ids, routing_weights : Tensor, shape (M, top_k)
        Experts of each token and their weights.
    gate_up_a, gate_up_b : Tensor, shapes (max_loras, E or 1, R, K) and (max_loras, E or 1, 2 I, R)
        Gate and up factors, gate rows of `gate_up_b` first.
    down_a, down_b : Tensor, shapes (max_loras, E or 1, R, I) and (max_loras, E or 1, K, R)
        Down factors; their R may differ.
    weight_indices, lora_ranks, scalings, adapter_enabled, num_experts
        As in the stages.
    output : Tensor, shape (M, K)
        Added to in place; tokens without an adapter keep their bits.

    Returns
    -------
    Tensor, shape (M, K)
        `output`, which differs from that of the stages by rounding at most.

    Raises
    ------
    {errors}
    """
    factors = gate_up_a, gate_up_b, down_a, down_b
    adapters = weight_indices, lora_ranks, adapter_enabled
    routes = _routes(factors, expert_ids, adapters, num_experts, routing_weights, scalings)
    run(operators.moe_lora_fused.default, output, x, *[[f] for f in factors], *routes)
    return output


@typed
def run_moe_lora(
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    moe_lora_info: MoELoRABatchInfo,
    gate_up_a_buffer: Tensor,
    gate_up_b_buffer: Tensor,
    down_a_buffer: Tensor,
    down_b_buffer: Tensor,
    output: Tensor,
) -> Tensor:
    """Add SGLang's adapter MLP to the output of a base MoE layer, in place.

    Not the exact MoE LoRA: its activation sees only the adapter (see the example in the module
    docstring). The exact layer is `fused_experts_lora`.

    Parameters
    ----------
    hidden_states : Tensor, shape (M, K)
        Input of the layer. float32, bfloat16 or float16 (CUDA: the latter two).
    topk_ids, topk_weights : Tensor, shape (M, top_k)
        Experts of each token and their weights.
    moe_lora_info : MoELoRABatchInfo
        Adapters of the batch.
    gate_up_a_buffer : Tensor, shape (max_loras, E or 1, R, K)
        Shrink factors of gate and up.
    gate_up_b_buffer : Tensor, shape (max_loras, E or 1, 2 I, R)
        Expand factors: gate rows, then up rows.
    down_a_buffer : Tensor, shape (max_loras, E or 1, R, I)
        Shrink factors of down.
    down_b_buffer : Tensor, shape (max_loras, E or 1, K, R)
        Expand factors of down.
    output : Tensor, shape (M, K)
        The base layer's output. Tokens without an adapter keep their bits.

    Returns
    -------
    Tensor, shape (M, K)
        `output`.

    Raises
    ------
    {ValueError}
    {other_type}
    {RuntimeError}
    {NotImplementedError}
    """
    info = moe_lora_info
    return moe_lora_fused(
        hidden_states,
        topk_ids,
        topk_weights,
        gate_up_a_buffer,
        gate_up_b_buffer,
        down_a_buffer,
        down_b_buffer,
        info.weight_indices,
        info.lora_ranks,
        info.scalings,
        output,
        adapter_enabled=info.adapter_enabled,
    )
