"""`moelora tune`: measures every kernel variant on a layer and keeps the best ones.

    moelora tune --models qwen3 --tp 2 --tokens 1,16,256,4096 --dir plans
    MOELORA_CONFIG_DIR=plans python serve.py

The file (its format: help(moelora.tuned)) holds the best variant for each number of tokens: the one
with the least geometric mean of the times with and without adapters. A variant that is not better
than the built-in table's by more than its spread does not replace it.
"""

import argparse
import datetime
import math
import os
import sys

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from moelora import _C, tuned
from moelora.bench import cases, command
from moelora.bench.baselines import Layer, Options
from moelora.bench.baselines.ours import Ours
from moelora.bench.harness import TOLERANCE, reference_rows, relative_error
from moelora.bench.timing import Run, Times

SHORT = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}  # in the names of variants
TABLE = "table"


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "tune",
        help="find the best kernel variants for a layer on this machine",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_case_options(parser)
    where = os.environ.get("MOELORA_CONFIG_DIR")
    parser.add_argument(
        "--dir", default=where, help="folder of the files (default: $MOELORA_CONFIG_DIR)"
    )
    parser.set_defaults(run=run, ranks="16", baselines="none")


def candidates(dtype: str, device: str) -> list[str]:
    """Projections and whole layers that this machine can run on tensors of this dtype."""
    gpu, names = device == "cuda", tuple(f"{role}_{SHORT[dtype]}_" for role in ("gemm", "decode"))
    return [v for v in _C.usable() if v.startswith(names) and ("_sm" in v) == gpu]


class Tuner:
    """The variants of one layer."""

    def __init__(self, layer: Layer, timer, budget_ms: float):
        self.layer, self.timer, self.budget_ms = layer, timer, budget_ms
        self.ours = Ours(layer, Options())

    def call(self, variant: str, batch, rank: int):
        """Our layer with this variant; TABLE is what the built-in table chooses."""
        _C.force_variant(None if variant == TABLE else variant)
        try:
            return self.ours.run(batch, rank)
        finally:
            _C.force_variant(None)

    def measure(self, batches) -> dict[str, dict[int, Times]]:
        """{variant: {rank: Times}} of all that serve these batches, TABLE among them; each is
        compared with float64 before it is timed."""
        ranks = (0, *self.layer.stacks)
        tokens = sorted({0, len(batches[0].x) - 1})
        reference = reference_rows(self.layer, batches[0], tokens)
        runs = {}
        for variant in (TABLE, *candidates(self.layer.dtype, self.layer.device.type)):
            for rank in ranks:
                out = self.call(variant, batches[0], rank)
                if variant != TABLE and variant not in _C.last_plan().replace("=", " ").split():
                    break  # it cannot serve this layer
                error = relative_error(out[tokens], reference[rank])
                if not error < TOLERANCE[self.layer.dtype]:
                    raise RuntimeError(f"{variant} is off by {error:.3g} at {len(out)} tokens")
                runs[variant, rank] = Run(
                    lambda i, v=variant, rank=rank: self.call(v, batches[i], rank)
                )
        moved = cases.work(self.layer.model, batches[0])[1]
        times, _ = self.timer.compare(runs, batches, moved, self.budget_ms)
        return {
            variant: {rank: times[variant, rank] for rank in ranks}
            for variant in dict.fromkeys(v for v, _ in runs)
        }

    def table_choice(self, batch) -> str:
        self.call(TABLE, batch, 0)
        return _C.last_plan().split("w13=")[1].split()[0]


def score(times: dict) -> float:
    """Geometric mean over the layer without adapters and with each rank."""
    return math.exp(sum(math.log(t.median) for t in times.values()) / len(times))


def choose(measured: dict[str, dict], usual: str) -> str:
    """The best variant, or the table's if nothing is better than it by more than noise."""
    best = min((v for v in measured if v != TABLE), key=lambda v: score(measured[v]))
    noise = max((t.high - t.low) / 2 / t.median for t in measured[TABLE].values())
    better = score(measured[best]) < score(measured[TABLE]) * (1 - noise)
    return best if better else usual


@torch.no_grad()
def tune(args: argparse.Namespace, console: Console) -> list:
    """Paths of the files written, one for each model and dtype of settled `args`."""
    timer, generator = command.tools(args)
    (adapters,) = args.adapters
    written = []
    with Progress(console=console) as progress:
        total = len(args.models) * len(args.dtypes) * len(args.tokens)
        bar = progress.add_task("tune", total=total)
        for key, model in args.models:
            for dtype in args.dtypes:
                layer = tuner = None  # before the next one is drawn
                layer = Layer(model, dtype, args.ranks, adapters, generator)
                tuner = Tuner(layer, timer, args.budget_ms)
                plans, details = {}, {}
                for tokens in args.tokens:
                    progress.update(bar, description=f"{key} {dtype} M={tokens}")
                    batches = [
                        cases.draw_batch(
                            *(model, tokens, adapters, generator, args.mix, args.routing),
                            dtype=cases.DTYPES[dtype],
                        )
                        for _ in range(4)
                    ]
                    usual = tuner.table_choice(batches[0])
                    measured = tuner.measure(batches)
                    plans[str(tokens)] = choose(measured, usual)
                    details[str(tokens)] = {v: round(score(t), 2) for v, t in measured.items()}
                    progress.advance(bar)
                content = describe(layer, args, plans, details)
                written.append(tuned.write(args.dir, content))
                show(key, content, console)
    return written


def describe(layer: Layer, args: argparse.Namespace, plans: dict, details: dict) -> dict:
    """The content of a file of tuned plans."""
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


def show(key: str, content: dict, console: Console) -> None:
    table = Table("tokens", "variant", "us", "table us", title=f"{key} {content['dtype']}")
    for tokens, variant in content["plans"].items():
        scores = content["measured"]["score_us"][tokens]
        table.add_row(tokens, variant, f"{scores[variant]:.1f}", f"{scores[TABLE]:.1f}")
    console.print(table)


def run(args: argparse.Namespace) -> int:
    console = Console()
    try:
        command.settle(args)
        if not args.dir:
            raise ValueError("say where the files go: --dir or MOELORA_CONFIG_DIR")
        if any(model.format for _, model in args.models):
            raise ValueError("--models: plans are tuned for weights that are not quantised")
        if len(args.adapters) > 1:
            raise ValueError(f"--adapters is {args.adapters}, wanted one number")
        if args.device == "cuda" and os.environ.get("MOELORA_MAX_CC"):
            raise ValueError("plans are for the GPU as it is: unset MOELORA_MAX_CC")
    except ValueError as error:
        print(f"moelora tune: {error}", file=sys.stderr)
        return 2
    _C.clear_tuned_plans()  # the table is measured as it is
    for path in tune(args, console):
        console.print(path, soft_wrap=True)
    return 0
