"""`update_adapters`: all ranks switch or none, and each request ends on the version it began on."""

import asyncio
import contextlib
import gc
import multiprocessing
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from checks import freed
from conftest import DEVICES
from vllm_layer import HERE, load
from vllm_stand_in_engine import LLM
from vllm_stand_in_lora import LAYERS, LINEAR, PROJECTIONS, E, I, K, LoRAModelManager, R

pytest_plugins = ["vllm_fixtures"]
SCALING = 4.0
update = None  # moelora.integrations.vllm.update


@pytest.fixture(autouse=True)
def vllm_update(served, monkeypatch):
    """The module whose hooks the plugin has put into vLLM's classes."""
    monkeypatch.setattr(sys.modules[__name__], "update", load(f"{HERE}.update"))


@pytest.fixture(params=[1, 2], ids=["in process", "two ranks"])
def llm(request):
    return LLM(workers=request.param)


def shapes():
    found = {LINEAR: (K, K)}
    for name in LAYERS:
        for e in range(E):
            found |= {f"{name}.{e}.{p}": shape for p, shape in PROJECTIONS.items()}
    return found


def adapter(seed, rank=2, stacks=False):
    """(config, tensors), and the products that serve it."""
    draws = torch.Generator().manual_seed(seed)
    tensors, products = {}, {}
    if stacks:
        return stacked(draws, rank)
    for name, (wide, tall) in shapes().items():
        a, b = (torch.randn(s, generator=draws) for s in ((rank, wide), (tall, rank)))
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
        products[name] = SCALING * b @ a
    modules = {"o_proj", *PROJECTIONS}
    return ({"r": rank, "lora_alpha": SCALING * rank, "target_modules": modules}, tensors), products


def stacked(draws, rank):
    """Experts as PEFT's `target_parameters`; the products are those of its own shapes."""
    tensors, products = {}, {}
    for name in LAYERS:
        for key, up, wide, tall in ((f"{name}.base_layer", True, K, 2 * I), (name, False, I, K)):
            a = torch.randn(E, rank, wide, generator=draws)
            b = torch.randn(tall, rank, E, generator=draws)
            tensors[f"base_model.model.{key}.lora_A.weight"] = a.flatten(0, 1)
            tensors[f"base_model.model.{key}.lora_B.weight"] = b.flatten(1)
            for e in range(E):
                both = (SCALING * b[:, :, e] @ a[e]).chunk(2 if up else 1)
                names = ("gate_proj", "up_proj") if up else ("down_proj",)
                for p, one in zip(names, both, strict=True):
                    products[f"{name}.{e}.{p}"] = one
    return ({"r": rank, "lora_alpha": SCALING * rank, "target_modules": []}, tensors), products


def given(seed, **options):
    return adapter(seed, **options)[0]


def serves(found, seed, **options):
    """On all ranks, all of an adapter, with its scaling once."""
    serves_products(found, adapter(seed, **options)[1])


def serves_products(found, every):
    for products in found:
        for name, wanted in every.items():
            message = lambda why, n=name: f"{n}: {why}"  # noqa: E731
            torch.testing.assert_close(products[name], wanted, msg=message)


def versions(engine):
    """That all workers have, none of which is only staged."""
    store_of = load(f"{HERE}.store")._store
    stores = [store_of(w.model_runner.lora_manager) for w in engine.workers]
    assert not any(store.staged for store in stores)
    found = [sorted(p.rpartition("/")[2] for p in store.models) for store in stores]
    assert all(one == found[0] for one in found)
    return found[0]


