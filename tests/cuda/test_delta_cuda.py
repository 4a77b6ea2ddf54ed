"""What only a GPU can get wrong in the delta: kernels that sizes choose, idle slots, offsets."""

from __future__ import annotations

import pytest
import torch
from cases import Spec, among, same_bits
from conftest import CUDA_DTYPES, needs_gpu
from delta_cases import DELTAS, delta_kwargs
from test_cuda import needs_memory
from test_delta import check_delta

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


def spec_of(name: str, dtype: torch.dtype = torch.bfloat16, **changes) -> Spec:
    """A projection: relu2 has any number of slices."""
    tokens, top_k, experts, adapters, k, n, slices, rank = SIZES[name]
    ranks = [max(1, rank - i * rank // (2 * adapters)) for i in range(adapters)]
    sizes = {"hidden": k, "inter": slices * n, "slices": slices, "ranks": tuple(ranks)}
    more = {"activation": "relu2", "routing": "out_of_range", "dtype": dtype, "seed": len(name)}
    return Spec(tokens, top_k, experts, **{**sizes, **more, **changes})


def delta(p):
    return DELTAS["w13"](**delta_kwargs(p, "w13", mul_routed_weight=True))


@pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_choose_other_kernels(name, dtype):
    p = spec_of(name, dtype).build()
    for add in (True, False):
        check_delta(p, "w13", GPU, add, True)


@pytest.mark.parametrize(
    "name", ["one_launch_one_token", "a_few_rows", "sorted_rows_rank_64", "many_rows_rank_16"]
)
def test_idle_slots_change_no_bit(name):
    p = spec_of(name, routing="random").build().to(GPU)
    slots, adapters, experts = 256, len(p.spec.ranks), p.spec.experts
    where = [i * (slots // adapters) for i in range(adapters)]
    assert same_bits(delta(among(p, experts, [*range(experts)], slots, where)), delta(p))


@pytest.mark.slow
def test_adapter_offsets_beyond_int32():
    """Adapter 1 begins 2^31 elements behind adapter 0, in both factors."""
    needs_memory(12)
    p = spec_of("a_few_rows", slices=1, ranks=(32, 20)).build().to(GPU)
    near = delta(p)
    for name in ("w13_lora_a", "w13_lora_b"):
        factor = getattr(p, name)
        memory = torch.zeros(2**31 + factor[1].numel(), dtype=factor.dtype, device=GPU)
        stack = memory.as_strided(factor.shape, (2**31, *factor.stride()[1:]))
        setattr(p, name, stack.copy_(factor))
    assert same_bits(delta(p), near)
