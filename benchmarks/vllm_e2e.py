"""vLLM end to end, with moelora and without: the same answers, and tokens per second.

    python -m benchmarks.vllm_e2e --only answers --at-once 2 --out ...-e2e-answers.json
    python -m benchmarks.vllm_e2e --only speed --layers 12 --out ...-e2e-12-layers.json
    python -m benchmarks.vllm_e2e --format int4 --out ...-e2e-int4.json
    python -m benchmarks.vllm_e2e --only invariance --out ...-e2e-invariance.json
    python -m benchmarks.vllm_e2e --only sampler --format fp8 --out ...-e2e-sampler-fp8.json

One engine of vLLM after the other, each in its own process (`engines/vllm_engine.py`), on
models of random weights with four PEFT adapters of ranks 16 and 64. moelora is found by its entry
point, as after `pip install`, and `MOELORA_VLLM=0` makes the engines to compare with. vLLM is the
one that is installed; on a machine without a network `--peers` is a folder with a packed one, whose
`install_chunk.sh` unpacks it into `$SITE`. Needs one GPU and Python 3.11; for several GPUs there is
`benchmarks.vllm_parallel`.

With `--format`, experts are quantized (`benchmarks.engines.vllm_quantize`; `mxfp4` is a gpt-oss of
`benchmarks.engines.vllm_gpt_oss`) and moelora is held against vLLM
with the same numbers: in the same format where vLLM's kernels of the packed copy can (FP8), and
unquantized otherwise, unless `--own-kernels` says that the copy has them all (PTX=1).

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

import argparse
import importlib.metadata
import importlib.util
import itertools
import json
import os
import pathlib
import sys
import time
from dataclasses import dataclass, field

from benchmarks.engines.answers import (
    SAME,
    SAME_FP8,
    compare_batches,
    compare_engines,
    judge,
    same_by,
    write_replies,
)
from benchmarks.engines.jobs import ROOT, Stages, write_entry_points, write_logs
from benchmarks.engines.vllm_quantize import FORMATS
from moelora.bench import results
from moelora.bench.engine.serving import speed_row, targets
from moelora.integrations.vllm import OWN_PATH, SWITCH

RANKS = "16,16,64,64"
FP8 = [format for format in FORMATS if format.startswith("fp8")]
GIB = 2  # of keys and values of an engine that shares its GPUs with others
OURS = ("TritonExpertsWithLoRA", "QuantizedExpertsWithLoRA")
OURS_MIXED = {"engine": "moelora", "batch": "4 mixed", "lora_enabled": True}
VLLM_MIXED = OURS_MIXED | {"engine": "vllm"}
VLLM_BASE = {"engine": "vllm", "batch": "base", "lora_enabled": False}
WITHOUT = ("moelora 4 mixed / vllm base, no LoRA", OURS_MIXED, VLLM_BASE)
WITH = ("moelora 4 mixed / vllm 4 mixed, LoRA", OURS_MIXED, VLLM_MIXED)
# Engines that are timed, the ones that matter most first: the budget may end before the last.
ORDER = [("moelora", True), ("vllm", True), ("vllm", False), ("moelora", False)]
TARGETS = {  # reported, whether they are met or not
    "bf16": [
        ("prefill", *WITHOUT, 1.0),
        ("prefill", *WITH, 1.4),
        ("decode", *WITHOUT, 0.92),
        ("decode", *WITH, 1.3),
    ],
    "quantized": [("prefill", *WITH, 1.3), ("decode", *WITH, 1.25)],
}


def all_targets(rows, format=None):
    """Those of one GPU."""
    return targets(rows, TARGETS["quantized" if format else "bf16"])


def answers(runs, same=SAME):
    """Rows of every comparison for which there are runs."""
    checks = {name: run["check"] for name, run in runs.items() if "check" in run}
    rows = []
    for name, check in checks.items():
        rows += compare_batches(name, check)
    for name, other in [
        ("moelora", "vllm"),
        ("moelora compiled", "moelora"),
        ("vllm compiled", "vllm"),  # how far vLLM is from itself
    ]:
        rows += compare_engines(name, other, checks, same)
    return rows


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


class Bench(Stages):
    """Runs engines of vLLM and writes their results to a file."""

    def __init__(self, args):
        super().__init__(args)
        self.site = self.work / "site"
        self.runs, self.checks, self.said = {}, [], {}

    def engine(self, name, model, *flags, seconds=120, ours=True, **environment):
        """Starts an engine; `read` takes its result."""
        out = self.result_file(name)
        return self.job(
            name,
            [sys.executable, "-m", "benchmarks.engines.vllm_engine", "--model", self.work / model]
            + ["--out", out, *flags],
            seconds,
            PYTHONPATH=self.path(),
            **{SWITCH: "1" if ours else "0", **environment},
        )

    def path(self, *before):
        """Where Python finds the checkout, vLLM and the plugin."""
        path = [*before, ROOT, self.site, self.work / "plugin", os.environ.get("PYTHONPATH", "")]
        return os.pathsep.join(str(p) for p in path if str(p))

    def result_file(self, name):
        return self.work / f"{name.replace(' ', '-').replace(',', '')}.json"

    def read(self, name, job, **more):
        """Whatever the engine had written, even if it did not end well."""
        self.done(job)
        if self.result_file(name).exists():
            self.runs[name] = run = json.loads(self.result_file(name).read_text()) | more
            layers = ", ".join(sorted(set(run["layers"])))
            served = layers in OURS and OWN_PATH not in job.log.read_text(errors="replace")
            row = {"topic": "layers", "run": name, "experts": layers, "served": served}
            self.checks.append(row | {"ok": served == name.startswith("moelora")})
        self.write()

    def release(self):
        """Version of vLLM, the packed or the installed one; None: there is none."""
        path = [str(self.site)] if self.args.peers else sys.path
        found = importlib.metadata.distributions(name="vllm", path=path)
        return next((one.version for one in found), None)

    def write(self):
        rows = self.rows() + self.checks
        results.write(self.args.out, rows, vllm=self.release(), stages=self.stages)
        write_logs(self.work, self.args.out.with_suffix(".log"))
        return rows

    def rows(self):
        rows = speeds(self.runs)
        if self.same_format():  # an engine that reads other bytes is not what is wanted
            rows += all_targets(rows, self.args.format)
        return rows + answers(self.runs, same_by(self.said)) + judge(self.said)

    # -- stages --

    def install(self):
        """A packed vLLM into `site`, and moelora's entry point where vLLM looks for it."""
        write_entry_points(self.work / "plugin")
        if self.args.peers is None:
            return True
        script = self.args.peers / "install_chunk.sh"
        return self.done(self.job("unpack", ["bash", script, "1"], 90, SITE=str(self.site)))

    def same_format(self):
        """Whether vLLM without moelora loads the same quantized checkpoint."""
        return self.args.format in (None, *FP8) or self.args.own_kernels

    def only_quantized(self, model):
        """Flag to omit the dequantized copy of a large model if vLLM loads the quantized one."""
        return ["--only-quantized"] if model == "a3b" and self.same_format() else []

    def make(self, model, *options):
        if self.args.format == "mxfp4":
            layers = options[options.index("--layers") + 1] if "--layers" in options else 4
            command = [sys.executable, "-m", "benchmarks.engines.vllm_gpt_oss", "--ranks", RANKS]
            command += ["--layers", layers, "--out", self.work / f"{model}-mxfp4"]
            command += self.only_quantized(model)
            return self.job(f"make {model}", command, 120)
        command = [sys.executable, *self.make_model, "--out", self.work / model]
        command += ["--one-a"] if self.args.one_a else []
        return self.job(f"make {model}", [*command, *options, "--adapters", RANKS], 120)

    def quantize(self, model):
        """The model's names for moelora and for vLLM's own engine, once they are there."""
        format = self.args.format
        if format is None:
            return model, model
        ours = f"{model}-{format}"
        models = ours, ours if self.same_format() else f"{ours}-dense"
        if format == "mxfp4":
            return models
        return models if self.make_quantized(model, ours, *self.only_quantized(model)) else None

    def reference(self, name):
        """transformers in fp32 with adapters merged, against a run's prompts."""
        check = self.runs.get(name, {}).get("check")
        if check is None:
            return None
        lps = self.result_file(f"lps {name}")
        write_replies(lps, check)
        script = self.hold_against
        dense = "tiny" if self.args.format is None else f"tiny-{self.args.format}-dense"
        model = ["--model", self.work / dense, "--lps", lps]
        tolerance = ["--tol", str(SAME_FP8 if self.args.format in FP8 else SAME)]
        return self.job(f"reference of {name}", [sys.executable, *script, *tolerance, *model], 90)

    def answers(self):
        models = self.models("tiny")
        if models is None:
            return
        names = "moelora", "vllm"
        flags = "--lora", "--check"
        self.together(
            [Run(n, m, flags, n == "moelora") for n, m in zip(names, models, strict=True)]
        )
        self.hold(names if self.args.format in FP8 else names[:1])

    def hold(self, names):
        """Holds runs against transformers, one after the other."""
        for name in names:
            reference = self.reference(name)
            if reference is None:
                continue
            ok = self.done(reference)
            self.said[name] = said = reference.log.read_text().splitlines()[-6:]
            self.checks.append({"topic": "reference", "run": name, "said": said, "ok": ok})

    def models(self, preset, *options):
        """The names of a preset's model for moelora and for vLLM's own engine, once they are there;
        None if it could not be made."""
        made = self.done(self.make(preset, "--preset", preset, *options))
        return self.quantize(preset) if made else None

    def timed_models(self):
        """The names of the model that is timed, as `models`."""
        return self.models("a3b", "--layers", str(self.args.layers))

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
        return self.result_file(run.name).with_suffix(".turn")

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

    def timed(self, engine, models, lora, *flags, **fields):
        """A run that is timed; `fields` say how it uses several GPUs."""
        ours, way = engine == "moelora", fields.get("parallel", "")
        name = " ".join([engine, *way.split(), "speed, LoRA" if lora else "speed, no LoRA"])
        flags = ("--speed", *(["--lora"] if lora else []), *flags)
        flags = (*flags, "--sequences", self.args.sequences, "--reps", self.args.reps)
        fields = {"engine": engine, "lora_enabled": lora, **fields}
        return Run(name, models[0 if ours else 1], flags, ours, {"engine": fields})

    def speed(self):
        models = self.timed_models()
        if models is None:
            return
        self.together(
            [
                self.timed(engine, models, lora)
                for engine, lora in ORDER
                if lora or not self.args.lora_only
            ]
        )

    def invariance(self):
        models = self.models("tiny")
        if models is None:
            return
        engines = list(zip(("moelora", "vllm"), models, strict=True))
        for flag, (name, model) in itertools.product("01", engines):
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
        words = ["--model", self.work / model, "--engine", self.result_file(name), "--out", out]
        command = [sys.executable, "-m", "benchmarks.engines.trainer", *words, *flags]
        self.done(self.job(f"trainer of {name}", command, 90))
        return json.loads(out.read_text()) if out.exists() else {}

    def sampler(self):
        models = self.models("tiny")
        if models is None:
            return
        rows = self.work / "rows.pt"
        job = self.engine("moelora", models[0], "--lora", "--check", "--rows", rows)
        self.read("moelora", job)
        job = self.engine("vllm", models[1], "--lora", "--check", ours=False)
        self.read("vllm", job)
        # The model before quantization. MXFP4 weights are drawn quantized: theirs is dequantized.
        plain = "tiny" if (self.work / "tiny").exists() else f"{models[0]}-dense"
        pairs = {"moelora": (models[0], "--rows", rows), "vllm": (plain, "--usual")}
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

    def compiled(self):
        flags = ("--lora", "--check", "--compile")
        for name in ("moelora", "vllm"):
            if name in self.runs:
                job = self.engine(f"{name} compiled", "tiny", *flags, ours=name == "moelora")
                self.read(f"{name} compiled", job)


