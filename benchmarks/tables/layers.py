"""Summaries of layers: in bf16, of formats, on GPUs and on CPUs."""

from math import inf
from operator import itemgetter
from statistics import geometric_mean

from benchmarks.tables.columns import WEIGHTS, is_quiet
from benchmarks.tables.files import AWAITED, card, load, other_devices, path_of, source
from benchmarks.tables.text import markdown, span

FEW = {"1 to 4 tokens": (1, 4), "16 to 256": (16, 256), "more": (257, inf)}
MANY = {"1 and 4 tokens": (1, 4), "16 to 256": (16, 256), "1024": (1024,) * 2}
MANY["4096 and more"] = 4096, inf


def by_tokens(rows, ranges):
    return [[r for r in rows if low <= r["tokens"] <= high] for low, high in ranges.values()]


def faster_than_base(rows):
    """In how many cases the layer with adapters is faster than vLLM's without; "" without vLLM."""
    pairs = [(r["ours_us"], r["rivals"]["vllm_base"]) for r in rows if "vllm_base" in r["rivals"]]
    return f"{sum(ours < base for ours, base in pairs)} of {len(pairs)}" if pairs else ""


def layer_ranges(device=None):
    """Of each rank: speedup over the fastest baseline with adapters, and shares of the bound."""
    rows, said = load("layer", device)[1], []
    for rank in sorted({r["rank"] for r in rows}):
        some = [r for r in rows if r["rank"] == rank]
        shares = [span(r["share"] for r in part) for part in by_tokens(some, FEW)]
        said.append([str(rank), span(r["ratio"] for r in some), faster_than_base(some), *shares])
    titles = ["rank", "×", "faster than vLLM's layer without adapters", *FEW]
    return f"{device or card('layer')}:\n\n{markdown(titles, said)}"


def by_weights(rows):
    """(weights, their rows), of those that have some."""
    found = ((what, [r for r in rows if r["format"] in names]) for what, names in WEIGHTS.items())
    return [(what, some) for what, some in found if some]


def format_ranges(device=None):
    """Of weights of four and of eight bits: geometric means over ranks and models. A share of the
    bound is moelora's, then vLLM's."""
    rows, said = load("formats", device)[1], []
    for what, some in by_weights(rows):
        ratios = [r["ratio"] for r in some if r["ratio"]]
        mean = f"{geometric_mean(ratios):.2f} ({span(ratios)})" if ratios else ""
        few = [r for r in some if r["rank"] == 16 and r["tokens"] >= 4]
        cells = [what, mean, faster_than_base(few) if ratios else ""]
        for part in by_tokens(some, MANY):
            share = f"**{geometric_mean(r['share'] for r in part):.2f}**" if part else ""
            theirs = [r["bound_us"] / r["rivals"]["vllm_lora"] for r in part if r["ratio"]]
            cells.append(share + (f" / {geometric_mean(theirs):.2f}" if theirs else ""))
        said.append(cells)
    titles = ["weights", "×", "faster than vLLM's without adapters", *MANY]
    return f"{device or card('formats')}:\n\n{markdown(titles, said)}"


def on_other_cards():
    """The same of cards beside the newest, and what was not measured there."""
    parts = []
    for topic, table in {"layer": layer_ranges, "formats": format_ranges}.items():
        for device in other_devices(topic):
            missing = load(topic, device)[0].get("missing", "nothing")
            parts += [table(device), f"Not measured: {missing}.", source(topic, device)]
    return "\n\n".join(parts) or AWAITED


def invariance_found():
    meta, _ = load("invariance")
    return f"""Of {meta["elements"]:,} elements in {meta["calls"]:,} calls of
        {meta["compositions"]:,} compositions {meta["differing"]} differ."""


def cpu_ranges():
    meta, rows = load("cpu-layer")
    most = max(r["tokens"] for r in rows)
    cost = (100 * r["overhead"] for r in rows if (r["tokens"], r["rank"]) == (most, 16))
    return f"""On {meta["cores"]} CPU cores ({meta["cpu_features"][-1]}) the layer with adapters is
        {span(r["ratio"] for r in rows)} times as fast as the best of a loop of `torch.mm` and
        transformers with PEFT; at {most} tokens rank 16 costs {span(cost, 0)} %."""


def cpu_format_ranges():
    """Our times over those of bf16 on unpacked weights: unpacked in the call, and before."""
    if path_of("cpu-formats") is None:
        return AWAITED
    meta, rows = load("cpu-formats")
    said = []
    for what, some in by_weights(rows):
        cells = [what]
        for who in ("unpacking", "bf16"):
            times = [
                r[f"ours{add}_us"] / r[f"ours_{who}{add}_us"] for r in some for add in ("", "_base")
            ]
            cells.append(f"{span(times)} (longer in {sum(t > 1 for t in times)} of {len(times)})")
        said.append(cells)
    titles = ["weights", "time over that of `unpack()` and the bf16 layer"]
    titles += ["of the bf16 layer alone"]
    return f"{meta['cores']} CPU cores ({meta['cpu_features'][-1]}):\n\n{markdown(titles, said)}"


def cpu_amx_ranges():
    """Our times over those of AVX-512 BF16 on the same machine, where nothing disturbed either."""
    if path_of("cpu-amx") is None or path_of("cpu-avx512") is None:
        return AWAITED
    meta, rows = load("cpu-amx")
    case = itemgetter("model", "experts", "format", "tokens", "rank")
    before = {case(r): r for r in load("cpu-avx512")[1] if is_quiet(r)}
    found = {}
    for r in filter(is_quiet, rows):
        if case(r) in before:
            found.setdefault(r["tokens"], []).extend(
                r[f"ours{add}_us"] / before[case(r)][f"ours{add}_us"] for add in ("", "_base")
            )
    times = ", ".join(f"{span(shares)} at {tokens}" for tokens, shares in sorted(found.items()))
    return f"""On {meta["threads"]} threads of an {meta["device"]} ({meta["cpu_features"][-1]}) a
        layer takes so much of the time of AVX-512 BF16, with adapters and without:
        {times} tokens."""
