"""What only a GPU can get wrong in the delta: kernels that sizes choose, idle slots, offsets."""

from __future__ import annotations

import pytest
import torch
from cases import same_bits
from checks import assert_close_to_ref
from conftest import CUDA_DTYPES, needs_gpu

import moelora

pytestmark = [pytest.mark.gpu, needs_gpu]
GPU = "cuda"

# name: tokens, top_k, experts, adapters, K, columns of a slice, slices, R
SIZES = {
    "a_few_rows_few_ranks": (3, 2, 8, 4, 512, 192, 2, 16),
    "a_few_rows": (40, 4, 8, 4, 512, 192, 2, 32),
    "grouped_rows_rank_16": (128, 4, 8, 4, 2304, 328, 2, 16),
    "grouped_thin_rows_rank_24": (100, 2, 16, 4, 2304, 200, 2, 24),
    "grouped_thin_rows_rank_64": (60, 4, 16, 4, 1032, 136, 3, 64),
    "one_launch_one_token": (1, 2, 8, 4, 1032, 200, 4, 16),
    "one_launch_long_parts": (100, 4, 8, 1, 520, 328, 1, 40),
    "one_launch_small_ctas_rank_16": (128, 4, 64, 8, 520, 200, 2, 16),
    "one_launch_small_ctas_rank_24": (128, 4, 64, 8, 1032, 136, 2, 24),
    "one_launch_small_ctas_rank_64": (127, 4, 64, 8, 520, 200, 2, 64),
    "too_few_rows_of_long_factors": (2, 2, 4, 2, 8200, 4104, 2, 64),
    "thin_rows_rank_16": (500, 4, 64, 6, 520, 200, 2, 16),
    "sorted_rows_rank_16": (1500, 4, 8, 4, 512, 192, 1, 16),
    "sorted_rows_rank_24": (700, 4, 8, 4, 520, 200, 2, 24),
    "sorted_rows_rank_64": (700, 4, 16, 4, 512, 192, 1, 64),
    "sorted_rows_rank_200": (300, 3, 5, 3, 264, 136, 3, 200),
    "many_rows_rank_8": (20000, 2, 5, 3, 328, 136, 2, 8),
    "many_rows_rank_16": (6000, 4, 8, 3, 512, 192, 2, 16),
    "many_rows_rank_64": (6000, 4, 8, 3, 512, 192, 2, 64),
    "many_rows_rank_96": (9000, 2, 3, 1, 200, 72, 1, 96),
    "many_rows_no_vectors": (5000, 3, 4, 3, 131, 77, 2, 19),
}


