"""The optimizer of a tenant: torch's, or one that the caller makes."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.optim import AdamW, Optimizer, SparseAdam


def make_optimizer(
    parameters: list[Tensor],
    make: Callable[[list[Tensor]], Optimizer] | None,
    *,
    sparse: bool,
    lr: float,
    weight_decay: float,
) -> Optimizer:
    """What `make` returns for the parameters, or one of torch's.

    Raises
    ------
    ValueError
        `make` returned no optimizer, or one of parameters of others, which would not be trained.
    """
    if make is None:
        if sparse:
            return SparseAdam(parameters, lr=lr)
        fused = all(p.is_cuda for p in parameters)
        return AdamW(parameters, lr=lr, weight_decay=weight_decay, fused=fused or None)
    made = make(parameters)
    if not isinstance(made, Optimizer):
        kind = type(made).__name__
        raise ValueError(f"optimizer made a {kind}, wanted a torch.optim.Optimizer")
    own = set(map(id, parameters))
    if others := sum(id(p) not in own for group in made.param_groups for p in group["params"]):
        raise ValueError(
            f"optimizer made one of {others} parameters that are not this tenant's, wanted one of "
            "those that it is called with"
        )
    return made
