"""Trains the demo model and its adapters: `python examples/train_demo.py`.

A byte-level mixture of experts (transformers' Qwen3-MoE class) is trained on the standard library
with a small share of every adapter's domain; then PEFT trains one LoRA adapter per domain on the
only the 3-D expert weights, with the base model frozen as it was saved. Everything is written in
bf16 and `training.json` has the losses of the saved files on the held-out text beside them.
"""

import argparse
import json
import math
import platform
import time
from collections.abc import Iterator
from pathlib import Path

import peft
import torch
import transformers
from demo_data import (
    ADAPTER_DOMAINS,
    ADAPTERS_DIR,
    DOMAINS,
    MODEL_DIR,
    WINDOW,
    eval_windows,
    held_out_excerpt,
    training_tokens,
)
from peft import LoraConfig, PeftModel, get_peft_model
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

SEED = 20240601
BATCH = 16
BASE_LR = 3e-3
ADAPTER_LR = 4e-3
ADAPTER_SHARE = 0.02  # of the base model's training windows, for each adapter domain

CONFIG = {
    "vocab_size": 256,
    "hidden_size": 160,
    "intermediate_size": 512,  # of dense layers, of which there are none
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "tie_word_embeddings": True,
    "max_position_embeddings": 1024,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}

LORA = {  # every adapter has another rank, and each way of scaling occurs
    "reference": {"r": 8, "lora_alpha": 16},
    "charmap": {"r": 4, "lora_alpha": 8},
    "gui": {"r": 16, "lora_alpha": 8, "use_rslora": True},
    "tests": {"r": 6, "lora_alpha": 9},
}
TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def batches(domains: dict[str, float], steps: int) -> Iterator[torch.Tensor]:
    """Random windows of several texts, drawn with given shares."""
    texts = [training_tokens(name) for name in domains]
    shares = torch.tensor(list(domains.values()))
    draws = torch.Generator().manual_seed(SEED)
    for _ in range(steps):
        rows = []
        for i in torch.multinomial(shares, BATCH, replacement=True, generator=draws).tolist():
            at = int(torch.randint(len(texts[i]) - WINDOW, (1,), generator=draws))
            rows.append(texts[i][at : at + WINDOW])
        yield torch.stack(rows)


def train(model, domains: dict, steps: int, lr: float, decay: float, title: str) -> float:
    """AdamW with a short warm-up and a cosine; returns the CPU seconds it took."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.98), weight_decay=decay)
    warmup = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda i: min((i + 1) / warmup, 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * i / steps))),
    )
    started = time.process_time()
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[loss]}")
    with Progress(*columns, TimeRemainingColumn()) as progress:
        task = progress.add_task(title, total=steps, loss="")
        model.train()
        smooth = None
        for tokens in batches(domains, steps):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            value = loss.item()
            smooth = value if smooth is None else 0.98 * smooth + 0.02 * value
            progress.update(task, advance=1, loss=f"loss {smooth:.3f}")
    model.eval()
    return time.process_time() - started


@torch.no_grad()
def evaluate(model, folder: Path) -> dict[str, float]:
    """Mean cross entropy in nats per byte, by domain, on the held-out text in `folder`."""
    losses = {}
    for name in DOMAINS:
        tokens = eval_windows(name, folder=folder)
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1].float()
        losses[name] = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), tokens[:, 1:].flatten()
        ).item()
    return losses


def load_base(folder: Path, dtype=torch.float32):
    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=dtype)
    model.set_experts_implementation("grouped_mm")
    return model


def train_base(folder: Path, steps: int) -> float:
    torch.manual_seed(SEED)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**CONFIG, output_router_logits=True, router_aux_loss_coef=0.01)
    )
    model.set_experts_implementation("grouped_mm")
    shares = dict.fromkeys(ADAPTER_DOMAINS, ADAPTER_SHARE)
    shares["stdlib"] = 1 - sum(shares.values())
    seconds = train(model, shares, steps, BASE_LR, 0.1, "base model")
    model.config.output_router_logits = False
    model.to(torch.bfloat16).save_pretrained(folder)
    return seconds


def train_adapter(base: Path, folder: Path, name: str, steps: int) -> float:
    torch.manual_seed(SEED)
    config = LoraConfig(
        target_modules=[], target_parameters=TARGETS, task_type="CAUSAL_LM", **LORA[name]
    )
    model = get_peft_model(load_base(base), config)
    seconds = train(model, {name: 1.0}, steps, ADAPTER_LR, 0.0, f"adapter {name}")
    model.peft_config["default"].base_model_name_or_path = "examples/demo_model"
    model.to(torch.bfloat16).save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # PEFT's empty model card
    return seconds


def show(report: dict) -> None:
    table = Table(title="loss on held-out text, nats per byte")
    table.add_column("text")
    losses = report["losses"]
    for column in losses:
        table.add_column(column, justify="right")
    for domain in DOMAINS:
        best = min(losses, key=lambda column: losses[column][domain])
        cells = [f"{losses[c][domain]:.3f}" for c in losses]
        cells = [f"[bold]{v}[/]" if c == best else v for c, v in zip(losses, cells, strict=True)]
        table.add_row(domain, *cells)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=1500, help="of the base model")
    parser.add_argument("--adapter-steps", type=int, default=200, help="of each adapter")
    parser.add_argument("--keep-base", action="store_true", help="train the adapters only")
    parser.add_argument("--adapters", nargs="*", default=list(ADAPTER_DOMAINS))
    parser.add_argument("--model", type=Path, default=MODEL_DIR, help="folder to write")
    parser.add_argument("--adapters-dir", type=Path, default=ADAPTERS_DIR, help="folder to write")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers.utils.logging.disable_progress_bar()

    held_out = args.model / "eval"
    report_path = args.model / "training.json"
    report = json.loads(report_path.read_text()) if report_path.exists() else {}
    report = {"cpu seconds": {}, **report}
    steps = report.get("made with", {}).get("base steps")
    if not args.keep_base:
        steps = args.steps
        held_out.mkdir(parents=True, exist_ok=True)
        for name in DOMAINS:
            (held_out / f"{name}.txt").write_bytes(held_out_excerpt(name))
        report["cpu seconds"]["base"] = round(train_base(args.model, steps))
    for name in args.adapters:
        seconds = train_adapter(args.model, args.adapters_dir / name, name, args.adapter_steps)
        report["cpu seconds"][name] = round(seconds)

    base = load_base(args.model)
    report["losses"] = {"no adapter": evaluate(base, held_out)}
    for name in ADAPTER_DOMAINS:
        if (args.adapters_dir / name).exists():
            model = PeftModel.from_pretrained(load_base(args.model), args.adapters_dir / name)
            report["losses"][name] = evaluate(model.eval(), held_out)
    report["made with"] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
        "threads": args.threads,
        "base steps": steps,
        "adapter steps": args.adapter_steps,
        "tokens per step": BATCH * WINDOW,
        "seed": SEED,
    }
    report_path.write_text(json.dumps(report, indent=1) + "\n")
    show(report)


if __name__ == "__main__":
    main()
