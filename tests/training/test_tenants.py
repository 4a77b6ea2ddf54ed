"""Tenants train in one step as they do alone; what goes wrong for one stops that one."""

import pytest
import torch
from tenant_house import FLOAT32, LAYERS, PLACES, House, R, alone, same

import moelora
from moelora.training import Tenants


@pytest.fixture(params=PLACES)
def place(request):
    return request.param


def test_a_trajectory_is_the_one_alone(place):
    """Whatever tenants share its steps: others join, leave and are replaced in their slot."""
    house = House(place)
    start = {}
    for name in ("law", "code"):
        house.add(name)
        start[name] = house.factors(name)
    steps = house.steps(["law", "code"], range(3))
    house.add("med")
    steps += house.steps(["med", "code", "law"], range(3, 5))
    house.tenants.remove("code")
    steps += house.steps(["law", "med"], range(5, 6))
    house.add("code", rank=2)
    steps += house.steps(["code", "law", "med"], range(6, 7))
    for name, numbers in (("law", range(7)), ("med", range(3, 7))):
        factors, wanted = alone(place, name, numbers)
        assert same(house.factors(name), factors), name
        assert [step[name] for step in steps if name in step] == wanted
    assert not same(house.factors("law"), start["law"])
    assert house.losses(["law"], 0)["law"] < 0.99 * steps[0]["law"].loss


