"""The numbers of an activation: alpha and the limit of gate and up, at every size of a layer."""

import re
from dataclasses import replace

import pytest
import torch
from c_programs import ROOT
from cases import ALPHAS, LIMITS, OAI, Problem, Spec, same_bits
from checks import assert_close_to_ref
from holding import hold_layer

import moelora
from moelora.reference import fused_experts_lora_ref, naive_fused_experts_lora

CLAMPED = tuple(activation for activation in LIMITS if activation != "situ")
# A few tokens, which a GPU takes in one launch, tiles with remainders, and many blocks.
SIZES = {
    "few": Spec(tokens=3, hidden=72, inter=40, bias=True),
    "tiles": Spec(tokens=40, hidden=192, inter=136, ranks=(8, 17)),
    "many": Spec(tokens=150, top_k=3, hidden=128, inter=64, slices=1),
}


def test_names_are_those_of_the_core():
    header = (ROOT / "csrc/core/activation.h").read_text()
    assert list(moelora.operators.experts.ACTIVATIONS) == re.findall(
        r'^ *ROW\(\w+, "(\w+)"', header, re.M
    )


def scaled(p: Problem) -> Problem:
    """With outputs of up to about 1/2: a small limit makes a small silu(g) * u."""
    p = replace(p, w2_bias=None)
    factor = 0.5 / fused_experts_lora_ref(**p.kwargs()).abs().max()
    w2, b2 = (None if t is None else (t.double() * factor).to(t.dtype) for t in (p.w2, p.w2_lora_b))
    return replace(p, w2=w2, w2_lora_b=b2)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("limit", [2.0**-4, 0.25, 1.5, 1e30])
@pytest.mark.parametrize(
    ("activation", "alpha"),
    [(a, None) for a in LIMITS] + [(a, n) for a in ALPHAS for n in (2.0**-4, 3.0)],
)
def test_numbers(activation, alpha, limit, size, device, dtype):
    spec = replace(SIZES[size], activation=activation, alpha=alpha, limit=limit, dtype=dtype)
    p = scaled(spec.build())
    y = hold_layer(p, device)
    if limit == 0.25:  # it clamps or caps
        assert not torch.allclose(y, other_numbers(p.to(device), activation_limit=1e30), rtol=0.1)


def other_numbers(p: Problem, **numbers) -> torch.Tensor:
    return moelora.fused_experts_lora(**{**p.kwargs(), **numbers})


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("number", [1.1754943508222875e-38, 3.4028234663852886e38])
@pytest.mark.parametrize(
    ("activation", "name"), [(a, "limit") for a in LIMITS] + [(a, "alpha") for a in ALPHAS]
)
def test_the_smallest_and_the_largest_number(activation, name, number, size, device, dtype):
    spec = replace(SIZES[size], activation=activation, dtype=dtype, bias=False)
    p = replace(spec, **{name: number}).build()
    p.hidden_states[0] = 0  # no product of it with infinity
    hold_layer(p, device)


ABSENT = {
    **dict.fromkeys(OAI, ({"activation_alpha": 1.702, "activation_limit": 7}, "alpha", 1.5)),
    "situ": ({"activation_alpha": 1}, "limit", 25),
    "swiglustep": ({"activation_limit": 7}, "limit", 6.5),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("activation", ABSENT)
def test_absent_numbers_are_those_of_their_sources(activation, size, device, dtype):
    """GPT-OSS has alpha 1.702 and limit 7; SituAndMul has beta 1 and leaves up alone;
    SwigluStepAndMul has limit 7."""
    p = replace(SIZES[size], activation=activation, dtype=dtype).build()
    p = replace(p, hidden_states=p.hidden_states * 8).to(device)  # past the limit
    plain, (numbers, name, other) = other_numbers(p), ABSENT[activation]
    assert same_bits(other_numbers(p, **numbers), plain)
    assert not same_bits(other_numbers(p, **{f"activation_{name}": other}), plain)
    if activation in OAI:
        assert not same_bits(other_numbers(p, activation_limit=6.5), plain)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("activation", CLAMPED)
def test_infinity_is_clamped_and_nan_is_not(activation, size, device, dtype):
    """Expert 0 has up = inf, 1 has gate = inf, 2 has up = -inf, 3 has one NaN."""
    spec = replace(SIZES[size], activation=activation, limit=2.0, bias=True, mix="absent")
    p = replace(spec, dtype=dtype, top_k=1, experts=4).build()
    inter = p.spec.inter
    gate, up = (0, 1) if activation == "swigluoai" else (0, inter)
    for expert, (row, value) in enumerate(
        [(up, "inf"), (gate, "inf"), (up, "-inf"), (gate, "nan")]
    ):
        p.w13_bias[expert, row] = float(value)
    y = other_numbers(p.to(device)).cpu()
    nan = p.topk_ids[:, 0] == 3
    assert y[nan].isnan().all()
    assert y[~nan].isfinite().all()
    ref = fused_experts_lora_ref(**p.kwargs())
    naive = naive_fused_experts_lora(**p.kwargs())
    assert_close_to_ref(y[~nan], ref[~nan], naive[~nan], dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("scale", "limit"), [(2**-4, None), (2**-4, 25), (30, None), (30, 25), (1e4, 25), (1e30, 25)]
)
def test_soft_caps_of_small_and_large_values(scale, limit, size, device, dtype):
    """Neither tanh nor its product with the sigmoid cancels, overflows or becomes NaN."""
    spec = replace(SIZES[size], activation="situ", alpha=4, limit=limit, mix="absent")
    p = replace(spec, dtype=dtype, bias=False).build()
    scale = min(scale, 1e4) if dtype == torch.float16 else scale
    hold_layer(scaled(replace(p, w13=(p.w13.double() * scale).to(dtype))), device)
