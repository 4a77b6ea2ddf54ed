"""`moelora bench` beside a copy of vLLM's kernels (benchmarks/baselines).

    python -m benchmarks.layer --models qwen3@int4,qwen3@fp8_block --peers DIR --out FILE

Takes the options of `moelora bench`, and --peers, a folder instead of $MOELORA_PEERS. Exit status 1
with --out: our error is larger than ALLOWED; the cases are listed.
"""

import argparse
import os
import sys

from benchmarks import baselines
from moelora.__main__ import main as moelora_main
from moelora.bench import results

ALLOWED = 1.5  # maximum ratio to the error of the bf16 layer; with FP8 activations, to vLLM's


def errors(rows):
    """Lines on errors that are too large."""
    lines = []
    for row in rows:
        if row.get("max_err_ratio", 0.0) > ALLOWED:
            whose = "of vLLM" if row["format"] == "fp8_block" else "in bf16"
            case = f"{row['model']} {row['format']} M={row['tokens']} rank {row['rank']}"
            lines.append(f"{case}: moelora's error is {row['max_err_ratio']} times that {whose}")
    return lines


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
    lines = errors(results.read(out)[1]) if out and not status else []
    print(*lines, sep="\n")
    return status or int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
