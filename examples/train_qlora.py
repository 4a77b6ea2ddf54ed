"""QLoRA of a gpt-oss: `python examples/train_qlora.py`.

Makes a checkpoint folder as OpenAI publishes gpt-oss, with MXFP4 experts, but small and of random
weights; loads it without dequantizing an expert; trains an adapter of experts and attention with
PEFT and transformers' Trainer on the text of the demo; samples between steps from the model that
trains; and serves what it saved. `--model openai/gpt-oss-20b` takes a real folder instead.
`--experts nf4` rounds the experts of a folder of 16 bits while it is loaded: of a small Qwen3-MoE
made here, or of `--model Qwen/Qwen3-30B-A3B`.
"""

import argparse
import os
import time
from pathlib import Path

# libgomp reads it as torch loads it; see demo.py.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import transformers
from demo_data import draw_rows, training_tokens
from peft import LoraConfig, get_peft_model
from quantized_folders import TARGETS, gpt_oss, make_folder, qwen3_moe
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import AutoTokenizer, Trainer, TrainerCallback, TrainingArguments

import moelora.integrations.peft as moelora_peft
import moelora.integrations.transformers as moelora_hf
from moelora.integrations.transformers.projection import QuantizedProjection
from moelora.weights.rounding import ROUNDINGS

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
BYTES = 256  # the vocabulary of the folder made here


class Watch(TrainerCallback):
    """Moves a bar, and samples from the model now and then."""

    def __init__(self, model, prompt: torch.Tensor, progress: Progress, steps: int):
        self.model, self.prompt, self.progress = model, prompt, progress
        self.task = progress.add_task("training", total=steps, loss="")
        self.losses: list[float] = []
        self.samples: list[list[int]] = []

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:
            self.losses.append(logs["loss"])
            self.progress.update(self.task, advance=1, loss=f"loss {logs['loss']:.3f}")

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % max(1, state.max_steps // 3) == 0:
            self.samples.append(sample(self.model, self.prompt))


def sample(model, prompt: torch.Tensor, **options) -> list[int]:
    tokens = model.generate(prompt, max_new_tokens=24, do_sample=False, pad_token_id=0, **options)
    return tokens[0, prompt.size(1) :].tolist()


def data(model: str | None, length: int, count: int) -> torch.Tensor:
    """(count, length) tokens: bytes, or what the tokenizer of a real model makes of them."""
    text = training_tokens("charmap")
    if model is not None:
        words = bytes(text.tolist()).decode(errors="replace")
        text = torch.tensor(AutoTokenizer.from_pretrained(model)(words)["input_ids"])
    return draw_rows(text, count, length)


def at_least(least: int):
    """The type of an argument that counts something."""

    def number(text: str) -> int:
        if (found := int(text)) < least:
            raise argparse.ArgumentTypeError(f"{found}, wanted >= {least}")
        return found

    return number


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", help="a folder or an id on the Hub, instead of a small one")
    parser.add_argument("--experts", choices=ROUNDINGS, help="round experts of 16 bits to this")
    # The loss of the last step is compared with that of the first.
    parser.add_argument("--steps", type=at_least(2), default=30)
    parser.add_argument("--batch", type=at_least(1), default=8, help="rows of a step")
    parser.add_argument("--length", type=at_least(2), default=64, help="tokens of a row")
    parser.add_argument("--rank", type=at_least(1), default=8)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--out", type=Path, default=Path("out/train_qlora"), metavar="FOLDER")
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    console, device = Console(), "cuda" if torch.cuda.is_available() else "cpu"

    source = args.model
    if source is None:
        source = args.out / "model"
        config = qwen3_moe() if args.experts else gpt_oss()
        config.vocab_size = BYTES
        if args.experts:
            torch.manual_seed(0)
            config.initializer_range = 0.15
            made = transformers.AutoModelForCausalLM.from_config(config)
            made.bfloat16().save_pretrained(source)
        else:
            make_folder(source, "mxfp4", config=config)

    def load():
        return moelora_hf.load_quantized(source, device_map=device, experts=args.experts)

    torch.manual_seed(0)
    base = load()
    tiles = [m.weights for m in base.modules() if isinstance(m, QuantizedProjection)]
    before = [weights.data.clone() for weights in tiles] if args.model is None else []
    model = get_peft_model(
        base,
        LoraConfig(
            task_type="CAUSAL_LM",
            r=args.rank,
            lora_alpha=2 * args.rank,
            target_modules=ATTENTION,
            target_parameters=TARGETS,
        ),
    )
    moelora_peft.attach(model.train())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    console.print(
        f"experts: {sum(w.shape.numel() for w in tiles):,} numbers in "
        f"{sum(w.nbytes for w in tiles) / 1e6:,.1f} MB; trained: {trained:,}"
    )

    rows = data(args.model, args.length, args.steps * args.batch).to(device)
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[loss]}")
    began = time.monotonic()
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        watch = Watch(model, rows[:1, :16], progress, args.steps)
        options = TrainingArguments(
            output_dir=str(args.out / "trainer"),
            max_steps=args.steps,
            per_device_train_batch_size=args.batch,
            learning_rate=args.lr,
            lr_scheduler_type="cosine",
            logging_steps=1,
            save_strategy="no",
            gradient_checkpointing=True,
            report_to=[],
            disable_tqdm=True,
            use_cpu=device == "cpu",
            dataloader_pin_memory=False,
        )
        dataset = [{"input_ids": row, "labels": row} for row in rows.cpu()]
        trainer = Trainer(model, options, train_dataset=dataset, callbacks=[watch])
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    tokens = args.steps * args.batch * args.length
    console.print(f"{tokens / (time.monotonic() - began):,.0f} tokens/s")
    if device == "cuda":
        console.print(f"peak memory {torch.cuda.max_memory_allocated() / 1e9:.1f} GB")
    # For embeddings PEFT would look up the base model on the Hub.
    model.save_pretrained(args.out / "adapter", save_embedding_layers=False)

    served = load()
    moelora_hf.load_adapters(served, {"trained": args.out / "adapter"})
    with torch.no_grad():
        ids = rows[:1].repeat(2, 1)
        model.eval()
        ours = served(ids, adapter_names=["trained", "__base__"]).logits.float()
        one = model(ids[:1]).logits.float()
    apart = (ours[:1] - one).abs().mean(-1).median().item()
    good = watch.losses[-1] < watch.losses[0] and apart < 0.1 * one.std().item()
    good &= all(torch.equal(w.data, old) for w, old in zip(tiles, before, strict=False))
    first, last = watch.losses[0], watch.losses[-1]
    console.print(
        f"loss {first:.3f} -> {last:.3f}; served as trained, within rounding: {apart:.4f}"
    )
    for tokens in watch.samples:
        console.print(f"sampled: {tokens[:12]}", markup=False)
    console.print(f"adapter: {args.out}/adapter; it learned and is served: {good}", soft_wrap=True)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
