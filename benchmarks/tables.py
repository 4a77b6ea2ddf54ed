"""The measured tables of README.md and docs/, from benchmarks/results/.

    python -m benchmarks.tables [NAME...]  prints them, or some of them
    python -m benchmarks.tables --write    updates the pages

Names are the keys of TABLES, MADE, COMPUTED and SENTENCES, or `from TOPIC`: provenance and command
of a file. A file is named <card>-<topic>.json; of several cards the newest is taken, and tables
name the card.
A page contains a table between `<!-- name -->` and `<!-- /name -->`. At `<!-- site: name, name -->`
only the generated site does (docs/mkdocs_hooks.py), which is built without torch: this module must
not import moelora.
"""

import ast
import json
import re
import statistics
import sys
import textwrap
from pathlib import Path

from benchmarks import ROOT, training_memory

PAGES = (
    "README.md",
    "docs/README.md",
    "docs/limits.md",
    "docs/measurements.md",
    "docs/batch-invariance.md",
    "docs/training.md",
    "docs/transformers.md",
    "docs/adapters.md",
)
# "column: field of a case"; a column that no case has is left out.
CASE = "model: model, tokens: tokens, rank: rank"
LAYER = """bound: bound_us, with adapters: ours_us, vLLM with: rivals.vllm_default,
    separate with: rivals.separate, ×: ratio, without: ours_base_us,
    vLLM without: rivals.vllm_base, _grouped_mm without: rivals.torch_grouped_mm_base"""
FORMATS = """weights: format, bound: bound_us, with adapters: ours_us, ×: ratio, share: share,
    in bf16: ours_bf16_us, vLLM with: rivals.vllm_lora, triton_kernels with: rivals.tk_lora,
    without: ours_base_us, in bf16 without: ours_bf16_base_us, vLLM without: rivals.vllm_base,
    triton_kernels without: rivals.tk_base, error: max_err_ratio"""
NVFP4 = """weights: format, bound: bound_us, with adapters: ours_us, share: share,
    without: ours_base_us, share without: share_base"""
ALIGN = """block: block_size, segmented: ours_us, uniform: ours_uniform_us,
    vLLM per adapter: rivals.vllm_lora, by expert: ours_base_us, vLLM by expert: rivals.vllm_base,
    moe_sorting: ours_sorting_us"""
DELTA = """projection: projection, slots: slots, bound: bound_us, delta: ours_us,
    vLLM default: rivals.vllm_default, vLLM best: rivals.vllm_best"""
MLP = "adapters: adapters, staged: ours_staged_us, all in one: ours_fused_us"
KERNELS = """kernel: kernel, us: us, DRAM GB/s: dram_gb_s, DRAM read MB: dram_read_mb,
    L2 %: l2_percent, L2 hits %: l2_hit_percent, wgmma issued %: wgmma_issue_percent,
    tensor %: tensor_percent, issued %: issue_percent"""
POWER = """rested: rested_us, at work: working_us, MHz: mhz, W: watts, of zeros: zeros_working_us,
    MHz of zeros: zeros_mhz, W of zeros: zeros_watts"""
ENGINES = """engine: engine, LoRA enabled: lora_enabled, batch: batch,
    prefill tokens/s: prefill_tok_s, decode tokens/s: decode_tok_s"""
ENGINES_MORE = """engine: engine, LoRA enabled: lora_enabled, batch: batch,
    prefill tokens/s: prefill_tok_s, decode of 1: decode_1_tok_s,
    decode of 16: decode_16_tok_s, decode of 64: decode_tok_s, decode of 256: decode_256_tok_s,
    first token of 64 (ms): ttft_ms, each later token (ms): tpot_ms"""
SGLANG = """server: engine, batch: batch, prefill tokens/s: prefill_tok_s,
    decode of 1: decode_1_tok_s, decode of 16: decode_16_tok_s, decode of 64: decode_tok_s,
    first token of 64 (ms): ttft_ms, each later token (ms): tpot_ms"""
CPU = """dtype: dtype, bound: bound_us, with adapters: ours_us, ×: ratio,
    fastest baseline: best_rival, without: ours_base_us,
    transformers without: rivals.grouped_mm_base"""
