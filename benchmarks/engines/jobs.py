"""Runs commands in stages, and writes the entry points by which engines find moelora's plugins."""

import shutil
import sys
import time

import tomllib

from benchmarks import ROOT
from moelora.bench.engine.jobs import Job


class Stages:
    """Runs jobs in order and records their results; starts none after the budget is spent.

    `args` has `work`, a folder that is emptied, and `budget_s`.
    """

    make_model = "-m", "benchmarks.engines.engine_model"  # words for Python
    quantize_model = "-m", "benchmarks.engines.vllm_quantize"
    hold_against = "-m", "benchmarks.engines.engine_reference"

    def __init__(self, args):
        self.args, self.work, self.start = args, args.work, time.monotonic()
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)
        self.stages = []

    def left(self):
        return self.args.budget_s - (time.monotonic() - self.start)

    def job(self, name, command, seconds, **environment):
        """Starts a stage, if there is time for it."""
        if self.left() < min(seconds, 30):
            self.stages.append({"stage": name, "seconds": 0, "end": "no time left"})
            return None
        seconds = min(seconds, self.left())
        return Job(name, command, self.work, seconds, environment, where=ROOT)

    def done(self, job):
        if job is None:
            return False
        self.stages.append(job.wait())
        return self.stages[-1]["end"] == "ok"

    def make_quantized(self, model, out, *flags):
        """Quantizes a model's experts as `--format` says, from one folder of `work` to another;
        whether it was done. Unless a flag omits it, OUT-dense has the same numbers unquantized."""
        command = [sys.executable, *self.quantize_model, "--format", self.args.format, *flags]
        command += ["--model", self.work / model, "--out", self.work / out]
        return self.done(self.job(f"quantize {model}", command, 120))

    def report(self, rows, describe):
        """Prints rows, those of speeds as `describe` says them; returns the exit status."""
        for row in rows:
            if row["topic"] == "speed":
                print(describe(row))
            elif row["topic"] != "reference":
                print(*(f"{k} {v}" for k, v in row.items() if k != "topic"), sep=" | ")
        good = [row["ok"] for row in rows if row["topic"] not in ("speed", "target")]
        return 0 if all(good) and all(stage["end"] == "ok" for stage in self.stages) else 1


def write_logs(folder, out):
    """The first and the last lines of every job's log, the oldest first."""
    with open(out, "w") as log:
        for path in sorted(folder.glob("*.log"), key=lambda p: p.stat().st_mtime):
            lines = path.read_text(errors="replace").splitlines()
            log.write("\n".join([f"==== {path.stem}", *lines[:3], *lines[3:][-60:], ""]))


def write_entry_points(folder):
    """Write the entry points of an installed moelora, for engines that have `folder` on their
    path."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        groups = tomllib.load(file)["project"]["entry-points"]
    info = folder / "moelora-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: moelora\nVersion: 0\n")
    lines = []
    for group, entries in groups.items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join([*lines, ""]))
