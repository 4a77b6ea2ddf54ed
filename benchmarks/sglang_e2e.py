"""A real SGLang server, with moelora and without: the same answers, and tokens per second.

    python -m benchmarks.sglang_e2e --only speed --out benchmarks/results/h200-e2e-sglang.json
    python -m benchmarks.sglang_e2e --only answers --out ...-e2e-answers-sglang.json
    python -m benchmarks.sglang_e2e --format fp8 --out ...-e2e-sglang-fp8.json
    python -m benchmarks.sglang_e2e --format modelopt --servers "sglang, marlin;moelora, marlin" ...

One server after the other over a model of random weights with four PEFT adapters of ranks 16 and
64, asked over HTTP: SGLang without LoRA, with its own MoE LoRA, and with moelora, which it finds by
its entry point as after `pip install`. "v2" is its LoRA backend `triton_v2` with `lora_triton`,
"v2 cutedsl" the same with `lora_cutedsl`, which needs nvidia-cutlass-dsl, and "marlin" with
`lora_marlin`, which SGLang has only for NVFP4 of ModelOpt (`--format modelopt`) and which is its
only one for that. Answers are of four layers, for more of random weights make other numbers of a
rounding; float32 transformers with merged adapters judge them. SGLang is the one that is installed,
0.5.23 or later. Needs one GPU and Python 3.11.

All servers have the same options (`COMMON`, in the result file): graphs of decode for the batch
sizes that are timed, none of prefill, which take a minute to capture. Starting a server takes
longer than measuring it: `--at-once 3` starts three together where they fit beside each other; they
take turns in each repetition.

Every stage has a deadline, none starts after the budget, and the result file is written after each.
"""

import json
import pathlib
import random
import sys
import time
import urllib.error
import urllib.request

from benchmarks.engines import jobs
from benchmarks.engines.answers import compare_batches, compare_engines, judge, same_by
from moelora.bench.engine.serving import DECODE, check, speed, speed_row
from moelora.integrations.sglang import SWITCH

