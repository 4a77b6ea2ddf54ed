"""Adapters go to slots on a stream of their own, while other requests run.

On the CPU two queues stand for the streams. Each order of them that events allow must do.
"""

import pytest
import torch
from conftest import needs_gpu
from test_vllm_update import adapter, given
from vllm_layer import HERE, load
from vllm_stand_in_lora import LAYERS, LINEAR
from vllm_streams import Engine

pytest_plugins = ["vllm_fixtures", "vllm_prefetch_fixtures"]
pytestmark = pytest.mark.parametrize("vllm", ["0.33.0"], indirect=True)


@pytest.mark.parametrize("workers", [1, 2], ids=["in process", "two late ranks"])
@pytest.mark.parametrize("order", ["copies first", "compute first", "random"])
def test_each_batch_reads_its_adapters_in_any_order_of_the_streams(make, streams, workers, order):
    names = "abcdefgh"
    engine = make(names, workers=workers, late=workers > 1)
    runs = engine.draw_steps(order, 5, names, operations=6)
    assert not engine.scheduler.waiting and runs == set(names)
    engine.check()


@pytest.mark.parametrize("late", [False, True])
def test_running_requests_do_not_wait(make, streams, late):
    """A request is passed over until its adapter is there; alone it runs, and its batch waits."""
    engine = make("abcde", late=late)
    engine.add("a")
    engine.step(), engine.step()
    engine.add("e"), engine.add("a")
    for _ in range(3):
        assert engine.step() == ["a", "a"]
        streams.advance("compute")
    assert "e" in engine.here() and "a" in engine.here()
    assert all(name == "a" for name, _ in engine.read) and len(engine.read) == 8
    streams.advance("copies")
    engine.step()
    assert engine.step() == ["a", "a", "e"]
    assert streams.waits == 0
    for request in list(engine.scheduler.running):
        engine.finish(request)
    streams.advance("compute")
    engine.check()
    engine.add("d")
    assert engine.step() == ["d"] and streams.waits == 1
    streams.advance("compute")
    assert not engine.read
    streams.advance("copies", "compute")
    engine.check()


@pytest.mark.parametrize("ranks", [1, 2])
def test_batches_of_data_parallel_ranks_read_every_slot(make, streams, monkeypatch, ranks):
    """Others' tokens may: a copy waits for the last batch, and the next one for the copy."""
    monkeypatch.setattr(load(f"{HERE}.travel"), "is_on", ranks > 1)
    engine = make("abc", slots=2)
    first, _ = engine.here()
    (new,) = {*"abc"} - {*engine.here()}
    engine.add(first)
    engine.step(), engine.step()
    streams.advance("compute", operations=len(streams.queues["compute"]) - 1)
    engine.add(new)
    assert engine.step() == [first] and new in engine.here()
    streams.advance("copies")
    assert bool(streams.queues["copies"]) == (ranks > 1)
    assert streams.waits == ranks - 1
    streams.advance("compute", "copies", "compute")
    engine.check()


def test_slots_of_running_requests_stay(make, streams):
    """Also if more adapters wait than slots are left: they come in their order."""
    engine = make("abcde", slots=2)
    running = engine.add("a")
    engine.step()
    engine.add("d"), engine.add("e"), engine.add("b")
    for _ in range(3):
        assert engine.step() == ["a"]
        assert sorted(engine.here()) == ["a", "d"]
    streams.advance("compute", "copies")
    assert engine.step() == ["a", "d"]
    engine.finish(running)
    assert engine.step() == ["d"] and sorted(engine.here()) == ["d", "e"]
    streams.advance("compute", "copies")
    assert engine.step() == ["d", "e"]
    streams.advance("compute", "copies")
    engine.check()


def test_an_update_is_what_comes_back(make):
    engine = make("abcd", slots=1)
    update = load(f"{HERE}.update")
    for seed, name in ((11, "a"), (12, "b"), (13, "a")):
        engine.requests |= update.update_adapters(engine.llm, {name: given(seed)})
        engine.seeds[name] = seed
    engine.serve(*"abcadb")
    engine.check()


def test_an_adapter_without_some_modules_clears_them(make):
    engine = make("ab", slots=1)
    config, tensors = given(7)
    part = {key: tensor for key, tensor in tensors.items() if LAYERS[0] in key}
    update = load(f"{HERE}.update")
    engine.requests |= update.update_adapters(engine.llm, {"part": (config, part)})
    engine.serve("a", "part")
    (_, whole), (_, products) = engine.read
    for key, wanted in adapter(7)[1].items():
        assert whole[key].any()
        expected = wanted if LAYERS[0] in key else torch.zeros_like(wanted)
        torch.testing.assert_close(products[key], expected)
    for name in LAYERS:
        module = engine.inner().modules[name]
        assert module.adapter_enabled[0] == (name == LAYERS[0])


