"""Tables and sentences of engines: vLLM and SGLang, with and without moelora."""

from benchmarks.tables.columns import MIXED, TABLES
from benchmarks.tables.files import AWAITED, card, load, rows_of
from benchmarks.tables.text import cases, markdown, over, span, thousands, wrapped
from benchmarks.tables.training import MANY_TOKENS, PEERS, training_speeds


def measured(rows, field, engine, lora, batch):
    """A field of an engine's row; None where it was not measured."""
    for row in rows:
        if (row["engine"], row["lora_enabled"], row["batch"]) == (engine, lora, batch):
            return row.get(field)


def rate(rows, phase, *engine):
    """Tokens per second of an engine; None where it was not timed."""
    return measured(rows, f"{phase}_tok_s", *engine)


# Twelve layers each; {experts: name of a table}
ENGINE_TABLES = {
    "bf16, Qwen3-30B-A3B": "engines_12_layers",
    "FP8, Qwen3-30B-A3B": "engines_fp8",
    "MXFP4, gpt-oss-20b": "engines_mxfp4",
    "NVFP4, Qwen3-30B-A3B": "engines_nvfp4",
    "INT4, Qwen3-30B-A3B": "engines_int4",
}


# SGLang's own LoRA kernels
SGLANG_WAYS = {
    "sglang, v2": "with `--lora-backend triton_v2` and `lora_triton`",
    "sglang, v2 cutedsl": "with `lora_cutedsl`",
}
SGLANG_BASE = "sglang, no LoRA", "base"
SGLANG_TABLES = {
    "bf16, Qwen3-30B-A3B": "engines_sglang",
    "FP8, Qwen3-30B-A3B": "engines_sglang_fp8",
}


def sglang_speeds(phase, table="engines_sglang"):
    """Tokens per second in a file of SGLang: (moelora's, those of SGLang's own by server, SGLang's
    without LoRA or None); None before it was measured."""
    speeds = {(r["engine"], r["batch"]): r.get(f"{phase}_tok_s") for r in cases(table)}
    own = {way: speeds[way, MIXED] for way in SGLANG_WAYS if speeds.get((way, MIXED))}
    ours = speeds.get(("moelora, v2", MIXED))
    return ours and (ours, own, speeds.get(SGLANG_BASE))


def release(engine, topic):
    """An engine with its version, as "vLLM 0.33.0"."""
    return f"{engine} {load(topic)[0][engine.lower()]}"


def gpu(topic):
    return card(topic).removeprefix("NVIDIA ")


# After tables of vLLM's speed: what benchmarks.engines.vllm_engine sets.
HOW = "vLLM ran with its compilation off (`mode` 0), with moelora and without."


def engine_ranges():
    """Tokens per second of engines with and without LoRA, over all measurements."""
    said = []
    titles = ["engine", "GPU", "experts", "layers", "phase", "engine, no adapters"]

    def row(topic, engine, experts, phase, base, theirs, ours):
        told = [release(engine, topic), gpu(topic), experts, "12", phase, *thousands(base, theirs)]
        said.append([*told, f"**{ours:,}**", over(ours, theirs)])

    for what, name in ENGINE_TABLES.items():
        for phase in ("prefill", "decode"):
            base = rate(cases(name), phase, "vllm", False, "base")
            theirs, ours = (rate(cases(name), phase, e, True, MIXED) for e in ("vllm", "moelora"))
            if ours and theirs:
                topic = TABLES[name][0]
                row(topic, "vLLM", what, phase, base, theirs, ours)
    for what, name in SGLANG_TABLES.items():
        topic = TABLES[name][0]
        for phase in ("prefill", "decode"):
            if found := sglang_speeds(phase, name):
                ours, own, base = found
                theirs = max(own.values(), default=None)  # SGLang's faster way
                row(topic, "SGLang", what, phase, base, theirs, ours)
    made = markdown([*titles, "engine, 4 adapters", "moelora, 4 adapters", "speedup"], said)
    return f"{made}\n\n{HOW}"


def engine_speeds():
    """Of vLLM in bf16, for prefill and decode: moelora with adapters over vLLM's own with them, and
    over vLLM without."""
    rows = cases("engines_12_layers")
    found = []
    for phase in ("prefill", "decode"):
        ours, theirs = (rate(rows, phase, e, True, MIXED) for e in ("moelora", "vllm"))
        found.append((ours / theirs, ours / rate(rows, phase, "vllm", False, "base")))
    return found


