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
from typing import Any, Literal, NamedTuple, TypeAlias

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
    part: str
    why: str


class _VllmNames(NamedTuple):
    """vLLM's modules with LoRA, by all names that a file may have for them; the last parts of such
    names, and what follows a decoder layer's name in those of experts."""

    places: Mapping[str, _Place]
    leaves: set[str]
    of_experts: set[str]


@functools.lru_cache(maxsize=2)
def _vllm_names(model: Model) -> _VllmNames:
    names = names_of(model.model_type)
    places: dict[str, _Place] = {}

    def add(name: str, layer: str, part: str = "") -> None:
        first, *older = names.of(name)
        for spelled, why in (*_prefixes(model.model_type, first), *((o, "older") for o in older)):
            places[spelled] = _Place(layer, part, why)

    for name, layer in model.experts.items():
        if model.model_type in STACKED:
            add(name, name, "down")
            add(f"{name}.base_layer", name, "gate_up")
            continue
        for expert in range(layer.num_experts):
            for projection in _projections(layer):
                module = f"{name}.{expert}.{names.projections[projection]}"
                add(module, name, f"{expert}.{projection}")
    for name, linear in model.linears.items():
        if not linear.embedding or model.model_type in _EMBEDDINGS:
            if name != "lm_head" or model.model_type in _EMBEDDINGS:
                add(name, name)
    leaves = {name.rpartition(".")[2] for name in places if ".experts." not in name} | {"experts"}
    return _VllmNames(places, leaves, {_of_experts(name) for name in places if ".experts" in name})


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
    names = _vllm_names(model)
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
        if (place := names.places.get(module)) is not None:
            used[place.layer][place.part].append((key, place))
        else:
            yield _unknown(model, names, key, module)
    for layer, parts in used.items():
        yield from _of_layer(model, layer, parts, shapes)


def vllm_part(model: Model, fate: Fate) -> str:
    """The part of a layer of experts that vLLM uses a tensor for: "gate_up", "3.down", or ""."""
    match = _FACTOR.fullmatch(fate.key)
    name = "" if match is None else match["module"].removeprefix("base_model.model.")
    return _vllm_names(model).places[name].part


def _sizes(model: Model, layer: str, part: str) -> tuple[int, int]:
    """(in, out) of a linear layer, or of a part of a layer of experts: "gate_up", "3.down"."""
    if (experts := model.experts.get(layer)) is None:
        return model.linears[layer].in_features, model.linears[layer].out_features
    projection: Any = part.rpartition(".")[2]
    return experts.shape(projection)


def _of_experts(name: str) -> str:
    return name[name.find(".experts") + 1 :]


def _unknown(model: Model, names: _VllmNames, key: str, module: str) -> Fate:
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
    elif near := _near(module, names.places):
        why += f"; it calls that {near}"
    elif stack.endswith((".experts", ".moe")) and model.experts:
        why += f"; {PER_EXPERT}"
    if "base_layer" in key:
        return Fate(key, "ignored", why=why)
    if ".experts" in module:
        expected = _of_experts(module) in names.of_experts | {"experts"}
    else:
        expected = module.rpartition(".")[2] in names.leaves
    return Fate(key, "ignored" if expected else "refused", why=why)


def _near(module: str, places: Mapping[str, _Place]) -> str:
    """The name that vLLM has for a module which is spelled otherwise."""
    spelled = canonical(module_of(f"base_model.model.{module}"))
    return next((name for name in places if canonical(name) == spelled), "")


def _of_layer(
    model: Model,
    layer: str,
    parts: Mapping[str, list[tuple[str, _Place]]],
    shapes: Mapping[str, tuple[int, ...]],
) -> Iterator[Fate]:
    """The fates of a layer's factors; a layer of experts needs those of all its projections."""
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
            for entries in parts.values():
                yield from (Fate(key, what, why=why) for key, _ in entries)
            return
    for part, entries in parts.items():
        is_newer = any(place.why != "older" for _, place in entries)
        for key, place in entries:
            if is_newer:
                why = AGAIN if place.why == "older" else place.why
                fate = Fate(key, "used", layer, why)
                yield _checked(fate, shapes[key], *_sizes(model, layer, part))
            else:
                why = f"only vLLM 0.28 calls a module so; later releases have {layer}"
                yield Fate(key, "ignored", why=why)


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
_PROJECTION = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "gate_up_proj": "gate_up"}


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
        yield _sglang_fate(model, targets, linears, experts, key, shape)


def _sglang_fate(
    model: Model,
    targets: set[str] | None,
    linears: Mapping[tuple[int, str], str],
    experts: Mapping[int, str],
    key: str,
    shape: tuple[int, ...],
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
                    return _checked(Fate(key, "used", there), shape, *_sizes(model, there, ""))
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
    routed = ("experts" in key and "shared_expert" not in key) and (of_one or len(shape) == 3)
    if routed:
        if layer not in experts:
            return Fate(key, "ignored", why=f"layer {layer} has no experts")
        if targets is not None and not {"gate_up_proj", "down_proj"} <= targets:
            why = "SGLang serves experts only if target_modules has both gate_up and down"
            return Fate(key, "ignored", why=why)
        count = model.experts[experts[layer]].num_experts
        if of_one and int(of_one[1]) >= count:
            return Fate(key, "refused", why=f"the layer has experts 0 to {count - 1}")
        if (part := _PROJECTION.get(_W.get(last, last))) is None:
            return Fate(key, "refused", why=f"{last} is no projection of an expert")
        fate = Fate(key, "used", experts[layer])
        return _checked(fate, shape, *_sizes(model, experts[layer], part))
    name = linears.get((layer, last))
    if name is None:
        return Fate(key, "ignored", why=f"layer {layer} of the model has no {last}")
    if canonical(name) != canonical(module_of(module)):
        why = f"SGLang adds it to {name}, whatever the rest of its name says"
        return Fate(key, "misread", why=why)
    return _checked(Fate(key, "used", name), shape, *_sizes(model, name, ""))
