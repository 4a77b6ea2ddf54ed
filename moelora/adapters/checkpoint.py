"""PEFT checkpoints of MoE adapters, brought to one form: per layer and projection one pair (A, B).

Key forms, after an optional `base_model.model.` and the path of the layer's experts:

    .3.gate_proj.lora_A.weight        one pair per expert, A (r, in), B (out, r); Mixtral's names
                                      w1 = gate, w3 = up, w2 = down are the same
    .gate_proj.lora_A.weight          all experts stacked, A (E or 1, r, in), B (E or 1, out, r);
                                      1, or a plain matrix, is one factor shared by all experts
                                      ("shared outer" LoRA shares A of gate and up and B of down);
                                      also gate_up_proj, with one A and B of 2I rows
    [.base_layer]*.lora_A.weight      PEFT's `target_parameters`: A (E*r, in) with row e*r + k,
                                      B (out, r*E) with column k*E + e (the expert varies fastest!)

The last form does not name its parameter: PEFT nests one wrapper per targeted parameter, in the
order in which the module registers them, so that the first is the innermost and has the most
`base_layer`. Which parameters are targeted, adapter_config.json says.

Old versions of PEFT stored that form with in and out exchanged: A (E*r, out) and B (in, r*E) with
delta^T = B A. Shapes tell wherever in and out differ; one checkpoint has one layout, so that one
factor decides for all. Where every factor is square, as for gate_up_proj alone with 2I = K, the
version in adapter_config.json decides, and without one the checkpoint is refused.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from moelora.adapters.config import LoraConfig
from moelora.files import file_in

WEIGHTS_FILE = "adapter_model.safetensors"

Projection: TypeAlias = Literal["gate", "up", "gate_up", "down"]

_PREFIX = "base_model.model."
_KEY = re.compile(r"(?P<path>.+)\.lora_(?P<side>[AB])\.weight")
_BELOW = 2  # names of a key below its layer, at most
_WRAPPED = re.compile(r"(\.base_layer)*")
_PROJECTION = re.compile(r"(\.(?P<expert>0|[1-9][0-9]{0,8}))?\.(?P<name>[a-z0-9_]+)")
_PROJECTIONS: dict[str, Projection] = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "gate_up_proj": "gate_up",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
}

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # of safetensors


@dataclass(frozen=True)
class MoELayer:
    """What the adapters of one MoE layer must fit.

    `name` is the module path of the experts, e.g. `model.layers.0.mlp.experts`. `interleaved` says
    that rows of w13 alternate between gate and up (gpt-oss) instead of gate rows then up rows.
    `transposed` says that the model keeps its parameters as (E, in, out), as those with interleaved
    rows do; it matters for square factors of old versions of PEFT alone.
    """

    name: str
    num_experts: int
    hidden_size: int
    intermediate_size: int
    gated: bool = True
    interleaved: bool = False
    transposed: bool = False

    def shape(self, projection: Projection) -> tuple[int, int]:
        """(in, out) of a projection."""
        k, i = self.hidden_size, self.intermediate_size
        return {"gate": (k, i), "up": (k, i), "gate_up": (k, 2 * i), "down": (i, k)}[projection]

    @property
    def parameters(self) -> tuple[str, str]:
        """The 3D parameters of the experts, in the order of registration."""
        return ("gate_up_proj" if self.gated else "up_proj", "down_proj")


@dataclass
class Pair:
    """The factors of one projection: A (E or 1, r, in), B (E or 1, out, r), scaling per expert."""

    a: torch.Tensor
    b: torch.Tensor
    scalings: list[float]  # one per expert, or one for all

    @property
    def rank(self) -> int:
        return self.a.size(1)


@dataclass(frozen=True)
class AdapterInfo:
    """What can be said of a checkpoint without reading its tensors."""

    max_rank: int  # of the factors that are there
    fused: bool  # gate and up share one A
    shared_outer: bool  # A of gate and up and B of down are shared by all experts


@dataclass(frozen=True)
class _Place:
    """Where a key belongs."""

    layer: MoELayer
    projection: Projection
    side: str  # A or B
    expert: int | None
    wrapped: bool
    path: str  # what rank_pattern and alpha_pattern are matched against

    def shapes(self, rank: int) -> list[tuple[int, ...]]:
        """Of a factor, in the forms that it may have; those of `target_parameters` apart."""
        wide, tall = self.layer.shape(self.projection)
        matrix = (rank, wide) if self.side == "A" else (tall, rank)
        if self.expert is not None:
            return [matrix]
        return [(self.layer.num_experts, *matrix), (1, *matrix), matrix]

    def wrapped_shape(self, rank: int, exchanged: bool) -> tuple[int, int]:
        """Of a factor of `target_parameters`."""
        sizes = self.layer.shape(self.projection)
        wide, tall = reversed(sizes) if exchanged else sizes
        stacked = self.layer.num_experts * rank
        return (stacked, wide) if self.side == "A" else (tall, stacked)


@dataclass(frozen=True)
class _Factor:
    """One tensor of a checkpoint, not read yet, and what the configuration says about it."""

    key: str
    place: _Place
    shape: tuple[int, ...]
    dtype: torch.dtype
    rank: int
    scaling: float
    exchanged: bool  # in and out, of target_parameters

    @property
    def side(self) -> str:
        """Which factor of the product it is, whatever PEFT called it."""
        return {"A": "B", "B": "A"}[self.place.side] if self.exchanged else self.place.side


@dataclass
class _Sides:
    """What was found for one projection, by expert; None stands for all experts at once."""

    a: dict[int | None, _Factor] = field(default_factory=dict)
    b: dict[int | None, _Factor] = field(default_factory=dict)


class _File:
    """The tensors of an open safetensors file."""

    def __init__(self, file: Any):
        self._file = file

    def keys(self) -> list[str]:
        keys: list[str] = self._file.keys()
        return keys

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(key).get_shape())

    def dtype(self, key: str) -> torch.dtype | str:
        name = self._file.get_slice(key).get_dtype()
        return _DTYPES.get(name, name)

    def tensor(self, key: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file.get_tensor(key)
        return tensor


class _State:
    """Those of a state dict."""

    def __init__(self, state: Mapping[str, torch.Tensor]):
        for key, tensor in state.items():
            if not isinstance(key, str):
                raise ValueError(f"key {key!r} of the state dict is a {type(key).__name__}")
            if not isinstance(tensor, torch.Tensor):
                raise ValueError(f"{key} is a {type(tensor).__name__}, wanted a tensor")
            if tensor.layout is not torch.strided or tensor.is_meta:
                raise ValueError(f"{key} is a sparse or a meta tensor, wanted a plain one")
        self._state = state

    def keys(self) -> list[str]:
        return list(self._state)

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._state[key].shape)

    def dtype(self, key: str) -> torch.dtype:
        return self._state[key].dtype

    def tensor(self, key: str) -> torch.Tensor:
        return self._state[key].detach().cpu()


_Tensors: TypeAlias = _File | _State


@contextmanager
def open_weights(folder: Path) -> Iterator[_File]:
    """The tensors of a checkpoint."""
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError:
        raise ImportError("reading adapters needs safetensors: pip install safetensors") from None
    path = file_in(folder, WEIGHTS_FILE)
    if not path.is_file():
        hint = ""
        if (folder / "adapter_model.bin").exists():
            hint = "; adapter_model.bin is a pickle and is never loaded, convert it to safetensors"
        raise FileNotFoundError(f"{folder} holds no {WEIGHTS_FILE}{hint}")
    try:
        with safe_open(path, framework="pt", device="cpu") as weights:
            yield _File(weights)
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def load(
    source: str | Path | Mapping[str, torch.Tensor],
    config: Mapping[str, Any] | None,
    layers: Sequence[MoELayer],
    max_rank: int,
) -> dict[str, dict[str, Pair]]:
    """Reads and checks a whole adapter: layer name -> projection -> pair.

    Ranks are padded to the largest of a projection; a factor of more than `max_rank` is refused
    before any tensor is read.
    """
    if isinstance(source, Mapping):
        if config is None:
            raise ValueError("a state dict needs config=, the content of adapter_config.json")
        return _read(_State(source), LoraConfig.parse(config), layers, max_rank)
    if config is not None:
        raise ValueError("config= is for state dicts; a folder has its own adapter_config.json")
    folder = _folder(source)
    lora = LoraConfig.read(folder)
    with open_weights(folder) as weights:
        return _read(weights, lora, layers, max_rank)


def peek(folder: str | Path, layers: Sequence[MoELayer]) -> AdapterInfo:
    """Reads the configuration and the header of a checkpoint, enough to size a pool for it."""
    folder = _folder(folder)
    lora = LoraConfig.read(folder)
    fused, shared, rank = True, True, 0
    with open_weights(folder) as weights:
        for factor in _survey(weights, lora, layers):
            place, shape = factor.place, factor.shape
            rank = max(rank, factor.rank)
            if place.projection in ("gate", "up"):
                fused = fused and not place.layer.gated
            if (place.side == "A") != (place.projection == "down"):
                alone = len(shape) == 2 or shape[0] == 1
                shared = shared and place.expert is None and not place.wrapped and alone
    return AdapterInfo(rank, fused, shared)


def _folder(source: str | Path) -> Path:
    folder = Path(source)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder")
    return folder


def _layer_names(layers: Sequence[MoELayer]) -> dict[str, MoELayer]:
    """Layers by module path; Mixtral's experts moved from `block_sparse_moe` to `mlp`."""
    names = {layer.name: layer for layer in layers}
    for layer in layers:
        old = re.sub(r"\.mlp\.experts$", ".block_sparse_moe.experts", layer.name)
        names.setdefault(old, layer)
    return names


