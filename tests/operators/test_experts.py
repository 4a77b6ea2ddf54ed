"""fused_experts_lora: the whole layer against the fp64 loop."""

from dataclasses import replace

import pytest
import torch
from cases import ACTIVATIONS, EDGE_CASES, Problem, Spec, random_specs, same_bits
from checks import assert_close_to_ref, assert_unchanged, guarded_empty
from conftest import CUDA_DTYPES, on_gpu

import moelora
from moelora.reference import fused_experts_lora_ref, naive_fused_experts_lora


def check(p: Problem, device: str) -> float:
    """Runs the operator inside guard bands; returns the error over what is allowed."""
    there = p.to(device)
    ref = fused_experts_lora_ref(**p.kwargs())
    naive = naive_fused_experts_lora(**there.kwargs())
    inputs = {name: t.clone() for name, t in there.tensors().items()}

    out = guarded_empty(ref.shape, p.spec.dtype, device)
    y = moelora.fused_experts_lora(**there.kwargs(), out=out.tensor)
    out.check("out")
    assert y.data_ptr() == out.tensor.data_ptr()
    assert_unchanged(inputs, there.tensors())
    return assert_close_to_ref(y, ref, naive, p.spec.dtype)


def check_specs(specs: list[Spec], device: str) -> None:
    for spec in specs:
        try:
            check(spec.build(), device)
        except Exception as error:
            raise AssertionError(f"{spec}: {error}") from error


@pytest.mark.parametrize("name", EDGE_CASES)
def test_edge_cases(name, device_and_dtype):
    device, dtype = device_and_dtype
    check(replace(EDGE_CASES[name], dtype=dtype).build(), device)


def test_random_problems(device_and_dtype):
    device, dtype = device_and_dtype
    check_specs(random_specs(200, dtypes=(dtype,)), device)


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", range(10_000, 12_000, 250))
def test_thousands_of_random_problems(first_seed, device_and_dtype):
    device, dtype = device_and_dtype
    check_specs(random_specs(250, first_seed=first_seed, dtypes=(dtype,)), device)


@pytest.mark.parametrize("tokens", [1, 6, 40, 700])
@pytest.mark.parametrize("sharing", ["per_expert", "outer"])
def test_of_two_equal_a_one_is_read(tokens, sharing, device_and_dtype):
    """The bits of a call without the table, whatever lies in the other A."""
    device, dtype = device_and_dtype
    ranks = (16, 5, 70, 64)
    spec = Spec(tokens=tokens, hidden=512, inter=128, ranks=ranks, sharing=sharing, mix="many")
    p = replace(spec, slices=2, dtype=dtype).build().to(device)
    gate, up = p.w13_lora_a
    one_a = torch.tensor([1, 0, 2, 0], dtype=torch.int32, device=device)
    up[0], up[2] = gate[0], gate[2]
    want = moelora.fused_experts_lora(**p.kwargs())
    up[0], up[2] = float("nan"), float("nan")
    assert same_bits(moelora.fused_experts_lora(**p.kwargs(), w13_one_a=one_a), want)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    "tokens, hidden, inter", [(1, 512, 256), (40, 384, 320), (130, 256, 200), (300, 192, 64)]
)
def test_sizes_that_fill_tiles(tokens, hidden, inter, activation, device_and_dtype):
    """Larger than any register tile in every direction, with whole tiles and remainders."""
    device, dtype = device_and_dtype
    spec = Spec(
        tokens=tokens,
        top_k=2,
        experts=4,
        hidden=hidden,
        inter=inter,
        activation=activation,
        slices=1 if activation == "relu2" else 2,
        ranks=(16, 5, 64),
        mix="many",
        bias=activation == "swigluoai",
        dtype=dtype,
    )
    check(spec.build(), device)


def test_without_out_a_new_tensor_is_returned(device_and_dtype):
    device, dtype = device_and_dtype
    p = Spec(tokens=6, dtype=dtype).build().to(device)
    y = moelora.fused_experts_lora(**p.kwargs())
    assert y.shape == p.hidden_states.shape
    assert (y.dtype, y.device, y.is_contiguous()) == (dtype, p.hidden_states.device, True)
    assert y.data_ptr() != p.hidden_states.data_ptr()
    assert same_bits(y, moelora.fused_experts_lora(**p.kwargs(), out=torch.empty_like(y)))


