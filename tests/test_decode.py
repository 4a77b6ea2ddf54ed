"""Layers of a few tokens, which a GPU runs in one launch: its limits, its odd sizes, its bits."""

from dataclasses import replace

import pytest
import torch
from cases import ACTIVATIONS, OAI, Problem, Spec, same_bits
from checks import assert_close_to_ref, guarded_empty

import moelora
from moelora import _C
from moelora.reference import fused_experts_lora_ref, naive_fused_experts_lora

SHORT = {torch.bfloat16: "bf16", torch.float16: "f16"}
# Neither K nor I is a multiple of 16; three adapters, of which one is longer than a block of ranks.
SMALL = Spec(tokens=4, top_k=3, experts=6, hidden=72, inter=40, ranks=(8, 16, 100))

SPECS = {
    "one_row": replace(SMALL, tokens=1, top_k=1),
    "smallest_sizes": replace(SMALL, hidden=8, inter=8),
    "sixteens": replace(SMALL, hidden=80, inter=48),
    "deep": replace(SMALL, tokens=3, hidden=2184, inter=1400, ranks=(16,)),
    "unstaged": replace(SMALL, tokens=8, hidden=2184, inter=1400, ranks=(16,)),
    "many_units": replace(SMALL, tokens=8, top_k=8, experts=64),
    "one_token_everywhere": replace(SMALL, tokens=1, top_k=64, experts=64),
    "one_unit": replace(SMALL, tokens=8, top_k=1, routing="one_expert"),
    "expert_chosen_again": replace(SMALL, tokens=8, top_k=3, routing="one_expert"),
    "some_rows_skipped": replace(SMALL, tokens=8, routing="out_of_range"),
    "all_rows_skipped": replace(SMALL, routing="all_skipped", bias=True),
    "experts_elsewhere": replace(SMALL, remote=9, tokens=8),
    "int64_ids": replace(SMALL, int64_ids=True, routing="out_of_range"),
    "biases": replace(SMALL, bias=True),
    "ranks": replace(SMALL, tokens=8, ranks=(8, 16, 64, 100), mix="all_different"),
    "odd_ranks": replace(SMALL, tokens=8, ranks=(1, 3, 17, 33), mix="all_different"),
    "one_long_adapter": replace(SMALL, ranks=(256,), mix="one"),
    "ranks_absent": replace(SMALL, ranks=(24, 24), pass_ranks=False),
    "spare_rank": replace(SMALL, spare_rank=12),
    "rank_zero": replace(SMALL, ranks=(0, 8), mix="all_different"),
    "scalings_absent": replace(SMALL, scalings=False),
    "disabled": replace(SMALL, tokens=8, mix="disabled"),
    "adapters_out_of_range": replace(SMALL, tokens=8, mix="out_of_range"),
    "no_adapter": replace(SMALL, mix="none"),
    "no_lora_arguments": replace(SMALL, mix="absent"),
    "one_slice": replace(SMALL, slices=1),
    "shared_outer": replace(SMALL, sharing="outer"),
    "stride_zero_experts": replace(SMALL, sharing="expanded"),
    "strided": replace(SMALL, strided=16, bias=True),
}


@pytest.fixture(autouse=True)
def in_one_launch(device_and_dtype):
    """Plans take the one launch as far as it can, beyond where it is the fastest."""
    device, dtype = device_and_dtype
    if device == "cuda":
        _C.force_variant(f"decode_{SHORT[dtype]}_sm80")
    yield
    _C.force_variant(None)


def run(p: Problem, device: str, **kwargs) -> torch.Tensor:
    y = moelora.fused_experts_lora(**p.to(device).kwargs(), **kwargs)
    assert device == "cpu" or "decode_" in _C.last_plan()
    return y


def check(p: Problem, device: str) -> None:
    ref = fused_experts_lora_ref(**p.kwargs())
    out = guarded_empty(ref.shape, p.spec.dtype, device)
    y = run(p, device, out=out.tensor)
    out.check("out")
    naive = naive_fused_experts_lora(**p.to(device).kwargs())
    assert_close_to_ref(y, ref, naive, p.spec.dtype)


@pytest.mark.parametrize("name", SPECS)
def test_edge_cases(name, device_and_dtype):
    device, dtype = device_and_dtype
    check(replace(SPECS[name], dtype=dtype).build(), device)


@pytest.mark.parametrize("tokens", range(1, 9))
def test_every_number_of_tokens(tokens, device_and_dtype):
    device, dtype = device_and_dtype
    for seed in range(3):
        check(replace(SMALL, tokens=tokens, seed=seed, dtype=dtype).build(), device)


