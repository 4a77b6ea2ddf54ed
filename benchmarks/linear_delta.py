"""Adapters of a linear layer: moelora's delta beside vLLM's Punica kernels, in CUDA graphs.

    python -m benchmarks.linear_delta --out benchmarks/results/h200-linear.json

The layers are the projections of an attention. Calls rotate over inputs and factors that exceed the
L2. `ours` is the operator that the plugin calls; `vllm`, if it can be imported, its `lora_shrink`
and `lora_expand` as `add_lora_linear` calls them. A stack of rank 64 is timed with adapters of rank
64, 16, and 0: those that have no factors for the layer. vLLM's kernels compute all 64 ranks.
"""

import itertools
import math
import sys
from types import SimpleNamespace

import torch

import moelora
from benchmarks.options import parser, report
from moelora.bench.timing import COLD_BYTES, GraphTimer, Run, on

# Of Qwen3-30B-A3B: depth, and columns of the slices.
LAYERS = {"qkv_proj": (2048, (4096, 512, 512)), "o_proj": (4096, (2048,))}


def batch(layer, tokens, rank, used, adapters, device):
    """One call: inputs x and y of a step, a layer's stacks a and b, and the mapping of tokens."""
    k, widths = LAYERS[layer]
    like = {"device": device, "dtype": torch.bfloat16}

    def factors(*shape):
        return torch.randn(adapters, 1, *shape, **like) / shape[-1] ** 0.5

    a = [factors(rank, k) for _ in widths]
    b = [factors(n, rank) for n in widths]
    for stack in a:
        stack[:, :, used:] = 0  # vLLM pads with zeros
    x, y = torch.randn(tokens, k, **like), torch.randn(tokens, sum(widths), **like)
    mapping = torch.arange(tokens, device=device) * adapters // tokens  # whole requests
    return SimpleNamespace(x=x, y=y, a=a, b=b, mapping=mapping.int())


def ours(b, ids, ranks):
    adapters = {"token_lora_mapping": b.mapping, "lora_a": b.a, "lora_b": b.b, "lora_ranks": ranks}
    out = b.y.unsqueeze(1)
    moelora.moe_lora_gate_up_delta(b.x, None, ids, **adapters, num_experts=1, out=out)
    return b.y


def vllm_run(batches):
    """A step's call of vLLM's kernels; None if there is no vLLM."""
    try:
        from vllm.lora.ops.triton_ops import LoRAKernelMeta, lora_expand, lora_shrink
    except ImportError:
        return None
    first = batches[0]
    meta = LoRAKernelMeta.make(first.a[0].size(0), len(first.x), first.x.device)
    meta.prepare_tensors(first.mapping.long())

    def run(b):
        args = meta.meta_args(len(b.x), False)
        h = b.x.new_empty((len(b.a), len(b.x), b.a[0].size(2)), dtype=torch.float32)
        lora_shrink(b.x, b.a, h, *args, 1.0)
        lora_expand(h, b.b, b.y, *args, offset_start=0, add_inputs=True)
        return b.y

    return run


def difference(batches, run, other):
    """Largest difference of what two calls add, relative to its largest value."""
    b, before = batches[0], batches[0].y.clone()
    one = run(b).float() - before.float()
    b.y.copy_(before)
    two = other(b).float() - before.float()
    b.y.copy_(before)
    return round(((one - two).abs().max() / two.abs().max().clamp_min(1e-9)).item(), 4)


def moved(b, used):
    """Bytes: x once, y read and written, the factors of the adapters in the batch."""
    adapters = min(len(b.x), b.a[0].size(0))
    factors = sum(f[0].numel() for f in (*b.a, *b.b)) * used / b.a[0].size(2)
    return 2 * ((b.x.numel() + 2 * b.y.numel()) * (used > 0) + adapters * factors)


def case(timer, args, layer, tokens, rank, used):
    sizes = layer, tokens, rank, used, args.adapters, "cuda"
    batches = [batch(*sizes)]
    whole = moved(batches[0], rank)
    count = max(2, min(24, math.ceil(COLD_BYTES / whole)))
    batches += [batch(*sizes) for _ in range(count - 1)]
    ids = torch.zeros((1, 1), dtype=torch.int32, device="cuda").expand(tokens, 1)
    ranks = torch.full((args.adapters,), used, dtype=torch.int32, device="cuda")
    row = {"layer": layer, "tokens": tokens, "adapters": args.adapters, "rank": rank, "used": used}
    runs = {"ours": Run(on(batches, ours, ids, ranks))}
    if theirs := vllm_run(batches):
        runs["vllm"] = Run(on(batches, theirs))
        row["difference"] = difference(batches, lambda b: ours(b, ids, ranks), theirs)
    times, peaks = timer.compare(runs, batches, whole, args.budget_ms)
    row |= {f"{name}_us": t.median for name, t in times.items()}
    row["bound_us"] = round(1e6 * peaks.bound(0.0, moved(batches[0], used)), 2)
    return row


def rows(args):
    timer = GraphTimer()
    for layer, rank in itertools.product(LAYERS, args.ranks):
        for used in sorted({rank, min(rank, 16), 0}, reverse=True):
            for tokens in args.tokens:
                yield case(timer, args, layer, tokens, rank, used)


def main(argv=None):
    sizes = {"tokens": [1, 16, 64, 256, 8192], "ranks": [16, 64], "adapters": 4}
    args = parser(__doc__, **sizes, budget_ms=150.0).parse_args(argv)
    measured = report(rows(args), args.out)
    return int(any(row.get("difference", 0.0) > 0.05 for row in measured))


if __name__ == "__main__":
    sys.exit(main())
