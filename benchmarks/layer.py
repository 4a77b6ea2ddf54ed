"""`moelora bench` beside a copy of vLLM's kernels (benchmarks/baselines), and the goals it misses.

    python -m benchmarks.layer --baselines vllm --out benchmarks/results/h200-layer.json
    python -m benchmarks.layer --models qwen3@int4,qwen3@fp8_block --peers DIR --out FILE
    python -m benchmarks.layer --device cpu --out benchmarks/results/cpu-layer.json

Takes the options of `moelora bench`, and --peers, a folder instead of $MOELORA_PEERS. With --out it
then lists the cases that miss a goal. Exit status 1: our error is larger than ALLOWED.
"""

import argparse
import os
import sys

from benchmarks import baselines
from moelora.__main__ import main as moelora_main
from moelora.bench import results

STREAMED = 8  # tokens; up to here a layer on a CPU is bound by reading its weights
COMPUTED = 512  # from here on by arithmetic
ALLOWED = 1.5  # maximum ratio to the error of the bf16 layer; with FP8 activations, to vLLM's


def cpu_goals(row, features=""):
    """{what: goal} that a row of a CPU misses: ratio to the fastest baseline, shares of the bound,
    and the cost of adapters."""
    low = row["dtype"] == "bf16" and any(name in features for name in ("avx512_bf16", "amx"))
    wanted = {"speedup": (row["ratio"], 1.0)} if row["ratio"] else {}
    if row["tokens"] <= STREAMED:
        wanted["share of the bound"] = row["share"], 0.8
    if row["tokens"] >= COMPUTED:
        wanted["share of the bound"] = row["share"], 0.5 if low else 0.7
        if row["rank"] <= 16:
            wanted["adapters"] = -row["overhead"], -0.15
    return {what: abs(goal) for what, (got, goal) in wanted.items() if got < goal}


def misses(meta, rows):
    """(lines on goals that are missed, lines on errors that are too large)."""
    goals, errors = [], []
    for row in rows:
        case = f"{row['model']} {row['format']} M={row['tokens']} rank {row['rank']}"
        features = meta.get("cpu_features")
        if features and row["format"] == row["dtype"]:
            goals += [
                f"misses its goal: {case}: {what}, wanted {goal:g}"
                for what, goal in cpu_goals(row, " ".join(features)).items()
            ]
        if row.get("max_err_ratio", 0.0) > ALLOWED:
            whose = "of vLLM" if row["format"] == "fp8_block" else "in bf16"
            errors.append(f"{case}: moelora's error is {row['max_err_ratio']} times that {whose}")
    return goals, errors


def main(argv=None):
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--peers")
    args, words = parser.parse_known_args(argv)
    if args.peers:
        os.environ["MOELORA_PEERS"] = args.peers
    baselines.register()
    status = moelora_main(["bench", *words])
    parser.add_argument("--out")
    out = parser.parse_known_args(words)[0].out
    goals, errors = misses(*results.read(out)) if out and not status else ([], [])
    for line in goals + errors:
        print(line)
    return status or int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
