"""`moelora tune`: measure every kernel variant on a layer and keep the best ones.

    moelora tune --models qwen3 --tp 2 --tokens 1,16,256,4096 --dir plans
    MOELORA_CONFIG_DIR=plans python serve.py

The file (see help(moelora.operators.tuned)) contains the best variants for each number of tokens:
those with the least geometric mean of the times with and without adapters. Variants of the grouped
GEMM, or of a whole layer in one launch, are measured first; on a GPU those of alignment, shrink and
the sum over top-k follow, with the best GEMM. A variant only replaces that of the built-in table if
it is faster by more than the spread of its times.
"""

import argparse
import datetime
import math
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from moelora import _C
from moelora.bench import cases, command, results, shapes
from moelora.bench import console as wide_console
from moelora.bench.baselines.ours import Ours
from moelora.bench.cases import Batch
from moelora.bench.harness import draw_batches, reference_rows, relative_error, tolerance_of
from moelora.bench.layer import Layer
from moelora.bench.results import CaseProgress
from moelora.bench.timing import GraphTimer, Key, Run, Times, TurnTimer, on
from moelora.operators import tuned

SHORT = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}  # in variant names
TABLE = "table"

Measured: TypeAlias = dict[str, dict[int, Times]]  # by variant and rank


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    command.add_case_options(parser)
    where = os.environ.get("MOELORA_CONFIG_DIR")
    parser.add_argument(
        "--dir", default=where, help="folder of the files (default: $MOELORA_CONFIG_DIR)"
    )
    parser.set_defaults(run=run, ranks="16", baselines="none")


AROUND = ("sort", "shrink", "sum")  # roles of a layer besides its projections


def candidates(dtype: str, device: str, *roles: str) -> list[str]:
    """Variants of some roles that this machine can run for this dtype."""
    gpu, names = device == "cuda", tuple(f"{r}_{d}_" for r in roles for d in (SHORT[dtype], "i32"))
    return [v for v in _C.usable() if v.startswith(names) and ("_sm" in v) == gpu]


def ran(variants: str, rank: int) -> bool:
    """Whether the last layer ran all of `variants`; with rank 0 it has no shrink."""
    wanted = [v for v in variants.split(",") if rank or not v.startswith("shrink_")]
    return set(wanted) <= set(_C.last_plan().replace("=", " ").split())


class Tuner:
    """The variants of one layer."""

    def __init__(self, layer: Layer, timer: GraphTimer | TurnTimer, budget_ms: float):
        self.layer, self.timer, self.budget_ms = layer, timer, budget_ms
        self.ours = Ours(layer)

    def call(self, variant: str, batch: Batch, rank: int) -> Tensor:
        """Our layer with these variants; TABLE is the choice of the built-in table."""
        _C.force_variant(None if variant == TABLE else variant)
        try:
            return self.ours.run(batch, rank)
        finally:
            _C.force_variant(None)

    def measure(self, batches: Sequence[Batch], names: list[str]) -> Measured:
        """Times of the names that support these batches; each is compared with float64 first."""
        ranks = (0, *self.layer.stacks)
        tokens = sorted({0, len(batches[0].x) - 1})
        reference = reference_rows(self.layer, batches[0], tokens)
        runs: dict[Key, Run] = {}
        for variant in names:
            own: dict[Key, Run] = {}
            for rank in ranks:
                out = self.call(variant, batches[0], rank)
                if variant != TABLE and not ran(variant, rank):
                    break  # it does not support this layer
                error = relative_error(out[tokens], reference[rank])
                if not error < tolerance_of(self.layer):
                    raise RuntimeError(f"{variant} is off by {error:.3g} at {len(out)} tokens")
                own[variant, rank] = Run(on(batches, partial(self.call, variant), rank))
            else:
                runs |= own
        moved = cases.work(self.layer.model, batches[0])[1]
        times, self.peaks = self.timer.compare(runs, batches, moved, self.budget_ms)
        return {
            variant: {rank: times[variant, rank] for rank in ranks}
            for variant in dict.fromkeys(v for v, _ in runs)
        }

    def tune(self, batches: Sequence[Batch]) -> tuple[str, Measured]:
        """Best variants, and all measurements."""
        kind = self.layer.dtype, self.layer.device.type
        usual = self.table_choice(batches[0])
        measured = self.measure(batches, [TABLE, *candidates(*kind, "gemm", "decode")])
        best = choose(measured, usual)
        roles = [candidates(*kind, role) for role in AROUND]
        if not any(roles) or best.startswith("decode"):
            return best, measured
        others = self.measure(batches, [best, *(f"{best},{v}" for names in roles for v in names)])
        found = best
        for names in roles:
            of_role = {v: others[v] for v in (best, *(f"{best},{v}" for v in names)) if v in others}
            if len(of_role) > 1:
                found += choose(of_role, best, best).removeprefix(best)
        measured |= others
        return found, measured if found in measured else measured | self.measure(batches, [found])

    def table_choice(self, batch: Batch) -> str:
        self.call(TABLE, batch, 0)
        return _C.last_plan().split("w13=")[1].split()[0]


