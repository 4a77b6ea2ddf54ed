"""`moelora plot --picture arrivals`: first tokens with more adapters than slots."""

from pathlib import Path
from typing import Any

from moelora.bench import results
from moelora.bench.figure import new_figure, save

LABELS: dict[str, tuple[str, dict[str, Any]]] = {  # by policy of a case: text, style
    "resident": ("a slot for each", {"color": "0.4", "ls": "--", "lw": 1.5}),
    "ahead": ("brought ahead", {"color": "C0", "lw": 2.5}),
    "blocking": ("brought when needed", {"color": "C3", "lw": 1.5}),
}


def draw(file: str, out: str) -> Path:
    """Share of requests by time to the first token, a curve for each policy."""
    meta, cases = results.read(file)
    rows = [row for row in cases if row.get("topic") == "arrivals"]
    if not rows:
        raise ValueError(f"{file} has no case of arrivals")
    figure = new_figure(6.4, 3.8, layout="constrained")
    axes = figure.subplots()
    for row in rows:
        label, style = LABELS[row["policy"]]
        waits = sorted(row["waits_ms"])
        shares = [(n + 1) / len(waits) for n in range(len(waits))]
        axes.plot(waits, shares, label=f"{label} ({row['slots']} slots)", **style)
    axes.set(xscale="log", xlabel="time to the first token (ms)", ylabel="share of requests")
    axes.set(ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=9)
    ranks = " and ".join(str(rank) for rank in meta.get("ranks", ()))
    axes.set_title(f"{rows[0]['adapters']} adapters of rank {ranks}, {meta['device']}", fontsize=10)
    return save(figure, out)
