"""A step of tenants that does not end leaves them as they were; it stops the one that failed."""

import gc
import traceback

import pytest
import torch
from tenant_house import FLOAT32, PLACES, House, alone, calls_in_backward, same

import moelora
from moelora.training import Tenant, Tenants
from moelora.training.tenants.factors import Factor


def once(function, call, error):
    """`function`, whose call of that number raises."""
    calls = iter(range(10**6))

    def raising(*args, **options):
        if next(calls) == call:
            raise error
        return function(*args, **options)

    return raising


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("where", ["gradients", "optimizer", "publish", "finish"])
def test_an_interrupted_step_can_be_repeated(place, where, monkeypatch):
    house = House(place, "med", "code")
    house.steps(["med", "code"], range(1))
    assert house.tenants["code"].pending == 1
    before = [t.clone() for t in house.pool._tensors()]
    optimizer = house.tenants["code"].optimizer
    of, name, call = {
        "gradients": (Factor, "gradient", 3),
        "optimizer": (optimizer, "step", 0),
        "publish": (Factor, "publish", 2),
        "finish": (Tenant, "settle", 1),
    }[where]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(of, name, once(getattr(of, name), call, KeyboardInterrupt()))
        house.steps(["med", "code"], [1])
    if where in ("publish", "finish"):  # the update is current: its slots are written anyway
        house.assert_as_alone(("med", "code"), range(2))
        assert [house.tenants[n].updates for n in ("med", "code")] == [2, 1]
        assert house.tenants["code"].pending == 0 and house.tenants._stacks[0].grad is None
        return
    assert same(house.pool._tensors(), before)
    assert [house.tenants[n].updates for n in ("med", "code")] == [1, 0]
    assert house.tenants["code"].pending == 1
    assert all(p.grad is None for n in ("med", "code") for p in house.tenants[n].parameters())
    (step,) = house.steps(["med", "code"], [1])
    for name in ("med", "code"):
        factors, steps = alone(place, name, range(2))
        assert step[name] == steps[1]  # norms of one batch, not of two
        # A dense optimizer of "med" had made its step already, and may have moments of two.
        if house.sparse or where == "gradients" or (name, where) == ("code", "optimizer"):
            assert same(house.factors(name), factors)


def raising(loss):
    def raises():
        raise ValueError("of med")

    return calls_in_backward(loss, raises)


def hooked(loss):
    loss = loss * 2
    loss.register_hook(lambda _: 1 / 0)
    return loss + 1


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("order", [("law", "med", "code"), ("med", "code", "law")])
@pytest.mark.parametrize("bad", [lambda loss: raising(loss * 2) + 1, hooked])
def test_a_backward_that_raises_stops_its_tenant(place, bad, order):
    """Others lose nothing: they repeat the batch without it."""
    house = House(place)
    for name in order:
        house.add(name)
    house.steps(order, range(1))
    losses = house.losses(order, 1)
    with pytest.raises(RuntimeError, match="of the loss of 'med' raised .*repeat it without"):
        house.tenants.step(losses | {"med": bad(losses["med"])})
    assert house.tenants.running() == [name for name in order if name != "med"]
    assert "the backward of its loss raised" in house.tenants["med"].stopped
    assert not house.pool.adapter_enabled[house.pool.lookup("med")]
    house.steps(order, range(1, 4))
    house.assert_as_alone(("law", "code"), range(4))


@pytest.mark.parametrize("names", [["code"], ["code", "med"]], ids=["one", "two"])
def test_a_shared_backward_that_raises_stops_nobody(names):
    house = House(FLOAT32)
    for name in names:
        house.add(name)
    house.steps(names, range(1))
    losses = house.losses(names, 1)
    house.add("law")  # writes to the stacks that the graph has saved
    with pytest.raises(RuntimeError, match="losses of .* raised .*modified by an inplace operatio"):
        house.tenants.step(losses)
    assert house.tenants.running() == [*names, "law"]
    assert house.tenants["code"].pending == 1
    house.steps(names, range(1, 4))
    house.assert_as_alone(names, range(4))


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("place", PLACES)
def test_a_backward_that_ends_halfway(place, error, monkeypatch):
    """The gradients of the last layer alone have been added to those of the batch before."""
    house = House(place, "law", "code")
    house.steps(["law", "code"], range(1))
    layer = moelora.fused_experts_lora

    def hooked(*args, **options):
        out = layer(*args, **options)
        out.register_hook(once(lambda grad: None, 0, error()))
        monkeypatch.undo()  # the first layer alone
        return out

    monkeypatch.setattr(moelora, "fused_experts_lora", hooked)
    losses = house.losses(["law", "code"], 1)
    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else RuntimeError):
        house.tenants.step(losses)
    assert house.tenants.running() == ["law", "code"]
    house.steps(["law", "code"], range(1, 4))
    house.assert_as_alone(("law", "code"), range(4))


