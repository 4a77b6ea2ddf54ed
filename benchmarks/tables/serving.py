"""Tables of servers under load, of every file that benchmarks.serving wrote."""

import pandas as pd

from benchmarks.tables import cases
from benchmarks.tables.cases import formatted, made_of, markdown, span, wrapped
from benchmarks.tables.files import NotMeasuredError, load, path_of, read, source, topics
from benchmarks.tables.training import MANY_TOKENS, PEERS, training_speeds

ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
MODELS = {"qwen3-30b-a3b": "Qwen3-30B-A3B"}
FORMATS = {"bf16": "bf16", "modelopt": "NVFP4 of ModelOpt"}  # others in capitals
RUNNERS = {"marlin", "cutedsl"}  # of experts, in the name of a server
DECODES = {f"decode_{n}": f"decode of {n}" for n in (1, 16, 64, 256)}
LOADS = {"prefill": "prefill", **DECODES}
CLAIMED_LOADS = ["prefill", "decode of 64"]
SERVERS = {  # {(what follows an engine's name, whether requests have adapters): column}
    ("without LoRA", False): "engine, no adapters",
    ("", True): "engine, 4 adapters",
    ("+ moelora", True): "moelora, 4 adapters",
    ("", False): "engine, LoRA on",
    ("+ moelora", False): "moelora, LoRA on",
}
BASE, THEIRS, OURS, THEIRS_UNUSED, OURS_UNUSED = SERVERS.values()
RUN = ["topic", "engine", "GPU", "experts"]


def experts(meta):
    form = FORMATS.get(meta["format"], meta["format"].upper())
    depth = f", {meta['layers']} of its layers" if meta.get("layers") else ""
    return f"{form}, {MODELS.get(meta['model'], meta['model'])}{depth}"


def gpu(meta):
    return meta["device"].removeprefix("NVIDIA ")


def rates(files):
    """Tokens per second: a row per file with four adapters, engine and load, a column per server.
    They are of median times, since kernels that an engine compiles while it serves stall some
    requests of a run: of prompts that come together, or of a token of each sequence."""
    found = []
    for topic in files:
        meta, rows = load(topic)
        for _, row in rows.iterrows():
            engine, *more = [word for word in row.engine.split() if word not in RUNNERS]
            who = SERVERS.get((" ".join(more), row.adapters > 0))
            name = LOADS.get(row.workload)
            if who and name and engine in ENGINES and meta.get("adapters", 4) == 4:
                tokens, ms = row.input + row.output, row.median_ttft_ms
                if row.workload in DECODES:
                    tokens, ms = 1, row.median_tpot_ms
                speed = row.concurrency * tokens * 1000 / ms
                run = [topic, f"{ENGINES[engine]} {meta[engine]}", gpu(meta), experts(meta)]
                found.append([*run, name, who, speed])
    if not found:
        raise NotMeasuredError("servers with four adapters")
    rows = pd.DataFrame(found, columns=[*RUN, "load", "server", "speed"])
    rows["load"] = pd.Categorical(rows.load, LOADS.values())
    speeds = rows.pivot(index=[*RUN, "load"], columns="server", values="speed").sort_index()
    return speeds.reindex(columns=SERVERS.values())


def serving_rates():
    speeds = rates(topics("serving")).query("load in @CLAIMED_LOADS").dropna(subset=OURS)
    said = formatted(speeds[[BASE, THEIRS, OURS]], "{:,.0f}")
    said[OURS] = "**" + said[OURS] + "**"
    said["speedup"] = formatted(speeds[OURS] / speeds[THEIRS], "{:.2f}")
    return markdown(said.reset_index().drop(columns="topic"))


def ratios(pairs):
    """Of each file and engine, speeds of two servers over each other, by load."""
    speeds = rates(topics("serving"))
    found = {what: speeds[ours] / speeds[theirs] for what, (ours, theirs) in pairs.items()}
    found = pd.DataFrame(found).stack().unstack("load").reindex(columns=LOADS.values())
    said = formatted(found, "{:.2f}").rename_axis([*RUN, "what"]).reset_index()
    said["run"] = said.engine + ", " + said.experts + ", " + said.GPU
    return said


