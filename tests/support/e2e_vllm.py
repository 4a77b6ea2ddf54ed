"""A pretended vLLM, for the tests of the benchmarks that start engines."""

import json

from e2e import pretend

INSTALL = """\
mkdir -p $SITE/vllm/lora
cp $(dirname $0)/vllm.py $SITE/vllm/__init__.py
touch $SITE/vllm/lora/__init__.py
echo 'from types import SimpleNamespace
def LoRARequest(name, number, path):
    return SimpleNamespace(lora_name=name, lora_int_id=number)' > $SITE/vllm/lora/request.py
"""

REFERENCE = """\
import json, sys
assert json.load(open(sys.argv[-1]))["names"][0] == "base"
print("base  |dlp| median 0.0100 p95 0.1")
print("reference check OK")
"""

VLLM = """\
import importlib.metadata, os, sys
from types import SimpleNamespace as N

import torch

class Experts(torch.nn.Module):
    def forward(self, hidden_states, router_logits):
        return 2 * hidden_states

def SamplingParams(**options):
    return N(**options)

class LLM:
    def __init__(self, **options):
        plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
        served = os.environ["MOELORA_VLLM"] == "1" and "moelora" in plugins.names
        self.name = "TritonExpertsWithLoRA" if served else "TritonExperts"
        self.experts = Experts()
        if options.get("enable_expert_parallel"):
            sys.exit("no experts here")

    def collective_rpc(self, function):
        kernel = N(fused_experts=type(self.name, (), {})())
        model = N(modules=lambda: [N(_moe_kernel=kernel)],
                  named_modules=lambda: [("layers.0.mlp.experts", self.experts)])
        return [function(N(get_model=lambda: model))]

    def generate(self, prompts, sampling, use_tqdm, lora_request):
        rows = torch.tensor([[sum(p["prompt_token_ids"]), 1.0] for p in prompts])
        self.experts(hidden_states=rows, router_logits=rows)
        return [self.one(p["prompt_token_ids"], a, sampling.max_tokens)
                for p, a in zip(prompts, lora_request or [None] * len(prompts))]

    def one(self, ids, adapter, new):
        shift = adapter.lora_int_id if adapter else 0
        prompt = [None] + [{i: N(logprob=-1.0 - shift)} for i in ids[1:]]
        tokens = [(sum(ids) + shift + n) % 100 for n in range(new)]
        top = [{t: N(logprob=-0.1), t + 1: N(logprob=-3.0)} for t in tokens]
        return N(prompt_token_ids=ids, prompt_logprobs=prompt,
                 outputs=[N(token_ids=tokens, logprobs=top)])
"""


def pack(tmp_path, monkeypatch):
    """A folder for --peers."""
    folder = tmp_path / "peers"
    folder.mkdir()
    (folder / "install_chunk.sh").write_text(INSTALL)
    pretend(monkeypatch, folder, REFERENCE)
    (folder / "vllm.py").write_text(VLLM)
    return folder


def run(benchmark, tmp_path, peers, *options):
    """Exit status, result file and log of a benchmark."""
    out = tmp_path / "out" / "e2e.json"
    arguments = ["--peers", peers, "--out", out, "--work", tmp_path / "work", *options]
    code = benchmark.main([str(a) for a in arguments])
    return code, json.loads(out.read_text()), out.with_suffix(".log").read_text()
