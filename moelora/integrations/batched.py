"""Experts of tokens that were batched by expert before, as DeepEP's low-latency dispatch does.

Expert-parallel ranks that exchange tokens expect each expert's rows in a block of their own, of
fixed size, so that shapes depend on no routing: (E, T, K), of which the first
`expert_num_tokens[e]` rows of expert `e` are tokens. The result has the same layout; the
exchange's combine step applies the routing weights and sums it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moelora.operators.call import typed
from moelora.operators.experts import Weights, fused_experts_lora
from moelora.operators.storage import check_held


@typed
def batched_experts_lora(
    hidden_states: Tensor,
    w13: Weights,
    w2: Weights,
    expert_num_tokens: Tensor,
    token_lora_mapping: Tensor | None = None,
    *,
    out: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """`fused_experts_lora` of tokens that are batched by expert, without weights and sum.

    Parameters
    ----------
    hidden_states : Tensor, shape (E, T, K)
        Rows of each of this rank's experts. Rows from `expert_num_tokens[e]` on are not read.
    w13, w2 : Tensor, PackedWeights or QuantizedWeights
        As in `fused_experts_lora`: those of this rank's E experts.
    expert_num_tokens : Tensor, shape (E,), int32 or int64
        Number of rows of each expert. Read on the device: a captured graph serves all numbers.
    token_lora_mapping : Tensor, shape (E, T), int32 or int64, optional
        Adapter of each row, -1 for none.
    out : Tensor, shape (E, T, K), optional
        Where the result is written. Rows without tokens become 0.
    **options
        Factors, ranks, biases and activation of `fused_experts_lora`.

    Returns
    -------
    Tensor, shape (E, T, K)
        Each row through its expert: bit for bit what a choice of weight 1 contributes.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        As `fused_experts_lora` does, and for shapes other than these, before anything is written.
    """
    if hidden_states.dim() != 3:
        raise ValueError(
            f"hidden_states has {hidden_states.dim()} dimensions, expected 3: experts, rows of "
            "each, columns"
        )
    experts, rows, columns = hidden_states.shape
    each = ": one number for each block of hidden_states"
    for name, tensor, shape, why in (
        ("hidden_states", hidden_states, (experts, rows, columns), ""),
        ("expert_num_tokens", expert_num_tokens, (experts,), each),
        ("token_lora_mapping", token_lora_mapping, (experts, rows), ""),
        ("out", out, (experts, rows, columns), ""),
    ):
        if tensor is None:
            continue
        check_held(name, tensor)
        if tensor.device != hidden_states.device:
            raise ValueError(
                f"{name} is on {tensor.device}, expected {hidden_states.device} as hidden_states"
            )
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}{why}")
    if expert_num_tokens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"expert_num_tokens is {expert_num_tokens.dtype}, expected int32 or int64")
    if out is not None and not out.is_contiguous():
        raise ValueError("out is not contiguous")
    if not len(w13.shape) or w13.shape[0] != experts:
        raise ValueError(
            f"w13 has shape {tuple(w13.shape)}, expected {experts} experts, as many as "
            "hidden_states has blocks"
        )
    mapping = None if token_lora_mapping is None else token_lora_mapping.reshape(-1)
    ids = expert_ids(expert_num_tokens, rows)
    done = fused_experts_lora(
        hidden_states.reshape(-1, columns),
        w13,
        w2,
        torch.ones_like(ids, dtype=torch.float32),
        ids,
        token_lora_mapping=mapping,
        out=None if out is None else out.view(-1, columns),
        **options,
    )
    return done.view(experts, rows, columns) if out is None else out


def expert_ids(expert_num_tokens: Tensor, rows: int) -> Tensor:
    """Expert of each row of (E, rows) as (E * rows, 1) int32; -1 of those without tokens."""
    device = expert_num_tokens.device
    experts = torch.arange(expert_num_tokens.numel(), dtype=torch.int32, device=device)[:, None]
    used = torch.arange(rows, dtype=torch.int32, device=device) < expert_num_tokens[:, None]
    return torch.where(used, experts, -1).view(-1, 1)
