"""What the plugin does in this environment, part by part, without starting an engine."""

from __future__ import annotations

import importlib.metadata
import os
from dataclasses import dataclass

from moelora.integrations.vllm import OWN_PATH, SWITCH, interface, problem_here

GROUP = "vllm.general_plugins"
PLUGINS = "VLLM_PLUGINS"

FORMATS = {  # of interface.METHODS
    "gpt_oss": "MXFP4 of gpt-oss",
    "mxfp4": "MXFP4",
    "mxfp4_compressed_tensors": "MXFP4, compressed-tensors",
    "nvfp4_modelopt": "NVFP4 with 16-bit activations, ModelOpt",
    "nvfp4_compressed_tensors": "NVFP4 with 16-bit activations, compressed-tensors",
    "gptq": "INT4, GPTQ",
    "awq": "INT4, AWQ",
    "compressed_tensors": "INT4, compressed-tensors",
    "compressed_tensors_marlin": "INT4, compressed-tensors with Marlin",
    "fp8": "FP8",
    "fp8_compressed_tensors": "FP8, compressed-tensors",
}


@dataclass(frozen=True)
class Part:
    """Which implementation runs a class of layers, and the reason if it is not moelora."""

    layers: str
    cls: str
    runs: str  # "moelora", "vLLM", or "-": this release has no such class
    why: str = ""


def version() -> str | None:
    """That of the installed vLLM."""
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return None


def off() -> str | None:
    """Why vLLM runs as if moelora were not installed, or None."""
    names = [
        entry.name
        for entry in importlib.metadata.entry_points(group=GROUP)
        if entry.value.startswith("moelora.")
    ]
    if not names:
        return f"no installed package has moelora's entry point of {GROUP}: pip install the wheel"
    allowed = os.environ.get(PLUGINS)
    if allowed is not None and not {*names} & {*allowed.split(",")}:
        return f"{PLUGINS}={allowed} does not name {names[0]}, so vLLM does not load it"
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0"
    return problem_here()


def parts() -> list[Part]:
    """Layers by class and format, where the plugin is on. Imports vLLM."""
    found = [
        _part("unquantized", "TritonExperts", interface.LAYERS),
        _part("unquantized, batched by expert", "BatchedTritonExperts", interface.BATCHED),
    ]
    quantized = interface.problem(interface.QUANTIZED)
    for name, needed in interface.METHODS.items():
        functions = next(iter(needed.replaced.values()))
        cls = next(iter(functions)).partition(".")[0]
        part = _part(FORMATS[name], cls, needed)
        if part.runs == "moelora" and quantized:
            part = Part(part.layers, cls, "vLLM", quantized)
        found.append(part)
    adapters = _part("adapters of layers that stay with vLLM", "PunicaWrapperGPU", interface.DELTAS)
    return [*found, adapters]


def _part(layers: str, cls: str, needed: interface.Interface) -> Part:
    problem = interface.problem(needed)
    if problem is None:
        return Part(layers, cls, "moelora")
    absent = any(problem == f"there is no {place}" for place in _classes(needed))
    return Part(layers, cls, "-" if absent else "vLLM", "" if absent else problem)


def _classes(needed: interface.Interface) -> list[str]:
    """Full name of the first replaced function or class; a release without it has no such
    layers."""
    return [f"{module}.{name}" for module, names in needed.replaced.items() for name in names][:1]


def lines() -> tuple[list[str], bool]:
    """The report, and whether the plugin is on."""
    reason = off()
    if reason is not None:
        return [f"off: {reason}", OWN_PATH], False
    said = ["on: vLLM loads the plugin in every process"]
    every = parts()
    widths = [max(len(getattr(part, name)) for part in every) for name in ("layers", "cls")]
    for part in every:
        who = {"moelora": "moelora", "vLLM": "vLLM's own path", "-": "not in this release"}[
            part.runs
        ]
        why = f": {part.why}" if part.why else ""
        said.append(f"  {part.layers:{widths[0]}}  {part.cls:{widths[1]}}  {who}{why}")
    return said, True
