"""From losses to updates: a backward of all, then gradients, norms and optimizers by tenant."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from moelora.adapters.held import Change
from moelora.adapters.pool import AdapterPool
from moelora.operators.sparse import sparse_tensor
from moelora.operators.torch_private import sparse_parts
from moelora.training.tenants.branches import Branches
from moelora.training.tenants.factors import collect
from moelora.training.tenants.replicas import Replicas
from moelora.training.tenants.rows import Rows, is_sparse
from moelora.training.tenants.steps import Loss, Step, check_loss, check_weights, named, numbers
from moelora.training.tenants.tenant import Progress, Tenant


def step(
    pool: AdapterPool,
    stacks: Sequence[Tensor],
    tenants: Mapping[str, Tenant],
    losses: Mapping[str, Loss],
    weights: Mapping[str, float],
    replicas: Replicas | None,
) -> dict[str, Step]:
    """A backward of all losses, an update of each tenant that is due, and what happened to each.

    Tenants that are stopped keep what they had; updates of the others are current all at once. With
    `replicas`, a step of the losses of all ranks.
    """
    begin = partial(_begin, pool, tenants, losses, weights)
    if replicas is None:
        values, means = begin()
        shares = dict.fromkeys(means, 1.0)
    else:
        values, means, shares = replicas.begin(tenants, weights, begin)
    steps = {name: Step(mean) for name, mean in means.items()}
    alive = [tenants[name] for name in means if tenants[name].stopped is None]
    after = _accumulate(pool, stacks, alive, values, shares, replicas)
    due = [tenant for tenant in after if after[tenant].pending >= tenant.accumulation]
    for tenant, norm in zip(due, _take_gradients(due, after), strict=True):
        steps[tenant.name] = steps[tenant.name]._replace(norm=norm)
        if not math.isfinite(norm):
            tenant.stop(f"the norm of its gradients is {norm}")
        else:
            _update(tenant, norm)
    updated = [tenant for tenant in due if tenant.stopped is None]
    _check_finite(updated)
    after |= {tenant: tenant.after_update() for tenant in updated}
    norms = {tenant.name: steps[tenant.name].norm for tenant in due}
    for name in _publish(pool, updated, after, norms, replicas):
        steps[name] = steps[name]._replace(updated=True)
    for name, done in steps.items():
        if tenants[name].stopped is not None:
            steps[name] = done._replace(stopped=tenants[name].stopped)
    return steps


def _begin(
    pool: AdapterPool,
    tenants: Mapping[str, Tenant],
    losses: Mapping[str, Loss],
    weights: Mapping[str, float],
) -> tuple[dict[str, Tensor], dict[str, float | None]]:
    """The losses of tenants that run, and the numbers that these are; None: the loss raised.

    Stops tenants whose loss raised or is not finite.
    """
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "step is called under torch.inference_mode, which records no gradients: leave it, "
            "in the forward as well"
        )
    if not isinstance(losses, Mapping):
        kind = type(losses).__name__
        raise ValueError(f"losses is a {kind}, wanted a mapping of tenants to their losses")
    for name, loss in losses.items():
        if name not in tenants:
            raise KeyError(f"no tenant {name!r}; there are {sorted(tenants)}")
        if tenants[name].stopped is None and not callable(loss):
            check_loss(name, loss)
    check_weights(weights, losses)
    found: dict[str, float | None] = {n: None for n in losses if tenants[n].stopped is None}
    running = {name: tenants[name] for name in found if tenants[name].is_running()}
    _check_slots(pool, running.values())
    values: dict[str, Tensor] = {}
    for name, tenant in running.items():
        loss = losses[name]
        if not isinstance(loss, Tensor):
            try:
                with torch.enable_grad():
                    loss = loss()
                check_loss(name, loss)
            except Exception as error:
                tenant.stop(f"its loss raised {named(error)}", error)
                continue
        values[name] = loss
    for name, number in zip(values, numbers(values.values()), strict=True):
        found[name] = number
        if not math.isfinite(number):
            tenants[name].stop(f"its loss is {number}")
    return values, found


def _check_slots(pool: AdapterPool, running: Collection[Tenant]) -> None:
    """NoSlot unless there are slots for the next versions of tenants that the step makes due."""
    next_due = [one.name for one in running if one.pending + 1 >= one.accumulation]
    pool._versions.check_next(next_due, [one.name for one in running])


def _publish(
    pool: AdapterPool,
    updated: Sequence[Tenant],
    after: Mapping[Tenant, Progress],
    norms: Mapping[str, float | None],
    replicas: Replicas | None,
) -> list[str]:
    """Let what follows the step be current, of all tenants at once, and write it to the slots;
    returns whose updates these are."""
    versions, change = pool._versions, Change()

    def stage() -> None:
        running = [tenant for tenant in updated if tenant.is_running()]
        writers = {tenant.name: tenant.writer(after[tenant]) for tenant in running}
        versions.stage(change, writers, [tenant.name for tenant in after])

    with versions.lock:
        if replicas is None:
            stage()
        else:
            replicas.publish({tenant.name: tenant for tenant in after}, norms, stage)
            for tenant in updated:
                if tenant.stopped is not None:
                    versions.settle(tenant.name)  # what is staged and not current is dropped
        for tenant, progress in after.items():
            if tenant.stopped is None:
                tenant.stage(change, progress)
        change.done = True
        published = [tenant.name for tenant in updated if tenant.stopped is None]
        for name in published:
            versions.settle(name)
    return published


def _accumulate(
    pool: AdapterPool,
    stacks: Sequence[Tensor],
    tenants: Sequence[Tenant],
    losses: Mapping[str, Tensor],
    shares: Mapping[str, float],
    replicas: Replicas | None,
) -> dict[Tenant, Progress]:
    """Backward; returns what is accumulated of each tenant with it."""
    for stack in stacks:
        stack.grad = None  # of backwards outside of a step
    if not tenants:
        return {}

    def gradients() -> list[Rows | None]:
        if replicas is not None:
            _check_slots(pool, tenants)  # of tenants of other ranks, too
        here = {tenant: losses[tenant.name] for tenant in tenants if tenant.name in losses}
        if here:
            _backward(here, shares, is_watched=len(tenants) > 1)
        return collect(stacks, [factor for tenant in tenants for factor in tenant.factors()])

    rows = iter(gradients() if replicas is None else replicas.add_up(tenants, gradients))
    after = {}
    for tenant in tenants:
        now = tenant.current
        last = now.pending + 1 >= tenant.accumulation
        held = tuple(_plus(held, next(rows), last) for held in now.held)
        after[tenant] = replace(now, held=held, pending=now.pending + 1)
    return after


def _backward(
    losses: Mapping[Tenant, Tensor], shares: Mapping[str, float], is_watched: bool
) -> None:
    """Of the sum of losses, each divided by its tenant's number of batches and times its share.

    `is_watched`: a tenant is stopped if the part of the graph fails that belongs to its loss alone.
    """
    device = next(iter(losses.values())).device
    by_name = {tenant.name: loss for tenant, loss in losses.items()}
    branches = Branches(by_name if is_watched else {})
    try:
        with torch.enable_grad():  # the caller may be under no_grad
            each = [
                loss.reshape(()).to(device, torch.float32)
                / (tenant.accumulation / shares[tenant.name])
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


def _take_gradients(due: Sequence[Tenant], after: Mapping[Tenant, Progress]) -> list[float]:
    """Give parameters their gradients; returns the norm of each tenant's."""
    norms = []
    for tenant in due:
        tenant.begin(after[tenant].held)
        grads = [p.grad for p in tenant.parameters() if p.grad is not None]
        grads = [sparse_parts(grad)[1] if is_sparse(grad) else grad for grad in grads]
        norms.append(get_total_norm(grads) if grads else torch.zeros((), device="cpu"))
    return numbers(norms)


def _update(tenant: Tenant, norm: float) -> None:
    """Clip the gradients of a tenant to its norm, and let its optimizer make a step."""
    parameters = tenant.parameters()
    if tenant.max_norm is not None and tenant.is_sparse():
        scale = min(tenant.max_norm / (norm + 1e-6), 1.0)  # as torch has it
        for parameter in parameters:
            if (grad := parameter.grad) is not None:
                indices, values = sparse_parts(grad)
                parameter.grad = sparse_tensor(indices, values * scale, grad.shape)
    elif tenant.max_norm is not None:
        clip_grads_with_norm_(parameters, tenant.max_norm, torch.tensor(norm, device="cpu"))
    try:
        tenant.optimizer.step()
    except Exception as error:
        tenant.stop(f"its optimizer raised {named(error)}", error)


def _check_finite(tenants: Sequence[Tenant]) -> None:
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
