"""Adapters alone in vLLM's form: its operators and its lists, against the fp64 loop."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import Problem, Spec, same_bits
from checks import assert_close_to_ref, guarded_empty
from delta_cases import PLAIN, Lists, base_output, check_result, columns_of, delta_kwargs

import moelora
from moelora.reference.delta import (
    active_rows,
    expand_ref,
    moe_lora_align_lists_ref,
    moe_lora_delta_ref,
    rows_of_routing,
    shrink_ref,
)


def check_fused(p: Problem, projection: str, device: str, naive_form: bool, **options) -> None:
    there = p.to(device)
    add, offset = options.get("add_inputs", True), options.get("offset", 0)
    weight = options.get("mul_routed_weight", False)
    arguments = delta_kwargs(p, projection, mul_routed_weight=weight, expert_map=None)
    delta, active = moe_lora_delta_ref(**arguments)
    naive, _ = moe_lora_delta_ref(**arguments, dtype=p.spec.dtype)
    out = base_output(there, columns_of(p, projection), offset, extra=3)
    before = out.tensor.clone()
    Lists(there, projection, naive_form).fused(out.tensor, **options)
    out.check("output")
    check_result(out.tensor, before, delta, naive, active, add, offset)


VLLM_CASES = {
    "plain": PLAIN,
    "one_token": replace(PLAIN, tokens=1, mix="one"),
    "one_slice": replace(PLAIN, slices=1),
    "three_slices": replace(PLAIN, inter=18, slices=3, activation="relu2"),
    "four_slices": replace(PLAIN, inter=24, slices=4, activation="relu2"),
    "shared_outer": replace(PLAIN, sharing="outer"),
    "stride_zero_experts": replace(PLAIN, sharing="expanded"),
    "rank_512": replace(PLAIN, ranks=(512, 512)),
    "odd_sizes": replace(PLAIN, hidden=33, inter=7, top_k=3, ranks=(5, 5)),
    "disabled": replace(PLAIN, mix="disabled", tokens=12),
    "disabled_vllm_length": replace(PLAIN, mix="disabled", tokens=12, seed=1),
    "out_of_range": replace(PLAIN, mix="out_of_range", routing="out_of_range", tokens=20),
    "nobody": replace(PLAIN, mix="none"),
    "many_rows": replace(PLAIN, tokens=120, experts=3, mix="half_base"),
    "strided": replace(PLAIN, strided=8),
    "int64_ids": replace(PLAIN, int64_ids=True),
}


@pytest.mark.parametrize("naive_form", [False, True], ids=["lists", "naive"])
@pytest.mark.parametrize("name", VLLM_CASES)
def test_fused_moe_lora(name, naive_form, device, dtype):
    p = replace(VLLM_CASES[name], dtype=dtype).build()
    check_fused(p, "w13", device, naive_form)
    check_fused(p, "w2", device, naive_form, mul_routed_weight=True)
    check_fused(p, "w13", device, naive_form, add_inputs=False, offset=5)


def test_lists_that_are_not_active_do_not_count(device, dtype):
    """num_active_loras smaller than the slots: the rest of lora_ids is not looked at."""
    p = replace(PLAIN, mix="all_different", dtype=dtype).build().to(device)
    lists = Lists(p, "w13", naive=False)
    lists.lora_ids = torch.tensor([2, -1, 0, 1], dtype=torch.int32, device=device)
    lists.num_active = torch.tensor([2])
    out = torch.zeros(9, 2, 64, device=device, dtype=dtype)
    lists.fused(out)
    only = (p.token_lora_mapping == 2).cpu()
    assert out.cpu()[only].any(-1).all()
    assert not out.cpu()[~only].any()


@pytest.mark.parametrize("how", ["no_lora_ids", "no_active", "disabled", "no_tokens"])
def test_nothing_active_leaves_the_output_alone(how, device, dtype):
    spec = replace(PLAIN, dtype=dtype, tokens=0 if how == "no_tokens" else 9)
    p = spec.build().to(device)
    for naive_form in (False, True):
        lists = Lists(p, "w13", naive_form)
        if how == "no_lora_ids":
            lists.lora_ids.fill_(-1)
        if how == "no_active":
            lists.num_active.fill_(0)
        if how == "disabled":
            lists.p = replace(p, adapter_enabled=torch.zeros(4, dtype=torch.int32, device=device))
        if naive_form and how in ("no_lora_ids", "no_active"):
            continue  # without lists, the mapping alone says what is active
        for add in (True, False):
            out = base_output(p, 64)
            before = out.tensor.clone()
            lists.fused(out.tensor, add_inputs=add)
            assert same_bits(out.tensor, before)


def test_garbage_in_lists_is_skipped(device, dtype):
    """Row and expert ids out of range name nothing, wherever they are."""
    p = replace(PLAIN, dtype=dtype, mix="one").build()
    lists = Lists(p, "w13", naive=False)
    slot = p.token_lora_mapping[0].item()
    skipped = lists.sorted_token_ids[slot, [1, 2, *range(16, 32)]].tolist()
    lists.sorted_token_ids[slot, 1] = -7
    lists.sorted_token_ids[slot, 2] = 2**31 - 1
    lists.expert_ids[slot, 1] = 4
    lists.num_tokens_post_padded[slot] = 2**31 - 1
    rows = rows_of_routing(p.topk_ids, p.token_lora_mapping, 4, 3)
    rows = [None if row in skipped else pair for row, pair in enumerate(rows)]
    active = active_rows(rows, 2)
    assert active.any()
    assert not active.all()
    delta, naive = (
        expand_ref(shrink_ref(lists.x, lists.a, rows, 2, dtype=d), lists.b, rows, dtype=d)
        for d in (torch.float64, dtype)
    )
    there = Lists(p.to(device), "w13", naive=False)
    for name in ("sorted_token_ids", "expert_ids", "num_tokens_post_padded"):
        getattr(there, name).copy_(getattr(lists, name))
    out = base_output(there.p, 64)
    before = out.tensor.clone()
    there.fused(out.tensor)
    out.check("output")
    check_result(out.tensor, before, delta, naive, active, True)


def test_shrink_and_expand_are_the_halves(device, dtype):
    p = replace(PLAIN, dtype=dtype, top_k=3).build()
    there = p.to(device)
    for naive_form in (False, True):
        lists = Lists(there, "w13", naive_form)
        rows = rows_of_routing(p.topk_ids, p.token_lora_mapping, 4, 3)
        active = active_rows(rows, 3)
        ref, naive = (
            shrink_ref(p.hidden_states, p.w13_lora_a, rows, 3, dtype=d)
            for d in (torch.float64, dtype)
        )
        h = guarded_empty(ref.shape, dtype, device)
        h.tensor.fill_(7.0)
        lists.shrink(h.tensor, lists.a)
        h.check("a_intermediate_cache1")
        got = h.tensor.cpu()
        assert (got[:, ~active] == 7.0).all(), "a row without an adapter was written"
        assert_close_to_ref(got[:, active], ref[:, active], naive[:, active], dtype)

        whole, halves = base_output(there, 64).tensor, base_output(there, 64).tensor
        lists.fused(whole, mul_routed_weight=True)
        lists.expand(halves, h.tensor, lists.b, mul_routed_weight=True)
        assert same_bits(whole, halves)


@pytest.mark.parametrize("naive_form", [False, True], ids=["lists", "naive"])
@pytest.mark.parametrize("experts", [1, None])
def test_one_expert_is_not_an_unknown_number(experts, naive_form, device, dtype):
    """With one expert, id 5 names nothing; where their number is unknown, all share the factors."""
    p = replace(PLAIN, experts=6, mix="one", top_k=1, dtype=dtype).build().to(device)
    shared = {name: [f[:, :1] for f in getattr(p, name)] for name in ("w13_lora_a", "w13_lora_b")}
    p = replace(p, **shared)
    p.topk_ids[:, 0] = torch.tensor([0, 5, 0, 5, 5, 0, 1, 2, 0])
    lists = Lists(p, "w13", naive_form)
    lists.num_experts = experts
    active = (p.topk_ids == 0) | (experts is None)
    h = torch.zeros(2, 9, 1, 8, dtype=dtype, device=device)
    lists.shrink(h, lists.a)
    assert torch.equal(h.any(-1).all(0), active)
    halves, whole = (torch.zeros(9, 1, 64, dtype=dtype, device=device) for _ in range(2))
    lists.expand(halves, h, lists.b)
    assert torch.equal(halves.any(-1), active)
    lists.fused(whole)
    assert same_bits(halves, whole)


@pytest.mark.parametrize("naive_form", [False, True], ids=["lists", "naive"])
def test_no_experts_are_no_unknown_number_either(naive_form):
    lists = Lists(PLAIN.build(), "w13", naive_form)
    lists.num_experts = 0
    for call in (
        lambda: lists.shrink(torch.zeros(2, 9, 2, 8), lists.a),
        lambda: lists.expand(torch.zeros(9, 2, 64), torch.zeros(2, 9, 2, 8), lists.b),
        lambda: lists.fused(torch.zeros(9, 2, 64)),
    ):
        with pytest.raises(ValueError, match="num_experts is 0, expected at least 1"):
            call()


def test_fully_sharded_is_shrink_gather_expand(device, dtype):
    """Two tensor-parallel ranks: A sharded by rank, B by columns, all ranks of h gathered."""
    p = replace(PLAIN, dtype=dtype, hidden=48, ranks=(16,) * 3).build()
    there = p.to(device)
    delta, active = moe_lora_delta_ref(**delta_kwargs(p, "w2", mul_routed_weight=True))
    naive, _ = moe_lora_delta_ref(**delta_kwargs(p, "w2", mul_routed_weight=True), dtype=dtype)
    shards = [
        replace(there, w2_lora_a=a, w2_lora_b=b)
        for a, b in zip(there.w2_lora_a.chunk(2, 2), there.w2_lora_b.chunk(2, 2), strict=True)
    ]
    h = []
    for shard in shards:
        h.append(torch.zeros(1, 9, 2, 8, dtype=dtype, device=device))
        lists = Lists(shard, "w2", naive=False)
        lists.shrink(h[-1], lists.a)
    gathered = torch.cat(h, dim=-1)
    out = base_output(there, 48)
    before = out.tensor.clone()
    for rank, shard in enumerate(shards):
        Lists(shard, "w2", naive=False).fused(
            out.tensor,
            mul_routed_weight=True,
            fully_sharded=True,
            offset=24 * rank,
            gather=lambda own, rank=rank: gathered if same_bits(own, h[rank]) else None,
        )
    check_result(out.tensor, before, delta, naive, active, True)


def test_fully_sharded_on_one_rank_needs_no_gather(device, dtype):
    p = replace(PLAIN, dtype=dtype).build().to(device)
    lists = Lists(p, "w13", naive=True)
    whole, sharded = base_output(p, 64).tensor, base_output(p, 64).tensor
    lists.fused(whole)
    lists.fused(sharded, fully_sharded=True)
    assert same_bits(whole, sharded)


# ---- alignment ----


def check_align_lists(spec: Spec, block_size: int, device: str, flat: bool = False) -> None:
    """Some of the lists, others untouched; `flat` without a dimension of adapters."""
    p = spec.build()
    slots, experts = len(spec.ranks), spec.experts + spec.remote
    rows = p.topk_ids.numel() + experts * (block_size - 1)
    blocks = -(-rows // block_size)
    lora_ids = torch.tensor([slots - 1, -1, 0, slots + 4, -5], dtype=torch.int32)
    arguments = {"adapter_enabled": p.adapter_enabled, "expert_map": p.expert_map}
    expected = moe_lora_align_lists_ref(
        *(p.topk_ids, p.token_lora_mapping, experts, block_size, slots),
        **arguments,
        lora_ids=lora_ids,
        rows=rows,
        blocks=blocks,
        untouched=0x5A5A5A5A,
    )
    outputs = [
        guarded_empty((slots, n) if n else (slots,), torch.int32, device) for n in (rows, blocks, 0)
    ]
    given = [o.tensor.view(-1) if flat else o.tensor for o in outputs]
    found = moelora.moe_lora_align_block_size(
        *(p.topk_ids.to(device), p.token_lora_mapping.to(device), experts, block_size, slots),
        *(rows, blocks, *given),
        *(None if t is None else t.to(device) for t in (p.adapter_enabled, lora_ids, p.expert_map)),
    )
    assert found is None
    for name, output, want in zip(("rows", "experts", "used"), outputs, expected, strict=True):
        output.check(name)
        assert torch.equal(output.tensor.cpu(), want), name


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("mix", ["many", "one", "none", "disabled", "out_of_range"])
def test_align_lists(mix, flat, device):
    spec = Spec(tokens=50, top_k=3, experts=7, mix=mix, ranks=(1, 2, 3), remote=2)
    check_align_lists(replace(spec, routing="out_of_range"), 8, device, flat)
