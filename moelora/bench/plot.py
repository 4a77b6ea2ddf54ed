"""`moelora plot`, also `moelora bench plot`: pictures of result files."""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from moelora.bench import arrivals, chart, results
from moelora.bench.engine import picture
from moelora.bench.figure import new_figure
from moelora.bench.results import Case, baseline_name, unit_of
from moelora.bench.shapes import MODELS

NAMES = {  # of fields of result files
    "vllm_default": "vLLM",
    "vllm": "vLLM",
    "loop": "PyTorch, expert by expert",
    "grouped_mm": "torch's grouped GEMM",
    "separate": "Triton, separate LoRA kernels",
    "dense": "cuBLAS, as many flops",
    "transformers": "transformers and PEFT",
}
FEW_TOKENS, FEW_CASES = 3, 6  # at most so many are bars

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def add_command(topics: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = topics.add_parser("plot", help="draw result files of bench")
    add = parser.add_argument
    add("files", nargs="+", help="result files")
    add("--out", "-o", default="bench.png", help="ends in .png or .svg (default: %(default)s)")
    pictures = {
        "roofline": "flops under the roof and the cost of adapters; of few cases their times",
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
        if not Path(args.out).suffix:
            raise ValueError(f"--out is {args.out!r}, wanted a file that ends in .png or .svg")
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
    adapters, the overhead by these. Few numbers of tokens make no curve: the times of such cases,
    e.g. those of `bench --quick`, are bars instead.
    """
    loaded = [results.read(file) for file in files]
    rows = [row for _, cases in loaded for row in cases if "bound_base_us" in row]
    if not rows:
        raise ValueError("there is no layer in these files")
    panels: list[Callable[[Axes], None]] = []
    tokens = {row["tokens"] for row in rows}
    if len(tokens) > FEW_TOKENS or (len(tokens) > 1 and len(rows) > FEW_CASES):
        panels += [partial(roofline, rows=rows), partial(overhead, rows=rows, along="tokens")]
    if counted := with_several_counts(rows):
        panels.append(partial(overhead, rows=counted, along="adapters"))
    height = 5.2
    if not panels:
        panels = [partial(times, rows=rows)]
        height = max(2.5, 1.2 + 0.25 * sum(len(ways(row)) for row in rows))
    width = 7 * len(panels) + (2 if len(panels) == 1 else 0)
    figure = new_figure(width, height, layout="constrained")
    for panel, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        panel(axes)
    figure.suptitle(
        ", ".join(dict.fromkeys(where for meta, _ in loaded for where in made_on(meta)))
    )
    figure.savefig(out, dpi=130)
    return Path(out)


def made_on(meta: Mapping[str, Any]) -> list[str]:
    """The device of a file and the versions that it names."""
    versions = (f"{name} {meta[name]}" for name in ("moelora", "torch") if meta.get(name))
    return [meta["device"], *versions]


def ways(row: Case) -> dict[str, tuple[float, str]]:
    """Times of a case, in microseconds, and colors, by the way to run it."""
    found = {
        "moelora": (row["ours_us"], "C0"),
        "moelora, no adapters": (row["ours_base_us"], "C9"),
        "lower bound": (row["bound_us"], "0.7"),
    }
    for field, us in row["rivals"].items():
        name, base, _ = field.partition("_base")
        label = NAMES.get(name, baseline_name(name)) + (", no adapters" if base else "")
        found[label] = us, "C1" if base else "C3"
    return found


def times(axes: Axes, rows: Sequence[Case]) -> None:
    """A bar for each way to run a case: moelora, the bound, the baselines."""
    _, unit, scale = unit_of(rows[0])
    labels: list[str] = []
    places: list[float] = []
    several = {name: bool(_varying(rows, name)) for name in ("tokens", "adapters")}
    cases = {_case(row) for row in rows}
    for group, row in enumerate(rows):
        what = [_case(row)] if len(cases) > 1 else []
        what += [_count(row[name], name) for name, varies in several.items() if varies]
        for name, (us, color) in ways(row).items():
            places.append(len(labels) + group)  # a gap between cases
            bar = axes.barh(places[-1], us / scale, color=color)
            axes.bar_label(bar, fmt="{:,.4g}", padding=2, fontsize=8)
            labels.append(", ".join(what) + ": " + name if what else name)
    axes.set_yticks(places, labels, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.xaxis.set_major_formatter("{x:,.4g}")
    title = ["A layer"] if len(cases) > 1 else ["A layer", *cases]
    for name, varies in several.items():
        if not varies and name in rows[0]:
            title.append(_count(rows[0][name], name))
    axes.set(xlabel=f"{unit} (lower is better)", title=", ".join(title))
    axes.grid(axis="x", alpha=0.3)


def _count(number: int, what: str) -> str:
    """E.g. 1 token, 64 tokens."""
    return f"{number} {what if number != 1 else what.removesuffix('s')}"


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
