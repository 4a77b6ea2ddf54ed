"""Quantization schemes: the tensors of a linear layer in a folder, and how they are read.

`scheme_of` finds the scheme of one linear layer from the settings of config.json and the names of
its tensors, so that layers of a folder may differ (mixed precision). A scheme packs experts into
`QuantizedWeights` (`pack`), or states why it cannot (`refusal`); other layers are dequantized
(`numbers`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from moelora import QuantizedWeights
from moelora.adapters.patterns import Patterns
from moelora.integrations.transformers import dense
from moelora.quantized_fp8 import Activations, GateUp
from moelora.quantized_readers import ZERO_OFFSETS

KEPT = "INT4 (W4A16), MXFP4 or FP8"
WAY_OUT = (
    f"quantize the experts to {KEPT}, or load the model in bfloat16 and call "
    "moelora.integrations.transformers.enable(model)"
)
# Tensors of a quantized linear layer other than its weight, in any scheme.
PARTS = frozenset(
    "weight qweight qzeros scales g_idx weight_packed weight_scale weight_scale_inv weight_scale_2 "
    "weight_zero_point weight_shape weight_g_idx weight_global_scale input_scale "
    "input_global_scale input_zero_point output_scale absmax quant_map".split()
)
# A quantized linear layer has one of these, or an eight-bit weight.
MARKS = frozenset(("qweight", "qzeros", "weight_packed", "weight_scale", "weight_scale_inv"))
OF_CACHE = (".k_scale", ".v_scale", ".q_scale", ".prob_scale")  # of an FP8 KV cache


class Scheme(NamedTuple):
    """How one linear layer is stored."""

    name: str  # in messages
    required: tuple[str, ...]  # tensors
    optional: tuple[str, ...]
    numbers: Callable[..., Tensor]  # tensors of one layer -> its weight, float32
    settings: dict[str, Any]  # further arguments of `numbers`
    make: Callable[..., QuantizedWeights] | None = None  # see `pack`
    options: dict[str, Any] = {}  # further arguments of `make`
    rows: int = 0  # dimension in which gate and up are concatenated
    refusal: str = ""  # why `make` is None

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.required, *self.optional)))

    def taking(self, activations: Activations | None) -> Scheme:
        """The same with other activations (None: unchanged); ValueError if weights are not FP8."""
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
        """Packs experts; `found` maps each name of `required` to a tensor, or to one per expert."""
        self.check(where)
        assert self.make is not None
        try:
            return self.make(**found, **self.options, gate_up=gate_up, dtype=dtype)
        except (ValueError, TypeError) as error:  # TypeError: a setting's type
            raise ValueError(f"{where}: {error}") from None

    def check(self, where: str) -> None:
        """Raises NotImplementedError if experts cannot have this scheme."""
        if self.make is None:
            raise NotImplementedError(f"{where}: experts are {self.name}; {self.refusal}")


def scheme_of(config: Mapping[str, Any], linear: str, parts: Collection[str]) -> Scheme:
    """The scheme of a linear layer.

    Parameters
    ----------
    config : mapping
        `quantization_config` of config.json.
    linear : str
        Its name in the folder.
    parts : collection of str
        Suffixes of its tensors' names.

    Raises
    ------
    NotImplementedError
        The folder's method or a setting is not supported.
    ValueError
        Settings are damaged, or do not cover these tensors.
    """
    method = config.get("quant_method")
    if isinstance(method, str) and method in METHODS:
        return METHODS[method](config, linear, parts)
    refuse_method(method)


def refuse_method(method: Any) -> NoReturn:
    known = ", ".join(METHODS)
    why = OTHERS.get(method, "") if isinstance(method, str) else ""
    got = f"quant_method is {method!r:.80}, wanted {known}"
    raise NotImplementedError(f"{got}; {why}{WAY_OUT}")


OTHERS = {
    "bitsandbytes": "NF4 and INT8 of bitsandbytes are not read; ",
    "hqq": "scales and zero points of HQQ are not read; ",
    "gguf": "GGUF is not read; ",
    "modelopt_mixed": "several algorithms of ModelOpt in one folder are not read; ",
    "quark": "folders of Quark are not read; ",
    "torchao": "weights of torchao are not read; ",
    "exl3": "EXL3 is not read; ",
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


def _wanted(method: str, settings: Mapping[str, Any], **allowed: tuple[Any, ...]) -> None:
    for key, values in allowed.items():
        got = settings.get(key, values[0])
        if got not in values:
            known = " or ".join(map(repr, values))
            raise NotImplementedError(f"{method}: {key} is {got!r:.80}, wanted {known}")


def _group(settings: Any, key: str) -> Mapping[str, Any]:
    """Nested settings; empty if absent."""
    value = settings.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{key} is {value!r:.80}, wanted an object")
    return value or {}


def _size(settings: Mapping[str, Any], key: str = "group_size") -> int | None:
    """A number of columns; -1: all."""
    size = settings.get(key)
    if size is None or (type(size) is int and (size > 0 or size == -1)):
        return size
    raise ValueError(f"{key} is {size!r:.80}, wanted a number of columns, or -1")


def _matches(pattern: str, name: str) -> bool:
    """`re.match` without backtracking, for patterns from untrusted files."""
    try:
        return _pattern(pattern).find(name, False)
    except ValueError as error:
        raise ValueError(f"{pattern!r:.80} is no pattern that is read: {error}") from None


@functools.lru_cache(maxsize=1 << 12)
def _pattern(pattern: str) -> Patterns[bool]:
    return Patterns({f"^(?:{pattern}).*": True}, "quantization_config")


def block_size(sides: Any) -> tuple[int, int]:
    """Rows and columns of a block, as in `weight_block_size`."""
    if isinstance(sides, list | tuple) and len(sides) == 2:
        rows, columns = sides
        if all(type(side) is int and 0 < side < 2**31 for side in sides):
            return rows, columns
    raise ValueError(f"weight_block_size is {sides!r:.80}, wanted two sizes: rows and columns")


# ---- GPTQ, AWQ, AutoRound ----


def _gptq(config: Mapping[str, Any], linear: str, parts: Collection[str]) -> Scheme:
    settings = dict(config)
    for key, own in _group(config, "dynamic").items():  # GPTQModel's settings per layer
        if not key.startswith("-:") and _matches(key.removeprefix("+:"), linear):
            settings |= _group({key: own}, key)
            break
    form = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if not isinstance(form, str) or form not in ZERO_OFFSETS:
        known = " or ".join(map(repr, ZERO_OFFSETS))
        raise NotImplementedError(f"gptq: checkpoint_format is {form!r:.80}, wanted {known}")
    return _gptq_scheme("GPTQ", settings, form)


def _gptq_scheme(method: str, settings: Mapping[str, Any], form: str) -> Scheme:
    bits, group_size = settings.get("bits", 4), _size(settings)
    tensors = ("qweight", "scales"), ("qzeros", "g_idx")
    of_dense = {"bits": bits, "offset": ZERO_OFFSETS[form], "group_size": group_size}
    if bits not in (2, 4, 8):
        raise NotImplementedError(f"{method}: bits is {bits!r:.80}, wanted 4, or 2, 4, 8 of others")
    name = f"INT{bits} of {method}"
    scheme = Scheme(name, *tensors, dense.gptq, of_dense, rows=1)
    if bits != 4:
        return scheme._replace(refusal=f"no kernel reads integers of {bits} bits: {WAY_OUT}")
    options = {"bits": bits, "group_size": group_size, "sym": settings.get("sym")}
    options |= {"checkpoint_format": form}
    return scheme._replace(make=QuantizedWeights.from_gptq, options=options)


def _awq(config: Mapping[str, Any], linear: str, parts: Collection[str]) -> Scheme:
    _wanted("awq", config, bits=(4,), version=("gemm", "GEMM"), zero_point=(True, False))
    return _awq_scheme("AWQ", config, config.get("zero_point", True))


def _awq_scheme(method: str, settings: Mapping[str, Any], zeros: bool) -> Scheme:
    options = {"group_size": _size(settings)}
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
    extra = _group(config, "extra_config")
    for key in extra:
        if key == linear or (re.escape(key) != key and _matches(f"{key}$", linear)):
            settings |= _group(extra, key)
    form = settings.get("packing_format", "auto_round:auto_gptq")
    if not isinstance(form, str):
        raise ValueError(f"packing_format is {form!r:.80}, wanted a name")
    kind, bits = settings.get("data_type", "int"), settings.get("bits")
    acts = settings.get("act_bits")
    if kind != "int" or (acts is not None and acts < 16):
        name = f"{kind} of {bits} bits, activations of {acts or 16}, of AutoRound ({form})"
        parts = tuple(sorted(parts))
        return Scheme(name, parts, (), _unread, {}, refusal=WAY_OUT)
    if form == "auto_round:auto_awq":
        _wanted("auto-round", settings, bits=(4,))
        return _awq_scheme("AutoRound", settings, not settings.get("sym", True))
    packings = {"auto_round:auto_gptq": "gptq", "auto_round:gptqmodel": "gptq_v2"}
    packings["auto_round"] = "gptq_v2"
    if form not in packings:
        known = ", ".join(map(repr, [*packings, "auto_round:auto_awq"]))
        raise NotImplementedError(f"auto-round: packing_format is {form!r:.80}, wanted {known}")
    return _gptq_scheme("AutoRound", settings | {"sym": None}, packings[form])


def _unread(**tensors: Tensor) -> Tensor:
    raise NotImplementedError("layers of this scheme are not read")


# ---- FP8 ----


def fp8(config: Mapping[str, Any]) -> Scheme:
    """`quant_method` "fp8", and experts that transformers has loaded in it."""
    sides = config.get("weight_block_size")
    _wanted("fp8", config, fmt=("e4m3",), activation_scheme=("dynamic", "static"))
    if not sides:
        return _fp8_tensor(config.get("activation_scheme") == "static")
    tensors = ("weight", "weight_scale_inv"), ()
    block = {"block": block_size(sides)}
    make = QuantizedWeights.from_fp8_block
    return Scheme("FP8 of blocks", *tensors, dense.fp8, block, make, block)


def _fp8(config: Mapping[str, Any], linear: str, parts: Collection[str]) -> Scheme:
    if "weight_scale_inv" in parts and not config.get("weight_block_size"):
        raise ValueError(f"there is no weight_block_size, which {linear}.weight_scale_inv wants")
    return fp8(config)


def _fp8_tensor(is_static: bool) -> Scheme:
    required = ["weight", "weight_scale"] + ["input_scale"] * is_static
    optional = () if is_static else ("input_scale",)
    make = QuantizedWeights.from_fp8_tensor
    return Scheme("FP8 of tensors", tuple(required), optional, dense.fp8, {}, make)


def _modelopt(config: Mapping[str, Any], linear: str, parts: Collection[str]) -> Scheme:
    algorithm = config.get("quant_algo") or _group(config, "quantization").get("quant_algo")
    if algorithm == "FP8":
        return _fp8_tensor("input_scale" in parts)
    if algorithm == "NVFP4":
        tensors = ("weight", "weight_scale", "weight_scale_2"), ("input_scale",)
        return _nvfp4("ModelOpt", *tensors, dense.modelopt_nvfp4)
    known = "'FP8', or 'NVFP4' of others than experts"
    raise NotImplementedError(f"modelopt: quant_algo is {algorithm!r:.80}, wanted {known}")


def _nvfp4(
    method: str, required: tuple[str, ...], optional: tuple[str, ...], read: Callable[..., Tensor]
) -> Scheme:
    name = f"NVFP4 of {method}"
    return Scheme(name, required, optional, read, {}, refusal=f"no kernel reads NVFP4: {WAY_OUT}")


# ---- compressed-tensors ----


def _compressed_tensors(config: Mapping[str, Any], linear: str, parts: Collection[str]) -> Scheme:
    group = _config_group(config, linear, parts)
    weights, inputs = (_group(group, key) for key in ("weights", "input_activations"))
    bits, kind = weights.get("num_bits", 8), weights.get("type", "int")
    strategy, size = weights.get("strategy"), _size(weights)
    strategy = strategy or ("group" if size else "tensor")
    group_size = -1 if strategy in ("channel", "tensor") else size
    name = "compressed-tensors"
    if kind == "int":
        return _integers(name, bits, weights, inputs, group_size, "weight_packed" in parts)
    if kind == "float" and bits == 8:
        if size == 32:
            tensors = ("weight", "weight_scale"), ()
            refusal = f"no kernel reads FP8 with scales for 32 columns: {WAY_OUT}"
            return Scheme(f"MXFP8 of {name}", *tensors, dense.mxfp8, {}, refusal=refusal)
        return _float_quantized(weights, inputs, strategy)
    if kind == "float" and bits == 4 and strategy == "tensor_group":
        tensors = ("weight_packed", "weight_scale", "weight_global_scale"), ("input_global_scale",)
        return _nvfp4(name, *tensors, dense.nvfp4)
    if kind == "float" and bits == 4 and size == 32:  # activations are not quantized
        tensors = ("weight_packed", "weight_scale"), ()
        return Scheme(f"MXFP4 of {name}", *tensors, dense.mxfp4, {}, _mxfp4)
    raise NotImplementedError(
        f"{name}: {linear} has {kind} weights of {bits} bits, strategy {strategy!r:.80}, "
        f"group_size {size}, wanted {KEPT}"
    )


def _config_group(
    config: Mapping[str, Any], linear: str, parts: Collection[str]
) -> Mapping[str, Any]:
    """The group of a linear layer: by its tensors, and by name if several groups match."""
    groups = _group(config, "config_groups")
    found = {name: _group(groups, name) for name in groups}
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
    if target.startswith("re:"):
        return _matches(target[3:], linear)
    return target == linear or linear.endswith(f".{target}")


def _is_packed(config: Mapping[str, Any], group: Mapping[str, Any]) -> bool:
    """Whether a group's layers have `weight_packed`: by its format, or the common one."""
    form = group.get("format") or config.get("format")
    if form == "mixed-precision" or form is None:
        weights, inputs = (_group(group, key) for key in ("weights", "input_activations"))
        is_int = weights.get("type", "int") == "int"
        return weights.get("num_bits") == 4 or (is_int and not inputs)
    if form not in (*PACKED, *UNPACKED):
        known = " or ".join(map(repr, (*PACKED, *UNPACKED)))
        raise NotImplementedError(f"compressed-tensors: format is {form!r:.80}, wanted {known}")
    return form in PACKED


