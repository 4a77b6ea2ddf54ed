"""SGLang's adapter MLP, staged and all at once, against the fp64 loop."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import EDGE_CASES, Problem, Spec, random_specs, same_bits
from checks import assert_close_to_ref, assert_unchanged, guarded_empty, naming

import moelora
from moelora.reference import activate
from moelora.reference.delta import (
    active_rows,
    expand_ref,
    rows_of_routing,
    run_moe_lora_ref,
    shrink_ref,
)

SPEC = Spec(tokens=9, slices=1, ranks=(8, 3, 16))
NAMES = (
    "plain one_token empty_batch odd_sizes rank_zero mixed_ranks spare_rank many_rows half_base "
    "many_experts same_expert_chosen_twice disabled_adapters int64_ids no_token_has_an_adapter "
    "shared_outer stride_zero_experts strided scalings_absent ranks_absent"
).split()
SPECS = {
    "large_ranks": replace(SPEC, ranks=(512, 17), hidden=96),
    "out_of_range": replace(SPEC, mix="out_of_range", routing="out_of_range", tokens=24),
    "all_skipped": replace(SPEC, routing="all_skipped"),
}
SPECS |= {name: replace(EDGE_CASES[name], slices=1) for name in NAMES}


def info(p: Problem) -> moelora.MoELoRABatchInfo:
    ranks, scalings = p.lora_ranks, p.lora_scalings
    return moelora.MoELoRABatchInfo(p.token_lora_mapping, ranks, scalings, p.adapter_enabled)


def buffers(p: Problem) -> tuple:
    return (p.w13_lora_a, p.w13_lora_b, p.w2_lora_a, p.w2_lora_b)


def reference(p: Problem, dtype=torch.float64):
    return run_moe_lora_ref(
        *(p.hidden_states, p.topk_ids, p.topk_weights),
        *(p.token_lora_mapping, p.lora_ranks, p.lora_scalings, *buffers(p)),
        adapter_enabled=p.adapter_enabled,
        dtype=dtype,
    )


def base_output(p: Problem):
    values = torch.randn(p.hidden_states.shape, generator=torch.Generator().manual_seed(3))
    values[:, ::5] = -0.0
    out = guarded_empty(values.shape, p.spec.dtype, p.hidden_states.device)
    out.tensor.copy_(values)
    return out


def staged(x, topk_ids, topk_weights, info, a13, b13, a2, b2, output):
    """`run_moe_lora` by its three stages."""
    who = (info.weight_indices, info.lora_ranks)
    experts = max(factor.size(1) for factor in (a13, b13, a2, b2))
    options = {"adapter_enabled": info.adapter_enabled, "num_experts": experts}
    xa = x.new_empty((*topk_ids.shape, a13.size(-2)))
    h = x.new_empty((*topk_ids.shape, b13.size(-2) // 2))
    moelora.moe_lora_a(x, topk_ids, a13, *who, out=xa, **options)
    moelora.moe_lora_gate_up_b(xa, topk_ids, b13, *who, out=h, **options)
    rows = h, topk_ids, topk_weights
    return moelora.moe_lora_down_combine(*rows, a2, b2, *who, info.scalings, output, **options)


RUN = {"staged": staged, "fused": moelora.run_moe_lora}


def check(p: Problem, device: str, how: str) -> None:
    there = p.to(device)
    delta, active = reference(p)
    naive, _ = reference(p, p.spec.dtype)
    inputs = {name: t.clone() for name, t in there.tensors().items()}
    out = base_output(there)
    before = out.tensor.clone().cpu()
    arguments = (there.hidden_states, there.topk_ids, there.topk_weights, info(there))
    y = RUN[how](*arguments, *buffers(there), out.tensor)
    assert y is out.tensor
    out.check("output")
    assert_unchanged(inputs, there.tensors())
    y = y.cpu()
    assert same_bits(y[~active], before[~active]), "a token without an adapter has changed"
    ref = (before.double() + delta)[active]
    assert_close_to_ref(y[active], ref, (before + naive)[active], p.spec.dtype)


@pytest.mark.parametrize("how", RUN)
@pytest.mark.parametrize("name", SPECS)
def test_run_moe_lora(name, how, device_and_dtype):
    device, dtype = device_and_dtype
    check(replace(SPECS[name], dtype=dtype).build(), device, how)


def test_random_problems(device_and_dtype):
    device, dtype = device_and_dtype
    for spec in random_specs(60, first_seed=6000, dtypes=(dtype,)):
        if spec.mix == "absent" or spec.activation == "relu2" or spec.remote:
            continue
        with naming(spec):
            check(replace(spec, slices=1).build(), device, list(RUN)[spec.seed % 2])


@pytest.mark.parametrize("how", RUN)
def test_halves_of_different_rank(how, device_and_dtype):
    device, dtype = device_and_dtype
    spec = replace(SPEC, dtype=dtype, ranks=(8, 8), pass_ranks=False)
    p, other = spec.build(), replace(spec, ranks=(24, 24), seed=1).build()
    check(replace(p, w2_lora_a=other.w2_lora_a, w2_lora_b=other.w2_lora_b), device, how)


@pytest.mark.parametrize("name", ["plain", "odd_sizes", "out_of_range", "strided", "spare_rank"])
def test_stages(name, device_and_dtype):
    """Each stage by itself: new tensors are 0, given ones untouched where nothing is active."""
    device, dtype = device_and_dtype
    p = replace(SPECS[name], dtype=dtype).build()
    there = p.to(device)
    top_k = p.spec.top_k
    rows = rows_of_routing(
        *(p.topk_ids, p.token_lora_mapping, p.spec.experts, len(p.spec.ranks)),
        lora_ranks=p.lora_ranks,
    )
    active = active_rows(rows, top_k)
    adapters = (there.token_lora_mapping, there.lora_ranks)

    def check_stage(stage, given, ref, naive):
        y = stage(*given, *adapters).cpu()
        assert not y[~active].any()
        assert_close_to_ref(y, ref, naive, dtype)
        out = guarded_empty(ref.shape, dtype, device)
        out.tensor.fill_(7.0)
        stage(*given, *adapters, out=out.tensor)
        out.check("out")
        assert same_bits(out.tensor.cpu()[active], y[active])
        assert (out.tensor.cpu()[~active] == 7.0).all()

    ranks = {"lora_ranks": p.lora_ranks}
    h, h_naive = (
        shrink_ref(p.hidden_states, p.w13_lora_a, rows, top_k, **ranks, dtype=d)[0]
        for d in (torch.float64, dtype)
    )
    given = (there.hidden_states, there.topk_ids, there.w13_lora_a)
    check_stage(moelora.moe_lora_a, given, h, h_naive)

    h = h.to(dtype)
    z, z_naive = (
        activate(expand_ref(h[None], p.w13_lora_b, rows, **ranks, dtype=d), "silu")
        for d in (torch.float64, dtype)
    )
    given = (h.to(device), there.topk_ids, there.w13_lora_b)
    check_stage(moelora.moe_lora_gate_up_b, given, z, z_naive)


def test_not_the_exact_layer():
    """The worked numbers of the module: every size 1, x = 1, gate 2, up 1, down 1."""

    def numbers(*values, shape):
        return torch.tensor(values).view(shape)

    one = torch.ones(1, 1)
    ids, zero = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    a13, b13 = numbers(1.0, shape=(1, 1, 1, 1)), numbers(1.0, 1.0, shape=(1, 1, 2, 1))
    layer = {
        "hidden_states": one,
        "w13": numbers(2.0, 1.0, shape=(1, 2, 1)),
        "w2": numbers(1.0, shape=(1, 1, 1)),
        "topk_weights": one,
        "topk_ids": ids,
    }
    base = moelora.fused_experts_lora(**layer)
    assert abs(base.item() - 1.762) < 1e-3
    batch = moelora.MoELoRABatchInfo(zero, zero + 1, torch.ones(1))
    for down, exact, beside in ((0.0, 5.715, 1.762), (1.0, 11.43, 2.493)):
        a2, b2 = numbers(down, shape=(1, 1, 1, 1)), numbers(1.0, shape=(1, 1, 1, 1))
        factors = {"w13_lora_a": a13, "w13_lora_b": b13, "w2_lora_a": a2, "w2_lora_b": b2}
        y = moelora.fused_experts_lora(**layer, token_lora_mapping=zero, **factors)
        assert abs(y.item() - exact) < 2e-3
        y = moelora.run_moe_lora(one, ids, one, batch, a13, b13, a2, b2, base.clone())
        assert abs(y.item() - beside) < 1e-3
