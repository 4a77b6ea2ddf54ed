"""A slot has one truth: what was trained stays whole, whatever writes, evicts or interrupts."""

import threading

import pytest
import torch
from covering import extent
from interrupts import interrupted
from tenant_house import FLOAT32, LAYERS, PLACES, House, alone, draw, same

import moelora
from moelora.adapters import held as held_module
from moelora.adapters import host, linears, slots, stacks, turns, versions
from moelora.adapters import pool as pool_module
from moelora.training import Tenants
from moelora.training.tenants import factors, rows, steps, tenant, tenants, trained, updates


@pytest.fixture(params=PLACES)
def place(request):
    return request.param


def answers(house, name):
    """Outputs of the pool's adapter of this name, whether it trains or not."""
    return house.losses([name], 99)[name].detach()


# ---- evictions ----


@pytest.mark.parametrize("closed", [True, False])
def test_an_eviction_takes_what_was_trained_to_host_memory(place, closed, tmp_path):
    house = House(place, "law", "code", max_loras=2, host=3)
    first = answers(house, "law")
    house.steps(["law", "code"], range(3))
    trained = {name: answers(house, name) for name in ("law", "code")}
    assert [house.pool.version(name) for name in ("law", "code")] == [4, 2]
    house.tenants.save("law", tmp_path)
    if closed:
        house.tenants.close()
    for name in ("law", "code"):
        house.pool.pin(name, False)
    house.pool.add("a", tmp_path)
    house.pool.add("b", tmp_path)
    assert house.pool.names() == ["a", "b"]
    for name in ("law", "code"):
        assert torch.equal(answers(house, name), trained[name])
        assert house.pool.version(name) == {"law": 4, "code": 2}[name]
    assert not torch.equal(first, trained["law"])
    if not closed:  # what came back is served, and the training has ended
        (step,) = house.steps(["law"], [3])
        assert step["law"].stopped and not step["law"].updated


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_all_kinds_of_factors_come_back(dtype):
    """Of experts, of linear layers and of embeddings, also where an adapter has none."""
    experts = [moelora.MoELayer(f"layers.{n}.experts", 2, 16, 8) for n in range(2)]
    linears = [
        moelora.LinearLayer("q_proj", 16, 24),
        moelora.LinearLayer("embed_tokens", 12, 16, embedding=True),
    ]
    pool = moelora.AdapterPool(experts, 2, 8, dtype=dtype, w13_slices=1, linears=linears, host=3)
    tenants = Tenants(pool)
    targets = ["layers.1.experts", "q_proj", "embed_tokens"]
    tenant = tenants.add("law", rank=4, alpha=3.0, lr=0.1, targets=targets)
    for number in range(2):
        pairs = (f.stack[f.slot].narrow(f.dim, 0, f.rank) for f in tenant.factors())
        loss = sum((x.float() * draw(number, *x.shape)).sum() for x in pairs)
        assert tenants.step({"law": loss})["law"].updated
    slot = pool.lookup("law")
    trained = [t[slot].detach().clone() for t in pool._tensors()]
    pool.pin("law", False)
    adapter = tenants["law"].adapter()
    for name in ("a", "b"):
        pool.add(name, adapter)
    assert pool.names() == ["a", "b"]
    slot = pool.lookup("law")
    assert same([t[slot].detach() for t in pool._tensors()], trained)


def test_without_host_memory_what_was_trained_is_not_evicted(tmp_path):
    house = House(FLOAT32, "law", max_loras=2)
    house.tenants.save("law", tmp_path)
    house.steps(["law"], range(2))
    trained = answers(house, "law")
    house.tenants.close()
    house.pool.pin("law", False)
    house.pool.add("a", tmp_path)
    house.pool.add("b", tmp_path)
    assert house.pool.names() == ["law", "b"]
    house.pool.pin("b")
    with pytest.raises(RuntimeError, match=r"'c': all 2 .* remove one of \['law'\], or .* host="):
        house.pool.add("c", tmp_path)
    assert torch.equal(answers(house, "law"), trained)
    house.pool.update("law", tmp_path)
    house.pool.add("c", tmp_path)
    assert house.pool.names() == ["b", "c"]


