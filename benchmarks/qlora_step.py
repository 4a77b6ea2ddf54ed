"""A QLoRA step of layers shaped as gpt-oss-20b's, on one GPU: tokens per second and peak memory.

    python -m benchmarks.qlora_step --engines moelora,unsloth --peers .peers/train --out ...

Twelve layers of attention (64 heads, 8 of keys and values) and 32 experts in MXFP4, four for a
token; embeddings and head of 201,088 tokens. Adapters of rank 16 on experts and attention, in
bfloat16, trained by torch's fused AdamW; random weights and tokens; no positions, windows, sinks or
biases; SiLU, as peers have it. One step: forward, cross entropy, backward, update. Engines differ
only in the experts: `moelora`, or Unsloth's kernels as `--peers DIR` has them (`train_peers.py`,
`unsloth_mx`, which chooses by itself between its fused GEMM and dequantization). Each engine has a
process of its own. `--checkpointing` repeats each layer's forward in the backward; `--float32` has
factors of experts, their gradients and moments in float32, as PEFT does by default;
`--whole-logits` keeps those of all tokens. With all three, and all layers, the peak is what
`training_memory` computes.

seconds: median of the steps after two; peak: of torch's allocator, weights included. `loss`: that
of the first step, for which engines have the same weights.
"""

import itertools
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import moelora
from benchmarks import training_memory
from benchmarks.gpu import free
from benchmarks.models import fan_in
from benchmarks.options import parser, report
from benchmarks.processes import apart
from moelora.bench.cases import normal
from moelora.bench.formats import draw_mxfp4

WARM_UP = 2
SCALING = 0.5  # of experts' adapters
CHUNK = 1024  # tokens whose logits exist at once
GPT_OSS = training_memory.MODELS[0]
SETTINGS = ("layers", "rank", "batch", "length", "checkpointing", "float32", "whole_logits")


@dataclass(frozen=True)
class Sizes(training_memory.Model):
    rank: int = 16


def draw_experts(s, make):
    """Experts of one layer and their adapter, as peers name them."""
    p = SimpleNamespace(E=s.experts, k=s.top_k, H=s.hidden, I=s.inter, r=s.rank, L=1, mx=True)
    p.q13, p.s13 = draw_mxfp4(s.experts, 2 * s.inter, s.hidden, make, torch.bfloat16)
    p.q2, p.s2 = draw_mxfp4(s.experts, s.hidden, s.inter, make, torch.bfloat16)
    p.a13 = fan_in(make, s.experts, s.rank, s.hidden)
    p.b13 = fan_in(make, s.experts, 2 * s.inter, s.rank, scale=0.1)
    p.a2 = fan_in(make, s.experts, s.rank, s.inter)
    p.b2 = fan_in(make, s.experts, s.hidden, s.rank, scale=0.1)
    return p


class Ours:
    def __init__(self, p, dtype=torch.bfloat16):
        pack = moelora.QuantizedWeights.from_mxfp4
        self.w13, self.w2 = pack(p.q13, p.s13, gate_up="concatenated"), pack(p.q2, p.s2)
        names = {"w13_lora_a": p.a13, "w13_lora_b": p.b13, "w2_lora_a": p.a2, "w2_lora_b": p.b2}
        self.factors = {n: nn.Parameter(t.unsqueeze(0).to(dtype)) for n, t in names.items()}
        self.scalings = torch.full((1,), SCALING, device=p.a13.device)

    def trained(self):
        return list(self.factors.values())

    def __call__(self, x, ids, weights):
        mapping = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        adapters = {"token_lora_mapping": mapping, "lora_scalings": self.scalings}
        return moelora.fused_experts_lora(
            x, self.w13, self.w2, weights, ids, **adapters, **self.factors
        )


def unsloth(peers):
    """A class of experts that run Unsloth's kernels."""
    sys.path[:0] = [str(peers), str(peers / "peers")]
    import train_peers

    make = train_peers.load("unsloth_mx")

    class Unsloth:
        def __init__(self, p):
            p.x, p.wts = p.a13.new_zeros(1, p.H), p.a13.new_zeros(1, p.k)
            self.peer, self.p = make(p), p
            for name in ("a13", "b13", "a2", "b2"):
                delattr(p, name)  # the peer has copies

        def trained(self):
            return self.peer.leaves[2:]

        def __call__(self, x, ids, weights):
            self.peer.x, self.peer.wts, self.p.ids = x, weights.to(x.dtype), ids
            return self.peer.forward()

    return Unsloth


class Linear(nn.Module):
    """A frozen linear layer with an adapter."""

    def __init__(self, make, rows, columns, rank):
        super().__init__()
        self.register_buffer("weight", fan_in(make, rows, columns))
        self.a = nn.Parameter(fan_in(make, rank, columns))
        self.b = nn.Parameter(fan_in(make, rows, rank, scale=0.1))

    def forward(self, x):
        return F.linear(x, self.weight) + F.linear(F.linear(x, self.a), self.b)


