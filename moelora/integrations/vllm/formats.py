"""Convert the parameters of a quantized vLLM layer to moelora's weights.

Each function takes the quantization method of a layer, the layer, and "w13" or "w2". It reads the
parameters in the layout of the method's `create_weights`, as loaded, before
`process_weights_after_loading` repacks them for a kernel. `QuantizedWeights` raises ValueError for
unsupported weights, before the layer is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moelora.integrations.interface import Interface, interface
from moelora.weights import QuantizedWeights
from moelora.weights.readers import PerExpert

_QUANT = "vllm.model_executor.layers.quantization"
_COMPRESSED = f"{_QUANT}.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe"

Read = Callable[[Any, Any, str, dict[str, Any]], QuantizedWeights]


@dataclass(frozen=True)
class Format:
    """A quantization method of vLLM.

    about: of its checkpoints, in reports.
    needed: its class and the API of vLLM that the hooks of it use.
    read(method, layer, name, options): weights of one projection; options are the
        format-independent ones of `QuantizedWeights`.
    reason(method): why weights of this method are unsupported, as far as its configuration tells.
    interleaved: whether gate and up rows of w13 alternate.
    rounds: whether the method rounds up a layer's sizes for the kernels it selected.
    chooses: the function of the method's module that selects them, and raises if there are none.
    loaded_biases: whether biases exist even if the checkpoint has none.
    """

    about: str
    needed: Interface
    read: Read
    reason: Callable[[Any], str | None] = lambda method: None
    interleaved: bool = False
    rounds: bool = False
    chooses: str = ""
    loaded_biases: bool = False


def _method(module: str, name: str, init: str, selects: str = "") -> Interface:
    """`selects`: a function of the module that selects kernels."""
    functions = {f"{name}.__init__": init, f"{name}.process_weights_after_loading": "self layer"}
    return Interface(
        replaced={module: functions}, called={module: {selects: "config"}} if selects else {}
    )


def _get(layer: Any, name: str) -> Tensor:
    return getattr(layer, name).data


def _of(
    make: Callable[..., QuantizedWeights],
    tensors: str = "",
    settings: Callable[[Any], dict[str, Any]] = lambda method: {},
    **renamed: str,
) -> Read:
    """`make` of tensors by their names after "w13_" and "w2_", with settings of the method.

    `tensors` are called as the arguments of `make`, `renamed` otherwise.
    """
    names = {name: name for name in tensors.split()} | renamed

    def read(method: Any, layer: Any, name: str, options: dict[str, Any]) -> QuantizedWeights:
        parts = {key: _get(layer, f"{name}_{own}") for key, own in names.items()}
        return make(**parts, **settings(method), **options)

    return read


def apart(rows: Tensor) -> Tensor:
    """Rows of gate, then those of up, of (experts, rows, ...) where they alternate."""
    return torch.cat((rows[:, ::2], rows[:, 1::2]), 1)


def _gpt_oss(method: Any, layer: Any, name: str, options: dict[str, Any]) -> QuantizedWeights:
    """Loaded with alternating rows; `gate_up="concatenated"` puts them apart."""
    blocks, scales = _get(layer, f"{name}_weight"), _get(layer, f"{name}_weight_scale")
    if options["gate_up"] == "concatenated":
        blocks, scales = apart(blocks), apart(scales)
    return QuantizedWeights.from_mxfp4(blocks, scales, **options)


def _nvfp4_reason(method: Any) -> str | None:
    """Where vLLM has kernels of FP4 for activations, W4A16 would be another model."""
    backend = method.nvfp4_backend.name
    if method.use_a16 or backend in ("MARLIN", "HUMMING"):  # which take them in 16 bits
        return None
    return f"vLLM's {backend} kernels take activations in NVFP4"


def _gptq_reason(method: Any) -> str | None:
    config = method.quant_config
    if config.weight_bits != 4:
        return f"GPTQ weights are of {config.weight_bits} bits"
    if getattr(config, "desc_act", False):
        return "GPTQ weights are in the order of their activations (desc_act)"
    return None if config.is_sym else "GPTQ weights have zero points"


def _compressed(method: Any, layer: Any, name: str, options: dict[str, Any]) -> QuantizedWeights:
    def part(what: str) -> PerExpert:
        """Rows first, as in checkpoints: vLLM may have loaded the parameter transposed."""
        parameter = getattr(layer, f"{name}_weight_{what}")
        transposed = getattr(parameter, "is_transposed", False)
        return [expert.t() for expert in parameter.data] if transposed else parameter.data

    scales = [scale.contiguous() for scale in part("scale")]
    zeros = None if method.symmetric else part("zero_point")
    return QuantizedWeights.from_compressed_tensors(
        part("packed"), scales, zeros, group_size=method.group_size, **options
    )


def _compressed_reason(method: Any) -> str | None:
    if method.num_bits != 4:
        return f"compressed-tensors weights are of {method.num_bits} bits"
    if method.weight_quant.actorder == "group":
        return "compressed-tensors weights are in the order of their activations (actorder)"
    return None


def _fp8(
    method: Any, layer: Any, name: str, options: dict[str, Any], of_blocks: str = "weight_scale"
) -> QuantizedWeights:
    # Without FP8 arithmetic, vLLM's Marlin kernels keep activations unquantized.
    activations = "native" if "MARLIN" in method.fp8_backend.name else "fp8"
    weight, options = _get(layer, f"{name}_weight"), options | {"activations": activations}
    if method.block_quant:
        block = tuple(getattr(method, "moe_block_shape", method.weight_block_size))
        scales = _get(layer, f"{name}_{of_blocks}")
        return QuantizedWeights.from_fp8_block(weight, scales, block=block, **options)
    scales = _get(layer, f"{name}_weight_scale")
    if getattr(getattr(method, "weight_quant", None), "strategy", None) == "channel":
        return QuantizedWeights.from_fp8_channel(weight, scales, **options)
    inputs = getattr(layer, f"{name}_input_scale")
    return QuantizedWeights.from_fp8_tensor(weight, scales, inputs, **options)


_SCHEME = "self weight_quant input_quant moe layer_name"  # of compressed-tensors
FORMATS = {
    "gpt_oss": Format(
        "MXFP4 of gpt-oss",
        _method(f"{_QUANT}.mxfp4", "GptOssMxfp4MoEMethod", "self moe", "select_mxfp4_moe_backend"),
        _gpt_oss,
        interleaved=True,
        rounds=True,
        chooses="select_mxfp4_moe_backend",
    ),
    "mxfp4": Format(
        "MXFP4",
        interface(f"""
            {_QUANT}.mxfp4
                replaced Mxfp4MoEMethod.process_weights_after_loading self layer
                called Mxfp4MoEMethod.__init__ self moe
                called select_deepseek_v4_mxfp4_moe_backend config
        """),
        _of(QuantizedWeights.from_mxfp4, blocks="weight", scales="weight_scale"),
        rounds=True,
        chooses="select_deepseek_v4_mxfp4_moe_backend",
    ),
    "mxfp4_compressed_tensors": Format(
        "MXFP4, compressed-tensors",
        _method(f"{_COMPRESSED}_w4a4_mxfp4", "CompressedTensorsW4A4Mxfp4MoEMethod", "self moe"),
        _of(QuantizedWeights.from_mxfp4, blocks="weight_packed", scales="weight_scale"),
        lambda method: (
            "vLLM's kernels take activations in MXFP4" if method.use_cutlass_mxfp4 else None
        ),
    ),
    "nvfp4_modelopt": Format(
        "NVFP4 with 16-bit activations, ModelOpt",
        _method(f"{_QUANT}.modelopt", "ModelOptNvFp4FusedMoE", "self quant_config moe_config"),
        _of(QuantizedWeights.from_nvfp4, "weight weight_scale weight_scale_2"),
        _nvfp4_reason,
    ),
    "nvfp4_compressed_tensors": Format(
        "NVFP4 with 16-bit activations, compressed-tensors",
        _method(
            f"{_COMPRESSED}_w4a4_nvfp4",
            "CompressedTensorsW4A4Nvfp4MoEMethod",
            "self moe layer_name use_a16",
        ),
        _of(
            QuantizedWeights.from_nvfp4, "weight_scale weight_global_scale", weight="weight_packed"
        ),
        _nvfp4_reason,
    ),
    "gptq": Format(
        "INT4, GPTQ",
        _method(f"{_QUANT}.auto_gptq", "AutoGPTQMoEMethod", "self quant_config moe"),
        _of(
            QuantizedWeights.from_gptq,
            "qweight scales",
            lambda method: {"group_size": method.quant_config.group_size, "sym": True},
        ),
        _gptq_reason,
        loaded_biases=True,
    ),
    "awq": Format(
        "INT4, AWQ",
        _method(f"{_QUANT}.auto_awq", "AutoAWQMoEMethod", "self quant_config moe"),
        _of(
            QuantizedWeights.from_awq,
            "qweight scales qzeros",
            lambda method: {"group_size": method.quant_config.group_size},
        ),
        lambda method: (
            None if method.quant_config.zero_point else "AWQ weights have no zero points"
        ),
    ),
    "compressed_tensors": Format(
        "INT4, compressed-tensors",
        _method(f"{_COMPRESSED}_wna16", "CompressedTensorsWNA16MoEMethod", _SCHEME),
        _compressed,
        _compressed_reason,
    ),
    "compressed_tensors_marlin": Format(
        "INT4, compressed-tensors with Marlin",
        _method(f"{_COMPRESSED}_wna16_marlin", "CompressedTensorsWNA16MarlinMoEMethod", _SCHEME),
        _compressed,
        _compressed_reason,
    ),
    "fp8": Format(
        "FP8",
        _method(f"{_QUANT}.fp8", "Fp8MoEMethod", "self quant_config layer"),
        partial(_fp8, of_blocks="weight_scale_inv"),
    ),
    "fp8_compressed_tensors": Format(
        "FP8, compressed-tensors",
        _method(f"{_COMPRESSED}_w8a8_fp8", "CompressedTensorsW8A8Fp8MoEMethod", _SCHEME),
        _fp8,
    ),
}


def biases(format: Format, layer: Any, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Biases of w13 and w2, if the checkpoint has them."""
    loaded = getattr(layer, "_loaded_expert_biases", None) if format.loaded_biases else None

    def one(name: str) -> Tensor | None:
        bias = getattr(layer, name, None)
        if bias is None or (loaded is not None and name not in loaded):
            return None
        return bias.data.to(dtype)

    return one("w13_bias"), one("w2_bias")
