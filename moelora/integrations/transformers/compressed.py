"""Schemes of compressed-tensors, which llm-compressor and others write."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from moelora.adapters.names import is_called
from moelora.integrations.transformers import dense, floats
from moelora.integrations.transformers.scheme import (
    KEPT,
    OUT_OF_ORDER,
    Scheme,
    check_values,
    group_columns,
    matches,
    settings_in,
)
from moelora.weights import QuantizedWeights


def compressed_tensors(config: Mapping[str, Any], linear: str, parts: Collection[str]) -> Scheme:
    group = _config_group(config, linear, parts)
    weights, inputs = (settings_in(group, key) for key in ("weights", "input_activations"))
    bits, kind = weights.get("num_bits", 8), weights.get("type", "int")
    strategy, size = weights.get("strategy"), group_columns(weights)
    strategy = strategy or ("group" if size else "tensor")
    group_size = -1 if strategy in ("channel", "tensor") else size
    name = "compressed-tensors"
    if kind == "int":
        return _integers(name, bits, weights, inputs, group_size, parts)
    if kind == "float" and bits == 8:
        if size == 32:
            return floats.mxfp8(name)
        return _float_quantized(weights, inputs, strategy)
    if kind == "float" and bits == 4 and strategy == "tensor_group":
        return floats.tensor_group(name, bool(inputs))
    if kind == "float" and bits == 4 and size == 32:
        tensors = ("weight_packed", "weight_scale"), ()
        taken = f"{inputs.get('num_bits', 4)} bits" if inputs else ""
        scheme = Scheme(f"MXFP4 of {name}", *tensors, dense.mxfp4, {}, QuantizedWeights.from_mxfp4)
        renamed = {"weight_packed": "blocks", "weight_scale": "scales"}
        return scheme._replace(renamed=renamed, inputs=taken)
    raise NotImplementedError(
        f"{name}: {linear} has {kind} weights of {bits} bits, strategy {strategy!r:.80}, "
        f"group_size {size}, wanted {KEPT}"
    )


def _config_group(
    config: Mapping[str, Any], linear: str, parts: Collection[str]
) -> Mapping[str, Any]:
    """The group of a linear layer: by its tensors, and by name if several groups match."""
    groups = settings_in(config, "config_groups")
    found = {name: settings_in(groups, name) for name in groups}
    found = {name: g for name, g in found.items() if g.get("weights") is not None}
    if not found:
        raise NotImplementedError("compressed-tensors: there are no config_groups, wanted one")
    is_packed = "weight_packed" in parts
    like = {name: g for name, g in found.items() if _is_packed(config, g) == is_packed}
    if len(like) == 1:
        return next(iter(like.values()))
    targets = {name: g.get("targets") for name, g in like.items()}
    targets = {name: own for name, own in targets.items() if isinstance(own, list)}
    for name, own in targets.items():
        if any(isinstance(target, str) and _targets(target, linear) for target in own):
            return like[name]
    for name, own in targets.items():
        if "Linear" in own:
            return like[name]
    formats = {name: group.get("format", config.get("format")) for name, group in found.items()}
    raise NotImplementedError(
        f"compressed-tensors: {linear} has {', '.join(sorted(parts))}, which none of config_groups "
        f"has: {formats!r:.300}"
    )


def _targets(target: str, linear: str) -> bool:
    return matches(target[3:], linear) if target.startswith("re:") else is_called(linear, target)


def _is_packed(config: Mapping[str, Any], group: Mapping[str, Any]) -> bool:
    """Whether layers of a group have `weight_packed`, by the group's format or else the
    checkpoint's."""
    form = group.get("format") or config.get("format")
    if form == "mixed-precision" or form is None:
        weights, inputs = (settings_in(group, key) for key in ("weights", "input_activations"))
        is_int = weights.get("type", "int") == "int"
        return weights.get("num_bits") == 4 or (is_int and not inputs)
    is_packed = str(form).endswith(PACKED)
    if not is_packed and form not in UNPACKED:
        known = " or ".join(map(repr, (PACKED, *UNPACKED)))
        raise NotImplementedError(f"compressed-tensors: format is {form!r:.80}, wanted {known}")
    return is_packed


PACKED = "pack-quantized"  # by itself, or after the name of a format
UNPACKED = ("float-quantized", "int-quantized", "naive-quantized", "mxfp8-quantized")


def _integers(
    name: str,
    bits: Any,
    weights: Mapping[str, Any],
    inputs: Mapping[str, Any],
    group_size: int | None,
    parts: Collection[str],
) -> Scheme:
    width = inputs.get("num_bits", 16) if inputs else 16
    name = f"INT{bits} (W{bits}A{width}) of {name}"
    zeros = [] if weights.get("symmetric", True) else ["weight_zero_point"]
    if "weight_packed" not in parts:
        check_values("compressed-tensors", weights, num_bits=(8,))
        tensors = ("weight", "weight_scale", *zeros), ("weight_zero_point",)
        refusal = "no kernel reads integers of 8 bits"
        return Scheme(name, *tensors, dense.int8, {}, refusal=refusal, unused=("input_scale",))
    check_values("compressed-tensors", weights, num_bits=(4, 8, 2))
    optional = "weight_zero_point", "weight_shape", "weight_g_idx"
    tensors = ("weight_packed", "weight_scale", *zeros), optional
    settings = {"bits": bits, "group_size": group_size}
    scheme = Scheme(name, *tensors, dense.packed, settings)
    if bits != 4:
        return scheme._replace(refusal=f"no kernel reads integers of {bits} bits")
    if inputs:
        return scheme._replace(refusal=f"no kernel takes activations of {width} bits with INT4")
    if weights.get("actorder") == "group" and "weight_g_idx" in parts:
        return scheme._replace(refusal=OUT_OF_ORDER)
    return scheme._replace(make=_packed, options={"group_size": group_size})


def _packed(weight_g_idx: Any = None, **tensors: Any) -> QuantizedWeights:
    for index in weight_g_idx or ():
        if (index.diff() < 0).any():
            raise ValueError("weight_g_idx is of weights in the order of their activations")
    return QuantizedWeights.from_compressed_tensors(**tensors)


def _float_quantized(
    weights: Mapping[str, Any], inputs: Mapping[str, Any], strategy: str
) -> Scheme:
    check_values(
        "compressed-tensors", {"strategy": strategy}, strategy=("channel", "tensor", "block")
    )
    if inputs:
        check_values("compressed-tensors", inputs, num_bits=(8,), type=("float",))
    if strategy == "tensor":
        scheme = floats.fp8_tensor(bool(inputs) and not inputs.get("dynamic", False))
    elif strategy == "channel":
        tensors = ("weight", "weight_scale"), ()
        scheme = Scheme("FP8 of rows", *tensors, dense.fp8, {}, QuantizedWeights.from_fp8_channel)
        scheme = scheme._replace(unused=("input_scale",))
    else:
        sides = weights.get("block_structure") or (128, 128)
        scheme = floats.fp8_blocks(sides, "weight_scale")._replace(unused=("input_scale",))
    return scheme if inputs else scheme._replace(options=scheme.options | {"activations": "native"})
