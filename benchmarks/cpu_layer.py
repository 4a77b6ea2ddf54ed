"""The MoE layer on a CPU, and which of `goals` it misses: what cpu-layer.json is written by.

    python -m benchmarks.cpu_layer --out benchmarks/results/cpu-layer.json
    python -m benchmarks.cpu_layer --quick
    python -m benchmarks.cpu_layer --models mixtral:4 --tokens 8 --dtypes bf16 --ranks 16

Takes the options of `moelora bench`. Layers of Qwen3-30B-A3B and Mixtral-8x7B have fewer
experts, so that they fit (12 GB of memory). Baselines: a loop over experts, and transformers'
experts with PEFT.
"""

import argparse
import sys

from moelora import _C
from moelora.bench import command, console

QUICK = {"models": "qwen3:16", "ranks": "16", "budget_ms": 150.0}
STREAMED = 8  # up to here the layer is bound by its weights alone
COMPUTED = 512  # from here on by arithmetic alone


def goals(row):
    """{what: goal} that this row misses: no baseline is faster, shares of the bound, and what
    adapters may cost."""
    features = _C.cpu_features()
    low = row["dtype"] == "bf16" and ("avx512_bf16" in features or "amx" in features)
    wanted = {"x best": (row["ratio"], 1.0)} if row["ratio"] else {}
    if row["tokens"] <= STREAMED:
        wanted["share"] = row["share"], 0.8
    if row["tokens"] >= COMPUTED:
        wanted["share"] = row["share"], 0.5 if low else 0.7
        if row["rank"] <= 16:
            wanted["adapters"] = -row["overhead"], -0.15
    return {what: abs(goal) for what, (got, goal) in wanted.items() if got < goal}


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    command.add_options(parser)
    parser.add_argument("--quick", action="store_true", help=f"a first look: {QUICK}")
    parser.set_defaults(device="cpu", **(QUICK if "--quick" in argv else {}))
    return command.settle(parser.parse_args(argv))


def main(argv=None):
    args = parse(sys.argv[1:] if argv is None else argv)
    where = console()
    rows, remarks = command.measure(args, where)
    command.show(rows, remarks, where)
    for row in rows:
        for what, goal in goals(row).items():
            case = f"{row['model']} {row['dtype']} M={row['tokens']} rank {row['rank']}"
            where.print(f"misses its goal: {case}: {what}, wanted {goal:g}", highlight=False)
    return rows


if __name__ == "__main__":
    main()
