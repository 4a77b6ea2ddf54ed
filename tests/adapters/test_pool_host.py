"""AdapterPool with host memory: more adapters than slots, which come when they are needed."""

import contextlib
import math
import threading

import pytest
import torch
from adapter_cases import (
    LAYERS,
    E,
    K,
    N,
    add,
    before_next,
    change,
    check,
    fails,
    folders,
    make_pool,
    of_rank,
    per_expert,
    register,
    registered,
    snapshot,
    wait_until,
    wrapped,
    write,
)
from conftest import needs_gpu
from threads import run_threads

from moelora.adapters import AdapterPool, NoSlot, transfer
from moelora.adapters.stacks import Copies

SMALL = of_rank(2)


def bytes_of(rank):
    """Of the float32 factors of gate, up and down in one layer."""
    return 4 * E * rank * 3 * (K + N)


def test_adapters_come_when_they_are_held(tmp_path, device):
    pool = make_pool(max_loras=2, host=3, device=device)
    made = folders(tmp_path, 5)
    pointers = [t.data_ptr() for t in pool._tensors()]
    for seed, (path, _) in enumerate(made):
        pool.register(f"n{seed}", path)
    assert pool.names() == [] and len(pool.registered()) == 5
    assert "n0" not in pool and not pool.ready("n0") and pool.host_bytes() == 0
    for seed in (0, 1, 2, 3, 4, 0, 3):
        with pool.hold([f"n{seed}"]) as held:
            mapping = pool.mapping([f"n{seed}", None], held=held)
            assert mapping.tolist() == [pool.lookup(f"n{seed}", held=held), -1]
            check(pool, f"n{seed}", made[seed][1], 2.0)
            assert pool.version(f"n{seed}") == held.version(f"n{seed}") == 1
    assert len(pool) == 2 and pool.names() == ["n0", "n3"]
    assert pool.host_bytes() == 3 * bytes_of(rank=2)
    assert pointers == [t.data_ptr() for t in pool._tensors()]


def test_what_is_added_comes_back(device):
    """Tensors without a folder stay in host memory; slots are for whoever is needed."""
    pool = make_pool(max_loras=1, host=2, device=device)
    for seed in range(2):
        add(pool, f"n{seed}", seed)
    assert pool.names() == ["n1"] and pool.registered() == ["n0", "n1"]
    for seed in (0, 1, 0):
        check(pool, f"n{seed}", wrapped(seed=seed)[1], 2.0)
    before = snapshot(pool)
    why = "no host memory for adapter 'n2': all 2 places have adapters without a folder"
    for act in (add, register):
        with pytest.raises(RuntimeError, match=why):
            act(pool, "n2", 2)
    assert snapshot(pool)[1] == before[1] and pool.registered() == ["n0", "n1"]
    pool.remove("n0")
    with pytest.raises(KeyError, match="no adapter 'n0' is registered; 1 others are .'n1'."):
        pool.lookup("n0")
    register(pool, "n2", 2)
    check(pool, "n2", wrapped(seed=2)[1], 2.0)
    replaced = pool._host.source("n2")
    change(pool, "n2", 3)
    assert replaced.staged and pool._host.in_memory("n2", replaced) is None


def test_refusals(tmp_path):
    pool = make_pool(max_loras=2, host=2)
    (path, _), (large, _) = folders(tmp_path, 1)[0], folders(tmp_path / "large", 1, r=16)[0]
    for name in "acd":
        pool.register(name, path)
    for act, error, why in (
        (lambda: pool.register("a", path), ValueError, "'a' is already registered; remove it, upd"),
        (lambda: pool.register("b", large), ValueError, "'b': .* has rank 16, but max_rank of the"),
        (lambda: pool.register("b", tmp_path / "x"), FileNotFoundError, "'b': .*x is not a folder"),
        (lambda: pool.register("b", path, config=SMALL), ValueError, "config= is for state dicts"),
        (lambda: pool.update("a", None), ValueError, "'a': source is a NoneType, wanted a folder"),
        (lambda: pool.update("a", 5), ValueError, "'a': source is a int, wanted a folder"),
        (lambda: pool.update("a", ["a"]), ValueError, "'a': source is a list, wanted a folder"),
        (lambda: pool.prefetch(["a", "b"]), KeyError, "no adapter 'b' is registered"),
        (lambda: pool.ready("b"), KeyError, "no adapter 'b' is registered"),
        (lambda: pool.mapping(["a", "c", "d"]), RuntimeError, "names 3 adapters, the pool has 2"),
        (lambda: pool.keep(["a"], timeout=None), ValueError, "timeout is None, wanted seconds"),
        (lambda: pool.keep(["a"], timeout=math.nan), ValueError, "timeout is nan, wanted seconds"),
        (lambda: pool.ready("a", within=math.nan), ValueError, "within is nan, wanted seconds"),
    ):
        with pytest.raises(error, match=why):
            act()
    without = make_pool()
    for act in (lambda: without.register("a", path), lambda: without.prefetch(["a"])):
        with pytest.raises(RuntimeError, match="needs a pool with host memory: AdapterPool"):
            act()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"shared_outer": True}, "factors differ between experts, but the pool has shared_outer"),
        ({"w13_slices": 1}, "gate_up_proj has rank 12, but max_rank of the pool is 8"),
        ({"others": {LAYERS[1]: "which is closed"}}, f"factors of {LAYERS[1].name}, which is clo"),
    ],
    ids=["shared_outer", "joined", "others"],
)
def test_a_header_that_does_not_fit_is_refused_at_once(tmp_path, options, why):
    """Not when the first request comes."""
    state, _ = per_expert(layer=1, r=6)
    path = write(tmp_path / "a", state, of_rank(6))
    layers = [layer for layer in LAYERS if layer not in options.get("others", ())]
    pool = AdapterPool(layers, 2, 8, host=2, dtype=torch.float32, **options)
    with pytest.raises(ValueError, match=f"adapter 'a': .*{why}"):
        pool.register("a", path)
    assert pool.registered() == []


