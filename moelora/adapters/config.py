"""`adapter_config.json`: supported options, and a refusal that names any other.

An option that changes the result and that moelora does not implement (DoRA, trained biases, fully
saved modules, ...) must never be ignored, and neither must one that a later PEFT adds. So there is
an allow list: an option is supported, or known not to affect inference, or off (null, false, 0,
empty); anything else is an error.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from moelora.adapters.columns import DETAIL, MARK, Columns
from moelora.adapters.files import file_in, read_json
from moelora.adapters.patterns import Patterns
from moelora.operators.checks import errors_about

CONFIG_FILE = "adapter_config.json"

MAX_RANK = 1 << 20  # larger than any factor
MAX_ALPHA = 3e38  # scalings are float32

# Read by `LoraConfig.parse`.
_UNDERSTOOD = {MARK, DETAIL}.union(
    "peft_type r lora_alpha use_rslora rank_pattern alpha_pattern target_parameters "
    "init_lora_weights bias peft_version auto_mapping".split()
)

# Origin of the adapter, or how it was trained: no effect on the stored factors.
_NO_EFFECT = set(
    "base_model_name_or_path corda_config ensure_weight_tying eva_config exclude_modules "
    "inference_mode layers_pattern layers_to_transform loftq_config lora_dropout lora_ga_config "
    "megatron_config megatron_core qalora_group_size revision runtime_config target_modules "
    "task_type".split()
)

_MERGE = "merge the adapter into a model of its own (PEFT's merge_and_unload)"

# What an unsupported option does, and what to do about it.
_REASONS = {
    "use_dora": f"DoRA rescales the rows of the base weights; {_MERGE}, or train without",
    "modules_to_save": (
        "whole layers were trained and replace those of the base model, which every row of a "
        f"batch shares; {_MERGE}, or train factors of these layers instead (target_modules)"
    ),
    "trainable_token_indices": (
        "rows of the embedding were trained and replace those of the base model; "
        f"{_MERGE}, or train factors of the embedding instead (target_modules)"
    ),
    "lora_bias": f"factors with biases are more than low-rank products; {_MERGE}",
    "layer_replication": "the adapter is for a model with repeated layers",
    "alora_invocation_tokens": "an activated LoRA begins at certain tokens of a row; use PEFT",
    "arrow_config": "Arrow mixes adapters for every token; use PEFT",
    "fan_in_fan_out": "it is for layers of GPT-2 (Conv1D)",
}

# Initializations that keep the base weights. pissa, olora, corda, loftq and lora_ga replace them by
# a residual, on which the adapter then depends.
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")

V = TypeVar("V")

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


@dataclass(frozen=True)
class LoraConfig:
    """The part of a PEFT LoRA configuration that determines the meaning of factors."""

    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: Patterns[int]
    alpha_pattern: Patterns[float]
    target_parameters: frozenset[str]
    peft_version: str | None
    columns: Columns

    @classmethod
    def read(cls, folder: Path) -> LoraConfig:
        """Parse `adapter_config.json` of `folder`."""
        path = file_in(folder, CONFIG_FILE)
        if not path.is_file():
            raise FileNotFoundError(f"{folder} holds no {CONFIG_FILE}")
        raw = read_json(path)
        with errors_about(path, ValueError):
            return cls.parse(raw)

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> LoraConfig:
        """Check a configuration, in PEFT's JSON form or PEFT's own; ValueError names the option."""
        if hasattr(raw, "to_dict"):
            raw = raw.to_dict()
        if not isinstance(raw, Mapping):
            raise ValueError(f"the configuration is a {type(raw).__name__}, wanted an object")
        # Tinker's configurations only have rank and alpha.
        kind = "LORA" if {"r", "lora_alpha"} <= raw.keys() else None
        if raw.get("peft_type", kind) != "LORA":
            raise ValueError(f"peft_type is {_short(raw.get('peft_type'))}, wanted 'LORA'")
        for key, value in raw.items():
            if key in _UNDERSTOOD or key in _NO_EFFECT or not value:
                continue
            why = f": {_REASONS[key]}" if key in _REASONS else ""
            raise ValueError(f"option {_name(key)}={_short(value)} is not supported{why}")
        if raw.get("bias", "none") not in ("none", None):
            raise ValueError(
                f"option bias={_short(raw['bias'])} is not supported, wanted 'none': biases of the "
                f"base model were trained, which every row of a batch shares; {_MERGE}"
            )
        init = raw.get("init_lora_weights", True)
        if init not in _PLAIN_INITS:
            raise ValueError(
                f"option init_lora_weights={_short(init)} is not supported: the adapter belongs to "
                "changed base weights; let PEFT convert it to a plain LoRA when saving"
            )
        return cls(
            r=_rank("r", raw.get("r", 8)),
            lora_alpha=_alpha("lora_alpha", raw.get("lora_alpha", 8)),
            use_rslora=_flag("use_rslora", raw.get("use_rslora")),
            rank_pattern=_patterns(raw, "rank_pattern", _rank),
            alpha_pattern=_patterns(raw, "alpha_pattern", _alpha),
            target_parameters=frozenset(_names(raw, "target_parameters")),
            peft_version=_version(raw.get("peft_version")),
            columns=Columns.parse(raw),
        )

    def rank_and_scaling(self, *paths: str) -> tuple[int, float]:
        """Rank and scaling of a module or parameter (its path without `base_model.model.`).

        With several paths, the first one that a pattern matches is used.
        """
        rank = _first(self.rank_pattern, paths, self.r)
        alpha = _first(self.alpha_pattern, paths, self.lora_alpha)
        return rank, alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def targets_parameter(self, path: str) -> bool:
        """True if `target_parameters` names the parameter at `path`."""
        ends = (path[n + 1 :] for n, c in enumerate(path) if c == ".")
        return path in self.target_parameters or any(e in self.target_parameters for e in ends)

    def exchanges_in_and_out(self, transposed: bool) -> bool | None:
        """Whether the PEFT that wrote this stored `target_parameters` factors with in and out
        swapped: A over the outputs, B over the inputs.

        Until 0.18 PEFT assumed (experts, in, out) for every parameter, which only holds for
        `transposed` ones; 0.19.0 swapped both kinds, with versions of transformers that state the
        layout. None if unknown: PEFT only writes its version from 0.18 on.
        """
        if self.peft_version is None:
            return None
        form = r"([0-9]{1,4})\.([0-9]{1,4})\.([0-9]{1,4})(?:\+.*)?"  # or +moelora.VERSION
        match = re.fullmatch(form, self.peft_version)
        if match is None:  # a development version covers many commits
            return None
        version = tuple(map(int, match.groups()))
        if version == (0, 19, 0):
            return None if transposed else True
        return version < (0, 19, 0) and not transposed


def _first(patterns: Patterns[V], paths: tuple[str, ...], default: V) -> V:
    missing: Any = None
    for path in dict.fromkeys(paths):
        if (found := patterns.find(path, missing)) is not None:
            return found
    return default


def _patterns(raw: Mapping[str, Any], name: str, checked: Callable[[str, Any], V]) -> Patterns[V]:
    value = raw.get(name) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is a {type(value).__name__}, wanted an object")
    for key in value:
        if not isinstance(key, str):
            raise ValueError(f"{name} key {_short(key)} is a {type(key).__name__}, wanted a string")
    with errors_about(name, ValueError):
        return Patterns({k: checked(k, v) for k, v in value.items()}, name)


def _names(raw: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = raw.get(name) or []
    if isinstance(value, (set, frozenset)):  # PEFT's in-memory configurations contain sets
        value = sorted(value, key=str)
    if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
        raise ValueError(f"{name} is {_short(value)}, wanted a list of names")
    return tuple(value)


def _flag(name: str, value: Any) -> bool:
    if value not in (True, False, None):
        raise ValueError(f"{name} is {_short(value)}, wanted true or false")
    return bool(value)


def _rank(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_RANK:
        raise ValueError(
            f"rank {_name(name)} is {_short(value)}, wanted an integer from 1 to {MAX_RANK}"
        )
    return value


def _alpha(name: str, value: Any) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not -MAX_ALPHA <= value <= MAX_ALPHA:
        raise ValueError(
            f"alpha {_name(name)} is {_short(value)}, wanted a number that float32 holds"
        )
    return float(value)


def _version(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"peft_version is {_short(value)}, wanted a string")
    return value


def _short(value: Any) -> str:
    """Shortened representation of a value for messages."""
    if isinstance(value, int) and abs(value) >= 10**40:
        return "a huge integer"
    return _SHORT.repr(value)


def _name(key: Any) -> str:
    return str(key) if len(str(key)) <= 80 else str(key)[:77] + "..."
