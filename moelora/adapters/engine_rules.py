"""What vLLM and SGLang do with each tensor of an adapter's folder: use, ignore, misread, refuse it.

Both load a file of factors whose names are not those of their layers without an error, and serve
the base model. The rules are those of vLLM 0.33 (`lora_model.py`, `model_manager.py`) and SGLang
0.5.23 (`lora.py`, `mem_pool.py`, `lora_manager.py`); where vLLM 0.28 differs, a tensor's text says
so.

    vLLM    the name after `base_model.model.`, mapped as a checkpoint's, is looked up among the
            layers. A last part that no layer has is refused; any other unknown name is ignored.
    SGLang  the number after `layers.` and a projection's name anywhere in the rest say where a
            factor goes: whatever stands before and between is not read.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from moelora.adapters.engine_names import STACKED, names_of
from moelora.adapters.keys import canonical, module_of
from moelora.adapters.layers import LinearLayer, MoELayer, Projection

Engine: TypeAlias = Literal["vllm", "sglang"]
AGAIN = "the same factors again, by the name that vLLM 0.28 has"
PER_EXPERT = "moelora adapters FOLDER --model CONFIG --per-expert OUT writes one pair per expert"


@dataclass(frozen=True)
class Fate:
    """What an engine does with one tensor.

    layer: the layer that it changes, by transformers' name; "" unless it is used.
    what: "used", "ignored" without an error, "refused" with one, or "misread": loaded without an
        error as something else.
    why: the reason; of a used tensor what else is to be known, mostly "".
    """

    key: str
    what: Literal["used", "ignored", "refused", "misread"]
    layer: str = ""
    why: str = ""


@dataclass(frozen=True, eq=False)
class Model:
    """The layers of a model that adapters may apply to, by transformers' names.

    `count` is the number of its decoder layers.
    """

    model_type: str
    experts: Mapping[str, MoELayer]
    linears: Mapping[str, LinearLayer]
    count: int


def fates(
    engine: Engine, model: Model, shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]
) -> list[Fate]:
    """What `engine` does with all tensors of adapter_model.safetensors, by name and shape, and the
    content of adapter_config.json."""
    rules = {"vllm": _vllm, "sglang": _sglang}[engine]
    return sorted(rules(model, shapes, config), key=lambda fate: fate.key)


def _checked(fate: Fate, shape: tuple[int, ...], wide: int, tall: int) -> Fate:
    """`fate` unless a factor of a layer of these inputs and outputs has another shape: engines copy
    as much as there is into a part of a slot."""
    name, size, wanted = "columns", shape[-1], wide
    if re.search(r"\.lora_(embedding_)?B", fate.key):
        name, size, wanted = "rows", shape[-2] if len(shape) > 1 else 0, tall
    if size == wanted:
        return fate
    turned = (
        ": A and B are exchanged, as for a transposed parameter" if size in (wide, tall) else ""
    )
    return Fate(fate.key, "misread", why=f"it has {size} {name}, the layer {wanted}{turned}")


# -- vLLM --

# Models whose class says `embedding_modules`; elsewhere factors of embeddings are refused.
_EMBEDDINGS = frozenset(
    "exaone_moe granitemoe granitemoehybrid granitemoeshared jamba lfm2_moe mixtral nemotron_h "
    "phimoe qwen3_moe qwen3_5_moe qwen3_5_moe_text".split()
)
# Text models that also read the names of the multimodal model around them.
_OF_MULTIMODAL = frozenset(("gemma4_text", "qwen3_5_moe_text"))
_TEXT = "model.language_model."
_FACTOR = re.compile(r"(?P<module>.+)\.(?:lora_[AB]\.weight|lora_embedding_[AB])")
_TOWERS = re.compile(r"(^|[._])(visual|vision|audio)([._]|$)")
_NEWER = "vLLM 0.28 ignores it: it is a text model's name"


@dataclass(frozen=True)
class _Place:
    """Where a module of vLLM is in transformers' model: an expert's projection, a stack, or a
    linear layer (`part` is then "")."""

    layer: str
    part: str = ""
    why: str = ""


@functools.lru_cache(maxsize=2)
def _vllm_places(model: Model) -> dict[str, _Place]:
    """vLLM's modules with LoRA, by all names that a file may have for them."""
    names = names_of(model.model_type)
    places: dict[str, _Place] = {}

    def add(name: str, place: _Place) -> None:
        first, *older = names.of(name)
        for spelled, why in _prefixes(model.model_type, first):
            places[spelled] = _Place(place.layer, place.part, why)
        for other in older:
            places[other] = _Place(place.layer, place.part, "older")

    for name, layer in model.experts.items():
        if model.model_type in STACKED:
            add(name, _Place(name, "down"))
            add(f"{name}.base_layer", _Place(name, "gate_up"))
            continue
        for expert in range(layer.num_experts):
            for projection in _projections(layer):
                part = f"{expert}.{projection}"
                add(f"{name}.{expert}.{names.projections[projection]}", _Place(name, part))
    for name, linear in model.linears.items():
        if not linear.embedding or model.model_type in _EMBEDDINGS:
            if name != "lm_head" or model.model_type in _EMBEDDINGS:
                add(name, _Place(name))
    return places


