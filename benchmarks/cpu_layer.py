"""The MoE layer on a CPU: ours with and without adapters, a loop over experts, transformers + PEFT.

    python -m benchmarks.cpu_layer --out benchmarks/results/cpu-layer.json
    python -m benchmarks.cpu_layer --quick
    python -m benchmarks.cpu_layer --models mixtral --tokens 8 --dtypes bf16 --ranks 16

Layers of Qwen3-30B-A3B and Mixtral-8x7B with fewer experts, so that they fit (12 GB of memory). All
rivals of a case, adapters of every rank included, take turns in one process with the same threads
and tensors; the median of each is reported. Before every timed call a buffer of four times the last
cache is read, so that weights come from memory as they do in a model of many layers. The same reads
are the measure of streaming bandwidth; `torch.mm` of two square matrices takes its turn too and is
the measure of arithmetic. The bound of a case is the larger of bytes / bandwidth and flops / rate.

Rivals: `loop`, experts one by one with index_select, torch.mm and two more products for every
adapter's rows; `grouped_mm_peft` and `batched_mm_peft`, transformers' experts with PEFT, which
serves one adapter at a time (see peer_transformers.py); `grouped_mm_base`, the same module without
adapters. Every output is compared with float64 on a few tokens, and with ours on all, before it is
timed. A rival that needs more than `--patience-s` seconds a call is left out; the file says why.
"""

import argparse
import os
import pathlib
import statistics
import sys
import time

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import moelora
from benchmarks import cases, results
from benchmarks.layer import ours
from benchmarks.peer_transformers import IMPLEMENTATIONS, Peer, Skipped
from moelora.reference import naive_fused_experts_lora

MODELS = {"qwen3": cases.MODELS["qwen3"].cut(16), "mixtral": cases.MODELS["mixtral"].cut(4)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Relative to the norm of the reference; PEFT in bf16 also rounds the merged weights.
TOLERANCE = {"fp32": 2e-5, "bf16": 2e-2}
QUICK = {"models": "qwen3", "ranks": "16", "budget_s": 0.15}
STREAMED = 8  # up to here the layer is bound by its weights alone
COMPUTED = 512  # from here on by arithmetic alone
ROUNDS = range(3, 15)
FAR_BEHIND = 5.0


class Machine:
    """The two yardsticks: a streaming read, which also empties the caches, and torch.mm."""

    def __init__(self, mm_size):
        cache = last_cache_bytes()
        self.buffer = torch.ones(max(4 * cache, 256 << 20) // 4)
        self.mm_size = mm_size

    def read(self):
        """Bytes per second of one multi-threaded read."""
        started = time.perf_counter()
        self.buffer.sum()
        return 4 * self.buffer.numel() / (time.perf_counter() - started)

    def mm(self, dtype):
        """A call of torch.mm on weights as layers hold them, (out, in)."""
        x, w = torch.ones(2, self.mm_size, self.mm_size, dtype=dtype)
        return lambda: torch.mm(x, w.t())


def last_cache_bytes():
    """Size of the largest cache of this processor; 32 MiB where the system does not say."""
    sizes = [32 << 20]
    for path in pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text.rstrip("KM")) * {"K": 1 << 10, "M": 1 << 20}.get(text[-1], 1))
    return max(sizes)


