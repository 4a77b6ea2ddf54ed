"""Factors of a tenant: slots of the stacks of a pool, and float32 parameters of them.

    factor     stack[slot] = scale * parameter        (E, R, in) and (E, out, R), R padded
    gradient   parameter.grad = scale * (stack.grad[slot] + held)

A parameter is a view of its slot if the stack is float32 and the pool keeps the scaling beside it;
otherwise it is a tensor of its own, written to the slot after every update. Sparse gradients are
taken from the stack after every backward (rows.py), and held by factor, as are those of a folder.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from moelora.sparse import sparse_tensor
from moelora.tenants.rows import Rows, is_sparse


@dataclass
class Factor:
    """One factor of a tenant; `rank` is its true one, along `dim` of `parameter`."""

    stack: Tensor
    slot: int
    parameter: Tensor
    scale: float
    rank: int
    dim: int
    held: Rows | None = None

    @classmethod
    def of(cls, stack: Tensor, slot: int, own: Tensor, dim: int, scale: float) -> Factor:
        """`own` is the factor without padding, and without the scaling that the pool folds in."""
        view = stack.detach()[slot]
        if scale == 1.0 and stack.dtype == torch.float32:
            parameter = view
        else:
            parameter = padded(own.to(view.device, torch.float32), view.shape)
        return cls(stack, slot, parameter.requires_grad_(), scale, own.size(dim), dim)

    def gradient(self, sparse: bool = False) -> Tensor | None:
        """None if no layer of the batch used the stack. `sparse`: of experts that rows reached."""
        experts = self.parameter.size(0)
        grad = self.stack.grad
        own = None if grad is None or is_sparse(grad) else grad[self.slot]
        if self.held is not None:
            if own is None and sparse:
                return self.held.sparse(experts, self.scale)
            held = self.held.dense(experts)
            own = held if own is None else own + held
        if own is None:
            return None
        own = own.to(torch.float32)
        own = own if self.scale == 1.0 else own * self.scale
        return touched(own) if sparse else own

    def put_gradient(self, own: Tensor) -> None:
        """Have `gradient` return `own`, without padding, and what is to be added."""
        rows = Rows.of(own) if is_sparse(own) else Rows(torch.arange(own.size(0)), own)
        values = padded(rows.values, (rows.experts.numel(), *self.parameter.shape[1:]))
        self.held = Rows(rows.experts, (values / self.scale).to(self.stack))

    def is_finite(self) -> Tensor:
        """Whether `publish` writes finite numbers; of one element."""
        return (self.parameter.detach() * self.scale).to(self.stack.dtype).isfinite().all()

    def publish(self) -> None:
        """Write the parameter to its slot, unless it is there."""
        view = self.stack[self.slot].detach()
        if not view.is_set_to(self.parameter.detach()):
            view.copy_(self.parameter.detach() * self.scale)

    def own(self, tensor: Tensor) -> Tensor:
        """A tensor of the parameter's shape, which may be sparse, without padding."""
        if is_sparse(tensor):
            values = tensor._values().narrow(self.dim, 0, self.rank)
            size = [*tensor.shape]
            size[self.dim] = self.rank
            return sparse_tensor(tensor._indices(), values, size)
        return tensor.detach().narrow(self.dim, 0, self.rank)


def padded(tensor: Tensor, shape: Iterable[int]) -> Tensor:
    found = tensor.new_zeros(tuple(shape))
    found[tuple(slice(n) for n in tensor.shape)] = tensor
    return found


def touched(grad: Tensor) -> Tensor:
    """A dense gradient of experts, sparse: without those that are zero."""
    experts = grad.flatten(1).any(1).nonzero().T
    return sparse_tensor(experts, grad[experts[0]], grad.shape)
