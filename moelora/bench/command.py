"""`moelora bench`: one MoE layer, with and without adapters, beside its baselines.

    moelora bench --quick
    moelora bench --models qwen3,mixtral --tokens 16,1024 --ranks 16 --out now.json
    moelora bench --models qwen3-235b --tp 4 --mix half --routing zipf
    moelora bench --models qwen3 --tokens 1024 --ranks 16,128 --adapters 1,2,4,8,16,32
    moelora bench --models gpt-oss-20b@mxfp4,qwen3@int4
    moelora bench --model path/to/config.json --format int4
    moelora bench --shape 32,4,2880,2880 --device cpu
    moelora bench --list
    moelora plot now.json --out now.png
    moelora bench compare before.json now.json

Microseconds of one layer without its router: the median, and in the file the middle 80 % of the
turns. Every baseline is compared with float64 before it is timed.
"""

import argparse
import contextlib
import math
import os
import re
import sys
from collections.abc import Collection, Mapping
from itertools import groupby, product
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from moelora import _C
from moelora.bench import baselines, cases, compare, config, console, formats, plot, results, shapes
from moelora.bench.harness import Bench
from moelora.bench.layer import Layer
from moelora.bench.machine import processor
from moelora.bench.results import Case, CaseProgress, baseline_name, shown
from moelora.bench.timing import GraphTimer, TurnTimer