CPU_FORMATS = """weights: format, bound: bound_us, with adapters: ours_us, in bf16: ours_bf16_us,
    unpacked in the call: ours_unpacking_us, without: ours_base_us,
    in bf16 without: ours_bf16_base_us, unpacked in the call without: ours_unpacking_base_us"""
TRAINING = """layer: shape, weights: format, bound: bound_us, share: share,
    forward and backward: ours_us, of it forward: ours_fwd_us, saved (MiB): saved_mib,
    peak (MiB): peak_mib"""
ARRIVALS = """adapters come: policy, slots: slots, adapters: adapters,
    median first token (ms): ttft_ms, × resident: ttft_ms_ratio, 95th percentile (ms): ttft_p95_ms,
    tokens/s of all at once: tok_s, tokens/s × resident: tok_s_ratio"""
UPDATES = """while: what, tensors: layout, layers: layers, GiB: gib, an update (ms): ms,
    shortest: low, longest: high, a step (ms): step_ms, longest step (ms): step_max_ms"""
TENANTS = """layer: shape, tenants: tenants, weights: format, bound: bound_us, share: share,
    forward and backward: ours_us, of it forward: ours_fwd_us,
    axolotl: peers.axolotl_multi.fwdbwd_us, peak (MiB): peak_mib"""
QLORA = """engine: engine, layers: layers, sequences: batch, tokens of each: length,
    checkpointing: checkpointing, tokens/s: tokens_per_s, weights (GB): weights_gb,
    peak (GB): peak_gb"""
GAP = "trainer and engine: pair, prompts of: who, mean: mean, median: median, largest: most"
WHOLE = "model: what, microseconds of a decode step: us, × base: ratio"
FP8, MIXED = "fp8_block", "4 mixed"
WEIGHTS = {"four bits": ("mxfp4", "int4"), "FP8": (FP8,)}
RATIOS = (
    "ratio",
    "share",
    "share_base",
    "max_err_ratio",
    "mean",
    "median",
    "most",
    "ttft_ms_ratio",
    "tok_s_ratio",
)
# {name: (topic of a file, which of its cases, columns)}
TABLES = {
    "layer_all": ("layer", lambda r: True, LAYER),
    "adapters": ("adapters", lambda r: True, "adapters: adapters, " + LAYER),
    "formats_all": ("formats", lambda r: True, FORMATS),
    "nvfp4": ("nvfp4", lambda r: True, NVFP4),
    "portable": ("sm80-layer", lambda r: True, LAYER),
    "kernels": ("kernels", lambda r: True, KERNELS),
    "kernels_formats": ("kernels-formats", lambda r: r["us"] > 8, KERNELS),
    "one_launch": ("kernels-one-launch", lambda r: True, KERNELS),
    "power": ("power", lambda r: True, POWER),
    "align_all": ("align", lambda r: True, ALIGN),
    "delta": ("delta", lambda r: r["part"] == "grid", DELTA),
    "slots": ("delta", lambda r: r["part"] == "slots", DELTA),
    "mlp": ("delta", lambda r: r["part"] == "sglang", MLP),
    "engines_12_layers": ("e2e-12-layers", lambda r: r["topic"] == "speed", ENGINES),
    "engines_fp8": ("e2e-fp8", lambda r: r["topic"] == "speed", ENGINES_MORE),
    "engines_mxfp4": ("e2e-mxfp4", lambda r: r["topic"] == "speed", ENGINES_MORE),
    "engines_nvfp4": ("e2e-nvfp4", lambda r: r["topic"] == "speed", ENGINES_MORE),
    "engines_int4": ("e2e-int4", lambda r: r["topic"] == "speed", ENGINES_MORE),
    "engines_sglang": ("e2e-sglang", lambda r: r["topic"] == "speed", SGLANG),
    "training": ("training", lambda r: True, TRAINING),
    "arrivals": ("churn", lambda r: r["topic"] == "arrivals", ARRIVALS),
    "updates": ("churn", lambda r: r["topic"] == "updates", UPDATES),
    "training_tenants": ("training-tenants", lambda r: True, TENANTS),
    "sampler_gap": ("e2e-sampler", lambda r: r["topic"] == "gap", GAP),
    "qlora_step": ("qlora-step", lambda r: "error" not in r, QLORA),
    "whole_adapters": ("whole-adapters", lambda r: r["mode"] == "graph", WHOLE),
    "cpu": ("cpu-layer", lambda r: True, CPU),
    "cpu_formats": ("cpu-formats", lambda r: True, CPU_FORMATS),
}


