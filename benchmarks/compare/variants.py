"""A layer by every kernel variant that serves it, beside the one that the plan takes.

    python -m benchmarks.compare variants --models qwen3@int4,mixtral@fp8_block --tokens 1,16,64,256
    python -m benchmarks.compare variants --models qwen3 --ranks 0,64 --out /tmp/variants.json
    python -m benchmarks.compare variants --variants sm90 --behind 5

The tables of csrc/core/plan_tile.c come from this. A variant is the tile of both projections, or
the kernel of the whole layer; tiles of far more or far fewer tokens than an expert gets are left
out. The plan and the variants of a case take turns.

Prints microseconds, and the plan's share of the bound. A star marks variants that are more than 2 %
faster than the plan. The last lines are the cases in which the plan is more than `--behind` percent
slower than the fastest variant.
"""

import re
import time
from functools import partial

import torch

from benchmarks import options
from benchmarks.grid.calls import planned
from moelora import _C
from moelora.bench import cases, harness, results, shapes, timing
from moelora.bench.baselines.ours import Ours
from moelora.bench.layer import Layer

FASTER = 0.98
LARGE = 96  # tokens of tiles that may be the fastest for any larger load


def parse(argv=None):
    usual = {"models": ["qwen3", "mixtral"], "tokens": [1, 4, 16, 64, 256, 1024, 4096]}
    parser = options.parser(__doc__, **usual, ranks=[0, 16, 64], adapters=8, budget_ms=4.0)
    parser.add_argument("--variants", default="", help="a regular expression of their names")
    parser.add_argument("--behind", default=5.0, type=float, help="percent")
    return parser.parse_args(argv)


def candidates(rows_per_expert: float, names: str = "") -> list[str]:
    """Kernels of projections and layers that may be the fastest for this load."""
    found = []
    for name in _C.usable():
        block = re.search(r"_(\d+)x", name)
        if not re.search(names, name):
            continue
        if name.startswith("decode_") and rows_per_expert <= 4:
            found.append(name)
        elif name.startswith("gemm_") and block:
            rows = int(block.group(1))
            if min(rows_per_expert / 3, LARGE) <= rows <= max(64, 8 * rows_per_expert):
                found.append(name)
    return found


class Clock:
    """Median microseconds of calls that take turns, in CUDA graphs."""

    def __init__(self, budget_ms: float):
        self.timer, self.budget_ms = timing.GraphTimer(), budget_ms
        self.peaks = self.timer.peaks

    def microseconds(self, calls, batches, moved: float) -> dict[str, float]:
        return self.timer.medians(calls, batches, moved, self.budget_ms)


def measure(args, clock: Clock, device: str = "cuda"):
    """One row for each model, number of tokens and rank, as it is made."""
    end = time.monotonic() + args.deadline_s
    generator = torch.Generator(device).manual_seed(0)
    for name in args.models:
        _, model = shapes.find(name)
        layer = Layer(model, "bf16", [r for r in args.ranks if r], args.adapters, generator)
        ours = Ours(layer, None)
        for tokens in args.tokens:
            if time.monotonic() > end:
                return
            batches = [
                cases.draw_batch(model, tokens, args.adapters, generator)
                for _ in range(harness.rotation(layer.device, tokens))
            ]
            for rank in args.ranks:
                found = compare(ours, batches, rank, clock, args.variants)
                yield found | {"model": name, "tokens": tokens}


def forced(variant: str, run, i: int):
    """`run(i)` with a forced variant."""
    return planned(variant, partial(run, i))


def compare(ours: Ours, batches, rank: int, clock: Clock, names: str = "") -> dict:
    model, moved = ours.layer.model, cases.work(ours.layer.model, batches[0])[1]
    bound = harness.bound_us(model, harness.mean_work(model, batches, rank), clock.peaks)
    run = timing.on(batches, ours.run, rank)
    run(0)
    plan = _C.last_plan()
    calls = {"": run}
    for variant in candidates(batches[0].topk_ids.numel() / model.experts, names):
        if variant not in plan:
            call = partial(forced, variant, run)
            call(0)
            if variant in _C.last_plan():
                calls[variant] = call
    us = {name: round(us, 2) for name, us in clock.microseconds(calls, batches, moved).items()}
    return {
        "rank": rank,
        "plan": plan,
        "bound_us": round(bound, 2),
        "us": us.pop(""),
        "variants_us": us,
    }


def behind(row) -> float:
    """Percent that the plan is slower than the fastest variant."""
    return 100 * (row["us"] / min([row["us"], *row["variants_us"].values()]) - 1)


def show(row) -> None:
    others = "  ".join(
        f"{name} {us:.1f}{'*' if us < FASTER * row['us'] else ''}"
        for name, us in row["variants_us"].items()
    )
    print(
        f"{row['model']:20} {row['tokens']:5} r{row['rank']:<3} {row['us']:8.1f} us "
        f"{row['bound_us'] / row['us']:5.2f}  {row['plan'].split()[0]}   {others}",
        flush=True,
    )


def main(argv=None) -> int:
    args = parse(argv)
    rows = []
    for row in measure(args, Clock(args.budget_ms)):
        rows.append(row)
        show(row)
    slower = [row for row in rows if behind(row) > args.behind]
    print(f"{len(slower)} of {len(rows)} plans are more than {args.behind:g} % behind")
    for row in sorted(slower, key=behind, reverse=True):
        best = min(row["variants_us"], key=row["variants_us"].get)
        case = f"{row['model']} {row['tokens']} r{row['rank']}"
        print(f"{case}: {behind(row):.1f} %, {row['plan'].split()[0]}, fastest {best}")
    if args.out:
        results.write(args.out, rows)
    return 0 if rows else 1
