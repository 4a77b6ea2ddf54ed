"""A layer on a rested GPU and on one that has worked for a while, with clocks and watts.

    python -m benchmarks.compare power --out benchmarks/results/h200-power.json
    python -m benchmarks.compare power --models qwen3 --tokens 4096 --ranks 0,16
    python -m benchmarks.compare power --products --models mixtral --tokens 16384 --seconds 2

Large batches run at the power cap of a card, which then lowers its clock. Microseconds of one
layer, the median of CUDA-graph replays: the first ones after a pause, and those of the second half
of `--seconds` of work, with the clock and the power that `nvidia-smi` reports during it, the joules
of a call and what held the clock down. The same with zeros as hidden states: the same instructions
and bytes, but hardly any bit that changes. What zeros make faster, power makes slow.

`--products`: the products of FP8 layers alone, moelora's and an installed DeepGEMM's in turns. A
difference that cycles (microseconds times MHz) have, too, is the schedule's; one that only joules
have is energy's.
"""

import functools
import statistics
import subprocess
import threading
import time

import torch

from benchmarks import options
from benchmarks.compare import products
from moelora.bench import cases, results, shapes
from moelora.bench.baselines.ours import Ours
from moelora.bench.layer import Layer
from moelora.bench.timing import GraphTimer

PAUSE_S, RESTED_CALLS = 0.3, 10
SAMPLE_MS = 20
QUERY = "clocks.sm,power.draw.instant,clocks_event_reasons.active"
LIMITS = {  # bits of the last one
    0x4: "power cap",
    0x8: "hardware",
    0x20: "temperature",
    0x40: "temperature, hardware",
    0x80: "power brake",
}


def sample(line):
    """(MHz, watts, bits of LIMITS) of a line of nvidia-smi; None if a value is not a number."""
    try:
        mhz, watts, limits = line.split(",")
        return float(mhz), float(watts), int(limits, 16)
    except ValueError:
        return None


class Sampler:
    """Clock and power of a GPU, as a process of nvidia-smi reports them all the time."""

    def __init__(self):
        self.samples = []  # (time, what `sample` returns)
        command = ["nvidia-smi", f"--id=GPU-{torch.cuda.get_device_properties().uuid}"]
        command += [f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
        command += [f"--loop-ms={SAMPLE_MS}"]
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
        """{"mhz": median, "watts": mean, "limits": names of LIMITS} since then; {} without a
        sample."""
        found = [known for at, known in list(self.samples) if at >= start]
        if not found:
            return {}
        mhz, watts, bits = zip(*found, strict=True)
        limits = [name for bit, name in LIMITS.items() if any(bit & b for b in bits)]
        mean = round(statistics.fmean(watts), 1)
        return {"mhz": statistics.median(mhz), "watts": mean, "limits": limits}


def rested_and_working(replay, seconds, sampler):
    """{"rested_us", "working_us"} of one graph, what `since` returns, and the joules of a call."""
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
    known = sampler.since(start + seconds / 2)
    torch.cuda.synchronize()
    us = [1e3 * begin.elapsed_time(end) for begin, end in took]
    parts = us[:RESTED_CALLS], us[half or 0 :]
    rested, working = (round(statistics.median(part), 1) for part in parts)
    if known:
        known["joules"] = round(1e-6 * working * known["watts"], 4)
    return {"rested_us": rested, "working_us": working} | known


def with_zeros(replay, operands, seconds, sampler):
    """{"zeros_rested_us", ...}: what `rested_and_working` returns while operands are zeros."""
    kept = [x.clone() for x in operands]
    for x in operands:
        x.zero_()
    zeros = rested_and_working(replay, seconds, sampler)
    for x, values in zip(operands, kept, strict=True):
        x.copy_(values)
    return {f"zeros_{what}": value for what, value in zeros.items()}


def measure(args, sampler):
    """A row for each case, as it is measured."""
    timer = GraphTimer()
    for name in args.models:
        key, model = shapes.find(name)
        generator = torch.Generator("cuda").manual_seed(0)
        layer = Layer(model, "bf16", [r for r in args.ranks if r], args.adapters, generator)
        ours = Ours(layer)
        for tokens in args.tokens:
            batch = cases.draw_batch(model, tokens, args.adapters, generator)
            for rank in args.ranks:
                graph = timer.capture([functools.partial(ours.run, batch, rank)])
                row = {"model": key, "tokens": tokens, "rank": rank}
                row |= rested_and_working(graph.replay, args.seconds, sampler)
                yield row | with_zeros(graph.replay, [batch.x], args.seconds, sampler)
                graph.reset()


def measure_products(args, sampler):
    """A row for each product of a case and each project, as it is measured. Numbers are medians of
    all turns; limits are those of any turn."""
    peer, timer = products.DeepGemm(), GraphTimer()
    for name in args.models:
        key, model = shapes.find(name)
        generator = torch.Generator("cuda").manual_seed(0)
        layer = Layer(model.quantized(products.FORMAT), "bf16", [], 1, generator)
        for tokens in args.tokens:
            batch = cases.draw_batch(model, tokens, 1, generator)
            pairs = products.pairs(layer, batch, generator, peer)
            for product, (calls, operands, error, work) in pairs.items():
                graphs = {who: timer.capture([call]) for who, call in calls.items()}
                turns = {who: [] for who in calls}
                for i in range(args.turns):
                    for who in sorted(calls, reverse=i % 2):
                        replay = graphs[who].replay
                        turns[who].append(rested_and_working(replay, args.seconds, sampler))
                for who, graph in graphs.items():
                    row = {"model": key, "tokens": tokens, "product": product, "project": who}
                    row |= merged(turns[who])
                    row["tflops"] = round(work / row["working_us"] / 1e6, 1)
                    row |= with_zeros(graph.replay, operands, args.seconds, sampler)
                    yield row | {"kernels_us": kernels_us(calls[who]), "relative_error": error}
                    graph.reset()


def merged(turns):
    """Medians of numbers, and unions of lists."""
    keys = dict.fromkeys(key for turn in turns for key in turn)
    values = {key: [turn[key] for turn in turns if key in turn] for key in keys}
    return {
        key: sorted({*sum(v, [])}) if isinstance(v[0], list) else round(statistics.median(v), 4)
        for key, v in values.items()
    }


def kernels_us(call, calls=5):
    """{name: microseconds of a call} of its kernels."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    found = {e.key[:80]: e.device_time_total / calls for e in profile.key_averages()}
    return {name: round(us, 1) for name, us in found.items() if us}


def main(argv=None):
    usual = {"models": ["qwen3", "mixtral", "dsv2lite"], "tokens": [1024, 4096, 16384]}
    parser = options.parser(__doc__, **usual, ranks=[0, 16, 64], adapters=8, seconds=0.5, turns=2)
    parser.add_argument("--products", action="store_true", help="of FP8 layers, beside DeepGEMM's")
    args = parser.parse_args(argv)
    if args.products and any("@" in name for name in args.models):
        parser.error(f"--products quantizes models to {products.FORMAT}: name them without @")
    if not torch.cuda.is_available():
        parser.error("clocks and watts are a GPU's, and torch finds none")
    rows, sampler = [], Sampler()
    try:
        for row in (measure_products if args.products else measure)(args, sampler):
            rows.append(row)
            print(" ".join(f"{k} {v}" for k, v in row.items()), flush=True)
            if args.out:
                results.write(args.out, rows)
    finally:
        sampler.stop()
    return 0
