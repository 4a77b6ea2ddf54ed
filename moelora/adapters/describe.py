"""Describe an adapter by its folder, without a model: writer, dialect, factors and faults."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moelora.adapters.columns import Columns
from moelora.adapters.config import CONFIG_FILE, LoraConfig
from moelora.adapters.factors import partner
from moelora.adapters.files import file_in, read_json
from moelora.adapters.folders import reading
from moelora.adapters.keys import WRAPPERS, Key, parse
from moelora.adapters.weights import Weights, open_weights, weight_files

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_OF_EXPERT = re.compile(r"\.experts\.(?:\d+\.\w+|\w+s\.\d+)$")
_WRAPPED = re.compile(
    r"\.(?:experts|moe)(?:\.base_layer)*$|\.(?:input_linear|output_linear|fc1|fc2)$"
)
_STACK = re.compile(r"\.experts\.\w+$")


@dataclass
class Group:
    """Factors whose names differ only in numbers (layers, experts).

    `form` is the apparent form, `a` and `b` the shapes of each side, `ranks` those by the
    configuration.
    """

    name: str
    form: str
    modules: set[str] = field(default_factory=set)
    a: set[tuple[int, ...]] = field(default_factory=set)
    b: set[tuple[int, ...]] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)


@dataclass
class Description:
    """`facts` by name, `groups` of factors, and faults that are independent of the model."""

    facts: dict[str, str]
    groups: list[Group]
    problems: list[str]


def describe(folder: str | Path) -> Description:
    """Read the configuration and the header of an adapter, whether or not it can be loaded.

    Raises FileNotFoundError if there is no adapter, ValueError if a file cannot be read.
    """
    return reading(Path(folder), _describe)


def _describe(folder: Path) -> Description:
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder")
    files = weight_files(folder)
    raw, problems = _configuration(folder)
    lora: LoraConfig | None = None
    try:
        lora = LoraConfig.parse(raw)
    except ValueError as error:
        problems.append(str(error))
    with open_weights(folder) as weights:
        parsed = {text: parse(text) for text in sorted(weights)}
        keys = [key for key in parsed.values() if key is not None]
        others = [text for text, key in parsed.items() if key is None]
        groups = list(_groups(keys, weights, lora))
        problems += _faults(keys, others, groups, raw)
    size = sum(file.stat().st_size for file in files)
    facts = {
        "files": f"{', '.join(file.name for file in files)}: {size / 2**20:.1f} MiB",
        "written by": _writer(raw),
        "base model": str(raw.get("base_model_name_or_path") or "not said"),
        "rank and scaling": _scaling(raw),
        "dialect": "\n".join(_dialects(keys, groups, raw)),
    }
    if others:
        facts["beside the factors"] = "\n".join(others[:10])
    return Description(facts, groups, problems)


def _configuration(folder: Path) -> tuple[Mapping[str, Any], list[str]]:
    try:
        path = file_in(folder, CONFIG_FILE)
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is no regular file")
        return read_json(path), []
    except (OSError, ValueError) as error:
        return {}, [f"{CONFIG_FILE} cannot be read: {error}"]


def _form(key: Key, shape: tuple[int, ...]) -> str:
    if key.embedding:
        return "embedding"
    if _OF_EXPERT.search(key.module):
        return "one pair per expert"
    if _WRAPPED.search(key.module):
        return "stack of experts, PEFT's target_parameters"
    if _STACK.search(key.module):
        return "stack of experts" if len(shape) == 3 else "shared by all experts"
    return "linear layer"


def _groups(keys: list[Key], weights: Weights, lora: LoraConfig | None) -> Iterator[Group]:
    groups: dict[str, Group] = {}
    for key in keys:
        shape = weights[key.text].shape
        name = _NUMBER.sub("N", key.module)
        group = groups.setdefault(name, Group(name, _form(key, shape)))
        group.modules.add(key.module)
        (group.a if key.side == "A" else group.b).add(shape)
        if lora is not None:
            group.ranks |= _ranks(key, group.form, lora)
    yield from groups.values()


def _ranks(key: Key, form: str, lora: LoraConfig) -> set[int]:
    """The ranks that a factor may have by the configuration. That of a stack is its parameter's:
    the names of factors end at the module, whose parameters may differ in rank."""
    if "target_parameters" not in form:
        return {lora.rank_and_scaling(key.path, key.module)[0]}
    path, module = (re.sub(r"(?:\.base_layer)+$", "", name) for name in (key.path, key.module))
    leaves = {parameter.rpartition(".")[2] for parameter in lora.target_parameters}
    wrapped = [n for n in leaves if lora.targets_parameter(f"{module}.{n}")]
    return {lora.rank_and_scaling(f"{path}.{n}", f"{module}.{n}")[0] for n in wrapped}


def _faults(
    keys: list[Key], others: list[str], groups: list[Group], raw: Mapping[str, Any]
) -> Iterator[str]:
    """Reasons why the adapter cannot be loaded into any model."""
    names = {key.text for key in keys}
    if single := [key.text for key in keys if partner(key.text) not in names]:
        yield f"{single[0]} has no {partner(single[0])} (factors without one: {len(single)})"
    if not keys:
        yield "there are no LoRA factors"
    adapters = sorted({key.adapter for key in keys if key.adapter is not None})
    if len(adapters) > 1:
        yield f"factors of several adapters are in one file: {adapters}"
    if unknown := [text for text in others if not text.endswith(".weight")]:
        yield f"{unknown[0]} is not a LoRA factor ({len(unknown)} such tensors)"
    for group in groups:
        if group.form == "linear layer" and len(group.ranks) == 1:
            rank = next(iter(group.ranks))
            if wrong := [a for a in group.a if a[0] != rank]:
                yield f"{group.name}: A is {wrong[0]}, but its rank by the configuration is {rank}"
    try:
        doubt = Columns.parse(raw).doubt
    except ValueError:
        return  # LoraConfig has reported it
    if doubt and any("target_parameters" in group.form for group in groups):
        yield f"{doubt}; pass layout= to say which it is"


def _writer(raw: Mapping[str, Any]) -> str:
    mapping = raw.get("auto_mapping")
    unsloth = isinstance(mapping, Mapping) and mapping.get("unsloth_fixed")
    version, _, moelora = str(raw.get("peft_version") or "").partition("+moelora.")
    if moelora:
        return f"moelora {moelora}, as PEFT {version} writes"
    peft = f"PEFT {version}" if version else "not said (PEFT says it from 0.18 on)"
    return f"Unsloth with {peft}" if unsloth else peft


def _scaling(raw: Mapping[str, Any]) -> str:
    patterns = [f"{len(raw[n])} in {n}" for n in ("rank_pattern", "alpha_pattern") if raw.get(n)]
    root = "sqrt(r)" if raw.get("use_rslora") else "r"
    text = f"r {raw.get('r')}, lora_alpha {raw.get('lora_alpha')}, scaling alpha / {root}"
    return ", ".join([text, *patterns])


def _dialects(keys: list[Key], groups: list[Group], raw: Mapping[str, Any]) -> Iterator[str]:
    forms = dict.fromkeys(group.form for group in groups)
    yield "; ".join(forms) or "no factors"
    if any("target_parameters" in form for form in forms):
        try:
            columns = Columns.parse(raw)
        except ValueError as error:
            yield f"order of columns of lora_B: {error}"
        else:
            stated = {*columns.stated.values(), columns.common} - {None}
            order = " and ".join(sorted(map(str, stated))) or "rank_major, PEFT's"
            yield f"order of columns of lora_B: {'not known' if columns.doubt else order}"
    if wrappers := {s for key in keys for s in key.text.split(".") if s in WRAPPERS}:
        yield f"names have {', '.join(sorted(wrappers))}, which is taken off"
    if adapters := {key.adapter for key in keys} - {None}:
        yield f"names have the adapter's name, {', '.join(sorted(map(str, adapters)))}"
