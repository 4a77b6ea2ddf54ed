"""Mixed batches in layers of an attached PEFT model other than its experts.

PEFT passes `adapter_names`, one name per row, to every wrapped layer, which must have as many
inputs. Shared experts and routers receive the concatenated tokens of all rows: there names are
repeated per token. PEFT adapts two-dimensional parameters (`mlp.gate.weight`) by changing the
weight, for one adapter at a time: there each adapter is added to its rows of the module's product.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moelora.adapters.names import BASE
from moelora.integrations.peft.sources import Model, base_of, wrapped_layers
from moelora.integrations.transformers.deltas import Products


def install(model: Model, serving: object, experts: Iterable[nn.Module]) -> None:
    """Make all wrapped layers except `experts` accept `adapter_names` as above.

    `serving.now.shape` is the (rows, tokens per row) of the batch in a call.
    """
    others = {id(module) for module in experts}
    for _, module in wrapped_layers(base_of(model)):
        if id(module) in others or module.__dict__.get("_moelora") is serving:
            continue
        if not hasattr(module, "parameter_name"):
            forward = _forward
        elif module.get_param().dim() == 2:
            forward = _forward_product
        else:
            continue  # of experts, whose adapters PEFT cannot mix, as it reports
        module._moelora = serving
        module.forward = functools.partial(forward, module)


def _forward(
    wrapper: Any, x: Tensor, *args: Any, adapter_names: Sequence[str] | None = None, **kwargs: Any
) -> Any:
    """Replaces `forward` of a wrapped linear layer or embedding."""
    if adapter_names is not None:
        kwargs["adapter_names"] = _spread(wrapper, adapter_names, x)
    return type(wrapper).forward(wrapper, x, *args, **kwargs)


def _spread(wrapper: Any, names: Sequence[str], x: Tensor) -> Sequence[str]:
    """One name per input of a layer, if it receives tokens instead of rows."""
    inputs, shape = x.size(0), wrapper._moelora.now.shape
    if inputs == len(names):
        return names
    if len(set(names)) == 1:
        return [names[0]] * inputs  # independent of the tokens
    if shape is not None and shape[0] == len(names) and inputs == shape[0] * shape[1]:
        return [name for name in names for _ in range(shape[1])]
    raise RuntimeError(
        f"{inputs} inputs of a batch of {shape} reached a {type(wrapper.base_layer).__name__} that "
        f"{len(names)} adapter_names are for: rows of different adapters need all tokens of the "
        "batch there; call the PEFT model with one adapter at a time"
    )


def _forward_product(
    wrapper: Any, x: Tensor, *args: Any, adapter_names: Sequence[str] | None = None, **kwargs: Any
) -> Any:
    """Replaces `forward` of a wrapped two-dimensional parameter."""
    if adapter_names is None or wrapper.disable_adapters:
        return type(wrapper).forward(wrapper, x, *args, **kwargs)
    if wrapper.merged:
        raise RuntimeError("an adapter is merged into a router; call unmerge_adapter first")
    names = list(adapter_names)

    def add(inputs: Tensor, product: Tensor) -> Tensor:
        each = _spread(wrapper, names, inputs)
        for name in sorted(set(each) - {BASE}):
            if name in wrapper.lora_A:
                _add(wrapper, name, each, inputs, product)
        return product

    products = Products([tuple(wrapper.get_param().shape)], add)
    base: nn.Module = wrapper.base_layer
    with products:
        result = base(x, *args, **kwargs)
    products.check(wrapper.parameter_name, wrapper.get_base_layer())
    return result


def _add(wrapper: Any, name: str, each: Sequence[str], x: Tensor, product: Tensor) -> None:
    """Add one adapter to its rows of a product, in place."""
    own = torch.tensor([n for n, other in enumerate(each) if other == name], device=x.device)
    a, b = (side[name].weight.to(product.dtype) for side in (wrapper.lora_A, wrapper.lora_B))
    delta = x[own].to(product.dtype) @ a.T @ b.T * wrapper.scaling[name]
    product[own] += delta.to(product.dtype)