def test_a_batch_that_failed_holds_nothing(tmp_path):
    pool, made = registered(tmp_path, "ab", max_loras=2)
    (made[1][0] / "adapter_model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="cannot be read") as caught:
        pool.keep(["a", "b"])
    pool.remove("a")
    assert caught.value.__traceback__ is not None, "it refers to the frames of the call"


def test_requests_behind_a_damaged_folder_are_served(tmp_path):
    pool, made = registered(tmp_path, "ab", max_loras=1)
    tensors = made[0][0] / "adapter_model.safetensors"
    whole = tensors.read_bytes()
    tensors.write_bytes(b"damaged")

    pool.prefetch(["a", "b"])
    assert "adapter 'a'" in str(told(pool, "a"))
    pool.prefetch(["a", "b"])
    wait_until(lambda: pool.ready("b"))
    with pytest.raises(ValueError, match="adapter 'a': .* cannot be read"):
        pool.lookup("a")
    check(pool, "b", made[1][1], 2.0)
    tensors.write_bytes(whole)
    check(pool, "a", made[0][1], 2.0)
    assert pool.ready("a")


def told(pool, name):
    """What `ready` raises, once the adapter's attempt has ended."""
    raised = []

    def has_ended():
        try:
            return pool.ready(name)
        except Exception as error:  # noqa: BLE001, the test looks at it
            return raised.append(error) or True

    wait_until(has_ended)
    return raised.pop()


def test_a_batch_that_waits_does_not_read_its_folder_again_and_again(tmp_path, monkeypatch):
    """Nothing of it could be kept, since host memory is full of adapters without a folder."""
    pool = make_pool(max_loras=1, host=1)
    add(pool, "a")
    ((path, delta),) = folders(tmp_path, 1)
    pool.register("b", path)
    reads, read = [], pool._host._read
    monkeypatch.setattr(pool._host, "_read", lambda *args: reads.append(args) or read(*args))
    with pool.hold(["a"]), pytest.raises(NoSlot, match="no slot for adapter 'b'"):
        pool.keep(["b"], timeout=0.2)
    assert not reads
    check(pool, "b", delta, 2.0)
    assert len(reads) == 1


def test_folders_stay_when_the_process_changes_its_own(tmp_path, monkeypatch):
    pool = make_pool(max_loras=1, host=1)
    (path, delta), (other, new) = folders(tmp_path, 2)
    monkeypatch.chdir(tmp_path)
    pool.register("a", path.name)
    pool.add("b", path.name)
    pool.register("c", other.name)
    pool.update("c", path.name)
    pool.update("a", other.name)
    monkeypatch.chdir(path)
    for name, wanted in (("a", new), ("b", delta), ("c", delta)):
        check(pool, name, wanted, 2.0)


@pytest.fixture
def launching(device, monkeypatch):
    """Makes a pool whose copies from host memory are launched by the caller, as for a GPU."""

    def made(**options):
        pool = make_pool(device=device, **options)
        monkeypatch.setattr(pool._slots, "asynchronous", True)
        return pool

    return made


def test_copies_from_host_memory_are_launched_by_prefetch(tmp_path, launching):
    """In order, and in no thread, whose calls of CUDA would wait for those of the model."""
    pool = launching(max_loras=2, host=4)
    for seed, name in enumerate("abc"):
        register(pool, name, seed)
    pool.prefetch(["c", "b", "a"])
    assert pool.names() == ["c", "b"] and pool._versions._readers is None
    wait_until(lambda: pool.ready("b"))
    check(pool, "c", wrapped(seed=2)[1], 2.0)
    with pool.hold(["b", "c"]):
        pool.prefetch(["a"])
        assert not pool.ready("a") and pool.names() == ["b", "c"], "no slot is free"
    pool.prefetch(["a"])
    assert pool.names() == ["c", "a"] and pool._versions._readers is None
    ((path, delta),) = folders(tmp_path, 1)
    pool.register("d", path)
    pool.prefetch(["d"])  # a thread reads it
    wait_until(lambda: pool.ready("d"))
    check(pool, "d", delta, 2.0)


def test_threads_bring_an_adapter_as_often_as_it_was_evicted(tmp_path):
    pool, _ = registered(tmp_path, "ab", max_loras=1)
    for name in "abab":
        pool.prefetch([name])
        wait_until(lambda name=name: pool.ready(name))


@pytest.mark.parametrize("where", ["threads", "caller"])
def test_threads_that_bring_adapters_for_each_other(tmp_path, launching, where):
    """More threads than slots, which also update and disable what others bring."""
    pool = launching(max_loras=2, host=6)
    pool._slots.asynchronous = where == "caller"
    ranks = (1, 2, 4, 8)
    states = [wrapped(r=r, seed=r) for r in ranks]
    for number, (r, (state, _)) in enumerate(zip(ranks, states, strict=True)):
        if number % 2:
            register(pool, f"n{number}", r, r)
        else:
            pool.register(f"n{number}", write(tmp_path / f"n{number}", state, of_rank(r)))

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(60):
            first, second, third = torch.randint(4, (3,), generator=generator).tolist()
            pool.prefetch([f"n{first}", f"n{second}"])
            with pool.hold([f"n{first}"], timeout=60, layerwise=True) as held:
                held.wait()
                check(pool, f"n{first}", states[first][1], 2.0, held=held)
            with contextlib.suppress(NoSlot):
                pool.update(f"n{third}", states[third][0], config=of_rank(ranks[third]))
            pool.disable(f"n{third}")
            pool.enable(f"n{third}")
            pool.ready(f"n{second}")

    run_threads(work, 4)
    assert len(pool) <= 2 and pool.adapter_enabled.tolist().count(True) >= len(pool)
    assert pool.host_bytes() <= sum(bytes_of(rank) for rank in ranks)
    for number, (_, delta) in enumerate(states):
        check(pool, f"n{number}", delta, 2.0)


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("file", MemoryError("none left")),
        ("file", TypeError("a bug")),
        ("file", KeyError("key")),
        ("copy by a thread", RuntimeError("the device is lost")),
        ("copy by the caller", RuntimeError("the device is lost")),
    ],
)
def test_ready_raises_whatever_ended_the_attempt(tmp_path, launching, monkeypatch, error, where):
    """Or a scheduler would wait for the adapter forever; the next hold tries again."""
    pool = launching(max_loras=1, host=2)
    pool._slots.asynchronous = where == "copy by the caller"
    state, delta = wrapped()
    if where == "file":
        pool.register("a", write(tmp_path / "a", state))
    else:
        register(pool, "a")
    owner, name = (pool._host, "_read") if where == "file" else (pool._slots, "write")
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails(error))
        pool.prefetch(["a"])
        assert told(pool, "a") is error
    check(pool, "a", delta, 2.0)
    wait_until(lambda: pool.ready("a"))


