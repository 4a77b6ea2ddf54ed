"""Summaries of layers: in bf16, of formats, on GPUs and on CPUs."""

from math import inf
from statistics import geometric_mean

import pandas as pd

from benchmarks.tables.cases import CPU_AMX, made_of, markdown, span, wrapped
from benchmarks.tables.files import load, on_others

FEW = {"1 to 4 tokens": 4, "16 to 256": 256, "more": inf}  # {column: its most tokens}
MANY = {"1 and 4 tokens": 4, "16 to 256": 256, "1024": 1024, "4096 and more": inf}
WEIGHTS = {"mxfp4": "four bits", "int4": "four bits", "nf4": "NF4", "fp8_block": "FP8"}


def by_weights(rows, *more):
    weights = pd.Categorical(rows.format.map(WEIGHTS), dict.fromkeys(WEIGHTS.values()))
    return rows.assign(weights=weights).groupby(["weights", *more], observed=True)


def by_tokens(rows, columns):
    return pd.cut(rows.tokens.astype(int), [0, *columns.values()], labels=[*columns])


def faster_than_base(rows):
    """In how many cases the layer with adapters is faster than vLLM's without."""
    base = rows["rivals.vllm_base"]
    return f"{(rows.ours_us < base).sum()} of {base.count()}" if base.count() else "-"


def joined(meta, ratios, faster, shares):
    said = pd.concat([ratios.rename("×"), faster, shares.unstack()], axis=1).reset_index()
    return f"{meta['device']}:\n\n{markdown(said)}"


def layer_ranges(device=None):
    """Of each rank: speedup over the fastest baseline with adapters, and shares of the bound."""
    meta, rows = load("layer", device)
    ranks = rows.groupby("rank")
    faster = ranks.apply(faster_than_base).rename("faster than vLLM's layer without adapters")
    shares = rows.groupby(["rank", by_tokens(rows, FEW)], observed=True).share.agg(span)
    return joined(meta, ranks.ratio.agg(span), faster, shares)


def gain(ratios):
    ratios = ratios.dropna()
    return f"{geometric_mean(ratios):.2f} ({span(ratios)})" if len(ratios) else "-"


def share(rows):
    """Of the bound: moelora's, then vLLM's."""
    theirs = (rows.bound_us / rows["rivals.vllm_lora"]).dropna()
    ours = f"**{geometric_mean(rows.share):.2f}**"
    return f"{ours} / {geometric_mean(theirs):.2f}" if len(theirs) else ours


def format_ranges(device=None):
    """Of weights of four and of eight bits: geometric means over ranks and models."""
    meta, rows = load("formats", device)
    rows = rows.reindex(columns=rows.columns.union(["rivals.vllm_base", "rivals.vllm_lora"]))
    few = by_weights(rows[(rows["rank"] == 16) & (rows.tokens >= 4)])
    faster = few.apply(faster_than_base).rename("faster than vLLM's without adapters")
    shares = by_weights(rows, by_tokens(rows, MANY)).apply(share)
    return joined(meta, by_weights(rows).ratio.agg(gain), faster, shares)


def quantized_layers():
    """What README says of `format_ranges`."""
    meta, rows = load("formats")
    gains = by_weights(rows[rows.ratio.notna()]).ratio.agg(gain)
    said = " and ".join(
        f"{times} times as fast with experts in {what}" for what, times in gains.items()
    )
    return wrapped(f"On {meta['device']} {said}.")


def layers_on_others():
    return f"{on_others('layer', layer_ranges)}\n\n{on_others('formats', format_ranges)}".strip()


def invariance_found():
    meta, _ = load("invariance")
    return wrapped(f"""Of {meta["elements"]:,} elements in {meta["calls"]:,} calls of
        {meta["compositions"]:,} compositions {meta["differing"]} differ.""")


def cpu_ranges():
    meta, rows = load("cpu-layer")
    most = rows.tokens.max()
    cost = 100 * rows.overhead[(rows.tokens == most) & (rows["rank"] == 16)]
    return wrapped(f"""On {meta["cores"]} CPU cores ({meta["cpu_features"][-1]}) the layer with
        adapters is {span(rows.ratio)} times as fast as the best of a loop of `torch.mm` and
        transformers with PEFT; at {most} tokens rank 16 costs {span(cost, 0)} %.""")


def longer(times):
    return f"{span(times)} (longer in {(times > 1).sum()} of {len(times)})"


def with_and_without(rows):
    """Rows for the layer with adapters, then for it without, whose times are in the same fields."""
    times = {field.replace("_base", ""): rows[field] for field in rows if "_base_us" in field}
    both = pd.concat([rows, rows.assign(**times)], keys=["with", "without"], names=["what"])
    return both.reset_index("what")


def cpu_format_ranges():
    """Our times over those of bf16 on unpacked weights: unpacked in the call, and before."""
    meta, rows = load("cpu-formats")
    rows = with_and_without(rows)
    titles = {"unpacking": "time over that of `unpack()` and the bf16 layer"}
    titles["bf16"] = "of the bf16 layer alone"
    for who, title in titles.items():
        rows[title] = rows.ours_us / rows[f"ours_{who}_us"]
    said = by_weights(rows)[[*titles.values()]].agg(longer).reset_index()
    return f"{meta['cores']} CPU cores ({meta['cpu_features'][-1]}):\n\n{markdown(said)}"


def quiet(rows):
    """Those whose middle 80 % of the turns differ by less than 1.4 times, so that no other work of
    the machine disturbed them."""
    spread = rows[["spread_us.ours", "spread_us.ours_base"]]
    return rows[spread.map(lambda ends: ends[1] < 1.4 * ends[0]).all(axis=1)]


def cpu_amx():
    meta, rows = load("cpu-amx")
    return f"{meta['device']}:\n\n{made_of(quiet(rows), CPU_AMX)}"


def cpu_amx_ranges():
    """Our times over those of AVX-512 BF16 on the same machine, where nothing disturbed either."""
    meta, rows = load("cpu-amx")
    rows, before = (with_and_without(quiet(some)) for some in (rows, load("cpu-avx512")[1]))
    case = ["what", "model", "experts", "format", "tokens", "rank"]
    both = rows.merge(before, on=case, suffixes=("", "_before"))
    spans = (both.ours_us / both.ours_us_before).groupby(both.tokens).agg(span)
    said = ", ".join(f"{times} at {tokens}" for tokens, times in spans.items())
    return wrapped(f"""On {meta["threads"]} threads of an {meta["device"]}
        ({meta["cpu_features"][-1]}) a layer takes so much of the time of AVX-512 BF16, with
        adapters and without: {said} tokens.""")
