"""`moelora bench engine`: vLLM with moelora and without, on a model and adapters of the user.

    moelora bench engine Qwen/Qwen3-30B-A3B --lora adapters/law code=adapters/code
    moelora bench engine path/to/model --lora adapters/law --option gpu_memory_utilization=0.8
    moelora bench engine org/model --lora adapters/law --tensor-parallel 2 --out mine.json

Three engines, one after the other: vLLM without LoRA, vLLM with its own LoRA kernels, vLLM with
moelora. Each loads the model, prefills and decodes batches of random tokens, with the adapters in
turn and without any. Prints one table, says how far log-probabilities of the two engines with LoRA
are apart, and writes a result file and a picture. Takes about three times as long as vLLM takes to
start. Exit status 1: an engine failed, or moelora served no layer of experts.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from moelora.bench import console, plot, results
from moelora.bench.engine.jobs import Job
from moelora.bench.engine.serving import DECODE, PREFILL, speed_row
from moelora.bench.engine.worker import UNKNOWN
from moelora.integrations.vllm import OWN_PATH, SWITCH

WORKER = "moelora.bench.engine.worker"
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # those that vLLM takes as a largest rank
SERVED = "ExpertsWithLoRA"  # how the names of moelora's classes in vLLM end
REGISTERED = "runs MoE layers"  # in vLLM's log


@dataclass
class Setup:
    """An engine: its name in tables, whether moelora serves it, whether it has LoRA."""

    name: str
    moelora: bool
    lora: bool


ENGINES = (
    Setup("vLLM without LoRA", moelora=False, lora=False),
    Setup("vLLM with LoRA", moelora=False, lora=True),
    Setup("moelora with LoRA", moelora=True, lora=True),
)


WITH_LORA = [setup.name for setup in ENGINES if setup.lora]


ABOUT = "time vLLM with moelora and without, on your model and adapters"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("model", help="as for vllm serve: a folder, or a name on the Hub")
    about = "adapters: PEFT folders, or NAME=FOLDER"
    add("--lora", nargs="+", required=True, metavar="ADAPTER", help=about)
    about = "prompts and tokens of each, of prefill (default: %(default)s)"
    add("--prefill", default=f"{PREFILL[0]}x{PREFILL[1]}", metavar="NxM", help=about)
    about = "sequences of decode (default: %(default)s)"
    add("--sequences", type=int, default=DECODE[0], help=about)
    about = "tokens that decode generates for each sequence (default: %(default)s)"
    add("--new-tokens", type=int, default=DECODE[2], help=about)
    about = "runs of each measurement, of which the median counts (default: %(default)s)"
    add("--reps", type=int, default=3, help=about)
    add("--tensor-parallel", type=int, default=1, help="GPUs (default: %(default)s)")
    about = "argument of vllm.LLM, its value as JSON or a word; repeat it (default: vLLM's)"
    add("--option", action="append", default=[], metavar="NAME=VALUE", help=about)
    about = "longest time of an engine, loading included (default: %(default)s)"
    add("--engine-s", type=float, default=1200.0, help=about)
    add("--out", default="engine.json", help="result file (default: %(default)s)")
    about = "ends in .png or .svg; none: no picture (default: that of --out, with .png)"
    add("--picture", help=about)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    where = console()
    try:
        job = settle(args)
    except ValueError as error:
        print(f"moelora bench engine: {error}", file=sys.stderr)
        return 2
    names = ", ".join(setup.name for setup in ENGINES)
    where.print(f"one after the other: {names}", highlight=False)
    runs: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="moelora-engine-") as folder:
        problems = [measure(setup, job, args, Path(folder), runs) for setup in ENGINES]
    rows = rows_of(runs)
    results.write(args.out, rows, model=args.model, lora=list(job["adapters"]), **versions(runs))
    show(rows, runs, where)
    if rows and args.picture != "none":
        try:
            picture = args.picture or Path(args.out).with_suffix(".png")
            where.print(plot.save(plot.engines(args.out), picture))
        except ImportError as error:
            where.print(str(error), highlight=False)
    where.print(args.out)
    for problem in filter(None, problems):
        print(f"moelora bench engine: {problem}", file=sys.stderr)
    return 1 if any(problems) else 0


def settle(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of all workers; ValueError names the invalid option, or the missing package."""
    adapters = dict(map(adapter, args.lora))
    if len(adapters) < len(args.lora):
        raise ValueError("--lora has two adapters of one name, wanted NAME=FOLDER for one of them")
    prompts, _, tokens = args.prefill.partition("x")
    if not (prompts.isdigit() and tokens.isdigit() and int(prompts) and int(tokens)):
        raise ValueError(f"--prefill is {args.prefill!r}, wanted prompts x tokens, as 16x2048")
    for name in ("sequences", "new_tokens", "reps", "tensor_parallel"):
        if getattr(args, name) < 1:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} is {getattr(args, name)}, wanted at least 1")
    options = dict(map(option_of, args.option))
    results.check_writable("--out", args.out)
    if importlib.util.find_spec("vllm") is None:
        raise ValueError("vLLM is not installed here: pip install vllm")
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
    if "moelora" not in plugins.names:
        raise ValueError("vLLM finds installed plugins only, and moelora is not installed here")
    return {
        "model": args.model,
        "adapters": {name: str(folder) for name, folder in adapters.items()},
        "max_lora_rank": max(map(largest_rank, adapters.values())),
        "prefill": [int(prompts), int(tokens)],
        "sequences": args.sequences,
        "new": args.new_tokens,
        "reps": args.reps,
        "tensor_parallel": args.tensor_parallel,
        "options": options,
    }


