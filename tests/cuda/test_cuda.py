"""What only a GPU can get wrong: every shrink and sort path, large offsets, errors."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest
import torch
from cases import Spec, among, same_bits
from checks import assert_close_to_ref, assert_gemm_is_the_cpus
from conftest import CUDA_DTYPES, needs_gpu
from quantized_cases import check_layer
from test_align import OPERATORS, assert_same, every_alignment

import moelora
from moelora import _C
from moelora.reference import (
    fused_moe_lora_gemm_ref,
    naive_fused_experts_lora,
    naive_fused_moe_lora_gemm,
)

pytestmark = [pytest.mark.gpu, needs_gpu]
GPU = "cuda"


@pytest.fixture
def as_sm80():
    _C.limit_capability(80)
    yield
    _C.limit_capability(0)


@pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
def test_a_newer_gpu_runs_the_portable_kernels(as_sm80, dtype):
    assert {name[-5:] for name in _C.usable() if "_sm" in name} == {"_sm80"}
    plans = set()
    for tokens in (1, 30, 40, 400):
        p = Spec(tokens=tokens, hidden=192, inter=136, ranks=(8, 32), dtype=dtype).build()
        y = moelora.fused_experts_lora(**p.to(GPU).kwargs())
        plans.add(_C.last_plan())
        check_layer(y, p)
    assert all("_sm90" not in plan for plan in plans)
    assert len(plans) > 2, "blocks follow the rows of an expert"


# Few rows, short and long segments, narrow and wide stacks, both shares of the depth: the sizes on
# both sides of every choice that csrc/cuda/shrink/blocks.cu makes.
ELSEWHERE = {"inter": 24, "mix": "disabled", "remote": 4, "slices": 1}
SHRINKS = {
    "few_rows": Spec(inter=24, experts=2, tokens=9, hidden=2048, ranks=(16, 3)),
    "few_rows_deep": Spec(inter=24, experts=2, tokens=9, hidden=4104, ranks=(16, 40)),
    "short_segments": Spec(inter=24, tokens=1000, experts=64, hidden=72, ranks=(16, 9) * 4),
    "short_segments_wide": Spec(inter=24, tokens=1100, experts=64, hidden=72, ranks=(64, 40, 33)),
    "wide_segments": Spec(inter=24, tokens=1100, experts=16, hidden=328, ranks=(64, 40, 33)),
    "long_segments": Spec(inter=24, experts=2, tokens=13000, hidden=264, ranks=(16, 7)),
    "long_segments_wide": Spec(inter=24, experts=2, tokens=13000, hidden=72, ranks=(64, 5, 33)),
    "most_rows_wide": Spec(inter=24, experts=2, tokens=26000, hidden=1032, ranks=(64, 5, 33, 16)),
    "long_segments_elsewhere": Spec(9000, experts=8, ranks=(8, 24, 16), **ELSEWHERE),
    "more_items_than_fit": Spec(inter=8, experts=2, tokens=2200, hidden=8, ranks=(4000,)),
    "more_listed_items_than_fit": Spec(inter=8, experts=600, tokens=1000, hidden=8, ranks=(4000,)),
    "more_pairs_than_are_listed": Spec(9000, experts=520, hidden=72, inter=24, ranks=(16, 9) * 4),
    "long_segments_deep": Spec(inter=24, experts=2, tokens=6500, hidden=4104, ranks=(16, 7)),
    "long_segments_wide_deep": Spec(inter=24, experts=2, tokens=6500, hidden=4104, ranks=(40, 8)),
}


@pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
@pytest.mark.parametrize("name", SHRINKS)
def test_shrink(name, dtype):
    assert_gemm_is_the_cpus(replace(SHRINKS[name], dtype=dtype).build(), GPU)


@pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [200, 600, 1500])
@pytest.mark.parametrize("ranks", [(16, 9), (64, 40)], ids=str)
def test_shrink_of_rows_by_position(ranks, tokens, dtype):
    """Whole segments, or blocks of them, behind either shrink of the other projection."""
    spec = Spec(tokens, experts=8, hidden=136, inter=328, ranks=ranks, dtype=dtype)
    p = spec.build()
    y = moelora.fused_experts_lora(**p.to(GPU).kwargs())
    cpu = moelora.fused_experts_lora(**p.kwargs()).double()
    assert_close_to_ref(y, cpu, naive_fused_experts_lora(**p.kwargs()), dtype)


@pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
@pytest.mark.parametrize("name", [name for name in SHRINKS if name.startswith("long_segments")])
def test_shrink_of_older_gpus(as_sm80, name, dtype):
    assert_gemm_is_the_cpus(replace(SHRINKS[name], dtype=dtype).build(), GPU)


@pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
def test_adapters_fill_the_ring_behind_one_step_of_depth(dtype):
    """More tiles than CTAs: each begins while the results of the last one lie in a stage."""
    spec = Spec(tokens=600, top_k=1, experts=2, hidden=64, inter=9000, ranks=(64,) * 8)
    assert_gemm_is_the_cpus(replace(spec, mix="all_different", dtype=dtype).build(), GPU)


# ---- alignment: sizes on both sides of every choice that csrc/cuda/align/align.cu makes ----

ALIGNMENTS = {
    # tokens, top_k, experts, adapters
    "one_row": (1, 1, 1, 1),
    "one_group": (16, 8, 128, 8),
    "largest_tiny_sort": (16, 4, 256, 29),
    "smallest_small_sort": (65, 1, 256, 29),
    "two_loads_a_thread": (256, 8, 128, 8),
    "several_batches": (1025, 8, 128, 8),
    "more_groups_than_threads": (700, 3, 2000, 2),
    "largest_small_sort": (2048, 8, 128, 8),
    "smallest_large_sort": (16385, 1, 8, 8),
    "a_tile_a_thread_block": (4096, 8, 128, 8),
    "large_sort": (16384, 8, 128, 8),
    "few_keys": (40000, 2, 8, 1),
    "most_keys": (5000, 4, 256, 29),
    "too_many_keys": (300, 8, 256, 30),
    "too_many_keys_large_sort": (5000, 6, 512, 64),
    "too_many_keys_many_tokens": (20000, 2, 1024, 1024),
    "no_power_of_two": (12345, 3, 100, 7),
    "a_million_rows": (125_000, 8, 64, 16),
}


def align_inputs(tokens, top_k, experts, adapters, mix, seed=0, wide=False):
    make = torch.Generator().manual_seed(seed)
    low, high = {"uniform": (0, experts), "one": (experts // 2, experts // 2 + 1)}.get(
        mix, (-1, experts + 2)
    )
    ids = torch.randint(low, high, (tokens, top_k), generator=make)
    if mix == "zipf":
        ids = (torch.rand(tokens, top_k, generator=make) ** 4 * experts).long()
    carried = (0, 1) if mix == "one" else (-2, adapters + 2)
    mapping = torch.randint(*carried, (tokens,), generator=make)
    enabled = torch.rand(adapters, generator=make) < 0.8 if mix == "strange" else None
    if not wide:
        ids, mapping = ids.int(), mapping.int()
    elif mix == "strange":
        ids[::7] += 2**32  # in range if only the low half is read
        mapping[::5] -= 2**33
    return ids, mapping, enabled


@pytest.mark.parametrize("mix", ["uniform", "one", "zipf", "strange"])
@pytest.mark.parametrize("name", ALIGNMENTS)
def test_alignment_equals_the_cpu(name, mix):
    """Every id of every output; block size and width of ids vary with the case."""
    tokens, top_k, experts, adapters = ALIGNMENTS[name]
    variant = len(name) + len(mix)
    block_size = (16, 128, 7, 64, 1)[variant % 5]
    ids, mapping, enabled = align_inputs(*ALIGNMENTS[name], mix, wide=variant % 2 == 1)
    weights = torch.rand(tokens, top_k)
    arguments = {"topk_ids": ids, "token_lora_mapping": mapping, "num_experts": experts}
    arguments |= {"block_size": block_size, "max_loras": adapters, "adapter_enabled": enabled}
    gpus = every_alignment(OPERATORS, GPU, weights, **arguments, expert_map=None)
    assert_same(gpus, every_alignment(OPERATORS, "cpu", weights, **arguments, expert_map=None))


def test_alignment_of_strided_ids_with_an_expert_map():
    make = torch.Generator().manual_seed(3)
    wide = torch.randint(-1, 65, (5000, 2 * 6 + 3), generator=make)
    ids = wide[:, 1:13:2]
    weights = torch.rand(5000, 9, generator=make)[:, :6]
    expert_map = torch.full((64,), -1, dtype=torch.int32)
    expert_map[torch.randperm(64, generator=make)[:40]] = torch.arange(40, dtype=torch.int32)
    mapping = torch.randint(-1, 5, (10000,), generator=make, dtype=torch.int32)[::2]
    for tokens in (50, 5000):
        cut = (ids[:tokens], weights[:tokens], expert_map, mapping[:tokens])
        results = []
        for device in (GPU, "cpu"):
            # a view on the device has the strides of its source
            a, w, m, t = (x if device == "cpu" else strided_copy(x) for x in cut)
            arguments = {"topk_ids": a, "token_lora_mapping": t, "num_experts": 64}
            arguments |= {"block_size": 16, "max_loras": 5, "expert_map": m}
            results.append(every_alignment(OPERATORS, device, w, **arguments))
        assert_same(*results)


def strided_copy(t: torch.Tensor) -> torch.Tensor:
    copy = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=GPU)
    copy.copy_(t)
    assert copy.stride() == t.stride()
    return copy


@pytest.mark.parametrize("offset", [0, 1, 7])
@pytest.mark.parametrize("elements", [0, 1, 8, 100_003, 5_000_000])
def test_zeroing_touches_nothing_else(elements, offset):
    """Any start and any length, of 2-byte elements."""
    memory = torch.full((elements + offset + 64,), 3.0, dtype=torch.bfloat16, device=GPU)
    ids = torch.zeros(4, 2, dtype=torch.int32, device=GPU)
    weights = torch.ones(4, 2, device=GPU)
    moelora.moe_sorting(ids, weights, 2, 4, out_to_zero=memory[offset : offset + elements])
    assert not memory[offset : offset + elements].any()
    assert (memory[:offset] == 3).all()
    assert (memory[offset + elements :] == 3).all()


# ---- offsets beyond 2^31 elements ----


def needs_memory(gigabytes: float) -> None:
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] / 1e9
    if free < gigabytes:
        pytest.skip(f"needs {gigabytes} GB of GPU memory, {free:.0f} GB are free")


@pytest.mark.slow
def test_adapter_offsets_beyond_int32():
    """256 experts, hidden size 7168, rank 64: adapter 19 begins at element 2.2e9 of its stack."""
    needs_memory(16)
    experts, hidden, inter, rank, slots = 256, 7168, 64, 64, 20
    assert (slots - 1) * experts * rank * hidden > 2**31
    sizes = {"hidden": hidden, "inter": inter, "ranks": (rank, rank), "slices": 1}
    p = Spec(tokens=14, experts=3, **sizes, mix="many", dtype=torch.bfloat16).build()
    assert {0, 1} <= set(p.token_lora_mapping.tolist())
    large = among(p.to(GPU), experts, [0, 1, 255], slots, [0, 19])
    y = moelora.fused_experts_lora(**large.kwargs())
    check_layer(y, p)


@pytest.mark.slow
def test_row_offsets_beyond_int32():
    """Inputs, intermediate rows and outputs of more than 2^31 elements."""
    needs_memory(40)
    hidden = 4096
    tokens = 2**31 // hidden + 1500
    sizes = {"hidden": hidden, "inter": 64, "ranks": (8, 16), "dtype": torch.bfloat16}
    p = Spec(tokens=8, top_k=1, experts=2, **sizes).build()
    make = torch.Generator().manual_seed(1)
    routing = {
        "topk_ids": torch.randint(0, 2, (tokens, 1), generator=make, dtype=torch.int32),
        "token_lora_mapping": torch.randint(-1, 2, (tokens,), generator=make, dtype=torch.int32),
        "topk_weights": torch.rand(tokens, 1, generator=make),
    }
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, device=GPU)
    edge = 2**31 // hidden
    windows = [0, 1, edge // 2, *range(edge - 2, edge + 2), tokens - 2, tokens - 1]
    small = replace(
        p,
        hidden_states=x[windows].cpu(),
        rows=torch.randn(tokens, 64, dtype=torch.bfloat16)[windows],
        **{name: t[windows] for name, t in routing.items()},
    )
    routing = {name: t.to(GPU) for name, t in routing.items()}
    there = replace(p.to(GPU), hidden_states=x, **routing)
    y = moelora.fused_experts_lora(**there.kwargs())[windows]
    check_layer(y, small)
    del y, x

    rows = torch.zeros(tokens, 64, dtype=torch.bfloat16, device=GPU)
    rows[windows] = small.rows.to(GPU)
    there = replace(there, hidden_states=None, rows=rows)
    y = moelora.fused_moe_lora_gemm(**there.gemm_kwargs("w2"))
    assert y.numel() > 2**31
    ref = fused_moe_lora_gemm_ref(**small.gemm_kwargs("w2"))
    naive = naive_fused_moe_lora_gemm(**small.gemm_kwargs("w2"))
    assert_close_to_ref(y[windows], ref, naive, torch.bfloat16)


@pytest.mark.slow
def test_rows_of_x_that_span_more_than_64_gib():
    """Hopper's kernels cannot gather them: a portable one does, and nothing is refused half-way."""
    tokens, hidden, far = 33, 256, 1 << 30  # 2 GiB from row to row
    needs_memory(70)
    spec = Spec(tokens=tokens, top_k=2, experts=4, hidden=hidden, inter=128, ranks=(8, 16))
    p = replace(spec, dtype=torch.bfloat16).build()
    buffer = torch.empty((tokens - 1) * far + hidden, dtype=torch.bfloat16, device=GPU)
    x = buffer.as_strided((tokens, hidden), (far, 1)).copy_(p.hidden_states)
    there = replace(p.to(GPU), hidden_states=x)
    y = moelora.fused_experts_lora(**there.kwargs())
    assert "_sm80" in _C.last_plan().split()[0]
    check_layer(y, p)


