"""Schemes of FP8, MXFP4 and NVFP4: `quant_method` "fp8" and "modelopt"."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from moelora.integrations.transformers import dense
from moelora.integrations.transformers.scheme import (
    KEPT,
    Scheme,
    block_size,
    check_values,
    settings_in,
)
from moelora.weights import QuantizedWeights


def fp8(config: Mapping[str, Any]) -> Scheme:
    """`quant_method` "fp8", and experts that transformers has loaded in it."""
    sides = config.get("weight_block_size")
    check_values("fp8", config, fmt=("e4m3",), activation_scheme=("dynamic", "static"))
    if not sides:
        return fp8_tensor(config.get("activation_scheme") == "static")
    return fp8_blocks(sides, "weight_scale_inv")


def fp8_blocks(sides: Any, scales: str, dequantize: Callable[..., Tensor] = dense.fp8) -> Scheme:
    """The scheme of FP8 blocks of these sizes; `scales` is the name of their tensor of scales."""
    block = {"block": block_size(sides)}
    make = QuantizedWeights.from_fp8_block
    scheme = Scheme("FP8 of blocks", ("weight", scales), (), dequantize, block, make, block)
    return scheme._replace(renamed={scales: "weight_scale_inv"})


def of_fp8(config: Mapping[str, Any], linear: str, parts: Collection[str]) -> Scheme:
    if "scale" in parts:
        return _deepseek_v4(config, linear)
    if "weight_scale_inv" in parts and not config.get("weight_block_size"):
        raise ValueError(f"there is no weight_block_size, which {linear}.weight_scale_inv wants")
    return fp8(config)


def _deepseek_v4(config: Mapping[str, Any], linear: str) -> Scheme:
    """`weight` and `scale`: FP8 blocks, or MXFP4 for experts, depending on `expert_dtype`."""
    expert_dtype = config.get("expert_dtype", "fp8")
    check_values("fp8", {"expert_dtype": expert_dtype}, expert_dtype=("fp8", "fp4"))
    if expert_dtype == "fp4" and OF_EXPERTS.search(linear):
        tensors = ("weight", "scale"), ()
        return Scheme("MXFP4 of DeepSeek", *tensors, _dequantize_fp4, {}, _fp4_experts)
    return fp8_blocks(config.get("weight_block_size"), "scale", _dequantize_fp8)


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
    if isinstance(algorithm, str) and algorithm in ALGORITHMS:
        return ALGORITHMS[algorithm](algorithm, "input_scale" in parts)
    known = ", ".join(map(repr, ALGORITHMS))
    raise NotImplementedError(
        f"modelopt: quant_algo of {linear} is {algorithm!r:.80}, wanted {known} or "
        "'MIXED_PRECISION' of these; quantize the experts with one of these, or to "
        f"{KEPT} with another tool"
    )


def mxfp8(method: str) -> Scheme:
    refusal = "no kernel reads FP8 with scales for 32 columns"
    tensors = ("weight", "weight_scale"), ()
    return Scheme(f"MXFP8 of {method}", *tensors, dense.mxfp8, {}, refusal=refusal)


# NVFP4 is W4A16 here: scales of activations are unused, and some experts may lack them.


def _nvfp4_scheme_of_modelopt(algorithm: str, has_inputs: bool) -> Scheme:
    tensors = ("weight", "weight_scale", "weight_scale_2"), ()
    make = QuantizedWeights.from_nvfp4
    scheme = Scheme("NVFP4 of ModelOpt", *tensors, _nvfp4_of_modelopt, {}, make)
    is_w4a4 = algorithm == "NVFP4" and has_inputs
    return scheme._replace(inputs="NVFP4" if is_w4a4 else "", unused=("input_scale",))


def tensor_group(method: str, has_inputs: bool) -> Scheme:
    """compressed-tensors' strategy of four-bit floats with scales of groups and of the tensor."""
    tensors = ("weight_packed", "weight_scale", "weight_global_scale"), ()
    make = QuantizedWeights.from_nvfp4
    scheme = Scheme(f"NVFP4 of {method}", *tensors, _nvfp4_of_compressed, {}, make)
    scheme = scheme._replace(renamed={"weight_packed": "weight"}, unused=("input_global_scale",))
    return scheme._replace(inputs="NVFP4" if has_inputs else "")


def _nvfp4_of_compressed(
    weight_packed: Tensor, weight_scale: Tensor, weight_global_scale: Tensor
) -> Tensor:
    """e2m1 (N, K / 2) times an e4m3 scale for 16 columns over the tensor's (compressed-tensors)."""
    _tensor_scale("weight_global_scale", weight_global_scale, 1 / weight_global_scale.float())
    return _nvfp4(dense.e2m1(weight_packed), weight_scale, 1 / weight_global_scale)


def _nvfp4_of_modelopt(weight: Tensor, weight_scale: Tensor, weight_scale_2: Tensor) -> Tensor:
    """As `_nvfp4_of_compressed`, as ModelOpt names it, whose tensor's scale multiplies."""
    _tensor_scale("weight_scale_2", weight_scale_2, weight_scale_2)
    return _nvfp4(dense.e2m1(weight, "weight"), weight_scale, weight_scale_2)


def _tensor_scale(name: str, stored: Tensor, factor: Tensor) -> None:
    """Refuses what `QuantizedWeights.from_nvfp4` refuses of the scale of a tensor."""
    if stored.numel() != 1 or stored.dtype != torch.float32:
        got = f"has shape {tuple(stored.shape)} and dtype {stored.dtype}"
        raise ValueError(f"{name} {got}, wanted one number of torch.float32")
    if not (0 < float(stored) < math.inf and float(factor) < math.inf):
        also = "" if factor is stored else " with a finite reciprocal"
        raise ValueError(f"{name} is {float(stored):g}, wanted a finite number above 0{also}")


def _nvfp4(numbers: Tensor, scales: Tensor, of_tensor: Tensor) -> Tensor:
    """In the order of `QuantizedWeights.unpack`: e2m1 times e4m3, exact, then the tensor's."""
    dense.matrix("weight_scale", scales, torch.float8_e4m3fn, torch.uint8)
    bits = scales.view(torch.uint8)
    if (bits >= 0x7F).any():
        largest = int(bits.max())
        what = "NaN" if largest & 0x7F == 0x7F else "negative"
        raise ValueError(f"weight_scale has the e4m3 byte {largest}, {what}, wanted 0 to 448")
    factors = scales.view(torch.float8_e4m3fn).float()
    return numbers * dense.spread(factors, numbers.shape) * of_tensor.reshape(1, 1)


ALGORITHMS: dict[str, Callable[[str, bool], Scheme]] = {  # of ModelOpt
    "FP8": lambda algorithm, has_inputs: fp8_tensor(has_inputs),
    "NVFP4": _nvfp4_scheme_of_modelopt,
    "W4A16_NVFP4": _nvfp4_scheme_of_modelopt,
    "MXFP8": lambda algorithm, has_inputs: mxfp8("ModelOpt"),
}