def score(times: Mapping[int, Times]) -> float:
    """Geometric mean over the layer without adapters and with each rank."""
    return math.exp(sum(math.log(t.median) for t in times.values()) / len(times))


def choose(measured: Measured, usual: str, known: str = TABLE) -> str:
    """Best variant, or `usual` if none is better than `known` by more than noise."""
    best = min((v for v in measured if v != known), key=lambda v: score(measured[v]))
    noise = max((t.high - t.low) / 2 / t.median for t in measured[known].values())
    better = score(measured[best]) < score(measured[known]) * (1 - noise)
    return best if better else usual


@torch.no_grad()
def tune(args: argparse.Namespace, console: Console) -> list[Path]:
    """Paths of the written files, one per model and dtype of settled `args`."""
    timer, generator = command.tools(args)
    (adapters,) = args.adapters
    written = []
    total = len(args.models) * len(args.dtypes) * len(args.tokens)
    progress = CaseProgress(console, total)
    for key, model in args.models:
        name = shapes.name_of(key, model.experts)
        for dtype in args.dtypes:
            layer = tuner = None  # free the last one's memory before the next takes its own
            layer = Layer(model, dtype, args.ranks, adapters, generator)
            tuner = Tuner(layer, timer, args.budget_ms)
            plans: dict[str, str] = {}
            details: dict[str, dict[str, float]] = {}
            for tokens in args.tokens:
                what = f"{name} {dtype} M={tokens}"
                batches = draw_batches(layer, tokens, generator, args.mix, args.routing)
                plans[str(tokens)], measured = tuner.tune(batches)
                scores = {v: round(score(t), 2) for v, t in measured.items()}
                details[str(tokens)], plan = scores, plans[str(tokens)]
                progress.end(
                    f"{what}: {plan} {results.shown(scores[plan])} us, "
                    f"built-in table {results.shown(scores[TABLE])} us, of {len(scores)} "
                    "measured"
                )
            content = describe(layer, args, plans, details)
            written.append(tuned.write(args.dir, content))
            show(name, content, console)
    return written


def describe(
    layer: Layer,
    args: argparse.Namespace,
    plans: dict[str, str],
    details: dict[str, dict[str, float]],
) -> dict[str, Any]:
    """Content of a file of tuned plans."""
    model = layer.model
    return {
        "moelora": _C.version(),
        "device": tuned.this_device(args.device),
        "dtype": layer.dtype,
        "layer": {
            "experts": model.experts,
            "top_k": model.top_k,
            "hidden": model.hidden,
            "intermediate": model.intermediate,
        },
        "plans": plans,
        "measured": {
            "date": datetime.date.today().isoformat(),
            "torch": torch.__version__,
            "model": model.name,
            "ranks": args.ranks,
            "adapters": layer.adapters,
            "mix": args.mix,
            "routing": args.routing,
            "score_us": details,
        },
    }


def show(name: str, content: dict[str, Any], console: Console) -> None:
    table = Table(
        "tokens", "variant", "us", "built-in table's us", title=f"{name} {content['dtype']}"
    )
    for tokens, variant in content["plans"].items():
        scores = content["measured"]["score_us"][tokens]
        table.add_row(tokens, variant, *(results.shown(scores[v]) for v in (variant, TABLE)))
    console.print(table)


def run(args: argparse.Namespace) -> int:
    console = wide_console()
    try:
        command.settle(args)
        if not args.dir:
            raise ValueError("say where the files go: --dir or MOELORA_CONFIG_DIR")
        if any(model.format for _, model in args.models):
            raise ValueError("--models: plans are tuned for weights that are not quantized")
        if len(args.adapters) > 1:
            raise ValueError(f"--adapters is {args.adapters}, wanted one number")
        results.check_writable("--dir", Path(args.dir) / "plans.json")
        if args.device == "cuda" and os.environ.get("MOELORA_MAX_CC"):
            raise ValueError("plans are for the GPU as it is: unset MOELORA_MAX_CC")
    except ValueError as error:
        print(f"moelora tune: {error}", file=sys.stderr)
        return 2
    _C.clear_tuned_plans()  # measure the built-in table
    for path in tune(args, console):
        console.print(path, soft_wrap=True)
    return 0
