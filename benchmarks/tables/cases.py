"""Tables with a row per case of a file, and how tables and sentences are set."""

import re
import textwrap
from functools import partial

from benchmarks import ROOT
from benchmarks.tables.files import NotMeasuredError, load

# fmt: off
TITLES = {  # of fields that tables call otherwise
    "backward_ms": "backward (ms)", "batch": "sequences", "best_rival": "fastest baseline",
    "bound_us": "bound", "failed": "refused", "format": "weights", "gpu": "GPU",
    "high": "longest", "length": "tokens of each", "low": "shortest",
    "max": "largest", "max_err_ratio": "error", "max_loras": "on the GPU",
    "median_tpot_ms": "each later token (ms)", "median_ttft_ms": "first token (ms)", "mib": "MiB",
    "mode": "adapters", "most": "largest", "ms": "an update (ms)", "optimizer_ms": "optimizer (ms)",
    "ours_base_us": "without", "ours_bf16_base_us": "in bf16 without", "ours_bf16_us": "in bf16",
    "ours_fwd_us": "of it forward", "ours_unpacking_base_us": "unpacked in the call without",
    "ours_unpacking_us": "unpacked in the call", "ours_us": "with adapters",
    "output_throughput": "new tokens/s", "p99_tpot_ms": "99th percentile",
    "p99_ttft_ms": "99th percentile", "pair": "trainer and engine", "peak_gb": "peak (GB)",
    "peak_mib": "peak (MiB)", "peers.axolotl_multi.fwdbwd_us": "axolotl",
    "ratio": "×", "request_goodput": "of them in time", "request_throughput": "requests/s",
    "rivals.grouped_mm_base": "transformers without", "rivals.separate": "separate with",
    "rivals.torch_grouped_mm_base": "_grouped_mm without", "rivals.vllm_base": "vLLM without",
    "rivals.vllm_default": "vLLM with", "rivals.vllm_lora": "vLLM with", "rows": "answers",
    "sample_ms": "sample (ms)", "saved_mib": "saved (MiB)", "shape": "layer",
    "share_base": "share without",
    "tokens_per_s": "tokens/s", "total_token_throughput": "all tokens/s",
    "update_ms": "update (ms)", "us": "microseconds of a decode step",
    "weights_gb": "weights (GB)", "what": "while", "who": "prompts of", "workload": "load",
}
SERVER, STEP = {"engine": "server"}, {"ours_us": "forward and backward"}
RL, RL_GAP = {"format": "sampler"}, {"format": "sampler", "pair": "trainer's experts"}
RL_SHARE = {"format": "sampler", "share": "tokens/s over those without"}
LATENCY = "median_ttft_ms p99_ttft_ms median_tpot_ms p99_tpot_ms"
SERVING = f"""engine workload adapters request_throughput request_goodput output_throughput
    total_token_throughput {LATENCY} failed"""
SERVING_ADAPTERS = f"""engine version gpu experts workload adapters max_loras {LATENCY}
    request_throughput request_goodput"""