def test_requests_end_on_their_version_and_begin_on_the_new_one(llm):
    engine = llm.llm_engine
    first = update.update_adapters(llm, {"law": given(1), "code": given(2)})
    assert {n: r.lora_name for n, r in first.items()} == {"law": "law@1", "code": "code@1"}
    engine.add_request("a", first["law"])
    serves(engine.step()["a"], 1)
    second = update.update_adapters(llm, {"law": given(3)})
    engine.add_request("b", second["law"])
    found = engine.step()
    serves(found["a"], 1), serves(found["b"], 3)
    assert second["law"].lora_name == "law@2"
    every = [*first.values(), *second.values()]
    for keys in ("lora_name", "lora_path", "lora_int_id"):  # of caches of prefixes, and of slots
        assert len({getattr(request, keys) for request in every}) == 3
    for seed in (4, 5, 6):  # a long answer outlives many versions
        update.update_adapters(llm, {"law": given(seed)})
        serves(engine.step()["a"], 1)
    engine.finish("a")
    update.update_adapters(llm, {"law": given(7)})
    with pytest.raises(ValueError, match="'law@1' is no version that this engine serves"):
        engine.add_request("c", first["law"])
    assert versions(engine) == ["code@1", "law@2", "law@5", "law@6"]  # "b" runs on law@2


@pytest.mark.parametrize("stacks", [False, True])
def test_experts_have_a_pair_each_or_stacks(llm, stacks):
    """As PEFT writes them, although vLLM keeps gate and up of these layers apart. Tensors may be
    shared, even where the engine is in the same process."""
    engine = llm.llm_engine
    for seed in (1, 2):
        config, tensors = given(seed, stacks=stacks)
        tensors = handle_module().share_tensors(tensors) if seed == 2 else tensors
        found = update.update_adapters(llm, {"law": (config, tensors), "code": given(3)})
        engine.add_request("a", found["law"])
        engine.add_request("b", found["code"])
        step = engine.step()
        serves(step["a"], seed, stacks=stacks), serves(step["b"], 3)
    for worker in engine.workers:
        assert not worker.model_runner.lora_manager._adapter_manager._enable_mixed_moe_lora_format


def trainer(device, handles, answers):
    """A process that shares the tensors of two adapters, and ends once they were answered."""
    config, tensors = given(1, stacks=True)
    shared = handle_module().share_tensors({k: t.to(device) for k, t in tensors.items()})
    handles.put((config, shared))
    answers.get()
    del shared
    gc.collect()
    handles.put(None)
    answers.get()  # until it is ended


def handle_module():
    return load(f"{HERE}.handles")


@pytest.fixture(params=DEVICES)
def other_process(request):
    """What a trainer in another process has put into its queue, and how to answer it."""
    context = multiprocessing.get_context("spawn")
    handles, answers = context.Queue(), context.Queue()
    process = context.Process(target=trainer, args=(request.param, handles, answers), daemon=True)
    process.start()
    yield partial(handles.get, timeout=100), partial(answers.put, None)
    process.kill()
    process.join()


def test_another_process_shares_its_tensors(served, other_process):
    """As handles, of which msgpack takes all fields; and until it drops them."""
    (take, answer), engines = other_process, [LLM(workers=1), LLM(workers=2)]
    config, shared = take()
    requests = [update.update_adapters(llm, {"law": (config, shared)})["law"] for llm in engines]
    answer()
    assert take() is None
    for llm, request in zip(engines, requests, strict=True):
        with pytest.raises(ValueError, match="shared tensors are gone: keep what share_tensors"):
            update.update_adapters(llm, {"law": (config, shared)})
        llm.llm_engine.add_request("a", request)
        serves(llm.llm_engine.step()["a"], 1, stacks=True)
        assert versions(llm.llm_engine) == ["law@1"]


@pytest.mark.parametrize("devices", ["", "cpu meta"])
def test_tensors_of_no_device_or_several_are_not_shared(served, devices):
    tensors = {device: torch.zeros(1, device=device) for device in devices.split()}
    with pytest.raises(ValueError, match="tensors are on .*, wanted one device"):
        handle_module().share_tensors(tensors)


