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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from moelora.adapters.config import LoraConfig
from moelora.adapters.layers import (
    Adapter,
    AdapterInfo,
    LinearLayer,
    LinearPair,
    MoELayer,
    Pair,
    Projection,
)

WEIGHTS_FILE = "adapter_model.safetensors"

_PREFIX = "base_model.model."
_KEY = re.compile(r"(?P<path>.+)\.lora_(?P<side>[AB])\.weight")
_LINEAR_KEY = re.compile(r"(?P<path>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(\.weight)?")
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


@dataclass
class _Factor:
    """One tensor of a checkpoint and what its place in the configuration says about it."""

    key: str
    tensor: torch.Tensor
    rank: int
    scaling: float


@dataclass
class _Sides:
    """What was found for one projection, by expert; None stands for all experts at once."""

    a: dict[int | None, _Factor] = field(default_factory=dict)
    b: dict[int | None, _Factor] = field(default_factory=dict)


@dataclass(frozen=True)
class _Place:
    """Where a key belongs."""

    layer: MoELayer
    projection: Projection
    side: str  # A or B
    expert: int | None
    wrapped: bool
    path: str  # what rank_pattern and alpha_pattern are matched against

    def wrapped_shape(self, rank: int, exchanged: bool) -> tuple[int, int]:
        """Of a factor of `target_parameters`."""
        sizes = self.layer.shape(self.projection)
        wide, tall = reversed(sizes) if exchanged else sizes
        stacked = self.layer.num_experts * rank
        return (stacked, wide) if self.side == "A" else (tall, stacked)


@contextmanager
def open_weights(folder: Path) -> Iterator[Any]:
    """The tensors of a checkpoint, as an object with `keys()` and `get_tensor(key)`."""
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError:
        raise ImportError("reading adapters needs safetensors: pip install safetensors") from None
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        hint = ""
        if (folder / "adapter_model.bin").exists():
            hint = "; adapter_model.bin is a pickle and is never loaded, convert it to safetensors"
        raise FileNotFoundError(f"{folder} holds no {WEIGHTS_FILE}{hint}")
    try:
        with safe_open(path, framework="pt", device="cpu") as weights:
            yield weights
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


class _State:
    """A state dict with the interface of an open safetensors file."""

    def __init__(self, state: Mapping[str, torch.Tensor]):
        for key in state:
            if not isinstance(key, str):
                raise ValueError(f"key {key!r} of the state dict is a {type(key).__name__}")
        self._state = state

    def keys(self) -> Sequence[str]:
        return list(self._state)

    def get_tensor(self, key: str) -> torch.Tensor:
        tensor = self._state[key]
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{key} is a {type(tensor).__name__}, wanted a tensor")
        if tensor.layout is not torch.strided or tensor.is_meta:
            raise ValueError(f"{key} is a sparse or a meta tensor, wanted a plain one")
        return tensor.detach().cpu()


def load(
    source: str | Path | Mapping[str, torch.Tensor],
    config: Mapping[str, Any] | None,
    layers: Sequence[MoELayer],
    linears: Sequence[LinearLayer] = (),
) -> Adapter:
    """Reads and checks a whole adapter of a model with these layers.

    A factor of anything else is refused by name, so that nothing of an adapter is ever dropped.
    """
    if isinstance(source, Mapping):
        if config is None:
            raise ValueError("a state dict needs config=, the content of adapter_config.json")
        return _read(_State(source), LoraConfig.parse(config), layers, linears)
    if config is not None:
        raise ValueError("config= is for state dicts; a folder has its own adapter_config.json")
    folder = _folder(source)
    lora = LoraConfig.read(folder)
    with open_weights(folder) as weights:
        return _read(weights, lora, layers, linears)


