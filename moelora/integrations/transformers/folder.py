"""A checkpoint folder with quantised experts -> `QuantizedWeights`, one layer after another."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor

from moelora import QuantizedWeights
from moelora.integrations.transformers.projection import sizes, up_name
from moelora.integrations.transformers.schemes import SCHEMES, Scheme
from moelora.quantized_fp8 import Activations, GateUp

if TYPE_CHECKING:
    from moelora.integrations.transformers.projection import Experts

INDEX = "model.safetensors.index.json"
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
        config = self.path / "config.json"
        if not config.is_file():
            raise ValueError(f"{self.path} has no config.json, wanted the folder of a checkpoint")
        self.quantization = json.loads(config.read_text()).get("quantization_config") or {}
        index = self.path / INDEX
        if index.is_file():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        else:
            names = sorted(file.name for file in self.path.glob("*.safetensors"))
        if not names:
            raise ValueError(f"{self.path} has no safetensors files, wanted at least one")
        self._files: dict[str, Any] = {}  # where each tensor is
        for name in names:
            if not (self.path / name).is_file():
                raise ValueError(f"{self.path} has no file {name}, which its {INDEX} names")
            file: Any = safe_open(self.path / name, framework="pt")  # which has no types
            self._files.update(dict.fromkeys(file.keys(), file))
        self.unread = set(self._files)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._files:
            raise ValueError(f"{self.path} has no tensor {name}, which the model wants")
        self.unread.discard(name)
        return self._files[name].get_tensor(name)

    def plain(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """All but the experts. Of FP8 weights the numbers, rounded to `dtype`."""
        names = [name for name in self if not OF_EXPERTS.search(name)]
        tensors = {name: self[name] for name in names if not name.endswith(SCALES)}
        for name, tensor in tensors.items():
            if tensor.dtype == torch.float8_e4m3fn and name.endswith(".weight"):
                tensors[name] = self._dequantised(name.removesuffix(".weight"), tensor, dtype)
        return tensors

    def _dequantised(self, linear: str, weight: Tensor, dtype: torch.dtype) -> Tensor:
        blocks, plain = f"{linear}.weight_scale_inv", f"{linear}.weight_scale"
        if blocks not in self:
            scale = self[plain]
            wanted = (weight.size(0), 1)
            if scale.numel() != 1 and tuple(scale.shape) != wanted:
                raise ValueError(f"{plain} has shape {tuple(scale.shape)}, wanted {wanted}, or one")
            return (weight.float() * scale.float()).to(dtype)
        scale, sides = self[blocks], self.quantization.get("weight_block_size")
        if not sides:
            raise ValueError(f"{self.path} has no weight_block_size, which {blocks} wants")
        wanted = tuple(-(-size // side) for size, side in zip(weight.shape, sides, strict=True))
        if tuple(scale.shape) != wanted:
            raise ValueError(f"{blocks} has shape {tuple(scale.shape)}, wanted {wanted}")
        spread = scale.float().repeat_interleave(sides[0], 0).repeat_interleave(sides[1], 1)
        return (weight.float() * spread[: weight.size(0), : weight.size(1)]).to(dtype)


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
    elif method in SCHEMES:
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
        raise NotImplementedError(f"{folder.path}: quant_method is {method!r}, wanted {known}")
    for name in sorted(n for n in folder.unread if n.startswith(f"{layer}.")):
        if name.removeprefix(f"{layer}.") in experts._parameters:
            continue  # a bias of all experts
        if name.endswith(".bias") and not folder[name].any():
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
    if names[0].endswith(".weight_shape"):
        return torch.stack([sum((t[0] for t in tensors[1:]), first[0]), first[1]])
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.dtype != first.dtype or tensor.shape != first.shape:
            got, wanted = (f"{tuple(t.shape)} of {t.dtype}" for t in (tensor, first))
            raise ValueError(f"{name} is {got}, wanted {wanted} as {names[0]}")
    if names[0].endswith(SCALES) and first.numel() == 1:  # of a whole tensor each
        return torch.stack([tensor.reshape(()) for tensor in tensors])
    if first.dim() == 1:  # g_idx: of columns, which they share
        for name, tensor in zip(names, tensors, strict=True):
            if not torch.equal(tensor, first):
                raise ValueError(f"{name} is in another order (desc_act), wanted {names[0]}'s")
        return first
    return torch.cat(tensors, dim=rows)
