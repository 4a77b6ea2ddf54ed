"""A quantized model's folder: experts as `QuantizedWeights`, other layers dequantized."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import logging

from moelora import QuantizedWeights
from moelora.files import file_in, read_json
from moelora.integrations.transformers.names import OF_ONE, Linears
from moelora.integrations.transformers.projection import sizes, up_name
from moelora.integrations.transformers.schemes import (
    MARKS,
    METHODS,
    OF_CACHE,
    PARTS,
    Scheme,
    check_transforms,
    refuse_method,
    scheme_of,
)
from moelora.quantized_fp8 import Activations, GateUp

if TYPE_CHECKING:
    from moelora.integrations.transformers.projection import Experts

SINGLE_SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
SINGLE, INDEX = f"model{SINGLE_SUFFIX}", f"model{INDEX_SUFFIX}"
# Names of experts' tensors, stacked or one per expert, at any depth.
OF_EXPERTS = re.compile(r"\.experts\.(\d+\.|\w+_(blocks|scales)$)")

log = logging.get_logger("transformers.moelora")


class Folder:
    """The tensors of a folder's safetensors files, each read on first use.

    Attributes
    ----------
    quantization : dict
        `quantization_config` of config.json.
    linears : dict of str to frozenset of str
        Quantized linear layers, including those of experts, and the suffixes of their tensors.
    unread : set of str
        Names of tensors that have not been read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        config_file = file_in(self.path, "config.json")
        if not config_file.is_file():
            raise ValueError(f"{self.path} has no config.json, wanted the folder of a checkpoint")
        config = read_json(config_file)
        self.quantization = config.get("quantization_config") or {}
        if not isinstance(self.quantization, dict):
            got = type(self.quantization).__name__
            raise ValueError(f"{config_file}: quantization_config is a {got}, wanted an object")
        self._files: dict[str, tuple[Path, Any]] = {}  # file of each tensor
        for name in self._weight_files(config.get("transformers_weights")):
            shard = self.path / name
            try:
                file: Any = safe_open(shard, framework="pt")  # which lacks type annotations
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{shard} cannot be read: {error}") from None
            self._files.update(dict.fromkeys(file.keys(), (shard, file)))
        self.unread = set(self._files)
        self.linears = _quantized(self._files)

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
            raise ValueError(
                f"{self.path} has no safetensors files that transformers would load, wanted "
                f"{' or '.join(names)}; weights in other forms (.bin, .gguf) are never loaded"
            )
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

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._files:
            raise ValueError(f"{self.path} has no tensor {name}, which the model wants")
        self.unread.discard(name)
        shard, file = self._files[name]
        try:
            tensor: Tensor = file.get_tensor(name)
        except (SafetensorError, AttributeError, KeyError) as error:  # dtypes that torch lacks
            raise ValueError(f"{shard}: {name} cannot be read: {error}") from None
        return tensor

    def shard_of(self, linear: str) -> Path:
        """The file with a linear layer's tensors."""
        return next(self._files[f"{linear}.{part}"][0] for part in sorted(self.linears[linear]))

    def scheme_of(self, linear: str) -> Scheme:
        """Scheme of a quantized linear layer; errors name the folder."""
        try:
            return scheme_of(self.quantization, linear, self.linears[linear])
        except (ValueError, NotImplementedError) as error:
            raise type(error)(f"{self.path}: {error}") from None

    def check(self) -> None:
        """Refuses what cannot be loaded, by names and dtypes of tensors, before reading any.

        Raises
        ------
        NotImplementedError
            The folder's method, experts of a scheme without a kernel, or rotations.
        ValueError
            Settings are damaged.
        """
        try:
            method = self.quantization.get("quant_method")
            if not isinstance(method, str) or method not in METHODS:
                refuse_method(method)
            check_transforms(self.quantization)
        except NotImplementedError as error:
            raise NotImplementedError(f"{self.path}: {error}") from None
        for linear in self.linears:
            scheme = self.scheme_of(linear)
            if OF_EXPERTS.search(f"{linear}."):
                scheme.check(f"{self.path}: {linear}")

    def plain(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """All tensors but those of experts. Quantized linear layers are dequantized to `dtype`."""
        tensors, stored, made = {}, 0, 0
        dense = [linear for linear in self.linears if not OF_EXPERTS.search(f"{linear}.")]
        parts = {f"{linear}.{part}" for linear in dense for part in self.linears[linear]}
        of_cache = {name for name in self if name.endswith(OF_CACHE)}
        skipped = parts | of_cache
        self.unread -= skipped
        for name in self:
            if not OF_EXPERTS.search(name) and name not in skipped:
                tensors[name] = self[name]
        for linear in dense:
            numbers, size = self._dequantized(linear, dtype)
            tensors[f"{linear}.weight"] = numbers
            stored, made = stored + size, made + numbers.nbytes
        if dense:
            names = dict.fromkeys(self.scheme_of(linear).name for linear in dense)
            kind = str(dtype).removeprefix("torch.")
            log.warning(
                f"{self.path}: {len(dense)} linear layers beside the experts ({', '.join(names)}) "
                f"are dequantized to {kind}, {made / 2**30:.2f} GiB from {stored / 2**30:.2f} GiB"
            )
        if of_cache or self.quantization.get("kv_cache_scheme"):
            log.warning(f"{self.path}: the cache of keys and values is not quantized")
        return tensors

    def _dequantized(self, linear: str, dtype: torch.dtype) -> tuple[Tensor, int]:
        """A layer's dequantized weight, and the bytes of its quantized tensors."""
        scheme, parts = self.scheme_of(linear), self.linears[linear]
        found = {
            part: self[f"{linear}.{part}"]
            for part in scheme.parts
            if part in parts or part in scheme.required
        }
        try:
            numbers = scheme.numbers(**found, **scheme.settings).to(dtype)
            if not numbers.isfinite().all():
                raise ValueError(f"weight is beyond {dtype}, wanted numbers")
        except ValueError as error:
            raise ValueError(f"{self.shard_of(linear)}: {linear}.{error}") from None
        return numbers, sum(tensor.nbytes for tensor in found.values())


def _quantized(files: Mapping[str, tuple[Path, Any]]) -> dict[str, frozenset[str]]:
    """Linear layers with tensors of a scheme, and the suffixes of these tensors."""
    parts: dict[str, set[str]] = {}
    for name in files:
        linear, _, part = name.rpartition(".")
        if part in PARTS:
            parts.setdefault(linear, set()).add(part)
    return {
        linear: frozenset(own)
        for linear, own in parts.items()
        if own & MARKS or ("weight" in own and _is_short(files, f"{linear}.weight"))
    }


def _is_short(files: Mapping[str, tuple[Path, Any]], name: str) -> bool:
    """Whether a weight has eight bits; reads no tensor."""
    dtype = files[name][1].get_slice(name).get_dtype()
    return dtype in ("F8_E4M3", "F8_E5M2", "I8", "U8")


def read_experts(
    folder: Folder,
    layer: str,
    experts: Experts,
    linears: Linears,
    dtype: torch.dtype,
    activations: Activations | None = None,
) -> tuple[QuantizedWeights, QuantizedWeights]:
    """Both projections of one experts module, called `layer` in the model.

    Holds the tiles, one projection's tensors in the checkpoint's format (gate and up concatenated),
    and one expert being packed; no weight is dequantized. `linears` come from `expert_linears`.

    Raises
    ------
    ValueError
        A tensor is missing, unknown, or does not match the model or the format. The message names
        it.
    NotImplementedError
        A scheme that no kernel has.
    """
    try:
        return _read_experts(folder, layer, experts, linears, dtype, activations)
    except ValueError as error:
        at = "" if str(error).startswith(str(folder.path)) else f"{folder.path}: "
        raise ValueError(f"{at}{error}") from None


def _read_experts(
    folder: Folder,
    layer: str,
    experts: Experts,
    linears: Linears,
    dtype: torch.dtype,
    activations: Activations | None,
) -> tuple[QuantizedWeights, QuantizedWeights]:
    interleaved = experts.has_gate and not getattr(experts, "is_concatenated", True)
    up, down = sizes(experts)
    method = folder.quantization.get("quant_method")
    if method == "mxfp4":
        if activations is not None:
            raise ValueError(f"activations is {activations!r}, wanted None: weights are MXFP4")
        gate_up: GateUp = "interleaved" if interleaved else "concatenated"
        found = (
            _stacked(folder, f"{layer}.{up_name(experts)}", up, gate_up, dtype),
            _stacked(folder, f"{layer}.down_proj", down, None, dtype),
        )
    else:
        of_up = _names(folder, layer, up_name(experts), 1 + experts.has_gate, up[0], linears)
        of_down = _names(folder, layer, "down_proj", 1, down[0], linears)
        rows: GateUp | None = "concatenated" if experts.has_gate else None
        first = _per_expert(folder, of_up, up, rows, dtype, activations)
        if interleaved:  # gate and up each fill whole tiles, in either order
            first = replace(first, gate_up="interleaved")
        found = first, _per_expert(folder, of_down, down, None, dtype, activations)
    _refuse_others(folder, layer, experts, linears)
    return found


def _refuse_others(folder: Folder, layer: str, experts: Experts, linears: Linears) -> None:
    """Raises ValueError if tensors of these experts were not used."""
    places = {layer, *(linear.rsplit(".", 2)[0] for linear in linears.values())}
    biases = set(_biases(experts, linears))
    for name in sorted(folder.unread):
        place = next((p for p in places if name.startswith(f"{p}.")), None)
        if place is None or name in biases or name.removeprefix(f"{place}.") in experts._parameters:
            continue  # a bias
        if name.endswith(".bias") and not folder[name].float().any():
            continue  # zero bias of linear layers without one, in older GPTQ checkpoints
        method = folder.quantization.get("quant_method")
        raise ValueError(f"{name} is no tensor that {method} has in experts like these")


def _biases(experts: Experts, linears: Linears) -> dict[str, tuple[str, int, int]]:
    """Names of single experts' biases in a folder, and their places in the module."""
    own = (up_name(experts), "down_proj")
    has = [name for name in own if f"{name}_bias" in experts._parameters]
    return {f"{linear}.bias": key for key, linear in linears.items() if key[0] in has}


def read_biases(
    folder: Folder, layer: str, experts: Experts, linears: Linears
) -> dict[str, Tensor]:
    """Biases (E, N) stored per expert in a folder, by the names of their parameters."""
    interleaved = experts.has_gate and not getattr(experts, "is_concatenated", True)
    parts: dict[str, dict[tuple[int, int], Tensor]] = {}
    for name, (own, place, expert) in _biases(experts, linears).items():
        if name in folder and f"{layer}.{own}_bias" not in folder:
            parts.setdefault(own, {})[expert, place] = folder[name]
    found = {}
    for own, biases in parts.items():
        shape = getattr(experts, f"{own}_bias").shape
        places = 2 if own == "gate_up_proj" else 1
        rows = []
        for expert in range(shape[0]):
            here = [(expert, place) for place in range(places)]
            row = [biases[key] for key in here if key in biases]
            if [bias.shape for bias in row] != [(shape[1] // places,)] * places:
                wanted = f"{places} of {shape[1] // places} numbers"
                raise ValueError(
                    f"{folder.path}: the biases of expert {expert} of {layer}.{own} are missing or "
                    f"of another shape, wanted {wanted}"
                )
            rows.append(torch.stack(row, -1).flatten() if interleaved else torch.cat(row))
        found[f"{own}_bias"] = torch.stack(rows)
    return found


def _stacked(
    folder: Folder, name: str, shape: torch.Size, gate_up: GateUp | None, dtype: torch.dtype
) -> QuantizedWeights:
    blocks, scales = folder[f"{name}_blocks"], folder[f"{name}_scales"]
    wanted = (*shape[:2], shape[2] // 32, 16)
    if tuple(blocks.shape) != wanted:
        raise ValueError(f"{name}_blocks has shape {tuple(blocks.shape)}, wanted {wanted}")
    try:
        return QuantizedWeights.from_mxfp4(blocks, scales, gate_up=gate_up, dtype=dtype)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _names(
    folder: Folder, layer: str, own: str, places: int, count: int, linears: Linears
) -> list[list[str]]:
    """The linear layers of one projection, per expert: gate and up, or one."""
    names = []
    for expert in range(count):
        row = [linears.get((own, place, expert)) for place in range(places)]
        if None in row:
            some = next((linear for linear in folder.linears if OF_ONE.search(linear)), None)
            has = f"experts are called {some}" if some else "none is of an expert"
            raise ValueError(
                f"no quantized linear layer is {own} of expert {expert} of {layer}; {has}"
            )
        names.append([name for name in row if name is not None])
    return names


def _per_expert(
    folder: Folder,
    names: Sequence[Sequence[str]],
    shape: torch.Size,
    gate_up: GateUp | None,
    dtype: torch.dtype,
    activations: Activations | None,
) -> QuantizedWeights:
    scheme = folder.scheme_of(names[0][0])
    for linear in (linear for row in names for linear in row):
        other = folder.scheme_of(linear)
        if (other.name, other.options) != (scheme.name, scheme.options):
            raise NotImplementedError(
                f"{folder.path}: {linear} is {other.name} {other.options}, and {names[0][0]} "
                f"{scheme.name} {scheme.options}; experts of one layer must be of one scheme"
            )
    scheme = scheme.taking(activations)
    experts, _, first = names[0][0].rpartition(".")
    parts = " and ".join([first, *(name.rpartition(".")[2] for name in names[0][1:])])
    where = f"{experts.rpartition('.')[0]}.*.{parts}"
    found = {}
    for part in scheme.parts:
        if part in scheme.required or f"{names[0][0]}.{part}" in folder:
            rows = ([f"{linear}.{part}" for linear in row] for row in names)
            found[part] = [_joined(folder, row, scheme.rows) for row in rows]
    weights = scheme.pack(where, found, gate_up, dtype)
    if weights.shape != shape:
        raise ValueError(f"{where} has shape {tuple(weights.shape)}, wanted {tuple(shape)}")
    return weights


def _joined(folder: Folder, names: Sequence[str], rows: int) -> Tensor:
    """Concatenates tensors of gate and up to those of one weight, gate's rows first."""
    tensors = [folder[name] for name in names]
    first = tensors[0]
    if len(tensors) == 1:
        return first
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.dtype != first.dtype or tensor.shape != first.shape:
            got, wanted = (f"{tuple(t.shape)} of {t.dtype}" for t in (tensor, first))
            raise ValueError(f"{name} is {got}, wanted {wanted} as {names[0]}")
    if names[0].endswith(".weight_shape"):
        if tuple(first.shape) != (2,):
            raise ValueError(f"{names[0]} has shape {tuple(first.shape)}, wanted (2,)")
        rows_of, columns_of = torch.stack(tensors).unbind(1)
        if (columns_of != columns_of[0]).any():
            raise ValueError(f"{names[-1]} is {tensors[-1].tolist()}, {names[0]} {first.tolist()}")
        return torch.stack([rows_of.sum(), columns_of[0]])
    if names[0].endswith("_scale") and first.numel() == 1:  # each of a whole tensor
        return torch.stack([tensor.reshape(()) for tensor in tensors])
    if first.dim() == 1:  # g_idx: per column, hence common to both
        for name, tensor in zip(names, tensors, strict=True):
            if not torch.equal(tensor, first):
                raise ValueError(f"{name} is in another order (desc_act), wanted {names[0]}'s")
        return first
    if first.dim() != 2:
        raise ValueError(f"{names[0]} has shape {tuple(first.shape)}, wanted a matrix")
    return torch.cat(tensors, dim=rows)