def peek(
    folder: str | Path, layers: Sequence[MoELayer], linears: Sequence[LinearLayer] = ()
) -> AdapterInfo:
    """Reads the configuration and the header of a checkpoint, enough to size a pool for it."""
    folder = _folder(folder)
    lora = LoraConfig.read(folder)
    fused, shared, rank = True, True, 0
    ranks = {}
    with open_weights(folder) as weights:
        names, plain = _layer_names(layers), {linear.name: linear for linear in linears}
        for key in weights.keys():  # noqa: SIM118, not a dict
            if (linear := _linear(key, plain)) is not None:
                ranks[linear[0].name], _ = lora.rank_and_scaling(linear[0].name)
                continue
            place = _locate(key, names, lora)
            rank = max(rank, lora.rank_and_scaling(place.path)[0])
            if place.projection in ("gate", "up"):
                fused = fused and not place.layer.gated
            if (place.side == "A") != (place.projection == "down"):
                shape = weights.get_slice(key).get_shape()
                alone = len(shape) == 2 or shape[0] == 1
                shared = shared and place.expert is None and not place.wrapped and alone
    return AdapterInfo(rank, fused, shared, ranks)


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
                f"{list(lora.target_parameters)} name {len(targeted)} of {list(layer.parameters)}"
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


def _linear(key: str, linears: Mapping[str, LinearLayer]) -> tuple[LinearLayer, str] | None:
    """The linear layer or embedding that a key belongs to, and its side, A or B."""
    match = _LINEAR_KEY.fullmatch(key.removeprefix(_PREFIX))
    linear = linears.get(match["path"]) if match else None
    if match is None or linear is None or linear.embedding != (match["embedding"] is not None):
        return None
    return linear, match["side"]


def _read_linears(
    weights: Any, lora: LoraConfig, keys: Mapping[str, tuple[LinearLayer, str]]
) -> dict[str, LinearPair]:
    found: dict[str, dict[str, tuple[str, torch.Tensor]]] = {}
    pairs = {}
    for key, (linear, side) in keys.items():
        rank, _ = lora.rank_and_scaling(linear.name)
        tensor = weights.get_tensor(key)
        wanted = (rank, linear.in_features) if side == "A" else (linear.out_features, rank)
        _check_dtype(key, tensor)
        if tuple(tensor.shape) != wanted:
            raise ValueError(f"{key}: shape is {tuple(tensor.shape)}, wanted {wanted}")
        _check_finite(key, tensor)
        found.setdefault(linear.name, {})[side] = key, tensor
    for name, sides in found.items():
        if len(sides) < 2:
            (side, (key, _)) = next(iter(sides.items()))
            raise ValueError(f"{key} has no lora_{'B' if side == 'A' else 'A'} beside it")
        pairs[name] = LinearPair(sides["A"][1], sides["B"][1], lora.rank_and_scaling(name)[1])
    return pairs


