"""Factors of a tenant: slots of the stacks of a pool, and float32 parameters of them.

    factor     stack[slot] = scale * parameter        (E, R, in) and (E, out, R), R padded
    gradient   parameter.grad = scale * stack.grad[slot]

A parameter is a view of its slot if the stack is float32 and the pool keeps the scaling beside it;
otherwise it is a tensor of its own, written to the slot after every update.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Factor:
    """One factor of a tenant; `rank` is its true one, along `dim` of `parameter`."""

    stack: Tensor
    slot: int
    parameter: Tensor
    scale: float
    rank: int
    dim: int

    @classmethod
    def of(cls, stack: Tensor, slot: int, own: Tensor, dim: int, scale: float) -> Factor:
        """`own` is the factor without padding, and without the scaling that the pool folds in."""
        view = stack.detach()[slot]
        if scale == 1.0 and stack.dtype == torch.float32:
            parameter = view
        else:
            parameter = padded(own.to(view.device, torch.float32), view.shape)
        return cls(stack, slot, parameter.requires_grad_(), scale, own.size(dim), dim)

    def gradient(self) -> Tensor | None:
        """None if no layer of the batch used the stack."""
        if self.stack.grad is None:
            return None
        grad = self.stack.grad[self.slot].to(torch.float32)
        return grad if self.scale == 1.0 else grad * self.scale

    def put_gradient(self, own: Tensor) -> None:
        """Have `gradient` return `own`, without padding, and what is to be added."""
        if self.stack.grad is None:
            self.stack.grad = torch.zeros_like(self.stack)
        self.stack.grad[self.slot].copy_(padded(own, self.parameter.shape) / self.scale)

    def is_finite(self) -> Tensor:
        """Whether `publish` writes finite numbers; of one element."""
        return (self.parameter.detach() * self.scale).to(self.stack.dtype).isfinite().all()

    def publish(self) -> None:
        """Write the parameter to its slot, unless it is there."""
        view = self.stack.detach()[self.slot]
        if not view.is_set_to(self.parameter.detach()):
            view.copy_(self.parameter.detach() * self.scale)

    def own(self, tensor: Tensor) -> Tensor:
        """A tensor of the parameter's shape without padding."""
        return tensor.detach().narrow(self.dim, 0, self.rank)


def padded(tensor: Tensor, shape: Iterable[int]) -> Tensor:
    found = tensor.new_zeros(tuple(shape))
    found[tuple(slice(n) for n in tensor.shape)] = tensor
    return found
