"""Layers of a few tokens: odd sizes, limits, bits; on a GPU in one launch with weights in tiles."""

from dataclasses import replace

import pytest
import torch
from cases import ACTIVATIONS, ALPHAS, LIMITS, Problem, Spec, same_bits
from conftest import needs_gpu
from holding import hold_layer
from quantized_cases import FORMATS, NATIVE, Quantized, build, dense, each, kernels_of, made

import moelora
from moelora import _C

SHORT = {torch.bfloat16: "bf16", torch.float16: "f16"}
QUANTIZED = "quantized"  # one of FORMATS


every_format = each(NATIVE, *FORMATS)
native_and_not = each(NATIVE, QUANTIZED)

# Neither K nor I is a multiple of 16; three adapters, of which one is longer than a block of ranks.
SMALL = Spec(tokens=4, top_k=3, experts=6, hidden=72, inter=40, ranks=(8, 16, 100))

# Others than EDGE_CASES, which test_variants.py holds in the same launch.
SPECS = {
    "smallest_sizes": replace(SMALL, hidden=8, inter=8),
    "sixteens": replace(SMALL, hidden=80, inter=48),
    "deep": replace(SMALL, tokens=3, experts=3, hidden=2184, inter=1400, ranks=(16,)),
    "unstaged": replace(SMALL, tokens=8, experts=3, hidden=2184, inter=1400, ranks=(16,)),
    "many_units": replace(SMALL, tokens=8, top_k=8, experts=64),
    "one_token_everywhere": replace(SMALL, tokens=1, top_k=64, experts=64),
    "one_unit": replace(SMALL, tokens=8, top_k=1, routing="one_expert"),
    "some_rows_skipped": replace(SMALL, tokens=8, routing="out_of_range"),
    "all_rows_skipped": replace(SMALL, routing="all_skipped", bias=True),
    "experts_elsewhere": replace(SMALL, remote=9, tokens=8),
    "int64_ids": replace(SMALL, int64_ids=True, routing="out_of_range"),
    "ranks": replace(SMALL, tokens=8, ranks=(8, 16, 64, 100), mix="all_different"),
    "odd_ranks": replace(SMALL, tokens=8, ranks=(1, 3, 17, 33), mix="all_different"),
    "one_long_adapter": replace(SMALL, ranks=(256,), mix="one"),
    "disabled": replace(SMALL, tokens=8, mix="disabled"),
    "adapters_out_of_range": replace(SMALL, tokens=8, mix="out_of_range"),
    "strided": replace(SMALL, strided=16, bias=True),
}


@pytest.fixture(autouse=True)
def as_planned():
    yield
    _C.force_variant(None)


def any_form(form: str, number: int) -> str:
    """Of "quantized" a format, another one for the next number."""
    return list(FORMATS)[number % len(FORMATS)] if form == QUANTIZED else form


def one_launch(p: Problem | Quantized) -> str | None:
    """The variant that takes all of such a layer; plans without it do so where it is fastest."""
    if not isinstance(p, Quantized):
        return None
    kernel = kernels_of(next(form for form, f in FORMATS.items() if f.name == p.w13.format))
    return f"decode_{SHORT[dense(p).spec.dtype]}_{kernel}_sm80"


def run(p: Problem | Quantized, device: str, **kwargs) -> torch.Tensor:
    return forced(p, device)(**p.to(device).kwargs(), **kwargs)


def forced(p: Problem | Quantized, device: str):
    """The operator; on a GPU by the launch that takes all of the layer."""

    def layer(**arguments) -> torch.Tensor:
        if device == "cuda":
            _C.force_variant(one_launch(p))
        y = moelora.fused_experts_lora(**arguments)
        assert device == "cpu" or ("decode_" in _C.last_plan()) == isinstance(p, Quantized)
        return y

    return layer


def check(p: Problem | Quantized, device: str) -> None:
    hold_layer(p, device, forced(p, device))


@native_and_not
@pytest.mark.parametrize("name", SPECS)
def test_edge_cases(name, form, device, dtype):
    check(made(SPECS[name], any_form(form, list(SPECS).index(name)), dtype), device)


@every_format
@pytest.mark.parametrize("tokens", range(1, 9))
def test_every_number_of_tokens(tokens, form, device, dtype):
    for seed in range(3 if form == NATIVE else 1):
        check(made(replace(SMALL, tokens=tokens, seed=seed), form, dtype), device)


@each(*FORMATS)
@pytest.mark.parametrize("hidden, inter", [(64, 1088), (1600, 32), (1184, 992), (2880, 96)])
def test_depths_of_quantized_weights(hidden, inter, form, device, dtype):
    """Spans of the warps that are longer than a pipeline and that are empty; tokens that fit shared
    memory and that do not; depth that ends within a tile."""
    spec = replace(SMALL, hidden=hidden, inter=inter, top_k=2, experts=3, ranks=(16, 8))
    check(made(spec, form, dtype), device)


