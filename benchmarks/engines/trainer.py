"""A trainer beside an engine that samples: the same bits in MoE layers, the same log-probabilities?

    python -m benchmarks.engines.trainer --model /tmp/tiny-fp8 --rows /tmp/rows.pt \\
        --engine /tmp/moelora.json --out /tmp/trainer.json
    python -m benchmarks.engines.trainer --usual --model /tmp/tiny --engine /tmp/vllm.json --out ...

Reads a folder of `engine_model` or `vllm_quantize` and its adapters as a trainer does: transformers
with moelora's experts, adapters as `moelora.training.Tenants`. Each call in --rows is repeated by
the experts of its layer, such that autograd records it, and compared with what the engine's layer
returned, bit for bit. Then come the log-probabilities of the prompts in --engine, a result of
`vllm_engine`. --usual is the trainer that most have: transformers' own experts in bfloat16,
each adapter merged into the weights.
"""

import argparse
import json
import os
import pathlib
import statistics

os.environ["HF_HUB_OFFLINE"] = "1"

import torch

from benchmarks.engines.engine_reference import differences, merged, prompt_logprobs

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


class Trainer:
    """The model of a folder, and its adapters in training."""

    def __init__(self, manifest, device):
        import moelora.integrations.transformers as moelora_hf
        from moelora.training import Tenants

        self.model = load(manifest, device, moelora_hf)
        folders = [pathlib.Path(f) for f in manifest["adapters"]]
        self.names = [f.name for f in folders]
        ranks = [json.loads((f / "adapter_config.json").read_text())["r"] for f in folders]
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
    """Experts of transformers in bfloat16."""

    def __init__(self, manifest, device):
        self.model = load(manifest, device)
        self.folders = {f.name: f for f in map(pathlib.Path, manifest["adapters"])}

    def logprobs(self, name, prompts):
        if name == "base":
            return prompt_logprobs(self.model, prompts)
        with merged(self.model, self.folders[name]):
            return prompt_logprobs(self.model, prompts)


def load(manifest, device, moelora_hf=None):
    """The model, with moelora's experts if given, of which quantized ones stay so."""
    from transformers import AutoModelForCausalLM

    base = pathlib.Path(manifest["base"])
    config = json.loads((base / "config.json").read_text())
    if "quantization_config" in config:
        return moelora_hf.load_quantized(base).to(device).eval()
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).to(device).eval()
    model.requires_grad_(False)
    if moelora_hf is not None:
        moelora_hf.enable(model, training=True)
    return model


def gap(check, logprobs):
    """Of each adapter: |difference| of the prompts' log-probabilities from those of an engine."""
    found = {}
    for i, name in enumerate(check["names"]):
        sampled = [reply["prompt"] for reply in check["alone"][i]]
        off = differences(logprobs(name, check["prompts"]), sampled)
        numbers = {"mean": statistics.mean, "median": statistics.median, "most": max}
        found[name] = {what: of(off) for what, of in numbers.items()}
    return found


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--model", type=pathlib.Path, required=True, help="folder with manifest.json")
    p.add_argument("--engine", type=pathlib.Path, help="result of the engine, with its replies")
    p.add_argument("--rows", type=pathlib.Path, help="calls of the engine's layers")
    p.add_argument("--usual", action="store_true", help="transformers' own experts in bfloat16")
    p.add_argument("--out", type=pathlib.Path, required=True)
    args = p.parse_args(argv)
    if args.usual and args.rows:
        p.error("--rows are of moelora's layers, which --usual does not have")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    manifest = json.loads((args.model / "manifest.json").read_text())
    trainer = (Usual if args.usual else Trainer)(manifest, device)
    result = {}
    if args.rows:
        result["bits"] = trainer.repeat(torch.load(args.rows))
        args.out.write_text(json.dumps(result))
    check = json.loads(args.engine.read_text()).get("check") if args.engine else None
    if check:
        result["gap"] = gap(check, trainer.logprobs)
    args.out.write_text(json.dumps(result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
