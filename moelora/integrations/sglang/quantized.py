"""Quantized layers of SGLang's `triton_v2` LoRA backend, into moelora's tiles.

SGLang keeps block-scaled FP8 weights as loaded, and 4-bit weights in Marlin's layout, which
`marlin` converts back to rows. Its own runner of adapters reads FP8 of blocks and NVFP4 of
ModelOpt. Layers of GPTQ and AWQ refuse the `lora_*` runners themselves, when they are made, and
those of MXFP4 have clamped activations or biases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moelora.integrations.sglang import marlin
from moelora.operators.fake import COMPUTE_DTYPES
from moelora.weights.quantized import QuantizedWeights
from moelora.weights.readers import GateUp

PLAIN = (torch.bfloat16, torch.float16, torch.float32)


class Kind(NamedTuple):
    """How a layer stores one format.

    about: the format, in reports.
    holds(layer): whether a layer has it.
    read(layer, name, gate_up): `name` is "w13" or "w2".
    reason(layer): why weights of this kind are not read, or None.
    weight: parameter that the tiles replace, without its prefix "w13_" or "w2_".
    others: parameters that are unused after that.
    """

    about: str
    holds: Callable[[Any], bool]
    read: Callable[[Any, str, GateUp | None], QuantizedWeights]
    reason: Callable[[Any], str | None]
    weight: str = "weight"
    others: tuple[str, ...] = ()


def _fp8(layer: Any, name: str, gate_up: GateUp | None) -> QuantizedWeights:
    """Activations become FP8 with a scale for every group of columns, as in SGLang."""
    rows, columns = layer.quant_method.weight_block_size
    return QuantizedWeights.from_fp8_block(
        getattr(layer, f"{name}_weight").data,
        getattr(layer, f"{name}_weight_scale_inv").data,
        block=(rows, columns),
        gate_up=gate_up,
        dtype=layer.params_dtype,
    )


def _fp8_reason(layer: Any) -> str | None:
    scales = layer.w13_weight_scale_inv, layer.w2_weight_scale_inv
    if any(scale.dtype != torch.float32 for scale in scales):
        return f"its scales are {scales[0].dtype} and {scales[1].dtype}"
    return _dtype_reason(layer.params_dtype)


def _dtype_reason(dtype: torch.dtype) -> str | None:
    return None if dtype in COMPUTE_DTYPES else f"its activations are {dtype}"


def _int4(layer: Any, name: str, gate_up: GateUp | None) -> QuantizedWeights:
    words = getattr(layer, f"{name}_weight_packed").data
    scales = getattr(layer, f"{name}_weight_scale").data
    single = layer.scheme.group_size == -1
    return QuantizedWeights.from_compressed_tensors(
        [marlin.values(expert).view(torch.int32) for expert in words],
        [marlin.scales(expert, single) for expert in scales],
        gate_up=gate_up,
        dtype=scales.dtype,
    )


def _int4_reason(layer: Any) -> str | None:
    scheme, scales = layer.scheme, (layer.w13_weight_scale, layer.w2_weight_scale)
    if scheme.num_bits != 4:
        return f"its weights are of {scheme.num_bits} bits"
    if not scheme.sym:
        return "its weights have zero points"
    if layer.w13_weight_g_idx.numel() or layer.w2_weight_g_idx.numel():
        return "its weights are in the order of their activations (actorder)"
    if scheme.group_size != -1 and any(scale.size(1) < 2 for scale in scales):
        return "its weights have one group of columns, whose scales Marlin may have in two orders"
    return _dtype_reason(scales[0].dtype)


def _nvfp4(layer: Any, name: str, gate_up: GateUp | None) -> QuantizedWeights:
    """Same values as in Marlin: one 16-bit tensor scale, that of gate, for both gate and up.

    Inverts `nvfp4_marlin_process_scales` of SGLang.
    """
    inter = layer.intermediate_size_per_partition
    rows, columns = layer.hidden_size, inter
    if name == "w13":
        rows, columns = inter * (2 if gate_up else 1), layer.hidden_size
    words, scales = (getattr(layer, f"{name}_{own}").data for own in ("weight", "weight_scale"))
    return QuantizedWeights.from_nvfp4(  # drop padding of ungated weights
        [marlin.values(expert)[:rows, : columns // 2].contiguous() for expert in words],
        [marlin.e4m3_scales(expert)[:rows, : columns // 16].contiguous() for expert in scales],
        weight_scale_2=marlin.tensor_scale(getattr(layer, f"{name}_weight_scale_2").data.flatten()),
        gate_up=gate_up,
        dtype=layer.params_dtype,
    )


def _is_fp8(layer: Any) -> bool:
    method = getattr(layer, "quant_method", None)
    is_block = getattr(method, "block_quant", False) and not getattr(method, "use_mxfp8", False)
    return bool(is_block) and _dtype(layer) == torch.float8_e4m3fn


def _dtype(layer: Any) -> torch.dtype | None:
    weight = getattr(layer, "w13_weight", None)
    return None if weight is None else weight.dtype


KINDS = (
    Kind("FP8", _is_fp8, _fp8, _fp8_reason),
    Kind(
        "NVFP4",
        lambda layer: _dtype(layer) == torch.int32 and hasattr(layer, "w13_weight_scale_2"),
        _nvfp4,
        lambda layer: _dtype_reason(layer.params_dtype),
        others=("weight_scale",),
    ),
    Kind(
        "INT4",
        lambda layer: _dtype(layer) is None and getattr(layer, "is_marlin_converted", False),
        _int4,
        _int4_reason,
        "weight_packed",
        ("weight_scale",),
    ),
)


def kind_of(base_layer: Any) -> Kind | None:
    """Kind of a layer's quantized weights; None if they have 16 or 32 bits. Raises
    NotImplementedError if the kind is not supported.
    """
    dtype: Any = _dtype(base_layer)
    if dtype in PLAIN:
        return None
    for kind in KINDS:
        if kind.holds(base_layer):
            return kind
    if dtype is None:
        names = [n for n in vars(base_layer).get("_parameters", ()) if n.startswith("w13_")]
        dtype = ", ".join(names) or "unknown"
    method = type(getattr(base_layer, "quant_method", None)).__name__
    raise NotImplementedError(f"its weights are {dtype}, of {method}")


def device_of(base_layer: Any) -> torch.device:
    weight = getattr(base_layer, "w13_weight", None)
    if weight is None:
        weight = getattr(base_layer, "w13_weight_packed", None)
    return torch.device("cpu") if weight is None else weight.device


def reason_against_weights(base_layer: Any) -> str | None:
    """Why moelora cannot read the weights of SGLang's `FusedMoE` layer, or None."""
    try:
        kind = kind_of(base_layer)
    except NotImplementedError as refusal:
        return str(refusal)
    if kind is not None:
        return kind.reason(base_layer)
    weight = base_layer.w13_weight
    if weight.device.type == "cuda" and weight.dtype not in COMPUTE_DTYPES:
        return f"its weights are {weight.dtype}, for which there are only kernels on CPUs"
    return None


