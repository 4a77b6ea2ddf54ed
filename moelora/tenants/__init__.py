"""Training of several adapters of a pool in one step."""

from moelora.tenants.tenant import Tenant
from moelora.tenants.tenants import Step, Tenants

__all__ = ["Step", "Tenant", "Tenants"]
