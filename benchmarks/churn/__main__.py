"""Adapters that come, go and change while a model serves.

    python -m benchmarks.churn --out benchmarks/results/h200-churn.json
    python -m benchmarks.churn --topics updates
    python -m benchmarks.churn --preset micro --layers 2 --update-layers 2 --device cpu

`arrivals`: time to the first token, and tokens per second, with more adapters than slots, in host
memory, beside the same with a slot for each (`arrivals.py` says how). Half of the adapters have the
first of `--ranks`, half the other. `updates`: how long `AdapterPool.update` takes for an adapter of
a whole model from tensors on the GPU (`updates.py`).
"""

import argparse
import gc
import sys

import torch

from benchmarks.churn import arrivals, updates
from benchmarks.churn.decoder import VOCAB, Decoder, factors, new_pool
from benchmarks.engines.engine_model import PRESETS
from benchmarks.options import numbers, words
from moelora.bench import results

TOPICS = ("arrivals", "updates")


def measure_arrivals(args, shape, save):
    names = [f"lora{n}-r{args.ranks[n % 2]}" for n in range(args.adapters)]
    length = args.prompt + args.new + 1
    decoder = Decoder(shape, args.layers, args.rows, length, args.device)
    cases = []

    def make_pool(policy):
        slots = len(names) if policy == "resident" else args.slots
        most = max(args.ranks)
        pool = new_pool(shape, args.layers, slots, most, args.device, host=len(names))
        for number, name in enumerate(names):
            state, config = factors(pool, args.ranks[number % 2], number)
            pool.register(name, state, config=config)
        return pool

    for policy in args.policies:
        case = arrivals.measure(decoder, make_pool, names, policy, args)
        free(args.device)
        for field in ("ttft_ms", "ttft_p95_ms", "tok_s"):
            first = (cases[0] if cases else case)[field]
            case[f"{field}_ratio"] = round(case[field] / first, 3)
        cases.append(case)
        save(cases)
        print({key: value for key, value in case.items() if key != "waits_ms"}, flush=True)
    return cases


def free(device):
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def parsed(argv):
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )

    add = parser.add_argument
    add("--topics", default=",".join(TOPICS), type=words)
    add("--policies", default=",".join(arrivals.POLICIES), type=words, help="the first is the base")
    add("--preset", default="a3b", choices=PRESETS)
    add("--layers", type=int, default=12)
    add("--slots", type=int, default=8)
    add("--adapters", type=int, default=16)
    add("--ranks", default="16,64", type=numbers, help="two, which adapters have in turns")
    add("--rows", type=int, default=16, help="requests that run at a time, at most")
    add("--requests", type=int, default=100)
    add("--rate", type=float, default=10.0, help="requests that arrive in a second")
    add("--prompt", type=int, default=256, help="tokens")
    add("--new", type=int, default=48, help="tokens")
    add("--update-layers", type=int, default=48)
    add("--update-rank", type=int, default=32)
    add("--updates", type=int, default=20)
    add("--device", default="cuda", choices=("cuda", "cpu"))
    add("--out", help="result file to write")
    args = parser.parse_args(argv)
    if unknown := {*args.topics} - {*TOPICS} | {*args.policies} - {*arrivals.POLICIES}:
        parser.error(f"--topics or --policies has {sorted(unknown)}")
    if len(args.ranks) != 2 or args.adapters < args.slots:
        parser.error("wanted two --ranks, and at least as many --adapters as --slots")
    args.vocab = VOCAB
    return args


def main(argv=None):
    args = parsed(argv)
    shape, cases = PRESETS[args.preset], []
    settings = {"preset": args.preset, "layers": args.layers, "ranks": args.ranks}
    settings |= {"rows": args.rows, "prompt": args.prompt, "new": args.new}

    def save(cases):
        """Also after each case: a run that is cut off leaves those before."""
        if args.out:
            results.write(args.out, cases, **settings)

    with torch.no_grad():
        if "arrivals" in args.topics:
            cases += measure_arrivals(args, shape, save)
            free(args.device)
        if "updates" in args.topics:
            settled = args.update_layers, args.update_rank, args.updates, args.device
            cases += (measured := updates.measure(shape, *settled))
            print(*measured, sep="\n")
            save(cases)
    return 0


if __name__ == "__main__":
    sys.exit(main())
