"""One case: draw batches, check every baseline against float64, time them in turn, write rows."""

import functools
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from moelora import _C
from moelora.bench import cases
from moelora.bench.baselines import Baseline, Skipped, TooSlow
from moelora.bench.cases import Batch
from moelora.bench.formats import FORMATS
from moelora.bench.layer import Layer
from moelora.bench.machine import Peaks
from moelora.bench.results import Case
from moelora.bench.shapes import Model
from moelora.bench.timing import GraphTimer, Key, Runs, Times, TurnTimer
from moelora.reference import activate
from moelora.reference.fp8 import is_w8a8, rule_of

Value = TypeVar("Value")

# Relative to the norm of the reference. Baselines that merge adapters, or add them later, round
# more.
TOLERANCE = {"fp32": 2e-5, "bf16": 2e-2, "fp16": 5e-3}
W8A8_TOLERANCE = 4e-2  # sums that round differently may become adjacent e4m3 values


def tolerance_of(layer: Layer) -> float:
    return max(TOLERANCE[layer.dtype], W8A8_TOLERANCE if is_w8a8(layer.w13) else 0.0)


def product(w: Tensor, x: Tensor) -> Tensor:
    """x w^T in float64 for w [N, K] of any dtype, x [n, K], a few rows of w at a time."""
    return torch.cat([x @ part.double().t() for part in w.split(4096)], dim=1)


def reference_rows(layer: Layer, batch: Batch, tokens: Iterable[int]) -> dict[int, Tensor]:
    """{rank: rows `tokens` of the layer in float64}; rank 0 is the layer without adapters."""
    stacks, dtype = layer.stacks, batch.x.dtype
    rule13, rule2 = rule_of(layer.w13, dtype), rule_of(layer.w2, dtype)
    rows: dict[int, list[Tensor]] = {rank: [] for rank in (0, *stacks)}
    for m in tokens:
        x, adapter = batch.x[m].double()[None], int(batch.mapping[m])
        total = x.new_zeros(len(rows), x.shape[1])
        routing = batch.topk_weights[m].tolist(), batch.topk_ids[m].tolist()
        for weight, e in zip(*routing, strict=True):
            gu = product(layer.weights_of("w13", e), rule13(x)).repeat(len(rows), 1)
            gu += 0 if layer.b13 is None else layer.b13[e].double()
            for at, f in enumerate(stacks.values() if adapter >= 0 else (), 1):
                both = zip(f.a13, f.b13, strict=True)
                deltas = [product(b[adapter, e], product(a[adapter, e], x)) for a, b in both]
                gu[at] += torch.cat(deltas, dim=1)[0]
            h = activate(gu, layer.model.activation)
            z = product(layer.weights_of("w2", e), rule2(h))
            z += 0 if layer.b2 is None else layer.b2[e].double()
            for at, f in enumerate(stacks.values() if adapter >= 0 else (), 1):
                xa = product(f.a2[adapter, e], h[at : at + 1])
                z[at] += product(f.b2[adapter, e], xa)[0]
            total += weight * z
        for rank, row in zip(rows, total, strict=True):
            rows[rank].append(row)
    return {rank: torch.stack(found) for rank, found in rows.items()}


def relative_error(out: Tensor, reference: Tensor) -> float:
    return float((out.double() - reference.double()).norm() / reference.double().norm())


def draw_batches(
    layer: Layer, tokens: int, generator: torch.Generator, mix: str, routing: str
) -> list[Batch]:
    """Batches in rotation: enough that few tokens do not always select the same experts. A CPU
    reads a buffer larger than its caches between calls instead.
    """
    count = 32 if tokens <= 16 else 8 if tokens <= 64 else 4 if tokens <= 256 else 2
    case = layer.model, tokens, layer.adapters, generator, mix, routing, cases.DTYPES[layer.dtype]
    return [cases.draw_batch(*case) for _ in range(1 if layer.device.type == "cpu" else count)]


def mean_work(model: Model, batches: Sequence[Batch], rank: int) -> tuple[float, float]:
    """(flops, bytes) of one layer, averaged over batches."""
    flops, moved = zip(*(cases.work(model, batch, rank) for batch in batches), strict=True)
    return sum(flops) / len(batches), sum(moved) / len(batches)


def bound_us(model: Model, work: tuple[float, float], peaks: Peaks) -> float:
    """Lower bound of the time of (flops, bytes), in microseconds."""
    flops, moved = work
    rate = FORMATS[model.format].rate if model.format else 1.0
    return 1e6 * peaks.bound(flops / rate, moved)


def name_of(key: Key) -> str:
    """A run in result files: ours without adapters has a name of its own, as baselines do."""
    who, rank = key
    return f"{who}_base" if who.startswith("ours") and not rank else who


def of_rank(values: Mapping[Key, Value], rank: int) -> dict[str, Value]:
    """Values of a rank and of the layer without adapters, by `name_of`."""
    return {name_of(key): value for key, value in values.items() if key[1] in (0, rank)}


