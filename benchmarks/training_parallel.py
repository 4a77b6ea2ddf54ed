"""Steps of an adapter's training on several GPUs, for each way that processes share a model.

    python -m benchmarks.training_parallel --world 8 --model Qwen/Qwen3-30B-A3B --out steps.json
    python -m benchmarks.training_parallel --world 2 --batch 2 --length 16 --steps 3    # on CPUs

PEFT's adapter of rank 16 on experts and q_proj, attached, AdamW; `--batch` rows of random tokens a
step, of all processes together. Modes: `tp`, `tp+ep` (both: one batch for all), `ep` (each process
has its part of the batch). seconds: median of the steps after the first, of the slowest process;
forward_seconds: of a forward without gradients, and base_forward_seconds: of the model before it
has adapters (at a few tokens, their difference is host time); factor_bytes: factors that a process
computes with; peak_bytes: of torch's allocator, on GPUs.

More processes than GPUs share one, over gloo: a check that a mode works, not a measurement of it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from moelora.bench import results

DEMO = Path(__file__).resolve().parents[1] / "examples/demo_model"
MODES = ("tp", "tp+ep", "ep")
TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def work(args: argparse.Namespace) -> None:
    """One process of one mode; the first prints a row."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    import moelora.integrations.peft as moelora_peft

    world, cuda = args.world, torch.cuda.is_available()
    if cuda and torch.cuda.device_count() < world:
        os.environ["LOCAL_RANK"] = "0"
        dist.init_process_group("gloo")
    split = {"fsdp_size": world} if args.mode == "ep" else {"tp_size": world}
    model = AutoModelForCausalLM.from_pretrained(
        args.model,
        dtype=torch.bfloat16 if cuda else torch.float32,
        distributed_config=DistributedConfig(**split, ep_size=1 if args.mode == "tp" else world),
    )
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (args.batch, args.length), generator=generator)
    ids = (ids.chunk(world)[dist.get_rank()] if args.mode == "ep" else ids).to(model.device)

    @torch.no_grad()
    def forward():
        model(ids, use_cache=False)

    def step():
        model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    base_forward = median(args.steps, forward)
    config = LoraConfig(r=16, target_modules=["q_proj"], target_parameters=TARGETS)
    model = get_peft_model(model, config)
    pool = moelora_peft.attach(model.train())
    factors = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(factors, lr=1e-4, foreach=False)
    row = {
        "mode": args.mode,
        "world": world,
        "tokens": args.batch * args.length,
        "seconds": median(args.steps, step),
        "forward_seconds": median(args.steps, forward),
        "base_forward_seconds": base_forward,
        "factor_bytes": pool.memory_bytes(),
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
    }
    if dist.get_rank() == 0:
        print(json.dumps(row), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def median(calls: int, call) -> float:
    """Seconds of a call, of the slowest process; the first warms up."""
    seconds, cuda = [], torch.cuda.is_available()
    for _ in range(calls):
        dist.barrier()
        start = time.perf_counter()
        call()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    slowest = torch.tensor(seconds, device="cuda" if cuda else "cpu")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return statistics.median(slowest[1:].tolist())


def main(argv=None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--world", type=int, required=True, help="processes, one for each GPU")
    parser.add_argument("--model", default=str(DEMO), help="folder or id of a model in 16 bits")
    parser.add_argument(
        "--batch", type=int, default=8, help="rows of a step, a multiple of --world"
    )
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)  # of a worker
    args = parser.parse_args(argv)
    if args.batch % args.world:
        parser.error(f"--batch {args.batch} is no multiple of --world {args.world}")
    if args.mode:
        return work(args)
    rows = []
    for mode in args.modes.split(","):
        launch = ["-m", "torch.distributed.run", "--standalone"]
        launch += ["--nproc-per-node", str(args.world)]
        program = ["-m", "benchmarks.training_parallel", *argv, "--mode", mode]
        done = subprocess.run(
            [sys.executable, *launch, *program], stdout=subprocess.PIPE, text=True
        )
        if done.returncode:
            raise SystemExit(f"{mode} failed with {done.returncode}")
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
    if args.out:
        results.write(args.out, rows)


if __name__ == "__main__":
    main()
