"""What the benchmarks of engines share: stages with deadlines, models, judgement of answers."""

import argparse
import importlib.metadata
import importlib.util
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
from benchmarks.engines import answers
from moelora.bench import results

REFERENCE = "reference"  # what holds answers against transformers in float32
CHECK_S = 120  # of an engine that is up
UNUSED = "changes nothing: in the commands of older result files"
WORK = "folder of models and logs, emptied before the run (default: %(default)s)"


class Job:
    """A command in a process group of its own, in a folder with its log, and with a deadline."""

    def __init__(self, name, command, folder, seconds, environment=None):
        self.name, self.log = name, folder / f"{stem(name)}.log"
        self.seconds, self.start = seconds, time.monotonic()
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [str(c) for c in command],
                cwd=folder,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def is_over(self):
        """Whether `wait` would not wait."""
        return self.process.poll() is not None or self.start + self.seconds <= time.monotonic()

    def wait(self):
        """Wait for the process until the deadline, then `stop` it; returns the record of `stop`."""
        try:
            code = self.process.wait(max(self.start + self.seconds - time.monotonic(), 0.1))
            end = "ok" if code == 0 else f"exit status {code}"
        except subprocess.TimeoutExpired:
            end = f"stopped after {self.seconds:.0f} s"
        except BaseException:  # of a signal
            self.stop("interrupted")
            raise
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


class Stages:
    """Jobs in the folder `args.work`, which is emptied, and the result file `args.out`. Jobs find
    the plugin of this checkout, and what else `more` names as entry points. A SIGTERM ends servers
    as Ctrl-C does."""

    def __init__(self, args, more=None):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        self.args, self.work, self.stages = args, args.work.resolve(), []
        plugin = self.work / "plugin"
        held = self.work.is_file() or (self.work.is_dir() and any(self.work.iterdir()))
        if held and not plugin.exists():
            raise SystemExit(f"--work {self.work} would be emptied, and is not of such a run")
        shutil.rmtree(self.work, ignore_errors=True)
        write_entry_points(plugin, more)
        path = [str(ROOT), str(plugin), os.environ.get("PYTHONPATH", "")]
        self.environment = {"PYTHONPATH": os.pathsep.join(filter(None, path))}

    def job(self, name, command, seconds, **environment):
        return Job(name, command, self.work, seconds, self.environment | environment)

    def done(self, job):
        if job is not None:
            self.stages.append(job.wait())
        return job is not None and self.stages[-1]["end"] == "ok"

    def save(self, rows, **meta):
        """Write the result file, and beside it the first and the last lines of every job's log."""
        results.write(self.args.out, rows, stages=self.stages, **meta)
        with open(self.args.out.with_suffix(".log"), "w") as log:
            for path in sorted(self.work.glob("*.log"), key=lambda p: p.stat().st_mtime):
                lines = [line[:2000] for line in path.read_text(errors="replace").splitlines()]
                log.write("\n".join([f"==== {path.stem}", *lines[:3], *lines[3:][-60:], ""]))


