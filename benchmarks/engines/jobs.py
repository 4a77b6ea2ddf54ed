"""What the benchmarks of engines share: stages with deadlines, models, judgement of answers."""

import argparse
import importlib.metadata
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import tomllib

from benchmarks import ROOT
from benchmarks.engines.answers import SAME, SAME_FP8, write_replies
from moelora.bench import results

RANKS = "16,16,64,64"
REFERENCE = "reference of "  # and a run: the name of a job


class Job:
    """A command in a process group of its own, with a log and a deadline."""

    def __init__(self, name, command, folder, seconds, environment=None, where=None):
        """Start `command` in `where`, by default the current folder; its log goes to `folder`."""
        self.name, self.log = name, folder / f"{name.replace(' ', '-').replace(',', '')}.log"
        self.seconds, self.start = seconds, time.monotonic()
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [str(c) for c in command],
                cwd=where,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def left(self):
        """Seconds to its deadline."""
        return self.seconds - (time.monotonic() - self.start)

    def is_over(self):
        """Whether `wait` would not wait."""
        return self.process.poll() is not None or self.left() <= 0

    def wait(self):
        """Wait for the process until the deadline, then `stop` it; returns the record of `stop`."""
        try:
            code = self.process.wait(max(self.left(), 0.1))
            end = "ok" if code == 0 else f"exit status {code}"
        except subprocess.TimeoutExpired:
            end = f"stopped after {self.seconds:.0f} s"
        return self.stop(end)

    def stop(self, end):
        """Kill all processes of the group; returns {"stage", "seconds", "end"}."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        seconds = round(time.monotonic() - self.start, 1)
        print(f"{self.name}: {end}, {seconds} s", flush=True)
        return {"stage": self.name, "seconds": seconds, "end": end}


def as_ended(jobs):
    """Takes (name, job) out of a dict as soon as each has ended, or its deadline is over; takes
    those without a job at once, and those that are put in while others run."""
    while jobs:
        ended = (n for n, job in jobs.items() if job is None or job.is_over())
        if (name := next(ended, None)) is None:
            time.sleep(0.1)
        else:
            yield name, jobs.pop(name)


class Bench:
    """Makes models, runs engines on them and judges what they answer, in stages; starts none after
    the budget is spent.

    `args` has `work`, a folder that is emptied, `out`, `budget_s` and `format` of the experts.
    """

    make_model = "-m", "benchmarks.engines.engine_model"  # words for Python
    quantize_model = "-m", "benchmarks.engines.vllm_quantize"
    hold_against = "-m", "benchmarks.engines.engine_reference"

    def __init__(self, args):
        self.args, self.work, self.start = args, args.work, time.monotonic()
        shutil.rmtree(self.work, ignore_errors=True)
        write_entry_points(self.work / "plugin")
        self.stages, self.runs, self.checks, self.said = [], {}, [], {}

    def left(self):
        return self.args.budget_s - (time.monotonic() - self.start)

    def job(self, name, command, seconds, **environment):
        """Starts a Python program, which finds checkout and plugin, if there is time for it."""
        if self.left() < min(seconds, 30):
            self.stages.append({"stage": name, "seconds": 0, "end": "no time left"})
            return None
        environment |= python_path(self.work / "plugin")
        seconds = min(seconds, self.left())
        return Job(name, [sys.executable, *command], self.work, seconds, environment, where=ROOT)

    def done(self, job):
        if job is None:
            return False
        self.stages.append(job.wait())
        return self.stages[-1]["end"] == "ok"

    # -- models --

    def model(self, preset, dense=False, attention=False):
        """The name of a preset's model with experts in `--format`; None if it could not be made.
        `dense`: beside it is NAME-dense, the same numbers unquantized. `attention`: adapters of a
        Qwen3-MoE change attention, too."""
        format = self.args.format
        preset = "gpt-oss" if format == "mxfp4" else preset
        name = f"{preset}-{format}" if format else preset
        steps = {preset: [*self.make_model, "--preset", preset, "--adapters", RANKS]}
        steps[preset] += ["--attention"] if attention else []
        if format:
            steps[name] = [*self.quantize_model, "--format", format, "--model", self.work / preset]
            steps[name] += [] if dense else ["--only-quantized"]
        for made, words in steps.items():
            if not self.done(self.job(f"make {made}", [*words, "--out", self.work / made], 120)):
                return None
        return name

    # -- answers --

    def hold(self, names, model):
        """Holds the answers of runs of a model, all at once, against transformers in float32 with
        merged adapters."""
        for name, job in {name: self.reference(name, model) for name in names}.items():
            self.held(name, job)

    def reference(self, name, model, reported=False):
        """The job that holds a run's answers; None without answers. `reported`: they may be any
        distance away."""
        if (check := self.runs.get(name, {}).get("check")) is None:
            return None
        dense = self.work / (f"{model}-dense" if self.args.format else model)
        tolerance = SAME_FP8 if (self.args.format or "").startswith("fp8") else SAME
        replies = self.file(f"lps {name}")
        write_replies(replies, check)
        most = "inf" if reported else tolerance
        words = ["--tol", most, "--model", dense, "--lps", replies]
        return self.job(REFERENCE + name, [*self.hold_against, *words], 150)

    def held(self, name, job):
        """Waits for the reference of a run, and takes what it says."""
        if job is None:
            return
        ok = self.done(job)
        lines = job.log.read_text().splitlines()
        rows = [json.loads(line) for line in lines if line.startswith('{"who"')]
        self.said[name] = {row["who"]: row["median"] for row in rows}
        self.checks.append({"topic": "reference", "run": name, "said": rows, "ok": ok})
        self.write()

    def replies(self):
        """{run: its answers}."""
        return {name: run["check"] for name, run in self.runs.items() if "check" in run}

    # -- results --

    def file(self, name):
        return self.work / f"{name.replace(' ', '-').replace(',', '')}.json"

    def write(self, **more):
        rows = self.rows() + self.checks
        results.write(self.args.out, rows, stages=self.stages, **more)
        write_logs(self.work, self.args.out.with_suffix(".log"))
        return rows

    def report(self):
        """Writes and prints rows; returns the exit status."""
        rows = self.write()
        for row in rows:
            if row["topic"] != "reference":
                print(*(f"{k} {v}" for k, v in row.items() if k != "topic"), sep=" | ")
        ended = all(stage["end"] == "ok" for stage in self.stages)
        return 0 if ended and all(row["ok"] for row in rows) else 1


def arguments(doc, work, start_s):
    """Arguments of the benchmarks of engines; `start_s`: seconds that one takes to start."""
    p = argparse.ArgumentParser(description=doc.split("\n")[0])
    p.add_argument("--out", type=pathlib.Path, required=True)
    p.add_argument("--work", type=pathlib.Path, default=pathlib.Path(work))
    p.add_argument("--budget-s", type=float, default=470, help="no stage lasts longer than this")
    p.add_argument(
        "--start-s", type=float, default=start_s, help="of each, longer ones are stopped"
    )
    return p


def version(package):
    """Of an installed package, None without."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_up(url, server, seconds):
    """Whether a server's job answers before it has ended or so many seconds from its start are
    over; it is asked at least once."""
    while server.process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            if seconds <= time.monotonic() - server.start:
                return False
            time.sleep(0.2)
    return False


def python_path(plugin):
    """The environment in which programs find this checkout and its plugin."""
    path = [ROOT, plugin, os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(str(p) for p in path if str(p))}


def write_logs(folder, out):
    """The first and the last lines of every job's log, the oldest first."""
    with open(out, "w") as log:
        for path in sorted(folder.glob("*.log"), key=lambda p: p.stat().st_mtime):
            lines = [line[:2000] for line in path.read_text(errors="replace").splitlines()]
            log.write("\n".join([f"==== {path.stem}", *lines[:3], *lines[3:][-60:], ""]))


def write_entry_points(folder, more=None):
    """Write the entry points of an installed moelora for engines that have `folder` on their path,
    and `more` as those of another distribution: of two with one name Python reads the first."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        ours = tomllib.load(file)["project"]["entry-points"]
    for name, groups in (("moelora", ours), ("moelora-benchmarks", more or {})):
        info = folder / f"{name.replace('-', '_')}-0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
        lines = []
        for group, entries in groups.items():
            lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
        (info / "entry_points.txt").write_text("\n".join([*lines, ""]))
