"""Tokens batched by expert: the exchange between ranks, as loops over rows. Run as a program, in
each of two processes, it exchanges tokens with their adapters, and compares with one process."""

from __future__ import annotations

import os
from dataclasses import replace

import torch
from cases import Problem, Spec
from torch import Tensor

from moelora import fused_experts_lora
from moelora.integrations.batched import batched_experts_lora

# Of `fused_experts_lora`, and not of single rows.
ROUTED = ("hidden_states", "w13", "w2", "topk_weights", "topk_ids", "token_lora_mapping")
ROUTED += ("expert_map", "apply_router_weight_on_input")


def options(p: Problem) -> dict:
    """Those of the layer that both operators take."""
    return {name: value for name, value in p.kwargs().items() if name not in ROUTED}


def dispatch(
    p: Problem, first: int, experts: int, rows: int
) -> tuple[Tensor, Tensor, Tensor, list]:
    """(hidden states, numbers of tokens, adapters, [(token, choice, expert, row)]) of some experts.

    What no token fills is NaN, and adapter 0.
    """
    x = p.hidden_states.new_full((experts, rows, p.hidden_states.size(1)), float("nan"))
    counts = torch.zeros(experts, dtype=torch.int32)
    mapping = torch.zeros(experts, rows, dtype=torch.int32)
    places = []
    for token, choices in enumerate(p.topk_ids.tolist()):
        for choice, expert in enumerate(choices):
            local = expert - first
            if 0 <= local < experts:
                row = int(counts[local])
                x[local, row] = p.hidden_states[token]
                if p.token_lora_mapping is not None:
                    mapping[local, row] = p.token_lora_mapping[token]
                places.append((token, choice, local, row))
                counts[local] += 1
    return x, counts.to(x.device), mapping.to(x.device), places


def combine(p: Problem, rows: Tensor, places: list) -> Tensor:
    """The weighted sum of each token's rows, in float32."""
    out = torch.zeros(p.hidden_states.shape, device=rows.device)
    for token, choice, expert, row in places:
        out[token] += p.topk_weights[token, choice].float() * rows[expert, row].float()
    return out


def exchange(rank: int, ranks: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(this rank's tokens through the experts of all ranks, the same in one process)."""
    from torch import distributed

    def gather(mine: Tensor) -> Tensor:
        every = [torch.empty_like(mine) for _ in range(ranks)]
        distributed.all_gather(every, mine.contiguous())
        return torch.cat(every)

    p = Spec(tokens=12, experts=8, mix="many", ranks=(8, 16, 4), dtype=dtype).build().to(device)
    size = p.hidden_states.size(0) // ranks
    mine = slice(rank * size, (rank + 1) * size)
    tokens = ("hidden_states", "topk_weights", "topk_ids", "token_lora_mapping")
    every = replace(p, **{name: gather(getattr(p, name)[mine]) for name in tokens})
    experts = p.w13.size(0) // ranks
    here = slice(rank * experts, (rank + 1) * experts)
    x, counts, mapping, places = dispatch(every, here.start, experts, p.hidden_states.size(0))
    more = options(p)
    for name in ("w13_lora_a", "w13_lora_b", "w2_lora_a", "w2_lora_b"):
        factors = more[name]
        several = isinstance(factors, (list, tuple))
        more[name] = [f[:, here] for f in factors] if several else factors[:, here]
    rows = batched_experts_lora(x, p.w13[here], p.w2[here], counts, mapping, **more)
    out = combine(every, rows, places)
    distributed.all_reduce(out)
    return out[mine], fused_experts_lora(**p.kwargs())[mine].float()


def main() -> None:
    from torch import distributed

    cuda = torch.cuda.is_available()
    distributed.init_process_group("nccl" if cuda else "gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    device = f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(device)
    dtype = torch.bfloat16 if cuda else torch.float32
    got, wanted = exchange(rank, ranks, device, dtype)
    off = ((got - wanted).norm() / wanted.norm()).item()
    assert off < (0.01 if cuda else 1e-5), off
    print(f"rank {rank}: relative difference {off:.1e}\n", end="", flush=True)  # in one write
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
