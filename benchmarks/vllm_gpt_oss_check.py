"""transformers' gpt-oss in float32, each adapter merged, against an engine's log-probabilities.

    python -m benchmarks.vllm_gpt_oss_check --model /tmp/tiny-mxfp4-dense --lps /tmp/lps.json

What `hf_check.py` is for Qwen3-MoE, and it prints the same lines: the folder is one that
`benchmarks.vllm_gpt_oss` made of unquantised experts, the replies are those of
`benchmarks.answers.write_replies`. Adapters have the layout of PEFT's `target_parameters`: A
(E r, columns) with the experts one behind the other, B (rows, r E) with the experts in turns, of
parameters (E, columns, rows). The exit status is 1 where a median is not below --tol, or the model
of another adapter is not three times as far away.
"""

import argparse
import json
import pathlib
import statistics
import sys

import torch
from safetensors.torch import load_file


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


@torch.no_grad()
def merge(model, folder):
    """Adds an adapter; what there was before, by parameter."""
    before = {}
    for layer, name, delta in deltas(folder, model.device):
        parameter = getattr(model.model.layers[layer].mlp.experts, name)
        before[parameter] = parameter.clone()
        parameter += delta
    return before


@torch.no_grad()
def log_probabilities(model, prompt):
    """Of a prompt's tokens from the second on."""
    ids = torch.tensor([prompt], device=model.device)
    scores = torch.log_softmax(model(ids).logits[0].float(), -1)
    return scores[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()


def apart(a, b):
    return [abs(x - y) for u, v in zip(a, b, strict=True) for x, y in zip(u, v, strict=True)]


def main(argv=None):
    from transformers import AutoModelForCausalLM

    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--model", type=pathlib.Path, required=True, help="folder with manifest.json")
    p.add_argument("--lps", type=pathlib.Path, required=True)
    p.add_argument("--tol", type=float, default=0.1, help="allowed median of the differences")
    args = p.parse_args(argv)
    manifest = json.loads((args.model / "manifest.json").read_text())
    adapters = {pathlib.Path(a).name: pathlib.Path(a) for a in manifest["adapters"]}
    got = json.loads(args.lps.read_text())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(manifest["base"], dtype=torch.float32, **how)
    model = model.to(device).eval()
    good = True
    for i, name in enumerate(got["names"]):
        before = merge(model, adapters[name]) if name != "base" else {}
        exact = [log_probabilities(model, prompt) for prompt in got["prompts"]]
        for parameter, values in before.items():
            parameter.data.copy_(values)
        off, wrong = apart(exact, got["lps"][i]), apart(exact, got["lps"][0 if i else -1])
        median, other = statistics.median(off), statistics.median(wrong)
        ok = median < args.tol and other > 3 * median
        good = good and ok
        print(
            f"{name:<14} |dlp| median {median:.4f} p95 {sorted(off)[int(0.95 * len(off))]:.4f}"
            f"   against the wrong model {other:.4f}   {'ok' if ok else 'BAD'}"
        )
    print("reference check", "OK" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
