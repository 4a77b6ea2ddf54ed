"""Gradients of a projection and of the deltas of adapters alone, against float64."""

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from cases import EDGE_CASES, Spec, random_specs, same_bits
from checks import naming
from conftest import CUDA_DTYPES, PLACES, on_gpu
from delta_cases import DELTAS
from gradient_cases import (
    assert_accurate_on_average,
    assert_samples,
    grad_like,
    hold_draws,
    leaves,
    saved_bytes,
)
from projection_cases import (
    FACTORS,
    as_projection,
    for_delta,
    grads_of,
    of_delta,
    of_projection,
    problem,
    samples,
    with_leaves,
)
from quantized_cases import ALL_FORMATS
from quantized_cases import build as build_quantized
from streams import Captured, no_waits

import moelora
from moelora.operators.call import factor_list


def hold(spec, projection, mul, compute, device="cpu", deltas=False):
    """One problem, or where its errors say too little eight of its kind."""

    def sample(number):
        p = replace(spec, seed=spec.seed + 100_000 * number).build().to(device)
        arguments = p.gemm_kwargs(projection, mul)
        out = (*p.topk_ids.shape, arguments["w"].size(1))
        grad_out = grad_like(out, spec.dtype, device, seed=1 + number)
        if deltas:
            own, arguments = for_delta(projection, arguments)
            return samples(compute(own, grad_out), arguments, grad_out)
        return samples(compute(arguments, grad_out), arguments, grad_out)

    return hold_draws(sample, spec.dtype)


@pytest.mark.parametrize("mul", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("projection", ["w13", "w2"])
@pytest.mark.parametrize("name", EDGE_CASES)
def test_edge_cases(device, name, projection, mul):
    spec = replace(EDGE_CASES[name], dtype=torch.bfloat16)
    hold(spec, projection, mul, of_projection, device)


@pytest.mark.parametrize("place", PLACES)
def test_random_problems(place):
    device, dtype = place
    ratios = []
    for number, spec in enumerate(random_specs(24, first_seed=900, dtypes=(dtype,))):
        projection, mul = ("w13", "w2")[number % 2], number % 4 < 2
        with naming(f"{spec} {projection} {mul}"):
            ratios.append(hold(spec, projection, mul, of_projection, device))
    assert_accurate_on_average(ratios, dtype)


# ---- deltas ----


@pytest.mark.parametrize("mul", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("projection", DELTAS)
@pytest.mark.parametrize("place", PLACES)
def test_deltas(place, projection, mul):
    device, dtype = place
    ratios = []
    for spec in (
        Spec(tokens=9, dtype=dtype),
        Spec(tokens=12, dtype=dtype, sharing="outer", ranks=(8, 5), spare_rank=3, slices=1),
        Spec(tokens=7, dtype=dtype, mix="disabled", routing="out_of_range", remote=2),
        Spec(tokens=5, dtype=dtype, mix="all_different", pass_ranks=False, scalings=False),
    ):
        ratios.append(hold(spec, projection, mul, of_delta(projection), device, deltas=True))
    assert_accurate_on_average(ratios, dtype)


@pytest.mark.parametrize("projection", DELTAS)
def test_delta_of_a_base_product(device, projection):
    """In place, to a tensor in a graph: its gradient goes on, unless it is replaced."""
    p = Spec(tokens=6, dtype=torch.bfloat16).build().to(device)
    arguments, _ = for_delta(projection, p.gemm_kwargs(projection))
    columns = p.w13.size(1) if projection == "w13" else p.w2.size(1)
    grad_out = grad_like((*p.topk_ids.shape, columns), torch.bfloat16, device)
    alone = of_delta(projection)(arguments, grad_out)
    for add_inputs in (True, False):
        leaf = torch.ones_like(grad_out, requires_grad=True)
        base = leaf * 1
        given = with_leaves(arguments)
        result = DELTAS[projection](**given, out=base, add_inputs=add_inputs)
        assert result is base and base.requires_grad
        with torch.no_grad():
            want = DELTAS[projection](**arguments, out=torch.ones_like(leaf), add_inputs=add_inputs)
        assert same_bits(base.detach(), want)
        base.backward(grad_out)
        for name, grad in grads_of(arguments, given).items():
            assert same_bits(grad, alone[name]), name
        assert same_bits(leaf.grad, grad_out) if add_inputs else leaf.grad is None


# ---- promises ----


@pytest.mark.parametrize("which", [0, 1], ids=["projection", "delta"])
@pytest.mark.parametrize("projection", DELTAS)
def test_an_adapter_alone(device, projection, which):
    """Its gradients have the bits that they have without the other adapters of the batch, whatever
    these hold; those of base rows the bits that they have without adapters."""
    compute = as_projection(projection)[which]
    arguments, grad_out = problem(device, projection)
    together = compute(arguments, grad_out)
    mapping = arguments["token_lora_mapping"]
    alone = compute(
        arguments | {"token_lora_mapping": mapping.masked_fill(mapping != 1, -1)}, grad_out
    )
    base = compute(arguments | {"token_lora_mapping": torch.full_like(mapping, -1)}, grad_out)
    sick = copy.deepcopy({name: arguments[name] for name in FACTORS})
    for factor in (*factor_list(sick["lora_a"]), *factor_list(sick["lora_b"])):
        factor[0] = float("nan")
    beside = compute(arguments | sick, grad_out)
    for name in together:
        if name.startswith("lora"):
            assert same_bits(together[name][1], alone[name][1]), name
            assert same_bits(together[name][1], beside[name][1]), name
            assert not alone[name][0].any()
    each = together["x"].size(0) // mapping.size(0)
    rows = (mapping < 0).repeat_interleave(each)
    assert rows.any() and same_bits(together["x"][rows], base["x"][rows])
    well = (mapping != 0).repeat_interleave(each)
    assert same_bits(together["x"][well], beside["x"][well])


def test_in_parts(device):
    """The gradient of a row does not depend on the rest of the batch."""
    arguments, grad_out = problem(device, tokens=300, top_k=2)
    whole = of_projection(arguments, grad_out)
    per_token = ("x", "topk_weights", "topk_ids", "token_lora_mapping")
    for first, end in ((0, 7), (7, 140), (140, 300)):
        part = arguments | {name: arguments[name][first:end] for name in per_token}
        found = of_projection(part, grad_out[first:end])
        assert same_bits(found["x"], whole["x"][first:end])
        assert same_bits(found["topk_weights"], whole["topk_weights"][first:end])


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "int4_g64_zp", "fp8_block_w8a8"])
def test_quantized_weights(device, name):
    """Gradients are those of the dequantized weights."""
    spec = Spec(tokens=40, hidden=160, inter=96, dtype=torch.bfloat16)
    p = build_quantized(spec, ALL_FORMATS[name], spec.dtype).to(device)
    arguments = p.gemm_kwargs("w2", True)
    plain = arguments | {"w": arguments["w"].unpack().to(spec.dtype)}
    grad_out = grad_like((*arguments["topk_ids"].shape, spec.hidden), spec.dtype, device)
    assert_samples([samples(of_projection(arguments, grad_out), plain, grad_out)], spec.dtype)


