"""Several builds of moelora on the same layers, in turns: which is faster, and whose bits differ.

    python -m benchmarks.compare times before=/tmp/before/_C.abi3.so now=moelora/_C.abi3.so
    python -m benchmarks.compare times a=. b=.,MOELORA_FORCE_VARIANT=NAME --part gate_up
    python -m benchmarks.compare times plan=. --variants _sm90 --models qwen3@int4 --tokens 1,16

A build is a name, an extension module or a checkout and, behind commas, environment variables
(builds.py). Each has a process of its own that holds the layer. They take turns, forwards and
backwards, so that all meet the same clocks and neighbors; times are medians of the turns, and
percentages compare with the first build. The same module twice shows the noise. `same_bits` says
whether the first batch has the same result with all builds.

`--part` takes the delta of one projection instead of the layer. `--variants` adds the first build
with each kernel variant of projections and whole layers forced, beside its plan: the tables of
csrc/core/plan_tile.c come from this. One that does not serve a layer has the plan's time.
"""

import hashlib
import math
import re
import statistics
import time

import torch

import moelora
from benchmarks import gpu, options
from benchmarks.compare.builds import started
from moelora.bench import cases, harness, shapes, timing
from moelora.bench.baselines.ours import Ours
from moelora.bench.layer import Layer
from moelora.commands.tune import candidates

ROLES = "gemm", "decode"
DELTAS = {"gate_up": moelora.moe_lora_gate_up_delta, "down": moelora.moe_lora_down_delta}


class Worker:
    """The process of one build."""

    def __init__(self, device):
        self.generator = torch.Generator(device)
        self.timer = timing.GraphTimer() if device == "cuda" else None
        self.layer, self.batches, self.turns = None, [], {}

    def load(self, dtype, shape, ranks, adapters, tp):
        self.layer, self.turns = None, {}  # before the next one takes its memory
        find = shapes.custom if "," in shape else shapes.find
        key, model = find(shape)
        model = model.shard(tp)
        self.generator.manual_seed(1)
        self.layer = Layer(model, dtype, [r for r in ranks if r], adapters, self.generator)
        return key

    def draw(self, tokens, ranks, mix, routing, part):
        """Batches and graphs of one case; {rank: digest of its first output}."""
        layer, self.turns, found = self.layer, {}, {}
        self.generator.manual_seed(2)
        batches = harness.draw_batches(layer, tokens, self.generator, mix, routing)
        self.batches = batches  # graphs read them
        moved = cases.work(layer.model, batches[0])[1]
        calls = timing.calls_in_graph(len(batches), moved) if self.timer else 1
        run = self.part(part, tokens)
        for rank in ranks:
            call = timing.on(batches, run, rank)
            bits = call(0).cpu().view(torch.uint8)
            found[rank] = hashlib.sha1(bits.numpy()).hexdigest()
            rotation = [lambda i=i, call=call: call(i % len(batches)) for i in range(calls)]
            replay = self.timer.capture(rotation).replay if self.timer else rotation[0]
            self.turns[rank] = replay, calls
        return found

    def part(self, name, tokens):
        """A function of a batch and a rank: the layer, or the delta of one of its projections."""
        layer, down = self.layer, name == "down"
        if name == "layer":
            return Ours(layer).run
        shape = (tokens * layer.model.top_k, layer.model.intermediate)
        h = cases.normal(shape, 1.0, self.generator, cases.DTYPES[layer.dtype])

        def delta(b, rank):
            f = layer.stacks[rank]
            return DELTAS[name](
                *(h if down else b.x, b.topk_weights, b.topk_ids),
                token_lora_mapping=b.mapping,
                lora_a=[f.a2] if down else f.a13,
                lora_b=[f.b2] if down else f.b13,
                mul_routed_weight=down,
            )

        return delta

    def turn(self, rank, budget_ms):
        """Microseconds of a call."""
        replay, calls = self.turns[rank]
        replay()
        took = []
        while len(took) < 2 or sum(took) < budget_ms * 1e-3:
            took.append(gpu.timed(replay)[0])
        return 1e6 * statistics.median(took) / calls


def rows(args):
    with started(args.builds, f"{__name__}:Worker", args.device) as builds:
        yield from compare(builds, args)


def compare(builds, args):
    """A row for each case and rank, as it is made."""
    end = time.monotonic() + args.deadline_s
    case = {name: getattr(args, name) for name in ("mix", "routing", "part", "ranks")}
    for shape in args.models:
        layer = {"shape": shape, "ranks": args.ranks, "adapters": args.adapters, "tp": args.tp}
        (model,) = {build.ask("load", dtype=args.dtype, **layer) for build in builds}
        for tokens in args.tokens:
            if time.monotonic() > end:
                return
            first = [build.ask("draw", tokens=tokens, **case) for build in builds]
            for rank in args.ranks:
                turns = {build.name: [] for build in builds}
                for i in range(args.turns):
                    for build in builds if i % 2 == 0 else reversed(builds):
                        us = build.ask("turn", rank=rank, budget_ms=args.budget_ms)
                        turns[build.name].append(us)
                row = {"model": model, "tokens": tokens, "rank": rank}
                row["us"] = {name: round(statistics.median(us), 4) for name, us in turns.items()}
                yield row | {"same_bits": len({bits[rank] for bits in first}) == 1}


def shown(row):
    """A line of a row, with percentages."""
    first, *others = row["us"].items()
    cells = [f"{row['model']:9} {row['tokens']:6} r{row['rank']:<3} {first[0]} {first[1]:.1f} us"]
    cells += [f"{name} {us:.1f} ({100 * (us / first[1] - 1):+.1f} %)" for name, us in others]
    cells += [] if row["same_bits"] else ["other bits"]
    return "   ".join(cells)


def main(argv=None):
    parser = options.parser(
        __doc__,
        models=["qwen3", "mixtral", "dsv2lite"],
        tokens=[16, 256, 1024, 4096],
        ranks=[0, 16, 64],
        adapters=8,
        tp=1,
        mix="many",
        routing="uniform",
        turns=8,
        budget_ms=5.0,
        deadline_s=math.inf,
        device=("cuda", "of all builds", options.DEVICES),
        dtype=("bf16", "of activations", cases.DTYPES),
        part=("layer", "of the layer", ("layer", *DELTAS)),
    )
    parser.add_argument("builds", nargs="+", help="NAME=MODULE[,VARIABLE=VALUE...]")
    parser.add_argument("--shape", help="E,top_k,K,I instead of models")
    parser.add_argument("--variants", help="a regular expression of names")
    args = parser.parse_args(argv)
    if args.turns < 1:
        parser.error(f"--turns is {args.turns}, wanted 1 or more")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device is cuda, and torch finds no GPU")
    if args.shape:
        args.models = [args.shape]
    if args.part in DELTAS:
        args.ranks = [rank for rank in args.ranks if rank]
    if args.variants is not None:
        module = args.builds[0].partition("=")[2]
        names = candidates(args.dtype, args.device, *ROLES)
        names = [name for name in names if re.search(args.variants, name)]
        args.builds += [f"{name}={module},MOELORA_FORCE_VARIANT={name}" for name in names]
    options.report(rows(args), args.out, shown)
    return 0
