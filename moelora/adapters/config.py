"""`adapter_config.json`: what moelora understands of it, and a refusal that names everything else.

An option that would change the numbers and that moelora does not compute (DoRA, trained biases,
modules saved whole, ...) must never be ignored, and neither must one that a later PEFT invents. So
the rule is an allow list: an option is understood, or known to be without effect on inference, or
off (null, false, 0, empty); anything else is an error.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG_FILE = "adapter_config.json"

MAX_RANK = 1 << 20  # no factor is that wide
MAX_ALPHA = 3e38  # scalings are float32

# Read by `LoraConfig.parse`.
_UNDERSTOOD = {
    "peft_type",
    "r",
    "lora_alpha",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "target_parameters",
    "init_lora_weights",
    "bias",
}

# Where the adapter came from, or how it was trained: the stored factors mean the same.
_NO_EFFECT = {
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
}

# Initialisations that leave the base weights alone; pissa, olora, corda, loftq and lora_ga replace
# them by a residual, on which the adapter then depends.
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class LoraConfig:
    """The part of a PEFT LoRA configuration that decides what the factors mean."""

    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    target_parameters: tuple[str, ...]

    @classmethod
    def read(cls, folder: Path) -> LoraConfig:
        """Parses `adapter_config.json` of `folder`."""
        path = folder / CONFIG_FILE
        if not path.is_file():
            raise FileNotFoundError(f"{folder} holds no {CONFIG_FILE}")
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
        try:
            return cls.parse(raw)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> LoraConfig:
        """Checks a configuration in PEFT's own JSON form; raises ValueError naming the option."""
        if not isinstance(raw, Mapping):
            raise ValueError(f"the configuration is a {type(raw).__name__}, wanted an object")
        if raw.get("peft_type") != "LORA":
            raise ValueError(f"peft_type is {raw.get('peft_type')!r}, wanted 'LORA'")
        for key, value in raw.items():
            if key in _UNDERSTOOD or key in _NO_EFFECT or not value:
                continue
            raise ValueError(f"option {key}={value!r} is not supported")
        if raw.get("bias", "none") not in ("none", None):
            raise ValueError(f"option bias={raw['bias']!r} is not supported, wanted 'none'")
        init = raw.get("init_lora_weights", True)
        if init not in _PLAIN_INITS:
            raise ValueError(
                f"option init_lora_weights={init!r} is not supported: the adapter belongs to "
                "changed base weights; let PEFT convert it to a plain LoRA when saving"
            )
        return cls(
            r=_rank("r", raw.get("r", 8)),
            lora_alpha=_alpha("lora_alpha", raw.get("lora_alpha", 8)),
            use_rslora=_flag("use_rslora", raw.get("use_rslora")),
            rank_pattern={k: _rank(k, v) for k, v in _pattern(raw, "rank_pattern").items()},
            alpha_pattern={k: _alpha(k, v) for k, v in _pattern(raw, "alpha_pattern").items()},
            target_parameters=_names(raw, "target_parameters"),
        )

    def rank_and_scaling(self, path: str) -> tuple[int, float]:
        """Rank and scaling of the module or parameter at `path` (without `base_model.model.`)."""
        rank = self.rank_pattern.get(_matching(self.rank_pattern, path), self.r)
        alpha = self.alpha_pattern.get(_matching(self.alpha_pattern, path), self.lora_alpha)
        return rank, alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def targets_parameter(self, path: str) -> bool:
        """True if `target_parameters` names the parameter at `path`."""
        return any(path == t or path.endswith("." + t) for t in self.target_parameters)

    @property
    def max_rank(self) -> int:
        return max([self.r, *self.rank_pattern.values()])


def _matching(pattern: Mapping[str, Any], path: str) -> str | None:
    """The first key of `pattern` that matches the end of `path`, as PEFT resolves it."""
    return next((k for k in pattern if re.match(_anchored(k), path)), None)


def _anchored(key: str) -> str:
    return rf"(.*\.)?({key})$"


def _pattern(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = raw.get(name) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is a {type(value).__name__}, wanted an object")
    for key in value:
        if not isinstance(key, str):
            raise ValueError(f"{name} key {key!r} is a {type(key).__name__}, wanted a string")
        try:
            re.compile(_anchored(key))
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{name} key {key!r} is not a regular expression: {error}") from None
    return value


def _names(raw: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = raw.get(name) or []
    if isinstance(value, (set, frozenset)):  # PEFT's own configurations hold sets
        value = sorted(value, key=str)
    if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
        raise ValueError(f"{name} is {value!r}, wanted a list of names")
    return tuple(value)


def _flag(name: str, value: Any) -> bool:
    if value not in (True, False, None):
        raise ValueError(f"{name} is {value!r}, wanted true or false")
    return bool(value)


def _rank(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_RANK:
        raise ValueError(f"rank {name} is {_short(value)}, wanted an integer from 1 to {MAX_RANK}")
    return value


def _alpha(name: str, value: Any) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not -MAX_ALPHA <= value <= MAX_ALPHA:
        raise ValueError(f"alpha {name} is {_short(value)}, wanted a number that float32 holds")
    return float(value)


def _short(value: Any) -> str:
    """A number may have thousands of digits."""
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**40 else "a huge integer"
    return text if len(text) <= 80 else text[:77] + "..."
