"""Data-parallel ranks: an adapter travels by an id that all ranks know, not by a slot's number."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import vllm_stand_in
from cases import Spec
from test_vllm_update import given
from vllm_layer import HERE, Layer, load
from vllm_stand_in_lora import LLM, Worker
from vllm_stand_in_runner import LoRARequest

from moelora import fused_experts_lora

pytest_plugins = ["vllm_fixtures"]


@pytest.fixture
def travel(served):
    found = load(f"{HERE}.travel")
    served.monkeypatch.setattr(found, "is_on", True)  # as a layer of several ranks makes it
    return found


ORDERS = [0, 1, 2], [2, 0, 1]  # the adapter in each slot, by rank
SENT = "hidden_states", "topk_weights", "topk_ids"


def local(p, rank):
    """The layer of a rank of two: its experts, and adapters in its order."""
    experts, order = p.w13.size(0) // 2, ORDERS[rank]
    here = slice(rank * experts, (rank + 1) * experts)
    expert_map = torch.full((2 * experts,), -1, dtype=torch.int32)
    expert_map[here] = torch.arange(experts, dtype=torch.int32)

    def reordered(factors):
        if isinstance(factors, list):
            return [reordered(one) for one in factors]
        return factors[order][:, here].contiguous()

    factors = ("w13_lora_a", "w13_lora_b", "w2_lora_a", "w2_lora_b")
    more = {name: reordered(getattr(p, name)) for name in factors}
    more |= {"w13": p.w13[here], "w2": p.w2[here], "lora_scalings": p.lora_scalings[order]}
    ranks = tuple(p.spec.ranks[n] for n in order)
    spec = replace(p.spec, experts=experts, remote=experts, ranks=ranks)
    return replace(p, expert_map=expert_map, spec=spec, **more)


class Rank:
    """A rank that has half of the problem's tokens."""

    def __init__(self, vllm, travel, p, rank):
        self.p, self.layer, order = p, Layer(vllm, local(p, rank)), ORDERS[rank]
        size = p.hidden_states.size(0) // 2
        self.tokens = slice(rank * size, (rank + 1) * size)
        slot_of = {adapter: slot for slot, adapter in enumerate(order)} | {-1: -1}
        slots = [slot_of[n] for n in p.token_lora_mapping[self.tokens].tolist()]
        self.layer.step(torch.tensor(slots))
        ctx = self.layer.experts._lora_context
        self.table = travel.slots_of(ctx.punica_wrapper, len(order))
        for slot, adapter in enumerate(order):
            self.table.fill(slot, travel.global_id(f"adapter {adapter}", "path"))
        exchange = load(f"{vllm_stand_in._MOE}.prepare_finalize.naive_dp_ep")
        self.exchange = exchange.MoEPrepareAndFinalizeNaiveDPEPModular()
        self.exchange.set_lora_context(ctx)

    def prepare(self, prepare):
        sent = (getattr(self.p, name)[self.tokens] for name in SENT)
        return prepare(self.exchange, *sent, self.p.w13.size(0), None, False, None)


@pytest.mark.parametrize("vllm", ["0.33.0"], indirect=True)
def test_two_ranks_whose_slots_are_filled_in_another_order(served, travel, monkeypatch):
    """Tokens that send ids keep their adapters; vLLM, which sends slots, gives them other ones."""
    p = Spec(tokens=12, experts=8, mix="many", ranks=(8, 16, 4)).build()
    wanted = fused_experts_lora(**p.kwargs())
    ranks = [Rank(served, travel, p, rank) for rank in range(2)]
    ours = type(ranks[0].exchange).prepare
    for prepare, off_by in ((ours, (0, 1e-5)), (ours.__wrapped__, (0.01, 9))):
        sent = []  # by rank; each gathers what all have sent before
        for rank in ranks:
            sent.append([])
            keep = lambda mine, of=sent[-1]: of.append(mine.clone()) or torch.cat([mine, mine])  # noqa: E731
            monkeypatch.setattr(vllm_stand_in, "gathered", keep)
            rank.prepare(prepare)
        out = torch.zeros_like(wanted)
        for rank in ranks:
            each = iter(zip(*sent, strict=True))
            monkeypatch.setattr(vllm_stand_in, "gathered", lambda _, e=each: torch.cat(next(e)))
            hidden, _, _, ids, weights = rank.prepare(prepare)
            out += rank.layer(hidden_states=hidden, topk_ids=ids, topk_weights=weights)
            assert not int(rank.table.lost)
        off = ((out - wanted).norm() / wanted.norm()).item()
        assert off_by[0] <= off < off_by[1]


def test_ids_are_alike_in_all_processes_and_differ(travel):
    names = [("law", "a"), ("law", "b"), ("code", "a"), ("a", "law"), ("", "lawa")]
    assert len({travel.global_id(*one) for one in names}) == len(names)
    assert all(0 <= travel.global_id(*one) < 1 << 63 for one in names)


