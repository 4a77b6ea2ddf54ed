"""`moelora plot`, also `moelora bench plot`: pictures of result files, a function for each."""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moelora.bench import results
from moelora.bench.results import Case, baseline_name, shown
from moelora.bench.shapes import MODELS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAMES = {  # of fields of result files
    "vllm_default": "vLLM",
    "vllm": "vLLM",
    "loop": "PyTorch, expert by expert",
    "grouped_mm": "torch's grouped GEMM",
    "separate": "separate LoRA kernels",
    "transformers": "transformers and PEFT",
}
FEW_TOKENS, FEW_CASES = 3, 6  # at most so many are bars
RANKS = {16: "-", 64: ":"}  # of adapters in `beside`, and their lines
ABOUT = "draw result files of bench"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("files", nargs="+", help="result files")
    add("--out", "-o", default="bench.png", help="ends in .png or .svg (default: %(default)s)")
    about = "; ".join(f"{name}: {what}" for name, (_, what) in PICTURES.items())
    add("--picture", choices=PICTURES, default="roofline", help=f"{about} (default: %(default)s)")
    about = "of the kernels in `beside`, for its title (default: none)"
    add("--vllm-version", help=about)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    try:
        if not Path(args.out).suffix:
            raise ValueError(f"--out is {args.out!r}, wanted a file that ends in .png or .svg")
        if args.picture != "roofline" and len(args.files) > 1:
            raise ValueError(f"--picture {args.picture} draws one file, not {len(args.files)}")
        draw, _ = PICTURES[args.picture]
        figure = draw(args)
        # A PNG without the release of matplotlib changes only with its data.
        unnamed = {"Software": None} if args.out.endswith(".png") else None
        figure.savefig(args.out, dpi=120, metadata=unnamed)
    except (OSError, ValueError, ImportError) as error:
        print(f"moelora plot: {error}", file=sys.stderr)
        return 2
    print(Path(args.out))
    return 0


