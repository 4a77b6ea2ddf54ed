"""The experts modules of a model, and their sizes and layouts for a pool."""

from __future__ import annotations

from torch import nn

from moelora.adapters import MoELayer
from moelora.integrations.transformers.linears import plain_name
from moelora.integrations.transformers.parallel import experts_shard
from moelora.integrations.transformers.projection import (
    Experts,
    is_experts,
    is_interleaved,
    no_experts,
    refuse_zero3,
    sizes,
)


def moe_layers(model: nn.Module) -> dict[str, tuple[Experts, MoELayer]]:
    """Experts modules of a model that use transformers' experts interface, by name.

    Names omit the wrappers of PEFT, compilers and others. Raises ValueError if there are none,
    NotImplementedError for experts that moelora cannot run.
    """
    layers = {}
    for name, module in model.named_modules():
        if type(module).__name__ == "Mxfp4GptOssExperts":
            raise NotImplementedError(
                f"{name} is Mxfp4GptOssExperts, whose weights transformers has swizzled for "
                "triton_kernels, which nothing else reads; give the checkpoint's folder to "
                "moelora.integrations.transformers.load_quantized"
            )
        if not is_experts(module):
            continue
        name = plain_name(name)
        for parameter, weight in module._parameters.items():
            refuse_zero3(f"{name}.{parameter}", weight)
        _, (experts, hidden, intermediate) = sizes(module)
        layer = MoELayer(
            name,
            experts,
            hidden,
            intermediate,
            gated=module.has_gate,
            interleaved=is_interleaved(module),
            transposed=module.is_transposed,
        )
        experts_shard(name, module, layer)  # raises if no factors go with this process's part
        layers[name] = (module, layer)
    if not layers:
        raise ValueError(no_experts(model))
    return layers
