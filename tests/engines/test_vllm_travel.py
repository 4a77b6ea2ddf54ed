"""Data-parallel ranks: an adapter travels by an id that all ranks know, not by a slot's number."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import vllm_stand_in
from cases import Spec
from test_vllm_update import given
from vllm_layer import HERE, Layer, load
from vllm_stand_in_engine import LLM
from vllm_stand_in_lora import LoRAModelManager, WorkerLoRAManager
from vllm_stand_in_runner import GPUModelRunner, GPUModelRunnerV1

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
    travel._say_lost(slots, slots.lost)
    assert len(lost_lines(lines)) == 1
    assert slots.to_ids(torch.tensor([1, -1, 2, 0], dtype=torch.int32)).tolist() == [70, -1, 71, -1]


def lost_lines(lines):
    return [line for line in lines if "adapters that were in no slot here" in line]


class Serving:
    """A rank with the adapters of these names, as far as its LoRA manager and model runner go."""

    def __init__(self, travel, names, runner=GPUModelRunner):
        llm = LLM(max_loras=3, max_cpu_loras=3)
        (self.worker,) = llm.llm_engine.workers
        self.runner = self.worker.model_runner
        self.runner.__class__ = runner
        self.outer = self.runner.lora_manager
        self.inner = self.outer._adapter_manager
        update = load(f"{HERE}.update").update_adapters
        self.requests = update(llm, {name: given(n) for n, name in enumerate(names)})
        (punica,) = self.inner.punica_wrapper_mapping.values()
        self.meta, self.slots = punica.token_mapping_meta, travel.slots_of(punica, 3)
        self.sent = []  # ids that the tokens of each batch are sent with

        def execute_model():
            self.sent.append(self.slots.to_ids(self.meta.token_lora_mapping))

        self.runner.execute_model = execute_model

    def step(self, name, tokens=4):
        """A batch of one request."""
        request = self.requests[name]
        self.runner._set_active_loras((1,), (request.lora_int_id,) * tokens, {request})
        self.runner.execute_model()

    def state(self):
        """What a batch without requests leaves as it is."""
        inner, slots = self.inner, range(3)
        known = list(inner._registered_adapters), list(inner._active_adapters)
        table = list(inner.lora_index_to_id), list(self.slots.here), self.slots.ids.tolist()
        return known, table, [self.worker.products(slot) for slot in slots]


def same(state, other):
    """Of two states; all bits of the slots."""
    pairs = zip(state[2], other[2], strict=True)
    return state[:2] == other[:2] and all(torch.equal(a[n], b[n]) for a, b in pairs for n in a)


def ids(travel, requests, *names):
    return [travel.global_id(requests[n].lora_name, requests[n].lora_path) for n in names]


def test_a_table_follows_the_slots(travel):
    rank = Serving(travel, ["law", "code"])
    inner, requests, slots = rank.inner, rank.requests, rank.slots
    wanted = [*ids(travel, requests, "law", "code"), travel.NONE]
    assert slots.here == slots.ids.tolist() == wanted
    inner.remove_all_adapters()  # as with new base weights: factors stay in the slots
    assert slots.ids.tolist() == wanted
    for name in ("code", "law"):
        rank.outer.add_adapter(requests[name])
    assert slots.here == slots.ids.tolist() == wanted, "each is back in its slot"
    assert inner.lora_index_to_id == [requests[n].lora_int_id for n in ("law", "code")] + [None]


@pytest.mark.parametrize("held", [-1, -2], ids=["none", "a dummy"])
def test_another_adapter_takes_a_slot_without_one(travel, lines, held):
    """As it is loaded, the log says that its tokens came before."""
    rank = Serving(travel, ["law", "code", "art"])
    inner, requests, slots = rank.inner, rank.requests, rank.slots
    law, code, art = ids(travel, requests, "law", "code", "art")
    slots.fill(0, code)  # moved: the slot that it had has none
    assert slots.here == slots.ids.tolist() == [code, travel.NONE, art]
    slots.fill(1, held)
    inner.remove_all_adapters()
    slots.to_slots(torch.tensor([law]))
    assert not lost_lines(lines)
    rank.outer.add_adapter(requests["law"])
    assert slots.here == [code, law, art] and len(lost_lines(lines)) == 1


def refuse(*args):
    raise AssertionError("no adapter is loaded, made or copied here")


RUNNERS = GPUModelRunner, GPUModelRunnerV1


@pytest.mark.parametrize("runner", RUNNERS, ids=["V2", "V1"])
def test_a_rank_without_requests_keeps_its_adapters(travel, monkeypatch, runner):
    """In batches that it runs for others its tokens have no adapter, and none is loaded again."""
    rank = Serving(travel, ["law", "code"], runner)
    rank.step("code")
    before, (sent,) = rank.state(), rank.sent
    assert sent[:4].tolist() == ids(travel, rank.requests, "code") * 4
    monkeypatch.setattr(WorkerLoRAManager, "_load_adapter", refuse)
    with monkeypatch.context() as patch:
        patch.setattr(LoRAModelManager, "activate_adapter", refuse)
        for _ in range(3):
            rank.worker.execute_dummy_batch()
            assert same(rank.state(), before)
            sampled = rank.inner._last_mapping.prompt_mapping
            assert len(sampled) == (2 if runner is GPUModelRunnerV1 else 1)
    others = travel.Slots(3, "cpu")  # a rank without adapters
    for sent in rank.sent[1:]:
        assert sent.numel() == 16 and (sent == travel.NONE).all(), "a graph is of more tokens"
        assert (others.to_slots(sent) == -1).all() and not int(others.lost)
    for name in ("law", "code"):
        rank.step(name)
        assert rank.sent.pop()[:4].tolist() == ids(travel, rank.requests, name) * 4
    assert rank.state()[1] == before[1]


def test_a_rank_that_never_had_an_adapter_makes_no_dummies(travel, monkeypatch):
    rank = Serving(travel, [])
    monkeypatch.setattr(WorkerLoRAManager, "add_dummy_lora", refuse)
    rank.worker.execute_dummy_batch()
    assert (rank.sent[0] == travel.NONE).all()
    assert rank.slots.here == [travel.NONE] * 3


@pytest.mark.parametrize("batch", [("execute_dummy_batch",), ("execute_model", "scheduled")])
def test_a_rank_says_what_it_lacks(travel, lines, batch):
    """Once, though it fills no slot any more, after at most 256 batches."""
    rank, (name, *args) = Serving(travel, []), batch
    rank.runner.profile_run()
    rank.slots.to_slots(torch.tensor([7, 8]))
    for number in range(1, 513):
        assert getattr(rank.worker, name)(*args) == (args[0] if args else None)
        assert len(lost_lines(lines)) == (number >= 256)
    without_lora = SimpleNamespace(model_runner=SimpleNamespace())
    for _ in range(256):
        travel._reporting_lost(lambda worker: None, without_lora)


@pytest.mark.parametrize("runner", RUNNERS, ids=["V2", "V1"])
@pytest.mark.parametrize("fails", [False, True])
def test_profiling_and_capture_have_dummies(travel, monkeypatch, fails, runner):
    """Before and after a batch without requests, or one that fails. V1 profiles without adapters in
    tokens."""
    rank = Serving(travel, [], runner)
    runner, dummies = rank.runner, [travel.NONE - n for n in (1, 2, 3)]

    def check():
        rank.sent.clear()
        runner.profile_run()
        runner.capture_model()
        profiled, without, captured = (set(sent[:8].tolist()) for sent in rank.sent)
        assert captured == set(dummies) and without == {travel.NONE}
        assert profiled == (without if type(runner) is GPUModelRunnerV1 else captured)
        assert sorted(rank.slots.here, reverse=True) == dummies
        assert not rank.inner._registered_adapters

    check()
    if fails:
        with monkeypatch.context() as patch:
            patch.setattr(runner, "execute_model", lambda: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                rank.worker.execute_dummy_batch()
    else:
        rank.worker.execute_dummy_batch()
        assert (rank.sent[-1] == travel.NONE).all()
    check()


def test_one_rank_has_vllms_own_batches(travel, monkeypatch):
    rank = Serving(travel, ["law"])
    monkeypatch.setattr(travel, "is_on", False)
    there, here = [], list(rank.slots.here)
    rank.runner.execute_model = lambda: there.extend(rank.outer.list_adapters())
    rank.worker.execute_dummy_batch()
    assert {1, 2, 3} <= set(there)
    assert not rank.outer.list_adapters() and rank.inner.lora_index_to_id == [None] * 3
    assert rank.slots.here == here, "the table of ranks is left alone"


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
