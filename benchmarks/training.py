"""A training step of a layer on a GPU: what <card>-training.json is written by.

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

`--formats` are those of `moelora bench`, and blocks of FP8 by two names: fp8, whose activations are
in FP8, as they are served, and w8a16, whose activations are in bfloat16. Errors are those of the
same weights dequantized, with activations in bfloat16. `--grouped-mm` also times, of one tenant,
the step of grouped_mm.py. `--peers DIR` has bench_train.py, which measures other projects' kernels
in the same way: on bf16 weights, on MXFP4 weights, and with eight tenants.
"""

import itertools
import json
import math
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from gradient_cases import by_autograd, saved_bytes

import moelora
from benchmarks import grouped_mm
from benchmarks.gpu import free
from benchmarks.models import fan_in
from benchmarks.options import parser, report, words
from moelora import _C
from moelora.bench import cases, results
from moelora.bench.formats import FORMATS
from moelora.bench.machine import elapsed_ms, gpu_peaks
from moelora.bench.shapes import MODELS, Model
from moelora.reference import naive_fused_experts_lora_backward
from moelora.reference.backward import TRAINED

SHAPES = {
    "qwen3": MODELS["qwen3"],
    "gptoss": replace(MODELS["gpt-oss-20b"], activation="silu", bias=False),  # as peers have it
    "glm45air": MODELS["glm4.5-air"],
    "mixtral": MODELS["mixtral"],
}
TOKENS = {"qwen3": (1024, 4096, 16384)}  # others: without the first
NATIVE = {"activations": "native"}
KINDS = {"fp8": ("fp8_block", {}), "w8a16": ("fp8_block", NATIVE)}  # others: as in FORMATS
CHECKED, CHECKED_TOKENS = Model("checked", 16, 4, 512, 384), 384
REPEATS, WARM_UP = 11, 3


def ranks_of(word):
    """Of each tenant, in turns; of an item of --ranks, RANK[+RANK...][xTENANTS]."""
    turns, _, tenants = word.partition("x")
    turns = [int(rank) for rank in turns.split("+")]
    return [turns[i % len(turns)] for i in range(int(tenants or 1))]


def draw(model, tokens, ranks, device="cuda"):
    """(arguments of the layer, dout), of a tenant for each of the ranks"""
    make = torch.Generator(device).manual_seed(0)
    experts, hidden, inter = model.experts, model.hidden, model.intermediate
    tenants, rank = len(ranks), max(ranks)
    batch, at = cases.draw_batch(model, tokens, tenants, make), (tenants, experts)
    arguments = {
        "hidden_states": batch.x,
        "w13": fan_in(make, experts, 2 * inter, hidden),
        "w2": fan_in(make, experts, hidden, inter),
        "topk_weights": batch.topk_weights,
        "topk_ids": batch.topk_ids,
        "token_lora_mapping": batch.mapping,
        "w13_lora_a": fan_in(make, *at, rank, hidden),
        "w13_lora_b": fan_in(make, *at, 2 * inter, rank),
        "w2_lora_a": fan_in(make, *at, rank, inter),
        "w2_lora_b": fan_in(make, *at, hidden, rank),
        "lora_scalings": torch.full((tenants,), 0.5, device=device),
    }
    if min(ranks) < rank:
        arguments["lora_ranks"] = torch.tensor(ranks, dtype=torch.int32, device=device)
    return arguments, cases.normal((tokens, hidden), 1.0, make)


def quantize(arguments, model, **options):
    """The arguments with random weights of the model's format."""
    if model.format is None:
        return arguments
    make = torch.Generator(arguments["hidden_states"].device).manual_seed(1)
    format, (e, k, i) = FORMATS[model.format], (model.experts, model.hidden, model.intermediate)
    w13, w2 = (format.draw(e, *size, make, torch.bfloat16) for size in ((2 * i, k), (k, i)))
    w13 = format.pack(*w13, gate_up=model.gate_up, **options)
    return arguments | {"w13": w13, "w2": format.pack(*w2, **options)}


