"""The delta of adapters alone, from routing and mapping as they are, against the fp64 loop."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import EDGE_CASES, Problem, Spec, random_specs, same_bits
from checks import assert_close_to_ref, assert_unchanged, naming
from delta_cases import DELTAS, PLAIN, base_output, check_result, delta_kwargs

import moelora
from moelora import _C
from moelora.reference.delta import moe_lora_delta_ref

PROJECTIONS = ("w13", "w2")


def check_delta(p: Problem, projection: str, device: str, add: bool, weight: bool) -> None:
    there = p.to(device)
    options = {"mul_routed_weight": weight}
    delta, active = moe_lora_delta_ref(**delta_kwargs(p, projection, **options))
    naive, _ = moe_lora_delta_ref(**delta_kwargs(p, projection, **options), dtype=p.spec.dtype)
    inputs = {name: t.clone() for name, t in there.tensors().items()}
    out = base_output(there, delta.size(-1))
    before = out.tensor.clone() if add else torch.zeros_like(out.tensor)
    y = DELTAS[projection](
        **delta_kwargs(there, projection, **options), add_inputs=add, out=out.tensor
    )
    out.check("out")
    assert y.data_ptr() == out.tensor.data_ptr()
    assert_unchanged(inputs, there.tensors())
    check_result(y, before, delta, naive, active, add)
    if not add:
        fresh = DELTAS[projection](**delta_kwargs(there, projection, **options))
        assert same_bits(fresh, y)


@pytest.mark.parametrize("name", [n for n, s in EDGE_CASES.items() if s.mix != "absent"])
def test_edge_cases(name, device, dtype):
    p = replace(EDGE_CASES[name], dtype=dtype).build()
    for projection in PROJECTIONS:
        for add, weight in ((True, False), (False, True)):
            check_delta(p, projection, device, add, weight)


def test_random_problems(device, dtype):
    for spec in random_specs(80, first_seed=5000, dtypes=(dtype,)):
        if spec.mix == "absent":
            continue
        which = PROJECTIONS[spec.seed % 2]
        with naming(spec):
            check_delta(spec.build(), which, device, spec.seed % 3 > 0, spec.seed % 5 > 2)


@pytest.mark.parametrize("slices", [3, 4])
@pytest.mark.parametrize("rank", [1, 200, 512])
def test_slices_and_ranks(slices, rank, device, dtype):
    spec = Spec(
        tokens=7, inter=slices * 10, slices=slices, activation="relu2", ranks=(rank, 3), dtype=dtype
    )
    check_delta(spec.build(), "w13", device, True, False)


WIDTHS = {"qkv": (256, 64, 64), "short": (8, 72, 40, 8), "unaligned": (33, 1, 70)}


@pytest.mark.parametrize("wide", [False, True], ids=["rounded", "float32"])
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("tokens, rank", [(3, 16), (70, 24), (600, 64)])
def test_slices_of_unequal_widths(widths, tokens, rank, wide, device, dtype):
    """Query, key and value: a dense layer is one expert that all tokens choose."""
    spec = Spec(tokens=tokens, experts=1, top_k=1, hidden=96, inter=24, activation="relu2")
    spec = replace(spec, mix="all_different", ranks=(rank, 3, 8), dtype=dtype)
    p = replace(spec, slices=len(WIDTHS[widths])).build()
    make = torch.Generator().manual_seed(tokens)
    p.w13_lora_b = [
        (torch.randn(3, 1, n, rank, generator=make) / 8).to(dtype) for n in WIDTHS[widths]
    ]
    if wide:
        p.w13_lora_a, p.w13_lora_b = ([f.float() for f in s] for s in (p.w13_lora_a, p.w13_lora_b))
    check_delta(p, "w13", device, True, False)


def test_unequal_widths_add_up(device, dtype):
    p = Spec(tokens=4, inter=24, dtype=dtype).build().to(device)
    arguments = delta_kwargs(p, "w13")
    arguments["lora_b"] = [arguments["lora_b"][0], arguments["lora_b"][1][:, :, :23].clone()]
    out = torch.zeros(4, p.topk_ids.size(1), 48, dtype=dtype, device=device)
    with pytest.raises(ValueError, match="47 in all, expected the 48 of out"):
        moelora.moe_lora_gate_up_delta(**arguments, out=out)
    assert moelora.moe_lora_gate_up_delta(**arguments).size(2) == 47
    arguments["x"] = arguments["x"].clone().requires_grad_()
    delta = moelora.moe_lora_gate_up_delta(**arguments)
    with pytest.raises(RuntimeError, match="the columns of the first slice"):
        delta.sum().backward()


def test_down_takes_rows_by_token_and_choice(device, dtype):
    p = Spec(tokens=7, top_k=3, dtype=dtype).build().to(device)
    arguments = delta_kwargs(p, "w2")
    flat = moelora.moe_lora_down_delta(**arguments)
    arguments["x"] = arguments["x"].view(7, 3, -1)
    assert same_bits(moelora.moe_lora_down_delta(**arguments), flat)


def test_shared_factors_need_no_number_of_experts(device, dtype):
    """Wholly shared factors serve every expert id from 0 up; negative ids are skipped."""
    p = Spec(tokens=12, experts=6, sharing="outer", ranks=(4, 8), dtype=dtype).build()
    p.topk_ids[0, 0] = -1
    arguments = delta_kwargs(p, "w13", num_experts=None)
    arguments["lora_b"] = [b[:, 2:3] for b in p.w13_lora_b]
    delta, active = moe_lora_delta_ref(**arguments)
    naive, _ = moe_lora_delta_ref(**arguments, dtype=dtype)
    there = {
        k: [t.to(device) for t in v] if isinstance(v, list) else v for k, v in arguments.items()
    }
    there = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in there.items()}
    y = moelora.moe_lora_gate_up_delta(**there)
    assert active[1:].any()
    assert not active[0, 0]
    assert_close_to_ref(y, delta, naive, dtype)


def test_the_last_plan_is_the_deltas(device, dtype):
    p = replace(PLAIN, dtype=dtype).build().to(device)
    moelora.fused_experts_lora(**p.kwargs())
    assert "w13=" in _C.last_plan()
    moelora.moe_lora_gate_up_delta(**delta_kwargs(p, "w13"))
    assert _C.last_plan().startswith("delta=")
