"""Sparse gradients of tenants: those of the experts that their rows have reached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from moelora.sparse import sparse_tensor


@dataclass(frozen=True)
class Rows:
    """Gradients of some experts of a factor.

    Attributes
    ----------
    experts : Tensor, shape (n,), int64
        In order, on the host.
    values : Tensor, shape (n, rows, columns)
        In the dtype of the stack, on its device.
    """

    experts: Tensor
    values: Tensor

    def plus(self, other: Rows) -> Rows:
        """The sum, for the experts of both, rounded as in dense gradients."""
        if torch.equal(self.experts, other.experts):
            return Rows(self.experts, self.values + other.values)
        both = torch.cat((self.experts, other.experts)).unique()
        values = self.values.new_zeros(both.numel(), *self.values.shape[1:])
        for rows in (self, other):
            at = torch.searchsorted(both, rows.experts).to(values.device)
            values[at] += rows.values
        return Rows(both, values)

    def dense(self, experts: int) -> Tensor:
        """(experts, rows, columns), zero elsewhere."""
        found = self.values.new_zeros(experts, *self.values.shape[1:])
        found[self.experts.to(found.device)] = self.values
        return found

    def sparse(self, experts: int, scale: float) -> Tensor:
        """The same times `scale` as a sparse float32 tensor."""
        values = self.values.to(torch.float32)
        values = values if scale == 1.0 else values * scale
        index = self.experts.to(values.device)[None]
        return sparse_tensor(index, values, (experts, *values.shape[1:]))

    @classmethod
    def of(cls, grad: Tensor) -> Rows:
        """Inverse of `sparse` with scale 1."""
        grad = grad.coalesce()
        return cls(grad.indices()[0].cpu(), grad.values())


def is_sparse(grad: Tensor | None) -> TypeGuard[Tensor]:
    return grad is not None and grad.layout == torch.sparse_coo