def processor():
    """What the result file says of the machine."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "device": names[0] if names else "cpu",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_features": moelora._C.cpu_features().split(),
        "last_cache_bytes": last_cache_bytes(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def product(w, x):
    """x w^T in float64 for w [N, K] of any dtype, x [n, K], a few rows of w at a time."""
    return torch.cat([x @ part.double().t() for part in w.split(256)], dim=1)


def reference_rows(batch, w13, w2, stacks, tokens):
    """{rank: rows `tokens` of the layer in float64}; rank 0 is the layer without adapters."""
    rows = {rank: [] for rank in (0, *stacks)}
    for m in tokens:
        x, adapter = batch.x[m].double()[None], int(batch.mapping[m])
        total = torch.zeros(len(rows), x.shape[1], dtype=torch.float64)
        for weight, e in zip(
            batch.topk_weights[m].tolist(), batch.topk_ids[m].tolist(), strict=True
        ):
            gu = product(w13[e], x).repeat(len(rows), 1)
            for at, f in enumerate(stacks.values(), 1):
                both = zip(f.a13, f.b13, strict=True)
                deltas = [product(b[adapter, e], product(a[adapter, e], x)) for a, b in both]
                gu[at] += torch.cat(deltas, dim=1)[0]
            gate, up = gu.chunk(2, dim=1)
            h = torch.nn.functional.silu(gate) * up
            z = product(w2[e], h)
            for at, f in enumerate(stacks.values(), 1):
                shrunk = product(f.a2[adapter, e], h[at : at + 1])
                z[at] += product(f.b2[adapter, e], shrunk)[0]
            total += weight * z
        for rank, row in zip(rows, total, strict=True):
            rows[rank].append(row)
    return {rank: torch.stack(both) for rank, both in rows.items()}


def relative_error(out, reference):
    return float((out.double() - reference).norm() / reference.norm())


def loop(batch, w13, w2, factors):
    return naive_fused_experts_lora(
        batch.x,
        w13,
        w2,
        batch.topk_weights,
        batch.topk_ids,
        token_lora_mapping=batch.mapping,
        w13_lora_a=factors.a13,
        w13_lora_b=factors.b13,
        w2_lora_a=factors.a2,
        w2_lora_b=factors.b2,
    )


class Layer:
    """Weights and adapters of one model in one dtype, and everybody's way of running them."""

    def __init__(self, name, dtype, args):
        self.name, self.dtype, self.args = name, dtype, args
        self.model = MODELS[name]
        self.generator = torch.Generator().manual_seed(1234)
        draw = self.generator, DTYPES[dtype]
        self.w13, self.w2 = cases.draw_weights(self.model, *draw)
        self.stacks = {
            r: cases.draw_factors(self.model, args.adapters, r, *draw) for r in args.ranks
        }
        self.peer = Peer(name, self.model, self.w13, self.w2)
        for rank, factors in self.stacks.items():
            factors.a13[1].copy_(factors.a13[0])  # equal, yet two tensors: we read both
            self.peer.add_adapters(rank, factors)
        self.skipped = {}  # {(rival, rank): why}; too slow stays so for more tokens and ranks

    def runs(self, batch):
        """{(who, rank): call}; rank 0 is the layer without adapters."""
        runs = {
            ("ours", 0): lambda: ours(batch, self.w13, self.w2),
            ("grouped_mm_base", 0): lambda: self.peer.base(batch, "grouped_mm"),
        }
        for rank, factors in self.stacks.items():
            runs["ours", rank] = lambda f=factors: ours(batch, self.w13, self.w2, f)
            runs["loop", rank] = lambda f=factors: loop(batch, self.w13, self.w2, f)
            for how in IMPLEMENTATIONS:
                runs[f"{how}_peft", rank] = lambda how=how, r=rank: self.peer.run(batch, how, r)
        return {key: run for key, run in runs.items() if key not in self.skipped}

    def first_call(self, key, run, batch):
        """The output that is checked; a PEFT rival may turn out to be too slow or too large."""
        who, rank = key
        if not who.endswith("_peft"):
            return run()
        how = who.removesuffix("_peft")
        self.peer.check_copies(batch, how)
        return self.peer.run(batch, how, rank, self.args.patience_s)

    def check(self, runs, batch):
        """Errors of all rivals; drops those that are too slow, refuses those that are wrong."""
        tokens = sorted({0, len(batch.x) - 1})
        reference = reference_rows(batch, self.w13, self.w2, self.stacks, tokens)
        errors, mine = {}, {}
        for key in sorted(runs, key=lambda key: (key[0] != "ours", key[1])):
            if key not in runs:
                continue
            who, rank = key
            try:
                out = self.first_call(key, runs[key], batch)
            except Skipped as why:
                for larger in self.args.ranks:
                    if larger >= rank:
                        note = f"{len(batch.x)} tokens, rank {rank}: {why}"
                        self.skipped.setdefault((who, larger), note)
                        runs.pop((who, larger), None)
                continue
            mine.setdefault(rank, out.float())
            near = relative_error(out[tokens], reference[rank])
            far = relative_error(out, mine[rank])
            errors[key] = max(near, far)
            if not errors[key] < TOLERANCE[self.dtype]:
                raise RuntimeError(
                    f"{self.name} {self.dtype} M={len(batch.x)} rank {rank}: {who} is off by "
                    f"{near:.3g} from float64 and by {far:.3g} from ours"
                )
        return errors


