"""One batch, many adapters: `python examples/demo.py` (what `make demo` runs).

Loads the trained byte-level model and its LoRA adapters, answers batches whose rows carry different
adapters through `moelora.fused_experts_lora`, and holds every number against transformers + PEFT,
which can serve only one adapter at a time.
"""

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

# libgomp reads it as torch loads it. Threads that wait spin otherwise, and keep busy cores from
# those they wait for: the demo then takes minutes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import matplotlib
import torch
import transformers
from demo_data import (
    ADAPTER_DOMAINS,
    ADAPTERS_DIR,
    DOMAINS,
    MODEL_DIR,
    WINDOW,
    decode,
    encode,
    eval_windows,
)
from peft import PeftModel
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LogitsProcessorList

import moelora.integrations.transformers as moelora_hf

ADAPTERS = (None, *ADAPTER_DOMAINS)
PROMPTS = ("    self.", "\n\nIf the ")  # of one length, so that they make one batch
CONTINUATION = 120  # bytes
DECODED = 32  # bytes per row in a timed run of decoding
TEMPERATURE = 0.6


class Oracle:
    """transformers' experts with PEFT's adapters: one adapter per call, so a batch is split."""

    def __init__(self, experts: str, dtype: torch.dtype):
        first, *others = ADAPTER_DOMAINS
        base = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=dtype)
        base.set_experts_implementation(experts)
        self.model = PeftModel.from_pretrained(base, ADAPTERS_DIR / first, adapter_name=first)
        for name in others:
            self.model.load_adapter(ADAPTERS_DIR / name, adapter_name=name)
        self.model.eval()

    def _with(self, adapter: str | None):
        if adapter is None:
            return self.model.disable_adapter()
        self.model.set_adapter(adapter)
        return nullcontext()

    def _split(self, tokens: torch.Tensor, adapters: list[str | None], call: Callable):
        out = None
        for adapter in dict.fromkeys(adapters):
            rows = torch.tensor([i for i, name in enumerate(adapters) if name == adapter])
            with self._with(adapter):
                part = call(tokens[rows])
            if out is None:
                out = part.new_empty(len(adapters), *part.shape[1:])
            out[rows] = part
        return out

    def logits(self, tokens: torch.Tensor, adapters: list[str | None]) -> torch.Tensor:
        return self._split(tokens, adapters, lambda rows: forward(self.model, rows))

    def generate(self, tokens: torch.Tensor, adapters: list[str | None], count: int):
        return self._split(tokens, adapters, lambda rows: sample(self.model, rows, count))


class Served:
    """The same model with its experts in moelora and all adapters in one pool."""

    def __init__(self, dtype: torch.dtype):
        self.model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=dtype).eval()
        folders = {name: ADAPTERS_DIR / name for name in ADAPTER_DOMAINS}
        self.pool = moelora_hf.load_adapters(self.model, folders)

    def logits(self, tokens: torch.Tensor, adapters: list[str | None]) -> torch.Tensor:
        with moelora_hf.use_adapters(self.model, adapters):
            return forward(self.model, tokens)

    def generate(self, tokens: torch.Tensor, adapters: list[str | None], count: int):
        with moelora_hf.use_adapters(self.model, adapters):
            return sample(self.model, tokens, count)


def forward(model, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens, use_cache=False).logits.float()


