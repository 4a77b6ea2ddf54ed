"""`moelora plot`, also `moelora bench plot`: pictures of result files."""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from moelora.bench import arrivals, chart, results
from moelora.bench.engine import picture
from moelora.bench.figure import new_figure
from moelora.bench.results import Case, baseline_name, unit_of
from moelora.bench.shapes import MODELS

NAMES = {"vllm_default": "vLLM"}  # of fields of result files

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def add_command(topics: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = topics.add_parser("plot", help="draw result files of bench")
    add = parser.add_argument
    add("files", nargs="+", help="result files")
    add("--out", "-o", default="bench.png", help="ends in .png or .svg (default: %(default)s)")
    pictures = {
        "roofline": "flops under the roof and the cost of adapters; times of one number of tokens",
        "beside": "a layer with adapters beside vLLM's with and without, of one file",
        "arrivals": "times to the first token, of one file of benchmarks.churn",
        "engine": "tokens per second of engines, of one file of bench engine",
    }
    about = "; ".join(f"{name}: {what}" for name, what in pictures.items())
    add("--picture", choices=pictures, default="roofline", help=f"{about} (default: %(default)s)")
    about = "of the adapters in `beside`, with commas between (default: %(default)s)"
    add("--rank", default="16,64", help=about)
    about = "of the kernels in `beside`, for its title (default: the file's)"
    add("--vllm-version", help=about)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    try:
        if args.picture != "roofline" and len(args.files) > 1:
            raise ValueError(f"--picture {args.picture} draws one file, not {len(args.files)}")
        if args.picture == "engine":
            path = picture.draw(args.files[0], args.out)
        elif args.picture == "arrivals":
            path = arrivals.draw(args.files[0], args.out)
        elif args.picture == "beside":
            ranks = [int(rank) for rank in args.rank.split(",")]
            path = chart.draw(args.files[0], args.out, ranks, args.vllm_version)
        else:
            path = draw(args.files, args.out)
    except (OSError, ValueError, ImportError) as error:
        print(f"moelora plot: {error}", file=sys.stderr)
        return 2
    print(path)
    return 0


def draw(files: Sequence[str], out: str) -> Path:
    """Draw one picture of all files: achieved flops over intensity under the roofline, and the
    overhead of adapters by number of tokens; of cases that were measured with several numbers of
    adapters, the overhead by these. Files with one number of tokens have no curve over it: their
    times are bars instead.
    """
    loaded = [results.read(file) for file in files]
    rows = [row for _, cases in loaded for row in cases if "bound_base_us" in row]
    if not rows:
        raise ValueError("there is no layer in these files")
    panels: list[Callable[[Axes], None]] = []
    if len({row["tokens"] for row in rows}) > 1:
        panels += [partial(roofline, rows=rows), partial(overhead, rows=rows, along="tokens")]
    if counted := with_several_counts(rows):
        panels.append(partial(overhead, rows=counted, along="adapters"))
    if not panels:
        panels = [partial(times, rows=rows)]
    width = 7 * len(panels) + (2 if len(panels) == 1 else 0)
    figure = new_figure(width, 5.2, layout="constrained")
    for panel, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        panel(axes)
    devices = dict.fromkeys(meta["device"] for meta, _ in loaded)
    figure.suptitle(", ".join(devices))
    figure.savefig(out, dpi=130)
    return Path(out)


def times(axes: Axes, rows: Sequence[Case]) -> None:
    """A bar for each way to run a case: the bound, moelora, the baselines."""
    _, unit, scale = unit_of(rows[0])
    labels: list[str] = []
    for row in rows:
        label = _case(row, *_varying(rows, "adapters"))
        ways = {
            "bound": row["bound_us"],
            "moelora": row["ours_us"],
            "moelora without": row["ours_base_us"],
            **{baseline_name(who): us for who, us in row["rivals"].items()},
        }
        for who, us in ways.items():
            color = {"bound": "0.7", "moelora": "C0", "moelora without": "C9"}.get(who, "C3")
            bar = axes.barh(len(labels), us / scale, color=color)
            axes.bar_label(bar, fmt="{:,.4g}", padding=2, fontsize=8)
            labels.append(f"{label}: {who}" if len(rows) > 1 else who)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.xaxis.set_major_formatter("{x:,.4g}")
    tokens = rows[0]["tokens"]
    title = f"A layer, {tokens} token" + ("s" if tokens > 1 else "")
    title += "" if len(rows) > 1 else f", {_case(rows[0])}"
    axes.set(xlabel=f"{unit} (lower is better)", title=title)
    axes.grid(axis="x", alpha=0.3)


def with_several_counts(rows: Sequence[Case]) -> list[Case]:
    """The rows of cases that were measured with several numbers of adapters."""
    counts = defaultdict(set)
    for row in rows:
        counts[_case(row), row["tokens"]].add(row.get("adapters"))
    return [row for row in rows if len(counts[_case(row), row["tokens"]]) > 1]


def _case(row: Case, *more: str) -> str:
    """Name of a case, with the additional fields `more`."""
    fields = "".join(f", {row.get(name)} {name}" for name in more)
    known = MODELS.get(row["model"])
    name = known.name if known else row["model"]
    if known and row.get("experts", known.experts) < known.experts:
        name += f" ({row['experts']} experts)"
    return f"{name} {row.get('format', row['dtype'])} rank {row['rank']}{fields}"


def _varying(rows: Sequence[Case], field: str) -> tuple[str, ...]:
    """(field,) if it varies between rows, for `_case`."""
    return (field,) if len({row.get(field) for row in rows}) > 1 else ()


def roofline(axes: Axes, rows: Sequence[Case]) -> None:
    """Points are moelora's; the roof is the known or measured peak of the machine."""
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
    """Time with adapters relative to the same layer without, for moelora and each baseline that has
    both, by number of `tokens` or of `adapters`.
    """
    curves: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    other = _varying(rows, "adapters" if along == "tokens" else "tokens")
    for row in rows:
        case = _case(row, *other)
        curves[case, "moelora"][row[along]] = row["ours_us"] / row["ours_base_us"] - 1
        baselines = row["rivals"]
        for name, base in (("vllm_default", "vllm_base"), ("separate", "separate_base")):
            if name in baselines and base in baselines:
                curves[case, name][row[along]] = baselines[name] / baselines[base] - 1
    colors = {case: f"C{i % 10}" for i, case in enumerate(dict.fromkeys(c for c, _ in curves))}
    styles = {"moelora": "o-", "vllm_default": "s--", "separate": "^:"}
    for (case, who), points in curves.items():
        numbers, cost = zip(*sorted(points.items()), strict=True)
        axes.plot(
            numbers,
            [100 * c for c in cost],
            styles[who],
            color=colors[case],
            ms=4,
            lw=1.2 if who == "moelora" else 0.8,
            label=f"{case}, {NAMES.get(who, who)}",
        )
    scale = "log" if along == "tokens" else "linear"
    axes.set(xscale=scale, xlabel=along, ylabel="% over the layer without adapters")
    axes.set_title("Cost of adapters" if along == "tokens" else "Cost over the number of adapters")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