def arguments(description):
    """Arguments of the benchmarks of vLLM, on one GPU and on several."""
    p = argparse.ArgumentParser(description=description)
    p.add_argument("--peers", type=pathlib.Path, help="a packed vLLM (default: the installed one)")
    p.add_argument("--out", type=pathlib.Path, required=True)
    p.add_argument("--work", type=pathlib.Path, default=pathlib.Path("/tmp/moelora-e2e"))
    p.add_argument("--budget-s", type=float, default=470, help="no stage lasts longer than this")
    p.add_argument("--layers", type=int, default=4, help="of the model that is timed")
    p.add_argument("--sequences", default="64", help="of decode, commas between")
    p.add_argument("--lora-only", action="store_true", help="time no engines without LoRA")
    p.add_argument("--one-a", action="store_true", help="gate and up of an adapter share A")
    p.add_argument("--at-once", type=int, default=1, help="engines that start together")
    p.add_argument("--start-s", type=float, default=180, help="of each, longer ones are stopped")
    p.add_argument("--format", choices=(*FORMATS, "mxfp4"), help="of experts")
    p.add_argument("--own-kernels", action="store_true", help="vLLM runs the same format, too")
    p.add_argument("--reps", type=int, default=5, help="of each measurement, of which the median")
    return p


def parse(p, argv):
    args = p.parse_args(argv)
    if args.peers is None and not importlib.util.find_spec("vllm"):
        p.error("vLLM is not installed here; --peers names a folder with a packed one")
    return args


def main(argv=None):
    p = arguments(__doc__.split("\n")[0])
    p.add_argument("--only", choices=("answers", "speed", "invariance", "sampler"))
    args = parse(p, argv)
    bench = Bench(args)
    stages = {"answers": bench.answers, "speed": bench.speed}
    if args.format is None:
        stages["compiled"] = bench.compiled
    if args.only in ("invariance", "sampler"):
        stages = {args.only: getattr(bench, args.only)}
    stages = [stage for name, stage in stages.items() if args.only in (None, name)]
    if bench.install():
        for stage in stages:
            stage()
    return bench.report(bench.write(), describe)


def describe(row):
    return (
        "{engine:8} LoRA {lora_enabled!s:5} {batch:8} ".format(**row)
        + f"prefill {row['prefill_tok_s']:>9,} tok/s  decode {row.get('decode_tok_s', 0):>8,} tok/s"
    )


if __name__ == "__main__":
    sys.exit(main())
