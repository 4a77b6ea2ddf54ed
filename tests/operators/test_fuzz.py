"""Thousands of random problems on the GPU, larger and odder than those that the CPU tests afford; a
few of them on the CPU.

Alignments are compared with the CPU's, id by id. Layers, projections and deltas are held as in the
other tests, with a random kernel variant, plain or packed weights, on a random stream, and twice:
the bits must repeat. MOELORA_FUZZ multiplies the number of problems, MOELORA_FUZZ_SEED starts
elsewhere; a failure prints the seed that repeats it.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest
import torch
from cases import Spec, draw_spec, same_bits
from checks import naming
from conftest import CUDA_DTYPES, on_gpu
from holding import hold_base_rows, hold_gemm, hold_layer
from test_align import OPERATORS, assert_same, every_alignment
from test_delta import check_delta
from test_fused_moe_lora import check_fused
from test_sglang_ops import RUN
from test_sglang_ops import check as check_mlp

import moelora
from moelora import _C

SCALE = int(os.environ.get("MOELORA_FUZZ", "1"))
FIRST = int(os.environ.get("MOELORA_FUZZ_SEED", "40000"))
BATCH = 125
VARIANTS = {
    (device, dtype): [
        name
        for name in _C.usable()
        if name.startswith(f"gemm_{word}") and ("_sm" in name) == (device == "cuda")
    ]
    for device in ("cpu", "cuda")
    for word, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16))
}


def seeds(count: int, first: int):
    """(device, seeds): BATCH of them for a test id on a GPU, four on the CPU."""
    cases = [pytest.param("cpu", range(first, first + 4), id="cpu")]
    for s in range(first, first + count * SCALE, BATCH):
        case = on_gpu("cuda", range(s, s + BATCH), id=f"from_{s}")
        cases.append(case._replace(marks=[*case.marks, pytest.mark.slow]))
    return cases


# ---- alignment ----


def log_uniform(rng: random.Random, low: int, high: int) -> int:
    return round(low * (high / low) ** rng.random())


def check_alignment(seed: int, there_is: str) -> None:
    rng, make = random.Random(seed), torch.Generator().manual_seed(seed)
    top_k = rng.choice((1, 2, 4, 6, 8, 9))
    tokens = log_uniform(rng, 1, 60_000 // top_k) if rng.random() < 0.97 else 0
    experts = log_uniform(rng, 1, 1024)
    slots = log_uniform(rng, 1, 1024 if rng.random() < 0.3 else 64)
    block_size = rng.choice((1, 3, 8, 16, 16, 32, 64, 128, 256))
    wide = rng.random() < 0.4

    power = rng.choice((0.0, 1.0, 1.0, 3.0, 20.0))  # 0: one expert; large: few experts
    ids = (
        (torch.rand(tokens, top_k, generator=make) ** power * experts).long().clamp(0, experts - 1)
    )
    if power == 0.0:
        ids.fill_(rng.randrange(experts))
    carried = (
        torch.rand(tokens, generator=make) ** rng.choice((1.0, 4.0)) * (slots + 1)
    ).long() - 1
    strange = rng.choice((0.0, 0.0, 0.02, 0.5))
    for t, size in ((ids, experts), (carried, slots)):
        odd = torch.rand(t.shape, generator=make) < strange
        values = [-1, -2, size, size + 3, 2**31 - 1, -(2**31)] + [2**32, -(2**40)] * wide
        chosen = torch.randint(0, len(values), t.shape, generator=make)
        t[odd] = torch.tensor(values)[chosen][odd]
    if not wide:
        ids, carried = ids.int(), carried.int()
    enabled = None
    if rng.random() < 0.4:
        enabled = torch.rand(slots + rng.randrange(2), generator=make) < 0.7
        enabled = enabled if rng.random() < 0.5 else enabled.int()
    expert_map = None
    if rng.random() < 0.3:
        local = torch.rand(experts, generator=make) < 0.6
        expert_map = torch.where(local, local.cumsum(0) - 1, -1).int()
    weights = torch.rand(tokens, top_k, generator=make)
    out = torch.ones(rng.randrange(1, 200_000), dtype=torch.bfloat16)

    arguments = {"topk_ids": ids, "token_lora_mapping": carried, "num_experts": experts}
    arguments |= {"block_size": block_size, "max_loras": slots}
    arguments |= {"adapter_enabled": enabled, "expert_map": expert_map}
    results = []
    for device in (there_is, "cpu"):
        zeroed = out.to(device, copy=True)
        found = every_alignment(OPERATORS, device, weights, zeroed, **arguments)
        results.append([*found, zeroed])
    with naming(f"M={tokens} top_k={top_k} E={experts} adapters={slots} block_size={block_size}"):
        assert_same(*results)


@pytest.mark.parametrize("device, batch", seeds(2000, FIRST))
def test_alignment(device, batch):
    for seed in batch:
        with naming(f"seed {seed}"):
            check_alignment(seed, device)


# ---- layers and projections ----


def draw(seed: int) -> tuple[Spec, random.Random]:
    """Sizes around the tiles of the GPU kernels: 16 to 256 rows, 64 deep, 128 or 256 wide."""
    rng = random.Random(seed)

    def near(*sizes: int) -> int:
        return max(1, rng.choice(sizes) + rng.choice((-8, -1, 0, 0, 0, 0, 1, 8)))

    experts = rng.choice((1, 2, 4, 8, 16, 40))
    packable = rng.random() < 0.25
    small = draw_spec(seed, CUDA_DTYPES)
    return replace(
        small,
        tokens=rng.choice((1, 2, 4, 7, 16, 30, 64, 120, 200)),
        top_k=min(experts, rng.choice((1, 2, 2, 4, 8))),
        experts=experts,
        hidden=rng.choice((64, 128, 192, 384)) if packable else near(16, 64, 128, 256, 448),
        inter=rng.choice((64, 128, 256)) if packable else near(16, 64, 96, 128, 256),
        strided=0 if packable else small.strided,
        weight_on_input=False,
    ), rng


def twice(operator, names: tuple[str, ...], rng: random.Random):
    """The operator on a side stream, some of the weights packed where that is possible; again, it
    gives the same bits."""

    def run(out, **arguments):
        for name in names:
            w = arguments[name]
            if w.size(1) % 64 == 0 and w.size(2) % 64 == 0 and rng.random() < 0.5:
                arguments[name] = moelora.prepack_weights(w)
        stream = torch.cuda.Stream() if out.is_cuda else None
        if stream:
            torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            again = operator(**arguments)
            operator(**arguments, out=out)
        if stream:
            torch.cuda.synchronize()
        assert same_bits(out, again), "two runs differ"
        return out

    return run


def check_layer(seed: int, device: str) -> None:
    spec, rng = draw(seed)
    p = spec.build()
    forced = rng.choice((None, *VARIANTS[device, spec.dtype]))
    _C.force_variant(forced)
    try:
        with naming(f"variant {forced}, {spec}"):
            hold_layer(p, device, twice(moelora.fused_experts_lora, ("w13", "w2"), rng))
            run = twice(moelora.fused_moe_lora_gemm, ("w",), rng)
            hold_gemm(p, device, rng.choice(("w13", "w2")), rng.random() < 0.5, run)
            if spec.mix != "absent":
                hold_base_rows(p, device)
    finally:
        _C.force_variant(None)


@pytest.mark.parametrize("device, batch", seeds(1000, FIRST + 1_000_000))
def test_layers(device, batch):
    for seed in batch:
        with naming(f"seed {seed}"):
            check_layer(seed, device)


# ---- adapters alone ----


def check_deltas(seed: int, device: str) -> None:
    spec, rng = draw(seed)
    if spec.mix == "absent":
        return
    p = spec.build()
    which, weighted = rng.choice(("w13", "w2")), rng.random() < 0.5
    with naming(spec):
        check_delta(p, which, device, rng.random() < 0.5, weighted)
        if not (spec.pass_ranks or spec.scalings or spec.remote):
            check_fused(p, which, device, rng.random() < 0.5, mul_routed_weight=weighted)
        if spec.slices == 1 and spec.activation != "relu2" and not spec.remote:
            for how in RUN:
                check_mlp(p, device, how)


@pytest.mark.parametrize("device, batch", seeds(500, FIRST + 2_000_000))
def test_deltas(device, batch):
    for seed in batch:
        with naming(f"seed {seed}"):
            check_deltas(seed, device)
