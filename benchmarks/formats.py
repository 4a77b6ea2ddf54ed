"""Layers of quantized experts beside vLLM's kernels, on a CPU beside their unpacked weights: what
h200-formats.json and cpu-formats.json are written by.

    python -m benchmarks.formats --peers DIR --out benchmarks/results/h200-formats.json
    python -m benchmarks.formats --peers DIR --models qwen3@int4 --tokens 16,1024 --ranks 16
    python -m benchmarks.formats --device cpu --out benchmarks/results/cpu-formats.json

A short form of `moelora bench`. --peers names a copy of vLLM's kernels with
`vk/vq_layer.py`; without one the file says that its columns are absent. Exit status 1: something
is less exact than ALLOWED allows.
"""

import argparse
import os
import re
import sys

from moelora.__main__ import main as moelora_main
from moelora.bench import results

MODELS = "gpt-oss-20b@mxfp4,qwen3@mxfp4,qwen3@int4,mixtral@int4,qwen3@fp8_block,mixtral@fp8_block"
# On a CPU fewer experts, as in benchmarks.cpu_layer.
CUT = {"gpt-oss-20b": 8, "qwen3": 16, "mixtral": 4}
DEFAULTS = {
    "cuda": {"models": MODELS, "tokens": "1,4,16,64,256,1024,4096,16384", "budget_ms": "7"},
    "cpu": {
        "models": re.sub(r"([\w.-]+)@", lambda m: f"{m[1]}:{CUT[m[1]]}@", MODELS),
        "tokens": "1,8,64,512",
        "budget_ms": "300",
    },
}
W8A8 = ("fp8_block",)
ALLOWED = 1.5  # our error over that of the same layer in bf16; of FP8 activations, over vLLM's


def parse(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", help=f"default: {MODELS}, on a CPU of fewer experts")
    parser.add_argument("--tokens")
    parser.add_argument("--ranks", default="16,64")
    parser.add_argument("--adapters", default="8")
    parser.add_argument("--baselines", default="auto")
    parser.add_argument("--peers", help="folder of vLLM's kernels; absent: $MOELORA_PEERS")
    parser.add_argument("--max-cc", help="plan as for this compute capability, e.g. 80")
    parser.add_argument("--budget-ms", help="time per baseline and case")
    parser.add_argument("--deadline-s", default="1e9", help="stop cleanly after this")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--out", help="result file to write")
    args = parser.parse_args(argv)
    for name, value in DEFAULTS[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


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
