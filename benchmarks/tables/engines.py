"""Tables and sentences of engines: vLLM and SGLang, with and without moelora."""

from benchmarks.tables.files import load, rows_of
from benchmarks.tables.text import span, wrapped


def release(engine, topic):
    """An engine with its version, as "vLLM 0.33.0"."""
    return f"{engine} {load(topic)[0][engine.lower()]}"


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
