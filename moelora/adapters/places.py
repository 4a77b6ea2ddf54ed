"""Map factors of an adapter to a model: experts and projections, linear layers.

Keys of experts, after the path of a layer's experts (`model.layers.0.mlp.experts`):

    .3.gate_proj                one pair for each expert, A (r, in), B (out, r); Mixtral's names
                                w1 = gate, w3 = up, w2 = down are the same
    .gate_up_projs.3            the same, as gpt-oss's experts are named for 4-bit training;
                                also gate_projs, up_projs, down_projs
    .gate_proj                  all experts stacked, A (E or 1, r, in), B (E or 1, out, r);
                                1, or a plain matrix, is one factor shared by all experts
                                ("shared outer" LoRA shares A of gate and up and B of down);
                                also gate_up_proj, with one A and B of 2I rows
    [.base_layer]*              PEFT's `target_parameters`, see `checkpoint`; also as modules
                                of their own: input_linear and output_linear beside the experts
                                (GraniteMoE), fc1 and fc2 below them (Aria); also of the block
                                around the experts, if the stacks are its own parameters

The block around the experts may have another name (`mlp`, `moe`, `feed_forward`), or be the decoder
layer itself (Gemma-4).

Keys of `target_parameters` do not name their parameter: PEFT nests one wrapper per targeted
parameter, in registration order, so that the first is the innermost and has the most `base_layer`.
adapter_config.json lists the targeted parameters.

If experts have no gate, w1 is their up projection (Tinker's Nemotron) and w3 is empty.

A linear layer of the model may be several layers in the trained one; the factors of these parts
then cover consecutive rows of it (`JOINED`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from moelora.adapters.config import LoraConfig
from moelora.adapters.keys import Key, canonical
from moelora.adapters.layers import LinearLayer, MoELayer, Projection

_BELOW = 3  # maximum number of segments of a key after its layer
_WRAPPED = re.compile(r"(\.base_layer)*")
_BLOCK = re.compile(r"\.(mlp|feed_forward|mixer)\.experts$")
_NUMBER = r"(?P<expert>0|[1-9][0-9]{0,8})"
_PROJECTION = re.compile(rf"(\.{_NUMBER})?\.(?P<name>[a-z0-9_]+)")
_LIST = re.compile(rf"\.(?P<name>[a-z_]+_proj)s\.{_NUMBER}")
_PROJECTIONS: dict[str, Projection] = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "gate_up_proj": "gate_up",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
}
_OF_UNGATED: dict[str, Projection] = {
    "up_proj": "up",
    "down_proj": "down",
    "w1": "up",
    "w2": "down",
}
PRUNED = "serve it with the model that it was trained on, not one with fewer experts (pruned)"
_WITHOUT = "take these factors out of the adapter, or train without (exclude_modules)"
# Parts of names of modules that no adapters are served for.
_ASIDE = {
    "a layer of multi-token prediction (MTP), which transformers does not load": ("mtp", "nextn"),
    "a vision or audio tower, where no adapters are served": ("visual", "vision", "audio"),
}
# Modules whose `weight` is an expert stack: next to a layer's experts, and among them.
_BESIDE: dict[str, Projection] = {"input_linear": "gate_up", "output_linear": "down"}
_AMONG: dict[str, Projection] = {"fc1": "gate_up", "fc2": "down"}

# Linear layers whose rows are those of several layers in other classes or releases: MiniMax-M3's
# MLPs, Qwen3.5's linear attention, and the start of Nemotron's Mamba projection.
JOINED = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkv": ("in_proj_q", "in_proj_k", "in_proj_v"),
    "in_proj": ("gate_proj", "x_proj"),
}
_PARTS = [
    (part, whole, number) for whole, parts in JOINED.items() for number, part in enumerate(parts)
]


@dataclass(frozen=True)
class ExpertPlace:
    """A factor of experts. `expert` is None for all experts at once; the layer may have fewer.

    `parameter` is the name of a parameter that PEFT has wrapped, otherwise None. `paths` are
    matched with the configuration's patterns, best first.
    """

    key: Key
    layer: MoELayer
    projection: Projection
    expert: int | None
    parameter: str | None
    paths: tuple[str, ...]

    @property
    def absent(self) -> bool:
        """Whether the layer lacks this projection, so that the factor must be empty."""
        return not self.layer.gated and self.projection in ("gate", "gate_up")

    def number_of_experts(self, shape: tuple[int, ...], rank: int) -> int:
        """The number of experts that a stack of this shape has factors of."""
        if self.parameter is None:
            return shape[0] if self.expert is None and len(shape) == 3 else self.layer.num_experts
        stacked = shape[0 if self.key.side == "A" else -1] if len(shape) == 2 else 1
        return stacked // rank if stacked % rank == 0 else self.layer.num_experts

    def hint(self, shape: tuple[int, ...], rank: int) -> str:
        """What to add to the refusal of a shape if it is one of more or fewer experts."""
        count = self.number_of_experts(shape, rank)
        if count in (1, self.layer.num_experts):
            return ""
        return (
            f"; of rank {rank}, as the configuration says, it is of {count} experts, and the model "
            f"has {self.layer.num_experts}; {PRUNED}"
        )

    def wrapped_shape(self, rank: int, exchanged: bool) -> tuple[int, int]:
        """Shape of a factor of `target_parameters`."""
        sizes = self.layer.shape(self.projection)
        wide, tall = reversed(sizes) if exchanged else sizes
        stacked = self.layer.num_experts * rank
        return (stacked, wide) if self.key.side == "A" else (tall, stacked)


@dataclass(frozen=True)
class LinearPlace:
    """A factor of a linear layer or embedding, or of one of the parts that it joins (`part`)."""

    key: Key
    linear: LinearLayer
    part: int | None
    paths: tuple[str, ...]


Place: TypeAlias = ExpertPlace | LinearPlace

V = TypeVar("V")


_canonical = functools.lru_cache(maxsize=1 << 14)(canonical)


def _of_experts(module: str) -> str:
    """Common name of a layer's experts in all blocks, of which a decoder layer has one."""
    return _BLOCK.sub(".experts", _canonical(module))


