"""What the plugin does in this environment, by SGLang's classes of layers."""

from __future__ import annotations

from moelora.integrations.report import Part, Report, part
from moelora.integrations.sglang import SWITCH, interface, problem_here
from moelora.integrations.sglang.quantized import KINDS

LAYERS = {
    "unquantized, --lora-backend triton or csgmv": ("FusedMoEWithLoRA", interface.LEGACY),
    f"unquantized, {', '.join(kind.about for kind in KINDS)}; --lora-backend triton_v2": (
        "MoeLoraRunner",
        interface.TRITON_V2,
    ),
}


def parts() -> list[Part]:
    return [part(layers, cls, needed) for layers, (cls, needed) in LAYERS.items()]


def names(given: str) -> set[str] | None:
    """SGLang strips spaces, and takes an empty variable for one that is not set."""
    return {name.strip() for name in given.split(",")} if given else None


REPORT = Report(
    engine="SGLang",
    group="sglang.srt.plugins",
    allowed="SGLANG_PLUGINS",
    names=names,
    switch=SWITCH,
    problem_here=problem_here,
    parts=parts,
)
