"""Gradients of fused_experts_lora against float64, by autograd and by the operators themselves."""

from dataclasses import replace

import pytest
import torch
from cases import ACTIVATIONS, EDGE_CASES, Spec, random_specs, same_bits
from checks import naming
from conftest import PLACES
from covering import extent
from gradient_cases import (
    FEW_PLACES,
    assert_accurate_on_average,
    assert_bits,
    assert_gradients,
    by_autograd,
    by_hand,
    flat,
    grad_like,
    hold_gradients,
)
from quantized_cases import ALL_FORMATS, build, kernels_of

import moelora
from moelora.reference import fused_experts_lora_ref, naive_fused_experts_lora_backward
from moelora.reference.backward import TRAINED

SIXTEEN_BITS = [p for p in PLACES if p.values[0][1] != torch.float32]


def check(spec, device="cpu"):
    """By autograd against the reference, and by the operators to the same bits."""

    def compute(arguments, grad_out):
        grads = by_autograd(arguments, grad_out)
        by_operators = by_hand(arguments, grad_out)
        assert set(by_operators) == set(grads)
        assert_bits(by_operators, grads)
        return grads

    return hold_gradients(spec, compute, device)


def check_random(count, first_seed, place):
    ratios = []
    for spec in random_specs(count, first_seed=first_seed, dtypes=(place[1],)):
        with naming(spec):
            ratios.append(check(spec, place[0]))
    assert_accurate_on_average(ratios, place[1])


@pytest.mark.parametrize("place", FEW_PLACES)
@pytest.mark.parametrize("name", EDGE_CASES)
def test_edge_cases(name, place):
    check(replace(EDGE_CASES[name], dtype=place[1]), place[0])


@pytest.mark.parametrize("place", PLACES)
def test_random_problems(place):
    check_random(extent(nightly=25, ci=10), 500, place)


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", range(20_000, 21_000, 250))
@pytest.mark.parametrize("place", PLACES)
def test_thousands_of_random_problems(first_seed, place):
    check_random(250, first_seed, place)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("place", FEW_PLACES)
def test_sizes_that_fill_tiles(activation, place):
    """More rows, ranks and columns than a tile, a part of rows and a pass over depth have."""
    spec = Spec(640, top_k=1, experts=2, hidden=200, inter=136, ranks=(72, 3), dtype=place[1])
    if activation == "silu":
        spec = replace(spec, mix="one", routing="one_expert")
    slices, bias = 1 if activation == "relu2" else 2, activation == "swigluoai"
    p = replace(spec, activation=activation, slices=slices, bias=bias).build()
    grad_out = grad_like(p.hidden_states.shape, spec.dtype)
    # Row by row would take a minute: the yardstick in float64 is held against that elsewhere.
    exact = {
        name: [t.double() for t in v] if isinstance(v, list) else v.double()
        for name, v in p.kwargs().items()
        if name in (*TRAINED, "w13", "w2") and v is not None
    }
    ref = flat(naive_fused_experts_lora_backward(grad_out.double(), **p.kwargs() | exact))
    arguments, grad_out = p.to(place[0]).kwargs(), grad_out.to(place[0])
    assert_gradients(by_autograd(arguments, grad_out), arguments, grad_out, spec.dtype, ref)


def test_reference_by_finite_differences():
    """The reference has the derivative of what it computes, everything in it included."""
    for spec in (
        Spec(tokens=3, hidden=5, inter=4, ranks=(2, 3), mix="all_different", bias=True),
        Spec(
            tokens=2, hidden=4, inter=3, ranks=(2,), mix="one", activation="gelu", sharing="outer"
        ),
        Spec(tokens=3, hidden=4, inter=3, ranks=(2,), activation="swigluoai", alpha=1.1, limit=0.8),
        Spec(tokens=3, hidden=4, inter=3, ranks=(2,), activation="situ", alpha=0.7, limit=1.2),
        Spec(tokens=3, hidden=4, inter=3, ranks=(2,), activation="swiglustep", limit=0.3),
        Spec(tokens=3, hidden=4, inter=4, ranks=(2,), top_k=1, weight_on_input=True, limit=0.7),
        Spec(tokens=3, hidden=4, inter=4, ranks=(2,), activation="relu2", slices=1, remote=3),
    ):
        arguments = spec.build().kwargs()
        names = [n for n in TRAINED if arguments.get(n) is not None]
        given = [arguments[n] if isinstance(arguments[n], list) else [arguments[n]] for n in names]
        values = [t.nan_to_num().double().requires_grad_() for ts in given for t in ts]

        def layer(*values, names=names, given=given, arguments=arguments):
            values = iter(values)
            taken = {n: [next(values) for _ in ts] for n, ts in zip(names, given, strict=True)}
            taken = {n: ts if "w13_lora" in n else ts[0] for n, ts in taken.items()}
            return fused_experts_lora_ref(**arguments | taken)

        assert torch.autograd.gradcheck(layer, values, fast_mode=True)


