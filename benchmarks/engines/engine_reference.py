"""The reference of engines' answers: transformers in float32, each adapter merged into the weights.

    python -m benchmarks.engines.engine_reference --model /tmp/tiny --lps /tmp/lps-moelora.json

Reads a folder of `engine_model` and log-probabilities of prompts from an engine, for the base model
and each adapter (`answers.write_replies`). Prints how far each is from the reference, and how far
those of another adapter would be, a line of JSON each. Exit status 1: a median of the former
exceeds --tol, or a third of the median of the latter.
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

KEY = re.compile(r"\.layers\.(\d+)\.mlp\.experts(?:\.(\d+)\.(\w+)_proj|(\.base_layer)?)\.lora_A\.")
LINEAR = re.compile(r"\.(layers\.\d+\.self_attn\.\w+_proj)\.lora_A\.")


def weight_of(model, layer, expert, projection):
    """The weight of one projection, as a view."""
    experts = model.model.layers[layer].mlp.experts
    if projection == "down":
        return experts.down_proj.data[expert]
    return experts.gate_up_proj.data[expert].chunk(2)[projection == "up"]


def deltas(model, folder):
    """(weight, what an adapter adds to it), of pairs per expert and of `target_parameters`: these
    have A (E r, columns), B (rows, r E) and parameters (E, columns, rows)."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    for key in (key for key in tensors if ".lora_A." in key):
        rank = config["r"]
        a, b = (tensors[k].to(model.device).float() for k in (key, key.replace("lora_A", "lora_B")))
        b *= config["lora_alpha"] / rank
        if linear := LINEAR.search(key):
            yield model.model.get_submodule(linear[1]).weight.data, b @ a
            continue
        found = KEY.search(key)
        if found is None:
            raise ValueError(f"{key} is neither of an expert nor of attention")
        layer = int(found[1])
        if found[2]:
            yield weight_of(model, layer, int(found[2]), found[3]), b @ a
        else:
            name = "gate_up_proj" if found[4] else "down_proj"
            weight = getattr(model.model.layers[layer].mlp.experts, name).data
            a, b = a.unflatten(0, (-1, rank)), b.unflatten(1, (rank, -1))
            yield weight, torch.einsum("erc,nre->ecn", a, b)


@contextmanager
@torch.no_grad()
def merged(model, folder):
    """The model with an adapter, which is removed afterwards."""
    before = []
    for weight, delta in deltas(model, folder):
        before.append((weight, weight.clone()))
        weight += delta
    try:
        yield
    finally:
        for weight, was in before:
            weight.copy_(was)


@torch.no_grad()
def prompt_logprobs(model, prompts, **options):
    """Of each prompt's tokens from the second on; `options` are for the model."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        logprobs = torch.log_softmax(model(ids, **options).logits[0].float(), -1)
        found.append(logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist())
    return found


def differences(ours, theirs):
    pairs = zip(ours, theirs, strict=True)
    return [abs(x - y) for a, b in pairs for x, y in zip(a, b, strict=True)]


def judge(name, wanted, got, other, tolerance):
    """Compares an engine's log-probabilities `got` with those of its adapter, `wanted`, and with
    those of another adapter, `other`. With an infinite tolerance any distance is ok."""
    off, wrong = sorted(differences(wanted, got)), statistics.median(differences(wanted, other))
    median, p95 = statistics.median(off), off[int(0.95 * len(off))]
    row = {"median": round(median, 4), "p95": round(p95, 4), "another": round(wrong, 4)}
    ok = tolerance == float("inf") or median < min(tolerance, wrong / 3)
    return {"who": name} | row | {"ok": ok}


def main(argv=None):
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
    how = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(manifest["base"], **how).to(device).eval()
    model.set_experts_implementation("eager")
    rows = []
    for i, name in enumerate(given["names"]):
        if name == "base":
            wanted = prompt_logprobs(model, given["prompts"])
        else:
            with merged(model, folders[name]):
                wanted = prompt_logprobs(model, given["prompts"])
        other = given["lps"][0 if i else -1]
        rows.append(judge(name, wanted, given["lps"][i], other, args.tol))
        print(json.dumps(rows[-1]), flush=True)
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