AWAITED = "*Not measured yet.*"  # a table whose file, or its rows in it, are not there


def path_of(topic, device=None):
    """Path of the newest result file of a topic, optionally only those of `device`; None if there
    is none. GPU results are in <card>-<topic>.json, CPU results (topic cpu-...) in <topic>.json."""
    folder = ROOT / "benchmarks/results"
    if topic.startswith("cpu-"):
        found = [folder / f"{topic}.json"]
    else:
        found = [p for p in folder.glob(f"*-{topic}.json") if is_card(p.name, topic)]
    found = [path for path in found if path.exists()]
    found = [path for path in found if device in (None, read(path)[0]["device"])]
    return max(found, key=lambda path: (read(path)[0]["date"], path.name), default=None)


def is_card(name, topic):
    card = name.removesuffix(f"-{topic}.json")
    return "-" not in card and card != "cpu"


def read(path):
    content = json.loads(path.read_text())
    return content["meta"], content["cases"]


def load(topic, device=None):
    return read(path_of(topic, device))


def card(topic):
    """The GPU or CPU that a file was measured on."""
    return load(topic)[0]["device"]


def known_models():
    """{key: (name, number of experts)} of moelora.bench.shapes.MODELS, read from its source."""
    source = (Path(__file__).parents[1] / "moelora/bench/shapes.py").read_text()
    (models,) = (
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MODELS"
    )
    keys = map(ast.literal_eval, models.keys)
    names = (tuple(ast.literal_eval(part) for part in model.args[:2]) for model in models.values)
    return dict(zip(keys, names, strict=True))


MODELS = known_models()


def rows_of(topic):
    """Empty before it was measured."""
    return load(topic)[1] if path_of(topic) else []


def cases(name):
    """The rows of a table of TABLES."""
    topic, wanted, _ = TABLES[name]
    return [row for row in rows_of(topic) if wanted(row)]


def cell(row, field):
    value = row
    for name in field.split("."):
        value = value.get(name) if value else None
    if field == "model" and value in MODELS:
        name, experts = MODELS[value]
        cut = row.get("experts", experts) < experts
        return f"{name} ({row['experts']} experts)" if cut else name
    if field == "kernel":
        return f"`{value.rstrip(', ')}`"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float):
        return "" if value is None else str(value)
    text = f"{value:.2f}" if field in RATIOS else f"{value:.{0 if value > 99.9 else 1}f}"
    return f"**{text}**" if field == "ours_us" else text


def markdown(titles, rows):
    lines = [titles, ["---", *["---:"] * (len(titles) - 1)], *rows]
    return "\n".join("| " + " | ".join(text or "-" for text in line) + " |" for line in lines)


def table(name):
    topic, _, columns = TABLES[name]
    rows = cases(name)
    return f"{card(topic)}:\n\n{made_of(columns, rows)}" if rows else AWAITED


def made_of(columns, rows):
    """A table of cases; columns without a value are left out."""
    pairs = [column.strip().split(": ") for column in f"{CASE}, {columns}".split(",")]
    cells = [[cell(row, field) for _, field in pairs] for row in rows]
    kept = [i for i in range(len(pairs)) if any(row[i] for row in cells)]
    return markdown([pairs[i][0] for i in kept], [[row[i] for i in kept] for row in cells])


def source(topic):
    path = path_of(topic)
    if path is None:
        return AWAITED
    meta, _ = read(path)
    about = ", ".join((meta["device"], f"torch {meta['torch']}", meta["commit"], meta["date"]))
    return f"`benchmarks/results/{path.name}`, {about}:\n\n```\n{meta['command']}\n```"


def span(values, digits=2):
    values = [v for v in values if v is not None]
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def layer_ranges():
    _, rows = load("layer")
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
    return f"""On {card("layer")} that is, over all numbers of tokens, {", ".join(times)}.
        *With* adapters it is faster than vLLM's layer *without* any {"; ".join(ahead)}.
        Of the bound {"; ".join(shares)}."""


