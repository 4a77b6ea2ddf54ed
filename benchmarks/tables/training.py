"""Tables and sentences of training steps, and of trainers beside engines."""

from dataclasses import replace

import numpy as np
import pandas as pd

from benchmarks import training_memory
from benchmarks.tables.cases import formatted, markdown, span, wrapped
from benchmarks.tables.files import load, on_others

MANY_TOKENS = 4096
LAYERS = {
    "qwen3": "Qwen3-30B-A3B",
    "gptoss": "gpt-oss-20b",
    "glm45air": "GLM-4.5-Air",
    "mixtral": "Mixtral-8x7B",
}
QUANTIZED = {name: name.upper() for name in ("mxfp4", "nvfp4", "int4", "fp8", "w8a16", "nf4")}
PEERS = {"unsloth": "Unsloth", "axolotl": "axolotl", "veomni": "VeOmni", "peft": "PEFT"}
CASE = ["shape", "tokens", "rank", "tenants"]


def training_speeds(peer):
    """A training step of another project's kernels over ours, of all layers that it ran; not of few
    tokens, where steps of some projects wait for the host."""
    _, rows = load("training")
    rows = rows[rows.tokens >= MANY_TOKENS]
    return rows[f"peers.{peer}.fwdbwd_us"] / rows.ours_us


def by_format(rows):
    """Times of a step, a column for each format."""
    return rows.pivot_table("ours_us", CASE, "format", aggfunc="first", sort=False)


def training_alternatives():
    """Time of a training step of other projects over ours."""
    names = {"yard": "a step with `torch._grouped_mm`, written by hand", **PEERS}
    said = [f"{span(training_speeds(peer))} times with {name}" for peer, name in names.items()]
    meta, rows = load("training")
    times = by_format(rows)
    return wrapped(f"""Time of a training step of one layer from {MANY_TOKENS} tokens on, on
        {meta["device"]}, relative to moelora's: {"; ".join(said)}. moelora takes
        {span(times.mxfp4 / times.bf16)} times as long on MXFP4 experts as on bf16 ones.""")


def of_layers(meta, table):
    """A table with the layer and the number of tokens of each row, without empty columns."""
    table = table.reset_index().drop(columns=["rank", "tenants"]).dropna(axis=1, how="all")
    table = table.replace({"shape": LAYERS}).rename(columns={"shape": "layer"})
    return f"{meta['device']}:\n\n{markdown(table)}"


def training_peers(topic="training", device=None):
    """A training step of moelora and of other projects' kernels; the fastest in bf16 is bold."""
    meta, rows = load(topic, device)
    bf16, mxfp4 = (rows[rows.format == name] for name in ("bf16", "mxfp4"))
    both = bf16.merge(mxfp4, how="left", on=CASE, suffixes=("", " mxfp4")).set_index(CASE)
    titles = {"ours_us": "moelora", "ours_us mxfp4": "moelora, MXFP4"}
    peers = {"yard": "torch._grouped_mm", **PEERS}
    titles |= {f"peers.{peer}.fwdbwd_us": name for peer, name in peers.items()}
    titles["peers.unsloth_mx.fwdbwd_us mxfp4"] = "Unsloth, MXFP4"
    times = both.reindex(columns=titles).astype(float).rename(columns=titles)
    times = times[times.reindex(columns=peers.values()).notna().any(axis=1)]
    usual = times[["moelora", *peers.values()]]
    fastest = usual.eq(usual.min(axis=1), axis=0).reindex(columns=times.columns, fill_value=False)
    cells = formatted(times, "{:,.0f}")
    return of_layers(meta, cells.mask(fastest, formatted(cells, "**{}**")))


def training_quantized(topic="training", device=None):
    """Time of a step beside quantized weights over that of bf16 ones."""
    meta, rows = load(topic, device)
    times = by_format(rows)
    ratios = times.div(times.bf16, axis=0).reindex(columns=QUANTIZED).dropna(how="all")
    return of_layers(meta, formatted(ratios, "{:.2f}").rename(columns=QUANTIZED))