@pytest.mark.parametrize(
    ("activation", "slices"),
    # relu2 is not gated: it has one slice
    [(a, slices) for a in ACTIVATIONS for slices in (1, 2) if (a, slices) != ("relu2", 2)],
)
@pytest.mark.parametrize("inter", [8, 40, 136])
def test_activations(activation, slices, inter, device_and_dtype):
    device, dtype = device_and_dtype
    spec = replace(SMALL, activation=activation, slices=slices, inter=inter, bias=True)
    check(replace(spec, dtype=dtype).build(), device)


@pytest.mark.parametrize("limit", [0.25, 1e30])
@pytest.mark.parametrize(
    ("activation", "alpha"), [("silu", None), *((a, alpha) for a in OAI for alpha in (None, 0.5))]
)
def test_alphas_and_limits(activation, alpha, limit, device_and_dtype):
    device, dtype = device_and_dtype
    spec = replace(SMALL, activation=activation, alpha=alpha, limit=limit, bias=True)
    check(replace(spec, dtype=dtype).build(), device)


def unaligned(t: torch.Tensor) -> torch.Tensor:
    """The same values in rows that start at odd elements."""
    rows = torch.full((*t.shape[:-1], t.size(-1) + 3), float("nan"), dtype=t.dtype)
    rows[..., 1:-2] = t
    return rows[..., 1:-2]


def test_factors_need_no_alignment(device_and_dtype):
    device, dtype = device_and_dtype
    p = replace(SMALL, dtype=dtype).build()
    aligned = run(p, device)
    p.w13_lora_a, p.w13_lora_b = ([unaligned(t) for t in f] for f in (p.w13_lora_a, p.w13_lora_b))
    p.w2_lora_a, p.w2_lora_b = unaligned(p.w2_lora_a), unaligned(p.w2_lora_b)
    assert same_bits(run(p, device), aligned)


@pytest.mark.parametrize("projection", ["w13", "w2"])
def test_adapters_for_one_projection_only(projection, device_and_dtype):
    device, dtype = device_and_dtype
    p = replace(SMALL, mix="all_different", dtype=dtype).build()
    check(replace(p, **{f"{projection}_lora_a": None, f"{projection}_lora_b": None}), device)


@pytest.mark.parametrize("tokens", [2, 4, 8])
def test_base_tokens_keep_their_bits(tokens, device_and_dtype):
    """Whatever the adapters of the others hold."""
    device, dtype = device_and_dtype
    p = replace(SMALL, tokens=tokens, ranks=(8, 16), mix="half_base", dtype=dtype).build()
    p.w13_lora_a[0][0] = float("inf")
    p.w13_lora_b[1][1] = float("nan")
    p.w2_lora_b[:] = float("nan")
    mixed, base = run(p, device), run(p.base(), device)
    is_base = p.token_lora_mapping.to(device) < 0
    assert same_bits(mixed[is_base], base[is_base])
    assert mixed[~is_base].isnan().any(dim=1).all()


def test_hostile_neighbours_stay_with_their_tokens(device_and_dtype):
    """A token sees neither the other tokens' inputs nor experts and adapters of theirs."""
    device, dtype = device_and_dtype
    p = replace(SMALL, tokens=2, top_k=2, ranks=(8, 16), mix="all_different", dtype=dtype).build()
    p.topk_ids[:] = torch.tensor([[0, 1], [0, 2]])
    expected = run(p, device)
    p.hidden_states[1] = float("nan")
    p.w13[2], p.w2[2] = float("nan"), float("inf")
    p.w13_lora_a[0][1], p.w2_lora_b[1] = float("nan"), float("inf")
    y = run(p, device)
    assert same_bits(y[0], expected[0])
    assert y[1].isnan().all()


def test_same_inputs_same_bits(device_and_dtype):
    device, dtype = device_and_dtype
    p = replace(SMALL, tokens=8, hidden=520, inter=264, dtype=dtype).build()
    first = run(p, device)
    assert all(same_bits(run(p, device), first) for _ in range(5))


def test_output_may_be_the_input(device_and_dtype):
    device, dtype = device_and_dtype
    p = replace(SMALL, hidden=520, dtype=dtype).build().to(device)
    expected = moelora.fused_experts_lora(**p.kwargs())
    moelora.fused_experts_lora(**p.kwargs(), out=p.hidden_states)
    assert same_bits(p.hidden_states, expected)