def alternatives():
    """Throughput of an engine with moelora and adapters over what one would take instead."""
    said = ratios({"its own LoRA kernels": (OURS, THEIRS), "without adapters": (OURS, BASE)})
    said["moelora with adapters, relative to"] = said.run + ": " + said.what
    said = said[["moelora with adapters, relative to", *CLAIMED_LOADS]]
    return markdown(said.dropna(subset=CLAIMED_LOADS, how="all"))


def decode_ratios():
    """Tokens per second of decode with the plugin over those without it, by number of sequences."""
    pairs = {"of four adapters": (OURS, THEIRS)}
    said = ratios(pairs | {"of none, LoRA on": (OURS_UNUSED, THEIRS_UNUSED)})
    titles = {"run": "experts", "what": "requests"}
    titles |= {name: name.removeprefix("decode of ") for name in DECODES.values()}
    said = said.dropna(subset=[*DECODES.values()], how="all")
    return markdown(said[[*titles]].rename(columns=titles))


def claim():
    """What README says first: of vLLM on whole models, and of training."""
    speeds = rates(topics("serving")).dropna(subset=[BASE, THEIRS, OURS]).reset_index()
    mine = speeds[speeds.engine.str.startswith("vLLM") & ~speeds.experts.str.contains("layers")]

    def over(other, digits):
        loads = (mine[OURS] / mine[other]).groupby(mine.load, observed=True)
        return [span(loads.get_group(name), digits) for name in CLAIMED_LOADS]

    gains, costs = over(THEIRS, 1), over(BASE, 2)
    served = [one.split(", ") for one in mine.experts.unique()]
    models = {name: [form for form, of in served if of == name] for _, name in served}
    models = " and ".join(f"{name} ({', '.join(forms)})" for name, forms in models.items())
    steps = [
        f"{span(training_speeds(peer), 1)} times as fast as with {PEERS[peer]}'s kernels"
        for peer in ("unsloth", "axolotl")
    ]
    items = [
        f"""**What it gains**: {mine.engine.iloc[0]} serves four adapters on all experts of
        {models} with **{gains[0]} times** the prefill and **{gains[1]} times** the decode
        throughput of vLLM's own LoRA kernels. A training step of one MoE layer, with an adapter of
        rank 16 and {MANY_TOKENS} tokens or more, is {" and ".join(steps)}.""",
        f"""**What adapters cost**: with four adapters mixed in each batch, of ranks 16 and 64,
        prefill runs at {costs[0]} and decode at {costs[1]} of the throughput of vLLM without any
        adapters.""",
        f"""**Measured on**: servers of whole models on
        {load(mine.topic.iloc[0])[0]["device"]}; training steps on
        {load("training")[0]["device"]}.""",
    ]
    return "\n".join(f"- {wrapped(item)}".replace("\n", "\n  ") for item in items)


def serving_all():
    """Every row of every file."""
    return "\n\n".join(
        f"{source(topic)}\n\n{made_of(load(topic)[1], cases.SERVING, cases.SERVER)}"
        for topic in topics("serving")
    )


def serving_adapters():
    """Loads of every file in which requests of some load choose among adapters at random."""
    found = []
    for topic in topics("serving"):
        if not any("zipf" in row for row in read(path_of(topic))[1]):
            continue
        meta, rows = load(topic)
        versions = [meta.get(name.split()[0]) for name in rows.engine]
        rows = rows.assign(version=versions, gpu=gpu(meta), experts=experts(meta))
        found.append(rows[(rows.adapters > 0) & (rows.workload != "warm_up")])
    if not found:
        raise NotMeasuredError("requests that choose among adapters")
    return made_of(pd.concat(found), cases.SERVING_ADAPTERS, cases.SERVER)
