"""Promises about bits: base rows are not touched by adapters, and a call repeats exactly."""

from dataclasses import replace

import pytest
import torch
from cases import Spec, random_specs, same_bits
from checks import naming
from holding import base_rows, hold_base_rows
from quantized_cases import NATIVE, dense, each, made

import moelora

SPECS = {  # larger than those that are drawn
    "one_expert": Spec(tokens=70, top_k=1, experts=2, routing="one_expert", mix="half_base"),
    "disabled": Spec(tokens=20, ranks=(8, 4, 16), mix="disabled", hidden=128, inter=96),
    "large_rank": Spec(tokens=24, ranks=(256, 1), mix="many", hidden=256, inter=128),
    "tiles": Spec(tokens=200, hidden=320, inter=192, ranks=(16,) * 8, mix="half_base"),
}


@pytest.mark.parametrize("name", SPECS)
def test_base_rows_have_the_bits_of_the_base_layer(name, device, dtype):
    p = replace(SPECS[name], dtype=dtype).build()
    rows = base_rows(p)
    assert rows.any()
    assert not rows.all()
    hold_base_rows(p, device)


def test_base_rows_of_random_problems(device, dtype):
    for spec in random_specs(100, first_seed=2000, dtypes=(dtype,)):
        if spec.mix == "absent":
            continue
        with naming(spec):
            hold_base_rows(spec.build(), device)


@each(NATIVE, "mxfp4")
def test_hostile_factors_do_not_reach_base_rows(form, device, dtype):
    """Infinite and NaN factors of the adapters in a batch stay with the rows that carry them."""
    p = made(Spec(tokens=24, mix="half_base", ranks=(8, 8)), form, dtype)
    dense(p).w13_lora_a[0][0] = float("inf")
    dense(p).w13_lora_b[1][1] = float("nan")
    dense(p).w2_lora_a[:] = float("nan")
    hold_base_rows(p, device)


@pytest.mark.parametrize(
    ("form", "dtype"),
    [(NATIVE, torch.float32), (NATIVE, torch.bfloat16), ("mxfp4", torch.bfloat16)],
)
def test_number_of_threads_does_not_change_bits(form, dtype):
    p = made(SPECS["tiles"], form, dtype)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(moelora.fused_experts_lora(**p.kwargs()))
    finally:
        torch.set_num_threads(threads)
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])
