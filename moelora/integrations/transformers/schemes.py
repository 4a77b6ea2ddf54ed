"""Quantisation methods: what tensors each has for an expert, and who packs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from moelora import QuantizedWeights
from moelora.quantized_fp8 import Activations, GateUp


class Scheme(NamedTuple):
    """How a quantisation method stores experts, each in tensors of its own."""

    make: Callable[..., QuantizedWeights]
    required: tuple[str, ...]
    optional: tuple[str, ...]
    rows: int  # the dimension along which gate and up follow each other
    options: dict[str, Any]

    def taking(self, activations: Activations | None) -> Scheme:
        """The same with these activations; ValueError if weights are not FP8. None: as it says."""
        if activations is None:
            return self
        if "weight" not in self.required:
            raise ValueError(
                f"activations is {activations!r}, wanted None: the weights are not FP8"
            )
        return self._replace(options=self.options | {"activations": activations})

    def pack(
        self, where: str, found: Mapping[str, Any], gate_up: GateUp | None, dtype: torch.dtype
    ) -> QuantizedWeights:
        """`found` has a tensor, or one for each expert, for every name of `required`."""
        try:
            return self.make(**found, **self.options, gate_up=gate_up, dtype=dtype)
        except (ValueError, TypeError) as error:  # TypeError: of a setting
            raise ValueError(f"{where}: {error}") from None


def _wanted(method: str, settings: Mapping[str, Any], **allowed: tuple[Any, ...]) -> None:
    for key, values in allowed.items():
        got = settings.get(key, values[0])
        if got not in values:
            known = " or ".join(map(repr, values))
            raise NotImplementedError(f"{method}: {key} is {got!r:.80}, wanted {known}")


def _group(settings: Any, key: str) -> Mapping[str, Any]:
    """Settings within settings; empty where there are none."""
    value = settings.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{key} is {value!r:.80}, wanted an object")
    return value or {}


def _groups(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = _group(config, "config_groups")
    return [_group(groups, name) for name in groups]


def block_size(sides: Any) -> tuple[int, int]:
    """`weight_block_size` and its like: rows and columns of a block."""
    if isinstance(sides, list | tuple) and len(sides) == 2:
        rows, columns = sides
        if all(type(side) is int and 0 < side < 2**31 for side in sides):
            return rows, columns
    raise ValueError(f"weight_block_size is {sides!r:.80}, wanted two sizes: rows and columns")


def _gptq(config: Mapping[str, Any]) -> Scheme:
    options = {
        "bits": config.get("bits", 4),
        "group_size": config.get("group_size"),
        "sym": config.get("sym"),
        "checkpoint_format": config.get("checkpoint_format") or "gptq",
    }
    parts = ("qweight", "scales"), ("qzeros", "g_idx")
    return Scheme(QuantizedWeights.from_gptq, *parts, 1, options)


def _awq(config: Mapping[str, Any]) -> Scheme:
    _wanted("awq", config, bits=(4,), version=("gemm", "GEMM"), zero_point=(True,))
    options = {"group_size": config.get("group_size")}
    parts = ("qweight", "scales", "qzeros"), ()
    return Scheme(QuantizedWeights.from_awq, *parts, 1, options)


def _fp8(config: Mapping[str, Any]) -> Scheme:
    block = config.get("weight_block_size")
    _wanted("fp8", config, fmt=("e4m3",), activation_scheme=("dynamic", "static"))
    if block:
        parts = ("weight", "weight_scale_inv"), ()
        return Scheme(QuantizedWeights.from_fp8_block, *parts, 0, {"block": block_size(block)})
    return _fp8_tensor(config.get("activation_scheme") == "static")


def _fp8_tensor(is_static: bool) -> Scheme:
    parts = ["weight", "weight_scale"] + ["input_scale"] * is_static
    optional = () if is_static else ("input_scale",)
    return Scheme(QuantizedWeights.from_fp8_tensor, tuple(parts), optional, 0, {})


def _float_quantized(config: Mapping[str, Any]) -> Scheme:
    """compressed-tensors of FP8: experts are of the one group that there is."""
    groups = _groups(config)
    if len(groups) != 1:
        raise NotImplementedError(f"compressed-tensors: {len(groups)} config_groups, wanted one")
    weights, inputs = (_group(groups[0], key) for key in ("weights", "input_activations"))
    _wanted("compressed-tensors", weights, num_bits=(8,), type=("float",))
    strategy = weights.get("strategy", "tensor")
    _wanted("compressed-tensors", {"strategy": strategy}, strategy=("channel", "tensor", "block"))
    if inputs:
        _wanted("compressed-tensors", inputs, num_bits=(8,), type=("float",))
    if strategy == "tensor":
        scheme = _fp8_tensor(bool(inputs) and not inputs.get("dynamic", False))
    else:
        scheme = Scheme(QuantizedWeights.from_fp8_channel, ("weight", "weight_scale"), (), 0, {})
    if strategy == "block":
        options = {"block": block_size(weights.get("block_structure") or (128, 128))}
        scheme = scheme._replace(make=_blocks, options=options)
    return scheme if inputs else scheme._replace(options=scheme.options | {"activations": "native"})


def _blocks(weight: Any, weight_scale: Any, **options: Any) -> QuantizedWeights:
    return QuantizedWeights.from_fp8_block(weight, weight_scale, **options)


def _compressed_tensors(config: Mapping[str, Any]) -> Scheme:
    _wanted("compressed-tensors", config, format=("pack-quantized", "float-quantized"))
    if config.get("format") == "float-quantized":
        return _float_quantized(config)
    sizes, required = [], ["weight_packed", "weight_scale"]
    for group in _groups(config):
        if group.get("input_activations") is not None:
            raise NotImplementedError(
                "compressed-tensors: input_activations are quantised, wanted weights alone"
            )
        weights = _group(group, "weights")
        _wanted("compressed-tensors", weights, num_bits=(4,), type=("int",))
        sizes.append(-1 if weights.get("strategy") == "channel" else weights.get("group_size"))
        if not weights.get("symmetric", True):
            required.append("weight_zero_point")
    # Of several groups, which one experts belong to is left to their scales.
    alike = all(size == sizes[0] for size in sizes)
    options = {"group_size": sizes[0] if sizes and alike else None}
    parts = tuple(required), ("weight_zero_point", "weight_shape")
    return Scheme(QuantizedWeights.from_compressed_tensors, *parts, 0, options)


SCHEMES = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed_tensors, "fp8": _fp8}