# Default cases. On a CPU, layers are cut to fit 12 GB of memory.
DEFAULTS: dict[str, dict[str, Any]] = {
    "models": {"cuda": "qwen3,mixtral,dsv2lite", "cpu": "qwen3:16,mixtral:4"},
    "tokens": {"cuda": "1,4,16,64,256,1024,4096,16384", "cpu": "1,8,64,512"},
    "dtypes": {"cuda": "bf16", "cpu": "fp32,bf16"},
    "ranks": {"cuda": "16,64", "cpu": "16,64"},
    "budget_ms": {"cuda": 40.0, "cpu": 300.0},
    "baselines": {"cuda": "auto", "cpu": "auto"},
    "deadline_s": {"cuda": math.inf, "cpu": math.inf},
}
LEAST = {"threads": 1, "mm_size": 1, "budget_ms": 0, "patience_s": 0, "deadline_s": 0}
# What --quick takes instead, where nothing else is given: the baselines that start at once.
QUICK_SECONDS = 60.0
QUICK: dict[str, dict[str, Any]] = {
    "models": {"cuda": "qwen3", "cpu": "qwen3:16"},
    "tokens": {"cuda": "16,1024,4096", "cpu": "1,64"},
    "dtypes": {"cpu": "bf16"},
    "ranks": {"cuda": "16", "cpu": "16"},
    "baselines": {"cuda": "grouped_mm", "cpu": "loop,transformers"},
    "budget_ms": {"cuda": 20.0, "cpu": 100.0},
    "deadline_s": {"cuda": QUICK_SECONDS, "cpu": QUICK_SECONDS},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_options(parser)
    parser.set_defaults(run=run)
    topics = parser.add_subparsers(metavar="plot | compare")
    for name, topic in (("plot", plot), ("compare", compare)):
        topic.add_arguments(topics.add_parser(name, help=topic.ABOUT))


def add_options(parser: argparse.ArgumentParser) -> None:
    add_case_options(parser)
    add = parser.add_argument
    about = f"one layer in about {QUICK_SECONDS:.0f} s, of few tokens"
    add("--quick", action="store_true", help=about)
    add("--baselines", help=f"of {', '.join(baselines.BASELINES)}; auto, none (default: auto)")
    add("--variant", help="force this kernel variant (default: what the plan says)")
    limit = os.environ.get("MOELORA_MAX_CC") or None
    about = "plan as for this compute capability, e.g. 80 (default: $MOELORA_MAX_CC or this GPU's)"
    add("--max-cc", default=limit, type=int, help=about)
    known = ", ".join((*cases.DTYPES, *formats.FORMATS))
    add("--format", help=f"of all weights: {known} (default: the model's, else its dtype's)")
    about = "longest call of a baseline (default: %(default)s)"
    add("--patience-s", default=1.5, type=float, help=about)
    about = f"stop cleanly after this (default: never; --quick: {QUICK_SECONDS:.0f})"
    add("--deadline-s", type=float, help=about)
    add("--out", help="result file to write (default: none)")
    add("--list", action="store_true", help="models and baselines, and stop")


def add_case_options(parser: argparse.ArgumentParser) -> None:
    """Options that define which layers and batches are measured, and for how long."""

    def usual(name: str) -> str:
        """A default that depends on the device."""
        return "default: " + "; ".join(f"{d}: {value}" for d, value in DEFAULTS[name].items())

    add = parser.add_argument
    about = (
        "of --list, or config.json files of Hugging Face; qwen3:16 is qwen3 cut to 16 experts, "
        f"qwen3@int4 has quantized weights ({usual('models')})"
    )
    add("--models", "--model", help=about)
    shape, about = "E,TOP_K,K,I[,ACTIVATION]", "a layer of another size (default: none)"
    add("--shape", action="append", default=[], metavar=shape, help=about)
    about = "the shard of one of so many tensor-parallel ranks (default: %(default)s)"
    add("--tp", default=1, type=int, help=about)
    add("--tokens", help=f"numbers of tokens, with commas between ({usual('tokens')})")
    add("--ranks", help=f"of the adapters ({usual('ranks')})")
    about = "of each rank, one or several numbers (default: %(default)s)"
    add("--adapters", default="8", help=about)
    mixes = "; ".join(f"{mix}: {what}" for mix, what in cases.MIXES.items())
    about = f"{mixes}; or the share of tokens without an adapter (default: %(default)s)"
    add("--mix", default="many", help=about)
    about = "uniform, zipf, or a file of counts per expert (default: %(default)s)"
    add("--routing", default="uniform", help=about)
    add("--dtypes", help=f"of fp32, bf16, fp16 ({usual('dtypes')})")
    add("--device", choices=["cuda", "cpu"], help="(default: cuda where it can be used)")
    about = f"time per baseline or variant, and case ({usual('budget_ms')})"
    add("--budget-ms", type=float, help=about)
    add("--threads", type=int, help="CPU: torch's number of threads (default: torch's)")
    about = "CPU: size of the torch.mm that measures the bound's flop/s (default: %(default)s)"
    add("--mm-size", default=2048, type=int, help=about)


def settle(args: argparse.Namespace) -> argparse.Namespace:
    """Fill in defaults and check options; ValueError names the invalid one."""
    args.device = args.device or ("cuda" if _C.has_cuda() else "cpu")
    if args.device == "cuda" and not _C.has_cuda():
        raise ValueError("--device cuda: there is no usable GPU, or this build has no kernels")
    if getattr(args, "quick", False):
        if args.shape:
            args.models = args.models or ""
        if args.format in cases.DTYPES:
            args.dtypes = args.dtypes or args.format
        _fill(args, QUICK)
    _settle_layers(args)
    _fill(args, DEFAULTS)
    args.tokens, args.ranks = _numbers("--tokens", args.tokens), _numbers("--ranks", args.ranks)
    args.adapters = _numbers("--adapters", args.adapters)
    args.dtypes = _words("--dtypes", args.dtypes, cases.DTYPES)
    if args.device == "cuda" and "fp32" in args.dtypes:
        raise ValueError("--dtypes: CUDA kernels are for bf16 and fp16")
    if args.baselines == "auto":
        quantized = {bool(model.format) for _, model in args.models}
        usual = baselines.DEFAULTS[args.device]
        args.baselines = [n for n in usual if baselines.BASELINES[n].quantized in quantized]
    elif args.baselines == "none":
        args.baselines = []
    else:
        args.baselines = _words("--baselines", args.baselines, baselines.BASELINES)
    for name, least in LEAST.items():
        if (number := getattr(args, name, None)) is not None and not number >= least:
            raise ValueError(f"--{name.replace('_', '-')} is {number}, wanted {least} or more")
    if math.isinf(args.budget_ms):
        raise ValueError("--budget-ms is inf, wanted a finite time")
    if getattr(args, "out", None):
        results.check_writable("--out", args.out)
    if args.mix not in cases.MIXES and not re.fullmatch(r"[01]|0?\.\d+|1\.0+", args.mix):
        raise ValueError(f"--mix is {args.mix!r}, wanted {', '.join(cases.MIXES)} or a share")
    if args.routing not in cases.ROUTINGS:
        if not Path(args.routing).is_file():
            raise ValueError(f"--routing is {args.routing!r}: neither uniform nor zipf nor a file")
        for _, model in args.models:
            cases.read_histogram(args.routing, model.experts)
    return args


def _fill(args: argparse.Namespace, values: Mapping[str, Mapping[str, Any]]) -> None:
    """Set the options that were not given."""
    for name, of_device in values.items():
        if getattr(args, name, None) is None:
            setattr(args, name, of_device.get(args.device))


def _settle_layers(args: argparse.Namespace) -> None:
    """Convert `models` to [(key, Model)]; a weight format limits `dtypes`."""
    format = given = getattr(args, "format", None)
    if given in cases.DTYPES:
        if args.dtypes not in (None, given):
            raise ValueError(f"--format is {given}, but --dtypes is {args.dtypes}")
        args.dtypes, format = given, None
    if args.models is None:
        args.models = "" if args.shape else DEFAULTS["models"][args.device]
    models = [
        config.read(text, given) if config.is_config(text) else shapes.find(text)
        for text in args.models.split(",")
        if text
    ]
    models += [shapes.custom(text) for text in args.shape]
    if not models:
        raise ValueError("--models and --shape name no layer")
    args.models = [
        (key, model.shard(args.tp).quantized(format if given else model.format))
        for key, model in models
    ]
    if any(model.format for _, model in args.models):
        args.dtypes = args.dtypes or "bf16"
        if "fp32" in args.dtypes:
            raise ValueError("--dtypes: quantized weights serve bf16 and fp16")


def _numbers(option: str, text: str | int) -> list[int]:
    fields = str(text).split(",")
    if not all(field.strip().isdigit() and int(field) > 0 for field in fields):
        raise ValueError(f"{option} is {text!r}, wanted positive numbers with commas between")
    return [int(field) for field in fields]


def _words(option: str, text: str, known: Collection[str]) -> list[str]:
    words = text.split(",")
    for word in words:
        if word not in known:
            raise ValueError(f"{option}: {word!r} is none of {', '.join(known)}")
    return words


def tools(args: argparse.Namespace) -> tuple[GraphTimer | TurnTimer, torch.Generator]:
    """Timers and peaks for settled `args`."""
    if args.threads:
        torch.set_num_threads(args.threads)
    timer = TurnTimer(args.mm_size) if args.device == "cpu" else GraphTimer()
    return timer, torch.Generator(args.device).manual_seed(1234)


@torch.no_grad()
def measure(args: argparse.Namespace, console: Console) -> tuple[list[Case], list[str]]:
    """Measure all cases of settled `args`, and list those that were skipped; the result file grows
    with every case.
    """
    timer, generator = tools(args)
    about = processor() if args.device == "cpu" else {}
    if args.device == "cuda" and args.max_cc:
        about["max_cc"] = args.max_cc
    settings = list(product(args.models, args.dtypes, args.adapters))
    progress = CaseProgress(console, len(settings) * len(args.tokens))
    rows: list[Case] = []
    absent: dict[str, str] = {}
    remarks: list[str] = []
    for (key, model), dtype, adapters in settings:
        bench = layer = found = None  # free the last one's memory before the next takes its own
        same_a = "transformers" in args.baselines
        layer = Layer(model, dtype, args.ranks, adapters, generator, same_a)
        found, missing = baselines.baselines_of(layer, args.baselines)
        absent |= missing
        bench = Bench(key, layer, found, timer, args)
        for tokens in args.tokens:
            measured = bench.measure(tokens, generator)
            rows += measured
            progress.end(*map(result, measured))
            if args.out:
                seconds = round(progress.seconds)
                results.write(args.out, rows, **about, absent=absent, seconds=seconds)
            if progress.seconds > args.deadline_s and progress.finished < progress.total:
                remarks = [f"deadline: {progress.finished} of {progress.total} cases done"]
                break
        if remarks:
            break
    return rows, [f"not measured: {name}: {why}" for name, why in absent.items()] + remarks


def model_of(row: Case) -> str:
    return shapes.name_of(row["model"], row.get("experts"))


def result(row: Case) -> str:
    """A case in a line."""
    what = f"{model_of(row)} {row['format']} M={row['tokens']} rank {row['rank']}"
    times = {f"with {row['adapters']} adapters": row["ours_us"], "without": row["ours_base_us"]}
    times["bound"] = row["bound_us"]
    if best := row["best_rival"]:
        times[f"{baseline_name(best)} with them"] = row["rivals"][best]
    return f"{what}: " + ", ".join(f"{name} {shown(us)} us" for name, us in times.items())


CAPTION = """M: tokens of the batch; bound: the least time that bytes and flops need; with, without:
moelora's layer with adapters and without; +-: half of what the middle 80 % of the turns span;
share: bound / time; cost: of adapters, over the layer without; speedup: time of the fastest
baseline with adapters / time of moelora with them; then the baselines, with adapters unless they
say without; within noise: the two times differ by no more than their +-; -: not measured, or longer
than --patience-s"""


def cells_of(row: Case) -> dict[str, str]:
    """{column: text} of a case."""

    def cell(us: float | None) -> str:
        return "-" if us is None else shown(us)

    def unless_noise(name: str, text: str) -> str:
        return "within noise" if compare.within_noise(row, name) else text

    best = row["best_rival"]
    return {
        "model": model_of(row),
        "weights": row["format"],
        "M": str(row["tokens"]),
        "rank": str(row["rank"]),
        "adapters": str(row["adapters"]),
        "bound": shown(row["bound_us"]),
        "with": shown(row["ours_us"]),
        "+-": f"{100 * compare.half_spread(row, 'ours'):.0f} %",
        "share": f"{row['share']:.2f}",
        "unpacked": cell(row.get(f"ours_{row['dtype']}_us")),
        "unpacking": cell(row.get("ours_unpacking_us")),
        "without": shown(row["ours_base_us"]),
        "share without": f"{row['share_base']:.2f}",
        "cost": unless_noise("ours_base", f"{100 * row['overhead']:+.0f} %"),
        "speedup": unless_noise(best, f"{row['ratio']:.2f}") if best else "-",
        **{baseline_name(name): shown(us) for name, us in row["rivals"].items()},
    }


def table_of(rows: list[Case]) -> Table:
    """One line per case, with one column per baseline; empty columns are left out."""
    cells = [cells_of(row) for row in rows]
    every = dict.fromkeys(title for row in cells for title in row)
    titles = [title for title in every if any(row.get(title, "-") != "-" for row in cells)]
    table = Table(title="us per layer", caption=" ".join(CAPTION.split()))
    for title in titles:
        table.add_column(title, justify="right")
    for _, of_layer in groupby(cells, lambda row: (row["model"], row["weights"])):
        for row in of_layer:
            table.add_row(*(row.get(title, "-") for title in titles))
        table.add_section()
    return table


def show_lists(console: Console) -> None:
    models = Table("--models", "model", "E", "top_k", "K", "I", "activation")
    for key, m in shapes.MODELS.items():
        sizes = map(str, (m.experts, m.top_k, m.hidden, m.intermediate))
        models.add_row(key, m.name, *sizes, m.activation)
    who = Table("--baselines", "what", *baselines.DEFAULTS)
    for name, entry in baselines.BASELINES.items():
        auto = ("auto" if name in usual else "" for usual in baselines.DEFAULTS.values())
        who.add_row(name, entry.about, *auto)
    weights = Table("--format", "what", "bits of a weight")
    for name, format in formats.FORMATS.items():
        weights.add_row(name, format.about, str(format.bits))
    console.print(models, weights, who)


def run(args: argparse.Namespace) -> int:
    where = console()
    if args.list:
        show_lists(where)
        return 0
    with contextlib.ExitStack() as stack:
        try:
            settle(args)
            if args.variant:
                _C.force_variant(args.variant)
                stack.callback(_C.force_variant, None)
            if args.max_cc:
                _C.limit_capability(args.max_cc)
                usual = int(os.environ.get("MOELORA_MAX_CC") or 0)
                stack.callback(_C.limit_capability, usual)
        except ValueError as error:
            print(f"moelora bench: {error}", file=sys.stderr)
            return 2
        rows, remarks = measure(args, where)
        if rows:
            where.print(table_of(rows))
        for line in remarks:
            where.print(line, highlight=False)
    return 0
