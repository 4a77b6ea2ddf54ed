"""Trains adapters of the demo model: `python examples/train.py`.

transformers' Trainer and PEFT train each adapter on the experts of `demo_model/` twice: as they do
by themselves, and with the experts attached to moelora. Both see the same batches and start alike.
What the second run saves is then served by `load_adapters`, all adapters in one batch.
"""

import argparse
import json
import os
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path

# libgomp reads it as torch loads it; see demo.py.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import matplotlib
import torch
import transformers
from demo_data import ADAPTER_DOMAINS, MODEL_DIR, draw_rows, eval_windows, training_tokens
from peft import LoraConfig, PeftModel, get_peft_model
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

import moelora.integrations.peft as moelora_peft
import moelora.integrations.transformers as moelora_hf

SEED = 20240601
TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
LORA = {"r": 8, "lora_alpha": 16, "target_modules": [], "target_parameters": TARGETS}
ENGINES = ("PEFT", "moelora")
SAME = 1e-3  # nats; what float32 sums in another order make of a loss after some steps


@dataclass
class Curve:
    """One run: the loss of every step, and the CPU seconds from the first step on."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """CPU seconds a step, without the first two, which warm up."""
        warm = min(2, len(self.seconds) - 1)
        began = self.seconds[warm - 1] if warm else 0.0
        return (self.seconds[-1] - began) / (len(self.seconds) - warm)


class Watch(TrainerCallback):
    """Fills a curve, and moves a bar."""

    def __init__(self, curve: Curve, progress: Progress, title: str, steps: int):
        self.curve, self.progress = curve, progress
        self.task = progress.add_task(title, total=steps, loss="")

    def on_train_begin(self, args, state, control, **kwargs):
        self.began = time.process_time()

    def on_step_end(self, args, state, control, **kwargs):
        self.curve.seconds.append(time.process_time() - self.began)

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:
            self.curve.losses.append(logs["loss"])
            self.progress.update(self.task, advance=1, loss=f"loss {logs['loss']:.3f}")


def load(dtype: torch.dtype):
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=dtype)
    model.config.use_cache = False
    return model


def train(engine: str, domain: str, args: argparse.Namespace, progress: Progress) -> Curve:
    """One adapter; it is saved in `args.out / engine / domain`."""
    torch.manual_seed(SEED)
    model = get_peft_model(
        load(getattr(torch, args.dtype)), LoraConfig(task_type="CAUSAL_LM", **LORA)
    )
    if engine == "moelora":
        moelora_peft.attach(model.train())
    curve = Curve()
    options = TrainingArguments(
        output_dir=str(args.out / "trainer"),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        learning_rate=4e-3,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, args.steps // 20),
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=SEED,
    )
    rows = draw_rows(training_tokens(domain), args.steps * args.batch, seed=SEED)
    trainer = Trainer(
        model,
        options,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[Watch(curve, progress, f"{domain}, {engine}", args.steps)],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    model.save_pretrained(args.out / engine / domain)
    return curve


@torch.inference_mode()
def served_losses(domains: list[str], folder: Path, windows: int, dtype):
    """Of the base model, of adapters that one mixed batch carries, and of the same in PEFT."""
    texts = [eval_windows(domain, windows) for domain in domains]
    tokens = torch.cat(texts)
    names = [domain for domain, text in zip(domains, texts, strict=True) for _ in text]

    def losses(logits: torch.Tensor) -> list[float]:
        each = F.cross_entropy(
            logits[:, :-1].float().transpose(1, 2), tokens[:, 1:], reduction="none"
        ).mean(1)
        return [part.mean().item() for part in each.split([len(text) for text in texts])]

    model = load(dtype).eval()
    moelora_hf.load_adapters(model, {domain: folder / domain for domain in domains})
    found = {"no adapter": losses(model(tokens).logits)}
    found["moelora, one batch"] = losses(model(tokens, adapter_names=names).logits)
    alone = []
    for domain, text in zip(domains, texts, strict=True):
        peft = PeftModel.from_pretrained(load(dtype), folder / domain).eval()
        alone.append(peft(text).logits)
    found["PEFT, one at a time"] = losses(torch.cat(alone))
    return found


def show(console: Console, curves: dict[str, dict[str, Curve]], held_out: dict[str, list[float]]):
    table = Table(title="training")
    for column in ("adapter", "first loss", "last loss", "largest difference"):
        table.add_column(column, justify="left" if column == "adapter" else "right")
    for engine in ENGINES:
        table.add_column(f"{engine}, CPU s a step", justify="right")
    table.add_column("moelora is", justify="right")
    for domain, runs in curves.items():
        theirs, ours = (runs[engine] for engine in ENGINES)
        table.add_row(
            domain,
            f"{ours.losses[0]:.3f}",
            f"{ours.losses[-1]:.3f}",
            f"{difference(runs):.0e}",
            *(f"{runs[engine].rate:.3f}" for engine in ENGINES),
            f"{theirs.rate / ours.rate:.2f}x",
        )
    console.print(table)
    table = Table(title="held-out text, nats per byte")
    table.add_column("adapter")
    for column in held_out:
        table.add_column(column, justify="right")
    for i, domain in enumerate(curves):
        table.add_row(domain, *(f"{losses[i]:.3f}" for losses in held_out.values()))
    console.print(table)


def difference(runs: dict[str, Curve]) -> float:
    theirs, ours = (torch.tensor(runs[engine].losses) for engine in ENGINES)
    return (theirs - ours).abs().max().item()


def plot(curves: dict[str, dict[str, Curve]], path: Path):
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(11, 4), sharey=True, layout="constrained"
    )
    for i, (domain, runs) in enumerate(curves.items()):
        for engine, style in zip(ENGINES, ({"lw": 4, "alpha": 0.35}, {"lw": 1.2}), strict=True):
            curve, label = runs[engine], f"{domain}, {engine}"
            steps = range(1, len(curve.losses) + 1)
            left.plot(steps, curve.losses, color=f"C{i}", label=label, **style)
            right.plot(curve.seconds[: len(steps)], curve.losses, color=f"C{i}", **style)
    left.set_xlabel("step")
    right.set_xlabel("CPU seconds")
    left.set_ylabel("loss, nats per byte")
    left.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Software": None})


def positive(text: str) -> int:
    """An argument that counts something."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number}, wanted >= 1")
    return number


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--adapters", nargs="+", choices=ADAPTER_DOMAINS, default=["charmap", "gui"]
    )
    parser.add_argument("--steps", type=positive, default=40, help="of each adapter")
    parser.add_argument("--batch", type=positive, default=8, help="windows of 256 bytes a step")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--windows", type=positive, default=12, help="held-out windows of an adapter"
    )
    parser.add_argument("--out", type=Path, default=Path("out/train"), metavar="FOLDER")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()

    console, began = Console(), time.monotonic()
    console.print("Some minutes on two CPU cores.")
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[loss]}")
    curves: dict[str, dict[str, Curve]] = {}
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        for domain in args.adapters:
            curves[domain] = {e: train(e, domain, args, progress) for e in ENGINES}
    dtype = getattr(torch, args.dtype)
    held_out = served_losses(args.adapters, args.out / "moelora", args.windows, dtype)
    show(console, curves, held_out)
    plot(curves, args.out / "training.png")
    record = {d: {e: vars(curve) for e, curve in runs.items()} for d, runs in curves.items()}
    (args.out / "training.json").write_text(json.dumps(record) + "\n")
    console.print(
        f"adapters: {args.out}/moelora/<adapter>; plot: {args.out}/training.png; all of it took "
        f"{time.monotonic() - began:.0f} s"
    )
    # In bfloat16 a near-tie of a router falls either way, and curves part within its noise.
    same = all(difference(runs) < SAME for runs in curves.values()) or args.dtype != "float32"
    console.print(f"the same loss in every step: {same}")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
