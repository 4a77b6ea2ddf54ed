"""Each layer of a batch waits for its own part of an adapter.

On the CPU two queues stand for the streams; each order of them that events allow must do.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import needs_gpu
from vllm_layer import HERE, load
from vllm_stand_in_lora import LAYERS
from vllm_stand_in_runner import LoRAMapping
from vllm_streams import COPY, Engine

pytest_plugins = ["vllm_fixtures", "vllm_prefetch_fixtures"]
pytestmark = pytest.mark.parametrize("vllm", ["0.33.0"], indirect=True)

NUMBERS = range(len(LAYERS))


class Model:
    """How a worker launches a batch: `how` is in pieces, with calls of attention between them, or
    whole, or unseen. Each layer is read once, before its attention."""

    def __init__(self, worker, found, launch):
        self.worker, self.found, self.launch = worker, found, launch
        self.how, self.attention, self.prefix = "in pieces", NUMBERS, "model.layers"

    def forward(self, rows):
        reads = self.reads = {request.name: {} for request, _ in rows}

        def read(number):
            for request, slot in rows:
                products = self.worker.products(slot)
                name = f"model.layers.{number}."
                reads[request.name] |= {k: v for k, v in products.items() if k.startswith(name)}

        def put(numbers):
            for number in numbers:
                self.launch(partial(read, number))

        if self.how == "in pieces":
            context = load("vllm.model_executor.layers.attention.attention")
            first = 0
            for number in self.attention:
                put(range(first, number + 1))
                for _ in range(2):  # for its cache, and for itself
                    context.get_attention_context(f"{self.prefix}.{number}.self_attn.attn")
                first = number + 1
            put(range(first, len(LAYERS)))
        elif self.how == "whole":
            graph = SimpleNamespace(replay=lambda: put(NUMBERS))
            graphs = load("vllm.v1.worker.gpu.cudagraph_utils")
            graphs.CudaGraphManager({"decode": graph}).run_fullgraph("decode")
        else:
            put(NUMBERS)
        self.launch(lambda: self.found.extend(reads.items()))


@pytest.fixture
def run(make, streams):
    """Makes an engine whose layers have run once, and its models."""

    def run(names, attention=NUMBERS, prefix="model.layers", **options):
        engine = make(names, **options)
        launch = partial(streams.put, "compute", None)
        models = [Model(worker, engine.read, launch) for worker in engine.workers]
        for worker, model in zip(engine.workers, models, strict=True):
            worker.forward, model.attention, model.prefix = model.forward, attention, prefix
        request = engine.add(None)
        engine.step()
        for model in models:
            model.forward([])  # vLLM warms up and captures in one batch
        engine.finish(request)
        streams.advance("compute", "copies", "compute")
        return engine, models

    return run


@pytest.fixture
def coming(run, streams):
    """An engine that runs one of two slots' adapters, while `new` comes to the other one."""

    def coming(**options):
        engine, (model,) = run("abc", slots=2, **options)
        first, _ = engine.here()
        (new,) = {*"abc"} - {*engine.here()}
        engine.add(first)
        engine.step()
        streams.advance("compute")
        engine.add(new)
        assert engine.step() == [first]
        streams.advance("compute")
        streams.advance("copies", operations=2)  # what clears, and the first layer
        assert engine.step() == [first], "it would wait too long"
        streams.advance("compute")
        streams.advance("copies", operations=1)
        engine.read.clear()
        streams.waits = 0
        return engine, model, first, new

    return coming


@pytest.mark.parametrize("workers", [1, 2], ids=["in process", "two late ranks"])
@pytest.mark.parametrize("attention", [NUMBERS, [1, 2]], ids=["in all layers", "in some"])
@pytest.mark.parametrize("order", ["copies first", "compute first", "random"])
def test_each_batch_reads_its_adapters_in_any_order_of_the_streams(
    run, streams, hooks, monkeypatch, workers, attention, order
):
    names, coming = "abcdefgh", []
    engine, models = run(names, attention, workers=workers, late=workers > 1)
    progress = load(f"{HERE}.layers").Progress
    wait = progress.wait

    def waiting(self, arrivals):
        coming.extend(arrivals)
        wait(self, arrivals)

    monkeypatch.setattr(progress, "wait", waiting)
    monkeypatch.setattr(hooks, "MAX_WAIT_S", 1.0)

    def begin(step):
        for model in models:
            model.how = "whole" if step % 3 == 0 else "in pieces"

    engine.draw_steps(order, 6, names, 12, begin)
    assert not engine.scheduler.waiting and (len(coming) > 20 or order == "copies first")
    engine.check()


