"""Schemes of FP8, MXFP4 and NVFP4: `quant_method` "fp8" and "modelopt"."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from moelora import QuantizedWeights
from moelora.integrations.transformers import dense
from moelora.integrations.transformers.scheme import (
    KEPT,
    Scheme,
    block_size,
    check_values,
    settings_in,
)


def fp8(config: Mapping[str, Any]) -> Scheme:
    """`quant_method` "fp8", and experts that transformers has loaded in it."""
    sides = config.get("weight_block_size")
    check_values("fp8", config, fmt=("e4m3",), activation_scheme=("dynamic", "static"))
    if not sides:
        return fp8_tensor(config.get("activation_scheme") == "static")
    tensors = ("weight", "weight_scale_inv"), ()
    block = {"block": block_size(sides)}
    make = QuantizedWeights.from_fp8_block
    return Scheme("FP8 of blocks", *tensors, dense.fp8, block, make, block)


def of_fp8(config: Mapping[str, Any], linear: str, parts: Collection[str]) -> Scheme:
    if "scale" in parts:
        return _deepseek_v4(config, linear)
    if "weight_scale_inv" in parts and not config.get("weight_block_size"):
        raise ValueError(f"there is no weight_block_size, which {linear}.weight_scale_inv wants")
    return fp8(config)


def _deepseek_v4(config: Mapping[str, Any], linear: str) -> Scheme:
    """`weight` and `scale`: FP8 blocks, or MXFP4 for experts, depending on `expert_dtype`."""
    tensors = ("weight", "scale"), ()
    expert_dtype = config.get("expert_dtype", "fp8")
    check_values("fp8", {"expert_dtype": expert_dtype}, expert_dtype=("fp8", "fp4"))
    if expert_dtype == "fp4" and OF_EXPERTS.search(linear):
        return Scheme("MXFP4 of DeepSeek", *tensors, _dequantize_fp4, {}, _fp4_experts)
    block = {"block": block_size(config.get("weight_block_size"))}
    return Scheme("FP8 of blocks", *tensors, _dequantize_fp8, block, _fp8_experts, block)


OF_EXPERTS = re.compile(r"\.experts\.\d+\.")


def _dequantize_fp4(weight: Tensor, scale: Tensor) -> Tensor:
    return dense.mxfp4(_as_bytes(weight), scale)


def _fp4_experts(weight: Any, scale: Any, **options: Any) -> QuantizedWeights:
    return QuantizedWeights.from_mxfp4([_as_bytes(one) for one in weight], scale, **options)


def _as_bytes(weight: Tensor) -> Tensor:
    """Two e2m1 per byte, stored as int8 by DeepSeek."""
    return weight.view(torch.uint8) if weight.dtype == torch.int8 else weight


def _dequantize_fp8(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    return dense.fp8(weight, weight_scale_inv=scale, block=block)


def _fp8_experts(weight: Any, scale: Any, **options: Any) -> QuantizedWeights:
    return QuantizedWeights.from_fp8_block(weight, scale, **options)


def fp8_tensor(is_static: bool) -> Scheme:
    required = ["weight", "weight_scale"] + ["input_scale"] * is_static
    optional = () if is_static else ("input_scale",)
    make = QuantizedWeights.from_fp8_tensor
    return Scheme("FP8 of tensors", tuple(required), optional, dense.fp8, {}, make)


def modelopt(config: Mapping[str, Any], linear: str, parts: Collection[str]) -> Scheme:
    """By `quant_algo`; with MIXED_PRECISION by the layer's own, otherwise by its tensors."""
    inner = settings_in(config, "quantization")  # of hf_quant_config.json
    algorithm = config.get("quant_algo") or inner.get("quant_algo")
    if algorithm == "MIXED_PRECISION":
        layers = settings_in(inner or config, "quantized_layers")
        algorithm = settings_in(layers, linear).get("quant_algo")
        if algorithm is None:
            algorithm = "NVFP4" if "weight_scale_2" in parts else "FP8"
    if algorithm == "FP8":
        return fp8_tensor("input_scale" in parts)
    if algorithm in ("NVFP4", "W4A16_NVFP4"):
        tensors = ("weight", "weight_scale", "weight_scale_2"), ("input_scale",)
        is_w4a4 = algorithm == "NVFP4" and "input_scale" in parts
        return nvfp4("ModelOpt", *tensors, dense.modelopt_nvfp4, is_w4a4)
    if algorithm == "MXFP8":
        return mxfp8("ModelOpt")
    known = "'FP8', 'NVFP4', 'W4A16_NVFP4', 'MXFP8' or 'MIXED_PRECISION' of these"
    raise NotImplementedError(
        f"modelopt: quant_algo of {linear} is {algorithm!r:.80}, wanted {known}; quantize the "
        f"experts with one of these, or to {KEPT} with another tool"
    )


def mxfp8(method: str) -> Scheme:
    refusal = "no kernel reads FP8 with scales for 32 columns"
    tensors = ("weight", "weight_scale"), ()
    return Scheme(f"MXFP8 of {method}", *tensors, dense.mxfp8, {}, refusal=refusal)


def nvfp4(
    method: str,
    required: tuple[str, ...],
    unused: tuple[str, ...],
    dequantize_weight: Callable[..., Tensor],
    is_w4a4: bool,
) -> Scheme:
    """W4A16: scales of activations are unused, and some experts may lack them."""
    scheme = Scheme(f"NVFP4 of {method}", required, (), dequantize_weight, {}, _nvfp4_experts)
    return scheme._replace(inputs="NVFP4" if is_w4a4 else "", unused=unused)


def _nvfp4_experts(
    weight: Any = None, weight_packed: Any = None, **scales: Any
) -> QuantizedWeights:
    """Accepts the tensor names of ModelOpt (`weight`) and compressed-tensors (`weight_packed`)."""
    return QuantizedWeights.from_nvfp4(weight_packed if weight is None else weight, **scales)
