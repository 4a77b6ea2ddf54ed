"""Adapters that come, go and change while a model serves.

    python -m benchmarks.churn --topics updates
    python -m benchmarks.churn --preset micro --layers 2 --update-layers 2 --device cpu

`arrivals`: time to the first token, and tokens per second, with more adapters than slots, in host
memory, beside the same with a slot for each (`arrivals.py` says how). Half of the adapters have the
first of `--ranks`, half the other. `updates`: how long `AdapterPool.update` takes for an adapter of
a whole model from tensors on the GPU (`updates.py`).
"""

import sys

import torch

from benchmarks.churn import arrivals, updates
from benchmarks.engines.engine_model import PRESETS
from benchmarks.gpu import free
from benchmarks.options import DEVICES, parser, report

TOPICS = {"arrivals": arrivals.measure, "updates": updates.measure}


def cases(args):
    """All cases, as they are measured."""
    for topic in args.topics:
        yield from TOPICS[topic](PRESETS[args.preset], args)
        free()


def main(argv=None):
    p = parser(
        __doc__,
        topics=([*TOPICS], "of cases"),
        layers=12,
        slots=(8, "of the pool"),
        adapters=(16, "that requests have"),
        ranks=([16, 64], "two, which adapters have in turns"),
        rows=(16, "requests that run at a time, at most"),
        requests=(100, "of each case"),
        rate=(10.0, "requests that arrive in a second"),
        prompt=(256, "tokens"),
        new=(48, "tokens"),
        update_layers=(48, "of the adapter that is updated"),
        update_rank=(32, "of that adapter"),
        updates=(20, "of each case"),
        preset=("a3b", "of the model", PRESETS),
        device=("cuda", "of the model", DEVICES),
    )
    args = p.parse_args(argv)
    if unknown := {*args.topics} - {*TOPICS}:
        p.error(f"--topics has {sorted(unknown)}")
    if len(args.ranks) != 2 or args.adapters < args.slots:
        p.error("wanted two --ranks, and at least as many --adapters as --slots")
    settings = ("preset", "layers", "ranks", "rows", "prompt", "new")
    with torch.no_grad():
        report(cases(args), args.out, **{name: getattr(args, name) for name in settings})
    return 0


if __name__ == "__main__":
    sys.exit(main())
