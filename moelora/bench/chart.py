"""`moelora bench plot --picture beside`: the cost of adapters, in our layer and in vLLM's."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moelora.bench import results
from moelora.bench.shapes import MODELS

# label, field of `rivals` or a case, style
CURVES = (
    ("vLLM with adapters", "vllm_default", {"color": "C3", "marker": "s", "lw": 1.5}),
    ("vLLM without adapters", "vllm_base", {"color": "0.4", "ls": "--", "lw": 1.5}),
    ("moelora with adapters", "ours_us", {"color": "C0", "marker": "o", "lw": 2.5}),
)


def draw(file: str, out: str, rank: int) -> Path:
    """Time of a layer by number of tokens, relative to vLLM's layer without adapters."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import ScalarFormatter
    except ImportError:
        raise ImportError("pictures need matplotlib: pip install 'moelora[plot]'") from None
    meta, cases = results.read(file)
    panels = by_model(cases, rank)
    if not panels:
        raise ValueError(f"{file} has no case of rank {rank} with vLLM's layers")
    figure = Figure(figsize=(3.4 * len(panels) + 1, 3.6), layout="constrained")
    every = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (model, rows) in zip(every, panels.items(), strict=True):
        tokens = [row["tokens"] for row in rows]
        for label, field, style in CURVES:
            times = [row["rivals"].get(field, row.get(field)) for row in rows]
            share = [us / row["rivals"]["vllm_base"] for us, row in zip(times, rows, strict=True)]
            axes.plot(tokens, share, ms=4, label=label, **style)
        axes.set(xscale="log", xlabel="tokens", title=MODELS[model].name, xticks=tokens)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.tick_params("x", which="minor", bottom=False)
        axes.tick_params("x", labelrotation=60, labelsize=8)
        axes.grid(axis="y", alpha=0.3)
    every[0].set(ylabel="time (lower is better)\nvLLM without adapters = 1", ylim=(0, None))
    number, dtypes = (
        ", ".join(sorted({str(row[name]) for rows in panels.values() for row in rows}))
        for name in ("adapters", "dtype")
    )
    title = f"One {dtypes} MoE layer, {number} adapters of rank {rank}, {meta['device']}"
    figure.suptitle(title)
    figure.legend(*every[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(out, dpi=120, metadata={"Software": None} if out.endswith(".png") else None)
    return Path(out)


def by_model(cases: Sequence[dict[str, Any]], rank: int) -> dict[str, list[dict[str, Any]]]:
    """{model: its cases of this rank in which vLLM was measured, by tokens}."""
    panels: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(cases, key=lambda row: row.get("tokens", 0)):
        measured = {"vllm_base", "vllm_default"} <= row.get("rivals", {}).keys()
        if measured and row.get("rank") == rank and row.get("model") in MODELS:
            panels.setdefault(row["model"], []).append(row)
    order = list(MODELS)
    return dict(sorted(panels.items(), key=lambda item: order.index(item[0])))
