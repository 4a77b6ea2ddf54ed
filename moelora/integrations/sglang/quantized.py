"""FP8 layers of SGLang's `triton_v2` LoRA backend, from its loader's tensors into moelora's tiles.

SGLang's own runner reads FP8 with scales for blocks and NVFP4 of ModelOpt, and refuses other
schemes when a layer is made: INT4 and MXFP4 are in the order of other kernels by then.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from moelora.fake import COMPUTE_DTYPES
from moelora.quantized import QuantizedWeights
from moelora.quantized_fp8 import GateUp

PLAIN = (torch.bfloat16, torch.float16, torch.float32)


def reason_against_weights(base_layer: Any) -> str | None:
    """Why moelora cannot read the weights of SGLang's `FusedMoE` layer, or None."""
    dtype = base_layer.w13_weight.dtype
    if dtype in PLAIN:
        return None
    method = getattr(base_layer, "quant_method", None)
    is_block = getattr(method, "block_quant", False) and not getattr(method, "use_mxfp8", False)
    if dtype != torch.float8_e4m3fn or not is_block:
        return f"its weights are {dtype}, of {type(method).__name__}"
    scales = base_layer.w13_weight_scale_inv, base_layer.w2_weight_scale_inv
    if any(scale.dtype != torch.float32 for scale in scales):
        return f"its scales are {scales[0].dtype} and {scales[1].dtype}"
    if base_layer.params_dtype not in COMPUTE_DTYPES:
        return f"its activations are {base_layer.params_dtype}"
    return None


class Tiles:
    """The weights of an FP8 layer, packed; they take the place of the loader's tensors.

    Activations become FP8 with a scale for every group of columns, as in SGLang; adapters take
    them as they are.

    Raises
    ------
    ValueError
        The format has not what the layer holds, which it keeps then.
    """

    def __init__(self, base_layer: Any) -> None:
        of_rows: GateUp | None = None
        if base_layer.moe_runner_config.is_gated:
            of_rows = "concatenated"
        rows, columns = base_layer.quant_method.weight_block_size
        packed = []
        for name, gate_up in (("w13", of_rows), ("w2", None)):
            packed.append(
                QuantizedWeights.from_fp8_block(
                    getattr(base_layer, f"{name}_weight").data,
                    getattr(base_layer, f"{name}_weight_scale_inv").data,
                    block=(rows, columns),
                    gate_up=gate_up,
                    dtype=base_layer.params_dtype,
                )
            )
        for name, weights in zip(("w13", "w2"), packed, strict=True):
            tiles = nn.Parameter(weights.data, requires_grad=False)
            setattr(base_layer, f"{name}_weight", tiles)
        self._base_layer = base_layer
        # The layer's parameters hold the tiles, and may be moved or replaced.
        self._packed = [replace(weights, data=torch.empty(0)) for weights in packed]

    def weights(self) -> tuple[QuantizedWeights, QuantizedWeights]:
        w13, w2 = self._packed
        layer = self._base_layer
        return replace(w13, data=layer.w13_weight.data), replace(w2, data=layer.w2_weight.data)
