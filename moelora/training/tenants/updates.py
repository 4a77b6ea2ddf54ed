"""From losses to updates: a backward of all, then gradients, norms and optimizers by tenant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from moelora.operators.sparse import sparse_tensor
from moelora.operators.torch_private import sparse_parts
from moelora.training.tenants.branches import Branches
from moelora.training.tenants.factors import collect
from moelora.training.tenants.rows import Rows, is_sparse
from moelora.training.tenants.steps import named, numbers
from moelora.training.tenants.tenant import Progress, Tenant


def accumulate(stacks: Sequence[Tensor], losses: Mapping[Tenant, Tensor]) -> dict[Tenant, Progress]:
    """Backward; returns what is accumulated of each tenant with it."""
    for stack in stacks:
        stack.grad = None  # of backwards outside of a step
    if not losses:
        return {}
    _backward(losses)
    rows = iter(collect(stacks, [factor for tenant in losses for factor in tenant.factors()]))
    after = {}
    for tenant in losses:
        now = tenant.current
        last = now.pending + 1 >= tenant.accumulation
        held = tuple(_plus(held, next(rows), last) for held in now.held)
        after[tenant] = replace(now, held=held, pending=now.pending + 1)
    return after


def _backward(losses: Mapping[Tenant, Tensor]) -> None:
    """Of the sum of losses, each divided by its tenant's number of batches."""
    device = next(iter(losses.values())).device
    by_name = {tenant.name: loss for tenant, loss in losses.items()}
    branches = Branches(by_name if len(losses) > 1 else {})
    try:
        with torch.enable_grad():  # the caller may be under no_grad
            each = [
                loss.reshape(()).to(device, torch.float32) / tenant.accumulation
                for tenant, loss in losses.items()
            ]
            torch.stack(each).sum().backward()  # type: ignore[no-untyped-call] # of torch
    except Exception as error:
        what, state = f"raised {named(error)}", "as before this step, which does not count"
        if (name := branches.failed()) is None:
            raise RuntimeError(
                f"the backward of the losses of {list(by_name)} {what}; all tenants are {state}"
            ) from error
        failed = next(tenant for tenant in losses if tenant.name == name)
        failed.stop(f"the backward of its loss {what}", error)
        raise RuntimeError(
            f"the backward of the loss of {name!r} {what}; it is stopped, and all other "
            f"tenants are {state}: repeat it without {name!r}"
        ) from error
    finally:
        branches.close()


def take_gradients(due: Sequence[Tenant], after: Mapping[Tenant, Progress]) -> list[float]:
    """Give parameters their gradients; returns the norm of each tenant's."""
    norms = []
    for tenant in due:
        tenant.begin(after[tenant].held)
        grads = [p.grad for p in tenant.parameters() if p.grad is not None]
        grads = [sparse_parts(grad)[1] if is_sparse(grad) else grad for grad in grads]
        norms.append(get_total_norm(grads) if grads else torch.zeros((), device="cpu"))
    return numbers(norms)


def update(tenant: Tenant, norm: float) -> None:
    """Clip the gradients of a tenant to its norm, and let its optimizer make a step."""
    parameters = tenant.parameters()
    if tenant.max_norm is not None and tenant.is_sparse():
        scale = min(tenant.max_norm / (norm + 1e-6), 1.0)  # as torch has it
        for parameter in parameters:
            grad = parameter.grad
            if grad is not None:
                indices, values = sparse_parts(grad)
                parameter.grad = sparse_tensor(indices, values * scale, grad.shape)
    elif tenant.max_norm is not None:
        clip_grads_with_norm_(parameters, tenant.max_norm, torch.tensor(norm, device="cpu"))
    try:
        tenant.optimizer.step()
    except Exception as error:
        tenant.stop(f"its optimizer raised {named(error)}", error)


def check_finite(tenants: Sequence[Tenant]) -> None:
    """Stop tenants whose update is not finite."""
    flags = iter(numbers(f.is_finite() for tenant in tenants for f in tenant.factors()))
    for tenant in tenants:
        bad = sum(not next(flags) for _ in tenant.factors())
        if bad and tenant.stopped is None:
            tenant.stop("its update is not finite in the dtype of the pool")


def _plus(held: Rows | None, rows: Rows | None, last: bool) -> Rows | None:
    """The sum; of a `last` batch, whose gradients are used before the next one, without a copy."""
    if held is not None and rows is not None:
        return held.plus(rows)
    rows = held if rows is None else rows
    # What is held must not change before the step is current; and a view keeps a whole stack.
    copied = rows is not None and (rows is held) == last
    return replace(rows, values=rows.values.clone()) if rows is not None and copied else rows