# ---- other forms of weights ----


def forms_of(device):
    """Activations, and intermediate sizes: a GPU has kernels for whole tiles of gate and of up."""
    sizes = (96,) if device == "cpu" else (96, 128)
    return enumerate((a, i) for i in sizes for a in ("silu", "swigluoai", "relu2"))


@pytest.mark.parametrize("place", SIXTEEN_BITS)
@pytest.mark.parametrize("name", ALL_FORMATS)
def test_quantized_weights(name, place):
    """Gradients are those of the numbers that tiles stand for, to the bit; on GPUs, numbers that
    kernels look up have the precision of the dtype."""
    device, dtype = place
    for number, (activation, inter) in forms_of(device):
        tokens, slices = 9 if device == "cpu" else 90, 1 if activation == "relu2" else 2
        spec = Spec(tokens, hidden=160, inter=inter, mix="all_different", seed=number)
        spec = replace(spec, activation=activation, slices=slices)
        p = build(spec, ALL_FORMATS[name], dtype).to(device)
        grad_out = grad_like(p.dense.hidden_states.shape, dtype, device)
        # On a GPU the tiles of up rows begin anew in K: the order of that sum is their own.
        splits = device != "cpu" and activation == "silu" and inter % 64 != 0
        looks_up = device != "cpu" and kernels_of(name) == "nf4"
        _, saved = moelora.fused_experts_lora_saving(**p.kwargs())
        got = moelora.fused_experts_lora_backward(grad_out, saved, **p.kwargs())
        numbers = {"w13": p.w13.unpack(), "w2": p.w2.unpack()}
        want = moelora.fused_experts_lora_backward(grad_out, saved, **p.kwargs() | numbers)
        for field, grad in flat(want._asdict()).items():
            if looks_up or (splits and field == "hidden_states"):
                near = max(0.05, 0.02 * grad.abs().max().item()) if looks_up else 0.05
                torch.testing.assert_close(flat(got._asdict())[field], grad, rtol=0.02, atol=near)
            else:
                assert same_bits(flat(got._asdict())[field], grad), field
        for field, grad in by_autograd(p.kwargs(), grad_out).items():
            assert same_bits(flat(got._asdict())[field], grad), field


@pytest.mark.parametrize("place", PLACES)
def test_packed_weights(place):
    p = Spec(tokens=9, hidden=128, inter=64, dtype=place[1]).build().to(place[0])
    grad_out = grad_like(p.hidden_states.shape, place[1], place[0])
    packed = {name: moelora.prepack_weights(getattr(p, name)) for name in ("w13", "w2")}
    want = by_autograd(p.kwargs(), grad_out)
    assert_bits(by_autograd(p.kwargs() | packed, grad_out), want)


# ---- into given memory, and some alone ----


@pytest.mark.parametrize("place", PLACES)
def test_a_factor_of_up_alone(place):
    """With weights on the input, the gradient of up's A has the bits that it has beside gate's."""
    spec = Spec(tokens=9, top_k=1, weight_on_input=True, dtype=place[1])
    arguments = spec.build().to(place[0]).kwargs()
    grad_out = grad_like(arguments["hidden_states"].shape, place[1], place[0])
    want = by_autograd(arguments, grad_out, ("w13_lora_a",))["w13_lora_a[1]"]
    gate, up = arguments["w13_lora_a"]
    up = up.detach().requires_grad_()
    moelora.fused_experts_lora(**arguments | {"w13_lora_a": [gate, up]}).backward(grad_out)
    assert up.grad.any() and same_bits(up.grad, want)
