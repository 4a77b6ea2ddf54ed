"""Adapters that change while they are used: every answer is that of one version."""

import sys
import threading
from dataclasses import replace

import pytest
import torch
from adapter_cases import (
    CONFIG,
    add,
    before_next,
    change,
    check,
    fails,
    make_pool,
    register,
    wrapped,
)
from cases import Spec
from covering import extent
from threads import begin

import moelora
from moelora.adapters import AdapterPool, MoELayer
from moelora.adapters.factors import first_not_finite

STATES = [wrapped(seed=seed) for seed in range(5)]


def test_batches_switch_in_their_next_step():
    pool = make_pool(max_loras=3)
    old = add(pool, "a", 0)
    with pool.hold(["a"]) as held, pool.hold(["a"]) as other:
        assert pool.lookup("a", held=other) == old
        assert change(pool, "a", 1, in_flight="switch") == 2
        assert held.version("a") == other.version("a") == 1, "no step has begun"
        (new,) = pool.mapping(["a"], held=held).tolist()
        assert new != old and held.version("a") == 2
        with pytest.raises(RuntimeError, match="no slot"):
            for seed in (2, 3):  # the other one may still compute with the first version
                add(pool, f"n{seed}", seed, pin=True)
        assert pool.mapping(["a"], held=other).tolist() == [new]
        add(pool, "n3", 3)
    check(pool, "a", STATES[1][1], 2.0)


def test_a_version_that_no_step_has_seen_is_skipped():
    pool = make_pool(max_loras=3)
    add(pool, "a", 0)
    with pool.hold(["a"]) as held:
        for seed in range(1, 5):
            assert change(pool, "a", seed, in_flight="switch") == seed + 1
        assert held.version("a") == 1
        pool.lookup("a", held=held)
        assert held.version("a") == 5
        assert change(pool, "a", 0, in_flight="finish") == 6
        pool.lookup("a", held=held)
        assert held.version("a") == 5, "it finishes"
        assert change(pool, "a", 1, in_flight="switch") == 7
        pool.lookup("a", held=held)
        assert held.version("a") == 7
    for name in "bc":
        add(pool, name, 2)
    assert set(pool.names()) == {"a", "b", "c"}, "all slots are free again"


def test_refusals():
    pool = make_pool(max_loras=1)
    add(pool, "a", 0)
    with pytest.raises(ValueError, match="in_flight is 'now', wanted 'finish' or 'switch'"):
        change(pool, "a", 1, in_flight="now")
    with pytest.raises(KeyError, match="no adapter 'b' is loaded"):
        change(pool, "b", 1)
    with pool.hold(["a"]), pytest.raises(RuntimeError, match="no slot for the new version of adap"):
        change(pool, "a", 1, in_flight="switch")
    check(pool, "a", STATES[0][1], 2.0)
    assert pool.version("a") == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_many_tensors_are_checked_together(dtype, device):
    """NaN and infinities anywhere; empty tensors, and the largest numbers, are fine."""
    large = torch.finfo(dtype).max
    tensors = [torch.full((3, 5), -large), torch.empty(0, 4), torch.zeros(2), torch.ones(7, 9).T]
    tensors = [t.to(device, dtype) for t in tensors]
    assert first_not_finite(tensors) is None and first_not_finite(tensors[1:2]) is None
    for at, place, value in ((0, (2, 4), "nan"), (2, (0,), "inf"), (3, (8, 6), "-inf")):
        wrong = [t.clone() for t in tensors]
        wrong[at][place] = float(value)
        assert first_not_finite(wrong) == at


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_tensors_that_are_not_finite_are_refused(device, value):
    pool = make_pool(device=device)
    state = {key: t.to(device) for key, t in STATES[0][0].items()}
    pool.add("a", state, config=CONFIG)
    key = next(key for key in state if "lora_B" in key)
    wrong = state | {key: torch.full_like(state[key], float(value))}
    with pytest.raises(ValueError, match=f"adapter 'a': {key} holds NaN or Inf"):
        pool.update("a", wrong, config=CONFIG)
    half = make_pool(dtype=torch.float16, device=device)
    with pytest.raises(ValueError, match="adapter 'a': lora_B of .* overflows torch.float16"):
        half.add("a", state | {key: torch.full_like(state[key], 1e6)}, config=CONFIG)
    assert half.names() == []
    check(pool, "a", STATES[0][1], 2.0)


