"""Tables and sentences of engines: vLLM and SGLang, with and without moelora."""

from benchmarks.tables.columns import MIXED
from benchmarks.tables.files import AWAITED, card, load, rows_of
from benchmarks.tables.text import markdown, over, span, thousands, wrapped


def measured(rows, field, engine, lora, batch):
    """A field of an engine's row; None where it was not measured."""
    for row in rows:
        if (row["engine"], row["lora_enabled"], row["batch"]) == (engine, lora, batch):
            return row.get(field)


def rate(rows, phase, *engine):
    """Tokens per second of an engine; None where it was not timed."""
    return measured(rows, f"{phase}_tok_s", *engine)


def release(engine, topic):
    """An engine with its version, as "vLLM 0.33.0"."""
    return f"{engine} {load(topic)[0][engine.lower()]}"


# After tables of vLLM's speed: what benchmarks.engines.vllm_engine sets.
HOW = "vLLM ran with its compilation off (`mode` 0), with moelora and without."


def engines_parallel(topic):
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
    count = {2: "Two", 4: "Four"}[speeds[0]["gpus"]]
    return f"{count} {card(topic)}, vLLM {load(topic)[0]['vllm']}:\n\n{made}\n\n{HOW}"


def sglang_answers():
    rows = rows_of("e2e-answers-sglang")
    distances = [row for row in rows if row["topic"] == "distance"]
    ours, theirs = (span([row[e] for row in distances], 3) for e in ("moelora, v2", "sglang, v2"))
    moved = span([row["moved"] for row in rows if row["topic"] == "acts"], 1)
    answers = [row for row in rows if row["topic"] == "answers"]
    both = [row for row in answers if row["compared"] == "moelora, v2, sglang, v2"]
    alone = [row for row in answers if row["compared"] == "moelora, v2: mixed, each alone"]
    wider = sum(row["requests"] - row["same_tokens"] - row["near_ties"] for row in both)
    same = all(row["requests"] == row["same_tokens"] for row in alone)
    return f"""In {release("SGLang", "e2e-answers-sglang")} log-probabilities differ from
        transformers in float32 with merged adapters by medians of {ours}, SGLang's own by {theirs},
        where the models themselves differ by {moved}. Greedy replies diverge from SGLang's at
        near-ties, and in {wider} of {sum(row["requests"] for row in both)} requests at a wider
        gap. A request gets {"the same" if same else "another reply"} in a mixed batch and alone."""


def engine_bits():
    rows = [r for r in load("e2e-invariance")[1] if r["topic"] == "bits"]
    ours, theirs = (next(r for r in rows if r["run"].startswith(e)) for e in ("moelora", "vllm"))
    text = f"""Of {ours["matched"]} different rows that came to moelora's {ours["layers"]} layers in
        both batches {ours["differing"]} had other bits, and {ours["unmatched"]} came in one of
        them; with vLLM's LoRA kernels {theirs["differing"]} of {theirs["matched"]}, and
        {theirs["unmatched"]} came in one of them, after layers that differed."""
    return wrapped(text)


SUITE_TOPICS = "vllm-suite-models", "vllm-suite-formats", "vllm-suite-more"
SUITE_CASES = {
    "bf16": "Qwen3-MoE, bf16",
    "olmoe": "OLMoE, bf16",
    "mixtral": "Mixtral, bf16",
    "mxfp4": "gpt-oss, MXFP4",
    "fp8": "Qwen3-MoE, FP8, blocks",
    "fp8_channel": "Qwen3-MoE, FP8, channels",
    "fp8_tensor": "Qwen3-MoE, FP8, tensors",
    "int4": "Qwen3-MoE, INT4, compressed-tensors",
    "gptq": "Qwen3-MoE, INT4, GPTQ",
    "awq": "Qwen3-MoE, INT4, AWQ",
    "nvfp4": "Qwen3-MoE, NVFP4",
}


def suite_ratios():
    """Small models of each architecture and format: tokens per second of four mixed adapters with
    the plugin over those without."""
    rows = [row for topic in SUITE_TOPICS for row in rows_of(topic)]
    said = []
    for case, what in SUITE_CASES.items():
        found = [row for row in rows if row.get("model") == case]
        ratios = [
            over(*(rate(found, phase, engine, True, MIXED) for engine in ("moelora", "vllm")))
            for phase in ("prefill", "decode")
        ]
        if any(ratios):
            said.append([what, *ratios])
    if not said:
        return AWAITED
    return f"{markdown(['model, experts', 'prefill', 'decode'], said)}\n\n{HOW}"
