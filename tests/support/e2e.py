"""Pretended vLLM and SGLang, for the tests of the benchmarks that start engines."""

import json
import sys

from benchmarks.engines import jobs

MODEL = """\
import json, pathlib, sys
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
names = [out.name] if "--only-quantized" in sys.argv else [out.name, f"{out.name}-dense"]
for folder in (out.with_name(name) for name in names):
    folder.mkdir(parents=True)
    adapters = [str(folder / f"lora{i}-r{r}") for i, r in enumerate((16, 16, 64, 64), 1)]
    manifest = {"base": str(folder / "base"), "adapters": adapters, "vocab": 100, "shape": {}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
"""
TRAINER = """\
import json, sys
engine, out = (sys.argv[sys.argv.index(option) + 1] for option in ("--engine", "--out"))
assert json.load(open(engine))["check"]["names"][0] == "base"
gap = {"mean": 0.02, "median": 0.01, "most": 1.0, "p95": 0.1, "another": 2.0}
bits = {"rows": 2, "elements": 4, "differing": 0}
json.dump({"gap": {"base": gap}, "bits": bits}, open(out, "w"))
"""
SCRIPTS = {"make_model": MODEL, "quantize_model": MODEL, "train": TRAINER}

VLLM = """\
import importlib.metadata, os, sys, time
from datetime import timedelta
from types import SimpleNamespace as N

import torch

class Experts(torch.nn.Module):
    def forward(self, hidden_states, router_logits):
        is_dummy = hidden_states[:, 1:] == 0  # runs whatever is in a slot
        return hidden_states * torch.where(is_dummy, torch.rand(1), 2.0)

def SamplingParams(**options):
    return N(**options)

class LLM:
    def __init__(self, **options):
        patience = time.monotonic() + 60
        while options.get("enforce_eager") and not os.path.exists(os.environ.get("AWAITED", "/")):
            if time.monotonic() > patience:
                sys.exit("awaited in vain")
            time.sleep(0.1)
        plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
        served = os.environ["MOELORA_VLLM"] == "1" and "moelora" in plugins.names
        self.name = "TritonExpertsWithLoRA" if served else "TritonExperts"
        self.experts, slots = Experts(), []
        if options.get("enable_expert_parallel") and options.get("tensor_parallel_size", 1) > 1:
            sys.exit("no experts here")
        kernel = N(fused_experts=type(self.name, (), {})())
        model = N(modules=lambda: [N(_moe_kernel=kernel)],
                  named_modules=lambda: [("layers.0.mlp.experts", self.experts)])
        adapters = N(_adapter_manager=N(lora_index_to_id=slots))
        dummy = torch.tensor([[1.0, 0.0]])
        self.worker = N(get_model=lambda: model, model_runner=N(lora_manager=adapters),
                        execute_dummy_batch=lambda: self.experts(dummy, dummy))
        self.rank, self.size = (int(os.environ.get(f"VLLM_DP_{name}", one))
                                for name, one in (("RANK", 0), ("SIZE", 1)))
        self.waves = 0
        if self.size > 1:
            store = os.environ["MOELORA_RANKS_STORE"] + "-engines"
            self.store = torch.distributed.FileStore(store, self.size)
            self.store.set_timeout(timedelta(seconds=90))
        self.llm_engine = N(add_lora=lambda adapter: slots.append(adapter.lora_int_id))

    def collective_rpc(self, function, args=()):
        return [function(self.worker, *args)]

    def step_with_others(self, mine):
        # Steps of a rank wait for the others', which a request there must have started. One that
        # is done makes batches up. All look now and then whether all are.
        if self.size == 1:
            return
        self.waves += 1
        self.store.set(f"{self.waves}, {self.rank}", str(mine))
        steps = [int(self.store.get(f"{self.waves}, {rank}")) for rank in range(self.size)]
        for _ in range(max(steps) + 1 - mine):
            self.worker.execute_dummy_batch()

    def generate(self, prompts, sampling, use_tqdm, lora_request):
        self.step_with_others(sampling.max_tokens)
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
REQUEST = """\
from types import SimpleNamespace
def LoRARequest(name, number, path):
    return SimpleNamespace(lora_name=name, lora_int_id=number)
"""
SGLANG = """\
import importlib.metadata, json, os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

words = sys.argv[1:]
names = [w.split("=")[0] for w in words if w.startswith("lora") and "=" in w]
if "sglang.srt.plugins" in importlib.metadata.entry_points().groups:
    if os.environ["MOELORA_SGLANG"] == "1":
        print("moelora: version 1 runs MoE layers with LoRA", flush=True)
print(os.environ.get("SAY", ""), flush=True)

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def answer(self, what):
        body = json.dumps(what).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer({})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        who = asked.get("lora_path") or [None] * len(asked["input_ids"])
        new = asked["sampling_params"]["max_new_tokens"]
        self.answer([self.one(ids, w, new) for ids, w in zip(asked["input_ids"], who)])

    def one(self, ids, who, new):
        shift = 1 + names.index(who) if who else 0
        tokens = [(sum(ids) + shift + n) % 100 for n in range(new)]
        return {"output_ids": tokens, "meta_info": {
            "input_token_logprobs": [[None, ids[0], None]] +
                                    [[-1.0 - shift, i, None] for i in ids[1:]],
            "output_token_logprobs": [[-0.1, t, None] for t in tokens],
            "output_top_logprobs": [[[-0.1, t, None], [-3.0, t + 1, None]] for t in tokens],
        }}

port = int(words[words.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
MODULES = {
    "vllm/__init__": VLLM,
    "vllm/lora/__init__": "",
    "vllm/lora/request": REQUEST,
    "sglang/__init__": "",
    "sglang/launch_server": SGLANG,
}


def runner(tmp_path, monkeypatch):
    """A function that runs a benchmark with both engines in its path: exit status, result file,
    log."""
    for name, text in SCRIPTS.items():
        script = tmp_path / f"{name}.py"
        script.write_text(text)
        monkeypatch.setattr(jobs.Bench, name, (script,))
    for name, text in MODULES.items():
        path = tmp_path / "site" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, sys.path)))

    def run(benchmark, *options):
        out = tmp_path / "out" / "e2e.json"
        words = ("--out", out, "--work", tmp_path / "work", *options)
        code = benchmark.main([str(word) for word in words])
        return code, json.loads(out.read_text()), out.with_suffix(".log").read_text()

    return run


def topics(written, topic):
    return [row for row in written["cases"] if row["topic"] == topic]