NUMBERS = [{"activation": a, "slices": s} for a in ACTIVATIONS for s in (1, 2)]
NUMBERS.remove({"activation": "relu2", "slices": 2})  # it is not gated
LIMITED = [*((a, None) for a in LIMITS), *((a, 0.5) for a in ALPHAS)]
NUMBERS += [{"activation": a, "alpha": n, "limit": x} for a, n in LIMITED for x in (0.25, 1e30)]


@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
@pytest.mark.parametrize("inter", [8, 40, 136])
@native_and_not
def test_activations(numbers, inter, form, device, dtype):
    spec = replace(SMALL, inter=inter, bias=True, **numbers)
    check(made(spec, any_form(form, inter // 8 + spec.slices), dtype), device)


def unaligned(t: torch.Tensor) -> torch.Tensor:
    """The same values in rows that start at odd elements."""
    rows = torch.full((*t.shape[:-1], t.size(-1) + 3), float("nan"), dtype=t.dtype)
    rows[..., 1:-2] = t
    return rows[..., 1:-2]


@native_and_not
def test_factors_need_no_alignment(form, device, dtype):
    p = made(SMALL, any_form(form, 1), dtype)
    aligned, d = run(p, device), dense(p)
    d.w13_lora_a, d.w13_lora_b = ([unaligned(t) for t in f] for f in (d.w13_lora_a, d.w13_lora_b))
    d.w2_lora_a, d.w2_lora_b = unaligned(d.w2_lora_a), unaligned(d.w2_lora_b)
    assert same_bits(run(p, device), aligned)


@pytest.mark.parametrize("projection", ["w13", "w2"])
@native_and_not
def test_adapters_for_one_projection_only(projection, form, device, dtype):
    p = made(replace(SMALL, mix="all_different"), any_form(form, 2), dtype)
    setattr(dense(p), f"{projection}_lora_a", None)
    setattr(dense(p), f"{projection}_lora_b", None)
    check(p, device)


@every_format
@pytest.mark.parametrize("tokens", [2, 4, 8])
def test_base_tokens_keep_their_bits(tokens, form, device, dtype):
    """Whatever the adapters of the others hold."""
    p = made(replace(SMALL, tokens=tokens, ranks=(8, 16), mix="half_base"), form, dtype)
    dense(p).w13_lora_a[0][0] = float("inf")
    dense(p).w13_lora_b[1][1] = float("nan")
    dense(p).w2_lora_b[:] = float("nan")
    mixed, base = run(p, device), run(p.base(), device)
    is_base = dense(p).token_lora_mapping.to(device) < 0
    assert same_bits(mixed[is_base], base[is_base])
    assert mixed[~is_base].isnan().any(dim=1).all()


@every_format
def test_hostile_neighbors_stay_with_their_tokens(form, device, dtype):
    """A token sees neither the other tokens' inputs nor experts and adapters of theirs."""
    p = made(replace(SMALL, tokens=2, top_k=2, ranks=(8, 16), mix="all_different"), form, dtype)
    d = dense(p)
    d.topk_ids[:] = torch.tensor([[0, 1], [0, 2]])
    expected = run(p, device)
    d.hidden_states[1] = float("nan")
    if form == NATIVE:
        d.w13[2], d.w2[2] = float("nan"), float("inf")
    d.w13_lora_a[0][1], d.w2_lora_b[1] = float("nan"), float("inf")
    y = run(p, device)
    assert same_bits(y[0], expected[0])
    assert y[1].isnan().all()


@native_and_not
def test_output_may_be_the_input(form, device, dtype):
    p = made(replace(SMALL, hidden=520), any_form(form, 3), dtype).to(device)
    expected, x = run(p, device), dense(p).hidden_states
    run(p, device, out=x)
    assert same_bits(x, expected)


@each("int4_g32_zp")
@pytest.mark.parametrize("tokens", [4, 9], ids=["one launch", "several"])
@pytest.mark.parametrize("which", ["w13", "w2"])
def test_tiles_may_lie_apart(which, tokens, form, device, dtype):
    """Experts of a larger stack, and rows of tiles with a gap behind them."""
    p = made(replace(SMALL, tokens=tokens, hidden=160, inter=96), form, dtype).to(device)
    layer = forced(p, device) if tokens == 4 else moelora.fused_experts_lora
    expected, weights = layer(**p.kwargs()), getattr(p, which)
    experts, rows, depth, size = weights.data.shape
    wide = weights.data.new_full((2 * experts, rows, depth + 1, size + 16), 255)
    apart = wide[::2, :, :-1, :-16]
    apart.copy_(weights.data)
    moved = replace(p, **{which: replace(weights, data=apart)})
    assert same_bits(layer(**moved.kwargs()), expected)


@pytest.mark.gpu
@needs_gpu
def test_formats_of_two_kernels_take_several_launches():
    spec = replace(SMALL, tokens=1, hidden=128, inter=64)
    for first, second in (("mxfp4", "int4_g32"), ("int4_channel", "mxfp4")):
        p = build(spec, FORMATS[first], torch.bfloat16, FORMATS[second]).to("cuda")
        _C.force_variant(one_launch(p))
        moelora.fused_experts_lora(**p.kwargs())
        assert "decode_" not in _C.last_plan()
