"""Tables and sentences of training steps, and of trainers beside engines."""

from dataclasses import replace

from benchmarks import training_memory
from benchmarks.tables.files import AWAITED, card, other_devices, rows_of, source
from benchmarks.tables.text import markdown, span, thousands

MANY_TOKENS = 4096


def training_speeds(peer):
    """A training step of another project's kernels over ours, of all layers that it ran; not of few
    tokens, where steps of some projects wait for the host."""
    rows = [row for row in rows_of("training") if peer in row.get("peers", ())]
    rows = [row for row in rows if row["tokens"] >= MANY_TOKENS]
    return [row["peers"][peer]["fwdbwd_us"] / row["ours_us"] for row in rows]


def training_alternatives():
    """Time of a training step of other projects over ours."""
    names = {"yard": "a step with `torch._grouped_mm`, written by hand", **PEERS}
    said = [f"{span(training_speeds(peer))} times with {name}" for peer, name in names.items()]
    rows = {(r["shape"], r["tokens"], r["format"]): r["ours_us"] for r in rows_of("training")}
    slower = [
        rows[shape, tokens, "mxfp4"] / us
        for (shape, tokens, format), us in rows.items()
        if format == "bf16" and (shape, tokens, "mxfp4") in rows
    ]
    return f"""Time of a training step of one layer from {MANY_TOKENS} tokens on, on
        {card("training")}, relative to moelora's:
        {"; ".join(said)}. moelora takes {span(slower)} times as long on MXFP4 experts as on bf16
        ones."""


LAYERS = {
    "qwen3": "Qwen3-30B-A3B",
    "gptoss": "gpt-oss-20b",
    "glm45air": "GLM-4.5-Air",
    "mixtral": "Mixtral-8x7B",
}
QUANTIZED = {
    "mxfp4": "MXFP4",
    "nvfp4": "NVFP4",
    "int4": "INT4",
    "fp8": "FP8",
    "w8a16": "W8A16",
    "nf4": "NF4",
}
PEERS = {"unsloth": "Unsloth", "axolotl": "axolotl", "veomni": "VeOmni", "peft": "PEFT"}


def case(row):
    return row["shape"], row["tokens"], row["rank"], row["tenants"]


def training_peers(topic="training", device=None):
    """A training step of moelora and of other projects' kernels; the fastest in bf16 is bold."""
    rows = rows_of(topic, device)
    titles = ["moelora", "moelora, MXFP4", "torch._grouped_mm", *PEERS.values(), "Unsloth, MXFP4"]

    def peers(row, names):
        return [row["peers"].get(name, {}).get("fwdbwd_us", 0) for name in names]

    quantized = {case(row): row for row in rows if row["format"] == "mxfp4"}
    bf16 = [0, *range(2, 3 + len(PEERS))]  # columns of times on bf16 experts
    said = []
    for row in rows:
        if row["peers"] and row["format"] == "bf16":
            other = quantized.get(case(row), {"ours_us": 0, "peers": {}})
            times = [row["ours_us"], other["ours_us"], *peers(row, ("yard", *PEERS))]
            cells = thousands(*map(round, [*times, *peers(other, ["unsloth_mx"])]))
            fastest = min((n for n in bf16 if times[n]), key=times.__getitem__)
            cells[fastest] = f"**{cells[fastest]}**"
            said.append([LAYERS[row["shape"]], str(row["tokens"]), *cells])
    return with_titles(topic, titles, said, device)


def training_quantized(topic="training", device=None):
    """Time of a step beside quantized weights over that of bf16 ones."""
    rows = rows_of(topic, device)
    usual = {case(row): row["ours_us"] for row in rows if row["format"] == "bf16"}
    found = {key: {} for key in usual}
    for row in rows:
        if case(row) in usual:
            found[case(row)][row["format"]] = f"{row['ours_us'] / usual[case(row)]:.2f}"
    said = [
        [LAYERS[shape], str(tokens), *(formats.get(name, "") for name in QUANTIZED)]
        for (shape, tokens, *_), formats in found.items()
        if len(formats) > 1
    ]
    return with_titles(topic, QUANTIZED.values(), said, device)