def test_an_eviction_brings_back_the_current_one_scaled_once():
    """Whatever a trainer writes later to the tensors that it gave."""
    llm = LLM(max_loras=1, max_cpu_loras=1)
    law, seeds = given(1), {"law": 3, "code": 2}
    update.update_adapters(llm, {"law": law})
    kept = {key: tensor.clone() for key, tensor in law[1].items()}
    update.update_adapters(llm, {"law": given(1)})
    adapters = {name: given(seed) for name, seed in seeds.items()}
    requests = update.update_adapters(llm, adapters)
    for _, tensors in adapters.values():
        for tensor in tensors.values():
            tensor.fill_(7.0)
    for _ in range(3):
        for name, seed in seeds.items():
            llm.llm_engine.add_request(name, requests[name])
            serves(llm.llm_engine.step()[name], seed)
            llm.llm_engine.finish(name)
    assert all(torch.equal(law[1][key], tensor) for key, tensor in kept.items())


def changed(config=None, key=r"layers\.1.*\.2\.gate_proj\.lora_B", tensor=None, **more):
    """An adapter in which something is wrong."""
    old, tensors = given(9)
    names = [name for name in tensors if re.search(key, name)]
    if tensor is not None:
        tensors = tensors | {name: tensor(tensors[name]) for name in names}
    return old | (config or {}), tensors | more


def shared(**fields):
    """Tensors of another process, which has dropped them."""
    config, tensors = given(9)
    return config, replace(handle_module().share_tensors(tensors), buffer=None, **fields)


def without(key, **options):
    config, tensors = given(9, **options)
    return config, {name: t for name, t in tensors.items() if not re.search(key, name)}


def nan(tensor):
    return torch.where(torch.arange(tensor.numel()).view_as(tensor) == 3, float("nan"), tensor)


def test_freed_tensors_are_not_shared(served):
    with pytest.raises(ValueError, match="a has elements up to byte 64 of a storage of 0"):
        handle_module().share_tensors({"a": freed(torch.ones(16))})


def test_threads_update_one_after_the_other(llm, monkeypatch):
    engine, both = llm.llm_engine, threading.Barrier(2, timeout=0.2)
    call = engine.collective_rpc

    def waiting(*args, **kwargs):
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait()  # for the other thread, which is not let in
        return call(*args, **kwargs)

    monkeypatch.setattr(engine, "collective_rpc", waiting)
    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(update.update_adapters, llm, {n: given(1)}) for n in ("a", "b")]
        assert [list(one.result()) for one in done] == [["a"], ["b"]]
    assert versions(engine) == ["a@1", "b@1"]


