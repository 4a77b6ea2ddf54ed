"""Steps of an adapter's training on several GPUs, for each way that processes share a model.

    python -m benchmarks.training_parallel --world 2 --length 16 --steps 2    # on CPUs

PEFT's adapter of rank 16 on experts and q_proj, AdamW, activation checkpointing; `--batch` rows of
random tokens for each GPU. Engines: `moelora`, attached, or `peft` as it is. Modes: `alone` (one
process), `ddp`, `fsdp2` (`fully_shard` on each decoder layer), and transformers' DistributedConfig:
`ep` (whole experts, FSDP2 for the rest), `tp` and `tp+ep` (one batch for all). In MXFP4 each
process has all experts. Qwen3-30B-A3B and `--layers` stand for random weights.

seconds: median of the steps after two, of the slowest process; of_alone: tokens/s of a GPU over
that of one process. For each process: the peak of torch's allocator in these steps, and from a
trace of one more, milliseconds in which kernels compute, NCCL's run, NCCL's alone, and none.
error: of the first process that fails. More processes than GPUs share one, over gloo: a check that
a mode works, not a measurement of it.
"""

import argparse
import itertools
import os
import statistics
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.distributed.fsdp import fully_shard

from benchmarks import ROOT
from benchmarks.gpu import free, timed, wait
from benchmarks.options import parser, report
from benchmarks.processes import apart

DEMO = ROOT / "examples/demo_model"
MODES = ("alone", "ddp", "fsdp2", "ep", "tp", "tp+ep")
ONE_BATCH = ("tp", "tp+ep")
QUANTIZED = ("alone", "ddp", "fsdp2")  # modes in which a process may have all experts
SIZED = {"Qwen3-30B-A3B": {"num_hidden_layers": 48, "head_dim": 128, "norm_topk_prob": True}}
TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
RANK, WARM_UP = 16, 2
# Imported once for all processes. Not peft: bitsandbytes, which it imports, begins with CUDA.
PRELOAD = ["transformers.models.qwen3_moe.modeling_qwen3_moe"]
TRACED = ("computing_ms", "communicating_ms", "uncovered_ms", "idle_ms")


def load(args: argparse.Namespace, case: dict, device: torch.device):
    """The base model, as transformers shards it."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, Qwen3MoeConfig
    from transformers.distributed import DistributedConfig

    world, mode, quantized = case["world"], case["mode"], case["format"] != "bf16"
    options = {"dtype": torch.bfloat16 if quantized or device.type == "cuda" else torch.float32}
    if mode in QUANTIZED:
        options["device_map"] = {"": device}
    else:
        split = {"fsdp_size" if mode == "ep" else "tp_size": world}
        split["ep_size"] = 1 if mode == "tp" else world
        options["distributed_config"] = DistributedConfig(**split)
    path, config = args.model, SIZED.get(args.model)
    config = Qwen3MoeConfig(**config) if config else AutoConfig.from_pretrained(path)
    if args.layers or path in SIZED:  # random weights
        config.num_hidden_layers = args.layers or config.num_hidden_layers
        path, options = None, options | {"config": config, "state_dict": {}}
    torch.manual_seed(0)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(path, **options)
    if quantized:
        from moelora import QuantizedWeights
        from moelora.integrations.transformers.layers import moe_layers
        from moelora.integrations.transformers.projection import set_weights

        for experts, _ in moe_layers(model).values():
            up, down = (w.detach() for w in (experts.gate_up_proj, experts.down_proj))
            up = QuantizedWeights.from_dense(up, case["format"], gate_up="concatenated")
            set_weights(experts, (up, QuantizedWeights.from_dense(down, case["format"])))
        model.set_experts_implementation("moelora")
    return model


def measure(rank: int, case: dict, port: int, args: argparse.Namespace) -> Iterator[dict]:
    """Seconds of each step of one process, and what its GPU does."""
    gpus = torch.cuda.device_count()
    local = rank % gpus if gpus else rank
    names = {"RANK": rank, "LOCAL_RANK": local, "MASTER_PORT": port}
    names |= {"WORLD_SIZE": case["world"], "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {name: str(value) for name, value in names.items()}
    import transformers
    from peft import LoraConfig, get_peft_model

    if ours := case["engine"] == "moelora":  # its import alone changes PEFT
        import moelora.integrations.peft as moelora_peft

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    world, mode, cuda = case["world"], case["mode"], gpus > 0
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    nccl = cuda and gpus >= world
    dist.init_process_group("nccl" if nccl else "gloo", device_id=device if nccl else None)
    model = load(args, case, device)
    layers, vocab = model.model.layers, model.config.vocab_size
    config = LoraConfig(r=RANK, target_modules=["q_proj"], target_parameters=TARGETS)
    model.activation_checkpointing_enable()
    model = get_peft_model(model, config).train()
    if ours:
        moelora_peft.attach(model)
    for part in (*layers, model) if mode == "fsdp2" else ():
        fully_shard(part)
    factors = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(factors, lr=1e-4, foreach=False)
    if mode == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model, [device] if cuda else None)
    generator = torch.Generator().manual_seed(0 if mode in ONE_BATCH else rank)
    rows = args.batch * (world if mode in ONE_BATCH else 1)
    ids = torch.randint(vocab, (rows, args.length), generator=generator).to(device)

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wait()

    seconds = []
    free()
    for _ in range(WARM_UP + args.steps):
        dist.barrier()
        seconds.append(timed(step)[0])
    row = {"seconds": seconds[WARM_UP:]}
    if cuda:
        row["peak_mib"] = round(torch.cuda.max_memory_allocated() / 2**20)
        path = args.traces / "-".join(map(str, case.values())) if args.traces else None
        row |= trace(step, None if rank else path)
    dist.barrier()  # none ends before all have done
    yield row


def trace(step, path: Path | None) -> dict[str, float]:
    """Milliseconds of a step, from its first kernel to its last, in which kernels compute, NCCL's
    run, NCCL's alone, and none; the trace is written to that path."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        step()
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        traced.export_chrome_trace(f"{path}.json.gz")
    spans: dict[bool, list] = {True: [], False: []}  # of NCCL's kernels, and of others
    for e in traced.events():
        if e.device_type.name == "CUDA" and not e.is_user_annotation:
            is_nccl = e.name.startswith("nccl") and "Kernel" in e.name
            spans[is_nccl].append((e.time_range.start, e.time_range.end))
    if not (every := spans[True] + spans[False]):
        return {}
    computing, communicating, busy = map(covered, (spans[False], spans[True], every))
    whole = max(end for _, end in every) - min(begin for begin, _ in every)
    us = computing, communicating, busy - computing, whole - busy
    return {name: round(time / 1e3, 3) for name, time in zip(TRACED, us, strict=True)}