OWN_PATH, SERVED = "SGLang's own path runs", "runs MoE layers with LoRA"
COMMON = (
    *("--skip-tokenizer-init", "--disable-radix-cache", "--chunked-prefill-size", "8192"),
    *("--attention-backend", "triton", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none"),
    *("--mem-fraction-static", "0.85", "--max-total-tokens", "65536"),  # servers share the GPU
    "--disable-prefill-cuda-graph",
)
PORTS = 50  # from one server to the next, which opens some beside its own
V2 = ("--enable-lora", "--lora-backend", "triton_v2", "--moe-runner-backend")
SERVERS = {  # {name: (its flags, whether moelora is on)}
    "sglang, no LoRA": ((), False),
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
USUAL = ("sglang, no LoRA", "sglang, v2", "moelora, v2")


class Client:
    """A server's adapters, as `moelora.bench.engine.serving` asks for them."""

    def __init__(self, manifest, port, lora):
        self.url, self.vocab = f"http://127.0.0.1:{port}", manifest["vocab"]
        self.adapters = [pathlib.Path(f).name for f in manifest["adapters"]] if lora else []
        self.names, self.random = self.adapters, random.Random(1)

    def prompts(self, lengths):
        draw = self.random.randrange
        return [[draw(3, self.vocab) for _ in range(n)] for n in lengths]

    def is_up(self):
        try:
            return urllib.request.urlopen(f"{self.url}/health", timeout=2).status == 200
        except (urllib.error.URLError, OSError):
            return False

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

    def generate(self, prompts, adapters, new):
        self.ask(prompts, adapters, new)

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
            self.servers(names, model, self.check)
            self.hold(names, model)

    def check(self, client, run):
        yield
        run.update(check=check(client))

    def speed(self):
        if model := self.model("a3b", "--layers", self.args.layers):
            self.servers(self.args.servers, model, self.measure)

    def measure(self, client, run):
        return speed(client, self.args.reps, self.args.sequences, run.update)

    def servers(self, names, model, ask):
        """Start servers, `--at-once` of which load together, and query them in turns: `ask` is a
        generator that stores the results in a dict, and where it yields its turn ends."""
        count = self.args.at_once
        manifest = json.loads((self.work / model / "manifest.json").read_text())
        for some in (names[i : i + count] for i in range(0, len(names), count)):
            started = [(n, self.start_server(n, manifest, i)) for i, n in enumerate(some)]
            running = [(n, *pair) for n, pair in started if pair and self.is_up(n, *pair)]
            asked = [(name, job, ask(client, self.runs[name])) for name, job, client in running]
            while asked:
                for one in list(asked):
                    name, job, turns = one
                    if end := self.take_turn(turns):
                        self.stop_server(name, job, end)
                        asked.remove(one)

    def take_turn(self, turns):
        """How a server's queries have ended, or nothing: it has more turns."""
        try:
            next(turns)
        except StopIteration:
            return "ok"
        except (OSError, KeyError, ValueError) as why:
            return f"{type(why).__name__}: {why}"
        return None

    def start_server(self, name, manifest, place):
        """The job and the client of a server; None if there is no time for it."""
        flags, ours = SERVERS[name]
        folders = manifest["adapters"] if flags else []
        port = self.args.port + PORTS * place
        command = ["-m", "sglang.launch_server", "--model-path", manifest["base"]]
        command += ["--port", port, *self.common(), *flags]
        if folders:
            command += ["--max-loras-per-batch", len(folders) + 1, "--lora-paths"]
            command += [f"{pathlib.Path(f).name}={f}" for f in folders]
        job = self.job(name, command, 300, **{SWITCH: "1" if ours else "0"})
        return job and (job, Client(manifest, port, bool(flags)))

    def common(self):
        """The options of every server."""
        most = max(self.args.sequences)
        sizes = ("--max-running-requests", most, "--cuda-graph-bs-decode", *self.args.sequences)
        return [*COMMON, *map(str, sizes)]

    def is_up(self, name, job, client):
        """Wait for a server; it is stopped if it takes too long, so that it disturbs no other."""
        run = self.runs.setdefault(name, {})
        while job.process.poll() is None and time.monotonic() - job.start < self.args.start_s:
            if job.left() <= 0:
                break
            if client.is_up():
                run["start_s"] = round(time.monotonic() - job.start, 1)
                return True
            time.sleep(0.5)
        code = job.process.poll()
        why = "not up in time" if code is None else f"exit status {code}"
        self.stop_server(name, job, why)
        return False

    def stop_server(self, name, job, end):
        self.stages.append(job.stop(end))
        log = job.log.read_text(errors="replace")
        served, ours = SERVED in log and OWN_PATH not in log, SERVERS[name][1]
        self.checks.append({"topic": "layers", "run": name, "served": served, "ok": served == ours})
        self.write()

    def checked(self):
        """The server that answers are compared with, and moelora's."""
        return self.args.checked, CHECKED[self.args.checked]

    def rows(self):
        rows = [
            {"topic": "speed", "engine": name, "batch": batch} | speed_row(table)
            for name in SERVERS
            for batch, table in self.runs.get(name, {}).get("speed", {}).items()
        ]
        checks, found = self.replies(), []
        for name, made in checks.items():
            found += compare_batches(name, made)
        theirs, ours = self.checked()
        found += compare_engines(ours, theirs, checks, same_by(self.said))
        return rows + found + judge(self.said, ours, theirs)

    def write(self):
        return super().write(
            sglang=jobs.version("sglang"),
            server_options=" ".join(self.common()),
            start_s={name: run.get("start_s") for name, run in self.runs.items()},
        )


def main(argv=None):
    p = jobs.arguments(__doc__, "/tmp/moelora-sglang", 240)
    p.set_defaults(sequences=[1, 16, DECODE[0]])
    p.add_argument("--only", choices=("answers", "speed"), help="leave the other out")
    p.add_argument("--format", choices=("fp8", "modelopt"), help="of experts; needs triton_v2")
    p.add_argument("--port", type=int, default=30211)
    names = {"type": lambda text: text.split(";"), "default": list(USUAL)}
    p.add_argument("--servers", **names, help="; between")
    p.add_argument("--checked", choices=CHECKED, default="sglang, v2", help="whose answers")
    bench = Bench(p.parse_args(argv))
    for stage in (bench.answers, bench.speed):
        if bench.args.only in (None, stage.__name__):
            stage()
    return bench.report(describe)


def describe(row):
    rates = {k: v for k, v in row.items() if k.endswith("_tok_s") and "first" not in k}
    said = " ".join(f"{k.removesuffix('_tok_s')} {v:>8,} tok/s" for k, v in rates.items())
    return "{engine:24} {batch:8} ".format(**row) + said


if __name__ == "__main__":
    sys.exit(main())
