"""What engines are held against: transformers in float32, each adapter merged into the weights.

    python -m benchmarks.engine_reference --model /tmp/tiny --lps /tmp/lps-moelora.json

Reads a folder of `benchmarks.engine_model`, and the log-probabilities of prompts that an engine
gave, the base model's and each adapter's (`benchmarks.answers.write_replies`). Says of each how far
they are from the reference's, and how far another adapter's would be. Exit status 1 where the
median of the first exceeds --tol, or a third of the median of the second.
"""

import argparse
import json
import os
import pathlib
import re
import statistics
import sys
from contextlib import contextmanager

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from safetensors.torch import load_file

PAIR = re.compile(r"base_model\.model\.model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(\w+)_proj\.")


def weight_of(model, layer, expert, projection):
    """The weight of one projection, as a view."""
    experts = model.model.layers[layer].mlp.experts
    if not hasattr(experts, "gate_up_proj"):  # transformers before 5 has a module for each expert
        return getattr(experts[expert], f"{projection}_proj").weight.data
    if projection == "down":
        return experts.down_proj.data[expert]
    return experts.gate_up_proj.data[expert].chunk(2)[projection == "up"]


@contextmanager
@torch.no_grad()
def merged(model, folder):
    """The model with an adapter, which is taken out again."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    scaling, before = config["lora_alpha"] / config["r"], []
    for key in (key for key in tensors if ".lora_A." in key):
        found = PAIR.match(key)
        if found is None:
            raise ValueError(f"{key} is not of an expert")
        weight = weight_of(model, int(found[1]), int(found[2]), found[3])
        before.append((weight, weight.clone()))
        a, b = (t.to(weight) for t in (tensors[key], tensors[key.replace("lora_A", "lora_B")]))
        weight += scaling * b @ a
    try:
        yield
    finally:
        for weight, was in before:
            weight.copy_(was)


@torch.no_grad()
def prompt_logprobs(model, prompts):
    """Of each prompt's tokens from the second on."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        logprobs = torch.log_softmax(model(ids).logits[0].float(), -1)
        found.append(logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist())
    return found


def differences(ours, theirs):
    pairs = zip(ours, theirs, strict=True)
    return [abs(x - y) for a, b in pairs for x, y in zip(a, b, strict=True)]


def judge(name, wanted, got, other, tolerance):
    """(line, whether it is right): `got` is what the engine gave, `other` what of another."""
    off = differences(wanted, got)
    median, wrong = statistics.median(off), statistics.median(differences(wanted, other))
    right = median < tolerance and median < wrong / 3
    p95 = sorted(off)[int(0.95 * len(off))]
    return (
        f"{name:<14} |dlp| median {median:.4f} p95 {p95:.4f}   against the wrong model "
        f"{wrong:.4f}   {'ok' if right else 'BAD'}"
    ), right


def main(argv=None, merged=merged, **how):
    """With `merged` of another model's adapters, and how transformers is to load it."""
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--model", type=pathlib.Path, required=True, help="folder with manifest.json")
    p.add_argument("--lps", type=pathlib.Path, required=True, help="what the engine gave")
    p.add_argument("--tol", type=float, default=0.1, help="of the median (default: %(default)s)")
    args = p.parse_args(argv)
    from transformers import AutoModelForCausalLM

    manifest = json.loads((args.model / "manifest.json").read_text())
    folders = {f.name: f for f in map(pathlib.Path, manifest["adapters"])}
    given = json.loads(args.lps.read_text())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(manifest["base"], dtype=torch.float32, **how)
    model = model.to(device).eval()
    print(f"reference: transformers, adapters merged in float32 on {device}")
    all_right = True
    for i, name in enumerate(given["names"]):
        if name == "base":
            wanted = prompt_logprobs(model, given["prompts"])
        else:
            with merged(model, folders[name]):
                wanted = prompt_logprobs(model, given["prompts"])
        other = given["lps"][0 if i else -1]
        line, right = judge(name, wanted, given["lps"][i], other, args.tol)
        all_right &= right
        print(line)
    print(f"reference check {'OK' if all_right else 'FAILED'}")
    return 0 if all_right else 1


if __name__ == "__main__":
    sys.exit(main())
