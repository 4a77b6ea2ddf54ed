"""Quantization schemes of folders, by `quant_method`.

`scheme_of` finds the scheme of one linear layer from the settings of config.json and the names of
its tensors, so that layers of a folder may differ (mixed precision). A scheme packs experts into
`QuantizedWeights` (`pack`), or states why it cannot (`refusal`); other layers are dequantized
(`dequantize_weight`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

from moelora.integrations.transformers import bnb, dense
from moelora.integrations.transformers.compressed import compressed_tensors
from moelora.integrations.transformers.floats import modelopt, of_fp8
from moelora.integrations.transformers.scheme import (
    KEPT,
    OUT_OF_ORDER,
    Scheme,
    check_values,
    group_columns,
    matches,
    settings_in,
    unread,
)
from moelora.weights import QuantizedWeights
from moelora.weights.readers import ZERO_OFFSETS

# Tensors of a quantized linear layer other than its weight, in any scheme.
PARTS = frozenset(
    "weight qweight qzeros scales g_idx weight_packed weight_scale weight_scale_inv weight_scale_2 "
    "weight_zero_point weight_shape weight_g_idx weight_global_scale input_scale scale "
    "input_global_scale input_zero_point output_scale SCB weight_format".split()
)
# A quantized linear layer has one of these, or an eight-bit weight.
MARKS = frozenset(("qweight", "qzeros", "weight_packed", "weight_scale", "weight_scale_inv"))
MARKS |= bnb.PARTS
OF_CACHE = (".k_scale", ".v_scale", ".q_scale", ".prob_scale")  # of an FP8 KV cache


def scheme_of(config: Mapping[str, Any], linear: str, parts: Collection[str]) -> Scheme:
    """The scheme of a linear layer of a folder, whose tensors' names end in `parts`.

    `config` is the `quantization_config` of config.json. Raises NotImplementedError if the folder's
    method or a setting is not supported, ValueError if settings are damaged, or do not cover these
    tensors.
    """
    method = config.get("quant_method")
    if isinstance(method, str) and method in METHODS:
        return METHODS[method](config, linear, parts)
    refuse_method(method)


def refuse_method(method: Any) -> NoReturn:
    why = OTHERS.get(method, "") if isinstance(method, str) else ""
    if ENABLE not in why:
        way_out = f"quantize the experts to {KEPT}, or load the model in bfloat16 {ENABLE}"
        if method is None:
            way_out = f'round the experts (experts="nf4"), {way_out}'
        why = f"{why}; {way_out}" if why else way_out
    known = ", ".join(METHODS)
    raise NotImplementedError(f"quant_method is {method!r:.80}, wanted {known}; {why}")


# Methods that are not supported: their names, and alternatives.
ENABLE = "and call moelora.integrations.transformers.enable(model)"
OTHERS = {
    "gguf": f"GGUF is not read; load the file with from_pretrained(..., gguf_file=...) {ENABLE}",
    "hqq": "scales and zero points of HQQ are not read",
    "modelopt_mixed": "this is vLLM's name; config.json of ModelOpt says modelopt",
    "quark": "folders of Quark are not read",
    "torchao": "weights of torchao are not read",
    "exl3": "EXL3 is not read",
}


def check_transforms(config: Mapping[str, Any]) -> None:
    """Raises NotImplementedError for rotated activations, with which results would be wrong."""
    for key in ("transform_config", "rotation_config"):
        if _mentions(config.get(key)):
            raise NotImplementedError(
                f"{key} rotates activations before a layer, which is not supported; quantize "
                "without transforms, or fuse them into the weights"
            )
    sparsity = config.get("sparsity_config")
    kind = sparsity.get("format") if isinstance(sparsity, Mapping) else None
    if kind not in (None, "dense"):
        raise NotImplementedError(f"sparsity_config has format {kind!r:.80}, wanted 'dense'")


def _mentions(value: Any) -> bool:
    """Whether a setting is neither None nor empty at all levels."""
    if isinstance(value, Mapping):
        return any(_mentions(inner) for inner in value.values())
    return bool(value)


# ---- GPTQ, AWQ, AutoRound ----


def _gptq(config: Mapping[str, Any], linear: str, parts: Collection[str]) -> Scheme:
    settings = dict(config)
    for key, own in settings_in(config, "dynamic").items():  # GPTQModel's settings per layer
        if not key.startswith("-:") and matches(key.removeprefix("+:"), linear):
            settings |= settings_in({key: own}, key)
            break
    form = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if not isinstance(form, str) or form not in ZERO_OFFSETS:
        known = " or ".join(map(repr, ZERO_OFFSETS))
        raise NotImplementedError(f"gptq: checkpoint_format is {form!r:.80}, wanted {known}")
    return _gptq_scheme("GPTQ", settings, form, parts)


def _gptq_scheme(
    method: str, settings: Mapping[str, Any], form: str, parts: Collection[str]
) -> Scheme:
    bits, group_size = settings.get("bits", 4), group_columns(settings)
    tensors = ("qweight", "scales"), ("qzeros", "g_idx")
    of_dense = {"bits": bits, "offset": ZERO_OFFSETS[form], "group_size": group_size}
    if bits not in (2, 4, 8):
        raise NotImplementedError(f"{method}: bits is {bits!r:.80}, wanted 4, or 2, 4, 8 of others")
    name = f"INT{bits} of {method}"
    scheme = Scheme(name, *tensors, dense.gptq, of_dense, rows=1)
    if bits != 4:
        return scheme._replace(refusal=f"no kernel reads integers of {bits} bits")
    if settings.get("desc_act") and group_size != -1 and "g_idx" in parts:
        return scheme._replace(refusal=OUT_OF_ORDER)
    options = {"bits": bits, "group_size": group_size, "sym": settings.get("sym")}
    options |= {"checkpoint_format": form}
    return scheme._replace(make=QuantizedWeights.from_gptq, options=options)


def _awq(config: Mapping[str, Any], linear: str, parts: Collection[str]) -> Scheme:
    check_values("awq", config, bits=(4,), version=("gemm", "GEMM"), zero_point=(True, False))
    return _awq_scheme("AWQ", config, config.get("zero_point", True))


def _awq_scheme(method: str, settings: Mapping[str, Any], zeros: bool) -> Scheme:
    options = {"group_size": group_columns(settings)}
    required: tuple[str, ...] = ("qweight", "scales", "qzeros")
    optional: tuple[str, ...] = ()
    if not zeros:  # some quantizers still write them, all 8
        required, optional = required[:2], required[2:]
    name = f"INT4 of {method}"
    make = QuantizedWeights.from_awq
    return Scheme(name, required, optional, dense.awq, options, make, options, rows=1)


def _auto_round(config: Mapping[str, Any], linear: str, parts: Collection[str]) -> Scheme:
    """AutoRound's formats: tensors as GPTQ, with or without an offset of zero points, or as AWQ."""
    settings = dict(config)
    extra = settings_in(config, "extra_config")
    for key in extra:
        if key == linear or (re.escape(key) != key and matches(f"{key}$", linear)):
            settings |= settings_in(extra, key)
    form = settings.get("packing_format", "auto_round:auto_gptq")
    if not isinstance(form, str):
        raise ValueError(f"packing_format is {form!r:.80}, wanted a name")
    kind, bits = settings.get("data_type", "int"), settings.get("bits")
    acts = settings.get("act_bits")
    if kind != "int" or (acts is not None and acts < 16):
        name = f"{kind} of {bits} bits, activations of {acts or 16}, of AutoRound ({form})"
        parts = tuple(sorted(parts))
        return Scheme(name, parts, (), unread, {}, refusal="no kernel reads it")
    if form == "auto_round:auto_awq":
        check_values("auto-round", settings, bits=(4,))
        return _awq_scheme("AutoRound", settings, not settings.get("sym", True))
    packings = {"auto_round:auto_gptq": "gptq", "auto_round:gptqmodel": "gptq_v2"}
    packings["auto_round"] = "gptq_v2"
    if form not in packings:
        known = ", ".join(map(repr, [*packings, "auto_round:auto_awq"]))
        raise NotImplementedError(f"auto-round: packing_format is {form!r:.80}, wanted {known}")
    return _gptq_scheme("AutoRound", settings | {"sym": None}, packings[form], parts)


def _stacked(config: Mapping[str, Any], linear: str, parts: Collection[str]) -> Scheme:
    raise NotImplementedError(
        f"mxfp4: {linear} has {', '.join(sorted(parts))}, wanted MXFP4 only of experts, stacked"
    )


METHODS: dict[str, Callable[[Mapping[str, Any], str, Collection[str]], Scheme]] = {
    "mxfp4": _stacked,
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "compressed-tensors": compressed_tensors,
    "fp8": of_fp8,
    "modelopt": modelopt,
    "bitsandbytes": bnb.scheme,
}


def split(name: str) -> tuple[str, str]:
    """(linear layer, suffix) of a tensor's name; the suffix is "" if no scheme has it."""
    linear, _, part = name.rpartition(".")
    return bnb.split(name) or (linear, part if part in PARTS else "")
