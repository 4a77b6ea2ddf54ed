"""transformers' quantizer interface for models with quantized experts in moelora."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from moelora.integrations.transformers.calls import IMPLEMENTATION
from moelora.integrations.transformers.layers import moe_layers
from moelora.integrations.transformers.projection import remove_weights


@register_quantization_config(IMPLEMENTATION)
class Config(QuantizationConfigMixin):
    """Makes `from_pretrained` use `Quantizer`."""

    def __init__(self, **kwargs: Any) -> None:
        self.quant_method = IMPLEMENTATION  # type: ignore[assignment] # not one of theirs


@register_quantizer(IMPLEMENTATION)
class Quantizer(HfQuantizer):
    """Removes the experts' parameters before `from_pretrained` allocates them."""

    requires_calibration = False
    is_trainable = True  # of adapters: Trainer asks

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        for module, _ in moe_layers(model).values():
            remove_weights(module, module.down_proj.dtype)
            module._is_hf_initialized = True  # no missing weight may be initialized randomly


def refuse_saving(model: PreTrainedModel) -> None:
    """Makes `save_pretrained` raise, since it would omit the experts."""
    model.__dict__["hf_quantizer"] = Quantizer(Config())