def claim():
    (prefill, kept_prefill), (decode, kept_decode) = engine_speeds()
    training = [
        f"{span(training_speeds(peer), 1)} times as fast as with {PEERS[peer]}'s kernels"
        for peer in ("unsloth", "axolotl")
    ]
    items = (
        f"""**What it gains**: {release("vLLM", "e2e-12-layers")} serves four adapters on all
        experts of Qwen3-30B-A3B with **{prefill:.1f} times** the prefill and
        **{decode:.1f} times** the decode throughput of vLLM's own LoRA kernels. A training step of
        one MoE layer, with an adapter of rank 16 and {MANY_TOKENS} tokens or more, is
        {" and ".join(training)}.""",
        f"""**What adapters cost**: with four adapters mixed in each batch, of ranks 16 and 64,
        prefill runs at {kept_prefill:.2f} and decode at {kept_decode:.2f} of the throughput of
        vLLM without any adapters.""",
        f"""**Measured on**: twelve of the model's 48 layers, in bf16, on {card("e2e-12-layers")},
        with vLLM's compilation off (`mode` 0); training steps on {card("training")}.""",
    )
    return "\n".join(f"- {wrapped(item)}".replace("\n", "\n  ") for item in items)


def alternatives():
    """Throughput of an engine with moelora and adapters over what one would take instead; of decode
    also without the host's share, where it was measured."""
    said = []

    def row(instead, ours, theirs, busy=""):
        ratios = [over(a, b) for a, b in zip(ours, theirs, strict=True)]
        if any(ratios):
            said.append([instead, *ratios, busy])

    phases = "prefill", "decode"
    for what, name in ENGINE_TABLES.items():
        rows = cases(name)
        if not rows:
            continue
        topic = TABLES[name][0]
        of = f"{release('vLLM', topic)}, {what}, {gpu(topic)}"
        ours = "moelora", True, MIXED
        for instead, other in (
            ("its own LoRA kernels", ("vllm", True, MIXED)),
            ("without adapters", ("vllm", False, "base")),
        ):
            speeds = [[rate(rows, phase, *who) for phase in phases] for who in (ours, other)]
            busy = over(*(measured(rows, "tpot_busy_ms", *who) for who in (other, ours)))
            row(f"{of}: {instead}", *speeds, busy)
    for what, name in SGLANG_TABLES.items():
        found = [sglang_speeds(phase, name) for phase in phases]
        if not all(found):
            continue
        topic = TABLES[name][0]
        of = f"{release('SGLang', topic)}, {what}, {gpu(topic)}"
        ours, own, base = zip(*found, strict=True)
        row(f"{of}: its own LoRA kernels", ours, [max(each.values()) for each in own])
        row(f"{of}: without adapters", ours, base)
    made = markdown(["moelora with adapters, relative to", *phases, "decode, GPU alone"], said)
    return f"{made}\n\n{HOW}"


SEQUENCES = {1: "_1", 16: "_16", 64: "", 256: "_256"}  # how the fields of so many end
STATES = {
    "of four adapters": (True, MIXED),
    "of none, LoRA on": (True, "base"),
    "LoRA off": (False, "base"),
}


def by_sequences(field, *engines):
    """A table of ratios of one engine's `field` to the other's: a row for each format and state, a
    column for each number of sequences, whose end replaces {} in `field`."""
    said = []
    for what, name in ENGINE_TABLES.items():
        rows = cases(name)
        for state, more in STATES.items():
            ratios = [
                over(*(measured(rows, field.format(end), engine, *more) for engine in engines))
                for end in SEQUENCES.values()
            ]
            if any(ratios):
                said.append([f"{what}, {gpu(TABLES[name][0])}", state, *ratios])
    if not said:
        return AWAITED
    made = markdown(["experts", "requests", *map(str, SEQUENCES)], said)
    return f"{made}\n\n{HOW}"


def decode_ratios():
    """Tokens per second of decode with the plugin over those without it, by number of sequences."""
    return by_sequences("decode{}_tok_s", "moelora", "vllm")


def decode_busy_ratios():
    """Time that the GPU is busy with a step of decode without the plugin over that with it."""
    return by_sequences("tpot_busy{}_ms", "vllm", "moelora")


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


def sglang_ranges():
    prefill, own, base = sglang_speeds("prefill")
    decode, own_decode, base_decode = sglang_speeds("decode")
    pairs = [
        *(
            (f"SGLang's own LoRA kernels {how}", own[way], own_decode[way])
            for way, how in SGLANG_WAYS.items()
            if way in own
        ),
        ("SGLang without LoRA", base, base_decode),
    ]
    compared = [
        f"{prefill / theirs:.2f} and {decode / slower:.2f} times as fast as {what}"
        for what, theirs, slower in pairs
        if theirs
    ]
    return f"""A real {release("SGLang", "e2e-sglang")} server on {card("e2e-sglang")}, over HTTP,
        with twelve bf16 layers and the same adapters: with moelora it prefills {prefill:,} and
        decodes {decode:,} tokens/s. That is {", ".join(compared[:-1])}, and {compared[-1]}."""


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
