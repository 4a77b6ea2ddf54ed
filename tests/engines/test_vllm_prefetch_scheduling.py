"""Which adapters an engine asks its workers for, and which requests it passes over meanwhile."""

from types import SimpleNamespace

import pytest
from vllm_layer import HERE, load
from vllm_streams import Engine

pytest_plugins = ["vllm_fixtures", "vllm_prefetch_fixtures"]
pytestmark = pytest.mark.parametrize("vllm", ["0.33.0"], indirect=True)
ELSEWHERE = {"several GPUs": (2, 2, None), "a slot for each": (3, 1, None), "off": (2, 1, "0")}
CASES = {"beyond slots": (2, 1, None), "wanted": (3, 2, "1")} | ELSEWHERE


@pytest.mark.parametrize("case", CASES)
def test_it_runs_on_one_gpu_for_adapters_beyond_slots(vllm, case):
    """The switch says otherwise."""
    slots, gpus, switch = CASES[case]
    if switch:
        vllm.monkeypatch.setenv("MOELORA_VLLM_PREFETCH", switch)
    vllm.register()
    state = load("vllm.distributed.parallel_state")
    vllm.monkeypatch.setattr(state, "get_pp_group", lambda: SimpleNamespace(world_size=gpus))
    engine, asked = Engine(load(f"{HERE}.update"), "abc", workers=gpus, slots=slots), []
    ask = engine.core.model_executor.collective_rpc

    def asking(*args, **named):
        asked.append(args)
        return ask(*args, **named)

    engine.core.model_executor.collective_rpc = asking
    for worker in engine.workers:
        worker.launch = lambda request, slot: None
    engine.add("a"), engine.step()
    runs = case not in ELSEWHERE
    models = engine.inner()._registered_adapters.values()
    assert models and all(hasattr(m, "_moelora_writes") == runs for m in models)
    assert bool(asked) == runs


def test_a_request_with_blocks_is_never_passed_over(make):
    """It would keep them, and nobody would ask for an adapter that has left its slot."""
    engine = make("abc", slots=2)
    engine.add(None), engine.step()
    (late,) = {*"abc"} - {*engine.here()}
    engine.add(late)
    assert engine.step() == [None], "its adapter is on the way"
    request = engine.scheduler.waiting.pop()
    request.num_computed_tokens = 8
    engine.scheduler.kv_holding_waiting.append(request)
    assert engine.step() == [None, late]


def test_a_request_that_cannot_run_yet_takes_no_slot(make, streams):
    engine = make("abc", slots=2)
    here, (late,) = engine.here(), {*"abc"} - {*engine.here()}
    engine.add(here[0]), engine.step()
    blocked = engine.add(late, "blocked")
    ready = engine.add(here[1])
    assert engine.step() == [here[0], ready.name] and engine.here() == here
    blocked.status = None
    engine.finish(ready)
    engine.step(), streams.advance("compute", "copies"), engine.step()
    assert engine.step() == [here[0], late]


def test_requests_of_one_adapter_start_together(make):
    engine = make("abc", slots=2)
    (late,) = {*"abc"} - {*engine.here()}
    for _ in range(3):
        engine.add(late)
    assert engine.step() == [late] * 3, "no other runs: the batch waits"


def test_a_paused_engine_copies_nothing(make, monkeypatch):
    """While it sleeps its slots have no memory."""
    engine = make("abc", slots=2)
    engine.scheduler.pause_state = 1
    monkeypatch.setattr(engine.core.model_executor, "collective_rpc", None)
    engine.add("a"), engine.step()
    assert engine.scheduler.__dict__["_moelora_ahead"].is_on


def test_folders_are_read_by_the_step_that_runs_them(make, lines):
    engine = make("ab", slots=1)
    new = SimpleNamespace(lora_int_id=7, lora_name="new", lora_path="folder", load_inplace=False)
    before = engine.here()
    here, refused = engine.workers[0].moelora_prefetch([new], [])
    assert refused == [7] and engine.here() == before and not lines


def test_adapters_that_a_step_has_loaded_are_asked_for_again(make, streams, monkeypatch):
    engine = make("abcd", slots=2)
    cold = [engine.add(name) for name in {*"abcd"} - {*engine.here()}]
    with monkeypatch.context() as patch:
        patch.setattr(load(f"{HERE}.prefetch"), "is_known", lambda *of: False)
        engine.step()
    streams.advance("compute", "copies", "compute")
    for request in cold:
        engine.finish(request)
    engine.add("a"), engine.step(), streams.advance("compute", "copies", "compute")
    waits = streams.waits
    for name in "bcd" * 4:
        request = engine.add(name)
        while request in engine.scheduler.waiting:
            engine.step(), streams.advance("compute", "copies", "compute")
        engine.finish(request)
    assert streams.waits <= waits + 1, "running requests waited for copies"
    engine.check()


def test_requests_that_cannot_run_hide_no_others(make, streams):
    engine = make("abc", slots=2)
    engine.add(None), engine.step()
    (late,) = {*"abc"} - {*engine.here()}
    for _ in range(300):
        engine.add(late, "blocked")
    ready = engine.add(late)
    assert engine.step() == [None]
    streams.advance("compute", "copies")
    assert engine.step() == [None, ready.name]


def test_ranks_that_must_schedule_alike_copy_nothing_ahead(make, streams):
    engine = make("abc", slots=2, workers=2)
    engine.scheduler.parallel_config.distributed_executor_backend = "external_launcher"
    engine.add("a"), engine.step()
    assert engine.scheduler._moelora_ahead.is_on is False


def test_a_scheduler_of_another_kind_is_left_alone(make):
    engine = make("a", slots=1)
    engine.core.scheduler = SimpleNamespace(schedule=list)
    assert engine.step() == []


def test_workers_that_do_not_know_it_are_not_asked_again(make, lines):
    engine = make("ab", slots=1)

    def refuse(*args, **named):
        raise AttributeError("no moelora_prefetch")

    engine.core.model_executor.collective_rpc = refuse
    engine.add("b"), engine.add("a")
    assert engine.step() == ["b"] and engine.step() == ["b"]
    (line,) = (line for line in lines if "do not copy" in line)
    assert "no moelora_prefetch" in line
