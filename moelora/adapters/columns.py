"""Column order of `lora_B` of an expert stack: by rank or by expert.

PEFT's `target_parameters` store A of all experts as (E*r, in) with row e*r + k, and B as (out, r*E)
with column k*E + e: `rank_major`. Unsloth trains with column e*r + k, `grouped_by_expert`, and the
tensors do not tell which it is: in the wrong order, every expert would get columns of others. An
adapter is therefore accepted only if its configuration states the order, or if the tool that wrote
it is known; an ambiguous one is refused unless the caller states the order.

Unsloth from 2026.9.6 on writes `lora_B_layout` to adapter_config.json, and the layout of each
parameter to `unsloth_fused_expert_lora`. Before, it wrote grouped columns (unless
UNSLOTH_MOE_LORA_MERGED=1), and only `auto_mapping.unsloth_fixed` identifies its files.
Megatron-Bridge writes grouped columns, with a configuration that has a part of PEFT's options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

Layout: TypeAlias = Literal["rank_major", "grouped_by_expert"]

MARK = "lora_B_layout"
DETAIL = "unsloth_fused_expert_lora"

# Every release of PEFT with `target_parameters` writes this option. Megatron-Bridge does not, but
# writes those below.
_PEFTS_OWN = "layers_to_transform"
_BRIDGES = {"fan_in_fan_out", "auto_mapping", "task_type", "inference_mode", "use_dora"}


@dataclass(frozen=True)
class Columns:
    """Column orders according to a configuration.

    `stated` has the layout by name of PEFT's parameter, `common` that of all others. `doubt` is the
    reason why the order is ambiguous, if it is not stated and the writer is unknown.
    """

    stated: Mapping[str, Layout] = field(default_factory=dict)
    common: Layout | None = None
    doubt: str | None = None

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Columns:
        """Parse adapter_config.json. ValueError names an option that cannot be interpreted."""
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
        """Layout of a parameter; `wanted` is the caller's.

        Raises ValueError if it is ambiguous, or if the caller contradicts the configuration.
        """
        stated = self.stated.get(parameter, self.common)
        if stated is None and wanted is None and self.doubt is not None:
            raise ValueError(f"{self.doubt}; pass layout= to say which it is")
        if stated is not None and wanted not in (stated, None):
            raise ValueError(f"layout is {wanted!r}, but the configuration says {stated!r}")
        return stated or wanted or "rank_major"

    @property
    def peft_order(self) -> bool:
        """Whether a reader that only knows PEFT's order certainly reads the adapter correctly."""
        return self.doubt is None and {*self.stated.values(), self.common} <= {"rank_major", None}


def check(layout: Layout | None) -> None:
    """Raise ValueError for an invalid `layout` argument."""
    _layout("layout", layout)


def _layout(name: str, value: Any) -> Layout | None:
    if not value:
        return None
    for known in get_args(Layout):
        if value == known:
            return known
    raise ValueError(f"{name} is {value!r:.60}, wanted one of {list(get_args(Layout))}")


def _detail(value: Any) -> dict[str, Layout]:
    """Layouts by parameter, from Unsloth's detailed option."""
    if not value:
        return {}
    rows = value.get("lora_A_layout", "grouped_by_expert") if isinstance(value, Mapping) else None
    parameters = value.get("parameters", {}) if isinstance(value, Mapping) else None
    if rows != "grouped_by_expert" or not isinstance(parameters, Mapping):
        raise ValueError(f"{DETAIL} is {value!r:.200}, which is not understood")
    stated: dict[str, Layout] = {}
    for name, entry in parameters.items():
        found = entry.get(MARK) if isinstance(entry, Mapping) else None
        where = f"{DETAIL}.parameters.{name!s:.60}"
        if (layout := _layout(f"{where}.{MARK}", found)) is None:
            raise ValueError(f"{where} has no {MARK}")
        stated[str(name)] = layout
    return stated
