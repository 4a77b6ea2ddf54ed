"""CUDA graphs and streams: one capture serves any routing and any adapters; calls do not meet."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import Problem, Spec, same_bits
from checks import assert_close_to_ref, naming
from conftest import CUDA_DTYPES, needs_gpu
from quantized_cases import (
    NATIVE,
    Quantized,
    check_layer,
    dense,
    has_four_bits,
    is_w8a8,
    made,
    of_each_kernel,
    with_dense,
)
from streams import Captured, busy_stream

import moelora
from moelora import _C
from moelora.reference import fused_moe_lora_gemm_ref, naive_fused_moe_lora_gemm

pytestmark = [pytest.mark.gpu, needs_gpu]

FORMS = of_each_kernel()
every_form = pytest.mark.parametrize("form", FORMS)
SLOTS, RANK = 4, 32
# What a serving engine overwrites between two replays.
CHANGING = (
    *("hidden_states", "rows", "topk_ids", "topk_weights"),
    *("token_lora_mapping", "lora_ranks", "lora_scalings", "adapter_enabled"),
)


def layer_problem(
    tokens: int, dtype: torch.dtype, top_k: int = 2, form: str = NATIVE
) -> Problem | Quantized:
    """All factors are finite, so that any slot may later have any rank and be on or off."""
    sizes = {"experts": 8, "hidden": 192, "inter": 136}
    p = made(Spec(tokens, top_k, **sizes, ranks=(RANK,) * SLOTS, mix="many"), form, dtype)
    every = torch.ones(SLOTS, dtype=torch.bool)
    return with_dense(p, replace(dense(p), adapter_enabled=every))


def variations(p: Problem):
    """(name, problem): the same tensors with other contents, each change on top of the last."""
    tokens, top_k = p.topk_ids.shape
    make = torch.Generator().manual_seed(99)

    def draw(low, high, *shape):
        return torch.randint(low, high, shape, generator=make, dtype=torch.int32)

    def change(name, **values):
        nonlocal p
        p = replace(p, **values)
        return name, p

    yield "as captured", p
    yield change(
        "other routing",
        topk_ids=torch.rand(tokens, 8, generator=make).topk(top_k).indices.int(),
        topk_weights=torch.rand(tokens, top_k, generator=make),
    )
    yield change("other tokens", hidden_states=torch.randn(p.hidden_states.shape).to(p.w13.dtype))
    yield change("one expert", topk_ids=torch.full_like(p.topk_ids, 3))
    yield change("ids out of range", topk_ids=draw(-2, 11, tokens, top_k))
    yield change("no expert of ours", topk_ids=torch.full_like(p.topk_ids, -1))
    yield change("routing is back", topk_ids=draw(0, 8, tokens, top_k))
    yield change("all slots", token_lora_mapping=torch.arange(tokens, dtype=torch.int32) % SLOTS)
    yield change("one adapter", token_lora_mapping=draw(-1, 1, tokens))
    yield change("no adapter", token_lora_mapping=torch.full((tokens,), -1, dtype=torch.int32))
    yield change("adapters out of range", token_lora_mapping=draw(-3, SLOTS + 3, tokens))
    yield change(
        "other ranks and scalings",
        lora_ranks=torch.tensor([0, 1, 17, RANK], dtype=torch.int32),
        lora_scalings=torch.tensor([1.0, 2.0, 0.25, -1.0]),
    )
    yield change("two slots off", adapter_enabled=torch.tensor([True, False, True, False]))
    yield change("all slots off", adapter_enabled=torch.zeros(SLOTS, dtype=torch.bool))
    yield change("all slots on", adapter_enabled=torch.ones(SLOTS, dtype=torch.bool))


def overwrite(there: Problem, p: Problem) -> None:
    for name in CHANGING:
        getattr(there, name).copy_(getattr(p, name))


def check_projection(y: torch.Tensor, p: Problem | Quantized, projection: str) -> None:
    like = p if is_w8a8(p) else dense(p)
    naive = naive_fused_moe_lora_gemm(**like.gemm_kwargs(projection))
    ref = fused_moe_lora_gemm_ref(**p.gemm_kwargs(projection))
    assert_close_to_ref(y, ref, naive, y.dtype)


def check_replays(first: Problem | Quantized, call, check) -> None:
    """One capture serves every variation: `check(y, problem)`, and the bits of an eager call."""
    there = first.to("cuda")
    captured = Captured(lambda: call(there))
    for name, values in variations(dense(first)):
        overwrite(dense(there), values)
        p = with_dense(first, values)
        y = captured.replay()
        assert same_bits(y, call(p.to("cuda"))), name
        with naming(name):
            check(y, p)


@every_form
@pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 4, 7, 33, 300])
def test_layer(tokens, dtype, form):
    def call(p):
        y = moelora.fused_experts_lora(**p.kwargs())
        if tokens == 1:
            hopper = torch.cuda.get_device_capability() == (9, 0)
            assert ("decode_" in _C.last_plan()) == (has_four_bits(form) and not hopper)
        return y

    check_replays(layer_problem(tokens, dtype, form=form), call, check_layer)


@every_form
@pytest.mark.parametrize("projection", ["w13", "w2"])
@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_projection(tokens, projection, form):
    check_replays(
        layer_problem(tokens, torch.bfloat16, form=form),
        lambda p: moelora.fused_moe_lora_gemm(**p.gemm_kwargs(projection)),
        lambda y, p: check_projection(y, p, projection),
    )


# One launch, two launches, also with the most keys, and two sorts (more pairs than shared memory
# counts), each with uniform routing, one expert, and nothing to do.
@pytest.mark.parametrize("mode", ["base", "uniform", "segmented", "sorting"])
@pytest.mark.parametrize(
    "tokens, top_k, experts, slots",
    [(40, 2, 8, 3), (3000, 8, 128, 8), (3000, 8, 128, 64), (900, 4, 512, 40)],
)
def test_alignment(tokens, top_k, experts, slots, mode):
    make = torch.Generator().manual_seed(5)

    def run(ids, weights, mapping, enabled, zeroed):
        if mode == "base":
            return moelora.moe_align_block_size(ids, 16, experts)
        if mode == "sorting":
            return moelora.moe_sorting(ids, weights, experts, 16, out_to_zero=zeroed)
        return moelora.moe_lora_align_block_size(
            ids, mapping, experts, 16, slots, mode=mode, adapter_enabled=enabled
        )

    def draw(routing, mix):
        low, high = {"any": (-1, experts + 1), "one": (5, 6), "none": (-1, 0)}[routing]
        carried = {"any": (-1, slots + 1), "one": (slots - 1, slots), "none": (-1, 0)}[mix]
        return (
            torch.randint(low, high, (tokens, top_k), generator=make, dtype=torch.int32),
            torch.rand(tokens, top_k, generator=make),
            torch.randint(*carried, (tokens,), generator=make, dtype=torch.int32),
            torch.rand(slots, generator=make) < 0.8,
            torch.ones(tokens, 33),
        )

    there = tuple(t.cuda() for t in draw("any", "any"))
    captured = Captured(lambda: run(*there))
    replays = [("any", "any"), ("any", "none"), ("one", "any"), ("none", "one"), ("any", "any")]
    for routing, mix in replays:
        inputs = draw(routing, mix)
        for mine, new in zip(there, inputs, strict=True):
            mine.copy_(new)
        got = captured.replay()
        for i, (g, e) in enumerate(zip(got, run(*inputs), strict=True)):
            assert torch.equal(g.cpu(), e), f"output {i}, routing {routing}, adapters {mix}"
        assert mode != "sorting" or not there[-1].any()


def test_two_streams_at_once():
    """Results of calls that overlap on the GPU are those of the same calls one by one."""
    sizes = [(260, 2, NATIVE), (61, 4, NATIVE), (4, 2, NATIVE), (1, 4, NATIVE)]
    sizes += [(1, 4, "mxfp4"), (61, 4, "fp8_block_w8a8")]
    problems = [layer_problem(t, torch.bfloat16, k, form).to("cuda") for t, k, form in sizes]
    sorts = [dense(p).align_kwargs(16) for p in problems]
    alone = [moelora.fused_experts_lora(**p.kwargs()) for p in problems]
    sorted_alone = [moelora.moe_lora_align_block_size(**arguments) for arguments in sorts]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    together = []
    for _ in range(30):
        for i, (stream, p) in enumerate(zip(streams, problems, strict=True)):
            with torch.cuda.stream(stream):
                y = moelora.fused_experts_lora(**p.kwargs())
                together.append((i, y, moelora.moe_lora_align_block_size(**sorts[i])))
    torch.cuda.synchronize()
    for i, y, aligned in together:
        assert same_bits(y, alone[i])
        assert all(torch.equal(a, b) for a, b in zip(aligned, sorted_alone[i], strict=True))


def test_work_is_queued_on_the_current_stream():
    """Calls on a stream of their own finish while the default stream is still busy."""
    p = layer_problem(33, torch.bfloat16).to("cuda")
    expected = moelora.fused_experts_lora(**p.kwargs())
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        moelora.fused_experts_lora(**p.kwargs())  # its memory is allocated now
    with busy_stream():
        with torch.cuda.stream(side):
            y = moelora.fused_experts_lora(**p.kwargs())
            moelora.moe_align_block_size(p.topk_ids, 16, 8)
        side.synchronize()
    assert same_bits(y, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
@pytest.mark.parametrize("tokens", [300, 1, 24])
def test_a_call_runs_on_the_device_of_its_tensors(tokens):
    """Whichever is current, and it stays current. The other one comes first: what is found out
    about a kernel then is about that one. Of a C caller's device_index: make emulate."""
    p = layer_problem(tokens, torch.bfloat16)
    w = torch.randn(2, 64, 128).bfloat16()
    outputs = []
    for device in (1, 0):
        there, weights = p.to(f"cuda:{device}"), w.to(f"cuda:{device}")
        for current in (1 - device, device):
            with torch.cuda.device(current):
                outputs.append(moelora.fused_experts_lora(**there.kwargs()).cpu())
                assert same_bits(moelora.prepack_weights(weights).unpack().cpu(), w)
                assert torch.cuda.current_device() == current
    assert all(same_bits(y, outputs[0]) for y in outputs)


def test_calls_do_not_synchronize():
    """The host is back from a call while the stream that it went to is still busy."""
    p, *quantized = (layer_problem(33, torch.bfloat16, form=form).to("cuda") for form in FORMS)
    weights = torch.randn(4, 128, 128, device="cuda", dtype=torch.bfloat16)

    def every_operator():
        for problem in (p, *quantized):
            moelora.fused_experts_lora(**problem.kwargs())
            moelora.fused_moe_lora_gemm(**problem.gemm_kwargs())
        moelora.moe_align_block_size(p.topk_ids, 16, 8)
        moelora.moe_lora_align_block_size(**p.align_kwargs(16))
        moelora.moe_sorting(p.topk_ids, p.topk_weights, 8, 16)
        moelora.prepack_weights(weights)

    every_operator()
    with busy_stream():
        every_operator()
