"""Tenants on several data-parallel ranks: what the ranks agree on, and sums of their gradients.

Each rank has a replica of the pool, and rows of any tenants. The ranks exchange words three times
in a step, so that an error of one is raised by all, and what stops a tenant stops it on all:

    losses       which tenants are in the step, whose losses are finite, the settings of all tenants
    gradients    which experts of which factors have one on which rank
    updates      the norms of gradients, and which tenants have an update

Between the last two, gradients of (tenant, expert) pairs that a rank has are added up. Each rank
adds one part of the numbers, in the order of the ranks, in float32, whatever else is in the step:

    all-to-all of parts  ->  sum over ranks, rounded to the dtype of the stack  ->  all-gather
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Generator, Tensor, distributed

from moelora.adapters.layers import Adapter
from moelora.adapters.pool import AdapterPool
from moelora.adapters.ranks import Ranks, facts_of, is_on_all_ranks
from moelora.training.tenants.factors import Factor
from moelora.training.tenants.files import encoded
from moelora.training.tenants.rows import Rows
from moelora.training.tenants.tenant import Tenant, stacks_of


class Replicas:
    """The ranks of a process group, each of which trains the same tenants.

    Parameters
    ----------
    group : ProcessGroup
        All its ranks make this object at the same time.
    """

    def __init__(self, group: distributed.ProcessGroup) -> None:
        kind = getattr(distributed, "ProcessGroup", ())  # not in every build of torch
        if not isinstance(group, kind) or distributed.get_rank(group) < 0:
            raise ValueError(
                f"group is {group!r:.80}, wanted a torch.distributed.ProcessGroup of which this "
                "process is a rank, such as torch.distributed.group.WORLD"
            )
        self._group = group
        ranks: list[int] = distributed.get_process_group_ranks(group)
        self._ranks = Ranks(ranks)
        self.together, self.every = self._ranks.together, self._ranks.every
        self.is_first = distributed.get_rank(group) == 0

    def add(
        self,
        call: str,
        check: Callable[[], object],
        facts: Mapping[str, object],
        generator: Generator | None,
        begin: Callable[[Generator | None], Tenant],
        resume: bool,
    ) -> Tenant:
        """What `begin` returns, called on all ranks with a generator in the state of the first's;
        before it, `check` succeeds and `facts` agree."""

        def checked() -> tuple[Mapping[str, object], Tensor]:
            check()
            return facts, (generator or torch.default_generator).get_state()

        state = self.every(call, checked)[0]

        def begun() -> Tenant:
            return begin(generator if self.is_first else Generator().set_state(state))

        def found(tenant: Tenant) -> dict[str, object]:
            return content(tenant, tenant.adapter(), tenant.state() if resume else None)

        return self.together(call, begun, found)

    # -- a step --

    def begin(
        self,
        tenants: Mapping[str, Tenant],
        weights: Mapping[str, float],
        function: Callable[[], tuple[dict[str, Tensor], dict[str, float | None]]],
    ) -> tuple[dict[str, Tensor], dict[str, float | None], dict[str, float]]:
        """The losses of this rank, then of all ranks the mean by tenant, and this rank's share of
        it; `function` returns losses of this rank and their numbers, None where there is none."""
        losses: dict[str, Tensor] = {}

        def both() -> tuple[dict[str, object], Any]:
            nonlocal losses
            losses, numbers = function()
            facts: dict[str, object] = {"the set of tenants": list(tenants)}
            for tenant in tenants.values():
                if tenant.is_running():
                    facts |= settings(tenant)
            mine = {name: (number, weights.get(name, 1.0)) for name, number in numbers.items()}
            return facts, (mine, _stops(tenants))

        every = self.every("step", both)
        new = [name for name, tenant in tenants.items() if not tenant.ended]
        self._stop(tenants, [stops for _, stops in every])
        means: dict[str, float | None] = {}
        shares = {}
        for name in new:
            of = [mine[name] for mine, _ in every if name in mine]
            if not of:
                continue
            total = sum(weight for _, weight in of)
            each = [None if loss is None else loss * (weight / total) for loss, weight in of]
            means[name] = None if None in each else sum(x for x in each if x is not None)
            shares[name] = weights.get(name, 1.0) / total
        return losses, means, shares

    def add_up(
        self, tenants: Sequence[Tenant], function: Callable[[], list[Rows | None]]
    ) -> list[Rows | None]:
        """Sums over all ranks of gradients of the factors of `tenants`, which `function` returns;
        None where no rank has one."""
        factors = [factor for tenant in tenants for factor in tenant.factors()]
        rows: list[Rows | None] = []

        def both() -> tuple[dict[str, object], Any]:
            nonlocal rows
            rows = function()
            return {}, _reached(factors, rows)

        by_name = {tenant.name: tenant for tenant in tenants}
        try:
            reached = torch.stack(self.every("step", both)).any(0)
        except Exception as error:
            if is_on_all_ranks(error):  # which may have stopped a tenant on one of them
                self._stop(by_name, self.every("step", lambda: ({}, _stops(by_name))))
            raise
        masks = list(reached.split([1 + factor.stack.size(1) for factor in factors]))
        sums: list[Rows | None] = []
        for tenant in tenants:  # in memory for the gradients of one at a time
            count = len(tenant.factors())
            sums += self._sums(factors[:count], rows[:count], masks[:count])
            del factors[:count], rows[:count], masks[:count]
        return sums

    def publish(
        self,
        tenants: Mapping[str, Tenant],
        norms: Mapping[str, float | None],
        function: Callable[[], object],
    ) -> None:
        """`function`, which prepares updates; then tenants are stopped that other ranks stopped."""

        def both() -> tuple[dict[str, object], Any]:
            function()
            facts = {f"norm of gradients of tenant {name!r}": str(n) for name, n in norms.items()}
            return dict(facts), _stops(tenants)

        self._stop(tenants, self.every("step", both))

    def _stop(self, tenants: Mapping[str, Tenant], every: Sequence[Mapping[str, str]]) -> None:
        """Stop what any rank has stopped, for the reason of the first that has."""
        for name, tenant in tenants.items():
            reasons = {
                rank: stops[name]
                for rank, stops in zip(self._ranks.ranks, every, strict=True)
                if name in stops
            }
            if len(reasons) == len(every) and len(set(reasons.values())) == 1:
                continue
            if reasons:
                rank = min(reasons)
                tenant.stopped = f"rank {rank}: {reasons[rank]}"

    def _sums(
        self, factors: Sequence[Factor], rows: Sequence[Rows | None], masks: Sequence[Tensor]
    ) -> list[Rows | None]:
        sums: list[Rows | None] = [None] * len(factors)
        places: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for n, (factor, mask) in enumerate(zip(factors, masks, strict=True)):
            if mask[0]:
                places.setdefault((factor.stack.device, factor.stack.dtype), []).append(n)
        for of_place in places.values():
            experts = [masks[n][1:].nonzero()[:, 0] for n in of_place]
            parts = [
                _of_experts(factors[n], rows[n], some)
                for n, some in zip(of_place, experts, strict=True)
            ]
            total = self._sum(torch.cat([part.flatten() for part in parts]))
            flat = total.split([part.numel() for part in parts])
            for n, some, part, values in zip(of_place, experts, parts, flat, strict=True):
                sums[n] = Rows(some, values.view(part.shape))
        return sums

    def _sum(self, values: Tensor) -> Tensor:
        """Over all ranks, of as many values on each."""
        size = len(self._ranks.ranks)
        mine, chunk = values.numel(), -(-values.numel() // size)
        if mine == 0:
            return values
        sent = values.new_zeros(size * chunk)
        sent[:mine] = values
        received = torch.empty_like(sent)
        # As bytes, of which every backend knows how to send them.
        distributed.all_to_all_single(_bytes(received), _bytes(sent), group=self._group)
        first, *others = received.view(size, chunk)
        total = first.to(torch.float32)
        for other in others:
            total = total + other
        part = total.to(values.dtype)
        distributed.all_gather([*_bytes(sent).view(size, -1)], _bytes(part), group=self._group)
        return sent[:mine]


def shapes(pool: AdapterPool) -> dict[str, object]:
    """What ranks compare of their pools."""
    found: dict[str, object] = {
        f"shape and dtype of {side} of {'.'.join(filter(None, place))}": (
            tuple(stack.shape[1:]),
            str(stack.dtype),
        )
        for place, pair in stacks_of(pool).items()
        for side, stack in zip("AB", pair, strict=True)
    }
    return {
        "the set of layers": [*pool.layers, *pool.linears],
        "max_rank": pool.max_rank,
        "max_linear_rank": pool.max_linear_rank,
        **found,
    }


def settings(tenant: Tenant) -> dict[str, object]:
    """What ranks compare of a tenant."""
    found: dict[str, object] = {
        "version": tenant.version(),
        "updates": tenant.updates,
        "pending": tenant.pending,
        "accumulation": tenant.accumulation,
        "max_norm": tenant.max_norm,
        "optimizer": type(tenant.optimizer).__name__,
    }
    for number, group in enumerate(tenant.optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                found[f"{key} of group {number}"] = str(value)
    return {f"{key} of tenant {tenant.name!r}": value for key, value in found.items()}


def content(tenant: Tenant, adapter: Adapter, state: Mapping[str, Any] | None) -> dict[str, object]:
    """What ranks compare of a tenant, its factors and its state, of both by a checksum."""
    facts = {**settings(tenant), **facts_of(adapter)}
    if state is not None and tenant.stopped is None:  # what stopped it may have been in an update
        tensors: dict[str, Tensor] = {}
        checksum = zlib.crc32(repr(encoded(state, "", tensors)).encode())
        for tensor in tensors.values():
            checksum = zlib.crc32(_bytes(tensor.reshape(-1)).numpy().data, checksum)
        facts["the checksum of the optimizer's state"] = checksum
    return facts


def _stops(tenants: Mapping[str, Tenant]) -> dict[str, str]:
    return {name: one.stopped for name, one in tenants.items() if one.stopped is not None}


def _reached(factors: Sequence[Factor], rows: Sequence[Rows | None]) -> Tensor:
    """Of each factor whether there is a gradient, then of each expert whether it has one; bool, on
    the host. Waits for the device once if a gradient is dense."""
    masks = [torch.zeros(1 + factor.stack.size(1), dtype=torch.bool) for factor in factors]
    dense = []
    for mask, of in zip(masks, rows, strict=True):
        if of is not None:
            mask[0] = True
            if of.whole:
                dense.append((mask, of.values.flatten(1).any(1)))
            else:
                mask[1 + of.experts] = True
    if dense:
        device = dense[0][1].device
        on_host = torch.cat([found.to(device) for _, found in dense]).cpu()
        parts = on_host.split([found.numel() for _, found in dense])
        for (mask, _), part in zip(dense, parts, strict=True):
            mask[1:] = part
    return torch.cat(masks)


def _of_experts(factor: Factor, rows: Rows | None, experts: Tensor) -> Tensor:
    """The gradients of some experts, zero for those that this rank has none of."""
    if rows is not None and torch.equal(rows.experts, experts):
        return rows.values
    if rows is not None and rows.whole:
        return rows.values[experts.to(rows.values.device)]
    stack = factor.stack.detach()
    values = stack.new_zeros(experts.numel(), *stack.shape[2:])
    if rows is not None:
        values[torch.searchsorted(experts, rows.experts).to(stack.device)] = rows.values
    return values


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)
