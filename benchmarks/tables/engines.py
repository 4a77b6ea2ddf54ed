"""Tables and sentences of engines: vLLM and SGLang, with and without moelora."""

import pandas as pd

from benchmarks.tables.cases import formatted, markdown, span, wrapped
from benchmarks.tables.files import load, topics
from benchmarks.tables.serving import BASE, CLAIMED_LOADS, OURS, RUN, THEIRS, rates

# Files of answers: engine, what it ran, topic, the run with moelora and the one without.
WITH_REFERENCE = (
    ("vLLM", "bf16, attention too", "e2e-answers", "moelora", "vllm"),
    ("SGLang", "bf16", "e2e-answers-sglang", "moelora, v2", "sglang, v2"),
    ("SGLang", "FP8", "e2e-answers-sglang-fp8", "moelora, v2", "sglang, v2"),
    ("SGLang", "NVFP4", "e2e-answers-sglang-marlin", "moelora, marlin", "sglang, marlin"),
)
ANSWERS = (
    *WITH_REFERENCE,
    ("vLLM", "FP8", "e2e-sampler-fp8", "moelora", "vllm"),
    ("SGLang", "bf16, its defaults", "e2e-answers-sglang-alone", "moelora, v2", None),
)
PARALLEL = {  # ways of benchmarks.vllm_parallel: how vLLM is told, topic of its servers
    "tensor": ("--tensor-parallel-size", "parallel-tensor-2"),
    "expert": ("--tensor-parallel-size, --enable-expert-parallel", "parallel-expert-2"),
    "fully sharded": ("--tensor-parallel-size, --fully-sharded-loras", None),
    "data and expert": ("--data-parallel-size, --enable-expert-parallel", "parallel-data-2"),
}
UNTRIED = "untried"


def answers(files):
    """Of each that is there: what its row is called, its cases, and its two runs."""
    for engine, form, topic, *runs in files:
        if topic in topics("e2e"):
            meta, rows = load(topic)
            yield f"{engine} {meta[engine.lower()]}, {form}", rows, *runs


def equal(compared):
    return (compared.prompt_max == 0).all() and (compared.same_tokens == compared.requests).all()


def output_differences():
    """Of the base model and four adapters: prompts' log-probabilities, and greedy replies, with
    moelora and without."""
    said = []
    for name, rows, ours, theirs in answers(ANSWERS):
        both = rows[rows.compared == f"{ours}, {theirs}"]
        row = {"engine, experts": name}
        if len(both):
            row["median"] = span(both.prompt_median, 3)
            row["largest"] = f"{both.prompt_max.max():.1f}"
            requests, same, ties = both[["requests", "same_tokens", "near_ties"]].sum()
            row["equal replies"] = f"{same} of {requests}"
            row["part at a near-tie"] = f"{ties} of {requests}"
            row["at a wider gap"] = f"{requests - same - ties} of {requests}"
            row["a near-tie: up to"] = f"{both.near_tie.iloc[0]:.1f}"
        kept = equal(rows[rows.compared == f"{ours}: mixed, each alone"])
        row["a request alone and in a mixed batch: equal"] = "yes" if kept else "no"
        said.append(row)
    return markdown(pd.DataFrame(said))


def reference_distances():
    """Medians of the base model and of each adapter: distances to the model in float32 with merged
    adapters, and how far each adapter moves what an engine answers."""
    said = []
    for name, rows, ours, theirs in answers(WITH_REFERENCE):
        moved = rows.moved[(rows.topic == "acts") & (rows.compared == ours)]
        said.append([name, span(rows[ours], 3), span(rows[theirs], 3), span(moved, 1)])
    titles = ["engine, experts", "with moelora", "the engine's own kernels", "without the adapter"]
    return markdown(pd.DataFrame(said, columns=titles))


def parallel_modes():
    """For each way that GPUs share a model: answers, bits and speeds, or that they are untried. Of
    two cells joined by a slash the first is moelora's."""
    said = []
    for way, (options, servers) in PARALLEL.items():
        names = [f"{engine} {way}" for engine in ("moelora", "vllm")]
        found = {gpus: parallel_answers(f"e2e-answers-parallel-{gpus}", names) for gpus in "24"}
        found = {gpus: cells for gpus, cells in found.items() if cells} or {"-": [UNTRIED] * 3}
        for gpus, cells in found.items():
            fast = [UNTRIED] * 2 if gpus == "4" else parallel_speeds(servers)
            said.append([f"`{options}`", gpus, *cells, *fast])
    titles = ["options", "GPUs", "from float32", "mixed and alone differ by"]
    titles += ["rows of layers with other bits", *CLAIMED_LOADS]
    return markdown(pd.DataFrame(said, columns=titles))


def parallel_speeds(topic):
    if topic not in topics("parallel"):
        return [UNTRIED] * len(CLAIMED_LOADS)
    speeds = rates([topic]).droplevel(RUN).reindex(CLAIMED_LOADS)[[BASE, THEIRS, OURS]]
    return formatted(speeds, "{:,.0f}").fillna(UNTRIED).agg(" / ".join, axis=1)


def parallel_answers(topic, names):
    """Three cells of a row, each for both engines: distances from float32, differences between
    mixed batches and batches of one, and how many rows of MoE layers have other bits; None if the
    file has no answers of this way."""
    rows = load(topic)[1] if topic in topics("e2e") else pd.DataFrame(columns=["compared"])
    alone = [rows[rows.compared == f"{name}: mixed, each alone"] for name in names]
    if any(compared.empty for compared in alone):
        return None
    mixed = ["nothing" if equal(part) else span(part.prompt_median, 3) for part in alone]
    bits = pd.concat(
        rows[(rows.topic == "bits") & (rows.run == f"{name}, eager")] for name in names
    )
    bits = [f"{row.differing} of {row.matched}" for row in bits.itertuples() if row.matched > 0]
    distances = [span(rows[name], 3) for name in names] if names[0] in rows else [UNTRIED]
    return [" / ".join(distances), " / ".join(mixed), " / ".join(bits) or UNTRIED]


def engine_bits():
    _, rows = load("e2e-invariance")
    rows = rows[rows.topic == "bits"]
    ours, theirs = (rows[rows.run.str.startswith(name)].iloc[0] for name in ("moelora", "vllm"))
    return wrapped(f"""Of {ours.matched} different rows that came to moelora's {ours.layers} layers
        in both batches {ours.differing} had other bits, and {ours.unmatched} came in one of them;
        with vLLM's LoRA kernels {theirs.differing} of {theirs.matched}, and {theirs.unmatched} came
        in one of them, after layers that differed.""")
