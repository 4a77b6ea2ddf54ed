"""`enable(model)`: run all experts of a model in moelora."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from moelora.integrations.transformers.calls import IMPLEMENTATION, check_implementation
from moelora.integrations.transformers.experts import activation_of, lay_out
from moelora.integrations.transformers.fp8 import pack_loaded
from moelora.integrations.transformers.layers import moe_layers
from moelora.integrations.transformers.projection import is_loaded_fp8, no_experts, up_name
from moelora.operators.checks import errors_about
from moelora.weights.fp8 import Activations


def enable(
    model: PreTrainedModel, *, activations: Activations | None = None, training: bool = False
) -> None:
    """Makes moelora run all experts of a model, or raises and leaves the model unchanged.

    In contrast, `model.set_experts_implementation("moelora")` silently ignores experts that do not
    use transformers' experts interface, and detects an unsupported activation in the first call
    only.

    Experts that transformers has loaded in FP8 are packed into tiles, which cannot be undone. That
    needs additional memory for the tiles of one layer and for one expert.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    activations : {"fp8", "native"}, optional
        Only with FP8 experts: dtype of their activations (`QuantizedWeights.from_fp8_block`), by
        default FP8.
    training : bool
        Freeze the experts' weights (`requires_grad_(False)`), for which moelora computes no
        gradients. Everything else that requires gradients gets them.

    Raises
    ------
    NotImplementedError
        Some experts do not use transformers' experts interface, or compute something that moelora
        does not support; the message names them.
    ValueError
        FP8 weights are NaN or have scales out of the format's range; or `activations` is given
        without FP8 experts, or after they were packed.
    """
    try:
        layers = moe_layers(model)
    except ValueError:
        layers = {}
    aside = own_experts(model, set(layers))
    name = type(model).__name__
    if aside:
        raise NotImplementedError(
            f"{', '.join(aside)} of {name} do not go through transformers' experts interface, and "
            "would run as before"
        )
    if not layers:
        raise NotImplementedError(no_experts(model))
    for name, (module, _) in layers.items():
        if not is_loaded_fp8(module):  # pack_loaded checks those
            with errors_about(name, NotImplementedError):
                activation_of(module)
    pack_loaded(model, layers, activations)
    model.set_experts_implementation(IMPLEMENTATION)
    for name, (module, _) in layers.items():
        check_implementation(name, module.config)
        if hasattr(module._parameters.get("down_proj"), "placements"):
            lay_out(module)
        for weight in (up_name(module), "down_proj") if training else ():
            if weight in module._parameters:  # quantized weights are no parameters
                getattr(module, weight).requires_grad_(False)


def own_experts(model: nn.Module, reached: set[str]) -> list[str]:
    """Classes of experts modules that neither contain nor belong to a layer of `reached`."""
    found: dict[str, None] = {}
    for name, module in model.named_modules():
        cls = type(module).__name__
        last = name.rpartition(".")[2]
        if "shared" in f"{last} {cls}".lower():
            continue  # shared experts process every token
        is_empty = next(module.parameters(), None) is None
        if not (last == "experts" or cls.endswith("Experts")) or is_empty:
            continue
        plain = name.replace(".base_layer", "")
        if not any((plain + ".").startswith(r + ".") or r.startswith(plain + ".") for r in reached):
            found[cls if cls != "ModuleList" else f"{name.split('.')[-2]}.experts"] = None
    return list(found)
