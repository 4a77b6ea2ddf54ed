"""Tables of ids and ranks of any integer dtype: nothing wraps, nothing is cut to an integer."""

from __future__ import annotations

import pytest
import torch
from cases import Spec, same_bits
from delta_cases import delta_kwargs
from streams import Captured

import moelora
from moelora.operators.call import enabled_or_absent, ids_or_absent, weights_or_absent

INT32 = torch.iinfo(torch.int32)
WIDE = 2**32
# An int64 value, and one of int32 that means the same: out of every range on the same side.
BEYOND = {"expert_map": (WIDE, INT32.max), "lora_ranks": (WIDE + 3, INT32.max)}


def layer(p):
    return [moelora.fused_experts_lora(**p.kwargs())]


def projection(p):
    return [moelora.fused_moe_lora_gemm(**p.gemm_kwargs("w13"))]


def delta(p):
    return [moelora.moe_lora_gate_up_delta(**delta_kwargs(p, "w13"))]


def alignment(p):
    return moelora.moe_lora_align_block_size(**p.align_kwargs(4))


def base_alignment(p):
    experts = p.expert_map.size(0)
    return moelora.moe_align_block_size(p.topk_ids, 4, experts, expert_map=p.expert_map)


def sorting(p):
    experts = p.expert_map.size(0)
    sort = moelora.moe_sorting(p.topk_ids, p.topk_weights, experts, 4, expert_map=p.expert_map)
    return [t for t in sort if t.numel()]


TABLES = {
    "expert_map": [layer, projection, delta, alignment, base_alignment, sorting],
    "lora_ranks": [layer, projection, delta],
    "adapter_enabled": [layer, projection, delta, alignment],
}
CASES = [pytest.param(t, c, id=f"{t}-{c.__name__}") for t, calls in TABLES.items() for c in calls]


def problem(device, table, values):
    """Everything on, no adapter of another rank, and `table` as given."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    p = Spec(tokens=9, remote=2, scalings=False, dtype=dtype, ranks=(16, 16)).build()
    p.adapter_enabled = torch.ones(2, dtype=torch.bool)
    setattr(p, table, values)
    return p.to(device)


USUAL = {"expert_map": [0, 1, 2, 3, -1, -1], "lora_ranks": [16, 16], "adapter_enabled": [1, 0]}


def table_of(table, *beyond, dtype=torch.int64):
    """The table as it is, its last entries replaced."""
    values = USUAL[table]
    return torch.tensor([*values[: len(values) - len(beyond)], *beyond], dtype=dtype)


@pytest.mark.parametrize(("table", "call"), CASES)
def test_other_integers_mean_the_same(device, table, call):
    want = call(problem(device, table, table_of(table, dtype=torch.int32)))
    for dtype in (torch.int64, torch.int16, torch.int8):
        found = call(problem(device, table, table_of(table, dtype=dtype)))
        assert all(map(same_bits, found, want)), dtype


@pytest.mark.parametrize(("table", "call"), [c for c in CASES if c.values[0] in BEYOND])
def test_what_is_out_of_range_stays_there(device, table, call):
    wide, narrow = BEYOND[table]
    found = call(problem(device, table, table_of(table, wide)))
    want = call(problem(device, table, table_of(table, narrow, dtype=torch.int32)))
    assert all(map(same_bits, found, want))
    found = call(problem(device, table, table_of(table, -wide)))
    want = call(problem(device, table, table_of(table, INT32.min, dtype=torch.int32)))
    assert all(map(same_bits, found, want))


@pytest.mark.parametrize("call", TABLES["adapter_enabled"])
@pytest.mark.parametrize("value", [WIDE, -1, 2, -WIDE])
def test_an_adapter_is_off_only_at_zero(device, call, value):
    want = call(problem(device, "adapter_enabled", table_of("adapter_enabled", 1)))
    found = call(problem(device, "adapter_enabled", table_of("adapter_enabled", value)))
    assert all(map(same_bits, found, want))
    off = call(problem(device, "adapter_enabled", table_of("adapter_enabled", 0)))
    assert not all(map(same_bits, found, off))


@pytest.mark.parametrize(("table", "call"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex64])
def test_fractions_are_refused(table, call, dtype):
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(TypeError, match=f"{table} has dtype {name}, expected .*int32"):
        call(problem("cpu", table, table_of(table, dtype=dtype)))


def test_adapters_of_the_lists_do_not_wrap():
    """vLLM's form: 2**32 names no adapter, where it would be adapter 0 once cut."""
    p = Spec(tokens=9, ranks=(16, 16)).build()
    arguments = {k: v for k, v in p.align_kwargs(4).items() if k != "expert_map"}

    def lists(lora_ids):
        outs = [torch.full((2, n), 77, dtype=torch.int32) for n in (400, 100)]
        outs += [torch.full((2,), 77, dtype=torch.int32)]
        named = ("sorted_token_ids", "expert_ids", "num_tokens_post_pad")
        moelora.moe_lora_align_block_size(
            **arguments,
            max_num_tokens_padded=400,
            max_num_m_blocks=100,
            **dict(zip(named, outs, strict=True)),
            lora_ids=lora_ids,
        )
        return outs

    found = lists(torch.tensor([WIDE, 1]))
    want = lists(torch.tensor([INT32.max, 1], dtype=torch.int32))
    assert all(map(same_bits, found, want))
    with pytest.raises(TypeError, match="lora_ids has dtype float32, expected int32"):
        lists(torch.tensor([0.0, 1.0]))


def test_every_integer_dtype_of_torch():
    absent = torch.empty(0)
    for dtype in (torch.uint8, torch.uint16, torch.uint32, torch.int8, torch.int16, torch.int64):
        largest = min(torch.iinfo(dtype).max, INT32.max)
        values = torch.tensor([0, 1, torch.iinfo(dtype).max], dtype=dtype)
        assert ids_or_absent("ids", values, absent).tolist() == [0, 1, largest]
        assert ids_or_absent("ids", values, absent).dtype == torch.int32
        assert enabled_or_absent(values, absent).tolist() == [False, True, True]
    with pytest.raises(TypeError, match="ids has dtype bool, expected int32"):
        ids_or_absent("ids", torch.ones(3, dtype=torch.bool), absent)
    assert weights_or_absent("weights", torch.ones(3), absent).dtype == torch.float32
    for given in (ids_or_absent, weights_or_absent):
        assert given("table", None, absent) is absent


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_no_table_is_waited_for():
    """Wide tables are clamped on the device: a graph captures the call."""
    p = problem("cuda", "expert_map", table_of("expert_map", WIDE))
    p.lora_ranks, p.adapter_enabled = p.lora_ranks.long(), p.adapter_enabled.long()
    assert same_bits(Captured(lambda: layer(p)[0]).replay(), layer(p)[0])
