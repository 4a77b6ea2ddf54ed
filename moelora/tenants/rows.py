"""Sparse gradients of tenants: those of the experts that their rows have reached."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

from moelora.sparse import sparse_tensor

if TYPE_CHECKING:
    from moelora.tenants.factors import Factor


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
        """Their sum, of the experts of both; each sum is rounded as in a dense gradient."""
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
        """Undo `sparse` of scale 1, of a sparse tensor."""
        grad = grad.coalesce()
        return cls(grad.indices()[0].cpu(), grad.values())


def is_sparse(grad: Tensor | None) -> TypeGuard[Tensor]:
    return grad is not None and grad.layout == torch.sparse_coo


def collect(stacks: Sequence[Tensor], factors: Iterable[Factor]) -> None:
    """Take sparse gradients from stacks, and add them to those that `factors` hold. What one holds
    is added to the gradient of its stack if that is dense, so that each sum is in order.

    Waits for the device once if a gradient is sparse.
    """
    found = [(stack, stack.grad) for stack in stacks if is_sparse(stack.grad)]
    of_stack: dict[int, list[Factor]] = {id(stack): [] for stack, _ in found}
    for factor in factors:
        if id(factor.stack) in of_stack:
            of_stack[id(factor.stack)].append(factor)
        elif factor.held is not None and factor.stack.grad is not None:
            own = factor.stack.grad[factor.slot]
            own += factor.held.dense(own.size(0))
            factor.held = None
    if not found:
        return
    on_host = _on_host([grad for _, grad in found])
    while found:  # of one stack after the other, whose memory is then free
        stack, grad = found.pop(0)
        stack.grad, places = None, on_host.pop(0)
        experts = grad.size(1)
        pairs = places[0] * experts + places[1]
        if bool((pairs[1:] <= pairs[:-1]).any()):  # a stack that several calls have used
            grad = grad.coalesce()
            pairs = grad.indices()[0].cpu() * experts + grad.indices()[1].cpu()
        values = grad._values()
        for factor in of_stack[id(stack)]:
            ends = torch.tensor([factor.slot, factor.slot + 1]) * experts
            begin, end = torch.searchsorted(pairs, ends).tolist()
            own = values[begin:end]
            if end - begin < values.size(0):  # lives longer than those of others
                own = own.clone()
            rows = Rows(pairs[begin:end] % experts, own)
            factor.held = rows if factor.held is None else factor.held.plus(rows)


def _on_host(grads: Sequence[Tensor]) -> list[Tensor]:
    """Indices of each, with one transfer for each device."""
    first = grads[0].device
    joint = torch.cat([grad._indices().to(first) for grad in grads], 1).cpu()
    return list(joint.split([grad._nnz() for grad in grads], 1))
