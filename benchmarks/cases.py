"""Layer shapes of well-known models, batches drawn for them, and the physical bound of a case."""

from dataclasses import dataclass

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
    """Random values drawn in pieces, so that no float32 copy of a large stack ever exists."""
    out = torch.empty(shape, dtype=dtype, device=generator.device)
    flat = out.view(-1)
    for start in range(0, flat.numel(), 1 << 28):
        flat[start : start + (1 << 28)].normal_(0, std, generator=generator)
    return out


def draw_weights(model, generator):
    """w13 [E, 2I, K] and w2 [E, K, I]."""
    e, k, i = model.experts, model.hidden, model.intermediate
    return normal((e, 2 * i, k), 0.02, generator), normal((e, k, i), 0.02, generator)


def draw_factors(model, adapters, rank, generator):
    e, k, i = model.experts, model.hidden, model.intermediate
    return Factors(
        [normal((adapters, e, rank, k), 0.02, generator) for _ in range(2)],
        [normal((adapters, e, i, rank), 0.02, generator) for _ in range(2)],
        normal((adapters, e, rank, i), 0.02, generator),
        normal((adapters, e, k, rank), 0.02, generator),
    )


def draw_batch(model, tokens, adapters, generator, base_share=0.0, routing="uniform"):
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
        normal((tokens, model.hidden), 1.0, generator),
        ids.to(torch.int32).contiguous(),
        (weights / weights.sum(-1, keepdim=True)).float().contiguous(),
        mapping,
    )


def bounds_us(model, batches, rank):
    """(with adapters, base): max(flops / PEAK_FLOPS, bytes / PEAK_BYTES), averaged over batches.

    Bytes count each touched expert once, each touched (expert, adapter) pair once, x and y once.
    """
    both = [0.0, 0.0]
    for batch in batches:
        rows = batch.topk_ids.numel()
        experts = batch.topk_ids.unique().numel()
        pairs = batch.topk_ids.long() + model.experts * batch.mapping[:, None]
        carried = (batch.mapping >= 0)[:, None].expand_as(pairs)
        size = model.hidden * model.intermediate
        edges = model.hidden + model.intermediate
        flops, moved = 6.0 * rows * size, 6.0 * experts * size + 4.0 * batch.x.numel()
        lora_flops = 6.0 * int(carried.sum()) * rank * edges
        lora_moved = 6.0 * pairs[carried].unique().numel() * rank * edges
        for at, extra in enumerate((1, 0)):
            both[at] += max(
                (flops + extra * lora_flops) / PEAK_FLOPS, (moved + extra * lora_moved) / PEAK_BYTES
            )
    return tuple(1e6 * total / len(batches) for total in both)
