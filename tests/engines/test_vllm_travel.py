"""Data-parallel ranks: an adapter travels by an id that all ranks know, not by a slot's number."""

import sys
from types import SimpleNamespace

import pytest
import torch
import travel_cases
from ranks import ON_CPUS, run_ranks
from test_vllm_update import given
from vllm_layer import HERE, load
from vllm_stand_in_lora import LLM, LoRARequest, Worker

pytest_plugins = ["vllm_fixtures"]


def test_two_ranks_whose_slots_are_filled_in_another_order():
    env = ON_CPUS | {"PYTHONPATH": ":".join(filter(None, sys.path))}
    lines = run_ranks(travel_cases.__file__, modules="torch pytest moelora", **env)
    assert len(lines) == 2
    for line in lines:
        ids, slots = map(float, line.split()[2:])
        assert ids < 1e-5, "what one process computes"
        assert slots > 0.01, "vLLM's own exchange gives tokens other adapters"


@pytest.fixture
def travel(served):
    found = load(f"{HERE}.travel")
    served.monkeypatch.setattr(found, "is_on", True)  # as a layer of several ranks makes it
    return found


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
