"""A layer by every kernel variant that serves it, beside the one that the plan takes.

    python -m benchmarks.compare variants --models qwen3@int4,mixtral@fp8_block --tokens 1,16,64,256
    python -m benchmarks.compare variants --models qwen3 --ranks 0,64 --out /tmp/variants.json
    python -m benchmarks.compare variants --variants sm90 --behind 5

The tables of csrc/core/plan_tile.c come from this. A variant is the tile of both projections, or
the kernel of the whole layer; tiles of far more or far fewer tokens than an expert gets are left
out. The plan and the variants take turns, and all are compared with float64 first, as by `moelora
tune`. The layer without adapters (rank 0) is always among them.

Prints microseconds, and the plan's share of the bound. A star marks variants that are more than 2 %
faster than the plan. The last lines are the cases in which the plan is more than `--behind` percent
slower than the fastest variant.
"""

import re
import time

import torch

from benchmarks import options
from moelora import _C
from moelora.bench import harness, results, shapes, timing
from moelora.bench.layer import Layer
from moelora.commands.tune import TABLE, Tuner, candidates

FASTER = 0.98
LARGE = 96  # tokens of tiles that may be the fastest for any larger load


def may_be_fastest(name: str, rows_per_expert: float) -> bool:
    """Whether a kernel of projections or layers may be the fastest for this load."""
    if name.startswith("decode_"):
        return rows_per_expert <= 4
    block = re.search(r"_(\d+)x", name)
    if not block:  # a CPU's have no tile
        return True
    return min(rows_per_expert / 3, LARGE) <= int(block[1]) <= max(64, 8 * rows_per_expert)


@torch.no_grad()
def measure(args, timer):
    """One row for each model, number of tokens and rank, as it is made."""
    end = time.monotonic() + args.deadline_s
    generator = torch.Generator(args.device).manual_seed(0)
    usable = candidates("bf16", args.device, "gemm", "decode")
    for name in args.models:
        _, model = shapes.find(name)
        layer = Layer(model, "bf16", [r for r in args.ranks if r], args.adapters, generator)
        tuner = Tuner(layer, timer, args.budget_ms)
        for tokens in args.tokens:
            if time.monotonic() > end:
                return
            batches = harness.draw_batches(layer, tokens, generator)
            load = batches[0].topk_ids.numel() / model.experts
            names = [n for n in usable if may_be_fastest(n, load) and re.search(args.variants, n)]
            found = tuner.measure(batches, [TABLE, *names])
            table = found.pop(TABLE)
            for rank, times in table.items():
                tuner.call(TABLE, batches[0], rank)
                work = harness.mean_work(model, batches, rank)
                yield {
                    "model": name,
                    "tokens": tokens,
                    "rank": rank,
                    "plan": _C.last_plan(),
                    "bound_us": round(harness.bound_us(model, work, tuner.peaks), 2),
                    "us": times.median,
                    "variants_us": {variant: t[rank].median for variant, t in found.items()},
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
    usual = {"models": ["qwen3", "mixtral"], "tokens": [1, 4, 16, 64, 256, 1024, 4096]}
    parser = options.parser(__doc__, **usual, ranks=[16, 64], adapters=8, budget_ms=4.0)
    parser.add_argument("--variants", default="", help="a regular expression of their names")
    parser.add_argument("--behind", default=5.0, type=float, help="percent")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    args = parser.parse_args(argv)
    rows = []
    for row in measure(args, timing.TurnTimer() if args.device == "cpu" else timing.GraphTimer()):
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
