"""An adapter of a PEFT model as engines read it: `engine_tensors`."""

from __future__ import annotations

from typing import Any

from peft import PeftModel, get_peft_model_state_dict
from torch import Tensor

from moelora.adapters import LinearLayer, checkpoint
from moelora.adapters.engine_names import STACKED, names_of
from moelora.adapters.shards import whole
from moelora.adapters.write import PREFIX, peft_tensors, per_expert_tensors
from moelora.integrations.peft.sources import base_of
from moelora.integrations.transformers.layers import moe_layers

A, B = ".lora_A.weight", ".lora_B.weight"


def engine_tensors(
    model: PeftModel, adapter: str = "default"
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """An adapter of a PEFT model as (config, tensors) of `update_adapters`.

    Names are those of vLLM (0.33). Experts stay in stacks, or get a pair each where one rank and
    scaling do not fit all modules or a layer has one of two stacks. Tensors stay on their device,
    as views where that is possible. Of FSDP2's parts the whole is gathered: all processes call it.

    Parameters
    ----------
    model : peft.PeftModel
    adapter : str
        One of LoRA.

    Raises
    ------
    ValueError
        The adapter has an option or a tensor that moelora does not know (DoRA, `modules_to_save`),
        or the model has no adapter of that name.
    """
    if adapter not in model.peft_config:
        raise ValueError(f"adapter is {adapter!r}, wanted one of {list(model.peft_config)}")
    config: Any = model.peft_config[adapter]
    found = get_peft_model_state_dict(model, adapter_name=adapter)
    state: dict[str, Tensor] = {key: whole(tensor).detach() for key, tensor in found.items()}
    base = base_of(model)
    model_type = base.config.get_text_config().model_type
    uneven = config.rank_pattern or config.alpha_pattern
    as_they_are = model_type in STACKED if config.target_parameters else not uneven
    if as_they_are:
        return config.to_dict(), state
    layers = {name: layer for name, (_, layer) in moe_layers(base).items()}
    linears = {}
    for key, a in state.items():
        name = key.removeprefix(PREFIX).removesuffix(A)
        b = state.get(f"{PREFIX}{name}{B}")
        if key.endswith(A) and b is not None and name.removesuffix(".base_layer") not in layers:
            linears[name] = LinearLayer(name, a.shape[1], b.shape[0])
    read = checkpoint.load(state, config, [*layers.values()], [*linears.values()])
    names = names_of(model_type)._replace(second=None)  # engines refuse factors of no layer
    stacked = all(len(p) == 2 and not layers[n].interleaved for n, p in read.experts.items())
    if uneven or not stacked:
        return per_expert_tensors(read, layers, linears, names=names, copy=False)
    written, stacks = peft_tensors(read, layers, linears, copy=False)
    return written, {names.of(key)[0]: tensor for key, tensor in stacks.items()}
