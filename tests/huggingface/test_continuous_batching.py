"""transformers' continuous batching: every request with its own adapter, in all kinds of batch."""

import contextlib
import copy
import threading

import pytest
import torch
from adapter_cases import wait_until
from conftest import needs_gpu
from hf_models import PLACES, make_model, tokens, transformers
from whole_models import make_whole_model, write_adapters

import moelora.integrations.transformers as moelora_hf
from moelora.integrations.transformers import continuous

if continuous.missing():
    pytest.skip(f"transformers {continuous.missing()}", allow_module_level=True)

PLACE = [PLACES[0], PLACES[2]]
NAMES = ["all", None, "attention", "mlp"]
LENGTHS = [7, 4, 7, 2]
NEW = 6
WAIT_S = 240  # of what a slow machine takes seconds for


@pytest.fixture(params=PLACE)
def served(request, tmp_path):
    """A model with adapters, prompts of several lengths, and what each adapter makes of them."""
    device, dtype = request.param
    model = make_whole_model("qwen3_moe", dtype, device)
    moelora_hf.load_adapters(model, write_adapters(model, tmp_path))
    every = tokens(rows=1, length=7)[0].tolist()  # one is the start of the other
    prompts = [every[:n] for n in LENGTHS]
    with torch.no_grad():
        wanted = [alone(model, p, n) for p, n in zip(prompts, NAMES, strict=True)]
        assert len({tuple(text) for text in wanted}) == len(wanted)
        assert wanted[0] != alone(model, prompts[0], None)
    return model, prompts, wanted


def alone(model, prompt, name):
    ids = torch.tensor([prompt], device=model.device)
    options = {"max_new_tokens": NEW, "do_sample": False}
    return model.generate(ids, adapter_names=[name], **options)[0, len(prompt) :].tolist()


def options(**more):
    generation = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    config = transformers.ContinuousBatchingConfig
    page = "page_size" if hasattr(config, "page_size") else "block_size"  # until 5.17
    small = {"num_blocks": 16, "max_batch_tokens": 64, page: 32, "use_cuda_graph": False}
    return {
        "generation_config": transformers.GenerationConfig(**generation | more.pop("of", {})),
        "continuous_batching_config": config(**small | more),
    }


def wait_for_removal(pool, name):
    """Until no batch holds an adapter any more."""

    def is_gone():
        with contextlib.suppress(RuntimeError):
            pool.remove(name)
        return name not in pool

    wait_until(is_gone)


def results(manager, count):
    found = {}
    while len(found) < count:
        result = manager.get_result(timeout=1)
        if result is not None:
            found[result.request_id] = result
    return found


def texts(results):
    return [result.generated_tokens for result in results.values()]


def check(model, got, wanted):
    if model.dtype == torch.float32:
        assert got == wanted
    else:  # two tokens may be as likely in bfloat16
        same = [sum(map(int.__eq__, a, b)) / NEW for a, b in zip(got, wanted, strict=True)]
        assert sum(same) / len(same) >= 0.7, (got, wanted)


def test_requests_have_their_own_adapters(served):
    model, prompts, wanted = served
    names = [name or "__base__" for name in NAMES]
    check(model, texts(model.generate_batch(prompts, adapter_names=names, **options())), wanted)
    with moelora_hf.use_adapters(model, NAMES):
        check(model, texts(model.generate_batch(inputs=prompts, **options())), wanted)
        base = model.generate_batch(prompts, adapter_names=[None] * 4, **options())
    check(model, [texts(base)[1]], [wanted[1]])
    assert texts(base) == texts(model.generate_batch(prompts, **options()))
    model._moelora.pool.remove("all")  # no batch holds it any more


def test_prompts_in_pieces_and_processors_of_requests(served):
    """Some requests of a batch have no new token; other processors have arguments of their own."""
    model, prompts, wanted = served
    few = options(max_batch_tokens=5, per_request_processors=True, of={"temperature": 0.9})
    check(model, texts(model.generate_batch(prompts, adapter_names=NAMES, **few)), wanted)


def test_several_answers_to_one_request(served):
    model, prompts, wanted = served
    twice = options(of={"num_return_sequences": 2, "do_sample": True, "top_k": 1})  # the likeliest
    answers = len(model.generate_batch(prompts[:1], **twice))  # transformers 5.17 returns one
    got = model.generate_batch(prompts[:1], adapter_names=NAMES[:1], **twice)
    assert len(got) == answers
    if model.dtype == torch.float32:  # in bfloat16 several tokens may be the likeliest
        check(model, texts(got), wanted[:1] * answers)
    ids = torch.tensor(prompts[:1] * 2, device=model.device)
    paged = model.generate(
        ids, adapter_names=["all", None], cache_implementation="paged", **options()
    )
    got = paged.reshape(2, -1)[:, -NEW:].tolist()  # (1, 2, length) in some releases
    check(model, got, [wanted[0], alone(model, prompts[0], None)])


