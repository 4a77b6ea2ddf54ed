"""Sparse gradients of factors: of the pairs of adapter and expert that rows reach.

Autograd computes them for factors that `set_sparse` has marked, as sparse tensors of two sparse and
two dense dimensions, (adapter, expert, rows, columns).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

_MARK = "_moelora_sparse"


def index_of_pairs(
    topk_ids: Tensor,
    token_lora_mapping: Tensor,
    max_loras: int,
    num_experts: int,
    expert_map: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What `moelora.training.touched_pairs` returns."""
    ids, adapter = topk_ids.long(), token_lora_mapping.long().unsqueeze(1)
    if expert_map is not None:
        there = (ids >= 0) & (ids < expert_map.numel())
        ids = torch.where(there, expert_map.long()[ids * there], -1)
    used = (ids >= 0) & (ids < num_experts) & (adapter >= 0) & (adapter < max_loras)
    last = max_loras * num_experts  # of no pair
    flat = torch.where(used, adapter * num_experts + ids, last).flatten()
    touched = ids.new_zeros(last + 1).index_fill(0, flat, 1)[:last]
    counted = touched.cumsum(0)
    index = torch.where(touched > 0, counted - 1, -1).view(max_loras, num_experts)
    return index.int(), touched.sum()


def set_sparse(factors: Iterable[Tensor], sparse: bool) -> None:
    """Mark leaves: whether backwards compute their gradients only for touched pairs.

    If one factor of a call is marked, all of them are. Those of calls under torch.compile, and
    those that a CUDA graph captures, are dense anyway.
    """
    if sparse:
        warn_silently()
    for factor in factors:
        setattr(factor, _MARK, sparse)


def freeze(stacks: Sequence[Tensor]) -> None:
    """End gradients of these factors."""
    set_sparse(stacks, False)
    for stack in stacks:
        stack.requires_grad_(False)
        stack.grad = None


@cache
def warn_silently() -> None:
    """Make the first sparse tensor of the process, of which torch 2.11 warns even if its indices
    are not checked."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sparse_tensor(torch.empty(1, 0, dtype=torch.int64), torch.empty(0), (1,))


def is_marked(factor: Tensor) -> bool:
    """Whether `set_sparse` has marked a factor."""
    return getattr(factor, _MARK, False)


class Pairs:
    """The pairs that a call reaches. The forward begins to copy them to the host, where its
    backward reads them.

    Attributes
    ----------
    index : Tensor, shape (max_loras, E), int32
        As of `index_of_pairs`.
    places : Tensor, shape (2, S)
        Adapter and expert of each index.
    """

    def __init__(self, ids: Tensor, mapping: Tensor, sizes: Sequence[int], expert_map: Any) -> None:
        self.index, _ = index_of_pairs(ids, mapping, sizes[0], sizes[1], expert_map)
        self._event = torch.cuda.Event() if ids.is_cuda else None
        self._host = self.index
        if self._event is not None:
            self._host = torch.empty(
                self.index.shape, dtype=torch.int32, device="cpu", pin_memory=True
            )
            self._host.copy_(self.index, non_blocking=True)
            self._event.record(torch.cuda.current_stream(ids.device))

    @cached_property
    def places(self) -> Tensor:
        if self._event is not None:
            self._event.synchronize()
        return (self._host >= 0).nonzero().T.to(self.index.device, non_blocking=True)

    def is_sparse(self, factor: Tensor) -> bool:
        """Whether a factor has a gradient of each pair: not if experts share it."""
        return factor.size(1) == self.index.size(1)

    def buffer(self, factor: Tensor) -> Tensor:
        """What an operator writes a factor's gradient to."""
        if not self.is_sparse(factor):
            return torch.empty_like(factor, memory_format=torch.contiguous_format)
        return factor.new_empty(1, max(self.places.size(1), 1), *factor.shape[2:])

    def gradient(self, buffer: Tensor, factor: Tensor) -> Tensor:
        """What the operator wrote, as autograd has it."""
        if not self.is_sparse(factor):
            return buffer
        return sparse_tensor(self.places, buffer[0, : self.places.size(1)], factor.shape)


def sparse_tensor(indices: Tensor, values: Tensor, size: Sequence[int]) -> Tensor:
    """A sparse tensor of sorted indices without duplicates."""
    return torch.sparse_coo_tensor(
        indices,
        values,
        tuple(size),
        device=values.device,
        is_coalesced=True,
        check_invariants=False,
    )