CPU_AMX = "format ours_us ours_base_us"
GAP, RL_UPDATE = "pair who mean median most", "format what mib ms low high share"
TABLES = {  # {name: (topic of a file, fields of its cases, titles unlike TITLES, which cases)}
    "layer_all": ("layer", """bound_us ours_us rivals.vllm_default rivals.separate ratio
        ours_base_us rivals.vllm_base rivals.torch_grouped_mm_base"""),
    "formats_all": ("formats", """format bound_us ours_us ratio share ours_bf16_us rivals.vllm_lora
        ours_base_us ours_bf16_base_us rivals.vllm_base max_err_ratio"""),
    "nvfp4": ("nvfp4", "format bound_us ours_us share ours_base_us share_base"),
    "cpu": ("cpu-layer", """dtype bound_us ours_us ratio best_rival ours_base_us
        rivals.grouped_mm_base"""),
    "cpu_formats": ("cpu-formats", """format bound_us ours_us ours_bf16_us ours_unpacking_us
        ours_base_us ours_bf16_base_us ours_unpacking_base_us"""),
    "training": ("training", """shape format bound_us share ours_us ours_fwd_us saved_mib
        peak_mib""", STEP),
    "training_tenants": ("training-tenants", """shape tenants format bound_us share ours_us
        ours_fwd_us peers.axolotl_multi.fwdbwd_us peak_mib""", STEP),
    "sampler_gap": ("e2e-sampler", GAP, {}, "topic == 'gap'"),
    "sampler_gap_fp8": ("e2e-sampler-fp8", GAP, {}, "topic == 'gap'"),
    "qlora_step": ("qlora-step", """engine layers batch length checkpointing tokens_per_s weights_gb
        peak_gb""", {}, "tokens_per_s.notna()"),
    "service": ("service", "clients mode ms ratio", {"ms": "a round (ms)", "ratio": "× mixed"}),
    "rl_gap": ("rl", "format pair mean max", RL_GAP, "topic == 'rl_gap'"),
    "rl_phases": ("rl", "format rows sample_ms backward_ms optimizer_ms update_ms", RL,
                  "topic == 'rl_phase'"),
    "rl_updates": ("rl", RL_UPDATE, RL_SHARE, "topic in ('rl_update', 'rl_send')"),
    "rl_updates_whole": ("rl-updates", RL_UPDATE, RL_SHARE),
    "portable": ("serving-portable", """engine workload total_token_throughput
        median_ttft_ms p99_ttft_ms median_tpot_ms""", SERVER,
                 "workload != 'warm_up'"),
    "whole_adapters": ("whole-adapters", "what us ratio", {"what": "model", "ratio": "× base"},
                       "mode == 'graph'"),
}
# fmt: on
RATIOS = {"ratio", "share", "share_base", "max_err_ratio", "mean", "median", "most", "max"}

SHAPES = (ROOT / "moelora/bench/shapes.py").read_text()
MODELS = {  # {key: (name, number of experts)} of moelora.bench.shapes, read from its source
    key: (name, int(experts))
    for key, name, experts in re.findall(r'"([\w.-]+)": Model\("([^"]+)", (\d+),', SHAPES)
}


def model_name(row):
    name, experts = MODELS.get(row.model, (row.model, 0))
    return f"{name} ({row.experts} experts)" if row.experts < experts else name


def cell(value, field):
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float):
        return str(value)
    text = f"{value:.{2 if field in RATIOS else 1 if value <= 99.9 else 0}f}"
    return f"**{text}**" if field == "ours_us" else text


def made_of(rows, fields, titles=None):
    """Fields that no case has are left out."""
    if "model" in rows:
        rows = rows.assign(model=rows.apply(model_name, axis=1))
    rows = rows.reindex(columns=["model", "tokens", "rank", *fields.split()])
    rows = rows.apply(lambda row: row.map(partial(cell, field=row.name), na_action="ignore"))
    return markdown(rows.dropna(axis=1, how="all").rename(columns=TITLES | (titles or {})))


def table(topic, fields, titles=None, where=None):
    meta, rows = load(topic)
    return f"{meta['device']}:\n\n{made_of(rows.query(where) if where else rows, fields, titles)}"


def markdown(table):
    if table.empty:
        raise NotMeasuredError
    align = ["left", *["right"] * (table.shape[1] - 1)]
    table = table.astype(object).fillna("-")
    return table.to_markdown(index=False, disable_numparse=True, colalign=align)


def formatted(table, form):
    return table.map(form.format, na_action="ignore").astype(object)


def span(values, digits=2):
    return f"{values.min():.{digits}f} to {values.max():.{digits}f}"


def wrapped(text):
    text = " ".join(text.split())
    return textwrap.fill(text, 104, break_long_words=False, break_on_hyphens=False)
