"""A checkpoint folder with quantised experts -> `QuantizedWeights`, one layer after another."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moelora import QuantizedWeights
from moelora.files import file_in, read_json
from moelora.integrations.transformers.projection import sizes, up_name
from moelora.integrations.transformers.schemes import SCHEMES, Scheme, block_size
from moelora.quantized_fp8 import FP8_SCALES, Activations, GateUp

if TYPE_CHECKING:
    from moelora.integrations.transformers.projection import Experts

SINGLE_SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
SINGLE, INDEX = f"model{SINGLE_SUFFIX}", f"model{INDEX_SUFFIX}"
# Tensors of experts, wherever they are: one for all of them, or one for each.
OF_EXPERTS = re.compile(r"\.experts\.(\d+\.|\w+_(blocks|scales)$)")

SCALES = (".weight_scale_inv", ".weight_scale", ".input_scale")  # of FP8


class Folder:
    """The tensors of a folder's safetensors files, each read when it is asked for.

    Attributes
    ----------
    quantization : dict
        `quantization_config` of config.json.
    unread : set of str
        Names that nobody has asked for yet.
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
        self._files: dict[str, tuple[Path, Any]] = {}  # where each tensor is
        for name in self._weight_files(config.get("transformers_weights")):
            shard = self.path / name
            try:
                file: Any = safe_open(shard, framework="pt")  # which has no types
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{shard} cannot be read: {error}") from None
            self._files.update(dict.fromkeys(file.keys(), (shard, file)))
        self.unread = set(self._files)

    def _weight_files(self, named: Any) -> list[str]:
        """The files that transformers would load; others are not looked at.

        What config.json names, else one file before an index; then all of an index's files, in the
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
        except (SafetensorError, AttributeError, KeyError) as error:  # dtypes that torch has not
            raise ValueError(f"{shard}: {name} cannot be read: {error}") from None
        return tensor

    def plain(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """All but the experts. Of FP8 weights the numbers, rounded to `dtype`."""
        names = [name for name in self if not OF_EXPERTS.search(name)]
        tensors = {name: self[name] for name in names if not name.endswith(SCALES)}
        for name, tensor in tensors.items():
            if tensor.dtype == torch.float8_e4m3fn and name.endswith(".weight"):
                tensors[name] = self._dequantised(name.removesuffix(".weight"), tensor, dtype)
        return tensors

    def _dequantised(self, linear: str, weight: Tensor, dtype: torch.dtype) -> Tensor:
        where = f"{self._files[f'{linear}.weight'][0]}: {linear}"
        if weight.dim() != 2:
            raise ValueError(f"{where}.weight has shape {tuple(weight.shape)}, wanted a matrix")
        by_blocks = f"{linear}.weight_scale_inv" in self
        own = "weight_scale_inv" if by_blocks else "weight_scale"
        scale = self[f"{linear}.{own}"]
        if scale.dtype not in FP8_SCALES:
            raise ValueError(f"{where}.{own} has dtype {scale.dtype}, wanted float32 or shorter")
        shape = (weight.size(0), 1)
        if by_blocks:
            rows, columns = self._block(f"{linear}.{own}")
            shape = (-(-weight.size(0) // rows), -(-weight.size(1) // columns))
        if tuple(scale.shape) != shape and (by_blocks or scale.numel() != 1):
            also = "" if by_blocks else ", or one"
            raise ValueError(f"{where}.{own} has shape {tuple(scale.shape)}, wanted {shape}{also}")
        factors = scale.float()
        if by_blocks:  # of the size of the weight, whatever that of a block is
            factors = factors[torch.arange(weight.size(0)) // rows]
            factors = factors[:, torch.arange(weight.size(1)) // columns]
        numbers = weight.float().mul_(factors).to(dtype)
        if not numbers.isfinite().all():
            if not scale.float().isfinite().all():
                raise ValueError(f"{where}.{own} has a scale that is NaN or infinite")
            what = "has a NaN" if weight.float().isnan().any() else f"is beyond {dtype}"
            raise ValueError(f"{where}.weight {what}, wanted numbers")
        return numbers

    def _block(self, scales: str) -> tuple[int, int]:
        """Rows and columns of a block; a size beyond that of every weight is one of whole ones."""
        sides = self.quantization.get("weight_block_size")
        if not sides:
            raise ValueError(f"{self.path} has no weight_block_size, which {scales} wants")
        rows, columns = block_size(sides)
        return rows, columns


def read_experts(
    folder: Folder,
    layer: str,
    experts: Experts,
    dtype: torch.dtype,
    activations: Activations | None = None,
) -> tuple[QuantizedWeights, QuantizedWeights]:
    """Both projections of one experts module, called `layer` in the checkpoint.

    Holds the tiles, one projection's tensors as the checkpoint has them (gate and up joined), and
    one expert on its way: no weight is dequantised.

    Raises
    ------
    ValueError
        A tensor is missing, one is there that nothing is known to do with, or one is not what the
        model or the format wants. The message names it.
    NotImplementedError
        Another quantisation method, or settings that are not supported.
    """
    try:
        return _read_experts(folder, layer, experts, dtype, activations)
    except ValueError as error:
        raise ValueError(f"{folder.path}: {error}") from None


def _read_experts(
    folder: Folder,
    layer: str,
    experts: Experts,
    dtype: torch.dtype,
    activations: Activations | None,
) -> tuple[QuantizedWeights, QuantizedWeights]:
    method = folder.quantization.get("quant_method")
    interleaved = experts.has_gate and not getattr(experts, "is_concatenated", True)
    gate_up: GateUp | None = None
    if experts.has_gate:
        gate_up = "interleaved" if interleaved else "concatenated"
    up, down = sizes(experts)
    if method == "mxfp4":
        if activations is not None:
            raise ValueError(f"activations is {activations!r}, wanted None: weights are MXFP4")
        found = (
            _stacked(folder, f"{layer}.{up_name(experts)}", up, gate_up, dtype),
            _stacked(folder, f"{layer}.down_proj", down, None, dtype),
        )
    elif isinstance(method, str) and method in SCHEMES:
        if interleaved:
            raise NotImplementedError(f"{layer}: {method} of rows of gate and up in turns")
        scheme = SCHEMES[method](folder.quantization).taking(activations)
        names = ("gate_proj", "up_proj") if experts.has_gate else ("up_proj",)
        found = (
            _per_expert(folder, layer, names, up, scheme, gate_up, dtype),
            _per_expert(folder, layer, ("down_proj",), down, scheme, None, dtype),
        )
    else:
        known = ", ".join(["mxfp4", *SCHEMES])
        raise NotImplementedError(f"{folder.path}: quant_method is {method!r:.80}, wanted {known}")
    for name in sorted(n for n in folder.unread if n.startswith(f"{layer}.")):
        if name.removeprefix(f"{layer}.") in experts._parameters:
            continue  # a bias of all experts
        if name.endswith(".bias") and not folder[name].float().any():
            continue  # of linear layers without one, as older GPTQ checkpoints have them
        raise ValueError(f"{name} is no tensor that {method} has in experts like these")
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


def _per_expert(
    folder: Folder,
    layer: str,
    names: Sequence[str],
    shape: torch.Size,
    scheme: Scheme,
    gate_up: GateUp | None,
    dtype: torch.dtype,
) -> QuantizedWeights:
    found = {}
    for part in dict.fromkeys((*scheme.required, *scheme.optional)):
        if part in scheme.required or f"{layer}.0.{names[0]}.{part}" in folder:
            rows = ([f"{layer}.{e}.{name}.{part}" for name in names] for e in range(shape[0]))
            found[part] = [_joined(folder, row, scheme.rows) for row in rows]
    where = f"{layer}.*.{' and '.join(names)}"
    weights = scheme.pack(where, found, gate_up, dtype)
    if weights.shape != shape:
        raise ValueError(f"{where} has shape {tuple(weights.shape)}, wanted {tuple(shape)}")
    return weights


def _joined(folder: Folder, names: Sequence[str], rows: int) -> Tensor:
    """What gate and up have as two tensors as that of one weight, up's rows behind gate's."""
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
    if names[0].endswith(SCALES) and first.numel() == 1:  # of a whole tensor each
        return torch.stack([tensor.reshape(()) for tensor in tensors])
    if first.dim() == 1:  # g_idx: of columns, which they share
        for name, tensor in zip(names, tensors, strict=True):
            if not torch.equal(tensor, first):
                raise ValueError(f"{name} is in another order (desc_act), wanted {names[0]}'s")
        return first
    if first.dim() != 2:
        raise ValueError(f"{names[0]} has shape {tuple(first.shape)}, wanted a matrix")
    return torch.cat(tensors, dim=rows)
