"""Factors of a tenant: slots of the stacks of a pool, and float32 parameters of them.

    factor     stack[slot] = scale * parameter        (E, R, in) and (E, out, R), R padded
    gradient   parameter.grad = scale * stack.grad[slot], summed over batches

The optimizer updates copies of what is current, for a sparse tenant only those of experts that it
reaches. Slots are written by the pool, all factors of a tenant under one reservation, once the
update is current. Between updates a parameter is a view of its slot if the stack is float32 and the
pool keeps the scaling beside it. Gradients are taken from the stack
after every backward, and held by tenant (rows.py), as are those of a folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moelora.operators.sparse import sparse_tensor
from moelora.operators.torch_private import sparse_parts
from moelora.training.tenants.rows import Rows, is_sparse


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
        parameter = torch.empty(0, dtype=torch.float32, device=stack.device)
        factor = cls(stack, slot, parameter.requires_grad_(), scale, own.size(dim), dim)
        if factor.is_served():
            parameter.data = factor.view()
        else:
            parameter.data = padded(own.to(stack.device, torch.float32), stack.shape[1:])
        return factor

    def view(self) -> Tensor:
        """What is in the slot."""
        return self.stack.detach()[self.slot]

    def is_served(self) -> bool:
        """Whether the slot has the numbers of the parameter."""
        return self.scale == 1.0 and self.stack.dtype == torch.float32

    def gradient(self, rows: Rows | None, sparse: bool = False) -> Tensor | None:
        """The float32 gradient that `rows` of the stack are; None for None.

        `sparse`: as a sparse tensor of the experts that rows reached.
        """
        if rows is None:
            return None
        experts = self.stack.size(1)
        return (rows.sparse if sparse else rows.dense)(experts, self.scale)

    def rows(self, own: Tensor) -> Rows:
        """The inverse of `gradient`, of one without padding."""
        rows = Rows.of(own)
        values = padded(rows.values, (rows.experts.numel(), *self.stack.shape[2:]))
        return Rows(rows.experts, (values / self.scale).to(self.stack), rows.whole)

    def is_finite(self) -> Tensor:
        """Whether `publish` writes finite numbers; of one element."""
        return (self.parameter.detach() * self.scale).to(self.stack.dtype).isfinite().all()

    def publish(self, value: Tensor, slot: int, experts: Tensor | None) -> None:
        """Write a parameter's value to a slot: of all experts, or of some that `value` has."""
        into, value = self.stack.detach()[slot], value if self.scale == 1.0 else value * self.scale
        if experts is None:
            into.copy_(value)
        else:
            into.index_copy_(0, experts, value.to(into.dtype))

    def own(self, tensor: Tensor) -> Tensor:
        """A tensor of the parameter's shape, which may be sparse, without padding."""
        if is_sparse(tensor):
            indices, values = sparse_parts(tensor)
            size = [*tensor.shape]
            size[self.dim] = self.rank
            return sparse_tensor(indices, values.narrow(self.dim, 0, self.rank), size)
        return tensor.detach().narrow(self.dim, 0, self.rank)


def padded(tensor: Tensor, shape: Iterable[int]) -> Tensor:
    found = tensor.new_zeros(tuple(shape))
    found[tuple(slice(n) for n in tensor.shape)] = tensor
    return found


def collect(stacks: Sequence[Tensor], factors: Sequence[Factor]) -> list[Rows | None]:
    """Take the gradients of a backward from stacks; returns those of `factors`.

    Waits for the device once if a gradient is sparse. Dense ones are views of the stack's.
    """
    rows: list[Rows | None] = [None] * len(factors)
    of_stack: dict[int, list[int]] = {id(stack): [] for stack in stacks}
    for n, factor in enumerate(factors):
        of_stack[id(factor.stack)].append(n)
    found = []
    for stack in stacks:
        grad, stack.grad = stack.grad, None
        if is_sparse(grad):
            found.append((stack, grad))
        elif grad is not None:
            for n in of_stack[id(stack)]:
                rows[n] = Rows.of(grad[factors[n].slot])
    on_host = _on_host([grad for _, grad in found]) if found else []
    while found:  # of one stack after the other, whose memory is then free
        stack, grad = found.pop(0)
        places = on_host.pop(0)
        experts = grad.size(1)
        pairs = places[0] * experts + places[1]
        if bool((pairs[1:] <= pairs[:-1]).any()):  # a stack that several calls have used
            grad = grad.coalesce()
            pairs = grad.indices()[0].cpu() * experts + grad.indices()[1].cpu()
        _, values = sparse_parts(grad)
        for n in of_stack[id(stack)]:
            slot = factors[n].slot
            ends = torch.tensor([slot, slot + 1], device="cpu") * experts
            begin, end = torch.searchsorted(pairs, ends).tolist()
            own = values[begin:end]
            if end - begin < values.size(0):  # a view would keep the values of others in memory
                own = own.clone()
            rows[n] = Rows(pairs[begin:end] % experts, own)
    return rows


def _on_host(grads: Sequence[Tensor]) -> list[Tensor]:
    """Indices of each, with one transfer for each device."""
    first = grads[0].device
    each = [sparse_parts(grad)[0] for grad in grads]
    joint = torch.cat([indices.to(first) for indices in each], 1).cpu()
    return list(joint.split([indices.size(1) for indices in each], 1))