UNKNOWN = {f"base_model.model.x.lora_{s}.weight": torch.ones(2, 2) for s in "AB"}
BAD = {
    "another GPU": (lambda: shared(device="GPU-7"), "on GPU GPU-7, which this worker does not see"),
    "no longer there": (lambda: shared(), "the shared tensors are gone"),
    "one stack": (without("base_layer", stacks=True), "'law@2'"),
    "columns": (changed(key="o_proj.lora_A", tensor=lambda t: t[:, :-1]), "factors .* 16 columns"),
    "rows": (changed(key=r"gate_proj\.lora_B", tensor=lambda t: t[:-1]), "factors .* and 8 rows"),
    "one expert": (changed(tensor=lambda t: t[:-1]), "'law@2': .*stack expects each tensor"),
    "nan": (changed(tensor=nan), "experts has factors that are NaN or infinite"),
    "infinite": (changed(config={"lora_alpha": 3e38}), "factors that are NaN or infinite"),
    "alpha": (changed(config={"lora_alpha": 1e39}), "'law': alpha lora_alpha is 1e.39, wanted"),
    "r < 0": (changed(config={"r": -1}), "'law': rank r is -1, wanted an integer from 1"),
    "r of a half": (changed(config={"r": 2.5}), "'law': rank r is 2.5, wanted an integer"),
    "option": (changed(config={"use_dora": True}), "'law': option use_dora=True is not supported"),
    "pattern": (changed(config={"rank_pattern": {"q": 2}}), "'law': rank_pattern is {'q': 2}, w"),
    "alphas": (changed(config={"alpha_pattern": {"q": 2}}), "alpha_pattern .* does not read: mul"),
    "no B": (without(r"o_proj\.lora_B"), "'law@2'"),
    "an expert less": (without(r"layers\.1.*\.2\."), "'law@2'"),
    "rank": (given(9, rank=R + 1), "LoRA rank 9 is greater than max_lora_rank"),
    "ranks": (changed(key="o_proj.lora_A", tensor=lambda t: t[:1]), "rank 1 of lora_A and 2 of"),
    "no r": ((lambda c: ({"lora_alpha": 1}, c[1]))(given(9)), "its config has no r"),
    "unknown": (changed(**UNKNOWN), "factors of x, which no layer"),
    "no tensor": (changed(**{"base_model.model.x.weight": torch.ones(1)}), "unsupported LoRA"),
    "a path": ("/tmp/law", "is a str, wanted"),
    "a path in a pair": (("/tmp/law", {}), "config is a str, wanted .* files are not read"),
    "nothing": (({}, {}), "tensors is {}, wanted tensors by name"),
    "freed": (lambda: changed(key="o_proj.lora_A", tensor=freed), "lora_A.weight has elements up"),
    "no JSON": (changed(config={"x": {(1, 2): 3}}), "'law': its config is no JSON .*keys must be"),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_refused_before_anything_switches(llm, bad):
    """Whatever else is in the same call."""
    engine = llm.llm_engine
    request = update.update_adapters(llm, {"law": given(1)})["law"]
    value, why = BAD[bad]
    value = value() if callable(value) else value
    with pytest.raises(ValueError, match=why):
        update.update_adapters(llm, {"code": given(2), "law": value})
    assert versions(engine) == ["law@1"]
    engine.add_request("a", request)
    serves(engine.step()["a"], 1)
    engine.add_request("b", update.update_adapters(llm, {"law": given(3)})["law"])
    serves(engine.step()["b"], 3)


@pytest.mark.parametrize("name", ["", "a@b", "a/b", "__base__", 3, "a\nb", "a\0", "\x9f"])
def test_names_that_versions_have_are_refused(llm, name):
    with pytest.raises(ValueError, match="name"):
        update.update_adapters(llm, {name: given(1)})


def test_a_name_in_use_is_refused(llm, served):
    from vllm.lora.request import LoRARequest

    llm.llm_engine.add_request("a", LoRARequest("law@1", 5, "/adapters/law"))
    with pytest.raises(ValueError, match="a request runs on another LoRA named 'law@1'"):
        update.update_adapters(llm, {"law": given(1)})


def test_one_rank_that_refuses_keeps_all():
    llm = LLM(workers=2)
    engine = llm.llm_engine
    request = update.update_adapters(llm, {"law": given(1)})["law"]
    inner = engine.workers[1].model_runner.lora_manager._adapter_manager
    inner.lora_config = SimpleNamespace(max_lora_rank=1)
    with pytest.raises(ValueError, match="rank 1 of 2: adapter 'law@2': .*; all adapters are as"):
        update.update_adapters(llm, {"law": given(2)})
    engine.add_request("a", request)
    serves(engine.step()["a"], 1)


@contextlib.contextmanager
def failing_after(engine, method, error):
    """Updates run a method on all workers, and then raise."""
    calls = engine.collective_rpc

    def collective_rpc(name, timeout=None, args=(), kwargs=None):
        found = calls(name, timeout, args, kwargs)
        if name == method:
            raise error
        return found

    engine.collective_rpc = collective_rpc
    with pytest.raises(type(error)):
        yield
    engine.collective_rpc = calls


@pytest.mark.parametrize("after", ["moelora_stage", "moelora_switch"])
def test_a_crash_leaves_the_old_policy_or_the_new_one(llm, after):
    """Between stage and switch: the old one; after the switch only slots are filled."""
    engine = llm.llm_engine
    old = update.update_adapters(llm, {"law": given(1)})["law"]
    with failing_after(engine, after, KeyboardInterrupt()):
        update.update_adapters(llm, {"law": given(2)})
    engine.add_request("a", old)
    serves(engine.step()["a"], 1)
    engine.add_request("b", update.update_adapters(llm, {"law": given(3)})["law"])
    found = engine.step()
    serves(found["a"], 1), serves(found["b"], 3)
    assert versions(engine) == ["law@1", "law@3"]


def test_what_a_lost_reply_leaves_staged_is_dropped(llm):
    update.update_adapters(llm, {"law": given(1)})
    with failing_after(llm.llm_engine, "moelora_stage", TimeoutError("no reply")):
        update.update_adapters(llm, {"law": given(2)})
    assert versions(llm.llm_engine) == ["law@1"]


NAMED = {"law": 1, "code": 2}


def test_an_async_engine(llm):
    """Also of updates at the same time."""
    engine = llm.llm_engine.awaited()
    with pytest.raises(RuntimeError, match="await update_adapters_async"):
        update.update_adapters(llm, {"law": given(1)})

    async def together():
        calls = (update.update_adapters_async(engine, {n: given(s)}) for n, s in NAMED.items())
        return await asyncio.gather(*calls)

    for found in asyncio.run(together()):
        for name, request in found.items():
            engine.add_request(name, request)
            serves(engine.step()[name], NAMED[name])


WITHOUT = {
    "the plugin is on here": ({}, {}, "install it in the workers' environment, too"),
    "other plugins are named": ({"VLLM_PLUGINS": "a"}, {}, "VLLM_PLUGINS=a does not name moelora"),
    "off": ({"MOELORA_VLLM": "0"}, {}, "MOELORA_VLLM=0"),
    "no kernels": ({}, {"moelora._C.WITH_CUDA": 0}, "this build of moelora has no CUDA kernels"),
    "not installed": (
        {},
        {"importlib.metadata.entry_points": lambda group: []},
        "no installed package has moelora's entry point of vllm.general_plugins: pip install",
    ),
}


@pytest.mark.parametrize("why", WITHOUT)
def test_workers_without_the_plugin_are_named(llm, monkeypatch, why):
    from vllm.v1.worker.gpu_worker import Worker

    monkeypatch.delattr(Worker, "moelora_stage")
    entry = SimpleNamespace(name="moelora", value="moelora.integrations.vllm:register")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [entry])
    monkeypatch.setattr("moelora._C.WITH_CUDA", 1)
    environment, changes, message = WITHOUT[why]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for name, value in changes.items():
        monkeypatch.setattr(name, value)
    with pytest.raises(RuntimeError, match=f"a worker does not know moelora: {message}"):
        update.update_adapters(llm, {"law": given(1)})


def test_an_update_costs_no_more_for_more_experts(llm, monkeypatch):
    """If it has stacks, no names of experts are looked up, and factors are checked once."""
    looked_up, checks, store = [], [], load(f"{HERE}.store")
    get, check = LoRAModelManager._get_lora_layer_weights, store.first_not_finite

    def look_up(self, model, name):
        looked_up.append(name)
        return get(self, model, name)

    def counted(every):
        checks.append(len(every))
        return check(every)

    monkeypatch.setattr(LoRAModelManager, "_get_lora_layer_weights", look_up)
    monkeypatch.setattr(store, "first_not_finite", counted)
    update.update_adapters(llm, {"law": given(1, stacks=True)})
    assert set(looked_up) == {LINEAR, *LAYERS}
    assert set(checks) == {6 * len(LAYERS)} and len(checks) == len(llm.llm_engine.workers)


def test_no_installed_engine_is_tried_through_a_stand_in(request):
    from vllm_fixtures import has_engine

    items = [item for item in request.session.items if has_engine(item.module)]
    releases = [item.callspec.params.get("vllm") for item in items if hasattr(item, "callspec")]
    assert "0.33.0" in releases and "installed" not in releases