def delta_ranges():
    said = []
    for at in ("w13", "w2"):
        grid = [r for r in load("delta")[1] if r["part"] == "grid" and r["projection"] == at]
        usual, best = (
            [r["rivals"][who] / r["ours_us"] for r in grid if who in r["rivals"]]
            for who in ("vllm_default", "vllm_best")
        )
        said.append(f"""{at}'s is {span(usual)} times as fast as vLLM's default (median
            {statistics.median(usual):.2f}), and {span(best)} times as fast as the best of its
            modes for the case, which is faster than moelora in {sum(b < 1 for b in best)} of
            {len(best)} cases""")
    where = card("delta")
    return f"The adapters' part alone, added to an existing output on {where}: {'; '.join(said)}."


def format_shares():
    """(weights, tokens, shares of the bound with adapters: ours, vLLM's), geometric means."""
    made = []
    for what, formats in WEIGHTS.items():
        for tokens, low, high in (
            ("1 and 4", 1, 4),
            ("16 to 256", 16, 256),
            ("1024", 1024, 1024),
            ("4096 and more", 4096, 1e9),
        ):
            some = [
                (r["share"], r["bound_us"] / r["rivals"]["vllm_lora"])
                for r in cases("formats_all")
                if r["format"] in formats and low <= r["tokens"] <= high
            ]
            ours, theirs = map(statistics.geometric_mean, zip(*some, strict=True))
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


def rate(rows, phase, engine, lora, batch):
    """Tokens per second of an engine; None where it was not timed."""
    for row in rows:
        if (row["engine"], row["lora_enabled"], row["batch"]) == (engine, lora, batch):
            return row.get(f"{phase}_tok_s")


def thousands(*numbers):
    return [f"{n:,}" if n else "" for n in numbers]


def over(a, b):
    return f"{a / b:.2f}" if a and b else ""


# Twelve layers each; {experts: name of a table}
ENGINE_TABLES = {
    "bf16, Qwen3-30B-A3B": "engines_12_layers",
    "FP8, Qwen3-30B-A3B": "engines_fp8",
    "MXFP4, gpt-oss-20b": "engines_mxfp4",
    "NVFP4, Qwen3-30B-A3B": "engines_nvfp4",
    "INT4, Qwen3-30B-A3B": "engines_int4",
}


def engine_ranges():
    """Tokens per second of engines with and without LoRA, over all measurements."""
    said = []
    titles = ["engine", "GPU", "experts", "layers", "phase", "engine, no adapters"]

    def row(topic, engine, experts, phase, base, theirs, ours):
        gpu = card(topic).removeprefix("NVIDIA ")
        told = [engine, gpu, experts, "12", phase, *thousands(base, theirs)]
        said.append([*told, f"**{ours:,}**", over(ours, theirs)])

    for what, name in ENGINE_TABLES.items():
        for phase in ("prefill", "decode"):
            base = rate(cases(name), phase, "vllm", False, "base")
            theirs, ours = (rate(cases(name), phase, e, True, MIXED) for e in ("vllm", "moelora"))
            if ours and theirs:
                topic = TABLES[name][0]
                release = f"vLLM {load(topic)[0]['vllm']}"
                row(topic, release, what, phase, base, theirs, ours)
    speeds = {(r["engine"], r["batch"]): r for r in cases("engines_sglang")}
    for phase in ("prefill", "decode") if speeds else ():
        numbers = (
            speeds[key][f"{phase}_tok_s"]
            for key in (
                ("sglang, no LoRA", "base"),
                ("sglang, virtual experts", MIXED),  # SGLang's faster path
                ("moelora", MIXED),
            )
        )
        release = load("e2e-sglang")[0]["sglang"]
        row("e2e-sglang", f"SGLang {release}", "bf16, Qwen3-30B-A3B", phase, *numbers)
    return markdown([*titles, "engine, 4 adapters", "moelora, 4 adapters", "speedup"], said)


