"""Deltas, LoRA added to a base product computed elsewhere: ours, vLLM's kernels, the bound.

    python -m benchmarks.delta --out benchmarks/results/h200-delta.json
    python -m benchmarks.delta --models qwen3 --tokens 16,1024 --ranks 16 --only grid

Microseconds of one projection's delta, median of CUDA-graph replays. Three parts:

    grid     the deltas of w13 and of w2; ours groups its rows every time, vLLM aligns only in w13
    slots    8 adapters in stacks of 8 to 256 slots: what idle slots cost
    sglang   the adapter MLP of SGLang's design, staged and in one call

Every baseline is compared with a float64 reference on a few tokens before it is timed.
"""

import time
from dataclasses import dataclass

import torch
from rich.progress import Progress

import moelora
from benchmarks import options, tables
from benchmarks.baselines import vllm
from moelora.bench import cases, machine, results, shapes
from moelora.bench.timing import GraphTimer

PEAK_BYTES, PEAK_FLOPS = machine.KNOWN["NVIDIA H200"]

TOKENS = [1, 4, 16, 64, 256, 1024, 4096, 16384]
SLOTS = [8, 16, 32, 64, 128, 256]
# Tokens and a layer, of about DeepSeek-V2-Lite's and DeepSeek-V2's size: SGLang's own examples.
SGLANG = [
    (256, shapes.Model("sglang-2048", 64, 6, 2048, 1408)),
    (256, shapes.Model("sglang-5120", 256, 8, 5120, 1536)),
]
PROJECTIONS = ("w13", "w2")
MAX_ERROR = 0.02  # relative, of bfloat16 results


@dataclass
class Setting:
    """One model, number of tokens, and stack of adapters, with what all baselines work on."""

    model: shapes.Model
    factors: cases.Factors
    batches: list
    out: dict  # projection: [M, top_k, columns], added to
    h: torch.Tensor  # [M * top_k, I], input of w2

    def factors_of(self, projection):
        """(x of batch i, the A of all slices, the B of all slices)"""
        f = self.factors
        if projection == "w13":
            return lambda i: self.batches[i].x, f.a13, f.b13
        return lambda i: self.h, [f.a2], [f.b2]

    def ours(self, projection):
        x, a, b = self.factors_of(projection)
        down = projection == "w2"
        operator = moelora.moe_lora_down_delta if down else moelora.moe_lora_gate_up_delta

        def run(i):
            batch = self.batches[i]
            return operator(
                x(i),
                batch.topk_weights,
                batch.topk_ids,
                token_lora_mapping=batch.mapping,
                lora_a=a,
                lora_b=b,
                mul_routed_weight=down,
                out=self.out[projection],
            )

        return run

    def reference(self, projection, tokens):
        """Rows of `tokens` of batch 0 in float64: [tokens, top_k, columns]."""
        x, a, b = self.factors_of(projection)
        batch, rows = self.batches[0], []
        for m in tokens:
            adapter = int(batch.mapping[m])
            for j, e in enumerate(batch.topk_ids[m].tolist()):
                v = x(0)[m if projection == "w13" else m * self.model.top_k + j].double()
                z = [
                    d[adapter, e].double() @ (c[adapter, e].double() @ v)
                    for c, d in zip(a, b, strict=True)
                ]
                weight = batch.topk_weights[m, j].double() if projection == "w2" else 1.0
                rows.append(weight * torch.cat(z))
        return torch.stack(rows).unflatten(0, (len(tokens), -1))

    def bound_us(self, projection):
        """max(flops / peak, bytes / peak): x once, factors of each touched pair once, out read and
        written; averaged over batches."""
        model, total = self.model, 0.0
        slices, depth, columns = (
            (2, model.hidden, model.intermediate)
            if projection == "w13"
            else (1, model.intermediate, model.hidden)
        )
        rank = self.factors.a2.shape[2]
        for batch in self.batches:
            rows = batch.topk_ids.numel()
            pairs = (batch.topk_ids.long() + model.experts * batch.mapping[:, None]).unique()
            x = (batch.x.numel() if projection == "w13" else rows * depth) * 2
            factors = 2 * pairs.numel() * slices * rank * (depth + columns)
            moved = x + factors + 4 * rows * slices * columns
            flops = 2 * rows * slices * rank * (depth + columns)
            total += max(flops / PEAK_FLOPS, moved / PEAK_BYTES)
        return 1e6 * total / len(self.batches)


def batches_for(tokens):
    return 48 if tokens <= 16 else 12 if tokens <= 64 else 4 if tokens <= 256 else 2


