"""AdapterPool under Ctrl-C: wherever it comes, what is listed has its own factors."""

import random
import time

import pytest
import torch
from adapter_cases import CONFIG, LAYERS, check, wrapped
from covering import extent
from interrupts import interrupted, signals
from threads import elsewhere

from moelora.adapters import AdapterPool, held, host, linears, slots, stacks, turns, versions
from moelora.adapters import pool as pool_module

# Nightly at each instruction, in CI at every seventh.
EVERY = extent(nightly=1, ci=7)
STATES = {name: wrapped(seed=seed) for seed, name in enumerate("abcd")}


MODULES = (pool_module, versions, turns, held, slots, stacks, linears)
FILES = {module.__file__ for module in MODULES}


def add(pool, name, states=STATES, **options):
    return pool.add(name, states[name][0], config=CONFIG, **options)


def assert_consistent(pool, states=STATES):
    slots = [pool.lookup(name) for name in pool.names()]
    assert len(set(slots)) == len(slots) <= pool.max_loras
    for name, slot in zip(pool.names(), slots, strict=True):
        deltas = states[name] if isinstance(states[name], list) else [states[name][1]]
        assert any(answers(pool, name, delta) for delta in deltas), name
        assert pool.adapter_enabled[slot]


def answers(pool, name, delta):
    try:
        check(pool, name, delta, 2.0)
    except AssertionError:
        return False
    return True


def assert_all_slots_work(pool):
    """As many adapters as there are slots can be pinned, and none is still held."""
    for name in pool.names():
        pool.remove(name)
    for name in list(STATES)[: pool.max_loras]:
        add(pool, name, pin=True)
    with pytest.raises(RuntimeError, match="no slot"):
        add(pool, "d")
    assert_consistent(pool)
    for name in pool.names():
        pool.remove(name)


def at_every_instruction(prepare, act, after):
    """`after` each interrupt of `act` at every EVERY-th instruction, until one comes too late."""
    pool = AdapterPool(LAYERS[:1], 2, 4, dtype=torch.float32)
    for turn, number in enumerate(range(1, 100_000, EVERY)):
        for name in pool.names():
            pool.remove(name)
        prepare(pool)
        if not interrupted(lambda: act(pool), FILES, number):
            return number
        after(pool)
        if turn % 50 == 49:
            assert_all_slots_work(pool)


def add_two(pool):
    add(pool, "a")
    add(pool, "b")


@pytest.mark.parametrize(("there", "new"), [("ab", "c"), ("b", "c")], ids=["eviction", "free slot"])
def test_another_adapter(there, new):
    def prepare(pool):
        for name in there:
            add(pool, name)

    def after(pool):
        assert_consistent(pool)
        assert "b" in pool, "nothing made it leave"
        if new not in pool:
            add(pool, new)
        assert set(pool.names()) == {"b", new}
        assert_consistent(pool)

    assert at_every_instruction(prepare, lambda pool: add(pool, new), after) > 100


def test_a_replacement():
    other = STATES | {"a": STATES["d"]}
    either = STATES | {"a": [STATES["a"][1], STATES["d"][1]]}

    def after(pool):
        assert_consistent(pool, either)
        assert "b" in pool
        add(pool, "a", other, replace=True)
        assert_consistent(pool, other)

    act = lambda pool: add(pool, "a", other, replace=True)  # noqa: E731
    assert at_every_instruction(add_two, act, after) > 100


def test_a_removal():
    def after(pool):
        assert_consistent(pool)
        if "a" in pool:
            pool.remove("a")

    assert at_every_instruction(lambda p: add(p, "a"), lambda p: p.remove("a"), after) > 10


def test_a_batch_that_holds_adapters():
    def hold(pool):
        with pool.hold(["a", "b"]):
            pass

    def after(pool):
        pool.remove("a")
        pool.remove("b")

    assert at_every_instruction(add_two, hold, after) > 10


@pytest.mark.parametrize("act", ["register", "update", "replace", "remove"])
def test_tensors_in_host_memory(act):
    """Nowhere else are they: what is known can be brought to a slot."""
    (old, before), (new, after) = STATES["a"], STATES["d"]
    acts = {
        "register": lambda pool: pool.register("c", new, config=CONFIG),
        "update": lambda pool: pool.update("a", new, config=CONFIG),
        "replace": lambda pool: pool.add("a", new, config=CONFIG, replace=True),
        "remove": lambda pool: pool.remove("a"),
    }
    number, came = 1, True
    while came:
        pool = AdapterPool(LAYERS[:1], 1, 4, dtype=torch.float32, host=3)
        pool.register("a", old, config=CONFIG)
        add(pool, "b")
        came = interrupted(lambda: acts[act](pool), {host.__file__}, number)  # noqa: B023
        for name in pool.registered():
            deltas = [STATES[name][1]] if name == "b" else [before, after]
            assert any(answers(pool, name, delta) for delta in deltas), name
        assert "b" in pool.registered()
        for name in pool.registered():
            pool.remove(name)
        for name in "abc":  # none of them takes a place any more
            pool.register(name, STATES[name][0], config=CONFIG)
        number += EVERY
    assert number > 40


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in finalizers
def test_signals_leave_the_pool_to_other_threads():
    """Real signals at random times; the lock is always free again."""
    pool = AdapterPool(LAYERS[:1], 2, 4, dtype=torch.float32)
    random_times, caught, times = random.Random(0), 0, []

    def attempt(name):
        with pool.hold(pool.names()[:1]):
            try:
                add(pool, name, replace=True)
            except RuntimeError as error:  # the adapter that it holds
                assert "in use by 1 batches" in str(error), error

    for name in "abcd" * 2:
        start = time.perf_counter()
        attempt(name)
        times.append(time.perf_counter() - start)
    with signals() as interrupted_after:
        for turn in range(200):
            seconds = random_times.uniform(1e-6, 2 * min(times))
            caught += interrupted_after(lambda: attempt("abcd"[turn % 4]), seconds)  # noqa: B023
            assert elsewhere(pool.names) is not None, "the lock was left locked"
            assert torch.is_grad_enabled()
            assert_consistent(pool)
    assert caught > 10
    assert_all_slots_work(pool)