def draw(name: str, dtype: torch.dtype):
    tokens, top_k, experts, adapters, k, n, slices, rank = SIZES[name]
    make = torch.Generator(GPU).manual_seed(len(name))

    def normal(*shape, scale=1.0):
        return (torch.randn(shape, generator=make, device=GPU) * scale).to(dtype)

    def integers(low, high, *shape):
        return torch.randint(low, high, shape, generator=make, device=GPU, dtype=torch.int32)

    x = normal(tokens, k)
    kwargs = {
        "topk_weights": torch.rand(tokens, top_k, generator=make, device=GPU),
        "topk_ids": integers(-1, experts, tokens, top_k),
        "token_lora_mapping": integers(-1, adapters, tokens),
        "lora_a": [normal(adapters, experts, rank, k, scale=k**-0.5) for _ in range(slices)],
        "lora_b": [
            normal(adapters, experts, n, rank, scale=0.25 * rank**-0.5) for _ in range(slices)
        ],
        "lora_ranks": integers(max(1, rank // 2), rank + 1, adapters),
        "lora_scalings": torch.rand(adapters, generator=make, device=GPU) + 0.5,
    }
    for a, b in zip(kwargs["lora_a"], kwargs["lora_b"], strict=True):
        for slot, true_rank in enumerate(kwargs["lora_ranks"].tolist()):
            a[slot, :, true_rank:] = float("nan")
            b[slot, ..., true_rank:] = float("nan")
    # Sums of a size that the outer fence of 1e-2 suits.
    return x, kwargs, normal(tokens, top_k, slices * n, scale=0.25)


def reference(x, kw, base, dtype):
    """(the result with every step in `dtype`, which rows have an adapter)"""
    out, active = base.to(dtype, copy=True), torch.zeros_like(kw["topk_ids"], dtype=torch.bool)
    for slot, rank in enumerate(kw["lora_ranks"].tolist()):
        carried = (kw["token_lora_mapping"] == slot)[:, None]
        for expert in range(kw["lora_a"][0].size(1)):
            here = (kw["topk_ids"] == expert) & carried
            active |= here
            rows, first = x[here.nonzero()[:, 0]].to(dtype), 0
            for a, b in zip(kw["lora_a"], kw["lora_b"], strict=True):
                h = rows @ a[slot, expert, :rank].to(dtype).T * kw["lora_scalings"][slot].to(dtype)
                z = h @ b[slot, expert, :, :rank].to(dtype).T
                last = first + z.size(1)
                out[..., first:last][here] += z * kw["topk_weights"][here][:, None].to(dtype)
                first = last
    return out, active


def run(x, kw, out):
    return moelora.moe_lora_gate_up_delta(x, out=out, mul_routed_weight=True, **kw)


@pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_choose_other_kernels(name, dtype):
    x, kw, base = draw(name, dtype)
    ref, active = reference(x, kw, base, torch.float64)
    naive, _ = reference(x, kw, base, dtype)
    out = run(x, kw, base.clone())
    assert same_bits(out[~active], base[~active])
    assert_close_to_ref(out[active], ref[active].cpu(), naive[active], dtype)
    assert same_bits(run(x, kw, base.clone()), out)


@pytest.mark.parametrize(
    "name", ["one_launch_one_token", "a_few_rows", "sorted_rows_rank_64", "many_rows_rank_16"]
)
def test_idle_slots_change_no_bit(name):
    x, kw, base = draw(name, torch.bfloat16)
    wide = dict(kw)
    slots, adapters = 256, kw["lora_ranks"].numel()
    where = torch.arange(adapters, device=GPU) * (slots // adapters)
    for key in ("lora_ranks", "lora_scalings"):
        wide[key] = torch.full((slots,), 7, device=GPU).to(kw[key].dtype)
        wide[key][where] = kw[key]
    for key in ("lora_a", "lora_b"):
        wide[key] = []
        for factor in kw[key]:
            stack = torch.full((slots, *factor.shape[1:]), float("nan"), device=GPU).to(x.dtype)
            stack[where] = factor
            wide[key].append(stack)
    mapping = kw["token_lora_mapping"]
    wide["token_lora_mapping"] = torch.where(mapping < 0, mapping, mapping * (slots // adapters))
    assert same_bits(run(x, wide, base.clone()), run(x, kw, base.clone()))


@pytest.mark.slow
def test_adapter_offsets_beyond_int32():
    """Adapter 1 begins 2^31 elements behind adapter 0, in both factors."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 12e9:
        pytest.skip("needs 12 GB of GPU memory")
    x, kw, base = draw("a_few_rows", torch.bfloat16)
    far = dict(kw, token_lora_mapping=(kw["token_lora_mapping"] >= 0).int())
    near = dict(far)
    for key in ("lora_a", "lora_b"):
        near[key] = [factor[:2].contiguous() for factor in kw[key][:1]]
        _, experts, rows, columns = near[key][0].shape
        memory = torch.full((2**31 + near[key][0][1].numel(),), 0, dtype=x.dtype, device=GPU)
        stack = memory.as_strided(near[key][0].shape, (2**31, rows * columns, columns, 1))
        stack.copy_(near[key][0])
        far[key] = [stack]
    for key in ("lora_ranks", "lora_scalings"):
        near[key] = far[key] = kw[key][:2].contiguous()
    base = base[..., : base.size(-1) // 2].contiguous()
    assert same_bits(run(x, far, base.clone()), run(x, near, base.clone()))
