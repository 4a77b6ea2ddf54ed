"""Few rows on Hopper: tiles of w2 are cut into parts that the sum adds up, and kernels begin before
what they multiply is there."""

from dataclasses import replace

import pytest
import torch
from cases import Spec, same_bits
from checks import beside_other_work
from conftest import CUDA_DTYPES, needs_gpu
from quantized_cases import (
    NATIVE,
    by_variants,
    check_layer,
    dense,
    hopper_kernel,
    made,
    of_each_kernel,
)

pytestmark = [pytest.mark.gpu, needs_gpu]
# Two parts, of which the second lacks a step and a half; four, the last of 8 of 11 steps.
DEPTHS = (2624, 5248)
SPEC = Spec(tokens=4, hidden=192, experts=4, top_k=2, ranks=(16, 40), mix="half_base", bias=True)
every_form = pytest.mark.parametrize("form", of_each_kernel())
every_dtype = pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
every_depth = pytest.mark.parametrize("inter", DEPTHS)


def layer(p, form, dtype):
    size = "16x128x64" if form == NATIVE else "16x128x128"
    (y,) = by_variants([hopper_kernel(form, size, dtype)], p)
    return y


@every_depth
@every_dtype
@every_form
def test_values(form, dtype, inter):
    for tokens in (1, 4):
        p = made(replace(SPEC, tokens=tokens, inter=inter), form, dtype)
        there = p.to("cuda")
        y = layer(there, form, dtype)
        check_layer(y, p, there)
        assert same_bits(y, layer(there, form, dtype))


@every_depth
@every_dtype
@every_form
def test_base_rows_keep_their_bits(form, dtype, inter):
    p = made(replace(SPEC, inter=inter), form, dtype).to("cuda")
    rows = dense(p).token_lora_mapping == -1
    mixed, without = layer(p, form, dtype), layer(p.base(), form, dtype)
    assert same_bits(mixed[rows], without[rows])
    assert rows.any() and not same_bits(mixed[~rows], without[~rows])


@every_dtype
@every_form
def test_what_is_not_finite_stays_with_its_outputs(form, dtype):
    """A NaN in B is a NaN of its row, for the tokens that carry the adapter, and nothing else."""
    p = made(replace(SPEC, inter=DEPTHS[1]), form, dtype).to("cuda")
    clean, d = layer(p, form, dtype), dense(p)
    carry = d.token_lora_mapping == 1
    d.w2_lora_b[1, :, 150, 3] = float("nan")
    y = layer(p, form, dtype)
    hit = torch.zeros_like(y, dtype=torch.bool)
    hit[carry, 150] = True
    assert carry.any() and not y[hit].isfinite().any()
    assert same_bits(y[~hit], clean[~hit])


@pytest.mark.parametrize("inter", [768, DEPTHS[1]])
@every_form
def test_nobody_reads_what_is_not_there_yet(form, inter):
    """Two inputs in turns, so that what a call before left is wrong, while work of another stream
    takes SMs from some of the kernels."""
    spec = replace(SPEC, hidden=512, inter=inter, bias=False)
    p = made(spec, form, torch.bfloat16).to("cuda")
    inputs = [dense(p).hidden_states.clone(), dense(p).hidden_states.flip(0).neg()]
    wants = []
    for x in inputs:
        dense(p).hidden_states.copy_(x)
        wants.append(layer(p, form, torch.bfloat16))
        torch.cuda.synchronize()
    assert not same_bits(*wants)
    for i in beside_other_work(100):
        dense(p).hidden_states.copy_(inputs[i % 2])
        assert same_bits(layer(p, form, torch.bfloat16), wants[i % 2])