def engine_speeds():
    """Of vLLM in bf16, for prefill and decode: moelora with adapters over vLLM's own with them, and
    over vLLM without."""
    rows = cases("engines_12_layers")
    found = []
    for phase in ("prefill", "decode"):
        ours, theirs = (rate(rows, phase, e, True, MIXED) for e in ("moelora", "vllm"))
        found.append((ours / theirs, ours / rate(rows, phase, "vllm", False, "base")))
    return found


def training_speeds(peer):
    """A training step of another project's kernels over ours, of all layers that it ran."""
    rows = [row for row in rows_of("training") if peer in row.get("peers", ())]
    return [row["peers"][peer]["fwdbwd_us"] / row["ours_us"] for row in rows]


def claim():
    (prefill, kept_prefill), (decode, kept_decode) = engine_speeds()
    training = [
        f"{span(training_speeds(peer), 1)} times as fast as with {PEERS[peer]}'s kernels"
        for peer in ("unsloth", "axolotl")
    ]
    release = load("e2e-12-layers")[0]["vllm"]
    return f"""With moelora, vLLM {release} serves adapters on all experts of Qwen3-30B-A3B with
        **{prefill:.1f} times** the prefill and **{decode:.1f} times** the decode throughput of
        its own LoRA kernels, which is {kept_prefill:.2f} and {kept_decode:.2f} of its throughput
        without adapters, on {card("e2e-12-layers")} in bf16, with twelve layers of the model. A
        training step of a layer is {" and ".join(training)}, on {card("training")}."""


def alternatives():
    """Throughput of an engine with moelora and adapters over what one would take instead."""
    said = []

    def row(instead, ours, theirs):
        ratios = [over(a, b) for a, b in zip(ours, theirs, strict=True)]
        if any(ratios):
            said.append([instead, *ratios])

    phases = "prefill", "decode"
    for what, name in ENGINE_TABLES.items():
        rows = cases(name)
        if not rows:
            continue
        topic = TABLES[name][0]
        gpu = card(topic).removeprefix("NVIDIA ")
        release = f"vLLM {load(topic)[0]['vllm']}, {what}, {gpu}"
        ours = [rate(rows, phase, "moelora", True, MIXED) for phase in phases]
        for instead, more in (
            ("its own LoRA kernels", (True, MIXED)),
            ("without adapters", (False, "base")),
        ):
            theirs = [rate(rows, phase, "vllm", *more) for phase in phases]
            row(f"{release}: {instead}", ours, theirs)
    speeds = {
        (r["engine"], r["batch"]): [r[f"{phase}_tok_s"] for phase in phases]
        for r in cases("engines_sglang")
    }
    gpu = card("e2e-sglang").removeprefix("NVIDIA ")
    release = f"SGLang {load('e2e-sglang')[0]['sglang']}, bf16, Qwen3-30B-A3B, {gpu}"
    for instead, key in (
        ("its own LoRA kernels, virtual experts", ("sglang, virtual experts", MIXED)),
        ("without adapters", ("sglang, no LoRA", "base")),
    ):
        row(f"{release}: {instead}", speeds["moelora", MIXED], speeds[key])
    return markdown(["moelora with adapters, relative to", *phases], said)


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
    return f"""Time of a training step of one layer on {card("training")}, relative to moelora's:
        {"; ".join(said)}. moelora takes {span(slower)} times as long on MXFP4 experts as on bf16
        ones."""


def engines_parallel(topic="e2e-parallel"):
    """Tokens per second of several GPUs, in each parallel mode."""
    speeds = [row for row in rows_of(topic) if row["topic"] == "speed"]
    said = []
    for way in dict.fromkeys(row["parallel"] for row in speeds):
        rows = [row for row in speeds if row["parallel"] == way]
        for phase in ("prefill", "decode"):
            none, *theirs = (
                rate(rows, phase, "vllm", *more)
                for more in ((False, "base"), (True, "base"), (True, MIXED))
            )
            idle, ours = (rate(rows, phase, "moelora", True, batch) for batch in ("base", MIXED))
            numbers = thousands(none, *theirs, idle)
            numbers += [f"**{ours:,}**" if ours else "", over(ours, theirs[1]), over(ours, none)]
            said.append([way, phase, *numbers])
    titles = ["parallel", "phase", "vLLM without LoRA", "vLLM, no adapters", "vLLM, 4 adapters"]
    titles += ["moelora, no adapters", "moelora, 4 adapters", "moelora / vLLM, 4 adapters"]
    if not said:
        return AWAITED
    made = markdown([*titles, "moelora, 4 adapters / vLLM without LoRA"], said)
    count = {2: "Two", 4: "Four"}[speeds[0].get("gpus", 2)]
    return f"{count} {card(topic)}, vLLM {load(topic)[0].get('vllm', '0.26')}:\n\n{made}"