def test_accumulation_is_one_update(place):
    """Of the mean of the batches' losses, each tenant after its own number of them."""
    house = House(place, "law")
    tenant = house.add("code", max_norm=None)
    first, second = house.steps(["law", "code"], range(2))
    assert first["law"].updated and second["law"].updated
    assert not first["code"].updated and second["code"].updated and second["code"].norm > 0
    assert (tenant.updates, tenant.pending, house.tenants["law"].updates) == (1, 0, 2)
    if place[2] != torch.float32:
        return
    once = House(place)
    once.add("code", accumulation=1, max_norm=None)
    losses = [once.losses(["code"], n)["code"] for n in range(2)]
    once.tenants.step({"code": torch.stack(losses).mean()})
    for found, wanted in zip(house.factors("code"), once.factors("code"), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


def test_clipping(place):
    house = House(place)
    seen = {}
    for name, limit in (("law", 1e-3), ("med", None)):
        make = lambda parameters: torch.optim.SGD(parameters, lr=1.0)  # noqa: E731
        house.add(name, optimizer=make, weight_decay=0.0, max_norm=limit)
        seen[name] = house.factors(name)
    (step,) = house.steps(["law", "med"], range(1))
    for name, limit in (("law", 1e-3), ("med", step["med"].norm)):
        moved = [a - b for a, b in zip(house.factors(name), seen[name], strict=True)]
        norm = torch.cat([m.flatten() for m in moved]).norm().item()
        assert norm == pytest.approx(limit, rel=1e-2)
    assert step["law"].norm > 1e-3


BAD = {
    "nan": lambda loss: loss * float("nan"),
    "infinite": lambda loss: loss / 0.0,
    "gradient": lambda loss: (loss * 0).sqrt(),  # 0, with an infinite gradient
    "exception": lambda loss: 1 / 0,
}


@pytest.mark.parametrize("bad", BAD)
def test_what_goes_wrong_stops_one_tenant(place, bad, tmp_path):
    house = House(place, "law", "code", "med")
    house.steps(["law", "code", "med"], range(2))
    before = house.factors("med")
    losses = house.losses(["law", "code", "med"], 2)
    step = house.tenants.step(losses | {"med": lambda: BAD[bad](losses["med"])})
    assert step["med"].stopped and not step["med"].updated
    assert step["law"].stopped is None and step["law"].updated
    assert house.tenants["med"].stopped == step["med"].stopped
    assert isinstance(house.tenants["med"].error, ZeroDivisionError) == (bad == "exception")
    assert house.tenants.running() == ["law", "code"]
    assert "med" not in house.steps(["law", "code", "med"], range(3, 4))[0]
    house.assert_as_alone(("law", "code"), range(4))
    assert same(house.factors("med"), before)
    house.tenants.save("med", tmp_path)
    house.tenants.remove("med")
    house.add("med", tmp_path, resume=True)
    assert house.steps(["law", "med"], range(4, 5))[0]["med"].updated


def test_what_is_trained_is_served(place):
    """The slots are the same memory; adapters beside them, that only serve, are as they were."""
    house = House(place, "law")
    house.pool.add("served", house.tenants["law"].adapter())
    before = [t.clone() for t in house.pool._tensors()]
    house.steps(["law"], range(2))
    slot, other = house.pool.lookup("law"), house.pool.lookup("served")
    for layer in LAYERS:
        stack = house.pool.layer(layer.name)["w2_lora_b"]
        assert stack[slot].any() and not stack[other].any()
    assert any(not torch.equal(a, b) for a, b in zip(before, house.pool._tensors(), strict=True))
    house.tenants.close()
    assert not house.losses(["law"], 0)["law"].requires_grad
    assert "law" in house.pool


# ---- refusals ----


def test_pools_that_do_not_train():
    two, outer = ({"w13_slices": 2}, {"w13_slices": 1, "shared_outer": True})
    for pool, why in (
        *((wrong, "pool is a .*, wanted an AdapterPool") for wrong in (None, {}, "law")),
        (moelora.AdapterPool(LAYERS, 2, R, **two), "two slices of w13 of layers.0.*, wanted one"),
        (moelora.AdapterPool(LAYERS, 2, R, **outer), "shared_outer=True"),
    ):
        with pytest.raises(ValueError, match=why):
            Tenants(pool)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"accumulation": 0}, "accumulation is 0, wanted an integer >= 1"),
        ({"accumulation": 1.5}, "accumulation is 1.5, wanted an integer >= 1"),
        ({"max_norm": 0.0}, "max_norm is 0.0, wanted a finite number > 0"),
        ({"max_norm": "1"}, "max_norm is '1', wanted a finite number > 0"),
        ({"max_norm": 10**400}, "max_norm is 10*, wanted a finite number > 0"),
        ({"lr": -1.0}, "lr is -1.0, wanted a finite number >= 0"),
        ({"lr": float("nan")}, "lr is nan, wanted a finite number >= 0"),
        ({"lr": 0, "sparse": True}, "lr is 0, wanted a finite number > 0"),
        ({"weight_decay": float("inf")}, "weight_decay is inf, wanted a finite number >= 0"),
        ({"alpha": 0}, "alpha is 0, wanted a finite number > 0"),
        ({"alpha": 1e300}, "alpha is 1e.300, wanted a finite number > 0"),
        ({"rank": 4.0}, "rank is 4.0, wanted an integer >= 1"),
        ({"rank": 9}, "rank is 9, wanted 1 to 8, the pool's for layers.0.experts"),
        ({"targets": ["q_proj"]}, "targets names 'q_proj', which no layer"),
        ({"targets": "experts"}, "targets is 'experts', wanted a list"),
        ({"targets": []}, r"targets is \[\], wanted a list"),
        ({"optimizer": "adam"}, "optimizer is 'adam', wanted a function"),
        ({"sparse": True, "weight_decay": 0.1}, "sparse=True takes neither"),
        ({"sparse": "no"}, "sparse is 'no', wanted True or False"),
        ({"resume": True}, "resume=True needs the folder"),
    ],
)
def test_arguments_of_add(options, why):
    house = House(FLOAT32, "law", max_loras=2)
    house.pool.add("served", house.tenants["law"].adapter())
    before = [t.clone() for t in house.pool._tensors()]
    with pytest.raises(ValueError, match=why):
        house.add("med", **options)
    assert house.tenants.names() == ["law"] and house.pool.names() == ["law", "served"]
    assert same(house.pool._tensors(), before)


