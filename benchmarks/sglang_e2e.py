"""A real SGLang server, with moelora and without: the same answers.

    python -m benchmarks.sglang_e2e --out ...-e2e-answers-sglang.json
    python -m benchmarks.sglang_e2e --format fp8 --out ...-e2e-answers-sglang-fp8.json
    python -m benchmarks.sglang_e2e --format modelopt --checked "sglang, marlin" --out ...
    python -m benchmarks.sglang_e2e --alone --out ...  # one server: mixed batches and each alone

Two servers with SGLang's defaults (CUDA graphs of prefill and decode, overlapped scheduling, radix
cache) over a model of random weights with four PEFT adapters of ranks 16 and 64, asked over HTTP:
SGLang with its own MoE LoRA, and with moelora, which it finds by its entry point as after
`pip install`. "v2" is its LoRA backend `triton_v2` with `lora_triton`, "v2 cutedsl" the same with
`lora_cutedsl`, which needs nvidia-cutlass-dsl, and "marlin" with `lora_marlin`, which SGLang has
only for NVFP4 of ModelOpt (`--format modelopt`) and which is its only one for that. The model has
four layers, for more of random weights make other numbers of a rounding; float32 transformers with
merged adapters judge the answers. SGLang is the one that is installed, 0.5.23 or later. Needs one
GPU and Python 3.11. Speeds are measured by `benchmarks.serving`.

Every stage has a deadline, none starts after the budget, and the result file is written after each.
"""

import argparse
import json
import pathlib
import random
import sys
import urllib.request

from benchmarks.engines import jobs
from benchmarks.engines.answers import check, compare_batches, compare_engines, judge, same_by
from moelora.integrations.sglang import SWITCH

OWN_PATH, SERVED = "SGLang's own path runs", "runs MoE layers with LoRA"
# Servers share a GPU with others, and are given tokens.
COMMON = ("--skip-tokenizer-init", "--max-total-tokens", "65536")
V2 = ("--enable-lora", "--lora-backend", "triton_v2", "--moe-runner-backend")
SERVERS = {  # {name: (its flags, whether moelora is on)}
    "sglang, v2": ((*V2, "lora_triton"), False),
    "sglang, v2 cutedsl": ((*V2, "lora_cutedsl"), False),
    "moelora, v2": ((*V2, "lora_triton"), True),
    "sglang, marlin": ((*V2, "lora_marlin"), False),
    "moelora, marlin": ((*V2, "lora_marlin"), True),
}
CHECKED = {  # SGLang's servers whose answers are compared, each with moelora's
    "sglang, v2": "moelora, v2",
    "sglang, v2 cutedsl": "moelora, v2",  # which replaces either
    "sglang, marlin": "moelora, marlin",
}


class Client:
    """A server's adapters, as `answers.check` asks for them."""

    def __init__(self, manifest, port):
        self.url, self.vocab = f"http://127.0.0.1:{port}", manifest["vocab"]
        self.adapters = [pathlib.Path(f).name for f in manifest["adapters"]]
        self.names, self.random = self.adapters, random.Random(1)

    def prompts(self, lengths):
        draw = self.random.randrange
        return [[draw(3, self.vocab) for _ in range(n)] for n in lengths]

    def ask(self, prompts, adapters, new, **options):
        asked = {
            "input_ids": prompts,
            "sampling_params": {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": new},
            **({"lora_path": adapters} if any(adapters) else {}),
            **options,
        }
        request = urllib.request.Request(
            f"{self.url}/generate", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)

    def replies(self, prompts, adapters, new):
        options = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 20}
        return [reply(one) for one in self.ask(prompts, adapters, new, **options)]


def reply(one):
    """A request's result, as plain numbers."""
    meta = one["meta_info"]
    return {
        "prompt": [lp for lp, *_ in meta["input_token_logprobs"][1:]],
        "tokens": [token for _, token, *_ in meta["output_token_logprobs"]],
        "top": [{str(t): lp for lp, t, *_ in step} for step in meta["output_top_logprobs"]],
    }


class Bench(jobs.Bench):
    """Runs servers of SGLang and writes their results to a file."""

    def answers(self):
        if model := self.model("tiny", dense=True):
            names = self.checked()
            if self.args.alone:
                self.servers(names[1:], model)
            else:
                self.servers(names, model)
                self.hold(names, model)

    def servers(self, names, model):
        """Start one server after the other, and ask it."""
        manifest = json.loads((self.work / model / "manifest.json").read_text())
        folders = [f"{pathlib.Path(f).name}={f}" for f in manifest["adapters"]]
        for name in names:
            flags, ours = SERVERS[name]
            command = ["-m", "sglang.launch_server", "--model-path", manifest["base"]]
            command += ["--port", self.args.port, *self.common(), *flags]
            command += ["--max-loras-per-batch", len(folders) + 1, "--lora-paths", *folders]
            job = self.job(name, command, 300, **{SWITCH: "1" if ours else "0"})
            if job is None:
                continue
            client, end = Client(manifest, self.args.port), "not up in time"
            if jobs.is_up(f"{client.url}/health", job, self.args.start_s):
                end = self.ask(name, client)
            self.stages.append(job.stop(end))
            log = job.log.read_text(errors="replace")
            row = {"topic": "layers", "run": name, "served": SERVED in log and OWN_PATH not in log}
            self.checks.append(row | {"ok": row["served"] == ours})
            self.write()

    def ask(self, name, client):
        """How a server's queries have ended."""
        try:
            self.runs[name] = {"check": check(client)}
        except (OSError, KeyError, ValueError) as why:
            return f"{type(why).__name__}: {why}"
        return "ok"

    def common(self):
        """The options of every server."""
        return [*COMMON, *self.args.server_args]

    def checked(self):
        """The server that answers are compared with, and moelora's."""
        return self.args.checked, CHECKED[self.args.checked]

    def rows(self):
        checks, found = self.replies(), []
        for name, made in checks.items():
            found += compare_batches(name, made)
        theirs, ours = self.checked()
        found += compare_engines(ours, theirs, checks, same_by(self.said))
        return found + judge(self.said, ours, theirs)

    def write(self):
        return super().write(sglang=jobs.version("sglang"), server_options=" ".join(self.common()))


def main(argv=None):
    p = jobs.arguments(__doc__, "/tmp/moelora-sglang", 240)
    for option in ("--only", "--at-once", "--sequences"):  # of commands of files
        p.add_argument(option, help=argparse.SUPPRESS)
    p.add_argument("--format", choices=("fp8", "modelopt"), help="of experts; needs triton_v2")
    p.add_argument("--port", type=int, default=30211)
    p.add_argument("--alone", action="store_true", help="moelora's server, compared with itself")
    p.add_argument("--checked", choices=CHECKED, default="sglang, v2", help="whose answers")
    p.add_argument("--server-args", nargs=argparse.REMAINDER, default=[], help="more of a server's")
    bench = Bench(p.parse_args(argv))
    bench.answers()
    return bench.report()


if __name__ == "__main__":
    sys.exit(main())