def _projections(layer: MoELayer) -> Sequence[Projection]:
    return ("gate", "up", "down") if layer.gated else ("up", "down")


def _prefixes(model_type: str, name: str) -> Iterator[tuple[str, str]]:
    """A module's names by the classes around it, and what is to be known of each."""
    yield name, ""
    if name.startswith(_TEXT):
        yield f"language_model.model.{name.removeprefix(_TEXT)}", ""
        yield f"model.{name.removeprefix(_TEXT)}", _NEWER
    elif model_type in _OF_MULTIMODAL and name.startswith("model."):
        yield f"{_TEXT}{name.removeprefix('model.')}", ""


def _vllm(
    model: Model, shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]
) -> Iterator[Fate]:
    places = _vllm_places(model)
    leaves = {name.rpartition(".")[2] for name in places if ".experts." not in name} | {"experts"}
    of_experts = {_of_experts(name) for name in places if ".experts" in name}
    used: dict[str, dict[str, list[tuple[str, _Place]]]] = defaultdict(lambda: defaultdict(list))
    for key in shapes:
        match = _FACTOR.fullmatch(key)
        if match is None:
            if key.endswith((".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight")):
                yield Fate(key, "ignored", why="it is a weight of the base model")
            else:
                yield Fate(key, "refused", why="vLLM knows names that end in lora_A.weight only")
            continue
        module = match["module"].removeprefix("base_model.model.")
        if (place := places.get(module)) is not None:
            used[place.layer][place.part].append((key, place))
        else:
            yield _unknown(model, places, leaves, of_experts, key, module)
    for layer, parts in used.items():
        for fate, part in _of_layer(model, layer, parts):
            wide_and_tall = _sizes(model, layer, part)
            yield _checked(fate, shapes[fate.key], *wide_and_tall) if fate.layer else fate


def vllm_part(model: Model, fate: Fate) -> str:
    """The part of a layer of experts that vLLM uses a tensor for: "gate_up", "3.down", or ""."""
    match = _FACTOR.fullmatch(fate.key)
    name = "" if match is None else match["module"].removeprefix("base_model.model.")
    return _vllm_places(model)[name].part


def _sizes(model: Model, layer: str, part: str) -> tuple[int, int]:
    """(in, out) of a linear layer, or of a part of a layer of experts: "gate_up", "3.down"."""
    if (experts := model.experts.get(layer)) is None:
        return model.linears[layer].in_features, model.linears[layer].out_features
    projection: Any = part.rpartition(".")[2]
    return experts.shape(projection)


def _of_experts(name: str) -> str:
    return name[name.find(".experts") + 1 :]


def _unknown(
    model: Model,
    places: Mapping[str, _Place],
    leaves: set[str],
    of_experts: set[str],
    key: str,
    module: str,
) -> Fate:
    """The fate of a factor whose module vLLM does not find: its last part decides."""
    stack = module.removesuffix(".base_layer")
    if stack in model.experts and model.model_type not in STACKED:
        return Fate(
            key,
            "refused",
            why=f"vLLM keeps the experts of {model.model_type} one by one, and reads stacks of "
            "them only with --enable-mixed-moe-lora-format and is_3d_lora_weight of the request; "
            f"{PER_EXPERT}",
        )
    why = f"vLLM has no module {module:.200}"
    if _TOWERS.search(module):
        why += ", of a tower: it may have one with --enable-tower-connector-lora"
    elif near := _near(module, places):
        why += f"; it calls that {near}"
    elif stack.endswith((".experts", ".moe")) and model.experts:
        why += f"; {PER_EXPERT}"
    if "base_layer" in key:
        return Fate(key, "ignored", why=why)
    if ".experts" in module:
        expected = _of_experts(module) in of_experts | {"experts"}
    else:
        expected = module.rpartition(".")[2] in leaves
    return Fate(key, "ignored" if expected else "refused", why=why)


def _near(module: str, places: Mapping[str, _Place]) -> str:
    """The name that vLLM has for a module which is spelled otherwise."""
    spelled = canonical(module_of(f"base_model.model.{module}"))
    return next((name for name in places if canonical(name) == spelled), "")


