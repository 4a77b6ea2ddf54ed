"""Columns of the tables: "column: field of a case"; a column that no case has is left out."""

CASE = "model: model, tokens: tokens, rank: rank"
LAYER = """bound: bound_us, with adapters: ours_us, vLLM with: rivals.vllm_default,
    separate with: rivals.separate, ×: ratio, without: ours_base_us,
    vLLM without: rivals.vllm_base, _grouped_mm without: rivals.torch_grouped_mm_base"""
FORMATS = """weights: format, bound: bound_us, with adapters: ours_us, ×: ratio, share: share,
    in bf16: ours_bf16_us, vLLM with: rivals.vllm_lora, without: ours_base_us,
    in bf16 without: ours_bf16_base_us, vLLM without: rivals.vllm_base, error: max_err_ratio"""
NVFP4 = """weights: format, bound: bound_us, with adapters: ours_us, share: share,
    without: ours_base_us, share without: share_base"""
SERVING = """server: engine, load: workload, adapters: adapters, requests/s: request_throughput,
    of them in time: request_goodput, new tokens/s: output_throughput,
    all tokens/s: total_token_throughput, first token (ms): median_ttft_ms,
    99th percentile: p99_ttft_ms, each later token (ms): median_tpot_ms,
    99th percentile: p99_tpot_ms, refused: failed"""
SERVING_ADAPTERS = """server: engine, version: version, GPU: gpu, experts: experts, load: workload,
    adapters: adapters, on the GPU: max_loras, first token (ms): median_ttft_ms,
    99th percentile: p99_ttft_ms, each later token (ms): median_tpot_ms,
    99th percentile: p99_tpot_ms, requests/s: request_throughput,
    of them in time: request_goodput"""
CPU = """dtype: dtype, bound: bound_us, with adapters: ours_us, ×: ratio,
    fastest baseline: best_rival, without: ours_base_us,
    transformers without: rivals.grouped_mm_base"""
CPU_FORMATS = """weights: format, bound: bound_us, with adapters: ours_us, in bf16: ours_bf16_us,
    unpacked in the call: ours_unpacking_us, without: ours_base_us,
    in bf16 without: ours_bf16_base_us, unpacked in the call without: ours_unpacking_base_us"""
CPU_AMX = "weights: format, with adapters: ours_us, without: ours_base_us"
TRAINING = """layer: shape, weights: format, bound: bound_us, share: share,
    forward and backward: ours_us, of it forward: ours_fwd_us, saved (MiB): saved_mib,
    peak (MiB): peak_mib"""
ARRIVALS = """adapters come: policy, slots: slots, adapters: adapters,
    median first token (ms): ttft_ms, × resident: ttft_ms_ratio, 95th percentile (ms): ttft_p95_ms,
    median of adapters in no slot (ms): ttft_absent_ms,
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
SERVICE = "clients: clients, adapters: mode, a round (ms): ms, × mixed: ratio"
RL_GAP = "sampler: format, trainer's experts: pair, mean: mean, largest: max"
RL_PHASES = """sampler: format, answers: rows, sample (ms): sample_ms, backward (ms): backward_ms,
    optimizer (ms): optimizer_ms, update (ms): update_ms"""
RL_UPDATES = """sampler: format, while: what, MiB: mib, an update (ms): ms, shortest: low,
    longest: high, tokens/s over those without: share"""
WHOLE = "model: what, microseconds of a decode step: us, × base: ratio"
FP8, MIXED = "fp8_block", "4 mixed"
WEIGHTS = {"four bits": ("mxfp4", "int4"), "NF4": ("nf4",), "FP8": (FP8,)}
RATIOS = (
    "ratio share share_base max_err_ratio mean median most max ttft_ms_ratio tok_s_ratio".split()
)


def is_quiet(row):
    """Whether the middle 80 % of the turns differ by less than 1.4 times, so that no other work of
    the machine disturbed them."""
    spread = row["spread_us"]
    return all(spread[who][1] < 1.4 * spread[who][0] for who in ("ours", "ours_base"))


# {name: (topic of a file, which of its cases, columns)}
TABLES = {
    "layer_all": ("layer", lambda r: True, LAYER),
    "formats_all": ("formats", lambda r: True, FORMATS),
    "nvfp4": ("nvfp4", lambda r: True, NVFP4),
    "training": ("training", lambda r: True, TRAINING),
    "arrivals": ("churn", lambda r: r["topic"] == "arrivals", ARRIVALS),
    "updates": ("churn", lambda r: r["topic"] == "updates", UPDATES),
    "training_tenants": ("training-tenants", lambda r: True, TENANTS),
    "sampler_gap": ("e2e-sampler", lambda r: r["topic"] == "gap", GAP),
    "sampler_gap_fp8": ("e2e-sampler-fp8", lambda r: r["topic"] == "gap", GAP),
    "qlora_step": ("qlora-step", lambda r: "error" not in r, QLORA),
    "service": ("service", lambda r: True, SERVICE),
    "rl_gap": ("rl", lambda r: r["topic"] == "rl_gap", RL_GAP),
    "rl_phases": ("rl", lambda r: r["topic"] == "rl_phase", RL_PHASES),
    "rl_updates": ("rl", lambda r: r["topic"] in ("rl_update", "rl_send"), RL_UPDATES),
    "rl_updates_whole": ("rl-updates", lambda r: True, RL_UPDATES),
    "whole_adapters": ("whole-adapters", lambda r: r["mode"] == "graph", WHOLE),
    "cpu": ("cpu-layer", lambda r: True, CPU),
    "cpu_formats": ("cpu-formats", lambda r: True, CPU_FORMATS),
    "cpu_amx": ("cpu-amx", is_quiet, CPU_AMX),
}
