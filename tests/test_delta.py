"""The delta of adapters alone, in moelora's and in vLLM's form, against the fp64 loop."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import EDGE_CASES, Problem, Spec, random_specs, same_bits
from checks import assert_close_to_ref, assert_unchanged, guarded_empty
from delta_cases import Lists, columns_of, delta_kwargs, delta_operator

import moelora
from moelora.reference import fused_experts_lora_ref, naive_fused_experts_lora
from moelora.reference_delta import (
    active_rows,
    expand_ref,
    moe_lora_align_lists_ref,
    moe_lora_delta_ref,
    rows_of_lists,
    rows_of_routing,
    shrink_ref,
)

# vLLM's operators know neither true ranks nor scalings.
PLAIN = Spec(tokens=9, ranks=(8, 8, 8), pass_ranks=False, scalings=False, mix="many")
PROJECTIONS = ("w13", "w2")


def base_output(p: Problem, columns: int, offset: int = 0, extra: int = 0):
    """(M, top_k, offset + columns + extra) of values, some of them -0, between guard bands."""
    make = torch.Generator().manual_seed(1)
    values = torch.randn(*p.topk_ids.shape, offset + columns + extra, generator=make)
    values[..., ::5] = -0.0
    out = guarded_empty(values.shape, p.spec.dtype, p.topk_ids.device)
    out.tensor.copy_(values)
    return out


def check_result(out, before, delta64, naive, active, add, offset=0) -> float:
    """`out` is `before` plus, or is, the delta where rows are active, and its bits elsewhere."""
    dtype, columns = before.dtype, delta64.size(-1)
    y, before = out.cpu(), before.cpu()
    inside = slice(offset, offset + columns)
    rest = y.clone()
    rest[..., inside][active] = before[..., inside][active]
    assert same_bits(rest, before), "a row without an adapter, or another column, has changed"
    base = before[..., inside] if add else torch.zeros_like(before[..., inside])
    ref = (base.double() + delta64)[active]
    return assert_close_to_ref(y[..., inside][active], ref, (base + naive)[active], dtype)


# ---- routing and mapping as they are ----


def check_delta(p: Problem, projection: str, device: str, add: bool, weight: bool) -> None:
    there = p.to(device)
    options = {"mul_routed_weight": weight}
    delta, active = moe_lora_delta_ref(**delta_kwargs(p, projection, **options))
    naive, _ = moe_lora_delta_ref(**delta_kwargs(p, projection, **options), dtype=p.spec.dtype)
    inputs = {name: t.clone() for name, t in there.tensors().items()}
    out = base_output(there, delta.size(-1))
    before = out.tensor.clone() if add else torch.zeros_like(out.tensor)
    y = delta_operator(projection)(
        **delta_kwargs(there, projection, **options), add_inputs=add, out=out.tensor
    )
    out.check("out")
    assert y.data_ptr() == out.tensor.data_ptr()
    assert_unchanged(inputs, there.tensors())
    check_result(y, before, delta, naive, active, add)
    if not add:
        fresh = delta_operator(projection)(**delta_kwargs(there, projection, **options))
        assert same_bits(fresh, y)


@pytest.mark.parametrize("name", [n for n, s in EDGE_CASES.items() if s.mix != "absent"])
def test_edge_cases(name, device_and_dtype):
    device, dtype = device_and_dtype
    p = replace(EDGE_CASES[name], dtype=dtype).build()
    for projection in PROJECTIONS:
        for add, weight in ((True, False), (False, True)):
            check_delta(p, projection, device, add, weight)


def test_random_problems(device_and_dtype):
    device, dtype = device_and_dtype
    for spec in random_specs(80, first_seed=5000, dtypes=(dtype,)):
        if spec.mix == "absent":
            continue
        try:
            check_delta(
                spec.build(),
                PROJECTIONS[spec.seed % 2],
                device,
                spec.seed % 3 > 0,
                spec.seed % 5 > 2,
            )
        except Exception as error:
            raise AssertionError(f"{spec}: {error}") from error


@pytest.mark.parametrize("slices", [3, 4])
@pytest.mark.parametrize("rank", [1, 200, 512])
def test_slices_and_ranks(slices, rank, device_and_dtype):
    device, dtype = device_and_dtype
    spec = Spec(
        tokens=7, inter=slices * 10, slices=slices, activation="relu2", ranks=(rank, 3), dtype=dtype
    )
    check_delta(spec.build(), "w13", device, True, False)


def test_down_takes_rows_by_token_and_choice(device_and_dtype):
    device, dtype = device_and_dtype
    p = Spec(tokens=7, top_k=3, dtype=dtype).build().to(device)
    arguments = delta_kwargs(p, "w2")
    flat = moelora.moe_lora_down_delta(**arguments)
    arguments["x"] = arguments["x"].view(7, 3, -1)
    assert same_bits(moelora.moe_lora_down_delta(**arguments), flat)


def test_no_mapping_is_no_delta(device_and_dtype):
    device, dtype = device_and_dtype
    p = replace(Spec(dtype=dtype).build().to(device), token_lora_mapping=None)
    out = base_output(p, 64)
    before = out.tensor.clone()
    moelora.moe_lora_gate_up_delta(**delta_kwargs(p, "w13"), out=out.tensor)
    assert same_bits(out.tensor, before)
    assert not moelora.moe_lora_gate_up_delta(**delta_kwargs(p, "w13")).any()


def test_shared_factors_need_no_number_of_experts(device_and_dtype):
    """Wholly shared factors serve every expert id from 0 up; negative ids are skipped."""
    device, dtype = device_and_dtype
    p = Spec(tokens=12, experts=6, sharing="outer", ranks=(4, 8), dtype=dtype).build()
    p.topk_ids[0, 0] = -1
    arguments = delta_kwargs(p, "w13", num_experts=None)
    arguments["lora_b"] = [b[:, 2:3] for b in p.w13_lora_b]
    delta, active = moe_lora_delta_ref(**arguments)
    naive, _ = moe_lora_delta_ref(**arguments, dtype=dtype)
    there = {
        k: [t.to(device) for t in v] if isinstance(v, list) else v for k, v in arguments.items()
    }
    there = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in there.items()}
    y = moelora.moe_lora_gate_up_delta(**there)
    assert active[1:].any()
    assert not active[0, 0]
    assert_close_to_ref(y, delta, naive, dtype)


def test_deltas_around_an_activation_are_the_exact_layer(device_and_dtype):
    """What an engine with a quantised base does: its own products, our deltas."""
    device, dtype = device_and_dtype
    p = Spec(tokens=11, top_k=2, hidden=96, inter=48, ranks=(8, 3), dtype=dtype).build()
    there = p.to(device)
    gate_up = torch.einsum("mk,mjnk->mjn", there.hidden_states, there.w13[there.topk_ids.long()])
    moelora.moe_lora_gate_up_delta(**delta_kwargs(there, "w13"), out=gate_up)
    h = torch.nn.functional.silu(gate_up[..., :48]) * gate_up[..., 48:]
    z = torch.einsum("mji,mjki->mjk", h, there.w2[there.topk_ids.long()])
    moelora.moe_lora_down_delta(**delta_kwargs(there, "w2", x=h), out=z)
    y = (z.float() * there.topk_weights.unsqueeze(-1)).sum(1).to(dtype)
    ref = fused_experts_lora_ref(**p.kwargs())
    assert_close_to_ref(y, ref, naive_fused_experts_lora(**p.kwargs()), dtype)


# ---- vLLM's form ----


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
def test_fused_moe_lora(name, naive_form, device_and_dtype):
    device, dtype = device_and_dtype
    p = replace(VLLM_CASES[name], dtype=dtype).build()
    check_fused(p, "w13", device, naive_form)
    check_fused(p, "w2", device, naive_form, mul_routed_weight=True)
    check_fused(p, "w13", device, naive_form, add_inputs=False, offset=5)


@pytest.mark.parametrize("slices", [3, 4])
def test_fused_moe_lora_slices(slices, device_and_dtype):
    device, dtype = device_and_dtype
    spec = replace(PLAIN, inter=slices * 6, slices=slices, activation="relu2", dtype=dtype)
    for naive_form in (False, True):
        check_fused(spec.build(), "w13", device, naive_form)


def test_lists_that_are_not_active_do_not_count(device_and_dtype):
    """num_active_loras smaller than the slots: the rest of lora_ids is not looked at."""
    device, dtype = device_and_dtype
    p = replace(PLAIN, mix="all_different", dtype=dtype).build().to(device)
    lists = Lists(p, "w13", naive=False)
    lists.lora_ids = torch.tensor([2, -1, 0, 1], dtype=torch.int32, device=device)
    lists.num_active = torch.tensor([2])
    out = torch.zeros(9, 2, 64, device=device, dtype=dtype)
    lists.fused(out)
    only = (p.token_lora_mapping == 2).cpu()
    assert out.cpu()[only].any(-1).all()
    assert not out.cpu()[~only].any()


@pytest.mark.parametrize("how", ["no_lora_ids", "no_active", "disabled", "nobody", "no_tokens"])
def test_nothing_active_leaves_the_output_alone(how, device_and_dtype):
    device, dtype = device_and_dtype
    spec = replace(PLAIN, dtype=dtype, tokens=0 if how == "no_tokens" else 9)
    p = spec.build().to(device)
    if how == "nobody":
        p.token_lora_mapping.fill_(-1)
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


def test_garbage_in_lists_is_skipped(device_and_dtype):
    """Row and expert ids out of range name nothing, wherever they are."""
    device, dtype = device_and_dtype
    p = replace(PLAIN, dtype=dtype, mix="one").build()
    lists = Lists(p, "w13", naive=False)
    slot = p.token_lora_mapping[0].item()
    lists.sorted_token_ids[slot, 1] = -7
    lists.sorted_token_ids[slot, 2] = 2**31 - 1
    lists.expert_ids[slot, 1] = 4
    lists.num_tokens_post_padded[slot] = 2**31 - 1
    rows = rows_of_lists(
        18,
        *(lists.sorted_token_ids, lists.expert_ids, lists.num_tokens_post_padded),
        *(lists.lora_ids, lists.num_active.item(), 16, 4),
    )
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


def test_shrink_and_expand_are_the_halves(device_and_dtype):
    device, dtype = device_and_dtype
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


def test_fully_sharded_is_shrink_gather_expand(device_and_dtype):
    """Two tensor-parallel ranks: A sharded by rank, B by columns, all ranks of h gathered."""
    device, dtype = device_and_dtype
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


def test_fully_sharded_on_one_rank_needs_no_gather(device_and_dtype):
    device, dtype = device_and_dtype
    p = replace(PLAIN, dtype=dtype).build().to(device)
    lists = Lists(p, "w13", naive=True)
    whole, sharded = base_output(p, 64).tensor, base_output(p, 64).tensor
    lists.fused(whole)
    lists.fused(sharded, fully_sharded=True)
    assert same_bits(whole, sharded)


def test_same_inputs_same_bits(device_and_dtype):
    device, dtype = device_and_dtype
    p = Spec(tokens=70, hidden=320, inter=192, ranks=(64, 16, 5), dtype=dtype).build().to(device)
    first = moelora.moe_lora_gate_up_delta(**delta_kwargs(p, "w13"))
    for _ in range(5):
        assert same_bits(moelora.moe_lora_gate_up_delta(**delta_kwargs(p, "w13")), first)


def test_a_row_does_not_depend_on_its_neighbours(device_and_dtype):
    device, dtype = device_and_dtype
    p = Spec(tokens=40, hidden=96, mix="all_different", ranks=(4, 16, 64), dtype=dtype).build()
    there = p.to(device)
    whole = moelora.moe_lora_gate_up_delta(**delta_kwargs(there, "w13"))
    mapping = there.token_lora_mapping.clone()
    mapping[:39] = -1
    alone = moelora.moe_lora_gate_up_delta(**delta_kwargs(there, "w13", token_lora_mapping=mapping))
    assert same_bits(alone[39], whole[39])
    assert not alone[:39].any()


# ---- vLLM's form of the alignment ----


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("mix", ["many", "one", "none", "disabled", "out_of_range"])
def test_align_lists(mix, flat, device):
    p = Spec(
        tokens=50, top_k=3, experts=7, mix=mix, ranks=(1, 2, 3), routing="out_of_range", remote=2
    ).build()
    block_size, slots, experts = 8, 3, 9
    rows = 150 + experts * (block_size - 1)
    blocks = -(-rows // block_size)
    lora_ids = torch.tensor([2, -1, 0, 7, -5], dtype=torch.int32)
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


def test_lists_of_the_alignment_drive_the_delta(device_and_dtype):
    device, dtype = device_and_dtype
    p = replace(PLAIN, dtype=dtype, tokens=33).build().to(device)
    lists = Lists(p, "w13", naive=False)
    expected = base_output(p, 64).tensor
    lists.fused(expected)
    rows = 66 + 4 * 15
    shapes = ((3, rows), (3, -(-rows // 16)), (3,))
    made = [torch.full(s, -99, dtype=torch.int32, device=device) for s in shapes]
    moelora.moe_lora_align_block_size(
        *(p.topk_ids, p.token_lora_mapping, 4, 16, 3, rows, shapes[1][1], *made),
        *(None, lists.lora_ids),
    )
    lists.sorted_token_ids, lists.expert_ids, lists.num_tokens_post_padded = made
    out = base_output(p, 64).tensor
    lists.fused(out)
    assert same_bits(out, expected)


# ---- errors ----


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


DELTA_ERRORS = {
    "x: K": ({"x": zeros(9, 65)}, "x.size(1)", "lora_a[0].size(3) is 64"),
    "x: M": ({"x": zeros(8, 64)}, "x.size(0) is 8", "9", "18"),
    "x: dtype": ({"x": zeros(9, 64, dtype=torch.int32)}, "x has dtype int32"),
    "factors: dtype": ({"x": zeros(9, 64).bfloat16()}, "lora_a[0]", "float32", "bfloat16 as x"),
    "lora_b: rank": (
        {"lora_b": [zeros(3, 4, 32, 7), zeros(3, 4, 32, 7)]},
        "lora_b[0].size(3) is 7",
        "8",
    ),
    "lora_b: slots": ({"lora_b": [zeros(2, 4, 32, 8)] * 2}, "lora_b[0].size(0) is 2", "3"),
    "lora_b: experts": ({"lora_b": [zeros(3, 5, 32, 8)] * 2}, "num_experts is 4"),
    "slices": ({"lora_b": [zeros(3, 4, 32, 8)]}, "2 slices", "1"),
    "too many slices": ({"lora_a": [zeros(3, 4, 8, 64)] * 5}, "5 slices", "4"),
    "topk_ids": ({"topk_ids": zeros(9, 2)}, "topk_ids has dtype float32"),
    "mapping": (
        {"token_lora_mapping": zeros(8, dtype=torch.int32)},
        "token_lora_mapping",
        "8",
        "9",
    ),
    "ranks": ({"lora_ranks": zeros(2, dtype=torch.int32)}, "lora_ranks.size(0) is 2", "3"),
    "weights": (
        {"topk_weights": None, "mul_routed_weight": True},
        "topk_weights is absent",
    ),
    "num_experts": ({"num_experts": 5}, "num_experts is 5", "lora_a[0].size(1) is 4"),
}


@pytest.mark.parametrize("name", DELTA_ERRORS)
def test_delta_errors(name):
    changed, *texts = DELTA_ERRORS[name]
    p = PLAIN.build()
    out = base_output(p, 64)
    for add in (True, False):
        before = out.tensor.clone()
        with pytest.raises(ValueError) as error:
            moelora.moe_lora_gate_up_delta(
                **{**delta_kwargs(p, "w13"), **changed}, add_inputs=add, out=out.tensor
            )
        for text in texts:
            assert text in str(error.value), str(error.value)
        assert same_bits(out.tensor, before), "something was written before the error"


VLLM_ERRORS = {
    "offset": (lambda a: a.update(offset=5), "offset is 5", "at most 4"),
    "negative offset": (lambda a: a.update(offset=-1), "offset is -1"),
    "output": (lambda a: a.update(output=zeros(9, 2, 60)), "output has 60 columns", "64"),
    "output: dtype": (
        lambda a: a.update(output=zeros(9, 2, 68).half()),
        "output has dtype float16",
    ),
    "input": (lambda a: a.update(x=zeros(9, 60)), "qcurr_hidden_states.size(1)", "60"),
    "rank": (lambda a: a.update(rank=16), "max_lora_rank is 16", "8"),
    "top_k": (lambda a: a.update(top_k=3), "top_k_num is 3", "2"),
    "tiles": (lambda a: a.update(tiles=(16, 32, 64, 8, 0, 3, 1)), "shrink_num_warps is 0"),
    "sorted_token_ids": (
        lambda a: a.update(sorted=a["sorted"].long()),
        "sorted_token_ids has dtype int64",
    ),
    "expert_ids": (lambda a: a.update(experts=a["experts"][:, :1]), "expert_ids.size(1) is 1"),
    "lora_ids": (lambda a: a.update(active=torch.tensor([7])), "num_active_loras is 7", "6"),
    "num_active_loras": (
        lambda a: a.update(active=torch.zeros(2, dtype=torch.int32)),
        "num_active_loras has 2 elements",
    ),
    "enabled": (
        lambda a: a.update(enabled=zeros(9, dtype=torch.int32)),
        "adapter_enabled.size(0) is 9",
    ),
    "same memory": (lambda a: a.update(x=a["output"][:, 0, :64]), "shares memory"),
}


@pytest.mark.parametrize("name", VLLM_ERRORS)
def test_fused_moe_lora_errors(name):
    change, *texts = VLLM_ERRORS[name]
    p = PLAIN.build()
    lists = Lists(p, "w13", naive=False)
    given = {
        "output": torch.ones(9, 2, 68),
        "x": p.hidden_states,
        "sorted": lists.sorted_token_ids,
        "experts": lists.expert_ids,
        "rank": 8,
        "top_k": 2,
        "active": lists.num_active,
        "enabled": None,
        "tiles": (16, 32, 64, 8, 4, 3, 1),
        "offset": 0,
    }
    output = given["output"]
    change(given)
    with pytest.raises(ValueError) as error:
        moelora.fused_moe_lora(
            *(given["output"], given["x"], lists.a, lists.b, p.topk_weights, given["sorted"]),
            *(given["experts"], lists.num_tokens_post_padded, p.token_lora_mapping),
            *(given["rank"], given["top_k"], lists.lora_ids, given["active"], given["enabled"]),
            *given["tiles"],
            *(16, 32, 64, 8, 4, 3, 1),
            offset=given["offset"],
        )
    for text in texts:
        assert text in str(error.value), str(error.value)
    assert (output == 1).all(), "something was written before the error"