def new_figure(width: float, height: float) -> Figure:
    """A figure of this size in inches; ImportError says how to install matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("pictures need matplotlib: pip install matplotlib") from None
    return Figure(figsize=(width, height), layout="constrained")


def of_topic(args: argparse.Namespace, topic: str) -> tuple[Case, list[Case]]:
    """(meta, cases of a topic) of the file; ValueError if there are none."""
    (file,) = args.files
    meta, cases = results.read(file)
    rows = [row for row in cases if row.get("topic") == topic]
    if not rows:
        raise ValueError(f"{file} has no case of {topic}")
    return meta, rows


def layers(args: argparse.Namespace) -> Figure:
    """The roofline and the overhead of adapters by number of tokens, of all files; of cases with
    several numbers of adapters, the overhead by these. Few numbers of tokens make no curve: times
    of such cases, e.g. those of `bench --quick`, are bars instead.
    """
    loaded = [results.read(file) for file in args.files]
    rows = [row for _, cases in loaded for row in cases if "bound_base_us" in row]
    if not rows:
        raise ValueError("there is no layer in these files")
    counts = defaultdict(set)
    for row in rows:
        counts[case_of(row, "tokens")].add(row.get("adapters"))
    counted = [row for row in rows if len(counts[case_of(row, "tokens")]) > 1]
    tokens = {row["tokens"] for row in rows}
    curves = len(tokens) > FEW_TOKENS or (len(tokens) > 1 and len(rows) > FEW_CASES)
    if curves or counted:
        panels = 2 * curves + bool(counted)
        figure = new_figure(7 * panels + 2 * (panels == 1), 5.2)
        axes = figure.subplots(1, panels, squeeze=False)[0]
        if curves:
            roofline(axes[0], rows)
            overhead(axes[1], rows, "tokens")
        if counted:
            overhead(axes[-1], counted, "adapters")
    else:
        figure = times(rows)
    figure.suptitle(", ".join(dict.fromkeys(text for meta, _ in loaded for text in made_on(meta))))
    return figure


def made_on(meta: Case) -> list[str]:
    return [meta["device"], f"moelora {meta['moelora']}", f"torch {meta['torch']}"]


def case_of(row: Case, *fields: str) -> str:
    """Name of a case: its layer and rank, and more fields."""
    known = MODELS.get(row["model"])
    name = known.name if known else row["model"]
    if known and row.get("experts", known.experts) < known.experts:
        name += f" ({row['experts']} experts)"
    more = [f"{row.get(field)} {field}" for field in fields]
    return ", ".join([f"{name} {row.get('format', row['dtype'])} rank {row['rank']}", *more])


def varying(rows: Sequence[Case], field: str) -> list[str]:
    """[field] if it varies between rows, for `case_of`."""
    return [field] if len({row.get(field) for row in rows}) > 1 else []


def times(rows: Sequence[Case]) -> Figure:
    """Bars of each case: moelora, the bound, the baselines."""
    figure = new_figure(9, sum(1.75 + 0.25 * len(row["rivals"]) for row in rows))
    every = figure.subplots(len(rows), 1, squeeze=False)[:, 0]
    for axes, row in zip(every, rows, strict=True):
        bars = [
            ("moelora", row["ours_us"], "C0"),
            ("moelora, no adapters", row["ours_base_us"], "C9"),
            ("lower bound", row["bound_us"], "0.7"),
        ]
        for field, us in row["rivals"].items():
            name, base, _ = field.partition("_base")
            label = NAMES.get(name, baseline_name(name)) + (", no adapters" if base else "")
            bars.append((label, us, "C1" if base else "C3"))
        labels, widths, colors = zip(*bars, strict=True)
        axes.bar_label(axes.barh(labels, widths, color=colors), fmt=shown, padding=2, fontsize=8)
        axes.set_title(case_of(row, "tokens", "adapters"), loc="left", fontsize=9)
        axes.tick_params("y", labelsize=8)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.xaxis.set_major_formatter("{x:,g}")
        axes.grid(axis="x", alpha=0.3)
    every[-1].set_xlabel("microseconds (lower is better)")
    return figure


def roofline(axes: Axes, rows: Sequence[Case]) -> None:
    """Points are moelora's; the roof is the known or measured peak of the machine."""
    curves = defaultdict(list)
    for row in rows:  # flop per byte; Gflop/s
        point = 1e3 * row["gflop"] / row["mbytes"], 1e6 * row["gflop"] / row["ours_us"]
        curves[case_of(row, *varying(rows, "adapters"))].append(point)
    for case, points in curves.items():
        axes.plot(*zip(*sorted(points), strict=True), "o-", ms=4, lw=0.8, label=case)
    peaks = [(r["streaming_gb_s"], r["mm_gflop_s"]) for r in rows if r["mm_gflop_s"]]
    if peaks:
        streaming, flops = max(peaks)
        corner, every = flops / streaming, [x for points in curves.values() for x, _ in points]
        xs = [min(*every, corner) / 2, corner, max(*every, corner) * 2]
        axes.plot(xs, [min(x * streaming, flops) for x in xs], "k-", lw=1.5, label="bound")
    axes.set(xscale="log", yscale="log", xlabel="flop per byte", ylabel="Gflop/s")
    axes.set_title("Roofline, layer with adapters")
    axes.legend(fontsize=7)


def overhead(axes: Axes, rows: Sequence[Case], along: str) -> None:
    """Time with adapters relative to the same layer without, for moelora and each baseline that has
    both, by number of "tokens" or of "adapters".
    """
    pairs = {  # times with and without, style
        "moelora": ("ours_us", "ours_base_us", {"ls": "-", "marker": "o", "lw": 1.2}),
        "vllm_default": ("vllm_default", "vllm_base", {"ls": "--", "marker": "s", "lw": 0.8}),
        "separate": ("separate", "separate_base", {"ls": ":", "marker": "^", "lw": 0.8}),
    }
    curves: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    other = varying(rows, "adapters" if along == "tokens" else "tokens")
    for row in rows:
        found = row | row["rivals"]
        for who, (adapted, base, _) in pairs.items():
            if adapted in found and base in found:
                cost = 100 * (found[adapted] / found[base] - 1)
                curves[case_of(row, *other), who][row[along]] = cost
    colors = {case: f"C{i % 10}" for i, case in enumerate(dict.fromkeys(c for c, _ in curves))}
    for (case, who), points in curves.items():
        style: dict[str, Any] = {"color": colors[case], "ms": 4, **pairs[who][2]}
        label = f"{case}, {NAMES.get(who, who)}"
        axes.plot(*zip(*sorted(points.items()), strict=True), label=label, **style)
    scale = "log" if along == "tokens" else "linear"
    axes.set(xscale=scale, xlabel=along, ylabel="% over the layer without adapters")
    axes.set_title("Cost of adapters" if along == "tokens" else "Cost over the number of adapters")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))


