"""`adapter_names=` in calls of a model.

transformers passes unknown keywords down to layers that ignore them. So a model with moelora's
experts handles `adapter_names` itself: `model.forward` is wrapped in a function that calls
`model._moelora`, or raises if the model has none. It is wrapped whenever `"moelora"` becomes the
experts implementation, and stays wrapped.

A wrapper instead of a pair of hooks, because torch does not call hooks after a KeyboardInterrupt;
`finally` always restores the calling thread's state.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import transformers
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.integrations.moe import use_experts_implementation

from moelora.integrations.transformers.hooks import around
from moelora.integrations.transformers.projection import is_loaded_fp8, not_packed
from moelora.operators.schema import NAMESPACE

IMPLEMENTATION = NAMESPACE

# Experts modules of older releases do not state the order of gate and up rows.
if "is_concatenated" not in inspect.signature(use_experts_implementation).parameters:
    raise ImportError(
        f"moelora.integrations.transformers needs transformers >= 5.7, this is "
        f"{transformers.__version__}"
    )


def take_adapter_names(model: nn.Module) -> None:
    """Makes `model.forward` accept `adapter_names`."""
    forward: Any = model.forward
    while forward is not None:  # other libraries may have wrapped our wrapper
        if getattr(forward, "func", None) is _forward:
            return
        forward = getattr(forward, "__wrapped__", None)
    # A partial, unlike a closure, is copied and pickled with the model.
    taking = functools.partial(_forward, model, model.forward)
    model.forward = functools.update_wrapper(taking, model.forward, (), ())  # keeps the signature


def _forward(
    model: nn.Module,
    forward: Callable[..., Any],
    *args: Any,
    adapter_names: Sequence[str | None] | None = None,
    **kwargs: Any,
) -> Any:
    serving = getattr(model, "_moelora", None)
    if serving is not None:
        return serving.call(forward, adapter_names, args, kwargs)
    if adapter_names is not None:
        raise no_adapters(model)
    return forward(*args, **kwargs)


def no_adapters(model: nn.Module) -> RuntimeError:
    return RuntimeError(f"this {type(model).__name__} has no adapters; call load_adapters first")


def batch_shape(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, int] | None:
    """(rows, tokens per row) of the batch in a model's arguments; None without a batch."""
    inputs = (kwargs.get("input_ids"), *args[:1], kwargs.get("inputs_embeds"))
    shapes = [x.shape for x in inputs if x is not None]
    return (shapes[0][0], shapes[0][1]) if shapes else None


def check_implementation(layer: str, config: Any) -> None:
    """Raises RuntimeError if the experts called `layer` would run without their adapters."""
    implementation = config._experts_implementation
    if implementation != IMPLEMENTATION:
        raise RuntimeError(
            f"{layer} runs experts_implementation={implementation!r}, which knows no adapters; "
            f"call model.set_experts_implementation({IMPLEMENTATION!r})"
        )


# Called by both the constructor of a model and `set_experts_implementation`.
@around("get_correct_experts_implementation", PreTrainedModel)
def _watched(choose: Callable[..., str], self: PreTrainedModel, *args: Any, **kwargs: Any) -> str:
    implementation = choose(self, *args, **kwargs)
    if implementation == IMPLEMENTATION:
        for name, module in self.named_modules():
            if is_loaded_fp8(module):  # only `enable` packs: it cannot be undone
                raise RuntimeError(not_packed(name))
        for module in self.modules():
            if isinstance(module, PreTrainedModel):
                take_adapter_names(module)
    return implementation


@around("generate", GenerationMixin)
def _with_message(generate: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """`generate` of a model without adapters refuses `adapter_names` in moelora's words."""
    if kwargs.get("adapter_names") is not None and getattr(self, "_moelora", None) is None:
        raise no_adapters(self)
    return generate(self, *args, **kwargs)
