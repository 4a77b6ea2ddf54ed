"""`moelora bench plot`: rooflines, the overhead of adapters, and arrivals, as pictures."""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from moelora.bench import arrivals, chart, results
from moelora.bench.results import Case

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def add_command(topics: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = topics.add_parser(
        "plot", help="draw a roofline, the overhead of adapters, or arrivals"
    )
    add = parser.add_argument
    add("files", nargs="+", help="result files")
    add("--out", "-o", default="bench.png", help="ends in .png or .svg (default: %(default)s)")
    pictures = {
        "roofline": "flops under the roof, and what adapters cost",
        "beside": "a layer with adapters beside vLLM's with and without, of one file",
        "arrivals": "times to the first token, of one file of benchmarks.churn",
    }
    about = "; ".join(f"{name}: {what}" for name, what in pictures.items())
    add("--picture", choices=pictures, default="roofline", help=f"{about} (default: %(default)s)")
    add("--rank", type=int, default=16, help="of the adapters in `beside` (default: %(default)s)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    try:
        if args.picture != "roofline" and len(args.files) > 1:
            raise ValueError(f"--picture {args.picture} draws one file, not {len(args.files)}")
        if args.picture == "beside":
            path = chart.draw(args.files[0], args.out, args.rank)
        elif args.picture == "arrivals":
            path = arrivals.draw(args.files[0], args.out)
        else:
            path = draw(args.files, args.out)
    except (OSError, ValueError, ImportError) as error:
        print(f"moelora bench plot: {error}", file=sys.stderr)
        return 2
    print(path)
    return 0


def draw(files: Sequence[str], out: str) -> Path:
    """Draw one picture of all files: on the left achieved flops over intensity under the roofline,
    on the right the overhead of adapters, also by number of adapters if some case was measured with
    several.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("pictures need matplotlib: pip install 'moelora[plot]'") from None
    loaded = [results.read(file) for file in files]
    rows = [row for _, cases in loaded for row in cases if "bound_base_us" in row]
    if not rows:
        raise ValueError("there is no layer in these files")
    counted = with_several_counts(rows)
    panels = 3 if counted else 2
    figure = Figure(figsize=(7 * panels, 5.2), layout="constrained")
    left, middle, *right = figure.subplots(1, panels)
    roofline(left, rows)
    overhead(middle, rows, "tokens")
    for axes in right:
        overhead(axes, counted, "adapters")
    devices = dict.fromkeys(meta["device"] for meta, _ in loaded)
    figure.suptitle(", ".join(devices))
    figure.savefig(out, dpi=130)
    return Path(out)


def with_several_counts(rows: Sequence[Case]) -> list[Case]:
    """The rows of cases that were measured with several numbers of adapters."""
    counts = defaultdict(set)
    for row in rows:
        counts[_case(row), row["tokens"]].add(row.get("adapters"))
    return [row for row in rows if len(counts[_case(row), row["tokens"]]) > 1]


def _case(row: Case, *more: str) -> str:
    """Name of a case, with the additional fields `more`."""
    fields = "".join(f", {row.get(name)} {name}" for name in more)
    return f"{row['model']} {row['dtype']} rank {row['rank']}{fields}"


def _varying(rows: Sequence[Case], field: str) -> tuple[str, ...]:
    """(field,) if it varies between rows, for `_case`."""
    return (field,) if len({row.get(field) for row in rows}) > 1 else ()


def roofline(axes: Axes, rows: Sequence[Case]) -> None:
    """Points are ours; the roof is the known or measured peak of the machine."""
    drawn = [row for row in rows if row.get("gflop") and row.get("streaming_gb_s")]
    peaks = {(r["streaming_gb_s"], r["mm_gflop_s"]) for r in drawn if r["mm_gflop_s"]}
    groups = defaultdict(list)
    for row in drawn:
        # flop per byte; Gflop/s
        groups[_case(row, *_varying(drawn, "adapters"))].append(
            (1e3 * row["gflop"] / row["mbytes"], 1e6 * row["gflop"] / row["ours_us"])
        )
    for case, points in groups.items():
        intensity, rate = zip(*sorted(points), strict=True)
        axes.plot(intensity, rate, "o-", ms=4, lw=0.8, label=case)
    if drawn and peaks:
        every = [x for points in groups.values() for x, _ in points]
        streaming, flops = max(peaks)
        corner = flops / streaming
        xs = [min(*every, corner) / 2, corner, max(*every, corner) * 2]
        axes.plot(xs, [min(x * streaming, flops) for x in xs], "k-", lw=1.5, label="bound")
    axes.set_title("Roofline, layer with adapters")
    if drawn:
        axes.set(xscale="log", yscale="log", xlabel="flop per byte", ylabel="Gflop/s")
        axes.legend(fontsize=7)
    else:
        axes.text(0.5, 0.5, "these files do not say\nflops and bytes", ha="center", va="center")
        axes.set_axis_off()


def overhead(axes: Axes, rows: Sequence[Case], along: Literal["tokens", "adapters"]) -> None:
    """Time with adapters relative to the same layer without, for ours and each baseline that has
    both, by number of `tokens` or of `adapters`.
    """
    curves: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    other = _varying(rows, "adapters" if along == "tokens" else "tokens")
    for row in rows:
        case = _case(row, *other)
        curves[case, "ours"][row[along]] = row["ours_us"] / row["ours_base_us"] - 1
        baselines = row["rivals"]
        for name, base in (("vllm_default", "vllm_base"), ("separate", "separate_base")):
            if name in baselines and base in baselines:
                curves[case, name][row[along]] = baselines[name] / baselines[base] - 1
    colors = {case: f"C{i % 10}" for i, case in enumerate(dict.fromkeys(c for c, _ in curves))}
    styles = {"ours": "o-", "vllm_default": "s--", "separate": "^:"}
    for (case, who), points in curves.items():
        numbers, cost = zip(*sorted(points.items()), strict=True)
        axes.plot(
            numbers,
            [100 * c for c in cost],
            styles[who],
            color=colors[case],
            ms=4,
            lw=1.2 if who == "ours" else 0.8,
            label=f"{case}, {who.replace('_', ' ')}",
        )
    scale = "log" if along == "tokens" else "linear"
    axes.set(xscale=scale, xlabel=along, ylabel="% over the layer without adapters")
    axes.set_title("Cost of adapters" if along == "tokens" else "Cost over the number of adapters")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