def test_a_manager(served):
    """Requests name their adapters, which stay in their slots until the last one is done."""
    model, prompts, wanted = served
    pool = model._moelora.pool
    with model.continuous_batching_context_manager(**options()) as manager:
        with pytest.raises(KeyError, match="no adapter 'other' is loaded"):
            manager.add_request(prompts[0], adapter_name="other")
        named = zip(prompts, NAMES, strict=True)
        ids = [manager.add_request(prompt, adapter_name=name) for prompt, name in named]
        with moelora_hf.use_adapters(model, ["all"]):
            with pytest.raises(RuntimeError, match=r"add_request\(..., adapter_name=\)"):
                manager.add_request(prompts[0])
        found = results(manager, len(ids))
        for name in filter(None, set(NAMES)):
            wait_for_removal(pool, name)
        assert not pool.names()
    check(model, [found[i].generated_tokens for i in ids], wanted)


def test_a_cancelled_request_lets_go_of_its_adapter(served):
    model, prompts, _ = served
    pool = model._moelora.pool
    running, cancelled = threading.Event(), threading.Event()

    def first_batch(*_):
        running.set()
        assert cancelled.wait(WAIT_S)

    with model.continuous_batching_context_manager(**options()) as manager:
        hook = model.register_forward_pre_hook(first_batch)
        request = manager.add_request(prompts[0], adapter_name="all", max_new_tokens=400)
        try:
            assert running.wait(WAIT_S)
            with pytest.raises(RuntimeError, match="in use by 1 batches"):
                pool.remove("all")
            manager.cancel_request(request)
        finally:
            cancelled.set()
            hook.remove()
        wait_for_removal(pool, "all")


def test_requests_that_the_cache_has_no_room_for(served, monkeypatch):
    """They are put aside and go on later, with their adapters all the while."""
    from transformers.generation.continuous_batching import Scheduler

    model, prompts, _ = served
    pool, queued = model._moelora.pool, []
    put_in_queue = Scheduler.add_waiting_request

    def add_waiting_request(scheduler, state):
        try:
            refusal = pool.remove("all")
        except RuntimeError as error:
            refusal = str(error)
        queued.append((state.request_id, refusal))
        put_in_queue(scheduler, state)

    monkeypatch.setattr(Scheduler, "add_waiting_request", add_waiting_request)
    long = {"max_new_tokens": 40, "eos_token_id": -1}
    with torch.no_grad():
        ids = torch.tensor([prompts[0]], device=model.device)
        alone = model.generate(ids, adapter_names=["all"], do_sample=False, **long)
    manager = model.init_continuous_batching(**options(num_blocks=3, max_batch_tokens=32))
    requests = [manager.add_request(prompts[0], adapter_name="all", **long) for _ in range(3)]
    manager.start()  # all three are in its first batch
    try:
        found = results(manager, len(requests))
    finally:
        manager.stop()
    assert len(queued) > len(requests), "none was put aside"
    assert {name for name, _ in queued} == {*requests}
    assert all("in use by" in str(refusal) for _, refusal in queued), queued
    want = [alone[0, len(prompts[0]) :].tolist()] * 3
    check(model, [found[i].generated_tokens for i in requests], want)


def test_who_is_refused(tmp_path):
    model = make_model("qwen3_moe")
    prompts = tokens(rows=2).tolist()
    with pytest.raises(RuntimeError, match="no adapters; call load_adapters first"):
        model.generate_batch(prompts, adapter_names=["a", None], **options())
    moelora_hf.load_adapters(model, write_adapters(model, tmp_path))
    for called, names, error, why in (
        (model, ["all"], ValueError, "there are 1 adapter names for 2 inputs"),
        (model, ["all", "other"], KeyError, "no adapter 'other'"),
        (copy.deepcopy(model), ["all", None], RuntimeError, "no adapters; call load_adapters"),
    ):
        with pytest.raises(error, match=why):
            called.generate_batch(prompts, adapter_names=names, **options())
    manager = model.init_continuous_batching(**options())
    moelora_hf.unload_adapters(model)
    with pytest.raises(RuntimeError, match="no adapters; call load_adapters first"):
        manager.add_request(prompts[0], adapter_name="all")


def test_another_release_refuses_them(tmp_path, monkeypatch):
    model = make_model("qwen3_moe")
    moelora_hf.load_adapters(model, write_adapters(model, tmp_path))
    monkeypatch.setattr(continuous, "missing", lambda: "has none")
    with pytest.raises(NotImplementedError, match="has none, which generate_batch with adapters"):
        model.generate_batch(tokens(rows=1).tolist(), adapter_names=["all"], **options())


@pytest.mark.gpu
@needs_gpu
def test_cuda_graphs(tmp_path):
    """Graphs of one batch serve others, with other adapters in other places."""
    model = make_whole_model("qwen3_moe", torch.bfloat16, "cuda")
    moelora_hf.load_adapters(model, write_adapters(model, tmp_path))
    prompts = [row.tolist() for row in tokens(rows=4)]
    graphs = options(use_cuda_graph=True)
    got = texts(model.generate_batch(prompts, adapter_names=NAMES, **graphs))
    check(model, got, [alone(model, p, n) for p, n in zip(prompts, NAMES, strict=True)])
