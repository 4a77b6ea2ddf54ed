"""Memory of training adapters of a whole model on one GPU: `python -m benchmarks.training_memory`.

Computed, not measured. In bytes, for E experts of (2I, K) and (K, I) in each of `layers` layers, M
tokens in a step, P = M top_k routed rows, and adapters of rank r on all experts:

    base        experts in their format, all other weights in bfloat16
    adapters    3 E r (K + I) numbers a layer, float32, with gradients and both moments of AdamW: 16
                each; one A for gate and up
    saved       with activation checkpointing, the input of each layer: M K bfloat16
    one layer   forward and backward, bfloat16: gate_up, which its gradient overwrites, 2 P I, h and
                z P (I + K), attention 8 M K; and a copy of its factors and their gradients, 8 each
    logits      M V: float32, its gradient, and bfloat16

`--world 2 4 8` computes what each of several GPUs holds of experts in bf16, for
DistributedConfig(fsdp_size=N, ep_size=N) and M tokens on each: 1/N of all weights, of which those
outside experts are gathered for one layer at a time; adapters, gradients and moments whole.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

GB = 1e9
CARDS = (24, 80, 141)  # GB: RTX 4090, H100, H200
RESERVED = 0.06  # of a card's memory, for the CUDA context, libraries and fragmentation
RANKS = (8, 16)
TOKENS = (1024, 4096)  # in a step
WORLDS = (2, 4, 8)
STEPS = ((8, 1024), (8, 4096), (16, 4096))  # rank and tokens
BITS = {"bf16": 16.0, "FP8": 8.0, "INT4": 4.25, "MXFP4": 4.25}  # scales of groups of 64 and 32


@dataclass(frozen=True)
class Model:
    """Sizes of a model; `dense` is the number of parameters outside attention, experts, routers and
    embeddings."""

    name: str
    formats: tuple[str, ...]
    layers: int
    experts: int
    top_k: int
    hidden: int
    inter: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    blocks: int  # layers with attention: those of experts, and dense ones
    dense: int = 0

    @property
    def expert_parameters(self) -> int:
        return self.layers * self.experts * 3 * self.hidden * self.inter

    @property
    def other_parameters(self) -> int:
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        router = self.layers * self.experts * self.hidden
        return self.blocks * attention + router + self.dense + 2 * self.vocab * self.hidden

    def factors(self, rank: int) -> int:
        """Parameters of an adapter of all experts, of one layer."""
        return self.experts * rank * 3 * (self.hidden + self.inter)

    def base(self, kind: str) -> float:
        return self.expert_parameters * BITS[kind] / 8 + self.other_parameters * 2

    def adapters(self, rank: int) -> int:
        return self.layers * self.factors(rank) * 16

    def activations(self, rank: int, tokens: int) -> int:
        rows, k, i = tokens * self.top_k, self.hidden, self.inter
        saved = self.blocks * tokens * k * 2
        layer = 2 * (2 * rows * i + rows * (i + k) + 8 * tokens * k) + 8 * self.factors(rank)
        return saved + layer + tokens * self.vocab * (4 + 4 + 2)

    def on_each(self, world: int, rank: int, tokens: int) -> float:
        """Bytes on each of `world` GPUs, with experts in bf16."""
        gathered = 2 * self.other_parameters / self.blocks
        weights = self.base("bf16") / world + gathered
        return weights + self.adapters(rank) + self.activations(rank, tokens)

    def total(self, kind: str, rank: int, tokens: int) -> float:
        return self.base(kind) + self.adapters(rank) + self.activations(rank, tokens)


GLM_SHARED = 45 * 3 * 4096 * 1408
GLM_DENSE = 3 * 4096 * 10944
MODELS = (
    Model("gpt-oss-20b", ("MXFP4", "bf16"), 24, 32, 4, 2880, 2880, 201088, 64, 8, 64, 24),
    Model("Qwen3-30B-A3B", ("INT4", "FP8", "bf16"), 48, 128, 8, 2048, 768, 151936, 32, 4, 128, 48),
    Model(
        *("GLM-4.5-Air", ("INT4", "FP8", "bf16"), 45, 128, 8, 4096, 1408, 151552, 96, 8, 128, 46),
        GLM_SHARED + GLM_DENSE,
    ),
    Model("gpt-oss-120b", ("MXFP4", "bf16"), 36, 128, 4, 2880, 2880, 201088, 64, 8, 64, 36),
)


def fits(total: float) -> str:
    """The smallest of `CARDS`, in GB."""
    cards = [card for card in CARDS if total <= card * GB * (1 - RESERVED)]
    return str(cards[0]) if cards else "more"


def markdown(left: int, head: list[str], lines: list[list[str]]) -> str:
    """A table whose first columns are aligned to the left."""
    align = ["---"] * left + ["---:"] * (len(head) - left)
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, align, *lines))


def table() -> str:
    head = ["model", "experts in", "base"]
    head += [f"rank {rank}" for rank in RANKS]
    head += [f"{tokens} tokens" for tokens in TOKENS]
    head += [f"card for rank {rank}, {tokens} tokens" for rank, tokens in STEPS]
    lines = []
    for model in MODELS:
        for kind in model.formats:
            sizes = [model.base(kind), *(model.adapters(rank) for rank in RANKS)]
            sizes += [model.activations(RANKS[0], tokens) for tokens in TOKENS]
            cards = [fits(model.total(kind, *step)) for step in STEPS]
            lines.append([model.name, kind, *(f"{size / GB:.1f}" for size in sizes), *cards])
    return markdown(2, head, lines)


def parallel_table(worlds: Sequence[int] = WORLDS) -> str:
    head, lines = ["model, experts in bf16"], []
    head += [f"each of {world}" for world in worlds] + [f"card for {world}" for world in worlds]
    for model in MODELS:
        sizes = [model.on_each(world, *STEPS[1]) for world in worlds]
        lines.append([model.name, *(f"{size / GB:.1f}" for size in sizes), *map(fits, sizes)])
    return markdown(1, head, lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--world", type=int, nargs="+", help="GPUs that share a model")
    world = parser.parse_args().world
    print(parallel_table(world) if world else table())