PACKED = ("pack-quantized", "mxfp4-pack-quantized", "nvfp4-pack-quantized")
UNPACKED = ("float-quantized", "int-quantized", "naive-quantized", "mxfp8-quantized")


def _integers(
    name: str,
    bits: Any,
    weights: Mapping[str, Any],
    inputs: Mapping[str, Any],
    group_size: int | None,
    is_packed: bool,
) -> Scheme:
    width = inputs.get("num_bits", 16) if inputs else 16
    name = f"INT{bits} (W{bits}A{width}) of {name}"
    zeros = [] if weights.get("symmetric", True) else ["weight_zero_point"]
    if not is_packed:
        _wanted("compressed-tensors", weights, num_bits=(8,))
        tensors = ("weight", "weight_scale", *zeros), ("weight_zero_point", "input_scale")
        refusal = f"no kernel reads integers of 8 bits: {WAY_OUT}"
        return Scheme(name, *tensors, _int8, {}, refusal=refusal)
    _wanted("compressed-tensors", weights, num_bits=(4, 8, 2))
    optional = "weight_zero_point", "weight_shape", "weight_g_idx"
    tensors = ("weight_packed", "weight_scale", *zeros), optional
    settings = {"bits": bits, "group_size": group_size}
    scheme = Scheme(name, *tensors, dense.packed, settings)
    if bits != 4:
        return scheme._replace(refusal=f"no kernel reads integers of {bits} bits: {WAY_OUT}")
    if inputs:
        return scheme._replace(
            refusal=f"no kernel takes activations of {width} bits with INT4: {WAY_OUT}"
        )
    return scheme._replace(make=_packed, options={"group_size": group_size})


