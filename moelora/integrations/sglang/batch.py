"""Arguments of `run_moe_lora`: adapters of tokens, and the buffers of a pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from moelora.adapters import AdapterPool


@dataclass(frozen=True, eq=False)
class MoELoRABatchInfo:
    """Adapters of a batch, and their assignment to tokens.

    Attributes
    ----------
    weight_indices : Tensor, shape (num_tokens,), int32 or int64
        Adapter slot of each token, -1 for none. `prepare_moe_lora_batch` computes it from one index
        per sequence.
    lora_ranks : Tensor, shape (max_loras,), int32
        True rank of each adapter; 0 is an empty slot.
    scalings : Tensor, shape (max_loras,), float32
        Scaling of each adapter.
    adapter_enabled : Tensor, shape (max_loras,), bool, optional
        False turns an adapter off.
    """

    weight_indices: Tensor
    lora_ranks: Tensor
    scalings: Tensor
    adapter_enabled: Tensor | None = None


def prepare_moe_lora_batch(
    weight_indices: Tensor,
    lora_ranks: Tensor,
    scalings: Tensor,
    *,
    adapter_enabled: Tensor | None = None,
    seq_lens: Tensor | Sequence[int] | None = None,
    num_tokens: int | None = None,
) -> MoELoRABatchInfo:
    """Batch information from adapter indices per token, or per sequence.

    Parameters
    ----------
    weight_indices : Tensor, shape (num_tokens,), or (num_seqs,) with `seq_lens`
        Adapter slots, -1 for none.
    lora_ranks, scalings, adapter_enabled
        As in `MoELoRABatchInfo`.
    seq_lens : Tensor or sequence of int, shape (num_seqs,), optional
        Tokens of each sequence; sequences are concatenated.
    num_tokens : int, optional
        Tokens of the batch; tokens after the last sequence, as in a padded CUDA graph, have no
        adapter. Needed if `seq_lens` is on a GPU, where counting them would wait.

    Returns
    -------
    MoELoRABatchInfo
        With one index per token, computed on the device of `weight_indices` without
        synchronization.

    Raises
    ------
    ValueError
        `seq_lens` and `weight_indices` have different lengths, or `num_tokens` is missing.
    """
    if seq_lens is not None:
        on_host = None if isinstance(seq_lens, Tensor) else "cpu"
        lengths = torch.as_tensor(seq_lens, device=on_host)
        if lengths.shape != weight_indices.shape or lengths.dim() != 1:
            raise ValueError(
                f"seq_lens has shape {tuple(lengths.shape)}, weight_indices has "
                f"{tuple(weight_indices.shape)}, expected one entry for each sequence"
            )
        if num_tokens is None:
            if lengths.is_cuda:
                raise ValueError("num_tokens is None, expected it as seq_lens is on a GPU")
            num_tokens = int(lengths.sum())
        device = weight_indices.device
        ends = lengths.to(device, non_blocking=True).cumsum(0)
        token = torch.arange(num_tokens, device=device)
        sequence = torch.searchsorted(ends, token, right=True)
        weight_indices = torch.nn.functional.pad(weight_indices, (0, 1), value=-1)[sequence]
    return MoELoRABatchInfo(weight_indices, lora_ranks, scalings, adapter_enabled)


def prepare_moe_lora_batch_of_pool(
    pool: AdapterPool,
    names: Sequence[str | None],
    *,
    seq_lens: Tensor | Sequence[int] | None = None,
    num_tokens: int | None = None,
) -> MoELoRABatchInfo:
    """`prepare_moe_lora_batch` for adapters of a pool, by name.

    Parameters
    ----------
    pool : AdapterPool
        Its slots are valid while the adapters are held or pinned (see `AdapterPool`).
    names : sequence of str or None
        The adapter of each token, or of each sequence with `seq_lens`; None is no adapter.
    seq_lens, num_tokens
        As in `prepare_moe_lora_batch`.

    Returns
    -------
    MoELoRABatchInfo
        As `prepare_moe_lora_batch`, with the pool's own ranks, scalings and enabled slots.

    Raises
    ------
    KeyError
        A name is not in the pool.
    ValueError
        As `prepare_moe_lora_batch`.
    """
    return prepare_moe_lora_batch(
        pool.mapping(names),
        pool.lora_ranks,
        pool.lora_scalings,
        adapter_enabled=pool.adapter_enabled,
        seq_lens=seq_lens,
        num_tokens=num_tokens,
    )


class MoELoRABuffers(TypedDict):
    """Factors of one layer, as arguments of `run_moe_lora`."""

    gate_up_a_buffer: Tensor
    gate_up_b_buffer: Tensor
    down_a_buffer: Tensor
    down_b_buffer: Tensor


def moe_lora_buffers(pool: AdapterPool, layer: str) -> MoELoRABuffers:
    """Buffers of one layer of a pool, as arguments of `run_moe_lora`.

    Parameters
    ----------
    pool : AdapterPool
        Must have `w13_slices=1`, since gate and up share A.
    layer : str
        The name of the layer.

    Returns
    -------
    MoELoRABuffers
        Views of the pool's memory, which also receives later adapters.

    Raises
    ------
    ValueError
        The pool has `w13_slices=2`.
    """
    stacks = pool.layer(layer)
    a, b = stacks["w13_lora_a"], stacks["w13_lora_b"]
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        raise ValueError("the pool has w13_slices=2, expected 1: gate and up share one A here")
    return {
        "gate_up_a_buffer": a,
        "gate_up_b_buffer": b,
        "down_a_buffer": stacks["w2_lora_a"],
        "down_b_buffer": stacks["w2_lora_b"],
    }
