"""One adapter across processes that share a model: trains, resumes with another number, serves.

    torchrun --standalone --nproc-per-node 2 examples/parallel.py train --mode ep --out out/two
    python examples/parallel.py train --resume out/two --out out/one
    torchrun --standalone --nproc-per-node 2 examples/parallel.py serve out/one --mode tp

transformers shards the demo model: `--mode tp` splits every weight, `tp+ep` every weight but whole
experts, `ep` whole experts, each process with its own part of the batch. Attached, PEFT's factors
train in all processes together, and every process calls `save_pretrained`. Each prints a digest of
the factors that it has: all have the same ones, and so has what resumes. On GPUs with NCCL, else on
CPUs with gloo; one process needs no mode.
"""

import argparse
import hashlib
import os
from pathlib import Path

# libgomp reads it as torch loads it; see demo.py.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.distributed as dist
import transformers
from demo_data import MODEL_DIR, draw_rows, training_tokens
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

import moelora.integrations.peft as moelora_peft
import moelora.integrations.transformers as moelora_hf

TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def load(mode: str | None, world: int) -> transformers.PreTrainedModel:
    """The base model, sharded over all processes."""
    options: dict = {"dtype": torch.bfloat16 if torch.cuda.is_available() else torch.float32}
    if world > 1:
        from transformers.distributed import DistributedConfig

        sizes = {
            "tp": {"tp_size": world},
            "tp+ep": {"tp_size": world, "ep_size": world},
            "ep": {"fsdp_size": world, "ep_size": world},
        }
        options["distributed_config"] = DistributedConfig(**sizes[mode or "ep"])
    elif torch.cuda.is_available():
        options["device_map"] = "cuda"
    return AutoModelForCausalLM.from_pretrained(MODEL_DIR, **options)


def digest(model: torch.nn.Module) -> str:
    """Hashes all trainable factors; sharded ones are gathered first."""
    total = hashlib.sha256()
    for name, factor in sorted(model.named_parameters()):
        if factor.requires_grad:
            factor = factor.detach()
            whole = factor.full_tensor() if hasattr(factor, "full_tensor") else factor
            total.update(name.encode() + whole.float().cpu().numpy().tobytes())
    return total.hexdigest()[:16]


def train(args: argparse.Namespace, rank: int, world: int) -> None:
    base = load(args.mode, world)
    if args.resume:
        model = PeftModel.from_pretrained(base, args.resume, is_trainable=True)
    else:
        config = LoraConfig(
            r=8, lora_alpha=16, target_modules=["q_proj"], target_parameters=TARGETS
        )
        torch.manual_seed(args.seed)
        model = get_peft_model(base, config)
    moelora_peft.attach(model.train())
    print(f"rank {rank} begins with {digest(model)}\n", end="", flush=True)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=args.lr, foreach=False
    )
    text = training_tokens("charmap")
    batches = draw_rows(text, args.steps * args.batch, args.length, args.seed).to(model.device)
    parts = world if world > 1 and (args.mode or "ep") == "ep" else 1
    mine = slice(rank % parts * args.batch // parts, (rank % parts + 1) * args.batch // parts)
    for step, rows in enumerate(batches.split(args.batch)):
        loss = model(rows[mine], labels=rows[mine], use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    print(f"rank {rank} ends with {digest(model)}\n", end="", flush=True)
    model.save_pretrained(args.out, is_main_process=rank == 0)  # all processes call it
    if rank == 0:
        print(f"saved {args.out}", flush=True)


@torch.no_grad()
def serve(args: argparse.Namespace, rank: int, world: int) -> None:
    model = load(args.mode, world).eval()
    pool = moelora_hf.load_adapters(model, {"trained": args.adapter})
    text = draw_rows(training_tokens("charmap"), 80, 64).to(model.device)
    rows = text[:1, :32].repeat(2, 1)
    names = ["trained", None]
    if world > 1 and (args.mode or "ep") == "ep":
        out = model(rows, adapter_names=names).logits.argmax(-1)[:, -1:]
    else:
        out = model.generate(rows, adapter_names=names, max_new_tokens=24, do_sample=False)
    for name in names:
        loss = model(text, labels=text, adapter_names=[name] * len(text)).loss.item()
        if rank == 0:
            print(f"{name}: loss {loss:.4f}", flush=True)
    for layer, part in list(pool.describe().items())[:2]:
        print(f"rank {rank} holds of {layer} {part}\n", end="", flush=True)
    if rank == 0:
        for name, row in zip(names, out.tolist(), strict=True):
            print(f"{name}: {bytes(row)!r}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    commands = parser.add_subparsers(required=True)
    training = commands.add_parser("train")
    training.set_defaults(run=train)
    training.add_argument("--out", type=Path, default=Path("out/parallel"), metavar="FOLDER")
    training.add_argument("--resume", type=Path, metavar="FOLDER", help="an adapter to go on with")
    training.add_argument("--steps", type=int, default=10)
    training.add_argument("--batch", type=int, default=8, help="rows of a step, of all processes")
    training.add_argument("--length", type=int, default=64, help="tokens of a row")
    training.add_argument("--lr", type=float, default=2e-3)
    training.add_argument(
        "--seed", type=int, default=0, help="of the factors and the choice of rows"
    )
    serving = commands.add_parser("serve")
    serving.set_defaults(run=serve)
    serving.add_argument("adapter", type=Path, metavar="FOLDER")
    for command in (training, serving):
        command.add_argument("--mode", choices=("tp", "tp+ep", "ep"), help="of several processes")
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    world = int(os.environ.get("WORLD_SIZE", 1))
    args.run(args, int(os.environ.get("RANK", 0)), world)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
