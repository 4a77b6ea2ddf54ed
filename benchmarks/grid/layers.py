"""The layer, its projections and the deltas of its adapters, by every plan that can be forced."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from cases import EDGE_CASES, Problem, Spec, random_specs

import moelora
from benchmarks.grid.calls import (
    AROUND,
    DELTA,
    Calls,
    each_dtype,
    filled,
    plans,
    portable,
    present,
    rows,
    with_plans,
)

# On a GPU around the bounds of one launch for few tokens (4 and 8 of them, 18 rows), of the blocks
# that an expert's rows choose (8, 26, 44, 80, 116), of one launch of a delta (512 rows), of shrinks
# that only many rows take.
TOKENS = {
    "cpu": (1, 2, 5, 8, 33, 65, 130),
    "cuda": (1, 2, 4, 5, 6, 8, 9, 22, 64, 100, 170, 180, 250, 320, 650, 2048, 8192),
}
FORCED = {"cpu": (1, 65), "cuda": (8, 100, 650)}  # tokens that every variant computes
# The widest decides: up to 16, 32 and 64 ranks, more, and some that no vector divides.
RANKS = ((8, 5, 16), (24, 32), (64, 33), (1, 256, 3, 64, 17, 128), (3, 9))
SQUARE = Spec(top_k=3, experts=8, hidden=512, inter=256, mix="half_base", bias=True)
LAYOUTS = {f"ranks {ranks}": replace(SQUARE, tokens=8192, ranks=ranks) for ranks in RANKS} | {
    "deep": replace(SQUARE, tokens=330, hidden=4160, inter=136, experts=4),
    "wide": replace(SQUARE, tokens=330, hidden=136, inter=4160, experts=4, bias=False),
    "experts": replace(
        SQUARE, tokens=700, experts=64, top_k=8, hidden=1160, inter=192, slices=1, bias=False
    ),
    "unaligned": replace(SQUARE, tokens=330, hidden=100, inter=36, activation="gelu"),
    "shared": replace(SQUARE, tokens=330, sharing="outer", ranks=(64, 64), pass_ranks=False),
    "relu2": replace(SQUARE, tokens=330, activation="relu2", slices=1, remote=5),
    "interleaved": replace(SQUARE, tokens=330, activation="swigluoai", ranks=(16, 40)),
}
TOP_K = Spec(tokens=40, experts=12, hidden=264, inter=72, ranks=(16, 8, 33), mix="half_base")
TOPS = {f"top_k={k}": replace(TOP_K, top_k=k, slices=1 + k % 2) for k in range(1, 10)}
NARROW = Spec(tokens=29, hidden=96, inter=48, ranks=(8, 17), slices=1, mix="half_base")
GEMMS = {
    "small": NARROW,
    "bias": replace(NARROW, bias=True, tokens=300, ranks=(64, 128), remote=2),
    "unaligned": replace(NARROW, hidden=36, inter=30, ranks=(5, 3)),
    "strided": replace(NARROW, strided=1, int64_ids=True),
}
PACKS = {
    "small": Spec(hidden=64, inter=32, experts=3),
    "large": Spec(hidden=320, inter=160, experts=5),
}

# ---- operators on a problem ----


def tiled(w: torch.Tensor):
    """Packed, if its sizes are those of whole tiles."""
    return moelora.prepack_weights(w) if w.size(1) % 64 == w.size(2) % 64 == 0 else w


def layer(p: Problem) -> dict[str, Callable]:
    run, arguments = moelora.fused_experts_lora, present(p.kwargs())

    def packed():
        return run(**{**arguments, "w13": tiled(p.w13), "w2": tiled(p.w2)})

    def in_place():
        x = p.hidden_states.clone()
        return run(**{**arguments, "hidden_states": x}, out=x)

    def gaps():
        room = filled(p.topk_ids.size(0), p.spec.hidden + 5, like=p.hidden_states)
        run(**arguments, out=room[:, 2:-3])
        return room

    return {
        "layer": partial(run, **arguments),
        "layer, packed": packed,
        "layer, in place": in_place,
        "layer, gaps": gaps,
        "layer, base": partial(run, **present(p.base().kwargs())),
    }


def gemm(p: Problem) -> dict[str, Callable]:
    """x of tokens and of rows."""
    run = moelora.fused_moe_lora_gemm
    return {
        f"gemm {which}" + ", routed" * routed: partial(run, **present(p.gemm_kwargs(which, routed)))
        for which in ("w13", "w2")
        for routed in (False, True)
    }


def delta(p: Problem) -> dict[str, Callable]:
    """Each delta in a new tensor, added to a base product, without and with routing weights, and
    overwriting a tensor."""
    calls = {}
    operators = {"w13": moelora.moe_lora_gate_up_delta, "w2": moelora.moe_lora_down_delta}
    for which, run in operators.items():
        arguments = present(p.gemm_kwargs(which), "token_lora_mapping")
        for name in ("w", "bias", "mul_routed_weight"):
            arguments.pop(name, None)
        run = partial(run, **arguments, num_experts=p.w13.size(0))
        shape = (*p.topk_ids.shape, p.w13.size(1) if which == "w13" else p.spec.hidden)

        def onto(add, routed, run=run, shape=shape):
            out = filled(*shape, like=p.hidden_states)
            return run(add_inputs=add, mul_routed_weight=routed, out=out)

        calls[f"delta {which}"] = run
        calls[f"delta {which}, added"] = partial(onto, True, False)
        calls[f"delta {which}, routed"] = partial(onto, True, True)
        calls[f"delta {which}, instead"] = partial(onto, False, True)
    return calls


def forms(p: Problem) -> tuple[dict, dict]:
    """(calls to run with every variant, calls that have their own kernels or would repeat the same
    ones)."""
    run = layer(p)
    often = {name: run.pop(name) for name in ("layer", "layer, packed")} | gemm(p)
    return often, run if p.spec.mix == "absent" else run | delta(p)


def around(device: str, p: Problem) -> Calls:
    """Calls with each kernel around a layer's projections forced, and each kernel of
    deltas."""
    dtype = p.spec.dtype
    yield from with_plans({"layer": layer(p)["layer"]}, rows(device, dtype, *AROUND), table=False)
    if p.spec.mix != "absent":
        calls = {name: delta(p)[name] for name in ("delta w13, added", "delta w2, routed")}
        yield from with_plans(calls, rows(device, dtype, *DELTA), table=False)


# ---- families of groups ----


def batches(device):
    """Layouts at every number of tokens: layer, both projections, both deltas."""
    most = TOKENS[device][-1]

    def calls(device, spec):
        whole = spec.build().to(device)
        for tokens in TOKENS[device]:
            if tokens > spec.tokens:
                break
            often, once = forms(whole.prefix(tokens))
            few = portable(device)
            ways = plans(device, spec.dtype) if tokens in FORCED[device] else few
            others = around(device, whole.prefix(tokens)) if tokens in FORCED[device] else ()
            for name, call in (*with_plans(often, ways), *with_plans(once, few), *others):
                yield f"{name}, M={tokens}", call

    specs = {name: replace(s, tokens=min(most, s.tokens)) for name, s in LAYOUTS.items()}
    return each_dtype(device, specs, calls)


def edges(device):
    """The situations that the contract names, and random ones: small, by every variant."""

    def calls(device, spec):
        p = spec.build().to(device)
        often, once = forms(p)
        yield from with_plans(often, plans(device, spec.dtype))
        yield from with_plans(once, portable(device))

    drawn = {f"random {spec.seed}": spec for spec in random_specs(40 if device == "cuda" else 20)}
    return each_dtype(device, EDGE_CASES | drawn, calls)


def tops(device):
    """top_k 1 to 9, where one launch for the layer is the choice and where it is not."""

    def calls(device, spec):
        whole = spec.build().to(device)
        for tokens in (1, 2, 4, 8, spec.tokens):
            ways = [v for v in plans(device, spec.dtype) if v.startswith("decode")]
            for name, call in with_plans(layer(whole.prefix(tokens)), ways):
                yield f"{name}, M={tokens}", call

    return each_dtype(device, TOPS, calls)


def gemms(device):
    """One to four slices of columns, and outputs with gaps between rows."""

    def calls(device, spec):
        p = spec.build().to(device)
        for slices in (1, 2, 3, 4):
            for which in ("w13", "w2"):
                arguments = present(p.gemm_kwargs(which, slices % 2 == 0))
                a, b = arguments["lora_a"], arguments["lora_b"]
                columns = b.size(2)
                if columns % slices:
                    continue
                arguments["lora_a"] = [a.roll(i, -1) for i in range(slices)]
                arguments["lora_b"] = [part.contiguous() for part in b.chunk(slices, dim=2)]
                run = partial(moelora.fused_moe_lora_gemm, **arguments)

                def gaps(run=run, columns=columns):
                    room = filled(*p.topk_ids.shape, columns + 8, like=p.hidden_states)
                    run(out=room[..., :-8])
                    return room

                name = f"gemm {which}, {slices} slices"
                ways = plans(device, spec.dtype)
                yield from with_plans({name: run, f"{name}, gaps": gaps}, ways)

    return each_dtype(device, GEMMS, calls)


def packing(device):
    """Weights as they lie and with gaps between rows."""

    def calls(device, spec):
        w = spec.build().w13
        wide = torch.nn.functional.pad(w, (3, 2)).to(device)
        for name, source in {"rows": w.to(device), "gaps": wide[..., 3:-2]}.items():
            yield f"pack, {name}", lambda source=source: moelora.prepack_weights(source).data

    return each_dtype(device, PACKS, calls)
