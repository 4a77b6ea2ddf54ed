"""fused_experts_lora: the whole layer against the fp64 loop."""

from dataclasses import replace

import pytest
import torch
from cases import ACTIVATIONS, EDGE_CASES, Spec, random_specs, same_bits
from checks import naming
from holding import hold_layer

import moelora


def check_specs(specs: list[Spec], device: str) -> None:
    for spec in specs:
        with naming(spec):
            hold_layer(spec.build(), device)


@pytest.mark.parametrize("name", EDGE_CASES)
def test_edge_cases(name, device, dtype):
    hold_layer(replace(EDGE_CASES[name], dtype=dtype).build(), device)


def test_random_problems(device, dtype):
    check_specs(random_specs(200, dtypes=(dtype,)), device)


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", range(10_000, 12_000, 250))
def test_thousands_of_random_problems(first_seed, device, dtype):
    check_specs(random_specs(250, first_seed=first_seed, dtypes=(dtype,)), device)


@pytest.mark.parametrize("tokens", [1, 6, 40, 700])
@pytest.mark.parametrize("sharing", ["per_expert", "outer"])
def test_of_two_equal_a_one_is_read(tokens, sharing, device, dtype):
    """The bits of a call without the table, whatever lies in the other A."""
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
def test_sizes_that_fill_tiles(tokens, hidden, inter, activation, device, dtype):
    """Larger than any register tile in every direction, with whole tiles and remainders."""
    spec = Spec(tokens, hidden=hidden, inter=inter, ranks=(16, 5, 64), dtype=dtype)
    slices, bias = 1 if activation == "relu2" else 2, activation == "swigluoai"
    hold_layer(replace(spec, activation=activation, slices=slices, bias=bias).build(), device)


def test_without_out_a_new_tensor_is_returned(device, dtype):
    p = Spec(tokens=6, dtype=dtype).build().to(device)
    y = moelora.fused_experts_lora(**p.kwargs())
    assert y.shape == p.hidden_states.shape
    assert (y.dtype, y.device, y.is_contiguous()) == (dtype, p.hidden_states.device, True)
    assert y.data_ptr() != p.hidden_states.data_ptr()
    assert same_bits(y, moelora.fused_experts_lora(**p.kwargs(), out=torch.empty_like(y)))


@pytest.mark.parametrize("top_k, weight_on_input", [(3, False), (1, False), (1, True)])
def test_output_may_be_the_input(top_k, weight_on_input, device, dtype):
    spec = Spec(tokens=21, top_k=top_k, weight_on_input=weight_on_input, dtype=dtype)
    p = spec.build().to(device)
    expected = moelora.fused_experts_lora(**p.kwargs())
    y = moelora.fused_experts_lora(**p.kwargs(), out=p.hidden_states)
    assert y.data_ptr() == p.hidden_states.data_ptr()
    assert same_bits(p.hidden_states, expected)


@pytest.mark.parametrize("projection", [None, "w13"])
def test_output_may_be_strided(projection, device, dtype):
    p = Spec(tokens=5, dtype=dtype).build().to(device)
    operator = moelora.fused_moe_lora_gemm if projection else moelora.fused_experts_lora
    arguments = p.gemm_kwargs(projection) if projection else p.kwargs()
    expected = operator(**arguments)
    sizes = (10, 3, 64 + 7) if projection else (10, 64 + 7)
    buffer = torch.full(sizes, 3.0, dtype=dtype, device=device)
    out = buffer[::2, :2, 3 : 3 + 64] if projection else buffer[::2, 3 : 3 + 64]
    operator(**arguments, out=out)
    assert same_bits(out, expected)
    out.fill_(3.0)
    assert (buffer == 3.0).all(), "something around the output was written"


def test_stacks_of_different_maximum_rank(device, dtype):
    """lora_ranks counts for both projections; a stack that holds less has less."""
    p = Spec(tokens=9, mix="all_different", ranks=(8, 8), pass_ranks=False, dtype=dtype).build()
    smaller = {
        "w2_lora_a": p.w2_lora_a[:, :, :4].contiguous(),
        "w2_lora_b": p.w2_lora_b[..., :4].contiguous(),
    }
    hold_layer(replace(p, **smaller), device)
    hold_layer(replace(p, **smaller, lora_ranks=torch.tensor([8, 3], dtype=torch.int32)), device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_float32_on_cuda_is_refused():
    p = Spec().build().to("cuda")
    with pytest.raises((NotImplementedError, ValueError), match="float32"):
        moelora.fused_experts_lora(**p.kwargs())