@dataclass
class Bench:
    """All baselines of one layer; those that were too slow are not tried again."""

    key: str  # key of the model in result files
    layer: Layer
    baselines: Sequence[Baseline]
    timer: GraphTimer | TurnTimer
    args: Namespace  # settled options of the command
    slow: dict[Key, str] = field(default_factory=dict)  # reasons

    def measure(self, tokens: int, generator: torch.Generator) -> list[Case]:
        """Rows of the result file for batches with this many tokens: one per rank."""
        args, layer = self.args, self.layer
        batches = draw_batches(layer, tokens, generator, args.mix, args.routing)
        self.skipped = dict(self.slow)
        runs = self.runs(batches)
        plan, errors, ratios = self.check(runs, batches[0])
        work = {rank: mean_work(layer.model, batches, rank) for rank in (0, *layer.stacks)}
        times, peaks = self.timer.compare(runs, batches, work[0][1], args.budget_ms)
        bounds = {rank: bound_us(layer.model, w, peaks) for rank, w in work.items()}
        mix = args.mix if args.mix in cases.MIXES else f"{args.mix} base"
        head = {"model": self.key, "experts": layer.model.experts, "tp": args.tp, "tokens": tokens}
        kind = {"adapters": layer.adapters, "mix": mix, "routing": args.routing}
        kind |= {"dtype": layer.dtype, "format": layer.model.format or layer.dtype, "plan": plan}
        rows = []
        for rank in layer.stacks:
            row = head | {"rank": rank} | kind
            off = of_rank(errors, rank).items()
            row["relative_error"] = {name: float(f"{error:.2g}") for name, error in off}
            row["eager"] = [name for name, run in of_rank(runs, rank).items() if run.eager]
            row["skipped"] = of_rank(self.skipped, rank)
            row |= {"max_err_ratio": ratios[rank]} if rank in ratios else {}
            rows.append(row | figures(rank, times, bounds, work[rank], peaks))
        return rows

    def runs(self, batches: Sequence[Batch]) -> Runs:
        runs: Runs = {}
        for baseline in self.baselines:
            try:
                runs |= baseline.runs(batches)
            except Skipped as why:
                self.skipped[type(baseline).__name__.lower(), 0] = str(why)
        return {key: run for key, run in runs.items() if key not in self.slow}

    def check(self, runs: Runs, batch: Batch) -> tuple[str, dict[Key, float], dict[int, float]]:
        """(our plan, relative errors, {rank: our error relative to that with unpacked weights, or
        with FP8 activations to vLLM's}). Drops from `runs` what cannot run or is too slow; raises
        for wrong results.
        """
        tokens = sorted({0, len(batch.x) // 2, len(batch.x) - 1})
        reference_of = functools.cache(lambda layer: reference_rows(layer, batch, tokens))
        errors: dict[Key, float] = {}
        nears: dict[Key, float] = {}
        mine: dict[int, Tensor] = {}
        plan = ""
        for key in sorted(runs, key=lambda key: (key[0] != "ours", key[1])):
            if key not in runs:
                continue
            who, rank = key
            try:
                run = runs[key]
                out = run.first(self.args.patience_s) if run.first else run.call(0)
            except TooSlow as why:
                self.leave_out(runs, key, f"{len(batch.x)} tokens, rank {rank}: {why}")
                continue
            except Exception as problem:  # a baseline's limits must not end the run
                if who == "ours":
                    raise
                self.skipped[key] = f"{type(problem).__name__}: {problem}".splitlines()[0]
                del runs[key]
                continue
            if who == "ours":
                plan = _C.last_plan()
            if out is None:
                continue
            near = relative_error(out[tokens], reference_of(run.of or self.layer)[rank])
            far = 0.0 if run.of else relative_error(out, mine.setdefault(rank, out.clone()))
            nears[key], errors[key] = near, max(near, far)
            if not errors[key] < tolerance_of(self.layer):
                raise RuntimeError(
                    f"{self.key} {self.layer.dtype} M={len(batch.x)} rank {rank}: {who} "
                    f"is off by {near:.3g} from float64 and by {far:.3g} from moelora"
                )
        return plan, errors, self.error_ratios(nears)

    def error_ratios(self, errors: Mapping[Key, float]) -> dict[int, float]:
        """{rank: the larger ratio of with and without adapters}."""
        native = (f"ours_{self.layer.dtype}",)
        like = ("vllm_base", "vllm_lora") if is_w8a8(self.layer.w13) else native
        found = {r: errors["ours", r] / e for (who, r), e in errors.items() if who in like}
        return {r: round(max(found[r], found.get(0, 0.0)), 3) for r in found if r}

    def leave_out(self, runs: Runs, key: Key, why: str) -> None:
        who, rank = key
        for larger in self.layer.stacks:
            if larger >= rank:
                self.slow.setdefault((who, larger), why)
                self.skipped.setdefault((who, larger), why)
                runs.pop((who, larger), None)


def figures(
    rank: int,
    times: Mapping[Key, Times],
    bounds: Mapping[int, float],
    work: Sequence[float],
    peaks: Peaks,
) -> Case:
    """Measured part of a row."""
    mine, base = times["ours", rank], times["ours", 0]
    named = of_rank(times, rank)
    ours = {who: t for who, t in named.items() if who.startswith("ours")}
    others = {who: t for who, t in named.items() if who not in ours}
    adapted = {who: t.median for who, t in others.items() if (who, rank) in times}
    best = min(adapted, key=adapted.__getitem__, default=None)
    return {
        **{f"{who}_us": t.median for who, t in ours.items()},
        "bound_us": round(bounds[rank], 2),
        "bound_base_us": round(bounds[0], 2),
        "share": round(bounds[rank] / mine.median, 3),
        "share_base": round(bounds[0] / base.median, 3),
        "overhead": round(mine.median / base.median - 1, 3),
        "rivals": {who: t.median for who, t in others.items()},
        "best_rival": best,
        "ratio": round(adapted[best] / mine.median, 3) if best else None,
        "spread_us": {who: [t.low, t.high] for who, t in (ours | others).items()},
        "gflop": round(work[0] / 1e9, 4),
        "mbytes": round(work[1] / 1e6, 3),
        "streaming_gb_s": round(peaks.bytes / 1e9, 2),
        "mm_gflop_s": round(peaks.flops / 1e9, 1) if peaks.flops else None,
    }
