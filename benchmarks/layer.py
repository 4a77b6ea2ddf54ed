"""The whole MoE layer with adapters: ours, ours without adapters, vLLM's kernels, the bound.

    python -m benchmarks.layer --out benchmarks/results/h200-layer.json
    python -m benchmarks.layer --models qwen3 --tokens 16,1024 --ranks 16 --rivals default,base

Microseconds of one layer without its router, median of CUDA-graph replays. Every rival's output is
compared with the float64 reference's pass rule on a few tokens before it is timed.
"""

import argparse
import math
import time

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import moelora
from benchmarks import cases, peer_vllm, results
from benchmarks.timing import GraphTimer

TOKENS = [1, 4, 16, 64, 256, 1024, 4096, 16384]


def ours(batch, w13, w2, factors=None):
    """One call of our layer, with adapters or without."""
    if factors is None:
        return moelora.fused_experts_lora(batch.x, w13, w2, batch.topk_weights, batch.topk_ids)
    return moelora.fused_experts_lora(
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


def lora_delta(a, b, adapter, expert, v):
    """B (A v) of one pair in float64."""
    return b[adapter, expert].double() @ (a[adapter, expert].double() @ v)


def reference_rows(batch, w13, w2, factors, tokens):
    """Rows `tokens` of the layer, in float64."""
    rows = []
    for m in tokens:
        x, adapter = batch.x[m].double(), int(batch.mapping[m])
        adapted = factors is not None and adapter >= 0
        total = torch.zeros_like(x)
        for j, e in enumerate(batch.topk_ids[m].tolist()):
            g, u = (w13[e].double() @ x).split(w2.shape[2])
            if adapted:
                g = g + lora_delta(factors.a13[0], factors.b13[0], adapter, e, x)
                u = u + lora_delta(factors.a13[1], factors.b13[1], adapter, e, x)
            h = torch.nn.functional.silu(g) * u
            z = w2[e].double() @ h
            if adapted:
                z = z + lora_delta(factors.a2, factors.b2, adapter, e, h)
            total += batch.topk_weights[m, j].double() * z
        rows.append(total)
    return torch.stack(rows)


def relative_error(out, reference, tokens):
    return float((out[tokens].double() - reference).norm() / reference.norm())


def measure(timer, name, tokens, rank, args, generator, weights, vk):
    """One case of the result file."""
    model, (w13, w2) = cases.MODELS[name], weights
    sets = 32 if tokens <= 16 else 8 if tokens <= 64 else 4 if tokens <= 256 else 2
    batches = [
        cases.draw_batch(model, tokens, args.adapters, generator, args.base_share, args.routing)
        for _ in range(sets)
    ]
    factors = cases.draw_factors(model, args.adapters, rank, generator)
    bound, bound_base = cases.bounds_us(model, batches, rank)
    runs = {
        "ours": lambda i: ours(batches[i], w13, w2, factors),
        "ours_base": lambda i: ours(batches[i], w13, w2),
    }
    if vk is not None:
        peer = peer_vllm.Peer(vk, model, w13, w2, factors, batches)
        if "base" in args.rivals:
            runs["vllm_base"] = peer.base
        for mode in peer.modes(rank):
            if mode in args.rivals or (mode != "default" and "best" in args.rivals):
                runs[f"vllm_{mode}"] = lambda i, mode=mode: peer.run(i, mode)

    checked = sorted({0, tokens // 2, tokens - 1})
    with_adapters = reference_rows(batches[0], w13, w2, factors, checked)
    without = reference_rows(batches[0], w13, w2, None, checked)
    errors, plan = {}, ""
    for key, run in list(runs.items()):
        try:
            out = run(0)
        except Exception as problem:  # a rival's own limits must not end the run
            if key.startswith("ours"):
                raise
            print(f"{name} M={tokens} r={rank}: {key} cannot run: {problem}")
            del runs[key]
            continue
        if key == "ours":
            plan = moelora._C.last_plan()
        reference = without if key.endswith("base") else with_adapters
        errors[key] = relative_error(out, reference, checked)
        if not errors[key] < 0.02:
            raise RuntimeError(f"{name} M={tokens} r={rank}: {key} is off by {errors[key]:.3g}")

    times = timer.compare(runs, batches, bound_base * 1e-6 * cases.PEAK_BYTES, args.budget_ms)
    rivals = {key: us for key, us in times.items() if not key.startswith("ours")}
    adapted = [us for key, us in rivals.items() if key != "vllm_base"]
    if adapted:
        rivals["vllm_best"] = min(adapted)
    return {
        "model": name,
        "tokens": tokens,
        "rank": rank,
        "adapters": args.adapters,
        "mix": "many" if not args.base_share else f"{args.base_share:g} base",
        "routing": args.routing,
        "dtype": "bfloat16",
        "ours_us": times["ours"],
        "ours_base_us": times["ours_base"],
        "bound_us": round(bound, 2),
        "bound_base_us": round(bound_base, 2),
        "share": round(bound / times["ours"], 3),
        "share_base": round(bound_base / times["ours_base"], 3),
        "rivals": rivals,
        "plan": plan,
        "relative_error": {key: float(f"{e:.3g}") for key, e in errors.items()},
    }


def show(rows):
    table = Table(title="microseconds per layer")
    for column in ("model", "M", "rank", "bound", "ours", "share", "base", "share", "vLLM base"):
        table.add_column(column, justify="right")
    for column in ("vLLM default", "vLLM best", "x default"):
        table.add_column(column, justify="right")
    for r in rows:
        rivals = r["rivals"]
        default = rivals.get("vllm_default")
        table.add_row(
            r["model"],
            str(r["tokens"]),
            str(r["rank"]),
            f"{r['bound_us']:.0f}",
            f"{r['ours_us']:.1f}",
            f"{r['share']:.2f}",
            f"{r['ours_base_us']:.1f}",
            f"{r['share_base']:.2f}",
            f"{rivals.get('vllm_base', math.nan):.1f}",
            f"{rivals.get('vllm_default', math.nan):.1f}",
            f"{rivals.get('vllm_best', math.nan):.1f}",
            f"{default / r['ours_us']:.2f}" if default else "-",
        )
    Console(width=130).print(table)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(cases.MODELS))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--ranks", default="16,64")
    parser.add_argument("--adapters", default=8, type=int)
    parser.add_argument("--base-share", default=0.0, type=float, help="tokens without an adapter")
    parser.add_argument("--routing", default="uniform", choices=["uniform", "zipf"])
    parser.add_argument("--rivals", default="base,default", help="of base, default, best; or none")
    parser.add_argument("--variant", help="force this kernel variant")
    parser.add_argument("--budget-ms", default=40.0, type=float, help="GPU time per rival and case")
    parser.add_argument("--deadline-s", default=1e9, type=float, help="stop cleanly after this")
    parser.add_argument("--out", help="result file to write")
    args = parser.parse_args()
    args.rivals = args.rivals.split(",")
    if args.variant:
        moelora._C.force_variant(args.variant)

    started = time.monotonic()
    vk = peer_vllm.load() if args.rivals != ["none"] else None
    generator = torch.Generator("cuda").manual_seed(1234)
    timer = GraphTimer()
    todo = [
        (name, int(tokens), int(rank))
        for name in args.models.split(",")
        for tokens in args.tokens.split(",")
        for rank in args.ranks.split(",")
    ]
    rows, weights, loaded = [], None, None
    with Progress() as progress:
        bar = progress.add_task("layer", total=len(todo))
        for name, tokens, rank in todo:
            if time.monotonic() - started > args.deadline_s:
                print(f"deadline: {len(rows)} of {len(todo)} cases measured")
                break
            if loaded != name:
                weights = None
                weights, loaded = cases.draw_weights(cases.MODELS[name], generator), name
            rows.append(measure(timer, name, tokens, rank, args, generator, weights, vk))
            progress.advance(bar)
            if args.out:
                results.write(args.out, rows)
    show(rows)


if __name__ == "__main__":
    main()
