"""Baselines of `moelora bench` that a wheel does not have: vLLM's kernels without vLLM.

docs/benchmarks.md says what `$MOELORA_PEERS` must contain.
"""

from moelora.bench import baselines

QUANTIZED = {
    "marlin": ("Marlin", "vLLM's Marlin layer"),
    "triton_fp8": ("TritonFP8", "vLLM's layer of FP8 blocks"),
}


def register() -> None:
    """Make them known to `moelora bench` in this process; `vllm` replaces that of the wheel."""
    baselines.BASELINES["vllm"] = "benchmarks.baselines.vllm:VLLM"
    baselines.ABOUT["vllm"] = "vLLM's own kernels, from $MOELORA_PEERS"
    for name, (symbol, about) in QUANTIZED.items():
        baselines.BASELINES[name] = f"benchmarks.baselines.vllm_quantized:{symbol}"
        baselines.ABOUT[name] = f"{about}, from $MOELORA_PEERS"
    baselines.READ_QUANTIZED.update(QUANTIZED)
    usual = baselines.DEFAULTS_OF_QUANTIZED["cuda"]
    usual += [name for name in QUANTIZED if name not in usual]