def _check_dtype(key: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{key}: dtype is {tensor.dtype}, wanted float32, bfloat16 or float16")


def _check_finite(key: str, tensor: torch.Tensor) -> None:
    if not torch.isfinite(tensor).all():
        raise ValueError(f"{key} holds NaN or Inf")


def _read(
    weights: Any, lora: LoraConfig, layers: Sequence[MoELayer], linears: Sequence[LinearLayer]
) -> Adapter:
    names, plain = _layer_names(layers), {linear.name: linear for linear in linears}
    of_linears = {
        key: place for key in sorted(weights.keys()) if (place := _linear(key, plain)) is not None
    }
    pairs_of_linears = _read_linears(weights, lora, of_linears)
    found: dict[tuple[str, Projection], _Sides] = {}
    places: dict[tuple[str, Projection], MoELayer] = {}
    located = {
        key: _locate(key, names, lora) for key in sorted(weights.keys()) if key not in of_linears
    }
    tensors = {key: weights.get_tensor(key) for key in located}
    wrapped = {key: tuple(tensors[key].shape) for key, place in located.items() if place.wrapped}
    exchanged = bool(wrapped) and _exchanged(wrapped, located, lora)
    for key, place in located.items():
        factor = _factor(key, tensors.pop(key), place, lora, exchanged)
        index = (place.layer.name, place.projection)
        places[index] = place.layer
        sides = found.setdefault(index, _Sides())
        side = sides.a if (place.side == "A") != (place.wrapped and exchanged) else sides.b
        taken = side.get(place.expert)
        if taken is None and (place.expert is None) != (None in side) and side:
            taken = next(iter(side.values()))
        if taken is not None:
            raise ValueError(f"{key} and {taken.key} are the same factor")
        side[place.expert] = factor
    if not found and not pairs_of_linears:
        raise ValueError("the checkpoint holds no tensors")

    adapter: dict[str, dict[Projection, Pair]] = {}
    for (name, projection), sides in found.items():
        pairs = adapter.setdefault(name, {})
        pairs[projection] = _pair(sides, places[name, projection])
    for (name, projection), sides in found.items():
        if projection == "gate_up" and {"gate", "up"} & adapter[name].keys():
            key = next(iter(sides.a.values())).key
            raise ValueError(f"{key}: {name} has factors of gate_up_proj and of gate or up alone")
    return Adapter(adapter, pairs_of_linears)


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


def _factor(
    key: str, tensor: torch.Tensor, place: _Place, lora: LoraConfig, exchanged: bool
) -> _Factor:
    """Checks one tensor and gives it the shape (E or 1, r, in) or (E or 1, out, r)."""
    rank, scaling = lora.rank_and_scaling(place.path)
    experts = place.layer.num_experts
    wide, tall = place.layer.shape(place.projection)
    _check_dtype(key, tensor)
    matrix = (rank, wide) if place.side == "A" else (tall, rank)
    if place.expert is not None:
        wanted = [matrix]
    else:
        wanted = [(experts, *matrix), (1, *matrix), matrix]
    if not place.wrapped and tuple(tensor.shape) not in wanted:
        forms = " or ".join(str(w) for w in dict.fromkeys(wanted))
        raise ValueError(f"{key}: shape is {tuple(tensor.shape)}, wanted {forms}")
    _check_finite(key, tensor)

    if place.wrapped and place.side == "A":
        tensor = tensor.reshape(experts, rank, -1)
    elif place.wrapped:
        tensor = tensor.reshape(-1, rank, experts).permute(2, 0, 1)
    elif tensor.dim() == 2:
        tensor = tensor.unsqueeze(0)
    if place.wrapped and exchanged:
        tensor = tensor.transpose(1, 2)
    return _Factor(key, tensor, rank, scaling)


def _partner(key: str) -> str:
    """The key of the other factor of a pair."""
    end = len("A.weight")
    return key[:-end] + {"A": "B", "B": "A"}[key[-end]] + ".weight"


def _pair(sides: _Sides, layer: MoELayer) -> Pair:
    """Joins the factors of one projection; experts that the adapter leaves out become zero."""
    every = [*sides.a.values(), *sides.b.values()]
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
    dtype = every[0].tensor.dtype
    if any(f.tensor.dtype != dtype for f in every):
        dtype = torch.float32
    return Pair(
        _stack(a, layer.num_experts, 1, rank, dtype),
        _stack(b, layer.num_experts, 2, rank, dtype),
        scalings,
    )


def _stack(
    factors: dict[int | None, _Factor], experts: int, rank_dim: int, rank: int, dtype: torch.dtype
) -> torch.Tensor:
    """One tensor (E or 1, ...) of all experts, ranks padded with zeros to the largest."""
    if None in factors:
        return factors[None].tensor.to(dtype)
    shape = list(next(iter(factors.values())).tensor.shape)
    shape[0], shape[rank_dim] = experts, rank
    stacked = torch.zeros(shape, dtype=dtype)
    for expert, factor in factors.items():
        stacked[expert].narrow(rank_dim - 1, 0, factor.rank).copy_(factor.tensor[0])
    return stacked
