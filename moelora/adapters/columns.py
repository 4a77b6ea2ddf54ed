"""The order of the columns of `lora_B` of a stack of experts: by rank or by expert.

PEFT's `target_parameters` keep A of all experts as (E*r, in) with row e*r + k, and B as (out, r*E)
with column k*E + e: `rank_major`. Unsloth trains with column e*r + k, `grouped_by_expert`, and
nothing in the tensors tells which it is: read in the wrong order, every expert gets columns of
others. So an adapter is read when its configuration says how its columns lie, or when the order is
that of the tool that wrote it; one that may be either is refused unless the caller says which.

Unsloth from 2026.9.6 on writes `lora_B_layout` into adapter_config.json, and into
`unsloth_fused_expert_lora` the layout of each parameter. Before, it wrote grouped columns (unless
UNSLOTH_MOE_LORA_MERGED=1) and marked a file by `auto_mapping.unsloth_fixed` alone. Megatron-Bridge
writes grouped columns into configurations that hold a part of PEFT's options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

Layout: TypeAlias = Literal["rank_major", "grouped_by_expert"]

MARK = "lora_B_layout"
DETAIL = "unsloth_fused_expert_lora"

# Every release of PEFT that knows `target_parameters` writes this option; Megatron-Bridge does not,
# and writes those below.
_PEFTS_OWN = "layers_to_transform"
_BRIDGES = {"fan_in_fan_out", "auto_mapping", "task_type", "inference_mode", "use_dora"}


@dataclass(frozen=True)
class Columns:
    """What a configuration says of the order of columns.

    `stated` has the layout by name of PEFT's parameter, `common` that of all others; `doubt` is why
    nobody can tell, where nothing is stated and the writer is not known to keep PEFT's order.
    """

    stated: Mapping[str, Layout] = field(default_factory=dict)
    common: Layout | None = None
    doubt: str | None = None

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Columns:
        """From the content of adapter_config.json; ValueError names an option that says nothing."""
        mapping = raw.get("auto_mapping")
        mapping = mapping if isinstance(mapping, Mapping) else {}
        for source in (raw, mapping):
            common = _layout(MARK, source.get(MARK))
            stated = _detail(source.get(DETAIL))
            if common is not None or stated:
                return cls(stated, common)
        doubt = None
        if raw.get("target_parameters") and mapping.get("unsloth_fixed"):
            doubt = (
                "Unsloth wrote the adapter before it marked how columns of lora_B lie; it is "
                "'grouped_by_expert' unless UNSLOTH_MOE_LORA_MERGED=1 was set in training"
            )
        elif (
            raw.get("target_parameters")
            and raw.keys() >= _BRIDGES
            and not raw.keys() & {_PEFTS_OWN, "peft_version"}
        ):
            doubt = (
                "the configuration is not PEFT's own, but like those of Megatron-Bridge, whose "
                "columns of lora_B are 'grouped_by_expert'"
            )
        return cls(doubt=doubt)

    def of(self, parameter: str, wanted: Layout | None) -> Layout:
        """The layout of a parameter, `wanted` being what the caller says.

        Raises ValueError if it cannot be told, or if the caller contradicts the configuration.
        """
        stated = self.stated.get(parameter, self.common)
        if stated is None and wanted is None and self.doubt is not None:
            raise ValueError(f"{self.doubt}; pass layout= to say which it is")
        if stated is not None and wanted not in (stated, None):
            raise ValueError(f"layout is {wanted!r}, but the configuration says {stated!r}")
        return stated or wanted or "rank_major"

    @property
    def peft_order(self) -> bool:
        """Whether a reader that knows PEFT's order alone is known to read the adapter right."""
        return self.doubt is None and {*self.stated.values(), self.common} <= {"rank_major", None}


def check(layout: Layout | None) -> None:
    """Raises ValueError for an argument `layout` that is none."""
    if layout is not None:
        _layout("layout", layout)


def _layout(name: str, value: Any) -> Layout | None:
    if not value:
        return None
    for known in get_args(Layout):
        if value == known:
            return known
    raise ValueError(f"{name} is {value!r:.60}, wanted one of {list(get_args(Layout))}")


def _detail(value: Any) -> dict[str, Layout]:
    """Layouts by parameter, from what Unsloth writes in detail."""
    if not value:
        return {}
    rows = value.get("lora_A_layout", "grouped_by_expert") if isinstance(value, Mapping) else None
    parameters = value.get("parameters", {}) if isinstance(value, Mapping) else None
    if rows != "grouped_by_expert" or not isinstance(parameters, Mapping):
        raise ValueError(f"{DETAIL} is {value!r:.200}, which is not understood")
    stated: dict[str, Layout] = {}
    for name, entry in parameters.items():
        found = entry.get(MARK) if isinstance(entry, Mapping) else None
        layout = _layout(f"{DETAIL}.parameters.{name!s:.60}.{MARK}", found)
        if layout is None:
            raise ValueError(f"{DETAIL}.parameters.{name!s:.60} has no {MARK}")
        stated[str(name)] = layout
    return stated