def sglang_ranges():
    speeds = {(r["engine"], r["batch"]): r for r in cases("engines_sglang")}
    ours = speeds["moelora", "4 mixed"]
    made = {
        what: [
            ours[f"{what}_tok_s"] / speeds[key][f"{what}_tok_s"]
            for key in (
                ("sglang, virtual experts", "4 mixed"),
                ("sglang", "4 mixed"),
                ("sglang, no LoRA", "base"),
            )
        ]
        for what in ("prefill", "decode")
    }
    virtual, usual, without = (
        f"{a:.2f} and {b:.2f} times" for a, b in zip(*made.values(), strict=True)
    )
    return f"""A real SGLang server on {card("e2e-sglang")}, over HTTP, with twelve bf16 layers and
        the same adapters: with moelora prefill of {ours["prefill_tok_s"]:,} and decode of
        {ours["decode_tok_s"]:,}
        tokens/s, {virtual} SGLang's own with `--lora-use-virtual-experts`, {usual} its own without
        it, {without} SGLang's without LoRA."""


def engine_bits():
    rows = [r for r in load("e2e-invariance")[1] if r["topic"] == "bits"]
    ours, theirs = (next(r for r in rows if r["run"].startswith(e)) for e in ("moelora", "vllm"))
    text = f"""Of {ours["matched"]} different rows that came to moelora's {ours["layers"]} layers in
        both batches {ours["differing"]} had other bits, and {ours["unmatched"]} came in one alone;
        with vLLM's LoRA kernels {theirs["differing"]} of {theirs["matched"]}, and
        {theirs["unmatched"]} came in one alone, after layers that differed."""
    return wrapped(text)


LAYERS = {
    "qwen3": "Qwen3-30B-A3B",
    "gptoss": "gpt-oss-20b",
    "glm45air": "GLM-4.5-Air",
    "mixtral": "Mixtral-8x7B",
}
PEERS = {"unsloth": "Unsloth", "axolotl": "axolotl", "veomni": "VeOmni", "peft": "PEFT"}


def training_peers():
    """A training step of ours and of other projects' kernels."""
    rows = load("training")[1]
    titles = ["layer", "tokens", "moelora", "moelora, MXFP4", "torch._grouped_mm", *PEERS.values()]

    def case(row):
        return row["shape"], row["tokens"], row["rank"], row["tenants"]

    def peers(row, names):
        return [row["peers"].get(name, {}).get("fwdbwd_us", 0) for name in names]

    quantized = {case(row): row for row in rows if row["format"] == "mxfp4"}
    both = any(row["peers"] for row in quantized.values())
    if both:
        titles.append("Unsloth, MXFP4")
    said = []
    for row in rows:
        if row["peers"] and row["format"] == "bf16":
            other = quantized.get(case(row), {"ours_us": 0, "peers": {}})
            times = [other["ours_us"], *peers(row, ("yard", *PEERS))]
            times += peers(other, ("unsloth_mx",)) if both else []
            named = [LAYERS[row["shape"]], str(row["tokens"]), f"**{row['ours_us']:,.0f}**"]
            said.append([*named, *thousands(*map(round, times))])
    return f"{card('training')}:\n\n{markdown(titles, said)}"


def sampler_bits():
    """Elements of a trainer's MoE layers that differ from an engine's."""
    (row,) = (r for r in rows_of("e2e-sampler") if r["topic"] == "sampler")
    return f"""On an {card("e2e-sampler")} {row["differing"]} of {row["elements"]:,} elements of
        {row["rows"]:,} rows differ."""


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