@pytest.mark.parametrize("host", [0, 4])
def test_all_versions_are_disabled_and_enabled_together(host):
    pool = make_pool(max_loras=3, host=host)
    add(pool, "a", 0)
    pool.disable("a")
    assert change(pool, "a", 1) == 2
    old = pool.lookup("a")
    with pool.hold(["a"]):
        assert change(pool, "a", 2) == 3
        both = [old, pool.lookup("a")]
        assert not pool.adapter_enabled.any(), "a version is disabled if the last one was"
        pool.enable("a")
        assert pool.adapter_enabled[both].all(), "a batch finishes on the version it has"
        pool.disable("a")
        assert not pool.adapter_enabled.any()
    check(pool, "a", STATES[2][1], 2.0)


def test_versions_that_batches_hold_are_of_one_adapter():
    """What is done to an adapter leaves the version of another one that a batch holds."""
    pool = make_pool(max_loras=4)
    old = add(pool, "a", 0)
    add(pool, "b", 1)
    with pool.hold(["a", "b"]) as held:
        change(pool, "a", 2)
        pool.disable("b")
        assert pool.adapter_enabled[old]
        pool.enable("b")
        change(pool, "b", 3, in_flight="switch")
        assert pool.mapping(["a"], held=held).tolist() == [old]
    add(pool, "c", 4)
    with pool.hold(["a"]):
        change(pool, "a", 0)
        pool.remove("c")  # in use by no batch
    check(pool, "b", STATES[3][1], 2.0)


def test_batches_switch_while_the_last_version_is_in_no_slot():
    pool = make_pool(max_loras=2, host=4)
    add(pool, "a", 0)
    register(pool, "b", 3)
    with pool.hold(["a"]) as held:
        change(pool, "a", 1)
        pool.lookup("b")
        assert "a" not in pool, "b is in the slot of the second version"
        assert change(pool, "a", 2, in_flight="switch") == 3
        assert held.version("a") == 1, "no step has begun"
        pool.lookup("a", held=held)
        assert held.version("a") == 3
        check(pool, "a", STATES[2][1], 2.0, held=held)
    assert pool.version("a") == 3


def test_a_refused_call_begins_no_step():
    pool = make_pool(max_loras=2)
    add(pool, "a", 0)
    with pool.hold(["a"]) as held:
        change(pool, "a", 1, in_flight="switch")
        with pytest.raises(KeyError, match="adapter 'b' is not held; held are .'a'."):
            pool.mapping(["a", "b"], held=held)
        for out in (torch.zeros(1), torch.zeros(1, dtype=torch.int32)):
            with pytest.raises(ValueError, match=r"out is torch.*, wanted int32 \(2,\) or longer"):
                pool.mapping(["a", None], held=held, out=out)
        assert held.version("a") == 1 and held.is_behind()


@pytest.mark.parametrize("act", ["add", "replace", "update"])
@pytest.mark.parametrize("where", ["slot", "host memory"])
def test_a_write_that_failed_leaves_what_was_known(where, act, monkeypatch):
    """If it is in no slot then, it is in host memory: the next batch gets the version before."""
    pool = make_pool(max_loras=2, host=4)
    owner, name = (pool._slots, "write") if where == "slot" else (pool._host, "copied")
    if act != "add":
        add(pool, "a", 0)

    def run():
        if act == "update":
            return change(pool, "a", 1)
        return add(pool, "a", 1, replace=act == "replace")

    monkeypatch.setattr(owner, name, fails(RuntimeError("out of memory")))
    with pytest.raises(RuntimeError, match="out of memory"):
        run()
    monkeypatch.undo()
    assert pool.registered() == ([] if act == "add" else ["a"])
    if act != "add":
        check(pool, "a", STATES[0][1], 2.0)
        assert pool.version("a") == 1
    assert run() == (2 if act == "update" else 0)
    check(pool, "a", STATES[1][1], 2.0)


@pytest.mark.parametrize("act", ["add", "update"])
@pytest.mark.parametrize("host", [0, 4])
def test_batches_of_other_adapters_do_not_wait_for_a_write(host, act, monkeypatch):
    pool = make_pool(max_loras=3, host=host)
    add(pool, "a", 0)
    add(pool, "b", 1)
    began = threading.Event()

    def batch():
        with pool.hold(["a"]) as held:
            check(pool, "a", STATES[0][1], 2.0, held=held)
            began.set()

    def other():
        begin(batch)
        assert began.wait(60)

    before_next(monkeypatch, pool._slots, "write", other)
    if act == "add":
        add(pool, "c", 2)
        check(pool, "c", STATES[2][1], 2.0)
    else:
        change(pool, "b", 2)
        check(pool, "b", STATES[2][1], 2.0)
    assert began.is_set()
    check(pool, "a", STATES[0][1], 2.0)