def count_pairs(arguments):
    """[tenants] numbers of experts that tokens of a tenant reach."""
    ids, tenant = arguments["topk_ids"], arguments["token_lora_mapping"]
    experts = arguments["w13_lora_a"].size(1)
    pairs = torch.unique(tenant.unsqueeze(1) * experts + ids)
    return torch.bincount(pairs // experts, minlength=len(arguments["lora_scalings"])).tolist()


def bound(model, tokens, ranks, pairs, peaks):
    """Least microseconds of a forward and a backward.

    Tenants have the same number of tokens, and `pairs` experts each.
    """
    hidden, inter, rows = model.hidden, model.intermediate, tokens * model.top_k
    bits, of_rank = FORMATS[model.format].bits if model.format else 16, 2 * hidden + 3 * inter
    weights = min(model.experts, rows) * 3 * hidden * inter * bits / 8
    lora = sum(n * rank for n, rank in zip(pairs, ranks, strict=True)) * of_rank * 2
    moved = 2 * weights + 3 * lora + 4 * tokens * hidden * 2 + 2 * rows * 2 * inter * 2
    rank = statistics.mean(ranks)
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
    for leaf in step.leaves:
        leaf.grad = None
    free()
    before, out = torch.cuda.memory_allocated(), []
    kept = saved_bytes(lambda: out.append(step.forward()))
    out.pop().backward(step.dout)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    return peak / 2**20, sum(kept[at] for at in kept.keys() - resident) / 2**20


def measure(call, flush):
    times = []
    for _ in range(REPEATS):
        flush.zero_()
        torch.cuda._sleep(8_000_000)  # about 5 ms, in which the host queues the step
        times.append(elapsed_ms(call) * 1e3)
    return statistics.median(times)


def error_ratio(ranks, format=None, device="cuda"):
    """The largest error of a gradient of ours over that of torch in bfloat16."""
    model = replace(CHECKED, format=format)
    arguments, dout = draw(model, CHECKED_TOKENS, ranks, device)
    given = quantize(arguments, model, **(NATIVE if format == "fp8_block" else {}))
    found = by_autograd(given, dout)
    if format:
        arguments |= {n: given[n].unpack() for n in ("w13", "w2")}
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


def measure_grouped_mm(step, format, flush):
    """Microseconds of the same step that dequantizes and calls torch._grouped_mm."""
    arguments = step.arguments
    if format == "nf4":
        arguments = arguments | {n: grouped_mm.BnbStack.like(arguments[n]) for n in ("w13", "w2")}
    other = Step(arguments, step.dout, grouped_mm.fused_experts_lora)
    for _ in range(WARM_UP):
        other.run()
    return measure(other.run, flush)


def run_peers(args):
    """Rows of bench_train.py, by (shape, tokens, rank, tenants, format)."""
    out = Path(args.peers) / "moelora"
    ranks = dict.fromkeys(word.partition("x")[0] for word in args.ranks if "+" not in word)
    if not ranks:
        return {}  # peers have no mixed ranks
    options = {"out": out.resolve(), "name": "peers.json", "budget-s": args.peers_s}
    lists = {"shapes": args.shapes, "ranks": ranks, "tokens": args.tokens, "peers": args.peer_names}
    options |= {name: ",".join(map(str, values)) for name, values in lists.items() if values}
    command = [sys.executable, "bench_train.py"]
    command += [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    subprocess.run(command, cwd=args.peers, check=False, timeout=args.peers_s + 120)
    rows = {}
    for case in json.loads((out / "peers.json").read_text())["cases"]:
        if case.get("ok"):
            key = (case["shape"], case["tokens"], case["rank"], case["tenants"])
            key += ("mxfp4" if case["mx"] else "bf16",)
            names = ("fwd_us", "fwdbwd_us", "peak_mib", "saved_mib")
            rows.setdefault(key, {})[case["peer"]] = {name: case[name] for name in names}
    return rows


def measure_case(model, tokens, ranks, options, peaks, flush):
    """What a row has of a case's step, and the step."""
    arguments, dout = draw(model, tokens, ranks)
    pairs = count_pairs(arguments)
    step = Step(quantize(arguments, model, **options), dout)
    del arguments  # frees the 16-bit weights
    for _ in range(WARM_UP):
        step.run()
    peak, saved = measure_memory(step)
    limit = bound(model, tokens, ranks, pairs, peaks)
    both = measure(step.run, flush)
    plan = _C.last_plan()
    forward = measure(step.forward, flush)
    row = {"ours_us": round(both, 1), "ours_fwd_us": round(forward, 1)}
    row |= {"bound_us": round(limit, 1), "share": round(limit / both, 3), "pairs": sum(pairs)}
    row |= {"peak_mib": round(peak, 1), "saved_mib": round(saved, 1), "plan": plan, "peers": {}}
    return row, step


def rows(args):
    """Rows without peers, as they are measured."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    ratios, peaks, end = {}, gpu_peaks(), time.monotonic() + args.deadline_s
    for word, name, shape in itertools.product(args.ranks, args.formats, args.shapes):
        ranks, model = ranks_of(word), SHAPES[shape]
        format, options = KINDS.get(name, (name, {}))
        if format != "bf16":
            if math.gcd(model.hidden, model.intermediate) % FORMATS[format].multiple:
                continue
            model = model.quantized(format)
        for tokens in args.tokens or TOKENS.get(shape, (4096, 16384)):
            rank = ranks[0] if len({*ranks}) == 1 else word.partition("x")[0]
            case = {"shape": shape, "tokens": tokens, "rank": rank, "tenants": len(ranks)}
            case["format"] = name
            if time.monotonic() > end:
                print("out of time before", case, flush=True)
                continue
            key = tuple(ranks), model.format
            if key not in ratios:
                ratios[key] = round(error_ratio(*key), 3)
            row, step = measure_case(model, tokens, ranks, options, peaks, flush)
            row["max_err_ratio"] = ratios[key]
            if args.grouped_mm and len(ranks) == 1:
                row["grouped_mm_us"] = round(measure_grouped_mm(step, model.format, flush), 1)
            yield case | row
            del step
            free()


def main(argv=None):
    p = parser(
        __doc__,
        shapes=([*SHAPES], "of layers"),
        tokens=([], "in a batch; none: those of the pages"),
        ranks=(["16", "64"], "RANK[+RANK...][xTENANTS], several"),
        formats=(["bf16"], ", ".join(("bf16", *KINDS, *FORMATS))),
        deadline_s=math.inf,
        grouped_mm=(False, "and time it, of one tenant"),
        peers_s=(500.0, "seconds for peers"),
    )
    p.add_argument("--peers", help="a folder with bench_train.py")
    p.add_argument("--peer-names", type=words, help="some of them")
    args = p.parse_args(argv)
    measured = report(rows(args), args.out)
    if args.peers:
        free()
        found = run_peers(args)
        for row in measured:
            key = tuple(row[n] for n in ("shape", "tokens", "rank", "tenants", "format"))
            row["peers"] = found.get(key, {})
        if args.out:
            results.write(args.out, measured)


if __name__ == "__main__":
    main()