def take_turns(runs, machine, budget_s):
    """({name: median seconds}, bytes per second): rounds of one call each, caches emptied before.

    A rival leaves once it has had its time and its rounds; one far behind leaves after its time.
    """
    times, reads = {key: [] for key in runs}, []
    waiting = dict(runs)
    while waiting:
        for key, run in list(waiting.items()):
            reads.append(machine.read())
            started = time.perf_counter()
            run()
            times[key].append(time.perf_counter() - started)
            rounds, spent = len(times[key]), sum(times[key])
            enough = ROUNDS.start
            if spent > rounds * FAR_BEHIND * min(times.get(("ours", key[1]), [spent])):
                enough = 1
            if rounds >= ROUNDS.stop or (rounds >= enough and spent > budget_s):
                del waiting[key]
    return {key: statistics.median(t) for key, t in times.items()}, statistics.median(reads)


def measure(layer, machine, tokens):
    """The rows of the result file for one batch: one for each rank."""
    args, model = layer.args, layer.model
    batch = cases.draw_batch(
        model, tokens, args.adapters, layer.generator, dtype=DTYPES[layer.dtype]
    )
    runs = layer.runs(batch)
    errors = layer.check(runs, batch)
    if tokens > STREAMED:
        runs["mm", 0] = machine.mm(DTYPES[layer.dtype])
    times, bandwidth = take_turns(runs, machine, args.budget_s)
    rate = 2.0 * machine.mm_size**3 / times["mm", 0] if ("mm", 0) in times else None

    def bound(rank):
        flops, moved = cases.work(model, batch, rank)
        streaming = moved / bandwidth if tokens < COMPUTED else 0.0
        return max(streaming, flops / rate if rate else 0.0)

    rows = []
    base, base_bound = times["ours", 0], bound(0)
    for rank in layer.stacks:
        mine = times["ours", rank]
        rivals = {who: t for (who, r), t in times.items() if r == rank and who != "ours"}
        best = min(rivals, key=rivals.get)
        rivals["grouped_mm_base"] = times["grouped_mm_base", 0]
        rows.append(
            {
                "model": layer.name,
                "experts": model.experts,
                "tokens": tokens,
                "rank": rank,
                "adapters": args.adapters,
                "mix": "many",
                "routing": "uniform",
                "dtype": layer.dtype,
                "ours_us": microseconds(mine),
                "ours_base_us": microseconds(base),
                "bound_us": microseconds(bound(rank)),
                "bound_base_us": microseconds(base_bound),
                "share": round(bound(rank) / mine, 3),
                "share_base": round(base_bound / base, 3),
                "overhead": round(mine / base - 1, 3),
                "rivals": {who: microseconds(t) for who, t in rivals.items()},
                "best_rival": best,
                "ratio": round(rivals[best] / mine, 3),
                "skipped": {who: why for (who, r), why in layer.skipped.items() if r == rank},
                "streaming_gb_s": round(bandwidth / 1e9, 2),
                "mm_gflop_s": round(rate / 1e9, 1) if rate else None,
                "plan": moelora._C.last_plan(),
                "relative_error": {
                    who: float(f"{e:.2g}") for (who, r), e in errors.items() if r in (0, rank)
                },
            }
        )
    return rows


def microseconds(seconds):
    return round(1e6 * seconds, 1)


def goals(row):
    """{column: goal} that this row misses."""
    features = moelora._C.cpu_features()
    low = row["dtype"] == "bf16" and ("avx512_bf16" in features or "amx" in features)
    wanted = {"x best": (row["ratio"], 1.0)}
    if row["tokens"] <= STREAMED:
        wanted["share"] = row["share"], 0.8
    if row["tokens"] >= COMPUTED:
        wanted["share"] = row["share"], 0.5 if low else 0.7
        if row["rank"] <= 16:
            wanted["adapters"] = -row["overhead"], -0.15
    return {column: abs(goal) for column, (got, goal) in wanted.items() if got < goal}