def test_an_update_takes_a_free_slot_unless_the_adapter_is_pinned():
    """The slot of a pinned one is that of rows whose mapping stays."""
    pool = make_pool(max_loras=2)
    add(pool, "a", 0)
    for pinned, slot in ((False, 1), (True, 1), (False, 0)):
        pool.pin("a", pinned)
        change(pool, "a", 1)
        assert pool.lookup("a") == slot
    pool.pin("a")
    for name in "cb":
        add(pool, name, 2)
    assert "a" in pool, "its version is pinned as the last one was"
    pool.pin("a", False)
    change(pool, "a", 2)
    assert pool.lookup("a") == 0, "there is no free one"
    assert set(pool.names()) == {"a", "b"}
    check(pool, "a", STATES[2][1], 2.0)
    check(pool, "b", STATES[2][1], 2.0)


@pytest.mark.parametrize("host", [0, 4])
def test_the_first_of_two_threads_that_add_a_name(host, monkeypatch):
    pool = make_pool(max_loras=3, host=host)
    before_next(monkeypatch, pool._slots, "write", lambda: add(pool, "a", 1))
    with pytest.raises(ValueError, match="adapter 'a' is already loaded"):
        add(pool, "a", 0)
    check(pool, "a", STATES[1][1], 2.0)
    for name in "bc":
        add(pool, name, 2)
    assert set(pool.names()) == {"a", "b", "c"}, "the slot of the second one is free again"


@pytest.mark.parametrize("host", [0, 4])
def test_no_version_of_a_removed_adapter_is_held(host):
    pool = make_pool(max_loras=2, host=host)
    add(pool, "a", 0)
    with pytest.raises(KeyError, match="no adapter 'x'"), pool.hold(["a", "x"]):
        pass
    with pool.hold(["a", None, "a"]) as held:
        change(pool, "a", 1)
        for act in (lambda: pool.remove("a"), lambda: add(pool, "a", 2, replace=True)):
            with pytest.raises(RuntimeError, match="'a' is in use by 1 batches"):
                act()
        assert pool.mapping(["a"], held=held).tolist() == [0]
    pool.remove("a")
    assert "a" not in pool.registered()


@pytest.mark.parametrize("again", ["replace", "remove and add"])
@pytest.mark.parametrize(("host", "during"), [(0, "read"), (4, "read"), (4, "write")])
def test_who_replaces_an_adapter_during_an_update_wins(host, during, again, monkeypatch):
    pool = make_pool(max_loras=3, host=host)
    add(pool, "a", 0)
    held = pool.keep(["a"])

    def act():
        held.release()
        if again == "remove and add":
            pool.remove("a")
        add(pool, "a", 2, replace=again == "replace")

    owner, name = (pool._reader, "stage") if during == "read" else (pool._slots, "write")
    before_next(monkeypatch, owner, name, act)
    with pytest.raises(KeyError, match="'a' was removed, evicted or replaced during the call"):
        change(pool, "a", 1)
    check(pool, "a", STATES[2][1], 2.0)
    assert pool.version("a") == 1
    for name in "bcd":
        add(pool, name)
    assert "a" not in pool, "all slots are free"
    if host:
        check(pool, "a", STATES[2][1], 2.0)


@pytest.mark.parametrize("host", [0, 4])
def test_another_update_while_an_update_reads_comes_before_it(host, monkeypatch):
    pool = make_pool(max_loras=2, host=host)
    add(pool, "a", 0)
    before_next(monkeypatch, pool._reader, "stage", lambda: change(pool, "a", 2))
    assert change(pool, "a", 1) == 3
    check(pool, "a", STATES[1][1], 2.0)


def test_a_slot_is_free_after_a_write_that_failed(monkeypatch):
    pool = make_pool(max_loras=2, host=4)
    add(pool, "a", 0)
    register(pool, "b", 1)
    for act in (lambda: change(pool, "a", 1), lambda: pool.lookup("b")):
        with pool.hold(["a"]), monkeypatch.context() as patch:
            patch.setattr(pool._slots, "write", fails(RuntimeError("out of memory")))
            with pytest.raises(RuntimeError, match="out of memory") as caught:
                act()
            patch.undo()
            check(pool, "b", STATES[1][1], 2.0)
            assert caught.value.__traceback__ is not None, "it refers to the frames of the call"
        check(pool, "a", STATES[0][1], 2.0)
        add(pool, "c", 2, replace="c" in pool.registered())


# ---- under load ----

EXPERTS, HIDDEN, INTER, RANK, ROWS = 4, 64, 32, 8, 4
KINDS = 6  # different versions; they repeat
UPDATES = 2500  # of each of four tests


