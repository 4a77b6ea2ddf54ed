"""PEFT adapters of quantized experts, whose parameters `load_quantized` has removed.

While PEFT injects an adapter, experts have parameters of the right shape that expand one element,
of which PEFT only reads shape, dtype and device. `attach` then runs the wrapped experts from tiles;
PEFT by itself would merge factors into parameters that do not exist, which is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from peft.tuners.tuners_utils import BaseTuner
from torch import nn

from moelora.integrations.peft.wrappers import is_wrapper
from moelora.integrations.transformers.hooks import around
from moelora.integrations.transformers.projection import (
    QuantizedProjection,
    is_experts,
    is_quantized,
    up_name,
)


@contextmanager
def with_parameters(model: nn.Module) -> Iterator[None]:
    """Within the context, quantized experts of `model` have placeholder parameters."""
    replaced: list[tuple[nn.Module, str, QuantizedProjection]] = []
    try:
        for module in list(model.modules()):
            if not is_experts(module) or not is_quantized(module):
                continue
            for name in (up_name(module), "down_proj"):
                projection: Any = module._modules.pop(name)
                replaced.append((module, name, projection))
                experts, rows, columns = projection.shape
                shape = (columns, rows) if module.is_transposed else (rows, columns)
                one = projection.tiles.new_empty((), dtype=projection.dtype)
                module._parameters[name] = nn.Parameter(one.expand(experts, *shape), False)
        yield
    finally:
        for module, name, projection in replaced:
            module._parameters.pop(name, None)
            module._modules[name] = projection


@around("inject_adapter", BaseTuner)
def _with_parameters(
    inject: Callable[..., None], self: Any, model: nn.Module, *args: Any, **kwargs: Any
) -> None:
    with with_parameters(model):
        inject(self, model, *args, **kwargs)


@around("_check_merge_allowed", BaseTuner)
def _without_tiles(allowed: Callable[..., None], self: Any) -> None:
    """Raises ValueError before PEFT has merged other layers."""
    for name, module in self.model.named_modules():
        if is_wrapper(module):
            experts: Any = module.get_base_layer()
            if is_experts(experts) and is_quantized(experts):
                raise ValueError(
                    f"{name} has weights in tiles, which adapters cannot be merged into; run "
                    "them side by side, with moelora.integrations.peft.attach(model)"
                )
    allowed(self)
