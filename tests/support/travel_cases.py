"""Two data-parallel ranks with experts of their own, whose slots are filled in another order: run
as a program, in each of two processes, tokens keep their adapters."""

import sys
from dataclasses import replace

import pytest
import torch
import vllm_stand_in
from cases import Spec
from stand_in import modules
from torch import distributed
from vllm_layer import HERE, VLLM, Layer, load

from moelora import fused_experts_lora

ORDERS = [0, 1, 2], [2, 0, 1]  # the adapter in each slot, by rank
FACTORS = "w13_lora_a", "w13_lora_b", "w2_lora_a", "w2_lora_b"


def local(p, rank, ranks):
    """The layer of a rank: its experts, and adapters in its order."""
    experts = p.w13.size(0) // ranks
    here = slice(rank * experts, (rank + 1) * experts)
    order = ORDERS[rank]
    expert_map = torch.full((p.w13.size(0),), -1, dtype=torch.int32)
    expert_map[here] = torch.arange(experts, dtype=torch.int32)

    def reordered(factors):
        if isinstance(factors, (list, tuple)):
            return [one[order][:, here].contiguous() for one in factors]
        return factors[order][:, here].contiguous()

    found = {name: reordered(getattr(p, name)) for name in FACTORS}
    ranks_of = tuple(p.spec.ranks[n] for n in order)
    spec = replace(p.spec, experts=experts, remote=p.w13.size(0) - experts, ranks=ranks_of)
    scalings = None if p.lora_scalings is None else p.lora_scalings[order]
    more = {"w13": p.w13[here], "w2": p.w2[here], "expert_map": expert_map, "spec": spec}
    return replace(p, lora_scalings=scalings, **found, **more)


def answer(vllm, p, rank, ranks, prepare):
    """This rank's tokens, through the experts of all."""
    mine = local(p, rank, ranks)
    layer = Layer(vllm, mine)
    size = p.hidden_states.size(0) // ranks
    tokens = slice(rank * size, (rank + 1) * size)
    slot_of = {adapter: slot for slot, adapter in enumerate(ORDERS[rank])} | {-1: -1}
    layer.step(torch.tensor([slot_of[n] for n in p.token_lora_mapping[tokens].tolist()]))
    ctx = layer.experts._lora_context
    travel = load(f"{HERE}.travel")
    table = travel.slots_of(ctx.punica_wrapper, len(ORDERS[rank]))
    for slot, adapter in enumerate(ORDERS[rank]):
        table.fill(slot, travel.global_id(f"adapter {adapter}", "path"))
    exchange = load(f"{vllm_stand_in._MOE}.prepare_finalize.naive_dp_ep")
    exchange = exchange.MoEPrepareAndFinalizeNaiveDPEPModular()
    exchange.set_lora_context(ctx)
    sent = (getattr(p, n)[tokens] for n in ("hidden_states", "topk_weights", "topk_ids"))
    hidden, _, _, ids, weights = prepare(exchange, *sent, p.w13.size(0), None, False, None)
    out = layer(hidden_states=hidden, topk_ids=ids, topk_weights=weights)
    distributed.all_reduce(out)
    assert not int(table.lost)
    return out[tokens]


def main():
    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    sys.modules.update(modules(vllm_stand_in.contents("0.33.0")))
    vllm = VLLM(pytest.MonkeyPatch()).register()
    place = load(f"{vllm_stand_in._MOE}.prepare_finalize.naive_dp_ep")
    ours = place.MoEPrepareAndFinalizeNaiveDPEPModular.prepare
    p = Spec(tokens=12, experts=8, mix="many", ranks=(8, 16, 4)).build()
    wanted = fused_experts_lora(**p.kwargs())
    size = p.hidden_states.size(0) // ranks
    wanted = wanted[rank * size : (rank + 1) * size]
    off = {}
    for name, prepare in (("ids", ours), ("slots", ours.__wrapped__)):
        got = answer(vllm, p, rank, ranks, prepare)
        off[name] = ((got - wanted).norm() / wanted.norm()).item()
    print(f"rank {rank}: {off['ids']:.1e} {off['slots']:.1e}\n", end="", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
