"""Log-probabilities of a trainer, or of the reference, beside those of an engine.

    python -m benchmarks.engines.trainer --model /tmp/tiny-fp8 --engine /tmp/moelora.json --out ...

Reads a folder of `engine_model` or `vllm_quantize` with its adapters, and --engine, the result of
`vllm_engine` or `sglang_engine`. --as is one of

trainer    transformers with moelora's experts, adapters as `moelora.training.Tenants`. Each call in
           --rows is repeated by the experts of its layer, such that autograd records it, and
           compared with what the engine's layer returned, bit for bit
usual      transformers' own experts in bfloat16, each adapter merged into the weights
reference  the same in float32
"""

import argparse
import json
import os
import pathlib
import re
import statistics
from contextlib import contextmanager
from functools import partial

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from safetensors.torch import load_file

from benchmarks.engines.answers import differences, prompts

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
KEY = re.compile(r"\.layers\.(\d+)\.mlp\.experts(?:\.(\d+)\.(\w+)_proj|(\.base_layer)?)\.lora_A\.")
LINEAR = re.compile(r"\.(layers\.\d+\.self_attn\.\w+_proj)\.lora_A\.")


def read(path):
    return json.loads(path.read_text())


def load(manifest, device, **options):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(manifest["base"], **options)
    return model.to(device).eval().requires_grad_(False)


@torch.no_grad()
def prompt_logprobs(model, prompts, **options):
    """Of each prompt's tokens from the second on; `options` are for the model."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        logprobs = torch.log_softmax(model(ids, **options).logits[0].float(), -1)
        found.append(logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist())
    return found


class Trainer:
    """The model of a folder, and its adapters in training."""

    def __init__(self, manifest, device):
        import moelora.integrations.transformers as moelora_hf
        from moelora.training import Tenants

        base = pathlib.Path(manifest["base"])
        if "quantization_config" in read(base / "config.json"):
            self.model = moelora_hf.load_quantized(base).to(device).eval()
        else:
            self.model = load(manifest, device, dtype=torch.bfloat16)
            moelora_hf.enable(self.model, training=True)
        folders = [pathlib.Path(f) for f in manifest["adapters"]]
        self.names = [f.name for f in folders]
        ranks = [read(f / "adapter_config.json")["r"] for f in folders]
        sizes = {"max_loras": len(folders), "max_rank": 2 * max(ranks)}  # gate and up in one pair
        options = {"w13_slices": 1, "targets": ["experts"]}
        self.pool = moelora_hf.load_adapters(self.model, {}, **sizes, **options)
        self.tenants = Tenants(self.pool)
        for folder in folders:
            self.tenants.add(folder.name, folder)

    def experts(self):
        """(module, the arguments of its adapters) of each layer, in order."""
        modules = dict(self.model.named_modules())
        return [(modules[name], self.pool.layer(name)) for name in self.pool.layers]

    def repeat(self, calls):
        """How many elements of the layers' results differ from those of an engine."""
        from moelora.integrations.transformers.experts import experts_forward

        layers, device = self.experts(), self.model.device
        elements = differing = rows = 0
        for call in calls:
            module, factors = layers[call["layer"]]
            who = [None if i < 0 else self.names[i] for i in call["adapters"].tolist()]
            x, ids, weights = (call[n].to(device) for n in ("x", "ids", "weights"))
            adapters = {**factors, "token_lora_mapping": self.pool.mapping(who)}
            with torch.enable_grad():
                out = experts_forward(module, x, ids, weights, adapters)
            if not out.requires_grad:
                raise RuntimeError("autograd has not recorded the layer: this is no training pass")
            bits = BITS[out.element_size()]
            got, wanted = out.detach().cpu().view(bits), call["out"].view(bits)
            differing += int((got != wanted).sum())
            elements, rows = elements + got.numel(), rows + len(x)
        return {"rows": rows, "elements": elements, "differing": differing}

    def logprobs(self, name, prompts):
        adapters = [None if name == "base" else name]
        return prompt_logprobs(self.model, prompts, adapter_names=adapters)


class Usual:
    """Experts of transformers, each adapter merged into the weights."""

    def __init__(self, manifest, device, **options):
        self.model = load(manifest, device, **options)
        self.folders = {f.name: f for f in map(pathlib.Path, manifest["adapters"])}

    def logprobs(self, name, prompts):
        if name == "base":
            return prompt_logprobs(self.model, prompts)
        with merged(self.model, self.folders[name]):
            return prompt_logprobs(self.model, prompts)


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


def deltas(model, folder):
    """(weight, what an adapter adds to it), of pairs per expert and of `target_parameters`: these
    have A (E r, columns), B (rows, r E) and parameters (E, columns, rows)."""
    config = read(folder / "adapter_config.json")
    rank, tensors = config["r"], load_file(folder / "adapter_model.safetensors")
    for key in (key for key in tensors if ".lora_A." in key):
        a, b = (tensors[k].to(model.device).float() for k in (key, key.replace("lora_A", "lora_B")))
        b *= config["lora_alpha"] / rank
        if linear := LINEAR.search(key):
            yield model.model.get_submodule(linear[1]).weight.data, b @ a
            continue
        layer, expert, projection, wrapped = KEY.search(key).groups()
        experts = model.model.layers[int(layer)].mlp.experts
        if expert is None:
            weight = experts.gate_up_proj if wrapped else experts.down_proj
            a, b = a.unflatten(0, (-1, rank)), b.unflatten(1, (rank, -1))
            yield weight.data, torch.einsum("erc,nre->ecn", a, b)
        elif projection == "down":
            yield experts.down_proj.data[int(expert)], b @ a
        else:
            yield experts.gate_up_proj.data[int(expert)].chunk(2)[projection == "up"], b @ a


def gap(check, logprobs):
    """Of each adapter: |difference| of the prompts' log-probabilities from those of an engine, and
    the median of that from what it answered for another adapter."""
    for i, name in enumerate(check["names"]):
        sampled, other = (prompts(check["alone"][n]) for n in (i, 0 if i else -1))
        wanted = logprobs(name, check["prompts"])
        off = sorted(differences(wanted, sampled))
        found = {"mean": statistics.mean(off), "median": statistics.median(off), "most": off[-1]}
        another = statistics.median(differences(wanted, other))
        yield name, found | {"p95": off[int(0.95 * len(off))], "another": another}


EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
KINDS = {"trainer": Trainer, "usual": partial(Usual, dtype=torch.bfloat16)}
KINDS["reference"] = partial(Usual, dtype=torch.float32, **EAGER)


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--as", choices=KINDS, default="trainer", dest="kind")
    p.add_argument("--model", type=pathlib.Path, required=True, help="folder with manifest.json")
    p.add_argument("--engine", type=pathlib.Path, help="result of the engine, with its replies")
    p.add_argument("--rows", type=pathlib.Path, help="calls of the engine's layers, for a trainer")
    p.add_argument("--out", type=pathlib.Path, required=True)
    args = p.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    trainer = KINDS[args.kind](read(args.model / "manifest.json"), device)
    result = {"gap": {}}
    if args.rows:
        result["bits"] = trainer.repeat(torch.load(args.rows))
    args.out.write_text(json.dumps(result))
    for name, row in gap(read(args.engine)["check"], trainer.logprobs):
        result["gap"][name] = row
        args.out.write_text(json.dumps(result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
