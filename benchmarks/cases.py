"""Layer shapes of well-known models, batches drawn for them, and the physical bound of a case."""

from dataclasses import dataclass, replace

import torch

PEAK_FLOPS = 790e12  # bf16, measured on an H200
PEAK_BYTES = 4.3e12  # HBM, read + written, measured on an H200


@dataclass(frozen=True)
class Model:
    """One MoE layer: E experts, top_k of them per token, hidden size K, intermediate size I."""

    name: str
    experts: int
    top_k: int
    hidden: int
    intermediate: int

    def cut(self, experts):
        """The same layer with fewer experts, for machines that cannot hold them all."""
        return replace(self, experts=experts)


MODELS = {
    "qwen3": Model("Qwen3-30B-A3B", 128, 8, 2048, 768),
    "mixtral": Model("Mixtral-8x7B", 8, 2, 4096, 14336),
    "dsv2lite": Model("DeepSeek-V2-Lite", 64, 6, 2048, 1408),
}


@dataclass
class Batch:
    """What changes from step to step: tokens, their routing, their adapters."""

    x: torch.Tensor  # [M, K]
    topk_ids: torch.Tensor  # [M, top_k] int32
    topk_weights: torch.Tensor  # [M, top_k] float32
    mapping: torch.Tensor  # [M] int32, -1 = none


@dataclass
class Factors:
    """Stacked adapters of one layer, as vLLM stacks them (gate and up apart)."""

    a13: list  # 2 x [L, E, R, K]
    b13: list  # 2 x [L, E, I, R]
    a2: torch.Tensor  # [L, E, R, I]
    b2: torch.Tensor  # [L, E, K, R]


def normal(shape, std, generator, dtype=torch.bfloat16):
    """Random values drawn in pieces, so that no float32 copy of a large stack ever exists.

    A CPU draws slowly: one piece is repeated there, of a length that no dimension divides, so that
    experts and rows still differ.
    """
    out = torch.empty(shape, dtype=dtype, device=generator.device)
    flat = out.view(-1)
    if generator.device.type == "cpu":
        piece = flat.new_empty(min(flat.numel(), (1 << 22) + 15)).normal_(
            0, std, generator=generator
        )
        for part in flat.split(piece.numel()):
            part.copy_(piece[: part.numel()])
        return out
    for start in range(0, flat.numel(), 1 << 28):
        flat[start : start + (1 << 28)].normal_(0, std, generator=generator)
    return out


def draw_weights(model, generator, dtype=torch.bfloat16):
    """w13 [E, 2I, K] and w2 [E, K, I]."""
    e, k, i = model.experts, model.hidden, model.intermediate
    return normal((e, 2 * i, k), 0.02, generator, dtype), normal((e, k, i), 0.02, generator, dtype)


def draw_factors(model, adapters, rank, generator, dtype=torch.bfloat16):
    e, k, i = model.experts, model.hidden, model.intermediate
    return Factors(
        [normal((adapters, e, rank, k), 0.02, generator, dtype) for _ in range(2)],
        [normal((adapters, e, i, rank), 0.02, generator, dtype) for _ in range(2)],
        normal((adapters, e, rank, i), 0.02, generator, dtype),
        normal((adapters, e, k, rank), 0.02, generator, dtype),
    )


def draw_batch(
    model,
    tokens,
    adapters,
    generator,
    base_share=0.0,
    routing="uniform",
    dtype=torch.bfloat16,
):
    """Softmax top-k of random logits (`zipf`: with a 1/rank prior over experts); every token draws
    an adapter, or none with probability `base_share`."""
    device = generator.device
    logits = torch.randn(tokens, model.experts, device=device, generator=generator)
    if routing == "zipf":
        order = torch.randperm(model.experts, device=device, generator=generator)
        logits += -torch.log1p(order.float())
    weights, ids = torch.topk(torch.softmax(logits, -1), model.top_k, dim=-1)
    mapping = torch.randint(
        0, adapters, (tokens,), device=device, generator=generator, dtype=torch.int32
    )
    if base_share:
        mapping[torch.rand(tokens, device=device, generator=generator) < base_share] = -1
    return Batch(
        normal((tokens, model.hidden), 1.0, generator, dtype),
        ids.to(torch.int32).contiguous(),
        (weights / weights.sum(-1, keepdim=True)).float().contiguous(),
        mapping,
    )


def work(model, batch, rank=0):
    """(flops, bytes) of one layer; rank 0 is the layer without adapters.

    Bytes count each touched expert once, each touched (expert, adapter) pair once, x and y once.
    """
    size = model.hidden * model.intermediate
    edges = model.hidden + model.intermediate
    pairs = batch.topk_ids.long() + model.experts * batch.mapping[:, None]
    carried = pairs[(batch.mapping >= 0)[:, None].expand_as(pairs)]
    flops = 6.0 * (batch.topk_ids.numel() * size + carried.numel() * rank * edges)
    read = 3.0 * (batch.topk_ids.unique().numel() * size + carried.unique().numel() * rank * edges)
    return flops, batch.x.element_size() * (read + 2.0 * batch.x.numel())


def bounds_us(model, batches, rank):
    """(with adapters, base): max(flops / PEAK_FLOPS, bytes / PEAK_BYTES), averaged over batches."""
    both = []
    for r in (rank, 0):
        works = [work(model, batch, r) for batch in batches]
        bounds = [max(flops / PEAK_FLOPS, moved / PEAK_BYTES) for flops, moved in works]
        both.append(1e6 * sum(bounds) / len(batches))
    return tuple(both)
