"""Tables and sentences of engines: vLLM and SGLang, with and without moelora."""

from benchmarks.tables.files import load, path_of, rows_of
from benchmarks.tables.serving import Run
from benchmarks.tables.text import markdown, span, thousands, wrapped


def release(engine, topic):
    """An engine with its version, as "vLLM 0.33.0"."""
    return f"{engine} {load(topic)[0][engine.lower()]}"


# Files of answers: engine, what it ran, topic, the run with moelora and the one without.
BOTH = (("vLLM", "FP8", "e2e-sampler-fp8", "moelora", "vllm"),)
ALONE = (("SGLang", "bf16, its defaults", "e2e-answers-sglang-alone", "moelora, v2", None),)
WITH_REFERENCE = (
    ("vLLM", "bf16, attention too", "e2e-answers", "moelora", "vllm"),
    ("SGLang", "bf16", "e2e-answers-sglang", "moelora, v2", "sglang, v2"),
    ("SGLang", "FP8", "e2e-answers-sglang-fp8", "moelora, v2", "sglang, v2"),
    ("SGLang", "NVFP4", "e2e-answers-sglang-marlin", "moelora, marlin", "sglang, marlin"),
)
PARALLEL = {  # ways of benchmarks.vllm_parallel: how vLLM is told, topic of its servers
    "tensor": ("--tensor-parallel-size", "parallel-tensor-2"),
    "expert": ("--tensor-parallel-size, --enable-expert-parallel", "parallel-expert-2"),
    "fully sharded": ("--tensor-parallel-size, --fully-sharded-loras", None),
    "data and expert": ("--data-parallel-size, --enable-expert-parallel", "parallel-data-2"),
}
UNTRIED = "untried"


def output_differences():
    """Of the base model and four adapters: prompts' log-probabilities, and greedy replies, with
    moelora and without."""
    said = []
    for engine, form, topic, ours, theirs in (*WITH_REFERENCE, *BOTH, *ALONE):
        if path_of(topic) is None:
            continue
        answers = [row for row in rows_of(topic) if row["topic"] == "answers"]
        both = [row for row in answers if row["compared"] == f"{ours}, {theirs}"]
        alone = [row for row in answers if row["compared"] == f"{ours}: mixed, each alone"]
        cells = differing_replies(both) if theirs else ["-"] * 6
        kept = all(
            row["prompt_max"] == 0 and row["same_tokens"] == row["requests"] for row in alone
        )
        said.append([f"{release(engine, topic)}, {form}", *cells, "yes" if kept else "no"])
    titles = ["engine, experts", "median", "largest", "equal replies", "part at a near-tie"]
    titles += ["at a wider gap", "a near-tie: up to", "a request alone and in a mixed batch: equal"]
    return markdown(titles, said)


def differing_replies(both):
    """Cells of an engine with moelora and without."""
    requests, same, ties = (
        sum(row[name] for row in both) for name in ("requests", "same_tokens", "near_ties")
    )
    middle = span([row["prompt_median"] for row in both], 3)
    most = f"{max(row['prompt_max'] for row in both):.1f}"
    counts = [f"{n} of {requests}" for n in (same, ties, requests - same - ties)]
    return [middle, most, *counts, f"{both[0]['near_tie']:.1f}"]


def reference_distances():
    """Medians of the base model and of each adapter: distances to the model in float32 with merged
    adapters, and how far each adapter moves what an engine answers."""
    said = []
    for engine, form, topic, ours, theirs in WITH_REFERENCE:
        rows = rows_of(topic)
        distances = [row for row in rows if row["topic"] == "distance" and ours in row]
        spans = (span([row[run] for row in distances], 3) for run in (ours, theirs))
        moved = [r["moved"] for r in rows if r["topic"] == "acts" and r["compared"] == ours]
        said.append([f"{release(engine, topic)}, {form}", *spans, span(moved, 1)])
    titles = ["engine, experts", "with moelora", "the engine's own kernels", "without the adapter"]
    return markdown(titles, said)


def parallel_modes():
    """For each way that GPUs share a model: answers, bits and speeds, or that they are untried. Of
    two cells joined by a slash the first is moelora's."""
    said = []
    for way, (options, speeds) in PARALLEL.items():
        names = [f"{engine} {way}" for engine in ("moelora", "vllm")]
        found = {gpus: parallel_answers(f"e2e-answers-parallel-{gpus}", names) for gpus in (2, 4)}
        cells = [[str(gpus), *answers] for gpus, answers in found.items() if answers]
        run = Run(speeds, "vllm") if speeds and path_of(speeds) else None
        rates = [run.rate(name) if run else () for name in ("prefill", "decode_64")]
        fast = [" / ".join(cell or "-" for cell in thousands(*rate)) or UNTRIED for rate in rates]
        for row in cells or [["-", *[UNTRIED] * 3]]:
            said.append([f"`{options}`", *row, *(fast if row[0] in "-2" else ["-", "-"])])
    titles = ["options", "GPUs", "from float32", "mixed and alone differ by"]
    titles += ["rows of layers with other bits", "prefill", "decode of 64"]
    return markdown(titles, said)


def parallel_answers(topic, names):
    """Three cells of a row, each for both engines: distances from float32, differences between
    mixed batches and batches of one, and how many rows of MoE layers have other bits; None if the
    file has no answers of this way."""
    rows, mixed, bits = rows_of(topic), [], []
    for name in names:
        compared = [r for r in rows if r.get("compared") == f"{name}: mixed, each alone"]
        compared = [r for r in compared if r["topic"] == "answers"]
        if not compared:
            return None
        equal = all(r["prompt_max"] == 0 and r["same_tokens"] == r["requests"] for r in compared)
        mixed.append("nothing" if equal else span([r["prompt_median"] for r in compared], 3))
        found = [r for r in rows if r["topic"] == "bits" and r["run"] == f"{name}, eager"]
        bits += [f"{r['differing']} of {r['matched']}" for r in found if r.get("matched")]
    far = [row for row in rows if row["topic"] == "distance" and names[0] in row]
    distance = " / ".join(span([row[name] for row in far], 3) for name in names) if far else "-"
    return [distance, " / ".join(mixed), " / ".join(bits) or "-"]


def engine_bits():
    rows = [r for r in load("e2e-invariance")[1] if r["topic"] == "bits"]
    ours, theirs = (next(r for r in rows if r["run"].startswith(e)) for e in ("moelora", "vllm"))
    text = f"""Of {ours["matched"]} different rows that came to moelora's {ours["layers"]} layers in
        both batches {ours["differing"]} had other bits, and {ours["unmatched"]} came in one of
        them; with vLLM's LoRA kernels {theirs["differing"]} of {theirs["matched"]}, and
        {theirs["unmatched"]} came in one of them, after layers that differed."""
    return wrapped(text)