class Model:
    """Layers of experts, one after the other, with the adapters of a pool."""

    def __init__(self, device):
        self.device = device
        self.dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self.layers = [MoELayer(f"layers.{n}.experts", EXPERTS, HIDDEN, INTER) for n in range(2)]
        spec = Spec(tokens=ROWS, experts=EXPERTS, hidden=HIDDEN, inter=INTER, mix="absent")
        self.arguments = replace(spec, dtype=self.dtype).build().to(device).kwargs()
        self.states = [self.state(kind) for kind in range(KINDS)]

    def state(self, kind):
        generator, found = torch.Generator().manual_seed(kind), {}
        for layer in self.layers:
            for projection in ("gate_up", "down"):
                wide, tall = layer.shape(projection)
                for side, shape in (("A", (RANK, wide)), ("B", (tall, RANK))):
                    key = f"{layer.name}.{projection}_proj.lora_{side}.weight"
                    t = torch.randn(EXPERTS, *shape, generator=generator) / 3
                    found[key] = t.to(self.device, self.dtype)
        return found

    def pool(self, **options):
        return AdapterPool(
            self.layers, 4, RANK, dtype=self.dtype, device=self.device, w13_slices=1, **options
        )

    def __call__(self, pool, mapping):
        x = self.arguments["hidden_states"]
        for layer in self.layers:
            call = pool.layer(layer.name) | {"token_lora_mapping": mapping, "hidden_states": x}
            x = x + moelora.fused_experts_lora(**self.arguments | call)
        return x

    def answers(self):
        """By kind of version, and last without an adapter."""
        pool, found = self.pool(), []
        for kind in range(KINDS):
            pool.add("a", self.states[kind], config=CONFIG_OF_MODEL, replace=bool(kind))
            found.append(self(pool, pool.mapping(["a"] * ROWS)))
        return [*found, self(pool, pool.mapping([None] * ROWS))]


CONFIG_OF_MODEL = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK}


class Steps:
    """Steps of a model over one mapping: on a GPU, replays of a graph that is captured once."""

    def __init__(self, model, pool):
        self.model, self.pool = model, pool
        self.mapping = torch.full((ROWS,), -1, dtype=torch.int32, device=model.device)
        self.graph = None
        if model.device == "cuda":
            self.stream = torch.cuda.Stream()
            torch.cuda.synchronize()
            with torch.cuda.stream(self.stream):
                model(pool, self.mapping)
                self.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graph, stream=self.stream):
                    self.out = model(pool, self.mapping)

    def __call__(self, names, held):
        """What a step gives, and the version of "a" in it."""
        if self.graph is None:
            self.pool.mapping(names, held=held, out=self.mapping)
            version = held.version("a")
            return self.model(self.pool, self.mapping), version
        with torch.cuda.stream(self.stream):
            self.pool.mapping(names, held=held, out=self.mapping)
            version = held.version("a")
            held.wait()
            self.graph.replay()
            out = self.out.clone()
        self.stream.synchronize()
        return out, version


@pytest.fixture
def often():
    """Threads take turns often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("in_flight", ["finish", "switch"])
@pytest.mark.parametrize("host", [0, 4])
def test_every_answer_is_that_of_one_version(device, in_flight, host, often):
    """Batches of a few steps, while another thread updates as fast as it can."""
    model = Model(device)
    answers = model.answers()
    assert len({a.sum().item() for a in answers}) == KINDS + 1, "they differ"
    pool = model.pool(host=host)
    pool.add("a", model.states[0], config=CONFIG_OF_MODEL)
    names = ["a", None, "a", "a"]
    rows = torch.tensor([name == "a" for name in names])
    readers = [Steps(model, pool) for _ in range(2)]
    done, seen, switched = threading.Event(), set(), []

    def generate(steps):
        while not done.is_set():
            with pool.hold(["a"], timeout=60) as held:
                versions = []
                for _ in range(4):
                    out, version = steps(names, held)
                    wanted = answers[(version - 1) % KINDS]
                    assert torch.equal(out[rows], wanted[rows]), version
                    assert torch.equal(out[~rows], answers[-1][~rows])
                    versions.append(version)
                assert versions == sorted(versions)
                if in_flight == "finish":
                    assert len(set(versions)) == 1
                seen.update(versions)
                switched.append(len(set(versions)) > 1)

    threads = [begin(generate, steps) for steps in readers]
    number = extent(nightly=UPDATES, ci=150)
    version = 1

    def enough():  # of updates, and of what readers have seen of them
        return version >= number and len(seen) > 5 and (in_flight == "finish" or any(switched))

    while not enough() and not any(thread.done() for thread in threads):
        state = model.states[version % KINDS]
        try:
            version = pool.update("a", state, config=CONFIG_OF_MODEL, in_flight=in_flight)
        except RuntimeError as error:  # more versions are held than there are slots
            assert "no slot for the new version" in str(error)
    done.set()
    for thread in threads:
        thread.result(60)
    assert pool.version("a") == version >= number
    assert any(switched) == (in_flight == "switch")