def _locate(key: str, names: Mapping[str, MoELayer], lora: LoraConfig) -> _Place:
    """Where `key` belongs; ValueError if moelora does not know."""
    match = _KEY.fullmatch(key.removeprefix(_PREFIX))
    path = match["path"] if match else ""
    name = path
    for _ in range(_BELOW):
        if name not in names:
            name = name.rpartition(".")[0]
    if match is None or name not in names:
        raise ValueError(
            f"{key:.200} is not a LoRA factor of an expert; the experts of this pool are "
            f"{next(iter(names))}, ..."
        )
    layer, rest, side = names[name], path[len(name) :], match["side"]

    if _WRAPPED.fullmatch(rest):
        targeted = [p for p in layer.parameters if lora.targets_parameter(f"{layer.name}.{p}")]
        if not lora.target_parameters:
            targeted = list(layer.parameters)
        depth = rest.count(".base_layer")
        if depth >= len(targeted):
            raise ValueError(
                f"{key} wraps parameter {depth + 1} of {layer.name}, but target_parameters "
                f"{reprlib.repr(sorted(lora.target_parameters))} name {len(targeted)} of "
                f"{list(layer.parameters)}"
            )
        parameter = targeted[len(targeted) - 1 - depth]
        projection = _PROJECTIONS[parameter]
        return _Place(layer, projection, side, None, True, f"{layer.name}.{parameter}")

    match = _PROJECTION.fullmatch(rest)
    projection = _PROJECTIONS.get(match["name"]) if match else None
    ungated = not layer.gated and projection in ("gate", "gate_up")
    if match is None or projection is None or ungated:
        wanted = sorted(_PROJECTIONS) if layer.gated else ["up_proj", "down_proj"]
        raise ValueError(f"{key}: {rest.lstrip('.')} of {layer.name} is not one of {wanted}")
    expert = None if match["expert"] is None else int(match["expert"])
    if expert is not None and expert >= layer.num_experts:
        raise ValueError(f"{key}: expert {expert} of {layer.num_experts} experts")
    return _Place(layer, projection, side, expert, False, path)