def training_on_others():
    return on_others("training", training_peers, training_quantized)


def training_memory_measured():
    """Peaks of whole steps beside what training_memory computes for them."""
    meta, rows = load("training-memory")
    rows = rows.dropna(subset="peak_gb")
    (model,) = (m for m in training_memory.MODELS if m.name == "gpt-oss-20b")
    tokens = rows.batch * rows.length
    computed = [model.total("MXFP4", *step) for step in zip(rows["rank"], tokens, strict=True)]
    said = pd.DataFrame({"computed (GB)": computed, "measured (GB)": rows.peak_gb})
    said["computed (GB)"] /= training_memory.GB
    said = formatted(said.set_index(tokens.rename("tokens")), "{:.1f}").reset_index()
    return f"{meta['device']}:\n\n{markdown(said)}"


WAYS = {"alone": "one GPU", "ddp": "DDP", "fsdp2": "FSDP2", "ep": "`fsdp_size`, `ep_size`"}
WAYS |= {"tp": "`tp_size`", "tp+ep": "`tp_size`, `ep_size`"}


def parallel_steps():
    """Steps in each way that processes share a model, beside PEFT alone in the same way. Of several
    processes the largest value counts."""
    meta, rows = load("training-parallel")
    rows = rows.replace({"mode": WAYS, "format": QUANTIZED}).rename(columns={"mode": "way"})
    forms = {"tokens_per_s": "{:,.0f}", "of_alone": "{:.2f}", "peak_mib": "{:,.0f}"}
    forms |= dict.fromkeys(("uncovered_ms", "idle_ms"), "{:.0f}")
    rows[[*forms]] = rows[[*forms]].map(np.max)
    for field, form in forms.items():
        rows[field] = formatted(rows[field], form)
    rows.loc[rows.seconds.isna(), "tokens_per_s"] = "fails"
    ours, peft = (rows[rows.engine == name] for name in ("moelora", "peft"))
    both = ours.merge(peft, how="left", on=["way", "format"], suffixes=("", " peft"))
    titles = {"way": "way", "format": "experts", "tokens_per_s": "tokens/s of a GPU"}
    titles |= {"of_alone": "over one GPU's", "peak_mib": "MiB of a GPU"}
    titles |= {"uncovered_ms": "communication alone (ms)", "idle_ms": "idle (ms)"}
    titles |= {"tokens_per_s peft": "PEFT, tokens/s", "peak_mib peft": "PEFT, MiB"}
    said = both[[*titles]].rename(columns=titles)
    return f"{meta['device']}, two of them:\n\n{markdown(said)}"


def parallel_memory():
    """The peak of a step beside what training_memory computes for it."""
    meta, rows = load("training-parallel")
    row = rows.query("mode == 'ep' and peak_mib.notna()").iloc[0]
    (model,) = (m for m in training_memory.MODELS if m.name == row.model)
    model = replace(model, layers=row.layers, blocks=row.layers)
    computed = model.on_each(row.world, row["rank"], row.tokens) / training_memory.GB
    peak = max(row.peak_mib) * 2**20 / training_memory.GB
    return wrapped(f"""{row.layers} layers of {model.name} with rank {row["rank"]} and {row.tokens}
        tokens on each of {row.world} {meta["device"]}: {computed:.1f} GB computed, {peak:.1f} GB at
        the peak of torch's allocator.""")


def sampler_bits(topic="e2e-sampler"):
    """Elements of a trainer's MoE layers that differ from an engine's."""
    meta, rows = load(topic)
    (row,) = rows.query("topic == 'sampler'").itertuples()
    return wrapped(f"""On an {meta["device"]} {row.differing} of {row.elements:,} elements of
        {row.rows:,} rows differ.""")