def on_other_cards():
    """Both tables of each card beside the newest one's."""
    tables = [
        part
        for device in other_devices("training")
        for part in (
            training_peers(device=device),
            training_quantized(device=device),
            source("training", device),
        )
    ]
    return "\n\n".join(tables) or AWAITED


def training_memory_measured():
    """Peaks of whole steps beside what training_memory computes for them."""
    rows = [row for row in rows_of("training-memory") if "error" not in row]
    if not rows:
        return AWAITED
    (model,) = (m for m in training_memory.MODELS if m.name == "gpt-oss-20b")
    said = []
    for row in rows:
        tokens = row["batch"] * row["length"]
        computed = model.total("MXFP4", row["rank"], tokens) / training_memory.GB
        said.append([str(tokens), f"{computed:.1f}", f"{row['peak_gb']:.1f}"])
    titles = ["tokens", "computed (GB)", "measured (GB)"]
    return f"{card('training-memory')}:\n\n{markdown(titles, said)}"


WAYS = {
    "alone": "one GPU",
    "ddp": "DDP",
    "fsdp2": "FSDP2",
    "ep": "`fsdp_size`, `ep_size`",
    "tp": "`tp_size`",
    "tp+ep": "`tp_size`, `ep_size`",
}


def parallel_steps():
    """Steps in each way that processes share a model, beside PEFT alone in the same way."""
    rows = rows_of("training-parallel")
    if not rows:
        return AWAITED
    peft = {row["mode"]: row for row in rows if row["engine"] == "peft"}
    said = []
    for row in (row for row in rows if row["engine"] == "moelora"):
        other = peft.get(row["mode"], {}) if row["format"] == "bf16" else {}
        cells = ["fails" if "error" in row else "", *[""] * 4]
        if "error" not in row:
            times = [f"{max(row[name]):.0f}" for name in ("uncovered_ms", "idle_ms")]
            cells = [f"{row['tokens_per_s']:,}", f"{row.get('of_alone', 0):.2f}"]
            cells += [f"{max(row['peak_mib']):,}", *times]
        beside = ["fails" if "error" in other else "", ""]
        if "tokens_per_s" in other:
            beside = [f"{other['tokens_per_s']:,}", f"{max(other['peak_mib']):,}"]
        said.append([WAYS[row["mode"]], QUANTIZED.get(row["format"], "bf16"), *cells, *beside])
    titles = ["way", "experts", "tokens/s of a GPU", "over one GPU's", "MiB of a GPU"]
    titles += ["communication alone (ms)", "idle (ms)", "PEFT, tokens/s", "PEFT, MiB"]
    return f"{card('training-parallel')}, two of them:\n\n{markdown(titles, said)}"


def parallel_memory():
    """The peak of a step beside what training_memory computes for it."""
    rows = [r for r in rows_of("training-parallel") if r["mode"] == "ep" and "peak_mib" in r]
    if not rows:
        return AWAITED
    row = rows[0]
    (model,) = (m for m in training_memory.MODELS if m.name == row["model"])
    model = replace(model, layers=row["layers"], blocks=row["layers"])
    computed = model.on_each(row["world"], row["rank"], row["tokens"]) / training_memory.GB
    peak = max(row["peak_mib"]) * 2**20 / training_memory.GB
    return f"""{row["layers"]} layers of {model.name} with rank {row["rank"]} and {row["tokens"]}
        tokens on each of {row["world"]} {card("training-parallel")}: {computed:.1f} GB computed,
        {peak:.1f} GB at the peak of torch's allocator."""


def with_titles(topic, titles, rows, device=None):
    """A table of layers and numbers of tokens, without columns that no row has."""
    if not rows:
        return AWAITED
    titles = ["layer", "tokens", *titles]
    kept = [i for i in range(len(titles)) if any(row[i] for row in rows)]
    rows = [[row[i] for i in kept] for row in rows]
    return f"{device or card(topic)}:\n\n{markdown([titles[i] for i in kept], rows)}"


def sampler_bits(topic="e2e-sampler"):
    """Elements of a trainer's MoE layers that differ from an engine's."""
    (row,) = (r for r in rows_of(topic) if r["topic"] == "sampler")
    return f"""On an {card(topic)} {row["differing"]} of {row["elements"]:,} elements of
        {row["rows"]:,} rows differ."""
