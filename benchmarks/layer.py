"""The whole MoE layer on a GPU beside vLLM's kernels: what h200-layer.json is written by.

    python -m benchmarks.layer --out benchmarks/results/h200-layer.json
    python -m benchmarks.layer --models qwen3 --tokens 16,1024 --ranks 16 --baselines default,base
    python -m benchmarks.layer --max-cc 80 --out benchmarks/results/h200-sm80-layer.json

A short form of `moelora bench`, which has more baselines and more of everything.
"""

import argparse
import sys

from moelora.__main__ import main as moelora_main

BASELINES = ("base", "default", "best", "none")


def command(argv=None) -> list[str]:
    """The words of `moelora` that measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="qwen3,mixtral,dsv2lite")
    parser.add_argument("--tokens", default="1,4,16,64,256,1024,4096,16384")
    parser.add_argument("--ranks", default="16,64")
    parser.add_argument("--adapters", default="8")
    parser.add_argument("--base-share", default=0.0, type=float, help="tokens without an adapter")
    parser.add_argument("--routing", default="uniform")
    parser.add_argument(
        "--baselines", "--rivals", default="base,default", help=f"of {', '.join(BASELINES)}"
    )
    parser.add_argument("--variant", help="force this kernel variant")
    parser.add_argument("--max-cc", help="plan as for this compute capability, e.g. 80")
    parser.add_argument("--budget-ms", default="40", help="GPU time per baseline and case")
    parser.add_argument("--deadline-s", default="1e9", help="stop cleanly after this")
    parser.add_argument("--out", help="result file to write")
    args = parser.parse_args(argv)
    wanted = args.baselines.split(",")
    if not set(wanted) <= set(BASELINES):
        parser.error(f"--baselines is {args.baselines!r}, wanted some of {', '.join(BASELINES)}")
    words = ["bench", "--device", "cuda", "--dtypes", "bf16"]
    words += ["--mix", f"{args.base_share:g}" if args.base_share else "many"]
    words += ["--baselines", "none" if wanted == ["none"] else "vllm"]
    words += ["--all-modes"] if "best" in wanted else []
    for name in ("models", "tokens", "ranks", "adapters", "routing", "budget_ms", "deadline_s"):
        words += [f"--{name.replace('_', '-')}", getattr(args, name)]
    for name in ("variant", "max_cc", "out"):
        value = getattr(args, name)
        words += [f"--{name.replace('_', '-')}", value] if value else []
    return words


if __name__ == "__main__":
    sys.exit(moelora_main(command()))
