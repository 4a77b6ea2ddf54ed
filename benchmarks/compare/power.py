"""A layer on a rested GPU and on one that has worked for a while, with clocks and watts.

    python -m benchmarks.compare power --out benchmarks/results/h200-power.json
    python -m benchmarks.compare power --models qwen3 --tokens 4096 --ranks 0,16

Large batches run at the power cap of a card, which then lowers its clock. Microseconds of one
layer, the median of CUDA-graph replays: the first ones after a pause, and those of the second half
of `--seconds` of work, with the clock and the power that `nvidia-smi` reports during it. The same
with zeros as hidden states: the same instructions and bytes, but hardly any bit that changes. What
zeros make faster, power makes slow.
"""

import functools
import statistics
import subprocess
import threading
import time

import torch

from benchmarks import options
from moelora.bench import cases, results, shapes
from moelora.bench.baselines.ours import Ours
from moelora.bench.layer import Layer
from moelora.bench.timing import GraphTimer

PAUSE_S, RESTED_CALLS = 0.3, 10
SAMPLE_MS = 20
QUERY = "clocks.sm,power.draw.instant"


def sample(line):
    """(MHz, watts) of a line of nvidia-smi; None if a value is not a number."""
    try:
        mhz, watts = (float(word) for word in line.split(","))
    except ValueError:
        return None
    return mhz, watts


class Sampler:
    """Clock and power of a GPU, as a process of nvidia-smi reports them all the time."""

    def __init__(self):
        self.samples = []  # (time, (MHz, watts))
        command = [
            "nvidia-smi",
            f"--id=GPU-{torch.cuda.get_device_properties().uuid}",
            f"--query-gpu={QUERY}",
            "--format=csv,noheader,nounits",
            f"--loop-ms={SAMPLE_MS}",
        ]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        for line in self.process.stdout:
            if known := sample(line):
                self.samples.append((time.perf_counter(), known))

    def stop(self):
        self.process.kill()
        self.process.wait()
        self.reader.join()

    def since(self, start):
        """(MHz, watts), medians since then; (None, None) without a sample."""
        found = [known for at, known in list(self.samples) if at >= start]
        return tuple(map(statistics.median, zip(*found, strict=True))) if found else (None, None)


def rested_and_working(replay, seconds, sampler):
    """{"rested_us", "working_us", "mhz", "watts"} of one graph."""
    torch.cuda.synchronize()
    time.sleep(PAUSE_S)
    start, took, half = time.perf_counter(), [], None
    while (now := time.perf_counter()) < start + seconds:
        if half is None and now >= start + seconds / 2:
            half = len(took)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay()
        end.record()
        took.append((begin, end))
        if len(took) >= RESTED_CALLS:  # not further ahead than that
            took[-RESTED_CALLS][1].synchronize()
    mhz, watts = sampler.since(start + seconds / 2)
    torch.cuda.synchronize()
    us = [1e3 * begin.elapsed_time(end) for begin, end in took]
    return {
        "rested_us": round(statistics.median(us[:RESTED_CALLS]), 1),
        "working_us": round(statistics.median(us[half or 0 :]), 1),
        "mhz": mhz,
        "watts": watts,
    }


def measure(args, sampler):
    """One row for each case, printed as it is made."""
    rows, timer = [], GraphTimer()
    for name in args.models:
        key, model = shapes.find(name)
        generator = torch.Generator("cuda").manual_seed(0)
        layer = Layer(model, "bf16", [r for r in args.ranks if r], args.adapters, generator)
        ours = Ours(layer, None)
        for tokens in args.tokens:
            batch = cases.draw_batch(model, tokens, args.adapters, generator)
            for rank in args.ranks:
                graph = timer.capture([functools.partial(ours.run, batch, rank)])
                x, row = batch.x.clone(), {"model": key, "tokens": tokens, "rank": rank}
                row |= rested_and_working(graph.replay, args.seconds, sampler)
                batch.x.zero_()
                zeros = rested_and_working(graph.replay, args.seconds, sampler)
                row |= {f"zeros_{what}": value for what, value in zeros.items()}
                batch.x.copy_(x)
                graph.reset()
                rows.append(row)
                print(" ".join(f"{k} {v}" for k, v in row.items()), flush=True)
    return rows


def main(argv=None):
    usual = {"models": ["qwen3", "mixtral", "dsv2lite"], "tokens": [1024, 4096, 16384]}
    parser = options.parser(__doc__, **usual, ranks=[0, 16, 64], adapters=8, seconds=0.5)
    args = parser.parse_args(argv)
    sampler = Sampler()
    try:
        rows = measure(args, sampler)
    finally:
        sampler.stop()
    if args.out:
        results.write(args.out, rows)
    return 0
