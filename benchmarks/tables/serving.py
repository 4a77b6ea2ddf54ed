"""Tables of servers under load, of every file that benchmarks.serving wrote."""

import itertools

from benchmarks.tables.columns import SERVING, SERVING_ADAPTERS
from benchmarks.tables.files import AWAITED, card, load, source, topics
from benchmarks.tables.text import made_of, markdown, over, span, thousands, wrapped
from benchmarks.tables.training import MANY_TOKENS, PEERS, training_speeds

CLAIMED = "Qwen3-30B-A3B"
SEQUENCES = (1, 16, 64, 256)
ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
MODELS = {"qwen3-30b-a3b": "Qwen3-30B-A3B"}
# Of loads: what they are called, and tokens per second of a row. Decodes take the median time of a
# token, since kernels that an engine compiles while it serves stall some requests of a run.
RATES = {
    "prefill": ("prefill", lambda row: row["total_token_throughput"]),
    **{
        f"decode_{n}": (
            f"decode of {n}",
            lambda row: row["concurrency"] * 1000 / row["median_tpot_ms"],
        )
        for n in SEQUENCES
    },
    "saturation": ("saturation", lambda row: row["output_throughput"]),
}


def experts(meta):
    form = meta["format"] if meta["format"] == "bf16" else meta["format"].upper()
    depth = f", {meta['layers']} of its layers" if meta.get("layers") else ""
    return f"{form}, {MODELS.get(meta['model'], meta['model'])}{depth}"


class Run:
    """An engine in a file: `rate(load)` has tokens per second of the engine without LoRA, with its
    own LoRA kernels, and with moelora."""

    def __init__(self, topic, engine):
        meta, self.rows = load(topic)
        self.topic, self.engine = topic, engine
        self.adapters, self.experts = meta.get("adapters", 4), experts(meta)
        self.name = f"{ENGINES[engine]} {meta[engine]}"
        self.gpu = card(topic).removeprefix("NVIDIA ")

    def tokens(self, who, load, adapters):
        for row in self.rows:
            if (row["engine"], row["workload"], row["adapters"] > 0) == (who, load, adapters):
                return round(RATES[load][1](row))

    def rate(self, load):
        who = (f"{self.engine} without LoRA", False), (self.engine, True)
        who += ((f"{self.engine} + moelora", True),)
        return [self.tokens(engine, load, adapters) for engine, adapters in who]


def runs():
    """Those with four adapters, moelora and at least one other engine."""
    found = [Run(topic, engine) for topic in topics("serving") for engine in ENGINES]
    found = [run for run in found if run.adapters == 4]
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


def alternatives():
    """Throughput of an engine with moelora and adapters over what one would take instead."""
    said, loads = [], ("prefill", "decode_64")
    for run in runs():
        base, theirs, ours = zip(*map(run.rate, loads), strict=True)
        for instead, other in (("its own LoRA kernels", theirs), ("without adapters", base)):
            if any(ratios := list(map(over, ours, other))):
                said.append([f"{run.name}, {run.experts}, {run.gpu}: {instead}", *ratios])
    titles = ["moelora with adapters, relative to", *(RATES[load][0] for load in loads)]
    return markdown(titles, said) if said else AWAITED


def decode_ratios():
    """Tokens per second of decode with the plugin over those without it, by number of sequences."""
    said = []
    for run in runs():
        for state, adapters in (("of four adapters", True), ("of none, LoRA on", False)):
            both = (f"{run.engine} + moelora", run.engine)
            ratios = [
                over(*(run.tokens(who, f"decode_{n}", adapters) for who in both)) for n in SEQUENCES
            ]
            if any(ratios):
                said.append([f"{run.name}, {run.experts}, {run.gpu}", state, *ratios])
    titles = ["experts", "requests", *map(str, SEQUENCES)]
    return markdown(titles, said) if said else AWAITED


def claim():
    """What README says first: of vLLM in bf16, and of training."""
    training = [
        f"{span(training_speeds(peer), 1)} times as fast as with {PEERS[peer]}'s kernels"
        for peer in ("unsloth", "axolotl")
    ]
    trains = f"""A training step of one MoE layer, with an adapter of rank 16 and {MANY_TOKENS}
        tokens or more, is {" and ".join(training)}."""
    items = [f"**What it gains**: {trains}", f"**Measured on**: {card('training')}."]
    mine = [run for run in runs() if run.engine == "vllm" and run.experts.endswith(CLAIMED)]
    rates = [[run.rate(load) for load in ("prefill", "decode_64")] for run in mine]
    if rates and all(map(all, itertools.chain(*rates))):
        gains, costs = (
            [span([run[load][2] / run[load][i] for run in rates], digits) for load in (0, 1)]
            for i, digits in ((1, 1), (0, 2))
        )
        formats = " and ".join(run.experts.partition(",")[0] for run in mine)
        items = [
            f"""**What it gains**: {mine[0].name} serves four adapters on all experts of
            {CLAIMED} with **{gains[0]} times** the prefill and **{gains[1]} times** the decode
            throughput of vLLM's own LoRA kernels. {trains}""",
            f"""**What adapters cost**: with four adapters mixed in each batch, of ranks 16 and 64,
            prefill runs at {costs[0]} and decode at {costs[1]} of the throughput of vLLM without
            any adapters.""",
            f"""**Measured on**: the whole model, in {formats}, on {card(mine[0].topic)}; training
            steps on {card("training")}.""",
        ]
    return "\n".join(f"- {wrapped(item)}".replace("\n", "\n  ") for item in items)


def serving_all():
    """Every row of every file."""
    return (
        "\n\n".join(
            f"{source(topic)}\n\n{made_of(SERVING, load(topic)[1])}" for topic in topics("serving")
        )
        or AWAITED
    )


def serving_adapters():
    """Loads whose requests choose among adapters at random, of every file."""
    rows = []
    for topic in topics("serving"):
        meta, cases = load(topic)
        gpu = card(topic).removeprefix("NVIDIA ")
        for row in (case for case in cases if "zipf" in case):
            version = meta.get(row["engine"].split()[0])
            rows.append(row | {"gpu": gpu, "experts": experts(meta), "version": version})
    return made_of(SERVING_ADAPTERS, rows) if rows else AWAITED
