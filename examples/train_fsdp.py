"""Trains an adapter with FSDP2: `torchrun --standalone --nproc-per-node 2 examples/train_fsdp.py`.

Each process has a part of all parameters, those of PEFT and the frozen ones, and trains on its part
of each batch; `fully_shard` gathers the parameters of one decoder layer at a time, and moelora
reads them there. On GPUs with NCCL, else on CPUs with gloo. With --quantized the experts are those
of a small gpt-oss in MXFP4, made on the spot: packed tiles are no parameters, so that every process
has all of them. --slots 2 trains two adapters side by side instead of PEFT's one: `multi_lora` puts
a module with slots where the model runs `grouped_mm`, and FSDP2 shards these, too. --check compares
the gradients of the first step with those of one process that has the whole batch.
"""

import argparse
import os
from pathlib import Path

# libgomp reads it as torch loads it; see demo.py.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.distributed as dist
import transformers
from demo_data import MODEL_DIR, draw_rows, training_tokens
from peft import LoraConfig, get_peft_model
from quantized_folders import TARGETS, gpt_oss, make_folder
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import moelora.integrations.peft as moelora_peft
import moelora.integrations.transformers as moelora_hf
from moelora.training import LoraSlot, set_adapters

BYTES = 256  # tokens
TOLERANCE = 1e-4  # of a gradient's norm: the parts of a batch add in another order


def dtype_on(device: torch.device) -> torch.dtype:
    """Of the model: kernels on GPUs take only 16 bits."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def load(args: argparse.Namespace, device: torch.device) -> torch.nn.Module:
    """The base model with a new adapter, attached; the same in all processes."""
    if args.quantized:
        folder = args.out / "model"
        if dist.get_rank() == 0:
            config = gpt_oss()
            config.vocab_size = BYTES
            make_folder(folder, "mxfp4", config=config)
        dist.barrier()
        base = moelora_hf.load_quantized(folder, device_map=str(device))
    else:
        base = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=dtype_on(device)).to(device)
    if args.slots:
        base.requires_grad_(False)
        moelora_hf.multi_lora(base, slots=args.slots, max_rank=8)
        for slot in range(args.slots):
            LoraSlot(base, slot).open(rank=8, generator=torch.Generator().manual_seed(slot))
        with_gradients(base, "lora_b")
        return base.train()
    config = LoraConfig(
        r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], target_parameters=TARGETS
    )
    torch.manual_seed(0)  # only now: not every process has drawn a folder
    model = get_peft_model(base, config).train()
    with_gradients(model, "lora_B")
    moelora_peft.attach(model)
    return model


def with_gradients(model: torch.nn.Module, zeros: str) -> None:
    """Draw the factors B: while they are zeros, the gradients of A are zero."""
    draws = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if zeros in name:
            parameter.data.copy_(0.02 * torch.randn(parameter.shape, generator=draws))


def shard(model: torch.nn.Module) -> None:
    """Of all that requires gradients or not, each process keeps its part."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    for layer in base.model.layers:
        fully_shard(layer)
    fully_shard(model)


def loss_of(model: torch.nn.Module, rows: torch.Tensor, slots: int) -> torch.Tensor:
    """Of rows whose adapters take turns."""
    if slots:
        set_adapters(model, torch.arange(len(rows), device=rows.device) % slots)
    return model(rows, labels=rows, use_cache=False).loss


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Of each trained parameter, gathered from all processes."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            found[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return found


def worst(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The largest distance of a gradient from the wanted one, over the norm of that."""
    if found.keys() != wanted.keys():
        raise RuntimeError(f"gradients of {sorted(found.keys() ^ wanted.keys())} are missing")
    return max(((found[n] - g).norm() / g.norm()).item() for n, g in wanted.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=8, help="rows of a step, of all processes")
    parser.add_argument("--length", type=int, default=64, help="tokens of a row")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--quantized", action="store_true", help="experts in MXFP4")
    parser.add_argument("--slots", type=int, default=0, help="adapters of experts, side by side")
    parser.add_argument("--check", action="store_true", help="compare the first gradients")
    parser.add_argument("--out", type=Path, default=Path("out/train_fsdp"), metavar="FOLDER")
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if args.batch % world:
        parser.error(f"--batch {args.batch} rows are not the same number for {world} processes")

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    rows = draw_rows(training_tokens("charmap"), args.steps * args.batch, args.length)
    batches = rows.to(device).split(args.batch)
    own = slice(rank * args.batch // world, (rank + 1) * args.batch // world)

    model = load(args, device)
    wanted = {}
    if args.check:
        loss_of(model, batches[0], args.slots).backward()
        wanted = gradients(model)
        model.zero_grad()
    shard(model)
    slots = [LoraSlot(model, slot) for slot in range(args.slots)]
    trained = [slot.parameters() for slot in slots]
    trained = trained or [[p for p in model.parameters() if p.requires_grad]]
    optimizers = [torch.optim.AdamW(parameters, lr=args.lr) for parameters in trained]
    failed = 0
    for step, rows in enumerate(batches):
        loss = loss_of(model, rows[own], args.slots)
        loss.backward()
        if step == 0 and args.check:
            off = worst(gradients(model), wanted)
            exact = not args.quantized and dtype_on(device) == torch.float32
            failed = int(not off < TOLERANCE * (1 if exact else 100))
            say(f"gradients of {len(wanted)} parameters: {off:.1e} of one process's at most")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        say(f"step {step}: loss {mean.item() / world:.3f}")

    for slot, optimizer in zip(slots, optimizers, strict=False):
        slot.save(args.out / f"adapter{slot.slot}", optimizer)
    if not slots:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        full = get_model_state_dict(model, options=options)
        if rank == 0:
            model.save_pretrained(args.out / "adapter", state_dict=full)
    say(f"saved {args.out}")
    dist.barrier()
    dist.destroy_process_group()
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