def test_a_request_is_scheduled_before_all_of_its_adapter_is_there(coming, streams):
    """A layer waits for its own part; those before it do not."""
    engine, model, first, new = coming()
    assert engine.step() == [first, new]
    streams.advance("compute")
    assert {key.split(".")[2] for key in model.reads[new]} == {"0", "1"} and not engine.read
    streams.advance("copies", "compute")
    assert [name for name, _ in engine.read] == [first, new]
    engine.check()


def test_a_whole_graph_waits_for_all(coming, streams):
    engine, model, first, new = coming()
    model.how = "whole"
    assert engine.step() == [first, new]
    streams.advance("compute")
    assert not model.reads[new]
    streams.advance("copies", "compute")
    engine.check()


def test_a_slot_is_cleared_before_all_layers(hooks, streams):
    """Also for layers that an adapter has no factors of."""
    state = hooks.Activations(torch.device("cpu"))
    state.progress.order = tuple(("model.layers", number) for number in NUMBERS)
    stack = torch.ones(1, 2)
    copies = {("model.layers", 3): [(stack, (), torch.ones(2))]}
    state.copy(hooks.Writes([stack], copies), lora_id=1, slot=0)
    (arrival,) = state._arrivals.values()
    streams.advance("compute")
    arrival.wait_up_to(0)
    streams.put("compute", None, lambda: stack[0].sub_(1))
    streams.advance("compute"), streams.advance("copies", operations=1), streams.advance("compute")
    assert stack.tolist() == [[-1, -1]]


def test_copies_of_others_count_that_come_before(run, streams, hooks, monkeypatch):
    engine, _ = run("abcde", slots=3)
    monkeypatch.setattr(hooks, "MAX_WAIT_S", 1.1 * COPY)
    engine.add(engine.here()[0])
    first, *_ = engine.step()
    streams.advance("compute")
    one, other = {*"abcde"} - {*engine.here()}
    engine.add(one), engine.add(other)
    assert engine.step() == [first, one]
    streams.advance("compute", "copies", "compute")
    engine.step()
    engine.read.clear()


def test_without_a_known_rate_requests_wait_for_whole_adapters(coming, hooks):
    engine, model, first, new = coming()
    state = hooks.activations(engine.inner())
    state._rate, rate = 0.0, state._rate
    assert engine.step() == [first]
    state._rate = rate
    assert engine.step() == [first, new]


def test_attention_of_another_kind_has_no_calls(run, streams, monkeypatch):
    """As MLA, whose calls may be inside of graphs."""
    context = load("vllm.model_executor.layers.attention.attention")
    monkeypatch.setattr(context, "Attention", type("MLAAttention", (), {}))
    engine, _ = run("abc", slots=2)
    assert engine.inner()._moelora_activations.progress.order is None


@pytest.mark.parametrize("why", ["the first model runner", "attention in graphs"])
def test_batches_that_are_launched_unseen_wait_for_whole_adapters(
    coming, streams, monkeypatch, why
):
    if why == "the first model runner":
        monkeypatch.setattr(load("vllm.v1.worker.gpu_worker").Worker, "use_v2_model_runner", False)
    else:
        config = load("vllm.config.compilation").CompilationConfig
        monkeypatch.setattr(config, "splitting_ops", ())
    engine, model, first, new = coming()
    model.how = "unseen"
    assert engine.step() == [first], "layers are on their way"
    streams.advance("compute", "copies")
    assert engine.step() == [first, new]
    streams.advance("compute")
    engine.check()


