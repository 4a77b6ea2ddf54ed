"""A quantized model's folder: experts as `QuantizedWeights`, other layers dequantized."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import logging

from moelora.adapters.files import file_in, read_json
from moelora.integrations.transformers import dense
from moelora.integrations.transformers.names import OF_ONE
from moelora.integrations.transformers.scheme import KEPT, Scheme
from moelora.integrations.transformers.schemes import (
    MARKS,
    METHODS,
    OF_CACHE,
    OTHERS,
    check_transforms,
    refuse_method,
    scheme_of,
    split,
)
from moelora.operators.checks import dtype_name, errors_about
from moelora.weights.fp8 import Activations
from moelora.weights.rounding import ROUNDINGS

SINGLE_SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
SINGLE, INDEX = f"model{SINGLE_SUFFIX}", f"model{INDEX_SUFFIX}"
OF_MODELOPT = "hf_quant_config.json"  # where config.json says nothing, as ModelOpt's exports before
# Tensors of experts, wherever they are: one for all of them, or one for each.
OF_EXPERTS = re.compile(
    r"\.experts\.(\d+\.|\w+_(blocks|scales)$"
    r"|\w+\.((nested_)?absmax|(nested_)?quant_map|quant_state\.\w+)$)"
)
# 16-bit experts in one tensor; Granite's checkpoints have names of their own.
OF_GRANITE = {"gate_up_proj": "input_linear.weight", "down_proj": "output_linear.weight"}
STACKED = re.compile(
    r"\.(experts\.(gate_up_proj|up_proj|down_proj)|block_sparse_moe\.(in|out)put_linear\.weight)$"
)
# Tensors of a quantizer for all experts at once, of schemes that have them for each.
OF_ALL = re.compile(
    r"\.experts\.[a-z]\w*[._](qweight|weight_packed|weight_scale(_2|_inv)?|weight_global_scale)$"
)

log = logging.get_logger("transformers.moelora")


class Folder:
    """The tensors of a folder's safetensors files, each read on first use.

    Attributes
    ----------
    quantization : dict
        `quantization_config` of config.json.
    linears : dict of str to frozenset of str
        Quantized linear layers, including those of experts, and the suffixes of their tensors.
    plain_experts : set of str
        Linear layers of single experts that are not quantized.
    unread : set of str
        Names of tensors that have not been read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        config_file = file_in(self.path, "config.json")
        if not config_file.is_file():
            refuse = f"{self.path} has no config.json, wanted the folder of a checkpoint"
            raise ValueError(refuse + self._of_gguf())
        config = read_json(config_file)
        self.quantization = self._quantization(config)
        self._files: dict[str, tuple[Path, Any]] = {}  # where each tensor is
        for name in self._weight_files(config.get("transformers_weights")):
            shard = self.path / name
            try:
                file: Any = safe_open(shard, framework="pt")  # which lacks type annotations
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{shard} cannot be read: {error}") from None
            self._files.update(dict.fromkeys(file.keys(), (shard, file)))
        self.unread = set(self._files)
        self.linears = _quantized(self._files)
        names = (name.removesuffix(".weight") for name in self._files if name.endswith(".weight"))
        self.plain_experts = {
            linear for linear in names if OF_ONE.search(linear) and linear not in self.linears
        }

    def _quantization(self, config: dict[str, Any]) -> dict[str, Any]:
        """`quantization_config`, or ModelOpt's settings in a file of their own."""
        path, key = self.path / "config.json", "quantization_config"
        found = config.get(key) or {}
        own = file_in(self.path, OF_MODELOPT)
        if not found and own.is_file():
            path, key = own, "quantization"
            found = read_json(own).get(key) or {}
        if not isinstance(found, dict):
            raise ValueError(f"{path}: {key} is a {type(found).__name__}, wanted an object")
        if path == own:
            return {"quant_method": "modelopt", **found}
        if "expert_dtype" in config:  # DeepSeek-V4 says it of the model
            return {"expert_dtype": config["expert_dtype"], **found}
        return found

    def _weight_files(self, named: Any) -> list[str]:
        """The files that transformers would load; others are ignored.

        The file named in config.json, otherwise a single file, otherwise all files of an index in
        order of their names.
        """
        if named is not None and not str(named).endswith((SINGLE_SUFFIX, INDEX_SUFFIX)):
            raise ValueError(
                f"{self.path / 'config.json'}: transformers_weights is {named!r:.200}, wanted a "
                f"name that ends in {SINGLE_SUFFIX} or {INDEX_SUFFIX}"
            )
        names = (SINGLE, INDEX) if named is None else (str(named),)
        found = [name for name in names if file_in(self.path, name).is_file()]
        if not found:
            refuse = f"{self.path} has no safetensors files that transformers would load, wanted "
            refuse += f"{' or '.join(names)}; weights in other forms (.bin, .gguf) are never loaded"
            raise ValueError(refuse + self._of_gguf())
        if found[0].endswith(SINGLE_SUFFIX):
            return found[:1]
        index = self.path / found[0]
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            got = "empty" if weight_map == {} else f"a {type(weight_map).__name__}"
            raise ValueError(f"{index}: weight_map is {got}, wanted files by names of tensors")
        for tensor, name in weight_map.items():
            if not isinstance(name, str):
                raise ValueError(f"{index}: the file of {tensor:.200} is {name!r:.200}")
        names = sorted(set(weight_map.values()))
        for name in names:
            if not file_in(self.path, name).is_file():
                raise ValueError(f"{self.path} has no file {name}, which its {found[0]} names")
        return names

    def _of_gguf(self) -> str:
        """What to do with GGUF files, if these are some; otherwise empty."""
        is_gguf = self.path.suffix == ".gguf" or any(self.path.glob("*.gguf"))
        return f": {OTHERS['gguf']}" if is_gguf else ""

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._files:
            raise ValueError(f"{self.path} has no tensor {name}, which the model wants")
        tensor: Tensor = self._read(name, "get_tensor")
        return tensor

    def _read(self, name: str, get: str) -> Any:
        self.unread.discard(name)
        shard, file = self._files[name]
        try:
            return getattr(file, get)(name)
        except (SafetensorError, AttributeError, KeyError) as error:  # dtypes that torch lacks
            raise ValueError(f"{shard}: {name} cannot be read: {error}") from None

    def stack(self, layer: str, projection: str) -> str | None:
        """Name of the tensor with all experts of a projection; None if each has its own."""
        block = layer.rpartition(".")[0]
        names = f"{layer}.{projection}", f"{block}.{OF_GRANITE.get(projection)}"
        return next((name for name in names if name in self), None)

    def experts_of(self, name: str) -> Any:
        """A stack of experts, each of which is read when its index is asked for."""
        return self._read(name, "get_slice")

    def skip(self, linear: str, scheme: Scheme) -> None:
        """Marks the tensors of a layer that its scheme does not use as read."""
        self.unread -= {f"{linear}.{part}" for part in scheme.unused}

    def of_names(self) -> list[str]:
        """Linear layers that experts may have."""
        return [*self.linears, *sorted(self.plain_experts)]

    def shard_of(self, linear: str) -> Path:
        """The file with a linear layer's tensors."""
        parts = self.linears.get(linear, ("weight",))
        return next(self._files[f"{linear}.{part}"][0] for part in sorted(parts))

    def scheme_of(self, linear: str) -> Scheme:
        """Scheme of a linear layer; errors name the folder."""
        if linear in self.plain_experts:
            return Scheme("not quantized", ("weight",), (), dense.plain, {})
        with errors_about(self.path, ValueError, NotImplementedError):
            return scheme_of(self.quantization, linear, self.linears[linear])

    def check(
        self,
        dequantize: bool = False,
        activations: Activations | None = None,
        rounding: str | None = None,
    ) -> None:
        """Refuses what cannot be loaded, by the names and dtypes of tensors, before any is read.

        With `dequantize` experts of schemes that no kernel reads are not refused. `activations` are
        those of FP8 experts: some layers must have such, others may have other schemes. With
        `rounding` experts must have 16 bits, and the folder may have no method.

        Raises
        ------
        NotImplementedError
            The folder's method, experts of a scheme without a kernel, or rotations.
        ValueError
            Settings are damaged, or `activations` is given without FP8 experts.
        """
        with errors_about(self.path, NotImplementedError):
            method = self.quantization.get("quant_method")
            is_plain = rounding is not None and not self.quantization
            if not is_plain and (not isinstance(method, str) or method not in METHODS):
                refuse_method(method)
            if rounding is not None:
                self._check_rounding(rounding)
            check_transforms(self.quantization)
            stacked = next((name for name in self if OF_ALL.search(name)), None)
            if stacked and method != "mxfp4":
                raise NotImplementedError(
                    f"{stacked} is of all experts; stacked tensors are read only for MXFP4 "
                    f"(quant_method 'mxfp4'): quantize the experts to {KEPT} with tensors of their "
                    "own, experts.0.down_proj.weight and so on"
                )
        aside: dict[str, str] = {}
        is_fp8 = rounding == "fp8"
        for linear in self.linears:
            scheme = self.scheme_of(linear)
            if OF_EXPERTS.search(f"{linear}."):
                scheme.check(f"{self.path}: {linear}", dequantize)
                is_fp8 |= scheme.is_fp8
                if scheme.inputs:
                    aside[scheme.name] = scheme.inputs
        if activations is not None and not is_fp8:
            raise ValueError(
                f"{self.path}: activations is {activations!r}, wanted None: the weights are not "
                "FP8 in any layer of experts"
            )
        for name, inputs in aside.items():
            log.warning(
                f"{self.path}: experts are {name}; activations, which the folder quantizes to "
                f"{inputs}, stay in the model's dtype (W4A16)"
            )

    def _check_rounding(self, rounding: str) -> None:
        if rounding not in ROUNDINGS:
            known = ", ".join(map(repr, ROUNDINGS))
            raise ValueError(f"experts is {rounding!r:.80}, wanted None, or one of {known}")
        linears = (linear for linear in self.linears if OF_EXPERTS.search(f"{linear}."))
        ends = ("_blocks", ".absmax")
        blocks = (name for name in self if name.endswith(ends) and OF_EXPERTS.search(name))
        if (name := next(linears, next(blocks, None))) is not None:
            raise ValueError(
                f"{self.path}: experts is {rounding!r}, and {name} is quantized, wanted None, or a "
                "folder whose experts have 16 bits"
            )

    def plain(self, dtype: torch.dtype, rounding: str | None = None) -> dict[str, Tensor]:
        """All tensors but those of experts. Quantized linear layers are dequantized to `dtype`."""
        tensors, stored, made = {}, 0, 0
        others = [linear for linear in self.linears if not OF_EXPERTS.search(f"{linear}.")]
        parts = {f"{linear}.{part}" for linear in others for part in self.linears[linear]}
        of_cache = {name for name in self if name.endswith(OF_CACHE)}
        skipped = parts | of_cache | {name for name in self if f"{name}.absmax" in self}
        if rounding is not None:
            skipped |= {name for name in self if STACKED.search(name)}
        self.unread -= parts | of_cache
        for name in self:
            if not OF_EXPERTS.search(name) and name not in skipped:
                tensors[name] = self[name]
        for linear in others:
            weight, size = self.dequantized(linear, dtype)
            tensors[f"{linear}.weight"] = weight
            stored, made = stored + size, made + weight.nbytes
        if others:
            names = dict.fromkeys(self.scheme_of(linear).name for linear in others)
            kind = dtype_name(dtype)
            log.warning(
                f"{self.path}: {len(others)} linear layers beside the experts ({', '.join(names)}) "
                f"are dequantized to {kind}, {made / 2**30:.2f} GiB from {stored / 2**30:.2f} GiB"
            )
        if of_cache or self.quantization.get("kv_cache_scheme"):
            log.warning(f"{self.path}: the cache of keys and values is not quantized")
        return tensors

    def dequantized(self, linear: str, dtype: torch.dtype) -> tuple[Tensor, int]:
        """A layer's weight, and the bytes of the tensors that it was."""
        scheme, parts = self.scheme_of(linear), self.linears.get(linear, frozenset())
        self.skip(linear, scheme)
        found = {
            part: self[f"{linear}.{part}"]
            for part in scheme.parts
            if part in parts or part in scheme.required
        }
        try:
            exact = scheme.dequantize_weight(**found, **scheme.settings)
            weight = exact.to(dtype)
            if not weight.isfinite().all():
                got = f"weight is beyond {dtype} (dequantized up to {float(exact.abs().max()):g})"
                raise ValueError(f"{got}, wanted at most {torch.finfo(dtype).max:g}")
        except ValueError as error:
            raise ValueError(f"{self.shard_of(linear)}: {linear}.{error}") from None
        return weight, sum(tensor.nbytes for tensor in found.values())


def _quantized(files: Mapping[str, tuple[Path, Any]]) -> dict[str, frozenset[str]]:
    """Linear layers with tensors of a scheme, and the suffixes of these tensors."""
    parts: dict[str, set[str]] = {}
    for name in files:
        linear, part = split(name)
        if part:
            parts.setdefault(linear, set()).add(part)

    def is_short(name: str) -> bool:
        """Whether a weight has eight bits; reads no tensor."""
        dtype = files[name][1].get_slice(name).get_dtype()
        return dtype in ("F8_E4M3", "F8_E5M2", "I8", "U8")

    return {
        linear: frozenset(own)
        for linear, own in parts.items()
        if own & MARKS or ("weight" in own and is_short(f"{linear}.weight"))
    }