def test_a_slot_after_a_write_that_ended_halfway(device, monkeypatch):
    """Of a larger rank: nothing of it is left beyond the rank of the next adapter."""
    pool = make_pool(max_loras=1, host=3, device=device)
    ranks = {"large": 8, "small": 2}
    for name, r in ranks.items():
        register(pool, name, r=r)
    run = Copies.run

    def fails(copies):
        run(copies)
        raise RuntimeError("the device is lost")

    with monkeypatch.context() as patch:
        patch.setattr(Copies, "run", fails)
        with pytest.raises(RuntimeError, match="the device is lost"):
            pool.lookup("large")
    for name in ("small", "large", "small"):
        check(pool, name, wrapped(r=ranks[name])[1], 2.0)


def test_factors_that_experts_share_come_from_host_memory(device):
    pool = make_pool(max_loras=1, host=1, device=device)
    a, b = torch.randn(1, 2, N), torch.randn(1, K, 2)
    key = f"{LAYERS[0].name}.down_proj"
    state = {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
    pool.register("a", state, config=SMALL)
    assert pool.host_bytes() == 4 * (a.numel() + b.numel())
    check(pool, "a", {"down": (b @ a).expand(E, -1, -1)}, 2.0)


@torch.inference_mode()
def test_threads_write_to_a_pool_of_inference_mode(tmp_path, device):
    pool, ((path, delta),) = registered(tmp_path, "a", max_loras=1, device=device)
    pool.prefetch(["a"])
    wait_until(lambda: pool.ready("a"))
    check(pool, "a", delta, 2.0)


def test_disabled_adapters_stay_so(tmp_path):
    pool, _ = registered(tmp_path, "ab", max_loras=1)
    pool.disable("a")
    pool.lookup("a")
    assert pool.adapter_enabled.tolist() == [False]
    pool.lookup("b")
    assert pool.adapter_enabled.tolist() == [True]
    pool.lookup("a")
    assert pool.adapter_enabled.tolist() == [False]
    pool.enable("a")
    assert pool.adapter_enabled.tolist() == [True]


@pytest.mark.parametrize("tensors", [False, True], ids=["folder", "tensors"])
def test_a_new_version_in_a_slot_or_not(tmp_path, device, tensors):
    pool = make_pool(max_loras=1, host=4, device=device)
    made = folders(tmp_path, 4)
    for name, (path, _) in zip("ab", made, strict=False):
        pool.register(name, path)
    check(pool, "a", made[0][1], 2.0)

    def update(name, seed, **options):
        if tensors:
            state = {k: t.to(device) for k, t in wrapped(r=2, seed=seed)[0].items()}
            return pool.update(name, state, config=SMALL, **options)
        return pool.update(name, made[seed][0], **options)

    assert update("a", 2) == 2  # in a slot
    assert update("b", 3) == 2  # in none
    assert pool.names() == ["a"]
    for name, seed in (("a", 2), ("b", 3), ("a", 2), ("b", 3)):
        check(pool, name, made[seed][1], 2.0)
        assert pool.version(name) == 2
    with pool.hold(["b"]) as held, pytest.raises(RuntimeError, match="no slot for the new version"):
        assert held.version("b") == 2
        update("b", 0)
    check(pool, "a", made[2][1], 2.0)
    check(pool, "b", made[3][1], 2.0)
    assert pool.version("b") == 2, "it was refused"


@pytest.mark.parametrize("again", [True, False])
def test_tensors_that_are_replaced_or_removed_while_a_batch_waits_for_them(again, monkeypatch):
    """The batch gets those that took their place; they cannot be read again."""
    pool = make_pool(max_loras=1, host=2)
    register(pool, "a")

    def replace():
        pool.remove("a")
        if again:
            register(pool, "a", 1)

    before_next(monkeypatch, pool._host, "staged", replace)
    if again:
        check(pool, "a", wrapped(seed=1)[1], 2.0)
        return
    with pytest.raises(KeyError, match="no adapter 'a' is registered"):
        pool.lookup("a")


def test_threads_share_the_stream_of_copies(monkeypatch):
    """Copies of two streams to one slot would not follow each other."""
    device, both = torch.device("cuda", 0), threading.Barrier(2)

    def make(device, priority):
        both.wait(timeout=60)
        return object()

    monkeypatch.setattr(torch.cuda, "Stream", make)
    streams = transfer.Streams([device])
    found = run_threads(lambda _: streams._of(device), 2)
    assert found[0] is found[1] is streams._of(device)


@pytest.mark.gpu
@needs_gpu
def test_who_disables_an_adapter_does_not_disable_the_next_one():
    """On a stream that has other work yet, when another adapter gets the slot."""
    pool = make_pool(max_loras=1, host=2, device="cuda")
    for seed, name in enumerate("ab"):
        register(pool, name, seed)
    pool.lookup("a")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)
        pool.disable("a")
    pool.lookup("b")
    torch.cuda.synchronize()
    assert pool._slots.tables[pool.device].enabled.tolist() == [True]


@pytest.mark.gpu
@needs_gpu
def test_an_adapter_is_disabled_while_it_comes():
    """The write to the tables, on the stream of copies, must not come after that of `disable`."""
    pool = make_pool(max_loras=1, host=2, device="cuda")
    for seed, name in enumerate("ab"):
        register(pool, name, seed)
        pool.lookup(name)
    torch.cuda.synchronize()
    with torch.cuda.stream(pool._slots.streams._of(pool.device)):
        torch.cuda._sleep(200_000_000)
    with pool.hold(["a"], layerwise=True):
        pool.disable("a")
        torch.cuda.synchronize()
        assert pool.adapter_enabled.tolist() == [False]