def same_noise(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Turns greedy search into sampling (the Gumbel trick) with noise that depends on the position
    alone, so that a row's text does not change when the batch is split."""
    generator = torch.Generator().manual_seed(tokens.shape[1])
    uniform = torch.rand(scores.shape[1], generator=generator, dtype=torch.float64)
    return scores / TEMPERATURE - torch.log(-torch.log(uniform)).float()


def sample(model, tokens: torch.Tensor, count: int) -> torch.Tensor:
    out = model.generate(
        input_ids=tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=count,
        do_sample=False,
        logits_processor=LogitsProcessorList([same_noise]),
    )
    return out[:, tokens.shape[1] :]


def row_losses(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of each row in nats per byte."""
    loss = F.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
    return loss.mean(dim=1)


@dataclass
class Results:
    losses: dict[tuple[str, str | None], float] = field(default_factory=dict)
    mixed: dict[str, float] = field(default_factory=dict)
    max_difference: float = 0.0  # of logits, over every pair of text and adapter
    mixed_difference: float = 0.0  # of logits, in the mixed batch
    logit_range: float = 0.0
    rates: dict[str, dict[str, float]] = field(default_factory=dict)  # engine -> phase -> tokens/s
    continuations: dict[tuple[str, str | None], str] = field(default_factory=dict)
    same_continuations: int = 0


def measure_losses(served: Served, oracle: Oracle, windows: int, progress, results: Results):
    """Every text with every adapter, one adapter per batch, against the oracle."""
    task = progress.add_task("every text x every adapter", total=len(DOMAINS) * len(ADAPTERS))
    for domain in DOMAINS:
        tokens = eval_windows(domain, windows)
        for adapter in ADAPTERS:
            adapters = [adapter] * len(tokens)
            ours, theirs = served.logits(tokens, adapters), oracle.logits(tokens, adapters)
            results.losses[domain, adapter] = row_losses(ours, tokens).mean().item()
            difference = (ours - theirs).abs().max().item()
            results.max_difference = max(results.max_difference, difference)
            results.logit_range = max(results.logit_range, theirs.abs().max().item())
            progress.advance(task)


def mixed_batch(windows: int) -> tuple[torch.Tensor, list[str], list[str | None]]:
    """Rows of all texts in turn, each with the adapter of its own domain (stdlib: none)."""
    texts = {name: eval_windows(name, windows) for name in DOMAINS}
    domains = [name for _ in range(windows) for name in DOMAINS]
    tokens = torch.stack([texts[name][i] for i in range(windows) for name in DOMAINS])
    return tokens, domains, [name if name in ADAPTER_DOMAINS else None for name in domains]


def measure_mixed(served: Served, oracle: Oracle, windows: int, progress, results: Results):
    task = progress.add_task("one mixed batch", total=2)
    tokens, domains, adapters = mixed_batch(windows)
    ours = served.logits(tokens, adapters)
    progress.advance(task)
    results.mixed_difference = (ours - oracle.logits(tokens, adapters)).abs().max().item()
    progress.advance(task)
    losses = row_losses(ours, tokens)
    for domain in DOMAINS:
        rows = [i for i, name in enumerate(domains) if name == domain]
        results.mixed[domain] = losses[rows].mean().item()


def generate(served: Served, oracle: Oracle, progress, results: Results):
    """Each prompt continued without and with every adapter, all rows in one batch."""
    rows = [(prompt, adapter) for prompt in PROMPTS for adapter in ADAPTERS]
    tokens = torch.stack([encode(prompt) for prompt, _ in rows])
    adapters = [adapter for _, adapter in rows]
    task = progress.add_task("continuations", total=2)
    ours = served.generate(tokens, adapters, CONTINUATION)
    progress.advance(task)
    theirs = oracle.generate(tokens, adapters, CONTINUATION)
    progress.advance(task)
    results.continuations = {row: decode(ids) for row, ids in zip(rows, ours, strict=True)}
    results.same_continuations = int((ours == theirs).all(dim=1).sum())


def measure_rates(engines: dict, windows: int, repeats: int, progress, results: Results):
    """Median tokens/s over `repeats` runs after a warm-up, engines taking turns."""
    tokens, _, adapters = mixed_batch(windows)
    phases = {
        "prefill": (lambda e: e.logits(tokens, adapters), tokens.numel()),
        "decode": (lambda e: e.generate(tokens[:, :8], adapters, DECODED), len(tokens) * DECODED),
    }
    task = progress.add_task("tokens/s", total=len(phases) * len(engines) * (repeats + 1))
    for phase, (call, count) in phases.items():
        seconds = {name: [] for name in engines}
        for run in range(repeats + 1):
            for name, engine in engines.items():
                started = time.perf_counter()
                call(engine)
                if run > 0:
                    seconds[name].append(time.perf_counter() - started)
                progress.advance(task)
        for name, samples in seconds.items():
            results.rates.setdefault(name, {})[phase] = count / statistics.median(samples)


def label(adapter: str | None, served: Served) -> str:
    return "no adapter" if adapter is None else f"{adapter}\nrank {rank(adapter, served)}"


def rank(adapter: str, served: Served) -> int:
    return int(served.pool.lora_ranks[served.pool.lookup(adapter)])


def show(console: Console, results: Results, served: Served, oracle_name: str, dtype: str):
    table = Table(title="loss on held-out text, nats per byte")
    table.add_column("text")
    for adapter in ADAPTERS:
        table.add_column(label(adapter, served), justify="right")
    table.add_column("mixed batch,\nown adapters", justify="right", style="bold")
    for domain in DOMAINS:
        best = min(ADAPTERS, key=lambda adapter: results.losses[domain, adapter])
        cells = []
        for adapter in ADAPTERS:
            value = f"{results.losses[domain, adapter]:.3f}"
            cells.append(f"[green]{value}[/]" if adapter == best else value)
        table.add_row(domain, *cells, f"{results.mixed[domain]:.3f}")
    console.print(table)
    console.print(
        f"largest difference of logits from transformers + PEFT ({oracle_name}, {dtype}): "
        f"{results.max_difference:.1e} one adapter at a time, {results.mixed_difference:.1e} in "
        f"the mixed batch; logits reach {results.logit_range:.0f}"
    )

    table = Table(title="mixed batch, tokens/s")
    table.add_column("engine")
    phases = next(iter(results.rates.values()))
    for phase in phases:
        table.add_column(phase, justify="right")
        table.add_column("moelora is", justify="right")
    ours = results.rates["moelora"]
    for name, rates in results.rates.items():
        cells = []
        for phase in phases:
            faster = "" if name == "moelora" else f"{ours[phase] / rates[phase]:.1f}x"
            cells += [f"{rates[phase]:,.0f}", faster]
        table.add_row(name, *cells)
    console.print(table)

    table = Table(title="continuations, all rows in one batch", show_lines=True)
    table.add_column("adapter")
    for prompt in PROMPTS:
        table.add_column(Text(f"{prompt.strip()} ..."), ratio=1)
    for adapter in ADAPTERS:
        texts = (results.continuations[prompt, adapter] for prompt in PROMPTS)
        table.add_row(adapter or "none", *(Text(text) for text in texts))
    console.print(table)
    console.print(
        f"{results.same_continuations} of {len(results.continuations)} continuations are those of "
        "transformers + PEFT, byte for byte"
    )


def plot(results: Results, served: Served, path: Path):
    matplotlib.use("Agg")
    from matplotlib import pyplot

    phases = list(results.rates["moelora"])
    ratios = (4, *[1.2] * len(phases))
    figure, (left, *rights) = pyplot.subplots(
        1, len(ratios), figsize=(11, 4), width_ratios=ratios, layout="constrained"
    )
    width = 0.8 / len(ADAPTERS)
    for i, adapter in enumerate(ADAPTERS):
        name = "no adapter" if adapter is None else f"{adapter} (rank {rank(adapter, served)})"
        heights = [results.losses[domain, adapter] for domain in DOMAINS]
        places = [x + (i - (len(ADAPTERS) - 1) / 2) * width for x in range(len(DOMAINS))]
        color = "0.7" if adapter is None else f"C{i - 1}"
        left.bar(places, heights, width, label=name, color=color)
    for x, domain in enumerate(DOMAINS):
        left.hlines(results.mixed[domain], x - 0.45, x + 0.45, color="black", lw=1.5)
    left.plot([], [], color="black", lw=1.5, label="mixed batch, own adapters")
    left.set_xticks(range(len(DOMAINS)), DOMAINS)
    left.set_ylabel("loss, nats per byte")
    left.set_title("held-out text of each domain")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=6, fontsize=8)

    for axes, phase in zip(rights, phases, strict=True):
        names = [name.replace(" ", "\n") for name in results.rates]
        heights = [rates[phase] for rates in results.rates.values()]
        bars = axes.bar(names, heights, color=["C4", "0.7", "0.7"])
        axes.bar_label(bars, fmt="{:,.0f}", fontsize=8)
        axes.tick_params("x", labelsize=7)
        axes.set_yticks([])
        axes.set_title(f"{phase}, tokens/s")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--windows", type=int, default=16, help="windows of text per domain")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="in bfloat16 near-ties of a router fall either way, with PEFT as with moelora",
    )
    parser.add_argument("--repeats", type=int, default=3, help="timed runs")
    parser.add_argument("--save-plot", type=Path, default=Path("out/demo.png"), metavar="PATH")
    args = parser.parse_args()
    if not MODEL_DIR.is_dir():
        parser.error(f"{MODEL_DIR} is not here: a source distribution lacks it, a clone has it")
    # Of no concern to the reader: transformers' deprecations seen from inside PEFT.
    warnings.filterwarnings("ignore", category=FutureWarning)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()

    console, began = Console(), time.monotonic()
    console.print("About a minute on two CPU cores, two beside other work; loading the model ...")
    dtype = getattr(torch, args.dtype)
    served = Served(dtype)
    oracle = Oracle("grouped_mm", dtype)
    engines = {
        "moelora": served,
        "PEFT, loop over experts": Oracle("eager", dtype),
        "PEFT, grouped_mm": oracle,
    }
    config = served.model.config
    console.print(
        f"{config.num_hidden_layers} layers of {config.num_experts} experts, top "
        f"{config.num_experts_per_tok}; {len(ADAPTER_DOMAINS)} adapters; {args.windows} windows of "
        f"{WINDOW} bytes per text; {args.dtype}, {torch.get_num_threads()} threads"
    )
    results = Results()
    with torch.inference_mode(), Progress(console=console, transient=True) as progress:
        measure_losses(served, oracle, args.windows, progress, results)
        measure_mixed(served, oracle, args.windows, progress, results)
        generate(served, oracle, progress, results)
        # Few rows: what PEFT pays per adapter and call shows, and the demo stays short.
        measure_rates(engines, min(args.windows, 4), args.repeats, progress, results)
    show(console, results, served, "grouped_mm", args.dtype)
    plot(results, served, args.save_plot)
    console.print(f"plot: {args.save_plot}; all of it took {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