def decode_parts():
    """Time of each kind of kernel of a decode step / time to move its bytes at memory bandwidth."""
    _, same_card = load("layer", card("kernels-decode"))
    layers = {(r["model"], r["tokens"], r["rank"]): r for r in same_card}
    parts, rows = {}, []
    for row in load("kernels-decode")[1]:
        kind = next((k for k in ("gemm", "shrink", "decode") if k in row["kernel"]), "rest")
        kinds = parts.setdefault((row["model"], row["tokens"], row["rank"]), {})
        us, mb = kinds.get(kind, (0.0, 0.0))
        kinds[kind] = us + row["us"], mb + row["dram_read_mb"] + row["dram_write_mb"]
    for case, kinds in parts.items():
        layer = layers[case]
        if "decode" in kinds or "decode" in layer["plan"]:
            continue
        spent = [
            f"{us:.0f} / {1e3 * mb / layer['streaming_gb_s']:.0f}"
            for us, mb in (kinds[kind] for kind in ("gemm", "shrink", "rest"))
        ]
        spent.append(f"{sum(us for us, _ in kinds.values()):.0f}")
        named = (cell(layer, field) for field in ("model", "tokens", "rank"))
        rows.append([*named, *spent, cell(layer, "ours_us"), cell(layer, "bound_us")])
    titles = "model, tokens, rank, products, shrinks, sort and sum, all, in a graph, bound"
    return f"{card('kernels-decode')}:\n\n{markdown(titles.split(', '), rows)}"


PICTURES = {  # {file: (topic of a file, what `moelora bench plot` takes beside it)}
    "docs/layer.png": ("layer", []),
    "docs/beside.png": ("layer", ["--picture", "beside", "--vllm-version", "0.33"]),
    "docs/arrivals.png": ("churn", ["--picture", "arrivals"]),
}
# {name: (topic of a file, its table)}
MADE = {
    "decode_parts": ("kernels-decode", decode_parts),
    "format_ranges": ("formats", format_ranges),
    "quantized_layers": ("formats", quantized_layers),
    "engine_ranges": ("e2e-fp8", engine_ranges),
    "alternatives": ("e2e-12-layers", alternatives),
    "engines_parallel": ("e2e-parallel", engines_parallel),
    "engines_parallel_4": ("e2e-parallel-4", lambda: engines_parallel("e2e-parallel-4")),
    "engine_bits": ("e2e-invariance", engine_bits),
    "training_peers": ("training", training_peers),
    "invariance_found": ("invariance", lambda: wrapped(invariance_found())),
    "sampler_bits": ("e2e-sampler", lambda: wrapped(sampler_bits())),
}
COMPUTED = {"training-memory": training_memory.table}  # not measured
SENTENCES = {
    f.__name__: f
    for f in (
        *(layer_ranges, delta_ranges, cpu_ranges, cpu_format_ranges),
        *(sglang_ranges, claim, training_alternatives),
    )
}


def wrapped(text):
    text = " ".join(text.split())
    return textwrap.fill(text, 104, break_long_words=False, break_on_hyphens=False)


def section(name):
    if name.startswith("from "):
        return source(name.removeprefix("from "))
    if name in TABLES:
        return table(name)
    if name in MADE:
        return MADE[name][1]()
    if name in COMPUTED:
        return COMPUTED[name]()
    return wrapped(SENTENCES[name]())


def filled(text):
    """A page with all of its tables regenerated."""
    between = re.compile(r"<!-- ([\w -]+) -->.*?<!-- /\1 -->", re.S)
    return between.sub(lambda m: f"<!-- {m[1]} -->\n{section(m[1])}\n<!-- /{m[1]} -->", text)


def for_site(text):
    """A page with the tables that only the site has."""
    found = re.compile(r"<!-- site: (.*?) -->")
    return found.sub(lambda m: "\n\n" + "\n\n".join(map(section, m[1].split(", "))), text)


def main():
    if sys.argv[1:] == ["--write"]:
        for page in PAGES:
            (ROOT / page).write_text(filled((ROOT / page).read_text()))
        from moelora.__main__ import main as moelora

        for picture, (topic, more) in PICTURES.items():
            if path_of(topic):
                moelora(["bench", "plot", str(path_of(topic)), "--out", picture, *more])
    else:
        print("\n\n".join(map(section, sys.argv[1:] or (*TABLES, *MADE, *SENTENCES))))


if __name__ == "__main__":
    main()
