"""What the plugin does in this environment, by vLLM's classes of layers."""

from __future__ import annotations

import functools

from moelora.integrations import switched_off
from moelora.integrations.report import Part, Report, part
from moelora.integrations.vllm import PREFETCH, SWITCH, interface, linear, problem_here
from moelora.integrations.vllm.formats import FORMATS


def parts() -> list[Part]:
    found = [
        part("unquantized", "TritonExperts", interface.LAYERS),
        part("unquantized, batched by expert", "BatchedTritonExperts", interface.BATCHED),
    ]
    quantized = interface.problem(interface.QUANTIZED)
    for method in FORMATS.values():
        functions = next(iter(method.needed.replaced.values()))
        cls = next(iter(functions)).partition(".")[0]
        found.append(part(method.about, cls, method.needed, lambda: quantized))
    punica, slots = "PunicaWrapperGPU", "LoRAModelManager"
    off = functools.partial(switched_off, PREFETCH)
    return [
        *found,
        part("adapters of layers that stay with vLLM", punica, interface.DELTAS),
        part("adapters of linear layers", punica, interface.LINEAR, linear.off_here),
        part("copies to slots, ahead", slots, interface.PREFETCH, off),
    ]


REPORT = Report(
    engine="vLLM",
    group="vllm.general_plugins",
    allowed="VLLM_PLUGINS",
    names=lambda given: set(given.split(",")),
    switch=SWITCH,
    problem_here=problem_here,
    parts=parts,
)