@pytest.mark.slow
def test_weight_offsets_beyond_int32():
    needs_memory(30)
    experts, hidden, inter = 40, 4096, 6912
    assert (experts - 1) * 2 * inter * hidden > 2**31
    spec = Spec(tokens=6, top_k=2, experts=2, hidden=hidden, inter=inter, ranks=(16,))
    p = replace(spec, dtype=torch.bfloat16).build().base()
    there = among(p.to(GPU), experts, [0, experts - 1], 0, []).kwargs()
    check_layer(moelora.fused_experts_lora(**there), p)

    there["w13"] = packed = moelora.prepack_weights(there["w13"])
    assert same_bits(packed.unpack()[-1].cpu(), p.w13[-1])
    check_layer(moelora.fused_experts_lora(**there), p)


# ---- errors ----


def test_more_keys_than_the_device_counts():
    ids = torch.zeros(4, 2, dtype=torch.int32, device=GPU)
    with pytest.raises((RuntimeError, NotImplementedError), match="9000 experts.*at most 7679"):
        moelora.moe_align_block_size(ids, 16, 9000)
    assert moelora.moe_align_block_size(ids, 16, 7000)[2].item() == 16


# A stream capture that something else broke refuses our launch without harming the context; torch's
# own state may not survive a failed capture, so all of it has a process to itself.
BROKEN_CAPTURE = """
    import pytest, torch, moelora

    ids = torch.tensor([[0, 1], [1, 2], [2, 0]], dtype=torch.int32, device="cuda")
    expected = [t.tolist() for t in moelora.moe_align_block_size(ids, 4, 3)]
    weights = torch.randn(2, 64, 64, device="cuda", dtype=torch.bfloat16)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        with pytest.raises(RuntimeError):
            stream.synchronize()  # not allowed here: the capture is lost
        for call in (
            lambda: moelora.moe_align_block_size(ids, 4, 3),
            lambda: moelora.prepack_weights(weights),
        ):
            with pytest.raises(RuntimeError, match="cudaErrorStreamCapture") as error:
                call()
            print(error.value)
        with pytest.raises(RuntimeError):
            graph.capture_end()
    assert [t.tolist() for t in moelora.moe_align_block_size(ids, 4, 3)] == expected
    assert torch.equal(moelora.prepack_weights(weights).unpack(), weights)
    print("the next call works")
"""


def test_a_gpu_error_has_a_name_and_the_next_call_works():
    command = [sys.executable, "-c", textwrap.dedent(BROKEN_CAPTURE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for said in ("resolve: cudaError", "pack: cudaError"):
        assert f"{said}StreamCaptureInvalidated" in done.stdout
    assert "the next call works" in done.stdout