def test_an_adapter_that_is_in_no_slot_is_counted_and_said(travel, lines):
    slots = travel.Slots(3, "cpu")
    slots.fill(1, 70)
    slots.fill(2, 71)
    ids = torch.tensor([70, travel.NONE, 99, 71, 70, travel.NONE - 1])
    assert slots.to_slots(ids).tolist() == [1, -1, -1, 2, 1, -1]
    assert slots.to_slots(ids).dtype == torch.int32
    assert int(slots.lost) == 2
    travel._say_lost(slots)
    assert "adapters that were in no slot here" in lines[0]
    assert slots.to_ids(torch.tensor([1, -1, 2, 0], dtype=torch.int32)).tolist() == [70, -1, 71, -1]


def manager_with(travel, *names):
    """A worker's, and the ids in its slots."""
    llm = LLM(max_loras=3, max_cpu_loras=3)
    outer = llm.llm_engine.workers[0].model_runner.lora_manager
    inner = outer._adapter_manager
    update = load(f"{HERE}.update")
    requests = update.update_adapters(llm, {name: given(n) for n, name in enumerate(names)})
    (punica,) = inner.punica_wrapper_mapping.values()
    return outer, inner, requests, travel.slots_of(punica, inner.lora_slots)


def ids(travel, requests, *names):
    return [travel.global_id(requests[n].lora_name, requests[n].lora_path) for n in names]


def test_a_table_follows_the_slots(travel):
    outer, inner, requests, slots = manager_with(travel, "law", "code")
    wanted = [*ids(travel, requests, "law", "code"), travel.NONE]
    assert slots.here == slots.ids.tolist() == wanted
    inner.remove_all_adapters()  # as after a dummy batch: factors stay in the slots
    assert slots.ids.tolist() == wanted
    for name in ("code", "law"):
        outer.add_adapter(requests[name])
    assert slots.here == slots.ids.tolist() == wanted, "each is back in its slot"
    assert inner.lora_index_to_id == [requests[n].lora_int_id for n in ("law", "code")] + [None]


def test_another_adapter_takes_a_slot_without_one(travel):
    outer, inner, requests, slots = manager_with(travel, "law", "code", "art")
    law, code, art = ids(travel, requests, "law", "code", "art")
    slots.fill(0, code)  # moved: the slot that it had has none
    assert slots.here == slots.ids.tolist() == [code, travel.NONE, art]
    inner.remove_all_adapters()
    outer.add_adapter(requests["law"])
    assert slots.here == [code, law, art]


def test_a_rank_without_requests_keeps_factors_for_the_tokens_of_others(travel):
    """vLLM fills all slots with dummies in each of its steps, and removes all adapters after it."""
    outer, inner, requests, slots = manager_with(travel, "law", "code")
    worker = SimpleNamespace(model_runner=SimpleNamespace(lora_manager=outer))
    law, code = ids(travel, requests, "law", "code")
    kept = [Worker.products(worker, slot) for slot in (0, 1)]
    for _ in range(3):
        outer._cached_dummy_lora = None
        for number in range(1, inner.lora_slots + 1):  # as of adapters, which come first
            outer.add_dummy_lora(LoRARequest(f"warmup_{number}", number, "nowhere"), 8)
            inner.activate_adapter(number)
        outer._cached_dummy_lora = False
        assert None not in inner.lora_index_to_id
        assert slots.here[:2] == [law, code] and slots.here[2] < travel.NONE
        sent = slots.to_ids(torch.arange(3))
        assert (sent < travel.NONE).all(), "a rank that has no `law` must not count dummies as lost"
        for slot, products in enumerate(kept):
            for name, product in Worker.products(worker, slot).items():
                assert torch.equal(product, products[name]) and product.any()
        inner.remove_all_adapters()
    assert outer.dummies == 1, "later ones are clones"
    outer.add_adapter(requests["code"])
    assert inner.lora_index_to_id == [None, requests["code"].lora_int_id, None]
    assert slots.to_ids(torch.tensor([1])).tolist() == [code]


def test_the_senders_mapping_is_as_before(travel, monkeypatch):
    """An exchange that fails leaves it, too."""
    mapping = torch.tensor([1, -1], dtype=torch.int32)
    meta = SimpleNamespace(token_lora_mapping=mapping)
    stack = torch.empty(2, 1, 1, 1)
    ctx = SimpleNamespace(
        punica_wrapper=SimpleNamespace(token_mapping_meta=meta),
        local_token_lora_mapping=None,
        w2_lora_a_stacked=(stack,),
    )
    exchange = SimpleNamespace(_lora_context=ctx)

    def fail(self, a1):
        assert meta.token_lora_mapping is not mapping
        raise RuntimeError("a rank has left")

    with pytest.raises(RuntimeError, match="a rank has left"):
        travel._sending_ids(fail, exchange, torch.empty(2, 4))
    assert meta.token_lora_mapping is mapping
    exchange._lora_context = None
    assert travel._sending_ids(lambda self, a1: "none", exchange, torch.empty(2, 4)) == "none"
