"""`moelora plot`, also `moelora bench plot`: pictures of result files."""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from moelora.bench import results
from moelora.bench.results import Case, baseline_name, shown
from moelora.bench.shapes import MODELS

NAMES = {  # of fields of result files
    "vllm_default": "vLLM",
    "vllm": "vLLM",
    "loop": "PyTorch, expert by expert",
    "grouped_mm": "torch's grouped GEMM",
    "separate": "separate LoRA kernels",
    "dense": "cuBLAS, as many flops",
    "transformers": "transformers and PEFT",
}
FEW_TOKENS, FEW_CASES = 3, 6  # at most so many are bars

# Of layers beside vLLM's: label, field of `rivals` or a case, style
BASE = ("vLLM, no adapters", "vllm_base", {"color": "0.4", "ls": "--", "lw": 1.5})
CURVES = (
    ("vLLM", "vllm_default", {"color": "C3", "marker": "s", "lw": 1.5}),
    ("moelora", "ours_us", {"color": "C0", "marker": "o", "lw": 2.5}),
)
LINES = ("-", ":", "-.", (0, (1, 3)))  # of the ranks
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {  # of arrivals: label, style
    "resident": ("a slot for each", {"color": "0.4", "ls": "--", "lw": 1.5}),
    "ahead": ("brought ahead", {"color": "C0", "lw": 2.5}),
    "blocking": ("brought when needed", {"color": "C3", "lw": 1.5}),
}
# Of engines: label, (engine, LoRA enabled, adapters in the batch), color
BARS = (
    ("vLLM without LoRA", ("vllm", False, False), "0.6"),
    ("vLLM with adapters", ("vllm", True, True), "C3"),
    ("moelora with adapters", ("moelora", True, True), "C0"),
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


ABOUT = "draw result files of bench"


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
        if args.picture == "beside":
            ranks = [int(rank) for rank in args.rank.split(",")]
            figure = beside(args.files[0], ranks, args.vllm_version)
        elif args.picture == "roofline":
            figure = layers(args.files)
        else:
            figure = {"engine": engines, "arrivals": arrivals}[args.picture](args.files[0])
        path = save(figure, args.out)
    except (OSError, ValueError, ImportError) as error:
        print(f"moelora plot: {error}", file=sys.stderr)
        return 2
    print(path)
    return 0


def new_figure(width: float, height: float) -> Figure:
    """A figure of this size in inches; ImportError says how to install matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("pictures need matplotlib: pip install 'moelora[plot]'") from None
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, out: str | Path) -> Path:
    """Write a picture. A PNG does not name the release of matplotlib, so that it changes only with
    its data."""
    is_png = str(out).endswith(".png")
    figure.savefig(out, dpi=120, metadata={"Software": None} if is_png else None)
    return Path(out)


def layers(files: Sequence[str]) -> Figure:
    """One picture of all files: achieved flops over intensity under the roofline, and the
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
    figure = new_figure(width, height)
    for panel, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        panel(axes)
    figure.suptitle(
        ", ".join(dict.fromkeys(where for meta, _ in loaded for where in made_on(meta)))
    )
    return figure


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
    labels: list[str] = []
    places: list[float] = []
    several = {name: bool(_varying(rows, name)) for name in ("tokens", "adapters")}
    cases = {_case(row) for row in rows}
    for group, row in enumerate(rows):
        what = [_case(row)] if len(cases) > 1 else []
        what += [_count(row[name], name) for name, varies in several.items() if varies]
        for name, (us, color) in ways(row).items():
            places.append(len(labels) + group)  # a gap between cases
            bar = axes.barh(places[-1], us, color=color)
            axes.bar_label(bar, fmt=shown, padding=2, fontsize=8)
            labels.append(", ".join(what) + ": " + name if what else name)
    axes.set_yticks(places, labels, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.xaxis.set_major_formatter("{x:,g}")
    title = ["A layer"] if len(cases) > 1 else ["A layer", *cases]
    for name, varies in several.items():
        if not varies and name in rows[0]:
            title.append(_count(rows[0][name], name))
    axes.set(xlabel="microseconds (lower is better)", title=", ".join(title))
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


def beside(file: str, ranks: Sequence[int], vllm: str | None = None) -> Figure:
    """Time of a layer by number of tokens, relative to vLLM's layer without adapters.

    `vllm` is the version of its kernels, if the file does not say it.
    """
    meta, cases = results.read(file)
    by_rank = {rank: by_model(cases, rank) for rank in ranks}
    for rank, panels in by_rank.items():
        if not panels:
            raise ValueError(f"{file} has no case of rank {rank} with vLLM's layers")
    models = list(by_rank[ranks[0]])
    figure = new_figure(3.4 * len(models) + 1, 3.8)
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
    return figure


def by_model(cases: Sequence[dict[str, Any]], rank: int) -> dict[str, list[dict[str, Any]]]:
    """{model: its cases of this rank in which vLLM was measured, by tokens}."""
    panels: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(cases, key=lambda row: row.get("tokens", 0)):
        measured = {"vllm_base", "vllm_default"} <= row.get("rivals", {}).keys()
        if measured and row.get("rank") == rank and row.get("model") in MODELS:
            panels.setdefault(row["model"], []).append(row)
    order = list(MODELS)
    return dict(sorted(panels.items(), key=lambda item: order.index(item[0])))


def arrivals(file: str) -> Figure:
    """Share of requests by time to the first token, a curve for each policy."""
    meta, cases = results.read(file)
    rows = [row for row in cases if row.get("topic") == "arrivals"]
    if not rows:
        raise ValueError(f"{file} has no case of arrivals")
    figure = new_figure(6.4, 3.8)
    axes = figure.subplots()
    for row in rows:
        label, style = POLICIES[row["policy"]]
        waits = sorted(row["waits_ms"])
        shares = [(n + 1) / len(waits) for n in range(len(waits))]
        axes.plot(waits, shares, label=f"{label} ({row['slots']} slots)", **style)
    axes.set(xscale="log", xlabel="time to the first token (ms)", ylabel="share of requests")
    axes.set(ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=9)
    ranks = " and ".join(str(rank) for rank in meta.get("ranks", ()))
    axes.set_title(f"{rows[0]['adapters']} adapters of rank {ranks}, {meta['device']}", fontsize=10)
    return figure


def engines(file: str | Path) -> Figure:
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
    figure = new_figure(9, 1.6 + 0.5 * len(bars))
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
    return figure
