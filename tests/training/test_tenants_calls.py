"""What else is called beside a step of tenants: other backwards, other threads, the loss itself."""

import threading

import pytest
import torch
from tenant_house import FLOAT32, PLACES, House, alone, calls_in_backward, same


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("accumulating", [False, True])
def test_gradients_of_other_backwards_are_dropped(place, accumulating):
    """Also those of rows whose loss is not in the step."""
    house = House(place, "law")
    if accumulating:
        house.add("code")
        house.steps(["code"], range(1))
        assert house.tenants["code"].pending == 1
    sum(house.losses(["law"], 7).values()).backward()
    steps = house.steps(["law"], range(2))
    factors, wanted = alone(place, "law", range(2))
    assert [step["law"] for step in steps] == wanted
    assert same(house.factors("law"), factors)
    if accumulating:
        step = house.steps(["code"], [1])[0]
        assert step["code"] == alone(place, "code", range(2))[1][1]


def test_losses_of_stopped_tenants_are_not_looked_at():
    house = House(FLOAT32, "law", "med")
    house.tenants.step({"med": house.losses(["med"], 0)["med"] * float("nan")})
    for loss in (None, torch.ones(()), torch.ones(2)):
        step = house.tenants.step({"med": loss} | house.losses(["law"], 0))
        assert step["law"].updated and "med" not in step


def test_losses_are_checked_before_anything():
    house = House(FLOAT32, "law")
    before, loss = house.factors("law"), torch.ones((), requires_grad=True)
    for losses, error, why in (
        ([loss], ValueError, "losses is a list, wanted a mapping of tenants"),
        ({"med": loss}, KeyError, r"no tenant 'med'; there are \['law'\]"),
        ({"law": loss.expand(2)}, ValueError, r"loss of 'law' is \(2,\), wanted a tensor of one"),
        ({"law": loss.detach()}, ValueError, "requires no gradient: do its rows have its adapter"),
        ({"law": loss.to(torch.complex64)}, ValueError, "is complex64, wanted a real"),
        ({"law": 1.0}, ValueError, "loss of 'law' is float, wanted a tensor of one"),
    ):
        with pytest.raises(error, match=why):
            house.tenants.step(losses)
    assert same(house.factors("law"), before) and house.tenants["law"].stopped is None


@pytest.mark.parametrize("method", ["step", "add", "remove", "save", "close"])
def test_calls_within_a_step_are_refused(method, tmp_path):
    """A loss that makes one stops its tenant alone."""
    house = House(FLOAT32, "law", "med")
    call = {
        "step": lambda: house.tenants.step({}),
        "add": lambda: house.add("code"),
        "remove": lambda: house.tenants.remove("law"),
        "save": lambda: house.tenants.save("law", tmp_path / "law"),
        "close": house.tenants.close,
    }[method]
    step = house.tenants.step(house.losses(["law"], 0) | {"med": call})
    assert step["law"].updated
    assert step["med"].stopped.startswith(f"its loss raised RuntimeError: {method} is called by")
    house.assert_as_alone(["law"], range(1))
    assert house.tenants.names() == ["law", "med"]
    call()


def test_threads_wait_for_a_step(tmp_path):
    """What another thread saves during a step is what the step has left."""
    house = House(FLOAT32, "law")
    losses = house.losses(["law"], 0)
    saving = threading.Thread(target=lambda: house.tenants.save("law", tmp_path / "law"))

    def save():
        saving.start()
        saving.join(0.05)
        assert saving.is_alive()

    house.tenants.step({"law": calls_in_backward(losses["law"], save)})
    saving.join()
    other = House(FLOAT32)
    assert other.add("law", tmp_path / "law", resume=True).updates == 1
    assert same(other.factors("law"), house.factors("law"))
