"""A training step of a layer on a GPU: what <card>-training.json is written by.

    python -m benchmarks.training --out benchmarks/results/h200-training.json --peers .peers/train
    python -m benchmarks.training --ranks 32,16x8,16+32+32+48x16 --tokens 4096,16384

Forward and backward through autograd, frozen weights and adapters in bfloat16, random routing:
softmax of normal logits, top-k, renormalized. A rank is that of one tenant; `16x8` are eight
tenants of rank 16, `16+32+32+48x16` sixteen with these ranks in turns, each token with a random
one. Microseconds are medians of 11 by CUDA events, L2 overwritten before each, the host ahead of
the GPU. MiB are what a step needs above weights, adapters, inputs and dout: the peak, and what
autograd keeps.

`bound_us` is the larger of bytes over the card's bandwidth and operations over its rate, as in
`moelora bench`: base forward and dX, LoRA forward, dX, dA and dB; weights twice; factors
twice and gradients once, of the pairs of expert and adapter that have tokens, up to their true
ranks; x, out, dout and dx; pre-activations out and in. `max_err_ratio`: the largest error of a
gradient over that of the same layer in torch, both against float64, of a small layer.

`--formats` has frozen weights of other formats, those of `python -m moelora bench`, and blocks of
FP8 by two names: fp8, whose activations are in FP8, as they are served, and w8a16, whose
activations are in bfloat16. Errors are those of the same weights dequantized, with activations in
bfloat16. Formats whose blocks do not divide the sizes of a shape are left out.

`--grouped-mm` also times, of one tenant, the step that dequantizes whole stacks in both passes (NF4
by bitsandbytes) and calls torch._grouped_mm (`grouped_mm_us`).

`--peers DIR` has bench_train.py, which measures other projects' kernels in the same way: on bf16
weights, on MXFP4 weights, and with eight tenants.
"""

import argparse
import itertools
import json
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

import moelora
from benchmarks import grouped_mm
from moelora import _C
from moelora.bench import results
from moelora.bench.formats import FORMATS
from moelora.bench.machine import elapsed_ms, gpu_peaks
from moelora.reference import naive_fused_experts_lora_backward
from moelora.reference.backward import TRAINED

SHAPES = {  # experts, experts of a token, hidden, intermediate
    "qwen3": (128, 8, 2048, 768),
    "gptoss": (32, 4, 2880, 2880),
    "glm45air": (128, 8, 4096, 1408),
    "mixtral": (8, 2, 4096, 14336),
}
TOKENS = {"qwen3": (1024, 4096, 16384)}  # others: without the first
NATIVE = {"activations": "native"}
KINDS = {"fp8": ("fp8_block", {}), "w8a16": ("fp8_block", NATIVE)}  # others: as in FORMATS
CHECKED = (16, 4, 512, 384)
CHECKED_TOKENS = 384
REPEATS, WARM_UP = 11, 3


class Adapters(NamedTuple):
    """Tenants of a step, and their ranks in turns."""

    turns: tuple[int, ...]
    tenants: int

    @property
    def ranks(self):
        return [self.turns[i % len(self.turns)] for i in range(self.tenants)]

    @property
    def name(self):
        """Of ranks: an integer, if all tenants have the same."""
        return self.turns[0] if len(set(self.ranks)) == 1 else "+".join(map(str, self.turns))


def adapters_of(word):
    """Of an item of --ranks: RANK[+RANK...][xTENANTS]."""
    ranks, _, tenants = word.partition("x")
    return Adapters(tuple(map(int, ranks.split("+"))), int(tenants or 1))


def draw(shape, tokens, adapters, device="cuda", seed=0):
    """(arguments of the layer, dout)"""
    experts, top_k, hidden, inter = shape
    ranks, tenants = adapters.ranks, adapters.tenants
    rank = max(ranks)
    make = torch.Generator(device).manual_seed(seed)

    def normal(*size, std=1.0, dtype=torch.bfloat16):
        empty = torch.empty(size, dtype=dtype, device=device)
        return empty.normal_(0, std, generator=make)

    weights, ids = normal(tokens, experts, dtype=torch.float32).softmax(-1).topk(top_k)
    at = (tenants, experts)
    arguments = {
        "hidden_states": normal(tokens, hidden),
        "w13": normal(experts, 2 * inter, hidden, std=hidden**-0.5),
        "w2": normal(experts, hidden, inter, std=inter**-0.5),
        "topk_weights": weights / weights.sum(-1, keepdim=True),
        "topk_ids": ids,
        "token_lora_mapping": torch.randint(tenants, (tokens,), device=device, generator=make),
        "w13_lora_a": normal(*at, rank, hidden, std=hidden**-0.5),
        "w13_lora_b": normal(*at, 2 * inter, rank, std=rank**-0.5),
        "w2_lora_a": normal(*at, rank, inter, std=inter**-0.5),
        "w2_lora_b": normal(*at, hidden, rank, std=rank**-0.5),
        "lora_scalings": torch.full((tenants,), 0.5, device=device),
    }
    if min(ranks) < rank:
        arguments["lora_ranks"] = torch.tensor(ranks, dtype=torch.int32, device=device)
    return arguments, normal(tokens, hidden)