def covered(spans: list[tuple[float, float]]) -> float:
    """How long at least one of the spans (begin, end) lasts."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def run(case: dict, args: argparse.Namespace) -> dict:
    """What a row has of a case's processes."""
    port = get_free_port()
    each = [(rank, case, port, args) for rank in range(case["world"])]
    found = list(apart(measure, each, args.seconds, PRELOAD))
    if "error" in found[-1]:
        return found[-1]
    seconds = statistics.median(map(max, zip(*(row["seconds"] for row in found), strict=True)))
    row = {"seconds": round(seconds, 5), "tokens_per_s": round(args.batch * args.length / seconds)}
    names = ("peak_mib", *TRACED)
    return row | {n: [each[n] for each in found] for n in names if n in found[0]}


def rows(args: argparse.Namespace) -> Iterator[dict]:
    """A row for each case, as it is measured."""
    alone: dict = {}
    sizes = {"model": Path(args.model).name, "layers": args.layers or None}
    sizes |= {"rank": RANK, "tokens": args.batch * args.length}
    for engine, format, mode in itertools.product(args.engines, args.formats, args.modes):
        if format != "bf16" and (engine != "moelora" or mode not in QUANTIZED):
            continue
        world = 1 if mode == "alone" else args.world
        case = {"engine": engine, "format": format, "mode": mode, "world": world}
        row = case | sizes | run(case, args)
        alone.setdefault((engine, format), row.get("tokens_per_s") if mode == "alone" else None)
        if "error" not in row and alone[engine, format]:
            row["of_alone"] = round(row["tokens_per_s"] / alone[engine, format], 3)
        yield row


def main(argv=None) -> None:
    p = parser(
        __doc__,
        model=(str(DEMO), "folder or id, or Qwen3-30B-A3B"),
        layers=(0, "that many, with random weights; 0: the model's"),
        batch=(4, "rows of a step for each GPU"),
        length=1024,
        steps=6,
        engines=(["moelora"], "moelora, peft, or both"),
        formats=(["bf16", "mxfp4"], "of experts"),
        modes=([*MODES], "ways to share a model"),
        seconds=(120.0, "for a mode"),
    )
    p.add_argument("--world", type=int, required=True, help="processes, one for each GPU")
    p.add_argument("--traces", type=Path, metavar="FOLDER", help="of the first process")
    args = p.parse_args(argv)
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # CUDA starts in the forked processes alone
    # libgomp reads it as torch loads it: threads of processes that share cores must not spin.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    report(rows(args), args.out)


if __name__ == "__main__":
    main()