def test_settings_that_change():
    """As for `add`; another value would climb, divide by zero, or stop the tenant for it."""
    tenant = House(FLOAT32).add("code")
    for name, value, why in (
        ("accumulation", 0, "accumulation is 0, wanted an integer >= 1"),
        ("accumulation", None, "accumulation is None, wanted an integer >= 1"),
        ("accumulation", 2**60, r"accumulation is \d+, wanted at most 9007199254740992 batches"),
        ("max_norm", -1.0, "max_norm is -1.0, wanted a finite number > 0"),
        ("max_norm", float("nan"), "max_norm is nan, wanted a finite number > 0"),
    ):
        with pytest.raises(ValueError, match=why):
            setattr(tenant, name, value)
    assert (tenant.accumulation, tenant.max_norm) == (2, 1e-3)
    tenant.accumulation, tenant.max_norm = 3, None
    assert (tenant.accumulation, tenant.max_norm) == (3, None)


def test_names_and_room():
    house = House(FLOAT32, "law", "code", max_loras=2)
    with pytest.raises(ValueError, match="'law' is already loaded"):
        house.add("law")
    with pytest.raises(RuntimeError, match="no slot for adapter 'med': all 2 are pinned"):
        house.add("med")


def test_an_optimizer_of_other_parameters():
    house = House(FLOAT32)
    others = house.add("law").parameters()
    for made in (lambda p: torch.optim.SGD(others), lambda p: torch.optim.SGD([*p, others[0]])):
        with pytest.raises(ValueError, match="parameters that are not this tenant's"):
            house.add("med", optimizer=made)
    assert house.tenants.names() == house.pool.names() == ["law"]
    house.add("med", optimizer=lambda p: torch.optim.SGD(p[1::2], lr=0.1))  # B alone
    before = house.factors("med")
    house.steps(["med"], range(1))
    assert [torch.equal(*pair) for pair in zip(before, house.factors("med"), strict=True)] == (
        [True, False] * 4
    )


def test_an_optimizer_that_raises():
    class Broken(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            raise OSError("disk full")

    house = House(FLOAT32, "law")
    house.add("med", optimizer=lambda p: Broken(p, lr=1.0))
    before = house.factors("med")
    (step,) = house.steps(["law", "med"], range(1))
    assert step["med"].stopped == "its optimizer raised OSError: disk full"
    assert same(house.factors("med"), before) and step["law"].updated


@pytest.mark.parametrize("distance", [float("inf"), 1e5])
def test_an_update_that_overflows(place, distance):
    """The slot keeps what it served, and so do others. Float16 ends at 65504."""

    class Leap(torch.optim.SGD):
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                parameter.detach().add_(distance)

    if distance == 1e5:
        place = (place[0], torch.float16, torch.float16, place[3])
    house = House(place, "law")
    house.add("med", optimizer=lambda p: Leap(p, lr=1.0))
    before, served = house.factors("med"), [s[1].clone() for s in house.tenants._stacks]
    step = house.steps(["law", "med"], range(1))[0]
    assert step["med"].stopped == "its update is not finite in the dtype of the pool"
    assert not step["med"].updated and house.tenants["med"].updates == 0
    assert same(house.factors("med"), before)
    assert same([s[1] for s in house.tenants._stacks], served)
    house.assert_as_alone(["law"], range(1))


def test_a_step_under_no_grad(place):
    house = House(place, "law", "med")
    losses = house.losses(["law", "med"], 0)
    with torch.no_grad():
        steps = house.tenants.step(losses | {"med": lambda: losses["med"]})
    assert steps["law"].updated and steps["med"].updated
    house.assert_as_alone(["law"], range(1))


def test_a_pool_has_one_tenants():
    house = House(FLOAT32)
    tenant = house.add("code")
    house.steps(["code"], range(1))
    with pytest.raises(ValueError, match="has other Tenants already"):
        Tenants(house.pool)
    assert tenant.pending == 1 and tenant.gradients()[0] is not None
    house.tenants.close()
    with pytest.raises(RuntimeError, match="'law' cannot be added: these Tenants are closed"):
        house.add("law")
    second = Tenants(house.pool)
    house.tenants.close()  # once more, which is nothing to the second
    second.add("law")
    assert house.losses(["law"], 0)["law"].requires_grad