@pytest.mark.parametrize("act", ["update", "replace"])
def test_an_update_that_fails_leaves_what_was_trained(act, tmp_path, monkeypatch):
    house = House(FLOAT32, "law", host=2)
    house.tenants.save("law", tmp_path)
    house.steps(["law"], range(2))
    trained = answers(house, "law")

    def fails(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(house.pool._slots, "write", fails)
        if act == "update":
            house.pool.update("law", tmp_path)
        else:
            house.pool.add("law", tmp_path, replace=True)
    assert torch.equal(answers(house, "law"), trained)


# ---- other writers ----


@pytest.mark.parametrize("host", [0, 4])
@pytest.mark.parametrize("act", ["update", "replace", "remove and add"])
def test_a_step_leaves_what_others_have_written_since(place, act, host, tmp_path):
    """As late as in the optimizer, and in the same slot."""
    house = House(place, "law", "med", host=host)
    house.tenants.save("law", tmp_path)
    house.steps(["law", "med"], range(1))

    def write(*_):
        if act == "update":
            house.pool.update("law", tmp_path)
        if act == "remove and add":
            house.pool.remove("law")
        if act != "update":
            house.pool.add("law", tmp_path, replace=True)
        written.extend(t.clone() for t in slot_of(house, "law"))

    written = []
    house.tenants["law"].optimizer.register_step_post_hook(write)
    slot = house.pool.lookup("law")
    (step,) = house.steps(["law", "med"], [1])
    assert not step["law"].updated and "removed or replaced" in step["law"].stopped
    assert house.pool.lookup("law") == slot and same(slot_of(house, "law"), written)
    assert house.pool.adapter_enabled[slot]
    assert step["med"].updated
    house.assert_as_alone(["med"], range(2))


def test_a_folder_has_the_factors_of_one_version(tmp_path, monkeypatch):
    """Although another thread updates the adapter while they are copied."""
    house = House(FLOAT32, "law")
    house.tenants.save("law", tmp_path)
    house.steps(["law"], range(1))
    trained, own = house.factors("law"), factors.Factor.own
    writer = threading.Thread(target=lambda: house.pool.update("law", tmp_path))

    def while_it_is_updated(*args):
        if writer.ident is None:
            writer.start()
            writer.join(0.3)
        return own(*args)

    monkeypatch.setattr(factors.Factor, "own", while_it_is_updated)
    copied = house.factors("law")
    writer.join()
    assert same(copied, trained) and house.pool.version("law") == 3


def slot_of(house, name):
    slot = house.pool.lookup(name)
    return [t[slot].detach() for layer in LAYERS for t in house.pool.layer(layer.name).values()]


def test_a_batch_finishes_with_the_version_that_it_holds(place):
    """A step writes the next one to another slot, where the tenant trains on."""
    house = House(place, "law", "code", max_loras=3)
    with house.pool.hold(["law"]) as held:
        old = house.pool.lookup("law", held=held)
        before = [t.clone() for t in slot_of(house, "law")]
        (first,) = house.steps(["law", "code"], [0])
        new = house.pool.lookup("law")
        assert first["law"].updated and new != old
        assert [held.version("law"), house.pool.version("law")] == [1, 2]
        assert same([t[old] for t in tensors(house)], before)
    rest = house.steps(["law", "code"], range(1, 4))
    assert house.pool.lookup("law") == new, "no batch holds it: in its place"
    for name in ("law", "code"):
        wanted, steps = alone(place, name, range(4))
        assert same(house.factors(name), wanted)
        assert [step[name] for step in (first, *rest)] == steps


def tensors(house):
    return [t.detach() for layer in LAYERS for t in house.pool.layer(layer.name).values()]


@pytest.mark.parametrize(
    ("names", "max_loras", "held"),
    [
        pytest.param(["law"], 1, ["law"], id="none"),
        pytest.param(["law", "med"], 3, ["law", "med"], id="one-for-two"),
        pytest.param(["law", "med"], 2, ["law"], id="another-tenant's"),
    ],
)
def test_a_step_without_a_slot_for_the_next_version_changes_nothing(names, max_loras, held):
    """No loss is computed, and no tenant of the step is evicted, pinned or not."""
    house = House(FLOAT32, *names, max_loras=max_loras)
    for name in set(names) - set(held):
        house.pool.pin(name, False)
    losses, computed = house.losses(names, 0), []
    functions = {n: lambda n=n: computed.append(n) or losses[n] for n in names}
    with (
        house.pool.hold(held),
        pytest.raises(RuntimeError, match=f"no slot for the new version of adapter '{held[-1]}'"),
    ):
        house.tenants.step(functions)
    assert not computed
    assert all(step.updated for step in house.tenants.step(functions).values())
    house.assert_as_alone(names, range(1))


# ---- interrupts ----

MODULES = (factors, rows, steps, tenant, tenants, trained, updates, host, held_module, pool_module)
FILES = {m.__file__ for m in (*MODULES, linears, slots, stacks, turns, versions)}
EVERY = extent(nightly=7, ci=311)  # of some 7,000 instructions


class Small:
    """Two tenants of a linear layer; one has accumulated a batch, and both are due in `step`."""

    def __init__(self, dtype):
        layers = [moelora.LinearLayer("q_proj", 8, 8)]
        experts = [moelora.MoELayer("experts", 2, 8, 8)]
        self.pool = moelora.AdapterPool(
            experts, 3, 8, dtype=dtype, w13_slices=1, linears=layers, host=4
        )
        self.tenants = Tenants(self.pool)
        for seed, name in enumerate(("law", "code", "med")):
            generator = torch.Generator().manual_seed(seed)
            self.tenants.add(name, rank=4, lr=0.1, generator=generator, targets=["q_proj"])
        self.tenants["code"].accumulation = 2
        self.tenants["med"].accumulation = 3
        self.tenants.step(self.losses(0))

    def losses(self, number):
        """Of a batch that the tenants' factors of the linear layer meet, without a model."""
        losses = {}
        for name in self.tenants.names():
            slot = self.pool.lookup(name)
            own = [self.pool.linear("q_proj")[key][slot] for key in ("lora_a", "lora_b")]
            losses[name] = sum((x.float() * draw(number, *x.shape)).sum() for x in own)
        return losses

    def state(self):
        """Counts, factors and gradients of each tenant, and what their slots have."""
        found = []
        for name in self.tenants.names():
            one, slot = self.tenants[name], self.pool.lookup(name)
            served = [self.pool.linear("q_proj")[key][slot] for key in ("lora_a", "lora_b")]
            found += [torch.tensor([one.updates, one.pending]), *served]
            found += [*one.current.values, *(g for g in one.gradients() if g is not None)]
        return [t.detach().clone() for t in found]


@pytest.mark.parametrize("again", [None, 1, 9, 40], ids=["once", "at-once", "soon", "later"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_an_interrupted_step_is_whole_or_not_at_all(dtype, again, tmp_path):
    """Ctrl-C at any instruction, and another one while the first is dealt with: for all tenants."""
    small = Small(dtype)
    before = small.state()
    assert [small.tenants[n].pending for n in small.tenants.names()] == [0, 1, 1]
    small.tenants.step(small.losses(1))
    after, seen = small.state(), set()
    for number in range(1 + (again or 0), 10**6, EVERY):
        small = Small(dtype)
        losses = small.losses(1)
        came = interrupted(lambda: small.tenants.step(losses), FILES, number, again)  # noqa: B023
        state = small.state()
        seen.add(same(state, after))
        assert same(state, before) or same(state, after), number
        assert_usable(small, tmp_path)
        if not came:
            break
    assert number > 15 * EVERY and seen == {True, False}


def assert_usable(small, folder):
    """No call is refused, or waits, for the one that was interrupted."""
    updates = small.tenants["law"].updates
    assert all(step.stopped is None for step in small.tenants.step(small.losses(2)).values())
    assert small.tenants["law"].updates == updates + 1
    small.tenants.save("law", folder)
    small.tenants.remove("law")
    small.tenants.add("law", folder, resume=True)
    small.tenants.close()
    Tenants(small.pool).close()


def test_what_was_trained_is_not_as_it_was_added_after_an_interrupted_removal():
    """Host memory has the factors of then, which an eviction would have renewed."""
    number, came = 1, True
    while came:
        small = Small(torch.float32)
        adapter = small.tenants["law"].adapter()
        small.tenants.close()
        slot = small.pool.lookup("law")
        trained = [t[slot].detach().clone() for t in small.pool._tensors()]
        came = interrupted(lambda: small.pool.remove("law"), FILES, number)  # noqa: B023
        if "law" in small.pool.registered():
            slot = small.pool.lookup("law")
            assert same([t[slot].detach() for t in small.pool._tensors()], trained), number
        if "law" in {*small.pool.registered(), *small.pool.names()}:
            small.pool.remove("law")
        small.pool.add("law", adapter)
        number += 13
    assert number > 100