def draw_setting(model, tokens, adapters, factors, generator, slots=None):
    """Batches over `adapters` of the stack's slots, spread evenly."""
    batches = [
        cases.draw_batch(model, tokens, adapters, generator) for _ in range(batches_for(tokens))
    ]
    for batch in batches:
        batch.mapping.mul_((slots or adapters) // adapters)
    out = {
        "w13": batches[0].x.new_zeros(tokens, model.top_k, 2 * model.intermediate),
        "w2": batches[0].x.new_zeros(tokens, model.top_k, model.hidden),
    }
    h = cases.normal((tokens * model.top_k, model.intermediate), 1.0, generator)
    return Setting(model, factors, batches, out, h)


class Peer:
    """vLLM's deltas of the same setting."""

    def __init__(self, vk, setting, tokens):
        slots = setting.factors.a2.shape[0]
        self.layer = vllm.shaped_layer(vk, setting.model, tokens)
        self.layer.c2 = setting.h
        self.lora = vllm.lora(vk, setting.factors)
        self.out = setting.out
        self.sets = [vllm.token_set(vk, batch, slots) for batch in setting.batches]
        self.meta = {}

    def run(self, projection, mode):
        def w13(i):
            self.layer.lora_w13(self.sets[i], self.lora, mode, y=self.out["w13"])
            return self.out["w13"]

        def w2(i):
            if mode not in self.meta:  # made in w13, outside of the graphs
                self.meta[mode] = [
                    self.layer.lora_w13(s, self.lora, mode, y=self.out["w13"]) for s in self.sets
                ]
            meta = self.meta[mode][i]
            self.layer.lora_w2(self.sets[i], self.lora, mode, meta, y=self.out["w2"])
            return self.out["w2"]

        return w13 if projection == "w13" else w2

    def modes(self, rank, wanted):
        """vLLM's default path, and with `best` the others that it could take for this case."""
        modes = vllm.modes(self.sets[0].topk_ids.numel(), rank, "best" in wanted)
        return modes if "default" in wanted else modes[1:]


def check(setting, projection, runs, what):
    """Relative errors; drops baselines that cannot run, refuses results that are wrong."""
    tokens = setting.out[projection].shape[0]
    checked = sorted({0, tokens // 2, tokens - 1})
    reference, errors = setting.reference(projection, checked), {}
    for key, run in list(runs.items()):
        setting.out[projection].zero_()
        try:
            out = run(0)
        except Exception as problem:  # a baseline's own limits must not end the run
            if key.startswith("ours"):
                raise
            print(f"{what}: {key} cannot run: {problem}")
            del runs[key]
            continue
        errors[key] = float((out[checked].double() - reference).norm() / reference.norm())
        if not errors[key] < MAX_ERROR:
            raise RuntimeError(f"{what}: {key} is off by {errors[key]:.3g}")
    return errors


def measure(timer, setting, projection, vk_modes, peer, args, what):
    """The part of a case that all tables share."""
    runs = {"ours": setting.ours(projection)}
    for mode in vk_modes:
        runs[f"vllm_{mode}"] = peer.run(projection, mode)
    errors = check(setting, projection, runs, what)
    bound = setting.bound_us(projection)
    moved = bound * 1e-6 * PEAK_BYTES
    times = timer.medians(runs, setting.batches, moved, args.budget_ms)
    baselines = {key: us for key, us in times.items() if key != "ours"}
    if baselines:
        baselines["vllm_best"] = min(baselines.values())
    return {
        "projection": projection,
        "dtype": "bfloat16",
        "ours_us": times["ours"],
        "bound_us": round(bound, 2),
        "share": round(bound / times["ours"], 3),
        "rivals": baselines,
        "relative_error": {key: float(f"{e:.3g}") for key, e in errors.items()},
    }


def grid(timer, vk, args, generator, deadline):
    """One row for each model, rank, number of tokens and projection."""
    todo = [(name, rank) for name in args.models for rank in args.ranks]
    with Progress() as progress:
        bar = progress.add_task("grid", total=len(todo) * len(args.tokens))
        for name, rank in todo:
            model = shapes.MODELS[name]
            factors = cases.draw_factors(model, args.adapters, rank, generator)
            for m in args.tokens:
                if time.monotonic() > deadline:
                    print("deadline: the grid ends early")
                    return
                setting = draw_setting(model, m, args.adapters, factors, generator)
                peer = Peer(vk, setting, m) if vk is not None else None
                modes = peer.modes(rank, args.baselines) if peer else []
                for projection in PROJECTIONS:
                    case = {"part": "grid", "model": name, "tokens": m, "rank": rank}
                    case |= {"adapters": args.adapters, "mix": "many", "routing": "uniform"}
                    what = f"{name} M={m} r={rank} {projection}"
                    yield case | measure(timer, setting, projection, modes, peer, args, what)
                progress.advance(bar)


def slots(timer, vk, args, generator, deadline):
    """8 adapters of rank 16 in ever larger stacks."""
    name = "qwen3"
    model = shapes.MODELS[name]
    for count in SLOTS:
        factors = cases.draw_factors(model, count, 16, generator)
        for m in (16, 1024):
            if time.monotonic() > deadline:
                print("deadline: the sweep over slots ends early")
                return
            setting = draw_setting(model, m, 8, factors, generator, count)
            peer = Peer(vk, setting, m) if vk is not None else None
            for projection in PROJECTIONS:
                case = {"part": "slots", "model": name, "tokens": m, "rank": 16}
                case |= {"adapters": 8, "slots": count}
                modes = ["default"] if peer and "default" in args.baselines else []
                what = f"{name} M={m} {count} slots {projection}"
                yield case | measure(timer, setting, projection, modes, peer, args, what)
        del factors


def sglang_calls(setting, info):
    """{name: call} of the staged operators and of the one that does it all, into out["mlp"]."""
    f = setting.factors
    gate_up_a = f.a13[0]
    gate_up_b = torch.cat(f.b13, 2)
    out = setting.out["mlp"]

    def staged(i):
        b, ids = setting.batches[i], setting.batches[i].topk_ids
        where = (info[i].weight_indices, info[i].lora_ranks)
        a = moelora.moe_lora_a(b.x, ids, gate_up_a, *where)
        act = moelora.moe_lora_gate_up_b(a, ids, gate_up_b, *where)
        return moelora.moe_lora_down_combine(
            act, ids, b.topk_weights, f.a2, f.b2, *where, info[i].scalings, out
        )

    def fused(i):
        b = setting.batches[i]
        return moelora.moe_lora_fused(
            b.x,
            b.topk_ids,
            b.topk_weights,
            gate_up_a,
            gate_up_b,
            f.a2,
            f.b2,
            info[i].weight_indices,
            info[i].lora_ranks,
            info[i].scalings,
            out,
        )

    def reference(m):
        b = setting.batches[0]
        adapter, x, total = int(b.mapping[m]), b.x[m].double(), 0.0
        for j, e in enumerate(b.topk_ids[m].tolist()):
            first = gate_up_a[adapter, e].double() @ x
            gate, up = (gate_up_b[adapter, e].double() @ first).chunk(2)
            act = torch.nn.functional.silu(gate) * up
            z = f.b2[adapter, e].double() @ (f.a2[adapter, e].double() @ act)
            total = total + b.topk_weights[m, j].double() * z
        return total

    return {"ours_staged": staged, "ours_fused": fused}, reference


def sglang(timer, args, generator, deadline):
    """Staged against all-in-one, of one adapter and of several, and for fewer tokens."""
    for tokens, model in SGLANG:
        for adapters in (1, args.adapters):
            for m in (1, 16, tokens):
                if time.monotonic() > deadline:
                    print("deadline: the adapter MLP ends early")
                    return
                factors = cases.draw_factors(model, adapters, 8, generator)
                for stack in (*factors.a13, *factors.b13, factors.a2, factors.b2):
                    stack.mul_(5)  # a product of four factors: keep it away from rounding to 0
                setting = draw_setting(model, m, adapters, factors, generator)
                setting.out["mlp"] = torch.zeros_like(setting.batches[0].x)
                ranks = torch.full((adapters,), 8, dtype=torch.int32, device=generator.device)
                info = [
                    moelora.MoELoRABatchInfo(b.mapping, ranks, torch.ones_like(ranks).float())
                    for b in setting.batches
                ]
                runs, reference = sglang_calls(setting, info)
                checked, errors = sorted({0, m - 1}), {}
                wanted = torch.stack([reference(row) for row in checked])
                for key, run in runs.items():
                    setting.out["mlp"].zero_()
                    got = run(0)[checked].double()
                    errors[key] = float((got - wanted).norm() / wanted.norm())
                    if not errors[key] < MAX_ERROR:
                        raise RuntimeError(f"{model.name} M={m}: {key} is off by {errors[key]:.3g}")
                pair = 2 * 8 * (2 * model.hidden + 3 * model.intermediate)
                moved = m * (6 * model.hidden + model.top_k * pair)
                times = timer.medians(runs, setting.batches, moved, args.budget_ms)
                yield {
                    "part": "sglang",
                    "model": model.name,
                    "tokens": m,
                    "rank": 8,
                    "adapters": adapters,
                    "dtype": "bfloat16",
                    **{f"{key}_us": us for key, us in times.items()},
                    "relative_error": {key: float(f"{e:.3g}") for key, e in errors.items()},
                }


def main(argv=None):
    parser = options.parser(
        __doc__,
        models=["qwen3", "mixtral", "dsv2lite"],
        tokens=TOKENS,
        ranks=[16, 64],
        adapters=8,
        only=["grid", "slots", "sglang"],
        budget_ms=12.0,
    )
    about = "of default, best; or none"
    default = "default,best"
    parser.add_argument("--baselines", default=default, type=options.words, help=about)
    args = parser.parse_args(argv)

    deadline = time.monotonic() + args.deadline_s
    vk = vllm.load() if args.baselines != ["none"] else None
    generator = torch.Generator("cuda").manual_seed(1234)
    timer = GraphTimer()
    parts = {
        "grid": lambda: grid(timer, vk, args, generator, deadline),
        "slots": lambda: slots(timer, vk, args, generator, deadline),
        "sglang": lambda: sglang(timer, args, generator, deadline),
    }
    rows = []
    for part in args.only:
        for row in parts[part]():
            rows.append(row)
            if args.out:
                results.write(args.out, rows)
    for columns, parts in ((tables.DELTA, ("grid", "slots")), (tables.MLP, ("sglang",))):
        print(tables.made_of(columns, [row for row in rows if row["part"] in parts]), "\n")


if __name__ == "__main__":
    main()