class Bench(Stages):
    """Makes models, runs engines on them and judges what they answer, in stages; starts none after
    the budget is spent. Engines whose names begin with "moelora" run with it.

    `args` are those of `arguments`, `pair` two engines that are compared. A subclass says how
    engines are started: `engine` is a module with the options --model and --out, whose result is
    {"check": `answers.check`} and more, `switch` the variable that turns moelora on, and
    `package` the engine's.
    """

    make_model = "-m", "benchmarks.engines.engine_model"  # words for Python
    quantize_model = "-m", "benchmarks.engines.vllm_quantize"
    train = "-m", "benchmarks.engines.trainer"
    meta = {}

    def __init__(self, args, *pair):
        if not importlib.util.find_spec(self.package):
            raise SystemExit(f"{self.package} is not installed here")
        super().__init__(args)
        self.pair, self.start = pair, time.monotonic()
        self.runs, self.checks, self.said = {}, [], {}

    def job(self, name, command, seconds, **environment):
        """Starts a Python program, if there is time for it."""
        left = self.args.budget_s - (time.monotonic() - self.start)
        if left < min(seconds, 30):
            self.stages.append({"stage": name, "seconds": 0, "end": "no time left"})
            return None
        return super().job(name, [sys.executable, *command], min(seconds, left), **environment)

    def model(self, dense=True, attention=False):
        """The name of a model with experts in `--format`, None if it could not be made. `dense`:
        beside it is NAME-dense, the same numbers unquantized. `attention`: adapters of a Qwen3-MoE
        change attention, too."""
        format = self.args.format
        name = plain = "gpt-oss" if format == "mxfp4" else "tiny"
        steps = {plain: [*self.make_model, "--preset", plain]}
        steps[plain] += ["--attention"] if attention else []
        if format:
            name = f"{plain}-{format}"
            steps[name] = [*self.quantize_model, "--format", format, "--model", self.work / plain]
            steps[name] += [] if dense else ["--only-quantized"]
        for made, words in steps.items():
            if not self.done(self.job(f"make {made}", [*words, "--out", self.work / made], 120)):
                return None
        return name

    def run(self, runs, model, many=1, held=lambda name: True):
        """Runs engines, {name: options, of which a dict is more of its environment}, so many at
        once. Answers of those that `held` chooses are held against the reference as soon as they
        are there."""
        runs = list(runs.items())
        for first in range(0, len(runs), many):
            jobs = {n: self.started(n, model, *words) for n, words in runs[first : first + many]}
            for name, job in as_ended(jobs):
                if name.startswith(REFERENCE):
                    self.held(name.removeprefix(f"{REFERENCE} of "), job)
                    continue
                self.ended(name, job)
                if held(name) and "check" in self.runs.get(name, {}):
                    dense = f"{model}-dense" if self.args.format else model
                    jobs[f"{REFERENCE} of {name}"] = self.trainer(REFERENCE, name, dense, 150)

    def started(self, name, model, *words):
        """The job of an engine."""
        environment = {self.switch: "1" if name.startswith("moelora") else "0"}
        command = ["-m", self.engine, "--model", self.work / model, "--out", self.file(name)]
        for word in words:
            if isinstance(word, dict):
                environment |= word
            else:
                command.append(word)
        return self.job(name, command, self.args.start_s + CHECK_S, **environment)

    def ended(self, name, job):
        """Waits for an engine, and takes whatever it had written, even if it did not end well."""
        ours = name.startswith("moelora")
        self.done(job)
        if found := self.found(name):
            self.runs[name] = found
            row = {"topic": "layers", "run": name}
            row |= self.served(found, job.log.read_text(errors="replace"))
            self.checks.append(row | {"ok": row["served"] == ours})
            if "bits" in found:  # vLLM's differing rows are just reported
                row = {"topic": "bits", "run": name} | found["bits"]
                kept = row["matched"] > 0 and row["differing"] == 0
                self.checks.append(row | {"ok": kept or not ours})
        self.write()

    def trainer(self, kind, run, model, seconds, *flags):
        """The job of a trainer that reads the answers of a run."""
        name = f"{kind} of {run}"
        words = [*self.train, "--as", kind, "--model", self.work / model, *flags]
        words += ["--engine", self.file(run), "--out", self.file(name)]
        return self.job(name, words, seconds)

    def held(self, run, job):
        """Waits for the reference of a run, and takes what it says."""
        ok = self.done(job)
        rows = answers.held(self.found(f"{REFERENCE} of {run}").get("gap", {}), self.tolerance(run))
        self.said[run] = {row["who"]: row["median"] for row in rows}
        ok = ok and all(row["ok"] for row in rows)
        self.checks.append({"topic": REFERENCE, "run": run, "said": rows, "ok": ok})
        self.write()

    def tolerance(self, run):
        """The median distance that a run's answers may have from the reference."""
        return answers.SAME_FP8 if (self.args.format or "").startswith("fp8") else answers.SAME

    def rows(self):
        checks = {name: run["check"] for name, run in self.runs.items() if "check" in run}
        rows = [row for name in checks for row in answers.compare_batches(name, checks[name])]
        return rows + self.compared(checks)

    def compared(self, checks):
        """Rows of the two engines."""
        rows = answers.compare_engines(*self.pair, checks, self.tolerance(self.pair[0]))
        return rows + answers.judge(self.said, *self.pair)

    def file(self, name):
        return self.work / f"{stem(name)}.json"

    def found(self, name):
        """What a job has written, or nothing."""
        return json.loads(self.file(name).read_text()) if self.file(name).exists() else {}

    def write(self):
        rows = self.rows() + self.checks
        self.save(rows, **{self.package: version(self.package)}, **self.meta)
        return rows

    def report(self):
        """Writes and prints rows; returns the exit status."""
        rows = self.write()
        show(row for row in rows if row["topic"] != REFERENCE)
        ended = all(stage["end"] == "ok" for stage in self.stages)
        return 0 if ended and all(row["ok"] for row in rows) else 1


def show(rows):
    for row in rows:
        print(*(f"{key} {value}" for key, value in row.items() if key != "topic"), sep=" | ")


def arguments(doc, work, start_s, formats):
    """Arguments of the benchmarks of engines; `start_s`: seconds that one takes to start."""
    p = argparse.ArgumentParser(description=doc.split("\n")[0])
    p.add_argument("--out", type=pathlib.Path, required=True)
    p.add_argument("--work", type=pathlib.Path, default=pathlib.Path(work), help=WORK)
    p.add_argument("--budget-s", type=float, default=470, help="no stage lasts longer than this")
    about = "that an engine may take to start"
    p.add_argument("--start-s", type=float, default=start_s, help=about)
    p.add_argument("--format", choices=formats, help="of experts")
    return p


def stem(name):
    """A name in those of files."""
    return name.translate(str.maketrans(" /", "-_", ","))


def version(package):
    """Of an installed package, None without."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_up(url, server, until=float("inf")):
    """Whether a server's process answers before it has ended or `time.monotonic()` is `until`; it
    is asked at least once."""
    while server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            if until <= time.monotonic():
                return False
            time.sleep(0.2)
    return False


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