def test_nothing_is_saved_but_arguments(device):
    for given, call in calls(device):
        values = [v for a in given.values() for v in (a if isinstance(a, list) else [a])]
        own = {v.untyped_storage().data_ptr() for v in values if isinstance(v, torch.Tensor)}
        kept = saved_bytes(call)
        assert kept and set(kept) <= own


def test_nothing_is_saved_without_autograd(device):
    for x, call in calls_and_a_layer(device):
        assert x.requires_grad and saved_bytes(call)
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                assert not saved_bytes(call)
    layer = Spec(tokens=40, dtype=torch.bfloat16).build().to(device).kwargs()
    assert not saved_bytes(lambda: moelora.fused_experts_lora(**layer))


# ---- attacks on the boundary of autograd ----


def calls(device):
    """(leaves and other tensors by name, a call that is recorded), of a projection and deltas."""
    for projection in DELTAS:
        arguments, _ = problem(device, projection)
        given = with_leaves(arguments)
        yield given, lambda given=given: moelora.fused_moe_lora_gemm(**given)
        own, _ = for_delta(projection, arguments)
        given = with_leaves(own)
        yield given, lambda given=given, delta=DELTAS[projection]: delta(**given)


def calls_and_a_layer(device):
    """(the leaf whose gradient is asked for, the call) of these, and of a whole layer."""
    for given, call in calls(device):
        yield given["x"], call
    spec = Spec(tokens=40, ranks=(8, 16, 3), dtype=torch.bfloat16)
    given = leaves(spec.build().to(device).kwargs())
    yield given["hidden_states"], lambda: moelora.fused_experts_lora(**given)


def test_a_delta_that_is_written_to(device):
    """The result is not an operand of the backward: it may change."""
    for given, call in list(calls(device))[1::2]:
        out = call()
        want = torch.autograd.grad(out.sum(), given["x"])[0]
        out = call()
        out.mul_(1)
        assert same_bits(torch.autograd.grad(out.sum(), given["x"])[0], want)


def test_freed_storage(device):
    """Tensors that the caller drops live as long as the graph; freed ones are refused."""
    for number in range(4):
        given, call = list(calls(device))[number]
        want = torch.autograd.grad(call().sum(), given["x"])[0]
        given, call = list(calls(device))[number]
        out, x = call(), given["x"]
        given.clear()
        del call
        filler = [torch.full((1 << 16,), float("nan"), device=device) for _ in range(8)]
        assert same_bits(torch.autograd.grad(out.sum(), x, retain_graph=True)[0], want)
        del filler
        loss = out.sum()
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
        given, call = list(calls(device))[number]
        out = call()
        factor_list(given["lora_b"])[0].untyped_storage().resize_(0)
        with pytest.raises((RuntimeError, ValueError), match="storage|memory|inplace"):
            out.sum().backward()


def test_threads(device):
    """Every one with a graph of its own, at the same time, and one that another thread finishes."""
    problems = list(calls_and_a_layer(device)) * 2
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


@pytest.mark.parametrize("place", [on_gpu("cuda")])
def test_streams(place):
    """A backward runs on the stream of its forward, and work that waits for it sees its results."""
    for x, call in calls_and_a_layer(place):
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


# ---- under torch.compile, in a CUDA graph ----


CHANGING = ("x", "topk_ids", "topk_weights", "token_lora_mapping")


@pytest.mark.parametrize("which", [0, 1], ids=["projection", "delta"])
@pytest.mark.parametrize("projection", DELTAS)
@pytest.mark.parametrize("dtype", [on_gpu(d, id=str(d)[6:]) for d in CUDA_DTYPES])
def test_a_captured_step_serves_any_routing(dtype, projection, which):
    """And waits for the GPU nowhere."""
    compute = as_projection(projection)[which]
    (arguments, grad_out), (other, _) = (
        problem("cuda", projection, tokens=90, dtype=dtype, seed=seed) for seed in range(2)
    )
    captured = Captured(lambda: compute(arguments, grad_out))
    with no_waits():
        compute(arguments, grad_out)
    for name in CHANGING:
        arguments[name].copy_(other[name])
    found = captured.replay()
    for name, want in compute(arguments, grad_out).items():
        assert same_bits(found[name], want), name