class _Names(Generic[V]):
    """Modules by path, or by an alternative name if there is none with that path."""

    def __init__(
        self, modules: Iterable[tuple[str, V]], canonical: Callable[[str], str] = _canonical
    ):
        self.exact = dict(modules)
        self._canonical = canonical
        self._others: dict[str, list[str]] = {}
        for name in self.exact:
            self._others.setdefault(canonical(name), []).append(name)

    def find(self, module: str) -> V | None:
        if module in self.exact:
            return self.exact[module]
        names = self._others.get(self._canonical(module), [])
        return self.exact[names[0]] if len(names) == 1 else None


class Modules:
    """Layers of a model that adapters may apply to, for looking up keys."""

    def __init__(
        self, lora: LoraConfig, layers: Sequence[MoELayer], linears: Sequence[LinearLayer]
    ):
        self._lora = lora
        self._experts = _Names(((layer.name, layer) for layer in layers), _of_experts)
        self._beside = _Names((layer.name.rpartition(".")[0], layer) for layer in layers)
        self._linears = _Names((linear.name, linear) for linear in linears)

    def locate(self, key: Key) -> Place:
        """Layer and position of a factor; ValueError if unknown."""
        if (place := self._linear(key) or self._expert(key) or self._part(key)) is None:
            raise ValueError(f"{key.text:.200} {self._unknown(key)}")
        return place

    def linear(self, module: str) -> LinearLayer | None:
        """The linear layer or embedding of this name."""
        return self._linears.find(module)

    def _unknown(self, key: Key) -> str:
        cause = self._cause(key)
        cause = f": {cause}; {_WITHOUT}" if cause else ""
        if not self._linears.exact:
            first = next(iter(self._experts.exact), None)
            return (
                f"is not a LoRA factor of an expert{cause}; the experts of this pool are "
                f"{first}, ...; adapters of other layers, too, are for load_adapters"
            )
        return f"is not a LoRA factor of a layer of this model{cause}"

    def _cause(self, key: Key) -> str:
        """Why the model may lack the key's layer; "" if that is unknown."""
        for what, parts in _ASIDE.items():
            if any(re.search(rf"(^|[._]){part}([._]|$)", key.module) for part in parts):
                return f"it is of {what}"
        number = _layer_of(key.module)
        layers = map(_layer_of, (*self._experts.exact, *self._linears.exact))
        count = 1 + max((n for n in layers if n is not None), default=-1)
        if number is None or not 0 < count <= number:
            return ""
        return (
            f"it is of layer {number}, and the model has layers 0 to {count - 1} (layers of "
            "multi-token prediction, MTP, come after those, and transformers loads none)"
        )

    def _linear(self, key: Key) -> LinearPlace | None:
        if (linear := self._linears.find(key.module)) is None:
            return None
        if linear.embedding != key.embedding:
            kind, wanted = "an embedding", "lora_embedding_"
            if not linear.embedding:
                kind, wanted = "a linear layer", "lora_"
            raise ValueError(f"{key.text:.200}: {linear.name} is {kind}, wanted {wanted}{key.side}")
        # A parameter wrapped by PEFT (a router's) is named after its module.
        parameter = f"{key.module}.weight"
        if self._lora.targets_parameter(parameter):
            return LinearPlace(key, linear, None, (f"{key.path}.weight", parameter))
        return LinearPlace(key, linear, None, (key.path, key.module))

    def _part(self, key: Key) -> LinearPlace | None:
        parent, _, last = key.module.rpartition(".")
        for part, whole, number in _PARTS:
            if last == part and (linear := self._linears.find(f"{parent}.{whole}")) is not None:
                return LinearPlace(key, linear, number, (key.path, key.module))
        return None

    def _expert(self, key: Key) -> ExpertPlace | None:
        if key.embedding:
            return None
        name, below = key.module, ""
        for _ in range(_BELOW + 1):
            if (layer := self._experts.find(name)) is not None:
                return self._below(key, layer, name, below)
            if _WRAPPED.fullmatch(below):
                layer = self._experts.find(f"{name}.experts")
                if layer is not None and self._lora.target_parameters:
                    return self._below(key, layer, name, below)
            if (layer := self._beside.find(name)) is not None:
                if (projection := _BESIDE.get(below.lstrip("."))) is None:
                    return None
                return self._stack(key, layer, projection, "weight")
            name, dot, last = name.rpartition(".")
            below = f"{dot}{last}{below}"
            if not name:
                break
        return None

    def _below(self, key: Key, layer: MoELayer, name: str, below: str) -> ExpertPlace:
        if _WRAPPED.fullmatch(below):
            parameter = self._parameter(key, layer, name, below.count(".base_layer"))
            return self._stack(key, layer, _PROJECTIONS[parameter], parameter, below)
        if (projection := _AMONG.get(below.lstrip("."))) is not None and layer.gated:
            return self._stack(key, layer, projection, "weight")
        match = _PROJECTION.fullmatch(below) or _LIST.fullmatch(below)
        known = _PROJECTIONS if layer.gated else _OF_UNGATED
        projection = known.get(match["name"]) if match else None
        if match is not None and match["name"] == "w3" and not layer.gated:
            projection = "gate"
        if match is None or projection is None:
            raise ValueError(
                f"{key.text}: {below.lstrip('.')} of {layer.name} is not one of {sorted(known)}"
            )
        expert = None if match["expert"] is None else int(match["expert"])
        return ExpertPlace(key, layer, projection, expert, None, (key.path, key.module))

    def _parameter(self, key: Key, layer: MoELayer, name: str, depth: int) -> str:
        """Parameter of the experts that a wrapper is around."""
        targeted = list(layer.parameters)
        if self._lora.target_parameters:
            targeted = [
                p
                for p in targeted
                if self._lora.targets_parameter(f"{name}.{p}")
                or self._lora.targets_parameter(f"{layer.name}.{p}")
            ]
        if depth >= len(targeted):
            raise ValueError(
                f"{key.text} wraps parameter {depth + 1} of {layer.name}, but target_parameters "
                f"{list(self._lora.target_parameters)} name {len(targeted)} of "
                f"{list(layer.parameters)}"
            )
        return targeted[len(targeted) - 1 - depth]

    def _stack(
        self, key: Key, layer: MoELayer, projection: Projection, parameter: str, below: str = ""
    ) -> ExpertPlace:
        """A factor of a parameter that PEFT has wrapped."""
        paths = [f"{path.removesuffix(below)}.{parameter}" for path in (key.path, key.module)]
        if below or parameter != "weight":
            paths.append(f"{layer.name}.{parameter}")
        return ExpertPlace(key, layer, projection, None, parameter, tuple(paths))


def _layer_of(module: str) -> int | None:
    """Number of a module's decoder layer."""
    match = re.match(r"layers\.(\d{1,9})\.", _canonical(module))
    return None if match is None else int(match[1])
