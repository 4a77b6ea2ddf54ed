"""Sparse gradients of tenants: those of the experts that their rows have reached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from moelora.operators.sparse import sparse_tensor


@dataclass(frozen=True)
class Rows:
    """Gradients of some experts of a factor.

    Attributes
    ----------
    experts : Tensor, shape (n,), int64
        In order, on the host.
    values : Tensor, shape (n, rows, columns)
        In the dtype of the stack, on its device.
    whole : bool
        All experts, some of which no row may have reached.
    """

    experts: Tensor
    values: Tensor
    whole: bool = False

    def plus(self, other: Rows) -> Rows:
        """The sum, for the experts of both, rounded as in dense gradients."""
        whole = self.whole or other.whole
        if torch.equal(self.experts, other.experts):
            return Rows(self.experts, self.values + other.values, whole)
        both = torch.cat((self.experts, other.experts)).unique()
        values = self.values.new_zeros(both.numel(), *self.values.shape[1:])
        for rows in (self, other):
            at = torch.searchsorted(both, rows.experts).to(values.device)
            values[at] += rows.values
        return Rows(both, values, whole)

    def dense(self, experts: int, scale: float) -> Tensor:
        """float32 (experts, rows, columns) times `scale`, zero elsewhere; may share memory."""
        values = self._scaled(scale)
        if self.whole:
            return values
        found = values.new_zeros(experts, *values.shape[1:])
        found[self.experts.to(found.device)] = values
        return found

    def sparse(self, experts: int, scale: float) -> Tensor:
        """The same as a sparse tensor: of what rows have reached, or may have by a gradient."""
        values = self._scaled(scale)
        index = self.experts.to(values.device)
        if self.whole:
            index = values.flatten(1).any(1).nonzero()[:, 0]
            values = values[index]
        return sparse_tensor(index[None], values, (experts, *values.shape[1:]))

    def _scaled(self, scale: float) -> Tensor:
        values = self.values.to(torch.float32)
        return values if scale == 1.0 else values * scale

    @classmethod
    def of(cls, grad: Tensor) -> Rows:
        """Of a gradient, dense or sparse."""
        if not is_sparse(grad):
            return cls(torch.arange(grad.size(0), device="cpu"), grad, whole=True)
        grad = grad.coalesce()
        return cls(grad.indices()[0].cpu(), grad.values())


def is_sparse(grad: Tensor | None) -> TypeGuard[Tensor]:
    return grad is not None and grad.layout == torch.sparse_coo
