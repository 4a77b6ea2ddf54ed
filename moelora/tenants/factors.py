"""Factors of a tenant: slots of the stacks of a pool, and float32 parameters of them.

    factor     stack[slot] = scale * parameter        (E, R, in) and (E, out, R), R padded
    gradient   parameter.grad = scale * (stack.grad[slot] + held)

A parameter is a view of its slot if the stack is float32 and the pool keeps the scaling beside it;
otherwise it is a tensor of its own, written to the slot after every update. Sparse gradients are
taken from the stack after every backward (rows.py), and held by factor, as are those of a folder.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
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
        """Accumulated float32 gradient; None if no layer of the batch used the stack.

        `sparse`: as a sparse tensor of the experts that rows reached.
        """
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
        """Begin an accumulation with `own`, a gradient without padding."""
        rows = (
            Rows.of(own) if is_sparse(own) else Rows(torch.arange(own.size(0), device="cpu"), own)
        )
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


def drop_gradients(stacks: Sequence[Tensor], kept: Collection[int]) -> None:
    """Drop gradients of all slots but `kept`; sparse ones whole, as factors hold what is
    accumulated of them. What autograd computes next for a stack without one is not added to zeros.
    """
    others: dict[torch.device, Tensor] = {}
    for stack in stacks:
        if not kept or is_sparse(stack.grad):
            stack.grad = None
        elif stack.grad is not None:
            if stack.device not in others:
                slots = [slot for slot in range(stack.size(0)) if slot not in kept]
                index = torch.tensor(slots, dtype=torch.int64, device="cpu")
                others[stack.device] = index.to(stack.device, non_blocking=True)
            stack.grad.index_fill_(0, others[stack.device], 0)


def collect(stacks: Sequence[Tensor], factors: Iterable[Factor]) -> None:
    """Move sparse gradients from stacks to `factors`, which add them to those that they hold.

    Where the gradient of a stack is dense, what a factor holds moves there. Either way batches are
    added in their order. Waits for the device once if a gradient is sparse.
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
            ends = torch.tensor([factor.slot, factor.slot + 1], device="cpu") * experts
            begin, end = torch.searchsorted(pairs, ends).tolist()
            own = values[begin:end]
            if end - begin < values.size(0):  # a view would keep the values of others in memory
                own = own.clone()
            rows = Rows(pairs[begin:end] % experts, own)
            factor.held = rows if factor.held is None else factor.held.plus(rows)


def _on_host(grads: Sequence[Tensor]) -> list[Tensor]:
    """Indices of each, with one transfer for each device."""
    first = grads[0].device
    joint = torch.cat([grad._indices().to(first) for grad in grads], 1).cpu()
    return list(joint.split([grad._nnz() for grad in grads], 1))