def test_layers_without_calls_are_waited_for_as_a_batch_begins(coming, streams):
    """As an encoder's, whose numbers are those of layers with calls."""
    engine, model, first, new = coming(prefix="model.decoder.layers")
    assert engine.step() == [first, new]
    streams.advance("compute")
    assert not model.reads[new]
    streams.advance("copies", "compute")
    engine.check()


@pytest.mark.parametrize(
    "before, attention",
    [(NUMBERS, [0, 2, 3]), (NUMBERS, [0, 1]), (NUMBERS, [1, 2, 3]), ([0, 1], [2, 3])],
)
def test_layers_in_another_order_than_before_are_reported(
    coming, streams, lines, before, attention
):
    """What was launched until then may be wrong; the rest waits, and all later batches."""
    engine, model, first, new = coming(attention=before)
    model.attention = attention
    engine.step()
    model.attention = NUMBERS
    engine.step()
    assert ["may have read adapters before they were there" in line for line in lines] == [True]
    streams.advance("copies", "compute")
    engine.read.clear()
    engine.finish(engine.scheduler.running[0])
    engine.add("b"), engine.step()
    assert not engine.inner()._moelora_activations.progress.order
    streams.advance("compute", "copies", "compute")
    engine.check()


def test_a_batch_that_is_launched_unseen_is_reported(coming, streams, lines):
    engine, model, first, new = coming()
    model.how = "unseen"
    assert engine.step() == [first, new] and not lines
    model.how = "in pieces"
    engine.step()
    assert ["may have read adapters before they were there" in line for line in lines] == [True]
    streams.advance("compute", "copies", "compute")
    engine.read.clear()
    engine.step()
    assert not engine.inner()._moelora_activations.progress.order
    streams.advance("compute")
    engine.check()


def test_batches_of_data_parallel_ranks_wait_for_whole_adapters(coming, streams, monkeypatch):
    """Others' tokens may have any of them."""
    engine, model, first, new = coming()
    monkeypatch.setattr(load(f"{HERE}.travel"), "is_on", True)
    assert engine.step() == [first] and streams.waits == 1
    streams.advance("compute", "copies", "compute")
    engine.check()


def test_a_tower_waits_for_whole_adapters_within_a_batch(coming, streams):
    engine, model, first, new = coming()
    assert engine.step() == [first, new]
    mapping = LoRAMapping((), ())
    mapping.type = SimpleNamespace(name="TOWER")
    manager = engine.workers[0].model_runner.lora_manager
    streams.waits = 0
    manager.set_active_adapters([engine.requests[new]], mapping)
    assert streams.waits == 1
    streams.advance("copies", "compute")
    engine.check()


def test_modules_are_in_layers_by_their_names(hooks):
    layer_of = load(f"{HERE}.layers").layer_of
    name = "language_model.model.layers.12.mlp.experts.3"
    assert layer_of(name) == ("language_model.model.layers", 12)
    assert layer_of("lm_head")[1] < 0


@pytest.mark.gpu
@needs_gpu
def test_layers_wait_on_a_gpu_for_slow_copies(hooks, monkeypatch):
    engine = Engine(load(f"{HERE}.update"), "abcdef", slots=2, device="cuda")
    (worker,) = engine.workers
    model = Model(worker, engine.read, lambda read: read())
    worker.forward = model.forward
    keeping = engine.add("a")
    engine.step(), engine.step()
    copy, early = hooks._copy, 0

    def slowly(copies, slot):
        torch.cuda._sleep(20_000_000)  # ten milliseconds, on the stream of copies
        copy(copies, slot)

    monkeypatch.setattr(hooks, "_copy", slowly)
    monkeypatch.setattr(hooks, "MAX_WAIT_S", 1.0)
    state = hooks.activations(engine.inner())
    for step, name in enumerate("bcdef" * 4):
        model.how = "whole" if step % 3 == 0 else "in pieces"
        request = engine.add(name)
        while request not in engine.scheduler.running:
            engine.step()
        early += not state.has_arrived(engine.here().index(name))
        engine.finish(request)
    engine.finish(keeping)
    assert early and len(state.progress.order) == len(LAYERS)
    torch.cuda.synchronize()
    engine.check()