def beside(args: argparse.Namespace) -> Figure:
    """Time of a layer by number of tokens, relative to vLLM's layer without adapters."""
    (file,) = args.files
    meta, cases = results.read(file)
    wanted = {"vllm_base", "vllm_default"}
    rows = [row for row in cases if wanted <= row.get("rivals", {}).keys()]
    rows = [row for row in rows if row["model"] in MODELS and row["rank"] in RANKS]
    for rank in RANKS:
        if not any(row["rank"] == rank for row in rows):
            raise ValueError(f"{file} has no case of rank {rank} with vLLM's layers")
    rows.sort(key=lambda row: row["tokens"])
    models = [model for model in MODELS if any(row["model"] == model for row in rows)]
    figure = new_figure(3.4 * len(models) + 1, 3.8)
    from matplotlib.ticker import ScalarFormatter

    lines: dict[str, tuple[str, dict[str, Any]]] = {
        "vLLM": ("vllm_default", {"color": "C3", "marker": "s", "lw": 1.5}),
        "moelora": ("ours_us", {"color": "C0", "marker": "o", "lw": 2.5}),
    }
    every = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for axes, model in zip(every, models, strict=True):
        for rank, line in RANKS.items():
            some = [row for row in rows if (row["model"], row["rank"]) == (model, rank)]
            tokens = [row["tokens"] for row in some]
            for who, (field, style) in lines.items():
                share = [(row | row["rivals"])[field] / row["rivals"]["vllm_base"] for row in some]
                label = f"{who}, adapters of rank {rank}"
                axes.plot(tokens, share, label=label, ls=line, ms=4, **style)
        axes.axhline(1.0, label="vLLM, no adapters", color="0.4", ls="--", lw=1.5)
        ticks = sorted({row["tokens"] for row in rows if row["model"] == model})
        axes.set(xscale="log", xlabel="tokens", title=MODELS[model].name, xticks=ticks)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.tick_params("x", which="minor", bottom=False)
        axes.tick_params("x", labelrotation=60, labelsize=8)
        axes.grid(axis="y", alpha=0.3)
    every[0].set(ylabel="time (lower is better)\nvLLM without adapters = 1", ylim=(0, None))
    number, dtypes = (
        ", ".join(sorted({str(row[name]) for row in rows})) for name in ("adapters", "dtype")
    )
    device, ours, torch = made_on(meta)
    vllm = [f"kernels of vLLM {args.vllm_version}"] if args.vllm_version else []
    title = f"One {dtypes} MoE layer, {number} adapters, {device}\n"
    figure.suptitle(title + ", ".join([ours, *vllm, torch]), fontsize=11)
    handles = every[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3)
    return figure


def policies(args: argparse.Namespace) -> Figure:
    """Rewards by step, and gaps of log-probabilities by pair of trainer and sampler."""
    meta, rewards = of_topic(args, "rl_reward")
    _, gaps = of_topic(args, "rl_gap")
    figure = new_figure(9, 3.6)
    left, right = figure.subplots(1, 2)
    formats = list(dict.fromkeys(row["format"] for row in gaps))
    for n, name in enumerate(formats):
        steps = [(row["step"], row["reward"]) for row in rewards if row["format"] == name]
        left.plot(*zip(*steps, strict=True), color=f"C{n}", lw=2, label=name)
        rows = [row for row in gaps if row["format"] == name]
        places = [at + n * 0.8 / len(formats) for at in range(len(rows))]
        means = [row["mean"] for row in rows]
        right.bar(places, means, 0.8 / len(formats), align="edge", color=f"C{n}", label=name)
        right.set_xticks([at + 0.4 for at in range(len(rows))], [row["pair"] for row in rows])
    left.set(xlabel="step", ylabel="reward", title=meta["device"])
    right.set(ylabel="mean gap of log-probabilities")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=9)
    return figure


PICTURES = {
    "roofline": (layers, "flops under the roof and cost of adapters; of few cases their times"),
    "beside": (beside, "a layer with adapters beside vLLM's with and without, of one file"),
    "rl": (policies, "rewards, and gaps of trainer and sampler, of one file of benchmarks.rl_loop"),
}
