"""Generate a case: weights, adapters, batches, and their amount of work."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Generator, Tensor

from moelora.bench.formats import FORMATS
from moelora.bench.shapes import Model

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MIXES = {
    "none": "no token has an adapter",
    "one": "all tokens have the same adapter",
    "many": "every token draws one of the adapters",
    "different": "neighbors have different adapters, as many as there are",
    "half": "half of the tokens have none, the others draw one",
}
ROUTINGS = ("uniform", "zipf")


@dataclass
class Batch:
    """The part of a case that changes per step: tokens, routing, adapters."""

    x: Tensor  # [M, K]
    topk_ids: Tensor  # [M, top_k] int32
    topk_weights: Tensor  # [M, top_k] float32
    mapping: Tensor  # [M] int32, -1 = none


def normal(
    shape: tuple[int, ...], std: float, generator: Generator, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Random values, drawn in pieces to avoid a float32 copy of a large stack.

    Drawing is slow on a CPU, so one piece is repeated there. No dimension divides its length, so
    that experts and rows still differ.
    """
    out = torch.empty(shape, dtype=dtype, device=generator.device)
    flat = out.view(-1)
    if generator.device.type == "cpu":
        piece = flat.new_empty(min(flat.numel(), (1 << 22) + 15))
        piece.normal_(0, std, generator=generator)
        for part in flat.split(piece.numel()):
            part.copy_(piece[: part.numel()])
        return out
    for part in flat.split(1 << 28):
        part.normal_(0, std, generator=generator)
    return out


def draw_batch(
    model: Model,
    tokens: int,
    adapters: int,
    generator: Generator,
    mix: str = "many",
    routing: str = "uniform",
    dtype: torch.dtype = torch.bfloat16,
) -> Batch:
    """Softmax top-k of random logits. `routing`: "uniform"; "zipf", with a 1/rank prior over
    experts; or the file of a recorded histogram (see `read_histogram`). `mix`: one of MIXES, or the
    share of tokens without an adapter as a number."""
    device = generator.device
    logits = _router_logits(model, tokens, routing, generator)
    weights, ids = torch.topk(torch.softmax(logits, -1), model.top_k, dim=-1)
    return Batch(
        normal((tokens, model.hidden), 1.0, generator, dtype),
        ids.to(torch.int32).contiguous(),
        (weights / weights.sum(-1, keepdim=True)).float().contiguous(),
        _draw_mapping(tokens, adapters, mix, generator).to(device),
    )


def _router_logits(model: Model, tokens: int, routing: str, generator: Generator) -> Tensor:
    shape, device = (tokens, model.experts), generator.device
    if routing in ROUTINGS:
        logits = torch.randn(shape, device=device, generator=generator)
        if routing == "zipf":
            order = torch.randperm(model.experts, device=device, generator=generator)
            logits += -torch.log1p(order.float())
        return logits
    # The largest log p + Gumbel noise are draws from p without replacement.
    prior = read_histogram(routing, model.experts).to(device)
    noise = -torch.empty(shape, device=device).exponential_(generator=generator).log()
    return prior.clamp(min=1e-9).log() + noise


def read_histogram(path: str | Path, experts: int) -> Tensor:
    """Shares of the experts in a JSON file: a list of counts, or {"counts": [...]}.

    Such a file is `torch.bincount(topk_ids.flatten(), minlength=E).tolist()` of a served model.
    """
    try:
        content = json.loads(Path(path).read_text())
        counts = content["counts"] if isinstance(content, dict) else content
        shares = torch.tensor(counts, dtype=torch.float32)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a list of counts: {error!r}") from error
    if shares.shape != (experts,):
        raise ValueError(f"{path} counts {list(shares.shape)} experts, the layer has {experts}")
    if not shares.isfinite().all() or (shares < 0).any() or shares.sum() <= 0:
        raise ValueError(f"{path}: counts must be non-negative and not all zero")
    return shares / shares.sum()


def _draw_mapping(tokens: int, adapters: int, mix: str, generator: Generator) -> Tensor:
    device = generator.device
    none = torch.full((tokens,), -1, dtype=torch.int32, device=device)
    if mix == "none":
        return none
    if mix == "one":
        return none + 1
    if mix == "different":
        return torch.arange(tokens, dtype=torch.int32, device=device) % adapters
    drawn = torch.randint(
        0, adapters, (tokens,), device=device, generator=generator, dtype=torch.int32
    )
    if mix == "many":
        return drawn
    base_share = 0.5 if mix == "half" else float(mix)
    base = torch.rand(tokens, device=device, generator=generator) < base_share
    return torch.where(base, none, drawn)


def work(model: Model, batch: Batch, rank: int = 0) -> tuple[float, float]:
    """(flops, bytes) of one layer; rank 0 is the layer without adapters.

    Bytes count each active expert once, with its biases, each active (expert, adapter) pair once,
    and x and y once. Quantized weights count as stored in checkpoints, including scales.
    """
    matrices = model.slices + 1
    size = model.hidden * model.intermediate
    edges = model.hidden + model.intermediate
    pairs = batch.topk_ids.long() + model.experts * batch.mapping[:, None]
    carried = pairs[(batch.mapping >= 0)[:, None].expand_as(pairs)]
    rows, carried_rows = batch.topk_ids.numel(), carried.numel()
    experts, carried_pairs = batch.topk_ids.unique().numel(), carried.unique().numel()
    element = batch.x.element_size()
    weight = FORMATS[model.format].bits / 8 if model.format else element
    biases = model.bias * (model.slices * model.intermediate + model.hidden)
    flops = 2.0 * matrices * (rows * size + carried_rows * rank * edges)
    factors = matrices * carried_pairs * rank * edges
    others = factors + experts * biases + 2.0 * batch.x.numel()
    return flops, matrices * experts * size * weight + element * others
