"""Thousands of random problems on the GPU, larger and odder than those that the CPU tests afford.

Alignments are compared with the CPU's, id by id. Layers and projections are compared with the
float64 reference, run between guard bands, with a random kernel variant, plain or packed weights,
on a random stream, and twice: the bits must repeat. MOELORA_FUZZ multiplies the number of problems,
MOELORA_FUZZ_SEED starts elsewhere; a failure prints the seed that repeats it.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest
import torch
from cases import ACTIVATIONS, ALPHAS, LIMITS, MIXES, POISON, Problem, Spec, same_bits
from checks import assert_close_to_ref, assert_unchanged, guarded_empty, naming
from conftest import CUDA_DTYPES, needs_gpu
from delta_cases import Lists, delta_kwargs, delta_operator

import moelora
from moelora import _C
from moelora.integrations.sglang import ops as sglang_ops
from moelora.reference import (
    fused_experts_lora_ref,
    fused_moe_lora_gemm_ref,
    naive_fused_experts_lora,
    naive_fused_moe_lora_gemm,
)
from moelora.reference.delta import moe_lora_delta_ref, run_moe_lora_ref

pytestmark = [pytest.mark.gpu, pytest.mark.slow, needs_gpu]

SCALE = int(os.environ.get("MOELORA_FUZZ", "1"))
FIRST = int(os.environ.get("MOELORA_FUZZ_SEED", "40000"))
BATCH = 125
VARIANTS = {
    torch.bfloat16: [
        name for name in _C.usable() if name.startswith("gemm_bf16") and "_sm" in name
    ],
    torch.float16: [name for name in _C.usable() if name.startswith("gemm_f16") and "_sm" in name],
}


def seeds(count: int, first: int):
    """One test id per BATCH seeds."""
    return [range(s, s + BATCH) for s in range(first, first + count * SCALE, BATCH)]


# ---- alignment ----


def log_uniform(rng: random.Random, low: int, high: int) -> int:
    return round(low * (high / low) ** rng.random())


def check_alignment(seed: int) -> None:
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

    results = []
    for device in ("cuda", "cpu"):
        there = {
            name: None if t is None else t.to(device)
            for name, t in (
                *(("ids", ids), ("carried", carried), ("enabled", enabled)),
                *(("map", expert_map), ("weights", weights), ("out", out)),
            )
        }
        found = [*moelora.moe_align_block_size(there["ids"], block_size, experts)]
        found += moelora.moe_sorting(
            there["ids"],
            there["weights"],
            experts,
            block_size,
            out_to_zero=there["out"],
            expert_map=there["map"],
        )
        for mode in ("uniform", "segmented"):
            found += moelora.moe_lora_align_block_size(
                there["ids"],
                there["carried"],
                experts,
                block_size,
                slots,
                mode=mode,
                adapter_enabled=there["enabled"],
                expert_map=there["map"],
            )
        results.append([*found, there["out"]])
    for i, (got, expected) in enumerate(zip(*results, strict=True)):
        assert torch.equal(got.cpu(), expected), (
            f"output {i} of M={tokens} top_k={top_k} E={experts} adapters={slots} "
            f"block_size={block_size}"
        )


@pytest.mark.parametrize("batch", seeds(2000, FIRST), ids=lambda r: f"from_{r.start}")
def test_alignment(batch):
    for seed in batch:
        with naming(f"seed {seed}"):
            check_alignment(seed)


# ---- layers and projections ----


def draw(seed: int) -> tuple[Spec, random.Random]:
    """Sizes around the tiles of the GPU kernels: 16 to 256 rows, 64 deep, 128 or 256 wide."""
    rng = random.Random(seed)

    def near(*sizes: int) -> int:
        return max(1, rng.choice(sizes) + rng.choice((-8, -1, 0, 0, 0, 0, 1, 8)))

    experts = rng.choice((1, 2, 4, 8, 16, 40))
    packable = rng.random() < 0.25
    hidden = rng.choice((64, 128, 192, 384)) if packable else near(16, 64, 128, 256, 448)
    inter = rng.choice((64, 128, 256)) if packable else near(16, 64, 96, 128, 256)
    activation = rng.choice(("silu", *ACTIVATIONS))
    pass_ranks = rng.random() < 0.8
    ranks = tuple(
        rng.choice((1, 4, 8, 16, 16, 24, 33, 64, 128, 256)) for _ in range(rng.choice((1, 3, 8)))
    )
    numbers = random.Random(-1 - seed)
    spec = Spec(
        alpha=numbers.choice((None, 0.5, 3.0)) if activation in ALPHAS else None,
        limit=numbers.choice((None, 0.5, 1e30)) if activation in LIMITS else None,
        tokens=rng.choice((1, 2, 4, 7, 16, 30, 64, 120, 200)),
        top_k=min(experts, rng.choice((1, 2, 2, 4, 8))),
        experts=experts,
        hidden=hidden,
        inter=inter,
        dtype=rng.choice(CUDA_DTYPES),
        activation=activation,
        ranks=ranks if pass_ranks else (ranks[0],) * len(ranks),
        spare_rank=rng.choice((0, 0, 3, 16)) if pass_ranks else 0,
        mix=rng.choice(MIXES),
        routing=rng.choice(("random", "random", "random", "few", "one_expert", "out_of_range")),
        sharing=rng.choice(("per_expert", "per_expert", "outer", "expanded")),
        slices=2 if activation != "relu2" and rng.random() < 0.6 else 1,
        scalings=rng.random() < 0.5,
        pass_ranks=pass_ranks,
        bias=rng.random() < 0.3,
        remote=rng.choice((0, 0, 0, 3)),
        int64_ids=rng.random() < 0.3,
        strided=0 if packable else rng.choice((0, 0, 0, 1, 8)),
        seed=seed,
    )
    return spec, rng


def some_weights(arguments: dict, names: tuple[str, ...], rng: random.Random) -> dict:
    """The same arguments, some of the weights packed where that is possible."""
    chosen = {}
    for name in names:
        w = arguments[name]
        if w.size(1) % 64 == 0 and w.size(2) % 64 == 0 and rng.random() < 0.5:
            chosen[name] = moelora.prepack_weights(w)
    return {**arguments, **chosen}


def twice(run, shape, dtype) -> torch.Tensor:
    """Runs between guard bands on a side stream, and again; the result, which must repeat."""
    guards = [guarded_empty(shape, dtype, "cuda") for _ in range(2)]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for guard in guards:
            run(guard.tensor)
    torch.cuda.synchronize()
    for guard in guards:
        guard.check("out")
    assert same_bits(guards[0].tensor, guards[1].tensor), "two runs differ"
    return guards[0].tensor


def check_base_rows(p: Problem, y: torch.Tensor, run) -> None:
    """Tokens that carry no adapter have the bits that the same call gives without adapters."""
    if p.token_lora_mapping is None:
        return
    rows = (p.token_lora_mapping < 0) | (p.token_lora_mapping >= len(p.spec.ranks))
    out = torch.full_like(y, POISON)
    run(out)
    assert same_bits(y.cpu()[rows], out.cpu()[rows]), "a base row depends on adapters"


def check_layer(seed: int) -> None:
    spec, rng = draw(seed)
    p = spec.build()
    there = p.to("cuda")
    before = {name: t.clone() for name, t in there.tensors().items()}
    forced = rng.choice((None, *VARIANTS[spec.dtype]))
    _C.force_variant(forced)
    try:
        arguments = some_weights(there.kwargs(), ("w13", "w2"), rng)
        shape = (spec.tokens, spec.hidden)
        y = twice(lambda out: moelora.fused_experts_lora(**arguments, out=out), shape, spec.dtype)
        base = {**arguments, **{k: v for k, v in there.base().kwargs().items() if v is None}}
        check_base_rows(p, y, lambda out: moelora.fused_experts_lora(**base, out=out))
        ref = fused_experts_lora_ref(**p.kwargs())
        assert_close_to_ref(y, ref, naive_fused_experts_lora(**p.kwargs()), spec.dtype)

        which, weighted = rng.choice(("w13", "w2")), rng.random() < 0.5
        arguments = some_weights(there.gemm_kwargs(which, weighted), ("w",), rng)
        ref = fused_moe_lora_gemm_ref(**p.gemm_kwargs(which, weighted))
        y = twice(
            lambda out: moelora.fused_moe_lora_gemm(**arguments, out=out), ref.shape, spec.dtype
        )
        naive = naive_fused_moe_lora_gemm(**p.gemm_kwargs(which, weighted))
        assert_close_to_ref(y, ref, naive, spec.dtype)
        assert_unchanged(before, there.tensors())
    except Exception as error:
        raise AssertionError(f"variant {forced}, {spec}: {error}") from error
    finally:
        _C.force_variant(None)


@pytest.mark.parametrize("batch", seeds(1000, FIRST + 1_000_000), ids=lambda r: f"from_{r.start}")
def test_layers(batch):
    for seed in batch:
        with naming(f"seed {seed}"):
            check_layer(seed)


# ---- adapters alone ----


def check_sum(run, base: torch.Tensor, delta: torch.Tensor, naive, active) -> None:
    """`run` adds to a copy of `base`: the same bits twice, and those of `base` where not active."""

    def added(out):
        run(out.copy_(base))

    y = twice(added, base.shape, base.dtype).cpu()
    before = base.cpu()
    assert same_bits(y[~active], before[~active]), "a row without an adapter has changed"
    ref = (before.double() + delta)[active]
    assert_close_to_ref(y[active], ref, (before + naive)[active], base.dtype)


def check_delta(seed: int) -> None:
    spec, rng = draw(seed)
    if spec.mix == "absent":
        return
    p = spec.build()
    there = p.to("cuda")
    before = {name: t.clone() for name, t in there.tensors().items()}
    make = torch.Generator().manual_seed(seed)
    try:
        which, weighted = rng.choice(("w13", "w2")), rng.random() < 0.5
        arguments = delta_kwargs(p, which, mul_routed_weight=weighted)
        delta, active = moe_lora_delta_ref(**arguments)
        naive, _ = moe_lora_delta_ref(**arguments, dtype=spec.dtype)
        base = torch.randn(delta.shape, generator=make).to("cuda", spec.dtype)
        arguments = delta_kwargs(there, which, mul_routed_weight=weighted)
        run = delta_operator(which)
        check_sum(lambda out: run(**arguments, out=out), base, delta, naive, active)
        if not (spec.pass_ranks or spec.scalings or spec.remote):
            lists = Lists(there, which, rng.random() < 0.5, rng.choice((16, 32, 64)))
            check_sum(
                lambda out: lists.fused(out, mul_routed_weight=weighted),
                *(base, delta, naive, active),
            )
        if spec.slices == 1 and spec.activation != "relu2" and not spec.remote:
            check_mlp(p, there, make)
        assert_unchanged(before, there.tensors())
    except Exception as error:
        raise AssertionError(f"{spec}: {error}") from error


def check_mlp(p: Problem, there: Problem, make: torch.Generator) -> None:
    def arguments(p):
        return (
            *(p.hidden_states, p.topk_ids, p.topk_weights),
            *(p.token_lora_mapping, p.lora_ranks, p.lora_scalings),
            *(p.w13_lora_a, p.w13_lora_b, p.w2_lora_a, p.w2_lora_b),
        )

    delta, active = run_moe_lora_ref(*arguments(p), adapter_enabled=p.adapter_enabled)
    naive, _ = run_moe_lora_ref(
        *arguments(p), adapter_enabled=p.adapter_enabled, dtype=p.spec.dtype
    )
    base = torch.randn(delta.shape, generator=make).to("cuda", p.spec.dtype)
    x, ids, weights, *adapters = arguments(there)
    batch = moelora.MoELoRABatchInfo(*adapters[:3], there.adapter_enabled)
    for fused in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sglang_ops, "should_use_fused_kernel", lambda m, k, fused=fused: fused)
            check_sum(
                lambda out: moelora.run_moe_lora(x, ids, weights, batch, *adapters[3:], out),
                *(base, delta, naive, active),
            )


@pytest.mark.parametrize("batch", seeds(500, FIRST + 2_000_000), ids=lambda r: f"from_{r.start}")
def test_deltas(batch):
    for seed in batch:
        with naming(f"seed {seed}"):
            check_delta(seed)


def test_seeds_repeat():
    first, second = draw(FIRST)[0], draw(FIRST)[0]
    assert first == second
    assert torch.equal(first.build().topk_ids, replace(second).build().topk_ids)