def show(rows):
    """The table; red is what misses a goal."""
    table = Table(
        title="milliseconds per layer",
        caption="grouped, batched: transformers' experts, PEFT adapters in turn; -: too slow",
    )
    for column in ("model", "dtype", "M", "rank", "ours", "base", "adapters", "bound", "share"):
        table.add_column(column, justify="right")
    for column in ("loop", "grouped", "batched", "x best", "grouped base"):
        table.add_column(column, justify="right")
    last = None
    for r in rows:
        missed = goals(r)
        peft = [r["rivals"].get(f"{how}_peft") for how in IMPLEMENTATIONS]
        cells = {
            "ours": f"{r['ours_us'] / 1e3:.2f}",
            "base": f"{r['ours_base_us'] / 1e3:.2f}",
            "adapters": f"{100 * r['overhead']:+.0f} %",
            "bound": f"{r['bound_us'] / 1e3:.2f}",
            "share": f"{r['share']:.2f}",
            "loop": f"{r['rivals']['loop'] / 1e3:.2f}",
            "grouped": f"{peft[0] / 1e3:.1f}" if peft[0] else "-",
            "batched": f"{peft[1] / 1e3:.1f}" if peft[1] else "-",
            "x best": f"{r['ratio']:.2f}",
            "grouped base": f"{r['rivals']['grouped_mm_base'] / 1e3:.2f}",
        }
        cells = [f"[red]{text}[/]" if name in missed else text for name, text in cells.items()]
        if last not in (None, (r["model"], r["dtype"])):
            table.add_section()
        last = r["model"], r["dtype"]
        table.add_row(*last, str(r["tokens"]), str(r["rank"]), *cells)
    console = Console(width=None if Console().is_terminal else 150)
    console.print(table)
    for r in rows:
        for column, goal in goals(r).items():
            case = f"{r['model']} {r['dtype']} M={r['tokens']} rank {r['rank']}"
            console.print(f"misses its goal: {case}: {column}, wanted {goal:g}", highlight=False)


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tokens", default="1,8,64,512")
    parser.add_argument("--ranks", default="16,64")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--adapters", default=8, type=int)
    parser.add_argument("--threads", type=int, help="torch's number of threads")
    parser.add_argument("--budget-s", default=0.3, type=float, help="seconds per rival and case")
    parser.add_argument("--patience-s", default=1.5, type=float, help="longest call of a rival")
    parser.add_argument("--mm-size", default=2048, type=int, help="size of the torch.mm yardstick")
    parser.add_argument("--quick", action="store_true", help=f"a first look: {QUICK}")
    parser.add_argument("--out", help="result file to write")
    if "--quick" in argv:
        parser.set_defaults(**QUICK)
    args = parser.parse_args(argv)
    args.models, args.dtypes = args.models.split(","), args.dtypes.split(",")
    args.tokens = [int(m) for m in args.tokens.split(",")]
    args.ranks = [int(r) for r in args.ranks.split(",")]
    return args


@torch.no_grad()
def main(argv=None):
    args = parse(sys.argv[1:] if argv is None else argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    machine, rows, started = Machine(args.mm_size), [], time.monotonic()
    about = processor()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn()) as progress:
        bar = progress.add_task("", total=len(args.models) * len(args.dtypes) * len(args.tokens))
        for name in args.models:
            for dtype in args.dtypes:
                progress.update(bar, description=f"{name} {dtype}")
                layer = None  # before the next one is drawn
                layer = Layer(name, dtype, args)
                for tokens in args.tokens:
                    progress.update(bar, description=f"{name} {dtype} M={tokens}")
                    rows += measure(layer, machine, tokens)
                    progress.advance(bar)
    show(rows)
    if args.out:
        results.write(args.out, rows, **about, seconds=round(time.monotonic() - started))
    return rows


if __name__ == "__main__":
    main()
