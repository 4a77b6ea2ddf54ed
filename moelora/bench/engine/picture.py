"""The picture of `moelora bench engine`: tokens per second of its engines."""

from __future__ import annotations

from pathlib import Path

from moelora.bench import results
from moelora.bench.figure import new_figure

# label, (engine, LoRA enabled, adapters in the batch), color
BARS = (
    ("vLLM without LoRA", ("vllm", False, False), "0.6"),
    ("vLLM with adapters", ("vllm", True, True), "C3"),
    ("moelora with adapters", ("moelora", True, True), "C0"),
)


def draw(file: str | Path, out: str | Path) -> Path:
    """A bar for each engine, of prefill and of decode; ValueError if the file has no engine."""
    meta, cases = results.read(file)
    rates = {
        (row["engine"], row["lora_enabled"], row["batch"] != "base"): row
        for row in cases
        if row.get("topic") == "speed" and row.get("engine") in ("vllm", "moelora")
    }
    bars = [(label, rates[key], color) for label, key, color in BARS if key in rates]
    if not bars:
        raise ValueError(f"{file} has no engine of vLLM")
    figure = new_figure(9, 1.6 + 0.5 * len(bars), layout="constrained")
    from matplotlib.ticker import MaxNLocator

    for axes, phase in zip(figure.subplots(1, 2, sharey=True), ("prefill", "decode"), strict=True):
        speeds = [row.get(f"{phase}_tok_s", 0) for _, row, _ in bars]
        drawn = axes.barh([bar[0] for bar in bars], speeds, color=[bar[2] for bar in bars])
        axes.bar_label(drawn, fmt="{:,.0f}", padding=3)
        axes.margins(x=0.25)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set(title=phase, xlabel="tokens per second (higher is better)")
        axes.grid(axis="x", alpha=0.3)
    figure.axes[0].invert_yaxis()
    mixed = next((row["batch"].split()[0] for _, row, _ in bars if row["batch"] != "base"), "no")
    model = f"{Path(meta['model']).name}, " if "model" in meta else ""
    versions = f"moelora {meta['moelora']}, vLLM {meta['vllm']}, torch {meta['torch']}"
    figure.suptitle(f"{model}{mixed} adapters mixed, {meta['device']}\n{versions}", fontsize=11)
    figure.savefig(out, dpi=120)
    return Path(out)
