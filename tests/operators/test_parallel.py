"""One layer split over ranks, whose parts add up to the whole: tensor and expert parallel.

Nothing in moelora communicates; an engine gives each rank its shard of the layer and of the
adapters, and adds the outputs (all-reduce). `tensor_parallel` and `expert_parallel` say which
shard that is.
"""

from dataclasses import replace

import pytest
import torch
from cases import Problem, Spec
from checks import assert_close_to_ref

import moelora
from moelora.reference import fused_experts_lora_ref, naive_fused_experts_lora


def tensor_parallel(p: Problem, rank: int, ranks: int) -> Problem:
    """Shard `rank` of the intermediate size: rows of w13 and of its B, columns of w2 and its A.

    A of w13 and B of w2 are whole on every rank. So is the bias of w2, which one rank adds.
    """
    size = p.spec.inter // ranks
    mine = slice(rank * size, (rank + 1) * size)

    def rows(t, dim):
        """Of w13 and what is laid out like it: gate rows then up rows, pairs, or up alone."""
        if p.spec.activation == "relu2":
            return t.movedim(dim, 0)[mine].movedim(0, dim)
        pairs = (-1, 2) if p.spec.activation == "swigluoai" else (2, -1)
        split = t.unflatten(dim, pairs)
        inter = dim if pairs[1] == 2 else dim + 1
        return split.movedim(inter, 0)[mine].movedim(0, inter).flatten(dim, dim + 1)

    spec = replace(p.spec, inter=size)
    shard = replace(p, spec=spec, w13=rows(p.w13, 1), w2=p.w2[..., mine], rows=p.rows[:, mine])
    if p.w13_bias is not None:
        shard.w13_bias = rows(p.w13_bias, 1)
        shard.w2_bias = p.w2_bias if rank == 0 else torch.zeros_like(p.w2_bias)
    if p.w13_lora_b is not None:
        if isinstance(p.w13_lora_b, list):
            shard.w13_lora_b = [b[:, :, mine] for b in p.w13_lora_b]
        else:
            shard.w13_lora_b = rows(p.w13_lora_b, 2)
        shard.w2_lora_a = p.w2_lora_a[..., mine]
    return shard


def expert_parallel(p: Problem, owner: torch.Tensor, rank: int) -> Problem:
    """The experts that `owner` gives to `rank`, and their own factors; shared ones go to all."""
    mine = (owner == rank).nonzero().flatten()
    expert_map = torch.full_like(owner, -1)
    expert_map[mine] = torch.arange(len(mine), dtype=owner.dtype)

    def local(t):
        if isinstance(t, list):
            return [local(one) for one in t]
        return t if t is None or t.size(1) == 1 else t[:, mine]

    shard = replace(p, w13=p.w13[mine], w2=p.w2[mine], expert_map=expert_map)
    if p.w13_bias is not None:
        shard.w13_bias, shard.w2_bias = p.w13_bias[mine], p.w2_bias[mine]
    for name in ("w13_lora_a", "w13_lora_b", "w2_lora_a", "w2_lora_b"):
        setattr(shard, name, local(getattr(p, name)))
    return shard


def check(p: Problem, shards: list[Problem], device: str, dtype: torch.dtype) -> None:
    """The sum of the shards is as good as the sum of naive shards, and none is idle."""
    ref = fused_experts_lora_ref(**p.kwargs())
    ours, naive = (
        [function(**shard.to(device).kwargs()).float() for shard in shards]
        for function in (moelora.fused_experts_lora, naive_fused_experts_lora)
    )
    assert all(part.any() for part in ours)
    assert_close_to_ref(sum(ours).to(dtype), ref, sum(naive), dtype)


SPECS = {
    "mixed_ranks": Spec(ranks=(1, 33, 16, 64), spare_rank=3),
    "one_slice": Spec(slices=1),
    "biases": Spec(bias=True),
    "shared_outer": Spec(sharing="outer", ranks=(3, 16)),
    "stride_zero_experts": Spec(sharing="expanded"),
    "swigluoai": Spec(activation="swigluoai", slices=1, bias=True),
    "swigluoai_uninterleave": Spec(activation="swigluoai_uninterleave", limit=0.5, bias=True),
    "relu2": Spec(activation="relu2", slices=1, bias=True),
    "no_adapters": Spec(mix="absent", bias=True),
    "disabled": Spec(mix="disabled", ranks=(8, 4, 16)),
    "weight_on_input": Spec(top_k=1, weight_on_input=True, bias=True),
    "strange_ids": Spec(routing="out_of_range", mix="out_of_range"),
    "strided": Spec(strided=8, bias=True, sharing="outer"),
}


@pytest.fixture(params=SPECS)
def problem(request, device, dtype):
    spec = replace(SPECS[request.param], tokens=37, experts=8, top_k=3, dtype=dtype)
    if spec.weight_on_input:
        spec = replace(spec, top_k=1)
    return spec.build()


@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_parallel(problem, ranks, device, dtype):
    shards = [tensor_parallel(problem, rank, ranks) for rank in range(ranks)]
    assert [shard.w2.size(2) for shard in shards] == [problem.spec.inter // ranks] * ranks
    check(problem, shards, device, dtype)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("placement", ["linear", "round_robin", "uneven"])
def test_expert_parallel(problem, ranks, placement, device, dtype):
    experts = torch.arange(problem.spec.experts, dtype=torch.int32)
    owner = {
        "linear": experts * ranks // len(experts),
        "round_robin": experts % ranks,
        "uneven": (experts - 1).clamp(0, ranks - 1),
    }[placement]
    shards = [expert_parallel(problem, owner, rank) for rank in range(ranks)]
    assert sum(shard.w13.size(0) for shard in shards) == len(experts)
    check(problem, shards, device, dtype)


def test_both(problem, device, dtype):
    owner = torch.arange(problem.spec.experts, dtype=torch.int32) % 2
    halves = [expert_parallel(problem, owner, rank) for rank in range(2)]
    shards = [tensor_parallel(half, rank, 2) for half in halves for rank in range(2)]
    check(problem, shards, device, dtype)


def test_a_rank_without_experts_gives_zeros(device, dtype):
    p = Spec(tokens=9, bias=True, dtype=dtype).build()
    shard = expert_parallel(p, torch.tensor([0, 1, 1, 1], dtype=torch.int32), 0)
    shard.topk_ids = shard.topk_ids.clamp(min=1)
    assert not moelora.fused_experts_lora(**shard.to(device).kwargs()).any()