def kind_of(name):
    """Of an item of --formats: (bf16 or a key of FORMATS, options of its packing)."""
    return KINDS.get(name, (name, {}))


def fits(kind, shape):
    """Whether the blocks of a format divide the sizes of a layer."""
    return kind == "bf16" or not any(size % FORMATS[kind].multiple for size in shape[2:])


def quantize(arguments, kind, shape, **options):
    """The arguments with random weights of a format."""
    if kind == "bf16":
        return arguments
    experts, _, hidden, inter = shape
    make = torch.Generator(arguments["hidden_states"].device).manual_seed(1)
    pack, draw_format = FORMATS[kind].pack, FORMATS[kind].draw
    w13 = draw_format(experts, 2 * inter, hidden, make, torch.bfloat16)
    w2 = draw_format(experts, hidden, inter, make, torch.bfloat16)
    return arguments | {
        "w13": pack(*w13, gate_up="concatenated", **options),
        "w2": pack(*w2, **options),
    }


def count_pairs(arguments, adapters):
    """[tenants] numbers of experts that tokens of a tenant reach."""
    ids, tenant = arguments["topk_ids"], arguments["token_lora_mapping"]
    experts = arguments["w13_lora_a"].size(1)
    pairs = torch.unique(tenant.unsqueeze(1) * experts + ids)
    return torch.bincount(pairs // experts, minlength=adapters.tenants).tolist()


def bound(shape, tokens, adapters, pairs, peaks, bits=16):
    """Least microseconds of a forward and a backward, with weights of `bits`.

    Tenants have the same number of tokens, and `pairs` experts each.
    """
    experts, top_k, hidden, inter = shape
    rows = tokens * top_k
    of_rank = 2 * hidden + 3 * inter
    weights = min(experts, rows) * 3 * hidden * inter * bits / 8
    lora = sum(n * rank for n, rank in zip(pairs, adapters.ranks, strict=True)) * of_rank * 2
    moved = 2 * weights + 3 * lora + 4 * tokens * hidden * 2 + 2 * rows * 2 * inter * 2
    rank = statistics.mean(adapters.ranks)
    done = 2 * rows * (2 * 3 * hidden * inter + 3 * rank * of_rank)
    return 1e6 * peaks.bound(done, moved)


class Step:
    def __init__(self, arguments, dout, layer=moelora.fused_experts_lora):
        self.layer = layer
        trained = {n: arguments[n].requires_grad_() for n in TRAINED if n in arguments}
        self.arguments, self.dout, self.leaves = arguments, dout, list(trained.values())

    def forward(self):
        return self.layer(**self.arguments)

    def run(self):
        for leaf in self.leaves:
            leaf.grad = None
        out = self.forward()
        out.backward(self.dout)


def measure_memory(step):
    """(peak, what autograd keeps) in MiB above what is there before."""
    tensors = [getattr(v, "data", v) for v in step.arguments.values()]
    resident = {v.untyped_storage().data_ptr() for v in tensors}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in resident:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    for leaf in step.leaves:
        leaf.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = step.forward()
    out.backward(step.dout)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    return peak / 2**20, sum(kept.values()) / 2**20


def measure(call, flush):
    times = []
    for _ in range(REPEATS):
        flush.zero_()
        torch.cuda._sleep(8_000_000)  # about 5 ms, in which the host queues the step
        times.append(elapsed_ms(call) * 1e3)
    return statistics.median(times)


def error_ratio(adapters, kind="bf16", device="cuda"):
    """The largest error of a gradient of ours over that of torch in bfloat16."""
    arguments, dout = draw(CHECKED, CHECKED_TOKENS, adapters, device)
    options = NATIVE if kind == "fp8_block" else {}
    given = {n: v.clone() for n, v in arguments.items()}
    ours = Step(quantize(given, kind, CHECKED, **options), dout)
    if kind != "bf16":
        arguments |= {n: ours.arguments[n].unpack() for n in ("w13", "w2")}
    ours.run()
    found = {n: ours.arguments[n].grad for n in TRAINED if n in arguments}
    wide = {n: v.double() if v.is_floating_point() else v for n, v in arguments.items()}
    wide["topk_weights"] = arguments["topk_weights"]
    exact = naive_fused_experts_lora_backward(dout.double(), **wide)
    naive = naive_fused_experts_lora_backward(dout, **arguments)
    ratios = []
    for name, got in found.items():
        want, other = exact[name], naive[name]
        want, other = (v[0] if isinstance(v, list) else v for v in (want, other))
        off, allowed = ((v.double() - want.double()).abs().max().item() for v in (got, other))
        ratios.append(off / allowed if allowed else math.inf)
    return max(ratios)


def measure_grouped_mm(step, kind, flush):
    """Microseconds of the same step that dequantizes and calls torch._grouped_mm."""
    arguments = step.arguments
    if kind == "nf4":
        arguments = arguments | {n: grouped_mm.BnbStack.like(arguments[n]) for n in ("w13", "w2")}
    other = Step(arguments, step.dout, grouped_mm.fused_experts_lora)
    for _ in range(WARM_UP):
        other.run()
    return measure(other.run, flush)


def run_peers(directory, args):
    """Rows of bench_train.py, by (shape, tokens, rank, tenants, format)."""
    out = Path(directory) / "moelora"
    ranks = [word.partition("x")[0] for word in args.ranks.split(",")]
    ranks = ",".join(dict.fromkeys(word for word in ranks if "+" not in word))
    if not ranks:
        return {}  # peers have no mixed ranks
    words = [sys.executable, "bench_train.py", "--out", str(out.resolve()), "--name", "peers.json"]
    words += ["--shapes", args.shapes, "--ranks", ranks, "--budget-s", str(args.peers_s)]
    words += ["--tokens", args.tokens] if args.tokens else []
    words += ["--peers", args.peer_names] if args.peer_names else []
    subprocess.run(words, cwd=directory, check=False, timeout=args.peers_s + 120)
    rows = {}
    for case in json.loads((out / "peers.json").read_text())["cases"]:
        if case.get("ok"):
            key = (case["shape"], case["tokens"], case["rank"], case["tenants"])
            key += ("mxfp4" if case["mx"] else "bf16",)
            names = ("fwd_us", "fwdbwd_us", "peak_mib", "saved_mib")
            rows.setdefault(key, {})[case["peer"]] = {name: case[name] for name in names}
    return rows


def cases_of(args, kind):
    """(name of a shape, tokens) that a format's blocks divide."""
    for name in args.shapes.split(","):
        tokens = [int(t) for t in args.tokens.split(",")] if args.tokens else None
        if fits(kind, SHAPES[name]):
            yield from ((name, t) for t in tokens or TOKENS.get(name, (4096, 16384)))


def measure_case(name, tokens, adapters, format_name, peaks, flush):
    """A row of the result file without its errors and peers, and the step."""
    shape, (kind, options) = SHAPES[name], kind_of(format_name)
    bits = 16 if kind == "bf16" else FORMATS[kind].bits
    arguments, dout = draw(shape, tokens, adapters)
    pairs = count_pairs(arguments, adapters)
    step = Step(quantize(arguments, kind, shape, **options), dout)
    del arguments  # frees the 16-bit weights
    for _ in range(WARM_UP):
        step.run()
    peak, saved = measure_memory(step)
    limit = bound(shape, tokens, adapters, pairs, peaks, bits)
    both = measure(step.run, flush)
    plan = _C.last_plan()
    forward = measure(step.forward, flush)
    row = {"shape": name, "tokens": tokens, "rank": adapters.name, "tenants": adapters.tenants}
    row |= {"format": format_name, "ours_us": round(both, 1), "ours_fwd_us": round(forward, 1)}
    row |= {"bound_us": round(limit, 1), "share": round(limit / both, 3), "pairs": sum(pairs)}
    row |= {"peak_mib": round(peak, 1), "saved_mib": round(saved, 1), "plan": plan, "peers": {}}
    return row, step


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tokens", default="")
    parser.add_argument("--ranks", default="16,64", help="RANK[+RANK...][xTENANTS], several")
    names = ", ".join(("bf16", *KINDS, *FORMATS))
    parser.add_argument("--formats", default="bf16", help=names)
    parser.add_argument("--deadline-s", type=float, help="begin no case later than that")
    parser.add_argument("--grouped-mm", action="store_true", help="and time it, of one tenant")
    parser.add_argument("--peers", help="a folder with bench_train.py")
    parser.add_argument("--peer-names", default="", help="some of them")
    parser.add_argument("--peers-s", default=500.0, type=float, help="seconds for them")
    parser.add_argument("--out", help="result file to write")
    args = parser.parse_args(argv)
    begun = time.monotonic()
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    rows, ratios, peaks = [], {}, gpu_peaks()
    words = itertools.product(args.ranks.split(","), args.formats.split(","))
    for word, format_name in words:
        adapters, (kind, _) = adapters_of(word), kind_of(format_name)
        for name, tokens in cases_of(args, kind):
            if args.deadline_s and time.monotonic() - begun > args.deadline_s:
                print(f"out of time before {name} {tokens} {word} {format_name}", flush=True)
                continue
            if (adapters, kind) not in ratios:
                ratios[adapters, kind] = round(error_ratio(adapters, kind), 3)
            row, step = measure_case(name, tokens, adapters, format_name, peaks, flush)
            row["max_err_ratio"] = ratios[adapters, kind]
            if args.grouped_mm and adapters.tenants == 1:
                row["grouped_mm_us"] = round(measure_grouped_mm(step, kind, flush), 1)
            print(json.dumps(row), flush=True)
            rows.append(row)
            if args.out:
                results.write(args.out, rows)
            del step
            torch.cuda.empty_cache()
    if args.peers:
        del flush
        torch.cuda.empty_cache()
        found = run_peers(args.peers, args)
        for row in rows:
            key = tuple(row[n] for n in ("shape", "tokens", "rank", "tenants", "format"))
            row["peers"] = found.get(key, {})
        if args.out:
            results.write(args.out, rows)


if __name__ == "__main__":
    main()
