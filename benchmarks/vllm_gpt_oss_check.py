"""transformers' gpt-oss in float32, each adapter merged, against an engine's log-probabilities.

    python -m benchmarks.vllm_gpt_oss_check --model /tmp/tiny-mxfp4-dense --lps /tmp/lps.json

What `benchmarks.engine_reference` is for Qwen3-MoE: the folder is one that
`benchmarks.vllm_gpt_oss` made of unquantized experts. Adapters have the layout of PEFT's
`target_parameters`: A (E r, columns) with the experts one behind the other, B (rows, r E) with the
experts in turns, of parameters (E, columns, rows).
"""

import json
import sys
from contextlib import contextmanager

import torch
from safetensors.torch import load_file

from benchmarks import engine_reference


def deltas(folder, device):
    """(layer, name of its parameter, what the adapter adds to it) of an adapter."""
    config = json.loads((folder / "adapter_config.json").read_text())
    factors = load_file(folder / "adapter_model.safetensors", device=str(device))
    for key, a in factors.items():
        if ".lora_A." not in key:
            continue
        b = factors[key.replace(".lora_A.", ".lora_B.")] * (config["lora_alpha"] / config["r"])
        a = a.float().unflatten(0, (-1, config["r"]))  # (E, r, columns)
        b = b.float().unflatten(1, (config["r"], -1))  # (rows, r, E)
        name = "gate_up_proj" if ".base_layer." in key else "down_proj"
        layer = int(key.partition(".layers.")[2].partition(".")[0])
        yield layer, name, torch.einsum("erc,nre->ecn", a, b)


@contextmanager
@torch.no_grad()
def merged(model, folder):
    """The model with an adapter, which is taken out again."""
    before = {}
    for layer, name, delta in deltas(folder, model.device):
        parameter = getattr(model.model.layers[layer].mlp.experts, name)
        before[parameter] = parameter.clone()
        parameter += delta
    try:
        yield
    finally:
        for parameter, values in before.items():
            parameter.copy_(values)


def main(argv=None):
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return engine_reference.main(argv, merged, **how)


if __name__ == "__main__":
    sys.exit(main())
