"""What the plugin does in this environment, by vLLM's classes of layers."""

from __future__ import annotations

from dataclasses import replace

from moelora.integrations import switched_on
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
        one = part(method.about, cls, method.needed)
        if one.runs == "moelora" and quantized:
            one = replace(one, runs="own", why=quantized)
        found.append(one)
    adapters = part("adapters of layers that stay with vLLM", "PunicaWrapperGPU", interface.DELTAS)
    linears = part("adapters of linear layers", "PunicaWrapperGPU", interface.LINEAR)
    if linears.runs == "moelora" and (why := linear.off_here()):
        linears = replace(linears, runs="own", why=why)
    copies = part("copies to slots, ahead", "LoRAModelManager", interface.PREFETCH)
    if copies.runs == "moelora" and not switched_on(PREFETCH):
        copies = replace(copies, runs="own", why=f"no {PREFETCH}=1")
    return [*found, adapters, linears, copies]


REPORT = Report(
    engine="vLLM",
    group="vllm.general_plugins",
    allowed="VLLM_PLUGINS",
    names=lambda given: set(given.split(",")),
    switch=SWITCH,
    problem_here=problem_here,
    parts=parts,
)
