"""Maps linear layers of a folder to projections of a model's experts.

Names of experts in checkpoints differ from those of transformers' modules, for instance Mixtral's
`block_sparse_moe.experts.0.w1`. transformers' conversion mapping is tried first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, rename_source_key

from moelora.adapters import MoELayer
from moelora.integrations.transformers.projection import Experts, up_name

# Name of a single expert's projection.
OF_ONE = re.compile(r"(^|\.)experts\.(\d+)\.\w+$")
# Names of projections used by quantizers that split experts, and the places of gate and up.
PLACES = {"gate_proj": 0, "up_proj": 1, "w1": 0, "w3": 1}
DOWN = ("down_proj", "w2")

# Linear layers of an MoE layer by projection ("down_proj", or up_name), place and expert.
Linears: TypeAlias = "dict[tuple[str, int, int], str]"


def expert_linears(
    model: PreTrainedModel, layers: Mapping[str, tuple[Experts, MoELayer]], names: Iterable[str]
) -> dict[str, Linears]:
    """Finds, for each of `layers`, the linear layers of its experts among `names`.

    Gate has place 0 and up place 1 of the first projection; without a gate, up has place 0.
    """
    wanted = {}
    for layer, (experts, _) in layers.items():
        for own in (up_name(experts), "down_proj"):
            wanted[f"{layer}.{own}"] = (layer, own)
    transforms = get_model_conversion_mapping(model)
    converters: list[Any] = [t for t in transforms if isinstance(t, WeightConverter)]
    renamings: list[Any] = [t for t in transforms if not isinstance(t, WeightConverter)]
    prefix, known = model.base_model_prefix, dict.fromkeys(wanted, True)
    found: dict[str, Linears] = {layer: {} for layer in layers}
    for name in names:
        match = OF_ONE.search(name)
        if match is None:
            continue
        key, pattern = rename_source_key(f"{name}.weight", renamings, converters, prefix, known)
        place = 0
        if pattern is not None and key in wanted:
            sources = next(c.source_patterns for c in converters if pattern in c.source_patterns)
            place = sources.index(pattern)
        else:
            key, place = _by_its_own_name(name, renamings, prefix, known)
        if key in wanted:
            layer, own = wanted[key]
            found[layer][own, place, int(match[2])] = name
    return found


def _by_its_own_name(
    name: str, renamings: list[Any], prefix: str, known: dict[str, bool]
) -> tuple[str, int]:
    """Place of a projection for which transformers only converts stacks of all experts."""
    experts, _, projection = name.rpartition(".")
    experts = experts.rpartition(".")[0]
    is_down = projection in DOWN
    for own in ("down_proj",) if is_down else ("gate_up_proj", "up_proj"):
        key, _ = rename_source_key(f"{experts}.{own}", renamings, [], prefix, known)
        if key in known and (is_down or projection in PLACES):
            return key, 0 if is_down or own == "up_proj" else PLACES[projection]
    return "", 0
