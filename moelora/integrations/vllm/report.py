"""What the plugin does in this environment, by vLLM's classes of layers."""

from __future__ import annotations

from dataclasses import replace

from moelora.integrations.report import Part, Report, part
from moelora.integrations.vllm import SWITCH, interface, problem_here

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


def parts() -> list[Part]:
    found = [
        part("unquantized", "TritonExperts", interface.LAYERS),
        part("unquantized, batched by expert", "BatchedTritonExperts", interface.BATCHED),
    ]
    quantized = interface.problem(interface.QUANTIZED)
    for name, needed in interface.METHODS.items():
        functions = next(iter(needed.replaced.values()))
        cls = next(iter(functions)).partition(".")[0]
        one = part(FORMATS[name], cls, needed)
        if one.runs == "moelora" and quantized:
            one = replace(one, runs="own", why=quantized)
        found.append(one)
    adapters = part("adapters of layers that stay with vLLM", "PunicaWrapperGPU", interface.DELTAS)
    return [*found, adapters]


REPORT = Report(
    engine="vLLM",
    group="vllm.general_plugins",
    allowed="VLLM_PLUGINS",
    names=lambda given: set(given.split(",")),
    switch=SWITCH,
    problem_here=problem_here,
    parts=parts,
)
