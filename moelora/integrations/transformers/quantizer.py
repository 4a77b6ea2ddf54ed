"""What transformers asks about a model whose experts are in moelora's tiles."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from moelora.integrations.transformers.calls import IMPLEMENTATION
from moelora.integrations.transformers.layers import moe_layers
from moelora.integrations.transformers.projection import take_off


@register_quantization_config(IMPLEMENTATION)
class Config(QuantizationConfigMixin):
    """Says to `from_pretrained` that `Quantizer` prepares the model."""

    def __init__(self, **kwargs: Any) -> None:
        self.quant_method = IMPLEMENTATION  # type: ignore[assignment] # not one of theirs


@register_quantizer(IMPLEMENTATION)
class Quantizer(HfQuantizer):
    """Takes the experts' parameters off a model before `from_pretrained` gives them memory."""

    requires_calibration = False
    is_trainable = True  # of adapters: Trainer asks

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        for module, _ in moe_layers(model).values():
            take_off(module, module.down_proj.dtype)
            module._is_hf_initialized = True  # nothing here is to be made up


def refuse_saving(model: PreTrainedModel) -> None:
    """Has `save_pretrained` raise, which would leave out the experts."""
    model.__dict__["hf_quantizer"] = Quantizer(Config())
