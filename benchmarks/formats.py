"""Layers of quantised experts beside vLLM's kernels: what h200-formats.json is written by.

    python -m benchmarks.formats --peers DIR --out benchmarks/results/h200-formats.json
    python -m benchmarks.formats --peers DIR --models qwen3@int4 --tokens 16,1024 --ranks 16

A short form of `moelora bench`. --peers names a copy of vLLM's kernels with
`vk/vq_layer.py`; without one the file says that its columns are absent. Exit status 1: something
is less exact than ALLOWED allows.
"""

import argparse
import os
import sys

from moelora.__main__ import main as moelora_main
from moelora.bench import results

MODELS = "gpt-oss-20b@mxfp4,qwen3@mxfp4,qwen3@int4,mixtral@int4,qwen3@fp8_block,mixtral@fp8_block"
W8A8 = ("fp8_block",)
ALLOWED = 1.5  # our error over that of the same layer in bf16; of FP8 activations, over vLLM's


def parse(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--tokens", default="1,4,16,64,256,1024,4096,16384")
    parser.add_argument("--ranks", default="16,64")
    parser.add_argument("--adapters", default="8")
    parser.add_argument("--baselines", default="auto")
    parser.add_argument("--peers", help="folder of vLLM's kernels; absent: $MOELORA_PEERS")
    parser.add_argument("--max-cc", help="plan as for this compute capability, e.g. 80")
    parser.add_argument("--budget-ms", default="7", help="GPU time per baseline and case")
    parser.add_argument("--deadline-s", default="1e9", help="stop cleanly after this")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--out", help="result file to write")
    return parser.parse_args(argv)


def command(args: argparse.Namespace) -> list[str]:
    """The words of `moelora` that measure what is asked for."""
    words = ["bench", "--dtypes", "bf16"]
    for name, value in vars(args).items():
        if value is not None and name != "peers":
            words += [f"--{name.replace('_', '-')}", value]
    return words


def inexact(rows) -> list[str]:
    """The cases whose error is larger than allowed, in words."""
    return [
        f"{row['model']} {row['format']} M={row['tokens']} rank {row['rank']}: our error is "
        f"{row['max_err_ratio']} times that {'of vLLM' if row['format'] in W8A8 else 'in bf16'}"
        for row in rows
        if row.get("max_err_ratio", 0.0) > ALLOWED
    ]


def main(argv=None) -> int:
    args = parse(argv)
    if args.peers:
        os.environ["MOELORA_PEERS"] = args.peers
    status = moelora_main(command(args))
    found = inexact(results.read(args.out)[1]) if args.out and not status else []
    for case in found:
        print(case)
    return status or bool(found)


if __name__ == "__main__":
    sys.exit(main())
