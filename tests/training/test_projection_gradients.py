"""Gradients of a projection and of the deltas of adapters alone, against float64; what autograd
keeps of them and of a layer, and for how long."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from backward_cases import DELTA_OPERATORS, OPERATORS, PROJECTIONS, WITHOUT_LAYER, each
from cases import EDGE_CASES, Spec, random_specs, same_bits
from checks import naming
from conftest import CUDA_DTYPES, PLACES, on_gpu
from gradient_cases import (
    assert_accurate_on_average,
    assert_bits,
    assert_samples,
    by_autograd,
    grad_like,
    hold_draws,
    leaves,
    saved_bytes,
)
from quantized_cases import ALL_FORMATS
from quantized_cases import build as build_quantized
from streams import Captured, no_waits

from moelora.operators.call import factor_list
from moelora.reference import fused_moe_lora_gemm_backward_ref
from moelora.reference.fp8 import numbers_of

every_weight = pytest.mark.parametrize("mul", [False, True], ids=["plain", "weighted"])
SPEC = Spec(tokens=40, ranks=(8, 16, 3), dtype=torch.bfloat16)


def hold(spec, operator, mul, device="cpu"):
    """One problem, or where its errors say too little eight of its kind."""

    def sample(number):
        drawn = replace(spec, seed=spec.seed + 100_000 * number)
        arguments, grad_out = operator.problem(drawn, (device, spec.dtype), mul, seed=1 + number)
        return operator.samples(operator.by_autograd(arguments, grad_out), arguments, grad_out)

    return hold_draws(sample, spec.dtype)


@every_weight
@each(PROJECTIONS)
@pytest.mark.parametrize("name", EDGE_CASES)
def test_edge_cases(device, name, operator, mul):
    hold(replace(EDGE_CASES[name], dtype=torch.bfloat16), operator, mul, device)


@pytest.mark.parametrize("place", PLACES)
def test_random_problems(place):
    device, dtype = place
    ratios = []
    for number, spec in enumerate(random_specs(24, first_seed=900, dtypes=(dtype,))):
        operator, mul = PROJECTIONS[number % 2], number % 4 < 2
        with naming(f"{spec} {operator} {mul}"):
            ratios.append(hold(spec, operator, mul, device))
    assert_accurate_on_average(ratios, dtype)


# ---- deltas ----


@every_weight
@each(DELTA_OPERATORS)
@pytest.mark.parametrize("place", PLACES)
def test_deltas(place, operator, mul):
    device, dtype = place
    ratios = []
    for spec in (
        Spec(tokens=9, dtype=dtype),
        Spec(tokens=12, dtype=dtype, sharing="outer", ranks=(8, 5), spare_rank=3, slices=1),
        Spec(tokens=7, dtype=dtype, mix="disabled", routing="out_of_range", remote=2),
        Spec(tokens=5, dtype=dtype, mix="all_different", pass_ranks=False, scalings=False),
    ):
        ratios.append(hold(spec, operator, mul, device))
    assert_accurate_on_average(ratios, dtype)


@each(DELTA_OPERATORS)
def test_delta_of_a_base_product(device, operator):
    """In place, to a tensor in a graph: its gradient goes on, unless it is replaced."""
    arguments, grad_out = operator.problem(Spec(tokens=6), (device, torch.bfloat16), mul=False)
    alone = operator.by_autograd(arguments, grad_out)
    for add_inputs in (True, False):
        leaf = torch.ones_like(grad_out, requires_grad=True)
        base = leaf * 1
        with torch.no_grad():
            want = operator(**arguments, out=torch.ones_like(leaf), add_inputs=add_inputs)

        def onto_base(base=base, add_inputs=add_inputs, **given):
            assert operator(**given, out=base, add_inputs=add_inputs) is base and base.requires_grad
            return base

        assert_bits(by_autograd(arguments, grad_out, function=onto_base), alone)
        assert same_bits(base.detach(), want)
        assert same_bits(leaf.grad, grad_out) if add_inputs else leaf.grad is None


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "int4_g64_zp", "fp8_block_w8a8"])
def test_quantized_weights(device, name):
    """Gradients are those of the dequantized weights, also where x is quantized."""
    spec = Spec(tokens=40, hidden=160, inter=96, dtype=torch.bfloat16)
    p = build_quantized(spec, ALL_FORMATS[name], spec.dtype).to(device)
    arguments, down = p.gemm_kwargs("w2", True), PROJECTIONS[1]
    plain = arguments | {"w": arguments["w"].unpack().to(spec.dtype)}
    grad_out = grad_like((*arguments["topk_ids"].shape, spec.hidden), spec.dtype, device)
    found = down.by_autograd(arguments, grad_out)
    assert_samples([down.samples(found, plain, grad_out)], spec.dtype)
    exact = arguments | {"w": numbers_of(arguments["w"])}
    of_x = [fused_moe_lora_gemm_backward_ref(grad_out, **w)["x"] for w in (arguments, exact)]
    assert same_bits(*of_x)


# ---- attacks on the boundary of autograd ----


def recorded(operator, device):
    """(leaves and other tensors by name, a call that is recorded)."""
    given = leaves(operator.problem(SPEC, (device, SPEC.dtype))[0])
    return given, lambda: operator(**given)


@each(OPERATORS)
def test_nothing_is_saved_without_autograd(device, operator):
    _, call = recorded(operator, device)
    assert call().requires_grad and saved_bytes(call)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert not saved_bytes(call)
    arguments, _ = operator.problem(SPEC, (device, SPEC.dtype))
    assert not saved_bytes(lambda: operator(**arguments))


@each(DELTA_OPERATORS)
def test_a_delta_that_is_written_to(device, operator):
    """The result is not an operand of the backward: it may change."""
    given, call = recorded(operator, device)
    want = torch.autograd.grad(call().sum(), given["x"])[0]
    out = call()
    out.mul_(1)
    assert same_bits(torch.autograd.grad(out.sum(), given["x"])[0], want)


@each(WITHOUT_LAYER)
def test_freed_storage(device, operator):
    """Tensors that the caller drops live as long as the graph; freed ones are refused."""
    given, call = recorded(operator, device)
    want = torch.autograd.grad(call().sum(), given["x"])[0]
    out, x = call(), given["x"]
    given.clear()
    filler = [torch.full((1 << 16,), float("nan"), device=device) for _ in range(8)]
    assert same_bits(torch.autograd.grad(out.sum(), x, retain_graph=True)[0], want)
    del filler
    loss = out.sum()
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    given, call = recorded(operator, device)
    out = call()
    factor_list(given["lora_b"])[0].untyped_storage().resize_(0)
    with pytest.raises((RuntimeError, ValueError), match="storage|memory|inplace"):
        out.sum().backward()


def test_threads(device):
    """Every one with a graph of its own, at the same time, and one that another thread finishes."""
    problems = []
    for operator in OPERATORS * 2:
        given, call = recorded(operator, device)
        problems.append((given[operator.x], call))
    want = [torch.autograd.grad(call().sum(), x)[0] for x, call in problems]

    def work(number):
        x, call = problems[number]
        for _ in range(4):
            assert same_bits(torch.autograd.grad(call().sum(), x)[0], want[number])

    with ThreadPoolExecutor(len(problems)) as pool:
        list(pool.map(work, range(len(problems))))
        sums = [call().sum() for _, call in problems]
        grads = pool.map(
            lambda n: torch.autograd.grad(sums[n], problems[n][0])[0], range(len(sums))
        )
        assert all(map(same_bits, grads, want))


@each(OPERATORS)
@pytest.mark.parametrize("place", [on_gpu("cuda")])
def test_streams(place, operator):
    """A backward runs on the stream of its forward, and work that waits for it sees its results."""
    given, call = recorded(operator, place)
    x = given[operator.x]
    want = torch.autograd.grad(call().sum(), x)[0]
    torch.cuda.synchronize()
    stream, other = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        out = call()
    with torch.cuda.stream(other):
        other.wait_stream(stream)
        found = torch.autograd.grad(out.sum(), x)[0].clone()
    torch.cuda.synchronize()
    assert same_bits(found, want)


# ---- in a CUDA graph ----


@each(OPERATORS)
@pytest.mark.parametrize("dtype", [on_gpu(d, id=str(d)[6:]) for d in CUDA_DTYPES])
def test_a_captured_step_serves_any_routing(dtype, operator):
    """And waits for the GPU nowhere."""
    (arguments, grad_out), (other, _) = (
        operator.problem(replace(SPEC, tokens=90, seed=seed), ("cuda", dtype)) for seed in range(2)
    )
    captured = Captured(lambda: operator.by_autograd(arguments, grad_out))
    with no_waits():
        operator.by_autograd(arguments, grad_out)
    for name in (operator.x, "topk_ids", "topk_weights", "token_lora_mapping"):
        arguments[name].copy_(other[name])
    found = captured.replay()
    assert_bits(operator.by_autograd(arguments, grad_out), found)