def _survey(weights: _Tensors, lora: LoraConfig, layers: Sequence[MoELayer]) -> list[_Factor]:
    """All factors of a checkpoint, with their shapes and dtypes checked, before any is read."""
    names = _layer_names(layers)
    places = {key: _locate(key, names, lora) for key in sorted(weights.keys())}
    shapes = {key: weights.shape(key) for key in places}
    wrapped = {key: shapes[key] for key, place in places.items() if place.wrapped}
    exchanged = bool(wrapped) and _exchanged(wrapped, places, lora)
    factors = []
    for key, place in places.items():
        dtype = weights.dtype(key)
        if not isinstance(dtype, torch.dtype) or dtype not in _DTYPES.values():
            raise ValueError(f"{key}: dtype is {dtype}, wanted float32, bfloat16 or float16")
        rank, scaling = lora.rank_and_scaling(place.path)
        shape = shapes[key]
        forms = place.shapes(rank)
        if not place.wrapped and shape not in forms:
            text = " or ".join(str(form) for form in dict.fromkeys(forms))
            raise ValueError(f"{key}: shape is {shape}, wanted {text}")
        exchange = place.wrapped and exchanged
        factors.append(_Factor(key, place, shape, dtype, rank, scaling, exchange))
    if not factors:
        raise ValueError("the checkpoint holds no tensors")
    return factors


def _read(
    weights: _Tensors, lora: LoraConfig, layers: Sequence[MoELayer], max_rank: int
) -> dict[str, dict[str, Pair]]:
    found: dict[tuple[str, str], _Sides] = {}
    for factor in _survey(weights, lora, layers):
        place = factor.place
        check_rank(factor.key, factor.rank, max_rank)
        sides = found.setdefault((place.layer.name, place.projection), _Sides())
        side = sides.a if factor.side == "A" else sides.b
        taken = side.get(place.expert)
        if taken is None and (place.expert is None) != (None in side) and side:
            taken = next(iter(side.values()))
        if taken is not None:
            raise ValueError(f"{factor.key} and {taken.key} are the same factor")
        side[place.expert] = factor
    for (name, projection), sides in found.items():
        if projection == "gate_up" and {(name, "gate"), (name, "up")} & found.keys():
            key = next(iter([*sides.a.values(), *sides.b.values()])).key
            raise ValueError(f"{key}: {name} has factors of gate_up_proj and of gate or up alone")
    adapter: dict[str, dict[str, Pair]] = {}
    for (name, projection), sides in found.items():
        adapter.setdefault(name, {})[projection] = _pair(sides, weights)
    return adapter