def _int8(input_scale: Tensor | None = None, **tensors: Tensor) -> Tensor:
    return dense.int8(**tensors)


def _packed(weight_g_idx: Any = None, **tensors: Any) -> QuantizedWeights:
    for index in weight_g_idx or ():
        if (index.diff() < 0).any():
            raise ValueError("weight_g_idx is of weights in the order of their activations")
    return QuantizedWeights.from_compressed_tensors(**tensors)


def _mxfp4(weight_packed: Any, weight_scale: Any, **options: Any) -> QuantizedWeights:
    return QuantizedWeights.from_mxfp4(weight_packed, weight_scale, **options)


def _float_quantized(
    weights: Mapping[str, Any], inputs: Mapping[str, Any], strategy: str
) -> Scheme:
    _wanted("compressed-tensors", {"strategy": strategy}, strategy=("channel", "tensor", "block"))
    if inputs:
        _wanted("compressed-tensors", inputs, num_bits=(8,), type=("float",))
    tensors = ("weight", "weight_scale"), ("input_scale",)
    if strategy == "tensor":
        scheme = _fp8_tensor(bool(inputs) and not inputs.get("dynamic", False))
    elif strategy == "channel":
        scheme = Scheme("FP8 of rows", *tensors, dense.fp8, {}, _rows)
    else:
        block = {"block": block_size(weights.get("block_structure") or (128, 128))}
        scheme = Scheme("FP8 of blocks", *tensors, dense.fp8, block, _blocks, block)
    return scheme if inputs else scheme._replace(options=scheme.options | {"activations": "native"})


def _rows(
    weight: Any, weight_scale: Any, input_scale: Any = None, **options: Any
) -> QuantizedWeights:
    return QuantizedWeights.from_fp8_channel(weight, weight_scale, **options)


def _blocks(
    weight: Any, weight_scale: Any, input_scale: Any = None, **options: Any
) -> QuantizedWeights:
    return QuantizedWeights.from_fp8_block(weight, weight_scale, **options)


def _stacked(config: Mapping[str, Any], linear: str, parts: Collection[str]) -> Scheme:
    raise NotImplementedError(
        f"mxfp4: {linear} has {', '.join(sorted(parts))}, wanted MXFP4 of experts alone, stacked"
    )


METHODS: dict[str, Callable[[Mapping[str, Any], str, Collection[str]], Scheme]] = {
    "mxfp4": _stacked,
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "modelopt": _modelopt,
}