def adapter(text: str) -> tuple[str, Path]:
    """(name, folder) of NAME=FOLDER, or of a folder, which is named as its last part."""
    name, equals, path = text.partition("=")
    folder = Path(path if equals else text)
    if not (folder / "adapter_config.json").is_file():
        raise ValueError(f"--lora {text}: {folder} has no adapter_config.json")
    return name if equals else folder.resolve().name, folder.resolve()


def largest_rank(folder: Path) -> int:
    """The least largest rank that vLLM takes and this adapter needs."""
    config = json.loads((folder / "adapter_config.json").read_text())
    rank = max(config.get("r", 0), *(config.get("rank_pattern") or {}).values(), 1)
    for most in RANKS:
        if rank <= most:
            return most
    raise ValueError(f"--lora {folder} has rank {rank}, vLLM takes ranks up to {RANKS[-1]}")


def option_of(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (equals and name.isidentifier()):
        raise ValueError(f"--option is {text!r}, wanted NAME=VALUE")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def measure(
    setup: Setup,
    job: dict[str, Any],
    args: argparse.Namespace,
    folder: Path,
    runs: dict[str, dict[str, Any]],
) -> str | None:
    """Run one engine in its own process and store its results; returns the error, None if it has
    none."""
    stem = folder / setup.name.replace(" ", "-")
    arguments, out = stem.with_suffix(".job"), stem.with_suffix(".json")
    arguments.write_text(json.dumps(job | {"lora": setup.lora}))
    command = [sys.executable, "-m", WORKER, arguments, out]
    on = {SWITCH: "1" if setup.moelora else "0"}
    started = Job(setup.name, command, folder, args.engine_s, on)
    end = started.wait()["end"]
    log = started.log.read_text(errors="replace")
    if out.exists():
        runs[setup.name] = json.loads(out.read_text())
    if end != "ok":
        kept = Path(args.out).with_suffix(f".{stem.name}.log")
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(log)
        return f"{setup.name}: {end}; its log is {kept}"
    if setup.moelora and not serves(runs[setup.name]["layers"], log):
        reasons = [line.strip() for line in log.splitlines() if "moelora: " in line]
        return f"moelora did not serve all layers of experts; vLLM's log: {' '.join(reasons[-3:])}"
    return None


def serves(layers: str, log: str) -> bool:
    """Whether moelora served every layer of experts, by their classes and vLLM's log."""
    if layers == UNKNOWN:
        return REGISTERED in log and OWN_PATH not in log
    return SERVED in layers and OWN_PATH not in log


def rows_of(runs: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the result file."""
    rows = []
    for setup in ENGINES:
        engine = "moelora" if setup.moelora else "vllm"
        for batch, table in runs.get(setup.name, {}).get("speed", {}).items():
            row = {"topic": "speed", "engine": engine, "lora_enabled": setup.lora, "batch": batch}
            rows.append(row | speed_row(table))
    return rows


def versions(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """vLLM's version, the layers of each worker, and the distance between their
    log-probabilities."""
    found = next(iter(runs.values()), {})
    layers = {name: run["layers"] for name, run in runs.items()}
    return {"vllm": found.get("vllm"), "layers": layers, "distance": distance(runs)}


def distance(runs: dict[str, dict[str, Any]]) -> float | None:
    """Median difference of the log-probabilities of prompts between the two engines with LoRA."""
    theirs, ours = (runs.get(name, {}).get("prompts") for name in WITH_LORA)
    if not theirs or not ours:
        return None
    pairs = zip(flat(theirs), flat(ours), strict=True)
    return round(statistics.median(abs(a - b) for a, b in pairs), 4)


def flat(rows: Iterable[Iterable[float]]) -> list[float]:
    return [value for row in rows for value in row]


def show(rows: Sequence[dict[str, Any]], runs: dict[str, dict[str, Any]], where: Console) -> None:
    """Print the table and a summary of it."""
    table = Table(title="tokens per second; milliseconds of the decode batch")
    for column in ("engine", "requests", "prefill", "decode", "first token", "each later token"):
        table.add_column(column, justify="right" if column != "engine" else "left")
    for row in rows:
        name = "moelora" if row["engine"] == "moelora" else "vLLM"
        lora = "LoRA" if row["lora_enabled"] else "no LoRA"
        table.add_row(
            f"{name}, {lora}",
            requests(row["batch"]),
            *(f"{row[f'{phase}_tok_s']:,}" for phase in ("prefill", "decode")),
            *(f"{row[name]:,.1f}" for name in ("ttft_ms", "tpot_ms")),
        )
    where.print(table)
    for line in sentences(rows):
        where.print(line, highlight=False)
    if (apart := distance(runs)) is not None:
        line = f"log-probabilities of prompts with adapters differ by {apart} in the median"
        where.print(f"{line} (vLLM with LoRA, moelora)", highlight=False)


def requests(batch: str) -> str:
    return "no adapters" if batch == "base" else f"{batch.split()[0]} adapters, mixed"


def sentences(rows: Sequence[dict[str, Any]]) -> list[str]:
    """moelora over vLLM's own, with adapters, and over vLLM without LoRA."""

    def rate(phase: str, engine: str, lora: bool, mixed: bool) -> float:
        for row in rows:
            if (row["engine"], row["lora_enabled"]) == (engine, lora):
                if (row["batch"] != "base") == mixed:
                    return float(row[f"{phase}_tok_s"])
        return math.nan

    said = []
    for phase in ("prefill", "decode"):
        ours = rate(phase, "moelora", True, True)
        theirs, without = rate(phase, "vllm", True, True), rate(phase, "vllm", False, False)
        if not math.isnan(ours / theirs):
            line = f"{phase} with adapters: moelora has {ours / theirs:.2f} times vLLM's throughput"
            base = f", {ours / without:.2f} of vLLM's without LoRA"
            said.append(line + ("" if math.isnan(without) else base))
    return said
