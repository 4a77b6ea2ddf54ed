"""vLLM end to end, with moelora and without: the same answers and bits.

    python -m benchmarks.vllm_e2e --only answers --out ...-e2e-answers.json
    python -m benchmarks.vllm_e2e --only invariance --out ...-e2e-invariance.json
    python -m benchmarks.vllm_e2e --only sampler --format fp8 --out ...-e2e-sampler-fp8.json

One engine of vLLM after the other, each in its own process (`engines/vllm_engine.py`), on
models of random weights with four PEFT adapters of ranks 16 and 64. moelora is found by its entry
point, as after `pip install`, and `MOELORA_VLLM=0` makes the engines to compare with. Needs vLLM,
one GPU and Python 3.11; for several GPUs there is `benchmarks.vllm_parallel`.

With `--only answers` engines compile the model and capture graphs as vLLM does by default, and
adapters change attention and experts.

With `--format`, experts are quantized (`benchmarks.engines.vllm_quantize`; `mxfp4` is a gpt-oss),
for moelora and for vLLM alike.

With `--only invariance` rows of the MoE layers of both engines in a mixed batch are compared with
those of each request alone, bit for bit (`engines/vllm_bits.py`): as both are, where rows that came
out of attention with other bits have no counterpart, and under VLLM_BATCH_INVARIANT.

With `--only sampler` a trainer (`engines/trainer.py`: transformers with moelora, and tenants) reads
the folder that the engine serves: its MoE layers repeat the engine's rows, of which no element may
differ, and log-probabilities of prompts are compared: moelora's trainer and engine, and beside them
the usual pair, a trainer in bfloat16 and vLLM's own engine, in FP8 with `--format fp8`.

Speeds are measured by `benchmarks.serving`.

Every stage has a deadline, none starts after the budget, and the result file is written after each.
"""

import importlib.util
import itertools
import json
import sys

from benchmarks.engines import jobs
from benchmarks.engines.answers import SAME, compare_batches, compare_engines, judge, same_by
from benchmarks.engines.vllm_quantize import FORMATS
from moelora.integrations.vllm import OWN_PATH, SWITCH

CHECK_S = 120  # of an engine that is up
OURS = ("TritonExpertsWithLoRA", "QuantizedExpertsWithLoRA")


def answers(checks, same=SAME):
    """Rows of every comparison for which there are answers."""
    rows = [row for name, check in checks.items() for row in compare_batches(name, check)]
    return rows + compare_engines("moelora", "vllm", checks, same)


class Bench(jobs.Bench):
    """Runs engines of vLLM, one after the other, and writes their results to a file."""

    def engine(self, name, model, *flags, **environment):
        """Runs an engine."""
        self.ended(name, self.started(name, model, *flags, **environment))

    def started(self, name, model, *flags, **environment):
        """Starts an engine, with moelora if its name begins with "moelora", and returns its job."""
        command = ["-m", "benchmarks.engines.vllm_engine", "--model", self.work / model]
        command += ["--out", self.file(name), *flags]
        environment |= {SWITCH: "1" if name.startswith("moelora") else "0"}
        return self.job(name, command, self.args.start_s + CHECK_S, **environment)

    def ended(self, name, job):
        """Waits for an engine, and takes whatever it had written, even if it did not end well."""
        ours = name.startswith("moelora")
        self.done(job)
        if self.file(name).exists():
            self.runs[name] = run = json.loads(self.file(name).read_text())
            layers = ", ".join(sorted(set(run["layers"])))
            served = layers in OURS and OWN_PATH not in job.log.read_text(errors="replace")
            row = {"topic": "layers", "run": name, "experts": layers, "served": served}
            if len(set(map(tuple, run["slots"]))) > 1:  # of ranks
                row["slots"] = run["slots"]
            self.checks.append(row | {"ok": served == ours})
        self.write()

    def write(self):
        return super().write(vllm=jobs.version("vllm"))

    def rows(self):
        return answers(self.replies(), same_by(self.said)) + judge(self.said)

    # -- stages --

    def answers(self):
        if model := self.model("tiny", dense=True, attention=True):
            names = ("moelora", "vllm")
            for name in names:
                self.engine(name, model)
            self.hold(names, model)

    def invariance(self):
        model = self.model("tiny")
        for flag, name in itertools.product("01" if model else (), ("moelora", "vllm")):
            run = f"{name} invariant" if flag == "1" else name
            self.engine(run, model, "--bits", VLLM_BATCH_INVARIANT=flag)
            self.bits(run)
        self.write()

    def bits(self, run):
        """Only moelora must be batch invariant; vLLM's differing rows are just reported."""
        row = {"topic": "bits", "run": run} | self.runs.get(run, {}).get("bits", {})
        kept = row.get("matched", 0) > 0 and row.get("differing") == 0
        self.checks.append(row | {"ok": kept or run.startswith("vllm")})

    def trainer(self, name, model, *flags):
        """What a trainer found, or nothing."""
        out = self.work / f"trainer-{name}.json"
        words = ["--model", self.work / model, "--engine", self.file(name), "--out", out]
        words = ["-m", "benchmarks.engines.trainer", *words, *flags]
        self.done(self.job(f"trainer of {name}", words, 90))
        return json.loads(out.read_text()) if out.exists() else {}

    def sampler(self):
        model = self.model("tiny", dense=True)
        if model is None:
            return
        rows = self.work / "rows.pt"
        for name, flags in (("moelora", ("--rows", rows)), ("vllm", ())):
            self.engine(name, model, *flags)
        plain = model.removesuffix(f"-{self.args.format}")  # the model before quantization
        pairs = {"moelora": (model, "--rows", rows), "vllm": (plain, "--usual")}
        for name, (model, *flags) in pairs.items():
            found = self.trainer(name, model, *flags)
            if name == "moelora":
                bits = found.get("bits", {"differing": None})
                row = {"topic": "sampler", "run": "trainer, engine"} | bits
                self.checks.append(row | {"ok": bits["differing"] == 0})
            pair = "moelora, moelora" if name == "moelora" else "bfloat16 trainer, vllm"
            for who, gap in found.get("gap", {}).items():
                row = {"topic": "gap", "pair": pair, "who": who}
                self.checks.append(row | {k: round(v, 5) for k, v in gap.items()} | {"ok": True})
        self.write()


def arguments(doc, work="/tmp/moelora-e2e"):
    """Arguments of the benchmarks of vLLM, on one GPU and on several."""
    p = jobs.arguments(doc, work, 180)
    p.add_argument("--format", choices=FORMATS, help="of experts")
    return p


def parse(p, argv):
    args = p.parse_args(argv)
    if not importlib.util.find_spec("vllm"):
        p.error("vLLM is not installed here")
    return args


def main(argv=None):
    p = arguments(__doc__)
    stages = ("answers", "invariance", "sampler")
    p.add_argument("--only", choices=stages, default="answers", help="(default: %(default)s)")
    bench = Bench(parse(p, argv))
    getattr(bench, bench.args.only)()
    return bench.report()


if __name__ == "__main__":
    sys.exit(main())
