"""Arguments of `run_moe_lora`: the adapters of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.compiler import is_compiling

from moelora.operators.call import typed
from moelora.operators.checks import check_count, dtype_name
from moelora.operators.storage import check_held


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


@typed
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
        `seq_lens` and `weight_indices` have different lengths, a length is negative, they are more
        than `num_tokens` together, or `num_tokens` is missing. Numbers on a GPU are not looked at.
    {other_type}
    """
    check_held("weight_indices", weight_indices)
    if weight_indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"weight_indices has dtype {dtype_name(weight_indices.dtype)}, expected int32 or int64"
        )
    if seq_lens is not None:
        lengths = _lengths(seq_lens)
        if lengths.shape != weight_indices.shape or lengths.dim() != 1:
            raise ValueError(
                f"seq_lens has shape {tuple(lengths.shape)}, weight_indices has "
                f"{tuple(weight_indices.shape)}, expected one entry for each sequence"
            )
        device = weight_indices.device
        if lengths.is_meta and not weight_indices.is_meta:
            raise ValueError(f"seq_lens is on meta, expected numbers for {device}")
        if num_tokens is None:
            if lengths.is_cuda:
                raise ValueError("num_tokens is None, expected it as seq_lens is on a GPU")
            num_tokens = int(lengths.sum())
        check_count("num_tokens", num_tokens, 0)
        _check_sum(lengths, num_tokens)
        ends = lengths.to(device, non_blocking=True).cumsum(0)
        token = torch.arange(num_tokens, device=device)
        sequence = torch.searchsorted(ends, token, right=True)
        weight_indices = torch.nn.functional.pad(weight_indices, (0, 1), value=-1)[sequence]
    return MoELoRABatchInfo(weight_indices, lora_ranks, scalings, adapter_enabled)


def _lengths(seq_lens: Tensor | Sequence[int]) -> Tensor:
    """Lengths of sequences, where they were given. ValueError unless they are integers."""
    if isinstance(seq_lens, Tensor):
        check_held("seq_lens", seq_lens)
    lengths = torch.as_tensor(seq_lens, device=None if isinstance(seq_lens, Tensor) else "cpu")
    is_other = lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool
    if lengths.numel() and is_other:
        raise ValueError(f"seq_lens has dtype {dtype_name(lengths.dtype)}, expected integers")
    return lengths


def _check_sum(lengths: Tensor, num_tokens: int) -> None:
    """ValueError if sequences whose lengths are on the host are not those of a batch."""
    if lengths.device.type != "cpu" or is_compiling() or not lengths.numel():
        return
    least, total = int(lengths.min()), int(lengths.sum())
    if least < 0:
        raise ValueError(f"seq_lens has the length {least}, expected none below 0")
    if total > num_tokens:
        raise ValueError(f"num_tokens is {num_tokens}, seq_lens has {total} together")
