"""Batches that wait for slots, and what is brought ahead of them: whose turn it is."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch
from adapter_cases import LAYERS, check, make_pool, register, registered, wait_until
from conftest import needs_gpu
from threads import begin, elsewhere

from moelora.adapters import NoSlot, transfer
from moelora.adapters import host as host_module
from moelora.adapters.turns import OVERTAKEN


def test_slots_in_use_are_waited_for(tmp_path):
    pool, _ = registered(tmp_path, "ab", max_loras=1)
    with pool.hold(["a"]):
        with pytest.raises(NoSlot, match="no slot for adapter 'b': all 1 are pinned or in"):
            pool.lookup("b")
        assert pool.names() == ["a"]
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="no slot"), pool.hold(["b"], timeout=0.05):
            pass
        assert time.monotonic() - start >= 0.05 and not len(pool._versions._turns)
    found = []
    with pool.hold(["a"]):
        thread = waiting(pool, ["b"], found)
        assert found == []
    thread.result(60)
    assert found == ["b"] == pool.names()
    kept = pool.keep(["b"])  # dropped without release
    thread = begin(lambda: found.append(pool.keep(["a"], timeout=60)))
    del kept
    thread.result(60)
    assert "a" in pool


def waiting(pool, names, found):
    """A thread that waits for a batch of these adapters, and appends them once it has begun."""
    before = len(pool._versions._turns)

    def work():
        with pool.hold(names, timeout=60):
            found.append("".join(names))

    thread = begin(work)
    wait_until(lambda: len(pool._versions._turns) == before + 1)
    return thread


def test_batches_that_wait_get_slots_in_their_order(tmp_path):
    (pool, _), found = registered(tmp_path, "abcd", max_loras=2), []
    with pool.hold(["a"]):
        with pool.hold(["b"]):
            threads = [waiting(pool, ["c", "d"], found), waiting(pool, ["b", "d"], found)]
        with pool.hold(["a"]), pool.hold(["b"]):
            pass  # they are in slots
        with pytest.raises(NoSlot, match="no slot for adapter 'd': 2 batches have waited longer"):
            pool.keep(["d"])
        pool.prefetch(["d"])
        wait_until(lambda: not pool._versions._coming)
        assert "d" not in pool, "nor is it brought ahead"
        assert found == []
    for thread in threads:
        thread.result(60)
    assert found == ["cd", "bd"]


@pytest.mark.parametrize("names", [["c"], ["c", "d"], ["a", "c"]], ids="".join)
def test_a_batch_is_not_overtaken_forever(tmp_path, names):
    """By batches of adapters in slots, which are always in use until one is refused."""
    (pool, _), found = registered(tmp_path, "abcd", max_loras=2), []
    running = {name: pool.keep([name]) for name in "ab"}
    thread = waiting(pool, names, found)
    begun, leaving = 0, set()
    for turn in range(2 * OVERTAKEN):
        name = "ab"[turn % 2]
        try:
            running[name], before = pool.keep([name]), running[name]
            before.release()
            begun += 1
        except NoSlot as error:
            assert "it leaves for a batch that waits" in str(error)
            assert not pool.ready(name)
            leaving.add(name)
        if len(leaving) == len({*names} - {*"ab"}):
            break
    assert OVERTAKEN <= begun <= OVERTAKEN + 1 and not found
    for name in leaving:
        running.pop(name).release()
    thread.result(60)
    assert found == ["".join(names)]
    for held in running.values():
        held.release()
    pool.lookup("a")
    pool.lookup("b")


def test_a_batch_never_waits_for_one_that_waits_for_it(tmp_path):
    """Blocks and look-ups inside of a block of the same adapter."""
    (pool, _), found = registered(tmp_path, "ab", max_loras=1), []
    with pool.hold(["a"]) as held:
        thread = waiting(pool, ["b"], found)
        for _ in range(OVERTAKEN):
            pool.keep(["a"])
        assert not pool.ready("a")
        with pool.hold(["a"]):
            assert pool.mapping(["a"], held=held).tolist() == [0]

        def other():
            assert pool.lookup("a") == 0
            with pytest.raises(NoSlot, match="it leaves for a batch that waits"):
                pool.keep(["a"])

        elsewhere(other)
        assert not found
    thread.result(60)
    assert found == ["b"]


def test_who_is_in_a_slot_does_not_wait(tmp_path, monkeypatch):
    """While another adapter is read from its folder, here forever."""
    pool, made = registered(tmp_path, "ab", max_loras=2)
    check(pool, "a", made[0][1], 2.0)
    begun, go = threading.Event(), threading.Event()
    copied = host_module.Host.copied

    def slowly(self, staged):
        begun.set()
        assert go.wait(60)
        return copied(self, staged)

    monkeypatch.setattr(host_module.Host, "copied", slowly)
    pool.prefetch(["b", None])
    assert begun.wait(60)
    check(pool, "a", made[0][1], 2.0)
    with pool.hold(["a"]) as held:
        assert pool.mapping(["a"], held=held).tolist() == [0]
    assert not pool.ready("b")
    go.set()
    wait_until(lambda: pool.ready("b"))
    check(pool, "b", made[1][1], 2.0)


def test_what_is_wanted_soon_is_not_evicted_ahead_of_others(tmp_path):
    """Or the adapters of two waiting requests would evict each other, and neither would begin."""
    pool, _ = registered(tmp_path, "abcd", max_loras=2)
    pool.prefetch(["a", "b", "c", "a", "d"])  # the first two fit
    wait_until(lambda: pool.ready("a") and pool.ready("b"))
    pool.prefetch(["b", "a", "c", "d"])
    wait_until(lambda: not pool._versions._coming)
    assert set(pool.names()) == {"a", "b"}
    with pool.hold(["a"]):
        pool.prefetch(["c", "b"])  # one slot, beside that of a batch
        wait_until(lambda: pool.ready("c"))
        assert set(pool.names()) == {"a", "c"}
        with pool.hold(["d"]):
            assert set(pool.names()) == {"a", "d"}, "a batch evicts what is only wanted"
            pool.prefetch(["c"])
            wait_until(lambda: not pool._versions._coming)
            assert set(pool.names()) == {"a", "d"}
    pool.prefetch([])
    pool.lookup("b")
    pool.lookup("c")
    assert set(pool.names()) == {"b", "c"}


def test_what_a_batch_has_taken_is_not_wanted_any_more(tmp_path):
    """Or adapters of former requests would keep their slots, and all others share one."""
    pool, _ = registered(tmp_path, "abcd", max_loras=2)
    pool.prefetch(["a", "b"])
    wait_until(lambda: pool.ready("a") and pool.ready("b"))
    for name in "ab":
        pool.lookup(name)
    for name in "cdc":
        pool.lookup(name)
    assert pool.names() == ["d", "c"]


class Event:
    """A CUDA event that a test completes."""

    done = False

    def query(self):
        return self.done


def test_a_batch_may_start_before_the_last_copies(monkeypatch):
    """At the pace so far: three of four megabytes in 30 ms leave 10 ms for the last one."""
    pool = make_pool(max_loras=1, host=1)
    register(pool, "a")
    pool.lookup("a")
    now = [10.0]
    monkeypatch.setattr(transfer.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(transfer, "is_capturing", lambda: False)
    events = [Event() for _ in range(4)]
    last = {torch.device("cuda"): events[-1]}
    arrival = transfer.Arrival({}, last, [(event, 1 << 20) for event in events])
    pool._versions.entry("a").arrival = arrival
    assert not pool.ready("a", within=60)
    now[0] += 0.030
    for event in events[:3]:
        event.done = True
    assert pool.ready("a", within=0.0101) and not pool.ready("a", within=0.0099)
    assert not pool.ready("a")
    events[3].done = True
    assert pool.ready("a")
    with pytest.raises(ValueError, match="within is -1, wanted seconds"):
        pool.ready("a", within=-1)


@pytest.mark.gpu
@needs_gpu
def test_layers_are_waited_for_one_by_one(tmp_path):
    """Copies are behind a long kernel; the host goes on, and readers get all of them."""
    pool, made = registered(tmp_path, "abc", max_loras=2, device="cuda")
    for name in "bca":  # allocates host memory, which waits for the GPU
        pool.mapping([name, None])
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # readers' stream is busy for about 1 s
    busy = torch.cuda.Event()
    busy.record()
    with pool.hold(["a", "b"], layerwise=True) as held:
        mapping = pool.mapping(["b", None], held=held)
        assert not busy.query(), "the host waits for nothing"
        assert not pool.ready("b") and pool.ready("a")
        for layer in LAYERS:
            held.wait(layer.name)
        slot = pool.lookup("b", held=held)
        factors = pool.layer(LAYERS[0].name)["w2_lora_b"][slot].clone()
        torch.cuda.synchronize()
        assert pool.ready("b") and mapping.tolist() == [slot, -1]
        assert torch.equal(factors, pool.layer(LAYERS[0].name)["w2_lora_b"][slot])
    check(pool, "b", made[1][1], 2.0)


def test_layers_are_waited_for_up_to_a_number(monkeypatch):
    waited = []
    stream = SimpleNamespace(wait_event=waited.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(transfer, "is_capturing", lambda: False)
    arrival = transfer.Arrival({n: ("a GPU", f"event {n}") for n in (-1, 0, 2)}, {}, ())
    for layer in (-2, -1, 0, 1, 2, 3):
        arrival.wait_up_to(layer)
    assert waited == [f"event {n}" for n in (-1, 0, 0, 2, 2)]


def test_the_rate_of_copies_is_that_of_their_events():
    def event(end, done=True):
        elapsed = lambda other: other.end - end  # noqa: E731
        return SimpleNamespace(end=end, query=lambda: done, elapsed_time=elapsed)

    portions = [(event(5.0), 7), (event(6.0), 100), (event(9.0), 200)]
    last = {"a GPU": portions[-1][0]}
    arrival = transfer.Arrival({}, last, portions)
    assert arrival.rate() == pytest.approx(300 / 4e-3) and arrival.bytes_left() == 0
    portions[1:] = [(event(6.0, False), 100), (event(9.0, False), 200)]
    assert transfer.Arrival({}, last, portions).bytes_left() == 300
    assert transfer.Arrival({}, last, portions[:1]).rate() == 0
