"""Tables and sentences of layers, projections and deltas: of formats, on GPUs and on CPUs."""

import statistics
from operator import itemgetter

from benchmarks.tables.columns import WEIGHTS, is_quiet
from benchmarks.tables.files import AWAITED, card, load, other_devices, path_of, source
from benchmarks.tables.text import cases, markdown, span, wrapped


def layer_ranges(device=None):
    _, rows = load("layer", device)
    shares, times, ahead = [], [], []
    for rank in sorted({r["rank"] for r in rows}):
        some = [r for r in rows if r["rank"] == rank]
        times.append(f"{span(r['ratio'] for r in some)} times as fast at rank {rank}")
        won = [r["ours_us"] < r["rivals"]["vllm_base"] for r in some]
        lost = max(
            (r["tokens"] for r, faster in zip(some, won, strict=True) if not faster), default=0
        )
        later = sorted({r["tokens"] for r in some if r["tokens"] > lost})
        ahead.append(
            f"in {sum(won)} of {len(won)} cases at rank {rank}"
            + (f", among them all from {later[0]} tokens on" if later else "")
        )
    for tokens, low, high in (("1 to 4", 1, 4), ("16 to 256", 16, 256), ("more", 257, 1e9)):
        some = [r for r in rows if low <= r["tokens"] <= high]
        both = [span(r[name] for r in some) for name in ("share", "share_base")]
        shares.append(f"{tokens} tokens reach {both[0]} at all ranks, {both[1]} without adapters")
    return f"""On {device or card("layer")} that is, over all numbers of tokens, {", ".join(times)}.
        *With* adapters it is faster than vLLM's layer *without* any {"; ".join(ahead)}.
        Of the bound {"; ".join(shares)}."""


SHARES = ("share", "share_base")


def by_tokens(rows):
    """(weights, tokens, rows of these) for ranges of tokens."""
    for what, formats in WEIGHTS.items():
        for tokens, low, high in (
            ("1 and 4", 1, 4),
            ("16 to 256", 16, 256),
            ("1024", 1024, 1024),
            ("4096 and more", 4096, 1e9),
        ):
            some = [r for r in rows if r["format"] in formats and low <= r["tokens"] <= high]
            yield what, tokens, some


def format_shares():
    """(weights, tokens, shares of the bound with adapters: ours, vLLM's), geometric means."""
    made = []
    for what, tokens, some in by_tokens(cases("formats_all")):
        both = [(r["share"], r["bound_us"] / r["rivals"]["vllm_lora"]) for r in some]
        ours, theirs = map(statistics.geometric_mean, zip(*both, strict=True))
        made.append((what, tokens, f"**{ours:.2f}**", f"{theirs:.2f}"))
    return made


def format_ranges():
    rows = cases("formats_all")
    said = format_shares()
    table = markdown(["weights", "tokens", "share of the bound", "vLLM's with adapters"], said)
    faster = [r["rivals"]["vllm_lora"] / r["ours_us"] for r in rows]
    few = [r for r in rows if r["rank"] == 16 and r["tokens"] >= 4]
    won = sum(r["ours_us"] < r["rivals"]["vllm_base"] for r in few)
    text = f"""{card("formats")}, geometric means of both ranks and all models. With adapters the
        layer is {span(faster)} times as fast as vLLM's with adapters; from 4 tokens on it is faster
        with adapters of rank 16 than vLLM's without in {won} of {len(few)} cases."""
    return f"{table}\n\n{wrapped(text)}"


def quantized_layers():
    """Speedup over the fastest of vLLM's layers with adapters, for 4-bit and for FP8 weights."""
    rows = cases("formats_all")
    found = {
        what: [r["ratio"] for r in rows if r["format"] in formats]
        for what, formats in zip(("MXFP4 and INT4", "FP8"), WEIGHTS.values(), strict=True)
    }
    said = [
        f"{statistics.geometric_mean(some):.2f} times as fast with {what} ({span(some)})"
        for what, some in found.items()
    ]
    text = f"""On {card("formats")} a layer of quantized experts with adapters is
        {" and ".join(said)} as the fastest of
        vLLM's layers with adapters: geometric means over 1 to {max(r["tokens"] for r in rows)}
        tokens. The share of the [upper bound](docs/benchmarks.md#the-upper-bound) that moelora
        reaches / that vLLM reaches:"""
    shares = {}
    for what, tokens, *both in format_shares():
        shares.setdefault(what, {})[tokens] = " / ".join(both)
    titles = ["tokens", *shares["FP8"]]
    table = markdown(titles, [[what, *row.values()] for what, row in shares.items()])
    return f"{wrapped(text)}\n\n{table}"


def on_other_cards():
    """Ranges of layers, and shares of the bound of quantized ones, of cards beside the newest."""
    parts = []
    for device in other_devices("layer"):
        meta, _ = load("layer", device)
        text = f"{layer_ranges(device)} Not measured: {meta.get('missing', 'nothing')}."
        parts += [wrapped(text), source("layer", device)]
    for device in other_devices("formats"):
        meta, rows = load("formats", device)
        said = []
        for what, tokens, some in by_tokens(rows):
            if not some:
                continue
            means = [statistics.geometric_mean(r[key] for r in some) for key in SHARES]
            said.append((what, tokens, *(f"**{mean:.2f}**" for mean in means)))
        table = markdown(["weights", "tokens", "share of the bound", "without adapters"], said)
        text = f"""{device}, geometric means of both ranks and all models. Not measured:
            {meta.get("missing", "nothing")}."""
        parts += [f"{table}\n\n{wrapped(text)}", source("formats", device)]
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
    for what, formats in WEIGHTS.items():
        some = [r for r in rows if r["format"] in formats]
        if not some:  # of a run of fewer models
            continue
        within, before = (
            [r[f"ours{add}_us"] / r[f"ours_{who}{add}_us"] for r in some for add in ("", "_base")]
            for who in ("unpacking", "bf16")
        )
        longer = [
            f"more in {sum(t > 1 for t in found)} of {len(found)}" for found in (within, before)
        ]
        said.append(f"""weights of {what} take {span(within)} of the time of `unpack()` and the bf16
            layer ({longer[0]} cases), {span(before)} of that of the bf16 layer alone
            ({longer[1]})""")
    return f"""On {meta["cores"]} CPU cores ({meta["cpu_features"][-1]}), with adapters and without,
        {"; ".join(said)}."""


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
