"""Alignments: all modes and block sizes, around every bound of csrc/cuda/align/align.cu."""

from collections.abc import Callable
from functools import partial

import torch

import moelora
from benchmarks.grid.calls import rows, with_plans

# Tokens, top_k, experts, adapters. On a GPU up to 64 items and up to 16384 have a kernel each, and
# more than 7680 pairs of an expert and an adapter, or none, are sorted twice.
SIZES = (
    *((1, 1, 1, 1), (8, 8, 16, 4), (13, 5, 16, 4), (40, 3, 9, 4), (300, 4, 32, 8)),
    *((2048, 8, 128, 8), (8193, 2, 64, 8), (16385, 1, 8, 3), (4096, 9, 256, 28)),
    *((5, 4, 300, 40), (60, 4, 300, 40), (17000, 1, 300, 40), (700, 8, 1000, 70)),
)
BLOCKS = (1, 4, 16, 24, 64, 128, 256)
LIST_BLOCKS = (1, 5, 16, 64)


def routes(size: tuple, device: str) -> tuple:
    """(ids, mapping, weights, enabled adapters, expert_map); some ids and mappings are out of
    range."""
    tokens, top_k, experts, adapters = size
    make = torch.Generator().manual_seed(tokens)
    dtype = torch.int64 if tokens % 2 else torch.int32
    ids = torch.randint(-1, experts + 1, (tokens, top_k), generator=make).to(dtype)
    mapping = torch.randint(-1, adapters + 1, (tokens,), generator=make).to(dtype)
    enabled = torch.rand(adapters, generator=make) < 0.8
    here = torch.rand(experts, generator=make) < 0.7
    expert_map = torch.where(here, here.cumsum(0) - 1, -1).int()
    weights = torch.rand(tokens, top_k, generator=make)
    return tuple(t.to(device) for t in (ids, mapping, weights, enabled, expert_map))


def each_size(device: str, calls: Callable):
    for size in SIZES:
        yield "x".join(map(str, size)), partial(calls, device, size)


def alignments(device):
    def calls(device, size):
        tokens, _, experts, adapters = size
        ids, mapping, weights, enabled, expert_map = routes(size, device)

        def sorting(block, **more):
            zero = torch.ones(tokens, 37, device=device)
            made = moelora.moe_sorting(ids, weights, experts, block, out_to_zero=zero, **more)
            return *made, zero

        def lora(block, **more):
            lora_align = moelora.moe_lora_align_block_size
            return lora_align(ids, mapping, experts, block, adapters, **more)

        for block in BLOCKS:
            for more in ({}, {"expert_map": expert_map}):
                name = f"block {block}" + ", map" * len(more)
                if block == 16:
                    forced = {
                        f"align segmented, {name}": partial(lora, block, mode="segmented", **more)
                    }
                    forced[f"sorting, {name}"] = partial(sorting, block, **more)
                    yield from with_plans(forced, rows(device, torch.bfloat16, "sort"), table=False)
                base = partial(moelora.moe_align_block_size, ids, block, experts, **more)
                yield f"align, {name}", base
                yield f"sorting, {name}", partial(sorting, block, **more)
                for mode in ("uniform", "segmented"):
                    run = partial(lora, block, mode=mode, **more)
                    yield f"align {mode}, {name}", run
                    yield f"align {mode}, {name}, enabled", partial(run, adapter_enabled=enabled)

    return each_size(device, calls)


def align_lists(ids, mapping, experts, slots, block, lora_ids, fill, **more) -> tuple:
    """vLLM's lists of rows, of experts and of rows in use, written over `fill`."""
    rows = ids.numel() + min(ids.numel(), experts) * (block - 1)
    blocks = -(-rows // block)
    made = [
        torch.full(shape, value, dtype=torch.int32, device=ids.device)
        for shape, value in zip(((slots, rows), (slots, blocks), (slots,)), fill, strict=True)
    ]
    moelora.moe_lora_align_block_size(
        *(ids, mapping, experts, block, slots, rows, blocks, *made), lora_ids=lora_ids, **more
    )
    return tuple(made)


def some_loras(slots: int, device, step: int = 1) -> torch.Tensor:
    """Every so many slots, and ids that name none."""
    ids = [*range(0, slots, step), -1, slots, slots + 9]
    return torch.tensor(ids, dtype=torch.int32, device=device)


def lists(device):
    def calls(device, size):
        _, _, experts, slots = size
        ids, mapping, _, enabled, expert_map = routes(size, device)
        for block in LIST_BLOCKS:
            run = partial(align_lists, ids, mapping, experts, slots, block)
            every, other = (some_loras(slots, device, step) for step in (1, 2))
            for map_name, more in (("", {}), (", map", {"expert_map": expert_map})):
                name = f"lists, block {block}{map_name}"
                yield name, partial(run, every, (77, 78, 79), **more)
                on = {"adapter_enabled": enabled, **more}
                yield f"{name}, every other", partial(run, other, (77, 78, 79), **on)

    return each_size(device, calls)