@pytest.mark.parametrize("top_k, weight_on_input", [(3, False), (1, False), (1, True)])
def test_output_may_be_the_input(top_k, weight_on_input, device_and_dtype):
    device, dtype = device_and_dtype
    spec = Spec(tokens=21, top_k=top_k, weight_on_input=weight_on_input, dtype=dtype)
    p = spec.build().to(device)
    expected = moelora.fused_experts_lora(**p.kwargs())
    y = moelora.fused_experts_lora(**p.kwargs(), out=p.hidden_states)
    assert y.data_ptr() == p.hidden_states.data_ptr()
    assert same_bits(p.hidden_states, expected)


def test_output_may_be_strided(device_and_dtype):
    device, dtype = device_and_dtype
    p = Spec(tokens=5, dtype=dtype).build().to(device)
    expected = moelora.fused_experts_lora(**p.kwargs())
    buffer = torch.full((10, 64 + 7), 3.0, dtype=dtype, device=device)
    out = buffer[::2, 3 : 3 + 64]
    moelora.fused_experts_lora(**p.kwargs(), out=out)
    assert same_bits(out, expected)
    out.fill_(3.0)
    assert (buffer == 3.0).all(), "something around the output was written"


def test_adapters_for_one_projection_only(device_and_dtype):
    """Adapters that target only gate_up_proj, or only down_proj, are common."""
    device, dtype = device_and_dtype
    p = Spec(tokens=9, mix="all_different", dtype=dtype).build()
    check(replace(p, w13_lora_a=None, w13_lora_b=None), device)
    check(replace(p, w2_lora_a=None, w2_lora_b=None), device)


def test_stacks_of_different_maximum_rank(device_and_dtype):
    """lora_ranks counts for both projections; a stack that holds less has less."""
    device, dtype = device_and_dtype
    p = Spec(tokens=9, mix="all_different", ranks=(8, 8), pass_ranks=False, dtype=dtype).build()
    smaller = {
        "w2_lora_a": p.w2_lora_a[:, :, :4].contiguous(),
        "w2_lora_b": p.w2_lora_b[..., :4].contiguous(),
    }
    check(replace(p, **smaller), device)
    check(replace(p, **smaller, lora_ranks=torch.tensor([8, 3], dtype=torch.int32)), device)


def test_layer_is_two_projections(device_and_dtype):
    """The layer and its parts agree: gemm, activation, gemm, sum."""
    device, dtype = device_and_dtype
    p = Spec(tokens=9, activation="relu2", slices=1, mix="many", dtype=dtype).build().to(device)
    gate_up = moelora.fused_moe_lora_gemm(**p.gemm_kwargs("w13"))
    h = torch.relu(gate_up.float()).square().to(dtype).flatten(0, 1)
    arguments = {**p.gemm_kwargs("w2", mul_routed_weight=True), "x": h}
    parts = moelora.fused_moe_lora_gemm(**arguments).float().sum(dim=1)
    layer = moelora.fused_experts_lora(**p.kwargs()).float()
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    torch.testing.assert_close(layer, parts, rtol=tolerance, atol=tolerance)


def test_zeroed_factors_change_nothing_but_rounding(device_and_dtype):
    device, dtype = device_and_dtype
    p = Spec(tokens=9, ranks=(8, 8), mix="all_different", dtype=dtype).build()
    p.w13_lora_b = [torch.zeros_like(b) for b in p.w13_lora_b]
    p.w2_lora_b = torch.zeros_like(p.w2_lora_b)
    with_zeros = moelora.fused_experts_lora(**p.to(device).kwargs())
    base = moelora.fused_experts_lora(**p.base().to(device).kwargs())
    assert torch.equal(with_zeros, base)


@pytest.mark.parametrize("dtype", [on_gpu(d, id=str(d)) for d in CUDA_DTYPES])
def test_cpu_and_cuda_agree(dtype):
    """Both are within the rule of the reference; here they are compared with each other."""
    for spec in random_specs(100, first_seed=3000, dtypes=(dtype,)):
        p = spec.build()
        on_cpu = moelora.fused_experts_lora(**p.kwargs())
        on_cuda = moelora.fused_experts_lora(**p.to("cuda").kwargs()).cpu()
        limit = {torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
        torch.testing.assert_close(on_cuda, on_cpu, rtol=limit, atol=limit)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_float32_on_cuda_is_refused():
    p = Spec().build().to("cuda")
    with pytest.raises((NotImplementedError, ValueError), match="float32"):
        moelora.fused_experts_lora(**p.kwargs())