def test_a_copy_that_fails_leaves_no_adapter_and_comes_again(make, streams, hooks, monkeypatch):
    engine = make("abc", slots=2)
    run_each = streams.run_each

    def fail(device, copies, after=None, timed=False):
        raise RuntimeError("no memory")

    running = engine.add("a")
    engine.step()
    monkeypatch.setattr(streams, "run_each", fail, raising=False)
    engine.add("c")
    with pytest.raises(RuntimeError, match="no memory"):
        engine.step()  # not by the copy ahead, by the step that runs it
    assert sorted(map(str, engine.here())) == ["None", "a"]
    monkeypatch.setattr(streams, "run_each", run_each, raising=False)
    engine.step()
    streams.advance("compute", "copies", "compute")
    assert sorted(map(str, engine.here())) == ["a", "c"]
    engine.finish(running)
    engine.check()


def test_what_is_removed_is_read_again(make, streams):
    engine = make("ab", slots=1)
    outer = engine.workers[0].model_runner.lora_manager
    for name in ("b", "a", "b"):
        for _ in range(2):
            request = engine.add(name)
            engine.step(), engine.finish(request)
            assert outer.remove_adapter(request.lora_request.lora_int_id)  # on its way
            assert engine.here() == [None]
        streams.advance("compute", "copies", "compute", "copies", "compute")
    assert len(engine.read) == 6
    engine.check()


def test_a_module_that_reads_its_stacks_is_written_by_vllm(make, streams, hooks):
    """As before; what the other modules get still goes to the stream of copies."""
    engine = make("ab", slots=2)
    module = type(engine.inner().modules[LINEAR])
    set_lora = module.set_lora

    def reading(self, index, lora_a, lora_b):
        assert not self.lora_a_stacked[0].isnan().any()
        set_lora(self, index, lora_a, lora_b)

    module.set_lora = reading
    try:
        inner = engine.inner()
        model = inner._registered_adapters[engine.requests["b"].lora_int_id]
        model._moelora_writes = writes = hooks.record(inner, model)
        assert list(writes.own) == [LINEAR]
        inner.deactivate_adapter(model.id)
        inner.modules[LINEAR].reset_lora(0), inner.modules[LINEAR].reset_lora(1)
        engine.add("b"), engine.step()
        streams.advance("compute", "copies", "compute")
    finally:
        module.set_lora = set_lora
    engine.check()


def test_copies_are_of_factors_alone(make, hooks):
    """Nothing is cleared where factors fill the slot, and each stack is written once."""
    engine = make("a", slots=1)
    model = next(iter(engine.inner()._registered_adapters.values()))
    writes = model._moelora_writes
    targets = [id(stack) for copies in writes.copies.values() for stack, *_ in copies]
    assert len(targets) == len(set(targets))
    assert len(writes.zeros) == 6 * len(LAYERS) + 2, "rank 2 in stacks of rank 8"
    full = load("test_vllm_update").adapter(3, rank=8)[0]
    update, store = load(f"{HERE}.update"), load(f"{HERE}.store")
    path = update.update_adapters(engine.llm, {"full": full})["full"].lora_path
    model = store._store(engine.workers[0].model_runner.lora_manager).models[path]
    assert not model._moelora_writes.zeros
    for copies in model._moelora_writes.copies.values():
        assert all(part == () for _, part, _ in copies)


def test_what_cannot_be_recorded_is_written_by_vllm(make, streams, hooks, monkeypatch):
    """As factors for which no memory can be pinned."""

    def fail(*args):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(hooks, "record", fail)
    engine = make("ab", slots=1)
    for name in "ab":
        request = engine.add(name)
        engine.step(), streams.advance("compute"), engine.finish(request)
    engine.check()


@pytest.mark.gpu
@needs_gpu
def test_a_copy_on_its_way_neither_delays_nor_spoils_a_batch(hooks, monkeypatch):
    copy = hooks._copy

    def slowly(copies, slot):
        torch.cuda._sleep(250_000_000)  # an eighth of a second, on the stream of copies
        copy(copies, slot)

    engine = Engine(load(f"{HERE}.update"), "abc", slots=2, device="cuda")
    torch.cuda.synchronize()
    (worker,) = engine.workers
    found = engine.read
    worker.launch = lambda request, slot: found.append((request.name, worker.products(slot)))
    monkeypatch.setattr(hooks, "_copy", slowly)
    state = hooks.activations(engine.inner())
    first, second = engine.add(engine.here()[0]), engine.here()[1]
    new = next(name for name in "abc" if name not in engine.here())
    engine.step(), torch.cuda.synchronize()
    added = engine.add(new)
    slot = engine.here().index(second)
    for _ in range(3):
        assert engine.step() == [first.name]
    torch.cuda.current_stream().synchronize()
    assert engine.here()[slot] == new and not state.has_arrived(slot), "the batches are done"
    engine.finish(first)
    assert engine.step() == [new], "nothing else runs: it waits for its copy"
    torch.cuda.synchronize()
    assert len(found) == 5
    engine.check()
    # A batch that still reads a slot when another adapter is copied to it.
    monkeypatch.setattr(hooks, "_copy", copy)
    engine.finish(added)
    engine.add(new), engine.step()
    torch.cuda._sleep(1_000_000_000)
    found[:] = [(new, worker.products(slot))]
    (again,) = engine.scheduler.running
    engine.finish(again)
    others = [name for name in "abc" if name != new]
    for name in others:
        request = engine.add(name)
        engine.step()
        engine.finish(request)
    torch.cuda.synchronize()
    engine.check()
