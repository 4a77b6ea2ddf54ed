"""Restores what a step has changed if it raises."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from moelora.tenants.rows import is_sparse
from moelora.tenants.tenant import Tenant


class _Kept:
    """Values of a parameter before an update: all, or those of the experts of a sparse gradient."""

    def __init__(self, parameter: Tensor) -> None:
        self._parameter = parameter.detach()
        grad = parameter.grad
        self._rows = grad._indices()[0] if grad is not None and is_sparse(grad) else None
        self._values = (
            self._parameter.clone() if self._rows is None else self._parameter[self._rows]
        )

    def restore(self) -> None:
        if self._rows is None:
            self._parameter.copy_(self._values)
        else:
            self._parameter[self._rows] = self._values


class Undo:
    """Copies of the tenants' accumulated gradients, and of factors before their update."""

    def __init__(self, tenants: Iterable[Tenant]) -> None:
        self._tenants = list(tenants)
        self._pending = {tenant: tenant.pending for tenant in self._tenants}
        self._gradients = {
            tenant: [
                None
                if f.stack.grad is None or is_sparse(f.stack.grad)
                else f.stack.grad[f.slot].clone()
                for f in tenant.factors()
            ]
            for tenant in self._tenants
            if tenant.pending and tenant.is_here()
        }
        self._held = {tenant: [f.held for f in tenant.factors()] for tenant in self._tenants}
        self._factors: dict[Tenant, list[_Kept]] = {}

    def keep(self, tenant: Tenant) -> None:
        """Before an update of it."""
        self._factors[tenant] = [_Kept(p) for p in tenant.parameters()]

    def undo(self, tenant: Tenant) -> None:
        """Restore the parameters from before the update."""
        for kept in self._factors.pop(tenant):
            kept.restore()

    def publish(self, tenant: Tenant) -> None:
        """Write an update to the slots, all of it or nothing. `undo_all` keeps it."""
        try:
            for factor in tenant.factors():
                factor.publish()
        except BaseException:
            self.undo(tenant)
            for factor in tenant.factors():
                factor.publish()
            raise
        del self._factors[tenant]
        self._gradients.pop(tenant, None)
        self._held.pop(tenant, None)
        self._pending[tenant] = 0
        tenant.updates += 1

    def undo_all(self) -> None:
        """Restore factors that are not published, and gradients that no update has used."""
        for tenant in [*self._factors]:
            self.undo(tenant)
        for tenant in self._tenants:
            tenant.pending = self._pending[tenant]
            held = self._held.get(tenant)
            for n, factor in enumerate(tenant.factors()):
                factor.parameter.grad = factor.stack.grad = None
                factor.held = None if held is None else held[n]
        for tenant, grads in self._gradients.items():
            for factor, grad in zip(tenant.factors(), grads, strict=True):
                if grad is not None:
                    if factor.stack.grad is None:
                        factor.stack.grad = torch.zeros_like(factor.stack)
                    factor.stack.grad[factor.slot].copy_(grad)