class Tiles:
    """Packed weights of a quantized layer, which replace SGLang's tensors.

    Adapters read the unquantized activations.

    Raises
    ------
    ValueError
        The tensors are not what the format requires; the layer is unchanged.
    """

    def __init__(self, base_layer: Any, kind: Kind) -> None:
        of_rows: GateUp | None = None
        if base_layer.moe_runner_config.is_gated:
            of_rows = "concatenated"
        packed = [
            kind.read(base_layer, name, of_row) for name, of_row in (("w13", of_rows), ("w2", None))
        ]
        for name, weights in zip(("w13", "w2"), packed, strict=True):
            tiles = nn.Parameter(weights.data, requires_grad=False)
            setattr(base_layer, f"{name}_{kind.weight}", tiles)
            for other in kind.others:
                old: Tensor = getattr(base_layer, f"{name}_{other}")
                empty = nn.Parameter(old.data.new_empty(0), requires_grad=False)
                setattr(base_layer, f"{name}_{other}", empty)
        self._base_layer, self._weight = base_layer, kind.weight
        # The layer's parameters hold the tiles, and may be moved or replaced.
        self._packed = [replace(weights, data=torch.empty(0)) for weights in packed]

    def weights(self) -> tuple[QuantizedWeights, QuantizedWeights]:
        w13, w2 = self._packed
        held = (getattr(self._base_layer, f"{name}_{self._weight}").data for name in ("w13", "w2"))
        return replace(w13, data=next(held)), replace(w2, data=next(held))