def check_rank(what: str, rank: int, max_rank: int) -> None:
    """Padding to all experts and slots takes memory by the rank: so it is looked at before."""
    if rank > max_rank:
        raise ValueError(f"{what} has rank {rank}, but max_rank of the pool is {max_rank}")


def _exchanged(
    shapes: Mapping[str, tuple[int, ...]], places: Mapping[str, _Place], lora: LoraConfig
) -> bool:
    """Whether the factors of `target_parameters` have in and out exchanged, all or none."""
    layouts = {False, True}
    for key, shape in shapes.items():
        rank, _ = lora.rank_and_scaling(places[key].path)
        wanted = {layout: places[key].wrapped_shape(rank, layout) for layout in sorted(layouts)}
        layouts = {layout for layout in wanted if wanted[layout] == shape}
        if not layouts:
            forms = " or ".join(str(form) for form in dict.fromkeys(wanted.values()))
            raise ValueError(f"{key}: shape is {shape}, wanted {forms}")
    if len(layouts) == 1:
        return layouts.pop()
    key = next(iter(shapes))
    layer = places[key].layer
    exchanged = lora.exchanges_in_and_out(layer.transposed or layer.interleaved)
    if exchanged is None:
        raise ValueError(
            f"{key}: the shape {shapes[key]} fits both layouts that PEFT has had for "
            f"target_parameters, and peft_version {lora.peft_version!r:.60} does not tell which; "
            "set it to the release that wrote them (from 0.19.1 on A is over the inputs)"
        )
    return exchanged


def _tensor(factor: _Factor, weights: _Tensors) -> torch.Tensor:
    """Reads a factor and gives it the shape (E or 1, r, in) or (E or 1, out, r)."""
    place, tensor = factor.place, weights.tensor(factor.key)
    if not torch.isfinite(tensor).all():
        raise ValueError(f"{factor.key} holds NaN or Inf")
    experts = place.layer.num_experts
    if place.wrapped and place.side == "A":
        tensor = tensor.reshape(experts, factor.rank, -1)
    elif place.wrapped:
        tensor = tensor.reshape(-1, factor.rank, experts).permute(2, 0, 1)
    elif tensor.dim() == 2:
        tensor = tensor.unsqueeze(0)
    return tensor.transpose(1, 2) if factor.exchanged else tensor


def _partner(key: str) -> str:
    """The key of the other factor of a pair."""
    end = len("A.weight")
    return key[:-end] + {"A": "B", "B": "A"}[key[-end]] + ".weight"


def _pair(sides: _Sides, weights: _Tensors) -> Pair:
    """Joins the factors of one projection; experts that the adapter leaves out become zero."""
    every = [*sides.a.values(), *sides.b.values()]
    layer = every[0].place.layer
    for here, there in ((sides.a, sides.b), (sides.b, sides.a)):
        for expert, factor in here.items():
            if expert in there or (there and (expert is None or None in there)):
                continue
            raise ValueError(f"{factor.key} has no {_partner(factor.key)}")

    a, b = sides.a, sides.b
    experts = sorted(e for e in {*a, *b} if e is not None)
    for expert in experts or (None,):
        left, right = a.get(expert) or a[None], b.get(expert) or b[None]
        if left.rank != right.rank:
            raise ValueError(f"{left.key} has rank {left.rank}, {right.key} has rank {right.rank}")
    if experts:
        scalings = [0.0] * layer.num_experts
        for expert in experts:
            # Where one side is shared, its own path has no expert in it; the other one decides.
            scalings[expert] = (a.get(expert) or b[expert]).scaling
        used = {scalings[e] for e in experts}
        if len(used) == 1:
            scalings = [used.pop()]
    else:
        scalings = [a[None].scaling]
    rank = max(f.rank for f in every)
    dtype = every[0].dtype
    if any(factor.dtype != dtype for factor in every):
        dtype = torch.float32

    def stacked(factors: dict[int | None, _Factor], rank_dim: int) -> torch.Tensor:
        """One tensor (E or 1, ...) of all experts, ranks padded with zeros to the largest."""
        if None in factors:
            return _tensor(factors[None], weights).to(dtype)
        stack = torch.empty(0)
        for expert, factor in factors.items():
            tensor = _tensor(factor, weights)[0]
            if not stack.numel():
                shape = [layer.num_experts, *tensor.shape]
                shape[rank_dim] = rank
                stack = torch.zeros(shape, dtype=dtype)
            stack[expert].narrow(rank_dim - 1, 0, factor.rank).copy_(tensor)
        return stack

    return Pair(stacked(a, 1), stacked(b, 2), scalings)