def test_who_is_stopped_before_a_backward_that_raises_is_disabled():
    house = House(FLOAT32, "code", "med")
    losses = house.losses(["code", "med"], 0)
    house.add("law")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        house.tenants.step(losses | {"med": lambda: 1 / 0})
    assert house.tenants["med"].stopped and not house.tenants["code"].stopped
    assert not house.pool.adapter_enabled[house.pool.lookup("med")]


def test_watching_a_backward_keeps_no_graph():
    house = House(FLOAT32, "law", "med")
    losses = house.losses(["law", "med"], 0)
    loss = losses["med"] * 1
    gone = []
    loss.grad_fn.metadata["gone"] = Marked(gone)
    house.tenants.step(losses | {"med": loss})
    del losses, loss
    assert gone == [True]


def failing(house, losses, where):
    """Losses of which that of "med" raises."""
    if where == "optimizer":
        house.tenants["med"].optimizer.step = lambda: 1 / 0
    if where == "backward":
        return losses | {"med": raising(losses["med"])}

    def loss():
        held = losses["med"] * 2
        try:
            return held.no_such_attribute
        except AttributeError as error:
            raise ValueError("of med") from error

    return losses | ({"med": loss} if where == "loss" else {})


@pytest.mark.parametrize("where", ["loss", "backward", "optimizer"])
def test_an_error_that_is_kept_keeps_no_graph(where):
    """A batch's activations would stay until the tenant is removed."""
    house = House(FLOAT32, "law", "med")
    losses = failing(house, house.losses(["law", "med"], 0), where)
    gone = []
    losses["law"].grad_fn.metadata["gone"] = Marked(gone)
    try:
        house.tenants.step(losses)
    except RuntimeError:
        assert where == "backward"
    del losses
    if where == "backward":  # torch itself keeps the rest of one until the next
        house.tenants.step(house.losses(["law"], 1))
    gc.collect()
    assert gone == [True]
    error = house.tenants["med"].error
    assert isinstance(error, ZeroDivisionError if where == "optimizer" else ValueError)
    assert error.__traceback__ is None
    text = "\n".join(traceback.format_exception(error))
    assert f'File "{__file__}", line' in text
    assert ("AttributeError" in text) == (where == "loss")  # its cause


class Marked:
    def __init__(self, gone):
        self.gone = gone

    def __del__(self):
        self.gone.append(True)


def test_a_step_under_inference_mode_is_refused():
    house = House(FLOAT32, "law")
    loss = house.losses(["law"], 0)["law"]
    with torch.inference_mode(), pytest.raises(RuntimeError, match="step is called under torch"):
        house.tenants.step({"law": loss})
    assert house.tenants.step({"law": loss})["law"].updated


def test_settings_are_resumed(tmp_path):
    house = House(FLOAT32, "code")
    house.tenants.save("code", tmp_path)
    for changes, wanted in (
        ({}, (2, 1e-3)),
        ({"accumulation": 1}, (1, 1e-3)),
        ({"max_norm": 0.5}, (2, 0.5)),
    ):
        tenant = House(FLOAT32).tenants.add("code", tmp_path, resume=True, **changes)
        assert (tenant.accumulation, tenant.max_norm) == wanted


def test_tenants_that_are_collected_are_closed():
    house = House(FLOAT32, "law")
    stack = house.tenants._stacks[0]
    assert stack.requires_grad
    del house.tenants
    gc.collect()
    assert not stack.requires_grad
    Tenants(house.pool)
