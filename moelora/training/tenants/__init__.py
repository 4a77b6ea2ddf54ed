"""Training of several adapters of a pool in one step."""

from moelora.training.tenants.steps import Step
from moelora.training.tenants.tenant import Tenant
from moelora.training.tenants.tenants import Tenants

__all__ = ["Step", "Tenant", "Tenants"]
