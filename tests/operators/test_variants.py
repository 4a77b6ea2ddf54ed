"""Every kernel variant that this machine runs, forced in turn, on the cases of the default one."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from cases import EDGE_CASES, Spec, same_bits
from checks import assert_close_to_ref, naming
from quantized_cases import NATIVE, STEPS, dense, forms_of, is_w8a8, made

import moelora
from moelora import _C
from moelora.reference import fused_experts_lora_ref, naive_fused_experts_lora

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
# What a layer's launches choose from; others are for adapters alone.
ROLES = ("gemm_", "decode_", "sort_", "shrink_", "sum_")


def variants():
    """Every variant beside each form of weights that it multiplies."""
    for name in _C.variants():
        for form in forms_of(name) if name.startswith(ROLES) else ():
            marks = [pytest.mark.gpu] if "_sm" in name else []
            if name not in _C.usable():
                marks.append(pytest.mark.skip(reason="this machine cannot run it"))
            id = name if form == NATIVE else f"{name}-{form}"
            yield pytest.param((name, form), marks=marks, id=id)


@pytest.fixture(params=variants())
def forced(request):
    """(name, form, device, dtype) of a variant that every plan of its dtype now uses."""
    name, form = request.param
    _C.force_variant(name)
    # Hopper multiplies e4m3 x by its own instructions alone, whatever is forced.
    _C.limit_capability(80 if "_w8a8_" in name and name.endswith("_sm80") else 0)
    device = "cuda" if "_sm" in name else "cpu"
    yield name, form, device, DTYPES.get(name.split("_")[1], torch.bfloat16)
    _C.force_variant(None)
    _C.limit_capability(0)


@cache
def expectation(spec: Spec, form: str, device: str):
    """The problem on its device, the fp64 result, the naive result: the same for all variants."""
    problem = made(spec, form, spec.dtype)
    there = problem.to(device)
    naive = naive_fused_experts_lora(**(there if is_w8a8(there) else dense(there)).kwargs())
    return there, fused_experts_lora_ref(**problem.kwargs()), naive


def deepest(name: str, dtype: torch.dtype) -> Spec:
    """A layer that any variant serves, deeper and wider than its tiles."""
    tokens = 8 if name.startswith("decode") else 70
    return Spec(dtype=dtype, tokens=tokens, hidden=2112, inter=320, experts=1, ranks=(16, 200))


def test_layer(forced):
    name, form, device, dtype = forced
    specs = [replace(spec, dtype=dtype) for spec in EDGE_CASES.values()]
    specs.append(deepest(name, dtype))
    for spec in specs:
        with naming(spec):
            problem, ref, naive = expectation(spec, form, device)
            y = moelora.fused_experts_lora(**problem.kwargs())
            assert_close_to_ref(y, ref, naive, dtype, **(STEPS if is_w8a8(problem) else {}))
            # On a GPU the rows of some cases do not start at multiples of 16 bytes; they fall back.
            serves = spec is specs[-1] and name.startswith(ROLES[:2])
            if device == "cpu" or serves:
                assert spec.tokens == 0 or name in _C.last_plan()


def test_base_rows_keep_their_bits(forced):
    _, form, device, dtype = forced
    for tokens in (1, 3, 17, 130):
        spec = Spec(dtype=dtype, tokens=tokens, mix="half_base", hidden=200, inter=136)
        with naming(spec):
            problem = made(spec, form, dtype).to(device)
            mixed = moelora.fused_experts_lora(**problem.kwargs())
            again = moelora.fused_experts_lora(**problem.kwargs())
            base = moelora.fused_experts_lora(**problem.base().kwargs())
            assert same_bits(mixed, again)
            rows = dense(problem).token_lora_mapping == -1
            assert same_bits(mixed[rows], base[rows])
            assert tokens == 1 or not same_bits(mixed[~rows], base[~rows])


@pytest.mark.parametrize("ranks", [(8, 16, 40), (16, 16, 48)], ids=str)
def test_nonfinite_factors_stay_with_their_outputs(forced, ranks):
    """An infinity and a NaN in B: their rows of it, for the tokens that carry the adapter to the
    expert, and not one bit beside them. On a GPU there are several tiles to a CTA."""
    _, form, device, dtype = forced
    tokens, hidden, inter = (600, 520, 2312) if device == "cuda" else (24, 136, 72)
    spec = Spec(tokens, hidden=hidden, inter=inter, dtype=dtype, ranks=ranks, mix="half_base")
    problem = made(spec, form, dtype).to(device)
    p = dense(problem)
    hidden, inter = p.w2.shape[1:]
    adapter, expert = 1, 2
    carry = (p.token_lora_mapping == adapter)[:, None] & (p.topk_ids == expert)
    clean = moelora.fused_moe_lora_gemm(**problem.gemm_kwargs("w2"))
    layer = moelora.fused_experts_lora(**problem.kwargs())
    for value, row in ((float("inf"), 3), (float("nan"), hidden - 1)):
        hit = torch.zeros(*carry.shape, hidden, dtype=torch.bool, device=device)
        hit[..., row] = carry
        kept = p.w2_lora_b[adapter, expert, row, 5].clone()
        p.w2_lora_b[adapter, expert, row, 5] = value
        y = moelora.fused_moe_lora_gemm(**problem.gemm_kwargs("w2"))
        assert carry.any() and not y[hit].isfinite().any()
        assert same_bits(y[~hit], clean[~hit])
        y = moelora.fused_experts_lora(**problem.kwargs())
        assert not y[hit.any(dim=1)].isfinite().any()
        assert same_bits(y[~hit.any(dim=1)], layer[~hit.any(dim=1)])
        p.w2_lora_b[adapter, expert, row, 5] = kept

        up = p.w13_lora_b[1][adapter, expert, row % inter]
        kept = up[5].clone()
        up[5] = value
        y = moelora.fused_experts_lora(**problem.kwargs())
        assert not y[carry.any(dim=1)].isfinite().all(dim=1).any()
        assert same_bits(y[~carry.any(dim=1)], layer[~carry.any(dim=1)])
        up[5] = kept


def test_only_rows_of_this_build_are_listed():
    assert any(name.endswith("_scalar") for name in _C.usable())
    assert all("_sm" not in name for name in _C.variants()) or _C.WITH_CUDA