class Layer(nn.Module):
    def __init__(self, s, make, experts):
        super().__init__()
        self.s = s
        wide, narrow = s.heads * s.head_dim, s.kv_heads * s.head_dim
        self.q, self.k, self.v = (
            Linear(make, rows, s.hidden, s.rank) for rows in (wide, narrow, narrow)
        )
        self.o = Linear(make, s.hidden, wide, s.rank)
        self.register_buffer("router", fan_in(make, s.experts, s.hidden))
        self.experts = experts(draw_experts(s, make))

    def forward(self, x):
        s = self.s
        h = F.rms_norm(x, x.shape[-1:])
        q, k, v = (
            f(h).unflatten(-1, (-1, s.head_dim)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        h = F.rms_norm(x, x.shape[-1:]).flatten(0, 1)
        values, ids = F.linear(h, self.router).float().topk(s.top_k)
        return x + self.experts(h, ids, values.softmax(-1)).view_as(x)


class Model(nn.Module):
    def __init__(self, s, device, experts, args):
        super().__init__()
        make = torch.Generator(device).manual_seed(0)
        self.repeats, self.whole_logits = args.checkpointing, args.whole_logits
        self.register_buffer("embedding", normal((s.vocab, s.hidden), 1.0, make))
        self.register_buffer("head", fan_in(make, s.vocab, s.hidden))
        self.layers = nn.ModuleList(Layer(s, make, experts) for _ in range(s.layers))

    def trained(self):
        experts = [p for layer in self.layers for p in layer.experts.trained()]
        return [*self.parameters(), *experts]

    def forward(self, tokens):
        x = self.embedding[tokens[:, :-1]]
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.repeats else layer(x)
        x, wanted = F.rms_norm(x, x.shape[-1:]).flatten(0, 1), tokens[:, 1:].flatten()
        if self.whole_logits:
            return self.loss(x, wanted) / len(wanted)
        parts = zip(x.split(CHUNK), wanted.split(CHUNK), strict=True)
        losses = [checkpoint(self.loss, *part, use_reentrant=False) for part in parts]
        return torch.stack(losses).sum() / len(wanted)

    def loss(self, x, wanted):
        return F.cross_entropy(F.linear(x, self.head).float(), wanted, reduction="sum")


def measure(sizes, experts, length, args, device="cuda"):
    """What steps of a model with such experts take."""
    model, on_gpu = Model(sizes, device, experts, args), device == "cuda"
    optimizer = torch.optim.AdamW(model.trained(), lr=1e-4, fused=on_gpu)
    draw = torch.Generator(device).manual_seed(1)
    seconds, losses = [], []
    free()
    resident = torch.cuda.memory_allocated()
    for _ in range(WARM_UP + args.steps):
        shape = args.batch, length + 1
        tokens = torch.randint(sizes.vocab, shape, generator=draw, device=device)
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())  # waits for the GPU
        seconds.append(time.perf_counter() - begin)
    median = statistics.median(seconds[WARM_UP:])
    row = {"loss": round(losses[0], 4), "seconds": round(median, 5)}
    row["tokens_per_s"] = round(args.batch * length / median)
    if on_gpu:
        row["weights_gb"] = round(resident / 1e9, 3)
        row["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 3)
    return row


def measure_engine(engine, length, args):
    """The measured part of a row, in a process of its own."""
    experts = unsloth(args.peers.resolve()) if engine == "unsloth" else Ours
    experts = partial(Ours, dtype=torch.float32) if args.float32 else experts
    sizes = Sizes(**vars(GPT_OSS) | {"layers": args.layers, "rank": args.rank})
    yield measure(sizes, experts, length, args)


def rows(args):
    """A row for each engine and length, as it is measured."""
    for engine, length in itertools.product(args.engines, args.length):
        settings = {name: getattr(args, name) for name in SETTINGS} | {"length": length}
        (measured,) = apart(measure_engine, [(engine, length, args)], args.seconds)
        yield {"engine": engine} | settings | measured


def parsed(argv):
    p = parser(
        __doc__,
        engines=(["moelora"], "moelora, unsloth, or both"),
        layers=12,
        rank=(Sizes.rank, "of the adapters"),
        batch=(2, "sequences"),
        length=([2048], "tokens of a sequence; several: one by one"),
        steps=7,
        checkpointing=(False, "of activations"),
        float32=(False, "experts' factors"),
        whole_logits=(False, "of all tokens at once"),
        seconds=(150.0, "for an engine"),
    )
    p.add_argument("--peers", type=Path, help="a folder with train_peers.py, for unsloth")
    args = p.parse_args(argv)
    if "unsloth" in args.engines and (args.peers is None or args.float32):
        p.error("unsloth needs --peers, a folder with train_peers.py, and no --float32")
    return args


def main(argv=None):
    args = parsed(argv)
    return int(any("error" in row for row in report(rows(args), args.out)))


if __name__ == "__main__":
    sys.exit(main())
