"""Tables of servers under load, of every file that benchmarks.serving wrote."""

from benchmarks.tables.columns import SERVING
from benchmarks.tables.files import AWAITED, card, load, source, topics
from benchmarks.tables.text import made_of, markdown, over, thousands

ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
MODELS = {"qwen3-30b-a3b": "Qwen3-30B-A3B"}
RATES = {  # of loads: what they are called, and the field of their rows that counts
    "prefill": ("prefill", "total_token_throughput"),
    **{f"decode_{n}": (f"decode of {n}", "output_throughput") for n in (1, 16, 64, 256)},
    "saturation": ("saturation", "output_throughput"),
}


class Run:
    """An engine in a file: `rate(load)` has tokens per second of the engine without LoRA, with its
    own LoRA kernels, and with moelora."""

    def __init__(self, topic, engine):
        meta, self.rows = load(topic)
        self.topic, self.engine = topic, engine
        form = meta["format"] if meta["format"] == "bf16" else meta["format"].upper()
        self.experts = f"{form}, {MODELS.get(meta['model'], meta['model'])}"
        self.name = f"{ENGINES[engine]} {meta[engine]}"
        self.gpu = card(topic).removeprefix("NVIDIA ")

    def tokens(self, who, load, adapters):
        field = RATES[load][1]
        for row in self.rows:
            if (row["engine"], row["workload"], row["adapters"] > 0) == (who, load, adapters):
                return round(row[field])

    def rate(self, load):
        who = (f"{self.engine} without LoRA", False), (self.engine, True)
        who += ((f"{self.engine} + moelora", True),)
        return [self.tokens(engine, load, adapters) for engine, adapters in who]


def runs():
    """Those with moelora and at least one other engine."""
    found = [Run(topic, engine) for topic in topics("serving") for engine in ENGINES]
    return [run for run in found if any(run.rate(load)[2] for load in RATES)]


def serving_rates(loads=("prefill", "decode_64")):
    said = []
    for run in runs():
        for name in loads:
            base, theirs, ours = run.rate(name)
            cells = [run.name, run.gpu, run.experts, RATES[name][0], *thousands(base, theirs)]
            if ours:
                said.append([*cells, f"**{ours:,}**", over(ours, theirs)])
    titles = ["engine", "GPU", "experts", "load", "engine, no adapters", "engine, 4 adapters"]
    return markdown([*titles, "moelora, 4 adapters", "speedup"], said) if said else AWAITED


def serving_all():
    """Every row of every file."""
    return (
        "\n\n".join(
            f"{source(topic)}\n\n{made_of(SERVING, load(topic)[1])}" for topic in topics("serving")
        )
        or AWAITED
    )
