"""An `Adapter` made in memory is checked against the pool before anything leaves its slot."""

import dataclasses
import math

import pytest
import torch
from checks import freed
from linear_cases import EXPERTS, LINEARS, E, I, K, Q

from moelora.adapters import Adapter, AdapterPool, LinearLayer, LinearPair, MoELayer, Pair

NAME, RANK = EXPERTS[0].name, 4
DOWN = Pair(torch.randn(E, RANK, I), torch.randn(E, K, RANK), [2.0])
LINEAR = LinearPair(torch.randn(RANK, K), torch.randn(10, RANK), 2.0)


CLOSED = MoELayer("other.experts", E, K, I), LinearLayer("other", K, 10)


def make_pool():
    options = {"linears": LINEARS, "max_linear_rank": 8}
    options["others"] = dict.fromkeys(CLOSED, "which is closed")
    return AdapterPool(EXPERTS, 1, 8, dtype=torch.float32, **options)


def down(**parts):
    return Adapter({NAME: {"down": dataclasses.replace(DOWN, **parts)}}, {})


def linear(**parts):
    return Adapter({}, {Q: dataclasses.replace(LINEAR, **parts)})


REFUSED = {
    "A for one column": (down(a=torch.ones(E, RANK, 1)), "lora_A of .*down: shape is"),
    "B for one row": (down(b=torch.ones(E, 1, RANK)), "lora_B of .*down: shape is"),
    "other experts": (down(a=torch.ones(E - 1, RANK, I)), "lora_A of .*down: shape is"),
    "two dimensions": (down(a=torch.ones(RANK, I)), "lora_A of .*down: shape is"),
    "two ranks": (down(b=torch.ones(E, K, RANK - 1)), "lora_B of .*down: shape is"),
    "too large a rank": (
        down(a=torch.ones(E, 9, I), b=torch.ones(E, K, 9)),
        "down has rank 9, but max_rank of the pool is 8",
    ),
    "integers": (down(a=torch.ones(E, RANK, I, dtype=torch.int32)), "dtype is torch.int32"),
    "scalings": (down(scalings=[1.0] * (E + 1)), f"there are {E + 1} scalings"),
    "closed experts": (Adapter({CLOSED[0].name: {"down": DOWN}}, {}), "of other.*, which is clos"),
    "closed linear layer": (Adapter({}, {CLOSED[1].name: LINEAR}), "of other, which is closed"),
    "unknown experts": (Adapter({"x": {"down": DOWN}}, {}), "factors of x, which is none of"),
    "unknown projection": (Adapter({NAME: {"side": DOWN}}, {}), "has no side"),
    "gate twice": (Adapter({NAME: {"gate": DOWN, "gate_up": DOWN}}, {}), "beside gate or up"),
    "A of a linear layer": (linear(a=torch.ones(RANK, 1)), f"lora_A of {Q}: shape is"),
    "B of a linear layer": (linear(b=torch.ones(1, RANK)), f"lora_B of {Q}: shape is"),
    "rank of a linear layer": (
        linear(a=torch.ones(12, K), b=torch.ones(10, 12)),
        f"{Q} has rank 12, but max_linear_rank of the pool is 8",
    ),
    "freed factors": (down(a=freed(DOWN.a)), "lora_A of .*down has elements up to byte"),
    "freed factors of a linear layer": (linear(b=freed(LINEAR.b)), f"lora_B of {Q} has elements"),
    "factors on meta": (down(b=DOWN.b.to("meta")), "lora_B of .*down is a sparse, nested or meta"),
    "no tensor": (down(a=[1.0]), "lora_A of .*down is a list, wanted a tensor"),
    "no pair": (Adapter({NAME: {"down": DOWN.a}}, {}), "down is a Tensor, wanted a Pair"),
    "no pair of a linear layer": (Adapter({}, {Q: DOWN}), f"{Q} is a Pair, wanted a LinearPair"),
    "no projections": (Adapter({NAME: DOWN}, {}), "experts.* is a Pair, wanted a mapping"),
    "no linears": (Adapter({NAME: {"down": DOWN}}, None), "linears .* is a NoneType, wanted a map"),
    "scaling NaN": (down(scalings=[math.nan]), "a scaling of .*down is nan, wanted a finite"),
    "scaling of text": (down(scalings=["2"]), "a scaling of .*down is '2', wanted a finite"),
    "scalings without list": (down(scalings=2.0), "scalings of .*down are 2.0, wanted a list"),
    "scaling of a linear layer": (linear(scaling=math.inf), f"a scaling of {Q} is inf, wanted"),
    "unknown linear layer": (Adapter({}, {"x": LINEAR}), "factors of x, which is none of"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_and_nothing_is_lost(case):
    adapter, why = REFUSED[case]
    pool = make_pool()
    pool.add("a", Adapter({NAME: {"down": DOWN}}, {Q: LINEAR}))
    before = [t.clone() for t in pool._tensors()]
    for act in (
        lambda: pool.add("b", adapter),
        lambda: pool.add("a", adapter, replace=True),
        lambda: pool.update("a", adapter),
    ):
        with pytest.raises(ValueError, match=f"adapter '[ab]': .*{why}"):
            act()
    assert pool.names() == ["a"] and pool.version("a") == 1
    assert all(torch.equal(old, new) for old, new in zip(before, pool._tensors(), strict=True))
