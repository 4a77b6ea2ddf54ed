"""Models on the meta device, to inspect their layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from moelora.adapters import MoELayer
from moelora.integrations.transformers.layers import moe_layers
from moelora.integrations.transformers.linears import Linear, linear_layers

AUTO = ("CausalLM", "ImageTextToText", "Seq2SeqLM", "MultimodalLM")


def factory(config: Any) -> Any:
    """The model or `AutoModelFor...` class of a configuration; None if it is only for a part of a
    model."""
    for name in getattr(config, "architectures", None) or ():
        if isinstance(cls := getattr(transformers, name, None), type):
            return cls
    for name in AUTO:
        auto = getattr(transformers, f"AutoModelFor{name}", None)
        if auto is not None and type(config) in auto._model_mapping:
            return auto
    return None


def empty_model(config: Any) -> PreTrainedModel:
    """Construct a model from its configuration, on the meta device.

    Parameters
    ----------
    config : transformers.PretrainedConfig, str or Path
        The configuration, or a folder or file that contains it.

    Raises
    ------
    ValueError
        transformers has no model for it.
    """
    if isinstance(config, (str, Path)):
        path = Path(config)
        if not path.exists():
            raise ValueError(f"{path} does not exist; wanted a config.json, or a folder with one")
        config = transformers.AutoConfig.from_pretrained(path)
    cls = factory(config)
    if cls is None:
        raise ValueError(f"transformers has no whole model of model_type {config.model_type!r}")
    make = cls._from_config if issubclass(cls, PreTrainedModel) else cls.from_config
    with torch.device("meta"):
        model: PreTrainedModel = make(config)
    return model


def empty_layers(config: Any) -> tuple[PreTrainedModel, dict[str, MoELayer], dict[str, Linear]]:
    """`empty_model`, its layers of experts, without which it may be, and its other layers."""
    model = empty_model(config)
    try:
        experts = {name: layer for name, (_, layer) in moe_layers(model).items()}
    except ValueError:
        experts = {}
    return model, experts, linear_layers(model, experts)
