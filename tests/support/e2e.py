"""Stand-ins of vLLM and SGLang, for the tests of the benchmarks that start engines."""

import json
import shlex
import signal
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
gap = {"median": 0.01, "p95": 0.1, "another": 2.0}
json.dump({"gap": {"base": gap}}, open(out, "w"))
"""
SCRIPTS = {"make_model": MODEL, "quantize_model": MODEL, "train": TRAINER}

VLLM = """\
import importlib.metadata, os, sys
from types import SimpleNamespace as N

def SamplingParams(**options):
    return N(**options)

class LLM:
    def __init__(self, **options):
        import torch

        if options.get("enable_expert_parallel") and "tensor_parallel_size" in options:
            sys.exit("no experts here")
        self.experts, slots = torch.nn.PairwiseDistance(keepdim=True), []
        plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
        served = os.environ["MOELORA_VLLM"] == "1" and "moelora" in plugins.names
        kernel = N(fused_experts=type("TritonExperts" + "WithLoRA" * served, (), {})())
        model = N(modules=lambda: [N(_moe_kernel=kernel)],
                  named_modules=lambda: [("layers.0.mlp.experts", self.experts)])
        manager = N(_adapter_manager=N(lora_index_to_id=slots))
        self.worker = N(get_model=lambda: model, model_runner=N(lora_manager=manager),
                        execute_dummy_batch=lambda: self.experts(*torch.rand(2, 1, 2)))
        self.llm_engine = N(add_lora=lambda adapter: slots.append(adapter.lora_int_id))

    def collective_rpc(self, function, args=()):
        return [function(self.worker, *args)]

    def generate(self, prompts, sampling, use_tqdm, lora_request):
        import torch

        rows = torch.tensor([[sum(p["prompt_token_ids"]), 1.0] for p in prompts])
        self.experts(rows, rows)
        self.worker.execute_dummy_batch()  # while another rank steps
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
SERVER = """\
import importlib.metadata, json, os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

words = sys.argv[1:]
names = [w.split("=")[0] for w in words if w.startswith("lora") and "=" in w]
plugins = sorted(importlib.metadata.entry_points(group="sglang.srt.plugins").names)
is_on = "1" in (os.environ.get("MOELORA_VLLM"), os.environ.get("MOELORA_SGLANG"))
if is_on and "moelora" in plugins:
    print("moelora: version 1 runs MoE layers with LoRA")
print(*map(os.environ.get, ("SAY", "CUDA_VISIBLE_DEVICES")), plugins, words, flush=True)

class Handler(BaseHTTPRequestHandler):
    def do_GET(self, what=None):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(what).encode())

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        who = asked.get("lora_path") or [None] * len(asked["input_ids"])
        new = asked["sampling_params"]["max_new_tokens"]
        self.do_GET([self.one(ids, w, new) for ids, w in zip(asked["input_ids"], who)])

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
BENCH = """\
import asyncio
NAMES = ("base-url model tokenizer dataset-name seed random-input-len random-output-len burstiness "
         "num-prompts temperature percentile-metrics metric-percentiles ready-check-timeout-sec "
         "lora-assignment request-rate max-concurrency random-range-ratio")
def add_cli_args(parser):
    for name in NAMES.split():
        parser.add_argument("--" + name)
    parser.add_argument("--disable-tqdm", action="store_true")
    parser.add_argument("--goodput", nargs="+")
    parser.add_argument("--lora-modules", nargs="+")
get_tokenizer = print
async def main_async(args):
    print(args.base_url, args.lora_modules)
    await asyncio.sleep(int(args.num_prompts) / float(args.request_rate or "inf"))
    return {"completed": int(args.num_prompts), "failed": 0, "median_ttft_ms": 1.23456,
            "p99_ttft_ms": None, "median_tpot_ms": 32.0, "not kept": 3,
            "duration": (args.lora_modules or []).count("a0-r4")}
"""
MODULES = {
    "vllm/__init__": VLLM,
    "vllm/lora/request": REQUEST,
    "vllm/entrypoints/cli/main": SERVER,
    "vllm/benchmarks/serve": BENCH,
    "sglang/__init__": "",
    "sglang/launch_server": SERVER,
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

    def run(main, words, name="e2e"):
        out = tmp_path / f"benchmarks/results/h100-{name}.json"
        places = ["--out", str(out), "--work", str(tmp_path / "work")]
        before = signal.getsignal(signal.SIGTERM)
        code = main([*places, *shlex.split(words)])  # of which the last may take all that follow
        signal.signal(signal.SIGTERM, before)
        return code, json.loads(out.read_text()), out.with_suffix(".log").read_text()

    return run


def topics(written, topic):
    return [row for row in written["cases"] if row["topic"] == topic]
