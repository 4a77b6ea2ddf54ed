"""`moelora plot --picture beside`: the cost of adapters, in moelora's layer and in vLLM's."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moelora.bench import results
from moelora.bench.figure import new_figure, save
from moelora.bench.shapes import MODELS

# label, field of `rivals` or a case, style
BASE = ("vLLM, no adapters", "vllm_base", {"color": "0.4", "ls": "--", "lw": 1.5})
CURVES = (
    ("vLLM", "vllm_default", {"color": "C3", "marker": "s", "lw": 1.5}),
    ("moelora", "ours_us", {"color": "C0", "marker": "o", "lw": 2.5}),
)
LINES = ("-", ":", "-.", (0, (1, 3)))  # of the ranks


def draw(file: str, out: str, ranks: Sequence[int], vllm: str | None = None) -> Path:
    """Time of a layer by number of tokens, relative to vLLM's layer without adapters.

    `vllm` is the version of its kernels, if the file does not say it.
    """
    meta, cases = results.read(file)
    by_rank = {rank: by_model(cases, rank) for rank in ranks}
    for rank, panels in by_rank.items():
        if not panels:
            raise ValueError(f"{file} has no case of rank {rank} with vLLM's layers")
    models = list(by_rank[ranks[0]])
    figure = new_figure(3.4 * len(models) + 1, 3.8, layout="constrained")
    from matplotlib.ticker import ScalarFormatter

    every = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for axes, model in zip(every, models, strict=True):
        for rank, line in zip(ranks, LINES, strict=False):
            rows = by_rank[rank].get(model, [])
            tokens = [row["tokens"] for row in rows]
            for who, field, style in CURVES:
                times = [row["rivals"].get(field, row.get(field)) for row in rows]
                share = [t / row["rivals"]["vllm_base"] for t, row in zip(times, rows, strict=True)]
                label = f"{who}, adapters of rank {rank}"
                axes.plot(tokens, share, ms=4, label=label, **{**style, "ls": line})
        tokens = [row["tokens"] for row in by_rank[ranks[0]][model]]
        label, _, style = BASE
        axes.axhline(1.0, label=label, **style)
        axes.set(xscale="log", xlabel="tokens", title=MODELS[model].name, xticks=tokens)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.tick_params("x", which="minor", bottom=False)
        axes.tick_params("x", labelrotation=60, labelsize=8)
        axes.grid(axis="y", alpha=0.3)
    every[0].set(ylabel="time (lower is better)\nvLLM without adapters = 1", ylim=(0, None))
    rows = [row for panels in by_rank.values() for some in panels.values() for row in some]
    number, dtypes = (
        ", ".join(sorted({str(row[name]) for row in rows})) for name in ("adapters", "dtype")
    )
    vllm = vllm or meta.get("vllm")
    versions = f"moelora {meta['moelora']}, " + (f"kernels of vLLM {vllm}, " if vllm else "")
    title = f"One {dtypes} MoE layer, {number} adapters, {meta['device']}\n"
    figure.suptitle(f"{title}{versions}torch {meta['torch']}", fontsize=11)
    columns = (len(CURVES) * len(ranks) + 2) // 2
    figure.legend(*every[0].get_legend_handles_labels(), loc="outside lower center", ncols=columns)
    return save(figure, out)


def by_model(cases: Sequence[dict[str, Any]], rank: int) -> dict[str, list[dict[str, Any]]]:
    """{model: its cases of this rank in which vLLM was measured, by tokens}."""
    panels: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(cases, key=lambda row: row.get("tokens", 0)):
        measured = {"vllm_base", "vllm_default"} <= row.get("rivals", {}).keys()
        if measured and row.get("rank") == rank and row.get("model") in MODELS:
            panels.setdefault(row["model"], []).append(row)
    order = list(MODELS)
    return dict(sorted(panels.items(), key=lambda item: order.index(item[0])))
