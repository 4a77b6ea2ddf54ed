"""vLLM end to end, with moelora and without: the same answers and bits.

    python -m benchmarks.vllm_e2e --only answers --at-once 2 --out ...-e2e-answers.json
    python -m benchmarks.vllm_e2e --only invariance --out ...-e2e-invariance.json
    python -m benchmarks.vllm_e2e --only sampler --format fp8 --out ...-e2e-sampler-fp8.json

One engine of vLLM after the other, each in its own process (`engines/vllm_engine.py`), on
models of random weights with four PEFT adapters of ranks 16 and 64. moelora is found by its entry
point, as after `pip install`, and `MOELORA_VLLM=0` makes the engines to compare with. Needs vLLM,
one GPU and Python 3.11; for several GPUs there is `benchmarks.vllm_parallel`.

With `--format`, experts are quantized (`benchmarks.engines.vllm_quantize`; `mxfp4` is a gpt-oss of
`benchmarks.engines.vllm_gpt_oss`), for moelora and for vLLM alike.

With `--only invariance` rows of the MoE layers of both engines in a mixed batch are compared with
those of each request alone, bit for bit (`engines/vllm_bits.py`): as both are, where rows that came
out of attention with other bits have no counterpart, and under VLLM_BATCH_INVARIANT.

With `--only sampler` a trainer (`engines/trainer.py`: transformers with moelora, and tenants) reads
the folder that the engine serves: its MoE layers repeat the engine's rows, of which no element may
differ, and log-probabilities of prompts are compared: moelora's trainer and engine, and beside them
the usual pair, a trainer in bfloat16 and vLLM's own engine, in FP8 with `--format fp8`.

Starting an engine takes longer than measuring it: `--at-once 4` starts four engines together where
their models fit beside each other. They take turns, one repetition each, so that other load on the
machine disturbs all of them alike.

Every stage has a deadline, none starts after the budget, and the result file is written after each.
"""

import importlib.util
import itertools
import json
import sys
import time
from dataclasses import dataclass, field

from benchmarks.engines import jobs
from benchmarks.engines.answers import SAME, compare_batches, compare_engines, judge, same_by
from benchmarks.engines.vllm_quantize import FORMATS
from moelora.bench.engine.serving import speed_row
from moelora.integrations.vllm import OWN_PATH, SWITCH

GIB = 2  # of keys and values of an engine that shares its GPUs with others
OURS = ("TritonExpertsWithLoRA", "QuantizedExpertsWithLoRA")


def answers(checks, same=SAME):
    """Rows of every comparison for which there are answers."""
    rows = [row for name, check in checks.items() for row in compare_batches(name, check)]
    return rows + compare_engines("moelora", "vllm", checks, same)


# ---- comparing speeds ----


def speeds(runs):
    """Rows of all timed runs: engines without LoRA first, vLLM before moelora."""

    def order(run):
        engine = run["engine"]
        return engine["lora_enabled"], engine["engine"] == "moelora"

    rows = []
    for run in sorted((run for run in runs.values() if "engine" in run), key=order):
        for batch, table in run.get("speed", {}).items():
            rows.append({"topic": "speed", **run["engine"], "batch": batch} | speed_row(table))
    return rows


# ---- running engines ----


@dataclass(frozen=True)
class Run:
    """An engine to start. `fields` go into its result."""

    name: str
    model: str
    flags: tuple = ()
    ours: bool = True
    fields: dict = field(default_factory=dict)
    environment: dict = field(default_factory=dict)