def _of_layer(
    model: Model, layer: str, parts: Mapping[str, list[tuple[str, _Place]]]
) -> Iterator[tuple[Fate, str]]:
    """The fates of a layer's factors, and which part of it each is of; a layer of experts needs
    those of all its projections."""
    if experts := model.experts.get(layer):
        stacked = model.model_type in STACKED
        every = {"gate_up", "down"}
        if not stacked:
            names = _projections(experts)
            every = {f"{e}.{p}" for e in range(experts.num_experts) for p in names}
        if missing := sorted(every - parts.keys()):
            only = stacked and "down" not in parts  # looked for by the name of the other one
            what: Literal["ignored", "refused"] = "ignored" if only else "refused"
            why = f"{layer} has no factors of {missing[0]} ({len(missing)} such): vLLM wants those "
            why += "of all projections and experts of a layer, or none"
            for part, entries in parts.items():
                yield from ((Fate(key, what, why=why), part) for key, _ in entries)
            return
    for part, entries in parts.items():
        newer = [entry for entry in entries if entry[1].why != "older"]
        for key, place in entries:
            if place.why != "older":
                yield Fate(key, "used", layer, place.why), part
            elif newer:
                yield Fate(key, "used", layer, AGAIN), part
            else:
                why = f"only vLLM 0.28 calls a module so; later releases have {layer}"
                yield Fate(key, "ignored", why=why), part


# -- SGLang --

_NUMBER = re.compile(r"layers\.(\d+)\.")
_EXPERT = re.compile(r"experts\.(\d+)\.")
_NORMALIZED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), "fused_qkv_a_proj_with_mqa"),
    **dict.fromkeys(("embeddings", "word_embeddings", "vocab_emb"), "embed_tokens"),
    **dict.fromkeys(("output", "unembed_tokens"), "lm_head"),
}
_W = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_PROJECTION = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def _targets(config: Mapping[str, Any]) -> set[str] | None:
    """The modules that SGLang makes room for; None: all it knows (`all-linear`)."""
    names = config.get("target_modules") or ()
    if isinstance(names, str):
        return None
    return {_NORMALIZED.get(last, last) for last in (name.split(".")[-1] for name in names)}


def _sglang(
    model: Model, shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]
) -> Iterator[Fate]:
    targets = _targets(config)
    linears: dict[tuple[int, str], str] = {}
    for name in model.linears:
        if number := _NUMBER.search(name):
            last = name.rpartition(".")[2]
            linears[int(number[1]), last] = name
    experts = {int(n[1]): name for name in model.experts if (n := _NUMBER.search(f"{name}."))}
    for key, shape in shapes.items():
        fate = _sglang_fate(model, targets, linears, experts, key, len(shape))
        last = re.split(r"\.lora_", key)[0].rpartition(".")[2]
        part = {**_PROJECTION, "gate_up_proj": "gate_up"}.get(_W.get(last, last), "")
        sizes = _sizes(model, fate.layer, part) if fate.layer else (0, 0)
        yield _checked(fate, shape, *sizes) if fate.layer else fate


def _sglang_fate(
    model: Model,
    targets: set[str] | None,
    linears: Mapping[tuple[int, str], str],
    experts: Mapping[int, str],
    key: str,
    dimensions: int,
) -> Fate:
    module = re.split(r"\.lora_(?:embedding_)?[AB]", key)[0]
    last = module.rpartition(".")[2]
    target = _NORMALIZED.get(_W.get(last, last), _W.get(last, last))
    number = _NUMBER.search(key)
    if number is None:
        for name in ("embed_tokens", "lm_head"):
            if name in key.replace("unembed_tokens", "lm_head"):
                there = next((n for n in model.linears if n.endswith(name)), "")
                if there and (targets is None or name in targets):
                    return Fate(key, "used", there)
                return Fate(key, "ignored", why=f"target_modules does not name {name}")
        return Fate(key, "ignored", why="SGLang finds no number of a layer in its name")
    layer = int(number[1])
    if layer >= model.count:
        return Fate(key, "refused", why=f"the model has layers 0 to {model.count - 1}")
    if targets is not None and not any(name in key.replace(last, target) for name in targets):
        why = f"SGLang finds none of target_modules {sorted(targets)} in its name"
        if last in ("experts", "base_layer", "moe"):
            why += f"; {PER_EXPERT}"
        return Fate(key, "refused", why=why)
    of_one = _EXPERT.search(key)
    routed = ("experts" in key and "shared_expert" not in key) and (of_one or dimensions == 3)
    if routed:
        if layer not in experts:
            return Fate(key, "ignored", why=f"layer {layer} has no experts")
        if targets is not None and not {"gate_up_proj", "down_proj"} <= targets:
            why = "SGLang serves experts only if target_modules has both gate_up and down"
            return Fate(key, "ignored", why=why)
        count = model.experts[experts[layer]].num_experts
        if of_one and int(of_one[1]) >= count:
            return Fate(key, "refused", why=f"the layer has experts 0 to {count - 1}")
        if _W.get(last, last) not in (*_PROJECTION, "gate_up_proj"):
            return Fate(key, "refused", why=f"{last} is no projection of an expert")
        return Fate(key, "used", experts[layer])
    name = linears.get((layer, last))
    if name is None:
        return Fate(key, "ignored", why=f"layer {layer} of the model has no {last}")
    if canonical(name) != canonical(module_of(module)):
        why = f"SGLang adds it to {name}, whatever the rest of its name says"
        return Fate(key, "misread", why=why)
    return Fate(key, "used", name)
