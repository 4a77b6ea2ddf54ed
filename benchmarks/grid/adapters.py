"""Deltas, LoRA without a base product, with the interfaces of vLLM and of SGLang."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from cases import Problem, Spec

import moelora
from benchmarks.grid.alignment import align_lists, some_loras
from benchmarks.grid.calls import DELTA, each_dtype, filled, portable, rows, with_plans

TOKENS = (1, 7, 60, 700, 4096)  # a CPU has the first four
FORCED = (7, 700)  # those that every kernel computes
# vLLM's operators know neither true ranks nor scalings.
PLAIN = Spec(hidden=264, inter=72, ranks=(8,) * 3, pass_ranks=False, scalings=False)
PLAIN = replace(PLAIN, tokens=TOKENS[-1], experts=6, top_k=3)
LISTED = {
    "plain": PLAIN,
    "rank 32": replace(PLAIN, ranks=(32, 32), mix="disabled", hidden=1160),
    "rank 64": replace(PLAIN, ranks=(64, 64), sharing="expanded"),
    "rank 128": replace(PLAIN, ranks=(128, 128), slices=1, experts=3),
    "unaligned": replace(PLAIN, ranks=(5, 5), hidden=33, inter=7, mix="out_of_range"),
}
MLP = Spec(top_k=3, experts=6, hidden=136, inter=64, slices=1, mix="half_base")
MLP = replace(MLP, tokens=TOKENS[-1])
STAGED = {
    "plain": MLP,
    "rank 64": replace(MLP, ranks=(64, 17, 3), hidden=512, inter=256, top_k=2),
    "rank 256": replace(MLP, ranks=(256, 40), mix="disabled", sharing="outer"),
    "unaligned": replace(MLP, hidden=33, inter=30, ranks=(5, 3), int64_ids=True),
}
TILES = (32, 64, 8, 4, 3, 1)  # of vLLM's kernels; they choose nothing here


def factors(p: Problem, which: str) -> tuple[list, list]:
    both = (getattr(p, f"{which}_lora_{half}") for half in "ab")
    return tuple([f] if isinstance(f, torch.Tensor) else list(f) for f in both)


def vllm(p: Problem, which: str, block: int) -> dict[str, Callable]:
    """vLLM's operators, both halves at once and separately; rows by lists of blocks, or by routing
    only (block 0)."""
    x = p.hidden_states if which == "w13" else p.rows
    a, b = factors(p, which)
    experts, slots, (tokens, top_k) = p.w13.size(0), len(p.spec.ranks), p.topk_ids.shape
    rank, columns = a[0].size(2), b[0].size(2)
    active, tiles = some_loras(slots, x.device), (block or 16, *TILES)
    count, on = torch.tensor([active.numel()], dtype=torch.int32), p.adapter_enabled

    def who():
        found = (None, p.topk_ids.reshape(-1), None)
        if block:
            unused = (p.topk_ids.numel(), -1, 0)
            routing = (p.topk_ids, p.token_lora_mapping, experts, slots)
            found = align_lists(*routing, block, active, unused)
        return p.topk_weights, *found, p.token_lora_mapping, top_k

    def sizes(n):
        rows = tokens * top_k
        return x.device, n, tokens, rows, x.size(1), rows, experts, len(a)

    def room():
        return filled(tokens, top_k, len(b) * columns + 16, like=x)

    def fused(**more):
        out = room()
        weights, *rows, k = who()
        moelora.fused_moe_lora(
            *(out, x, a, b, weights, *rows, rank, k, active, count, on, *tiles, *tiles),
            **{**more, "num_experts": experts},
        )
        return out

    def shrink():
        h = filled(len(a), tokens, top_k, rank, like=x)
        last = (*tiles, count)
        moelora.fused_moe_lora_shrink(h, x, a, *who(), active, on, *sizes(rank), *last)
        return h

    def expand(**more):
        out, h = room(), filled(len(a), tokens, top_k, rank, like=x)
        last = (rank, columns, *tiles, count)
        moelora.fused_moe_lora_expand(out, h, b, *who(), active, on, *sizes(rank), *last, **more)
        return out

    return {
        "fused": fused,
        "fused, routed at 8": partial(fused, mul_routed_weight=True, offset=8),
        "fused, instead": partial(fused, add_inputs=False),
        "fused, sharded": partial(fused, fully_sharded=True),
        "shrink": shrink,
        "expand": expand,
        "expand, instead at 8": partial(expand, mul_routed_weight=True, offset=8, add_inputs=False),
    }


def sglang(p: Problem) -> dict[str, Callable]:
    """The adapter MLP as `run_moe_lora` chooses, in one call, and by each of its stages."""
    x, ids, weights, slots = p.hidden_states, p.topk_ids, p.topk_weights, p.token_lora_mapping
    gate_up, down = (p.w13_lora_a, p.w13_lora_b), (p.w2_lora_a, p.w2_lora_b)
    ranks, scalings, on = p.lora_ranks, p.lora_scalings, p.adapter_enabled
    info = moelora.MoELoRABatchInfo(slots, ranks, scalings, on)
    options = {"adapter_enabled": on, "num_experts": p.w13.size(0)}

    def onto(run, *columns):
        return run(filled(*columns, like=x))

    def all_at_once(out):
        who = (slots, ranks, scalings)
        return moelora.moe_lora_fused(x, ids, weights, *gate_up, *down, *who, out, **options)

    def first(out):
        return moelora.moe_lora_a(x, ids, gate_up[0], slots, ranks, out=out, **options)

    def second(out):
        h = filled(*ids.shape, gate_up[1].size(3), like=x)
        who = (ids, gate_up[1], slots, ranks)
        return moelora.moe_lora_gate_up_b(h, *who, out=out, **options)

    def third(out):
        h, who = p.rows.view(*ids.shape, -1), (slots, ranks, scalings)
        return moelora.moe_lora_down_combine(h, ids, weights, *down, *who, out, **options)

    def chosen(out):
        return moelora.run_moe_lora(x, ids, weights, info, *gate_up, *down, out)

    return {
        "run": partial(onto, chosen, *x.shape),
        "at once": partial(onto, all_at_once, *x.shape),
        "a": partial(onto, first, *ids.shape, gate_up[0].size(2)),
        "a, new": partial(first, None),
        "gate_up_b": partial(onto, second, *ids.shape, p.spec.inter),
        "gate_up_b, new": partial(second, None),
        "down_combine": partial(onto, third, *x.shape),
    }


def _prefixes(device, spec):
    whole = spec.build().to(device)
    return ((tokens, whole.prefix(tokens)) for tokens in TOKENS if tokens <= spec.tokens)


def _fit(device, specs):
    most = TOKENS[-1] if device == "cuda" else TOKENS[-2]
    return {name: replace(spec, tokens=most) for name, spec in specs.items()}


def _forced(device, spec, calls, tokens):
    ways = rows(device, spec.dtype, *DELTA) if tokens in FORCED else ()
    return with_plans(calls, ways, table=False)


def listed(device):
    def calls(device, spec):
        for tokens, p in _prefixes(device, spec):
            for which in ("w13", "w2"):
                for block in (0, 16, 64):
                    kind = f"{which}, block {block}" if block else f"{which}, naive"
                    run = vllm(p, which, block)
                    few = {name: run[name] for name in ("fused, routed at 8", "shrink", "expand")}
                    forced = _forced(device, spec, few, tokens if block < 64 else 0)
                    for name, call in (*with_plans(run, portable(device)), *forced):
                        yield f"{name}, {kind}, M={tokens}", call

    return each_dtype(device, _fit(device, LISTED), calls)


def stages(device):
    def calls(device, spec):
        for tokens, p in _prefixes(device, spec):
            run = sglang(p)
            few = {name: run[name] for name in ("at once", "gate_up_b", "down_combine")}
            forced = _forced(device, spec, few, tokens)
            for name, call in (*with_plans(run, portable(device)), *forced):
                yield f"{name}, M={tokens}", call

    return each_dtype(device, _fit(device, STAGED), calls)