class Bench(jobs.Bench):
    """Runs engines of vLLM and writes their results to a file."""

    def engine(self, name, model, *flags, seconds=120, ours=True, **environment):
        """Starts an engine; `read` takes its result."""
        command = ["-m", "benchmarks.engines.vllm_engine", "--model", self.work / model]
        environment |= {SWITCH: "1" if ours else "0"}
        return self.job(name, [*command, "--out", self.file(name), *flags], seconds, **environment)

    def read(self, name, job, **more):
        """Whatever the engine had written, even if it did not end well."""
        self.done(job)
        if self.file(name).exists():
            self.runs[name] = run = json.loads(self.file(name).read_text()) | more
            layers = ", ".join(sorted(set(run["layers"])))
            served = layers in OURS and OWN_PATH not in job.log.read_text(errors="replace")
            row = {"topic": "layers", "run": name, "experts": layers, "served": served}
            self.checks.append(row | {"ok": served == name.startswith("moelora")})
        self.write()

    def write(self):
        return super().write(vllm=jobs.version("vllm"))

    def rows(self):
        rows = speeds(self.runs)
        return rows + answers(self.replies(), same_by(self.said)) + judge(self.said)

    # -- stages --

    def answers(self):
        if model := self.model("tiny", dense=True):
            flags, names = ("--lora", "--check"), ("moelora", "vllm")
            self.together([Run(name, model, flags, name == "moelora") for name in names])
            self.hold(names, model)

    def timed_model(self):
        return self.model("a3b", "--layers", self.args.layers)

    def together(self, runs):
        """Runs engines, `--at-once` of which start together, share the GPUs and take turns once all
        of them are up."""
        count = self.args.at_once
        for some in (runs[i : i + count] for i in range(0, len(runs), count)):
            flags = () if count == 1 else ("--gib", GIB)
            jobs = [(run, self.start_run(run, *flags)) for run in some]
            jobs = [(run, job and self.up(run, job)) for run, job in jobs]
            self.take_turns([(run, job) for run, job in jobs if job])
            for run, job in jobs:
                self.read(run.name, job, **run.fields)

    def start_run(self, run, *flags):
        words = (run.name, run.model, *run.flags, "--turn", self.turn(run), *flags)
        seconds = 300 * self.args.at_once  # also those in which others have their turns
        return self.engine(*words, seconds=seconds, ours=run.ours, **run.environment)

    def turn(self, run):
        """The file with which an engine asks for a turn, and which is removed when it has it."""
        return self.file(run.name, ".turn")

    def asks(self, run, job, until):
        """Whether an engine asks for a turn before it has ended or the time has come."""
        while not self.turn(run).exists():
            if job.process.poll() is not None or time.monotonic() > until:
                return False
            time.sleep(0.005)
        return True

    def up(self, run, job):
        """The job once its engine is up or has failed, or nothing: it is stopped if it takes too
        long, so that it does not disturb the others' measurements."""
        together = self.args.at_once > 1
        until = job.start + (min(self.args.start_s, job.seconds) if together else job.seconds)
        if self.asks(run, job, until) or job.process.poll() is not None:
            return job
        self.stages.append(job.stop(f"not up after {until - job.start:.0f} s"))
        return None

    def take_turns(self, jobs):
        """One engine measures at a time, a repetition a turn, until all have ended or run out of
        time."""
        while jobs:
            for run, job in list(jobs):
                self.turn(run).unlink(missing_ok=True)
                if not self.asks(run, job, job.start + job.seconds):
                    jobs.remove((run, job))

    def timed(self, engine, model, lora, /, *flags, **fields):
        """A run that is timed; `fields` say how it uses several GPUs."""
        ours, way = engine == "moelora", fields.get("parallel", "")
        name = " ".join([engine, *way.split(), "speed, LoRA" if lora else "speed, no LoRA"])
        flags = ("--speed", *(["--lora"] if lora else []), *flags)
        sequences = ",".join(map(str, self.args.sequences))
        flags = (*flags, "--sequences", sequences, "--reps", self.args.reps)
        fields = {"engine": engine, "lora_enabled": lora, **fields}
        return Run(name, model, flags, ours, {"engine": fields})

    def invariance(self):
        model = self.model("tiny")
        for flag, name in itertools.product("01" if model else (), ("moelora", "vllm")):
            run = f"{name} invariant" if flag == "1" else name
            flags = ("--lora", "--check", "--bits")
            job = self.engine(run, model, *flags, ours=name == "moelora", VLLM_BATCH_INVARIANT=flag)
            self.read(run, job)
            row = {"topic": "bits", "run": run} | self.runs.get(run, {}).get("bits", {})
            # Only moelora must be batch invariant; vLLM's differing rows are just reported.
            kept = row.get("matched", 0) > 0 and row.get("differing") == 0
            self.checks.append(row | {"ok": kept or name == "vllm"})
        self.write()

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
            job = self.engine(name, model, "--lora", "--check", *flags, ours=name == "moelora")
            self.read(name, job)
        # The model before quantization. MXFP4 weights are drawn quantized: theirs is dequantized.
        plain = "tiny" if (self.work / "tiny").exists() else f"{model}-dense"
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
    p.add_argument("--format", choices=(*FORMATS, "mxfp4"), help="of experts")
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
    return bench.report(describe)


def describe(row):
    return (
        "{engine:8} LoRA {lora_enabled!s:5} {batch:8} ".format(**row)
        + f"prefill {row['prefill_tok_s']:>9,} tok/s  decode {row.get('decode_tok_s', 0):>8,} tok/s"
    )


if __name__ == "__main__":
    sys.exit(main())
