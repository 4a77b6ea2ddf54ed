"""Layers whose base product stays with vLLM: its hooks for adapters are moelora's deltas."""

import pytest
import torch
from cases import Spec, same_bits
from test_vllm import SPECS
from vllm_hooks import LISTS, Deltas

pytest_plugins = ["vllm_fixtures"]

NAMES = "several_adapters ranks_and_room half_base disabled_adapters shared_outer one_slice "
NAMES += "expert_map one_adapter"


@pytest.mark.parametrize("name", NAMES.split())
def test_a_layer_around_the_hooks_is_the_exact_one(vllm, own, lines, name):
    """What lies behind a rank in the stacks is never read: here it would show."""
    layer = Deltas(vllm, SPECS[name].build()).step()
    layer.fill_padding(float("nan"))
    layer.check(layer())
    assert own.calls == []
    assert lines == []


def test_without_adapters_nothing_runs(vllm, own):
    p = Spec(mix="all_different", tokens=8).build()
    layer = Deltas(vllm, p)
    layer.step(torch.full((8,), -1))
    y = torch.randn(8, p.topk_ids.size(1), p.w13.size(1))
    before = y.clone()
    lists = layer.gate_up(y)
    assert lists == (None,) * 4
    layer.down(y, y, lists)
    assert same_bits(y, before)
    assert own.calls == []


def test_an_exchanged_mapping_comes_first(vllm, own):
    layer = Deltas(vllm, Spec(mix="many", tokens=9, remote=4).build())
    layer.step(torch.full((9,), -1))
    layer.experts._lora_context.local_token_lora_mapping = layer.p.token_lora_mapping
    layer.check(layer())


def test_a_delta_alone(vllm, own):
    """add_inputs=False, into zeros, as where the sum is made on another stream. Base rows keep
    their bits where it is added."""
    p = Spec(mix="half_base", tokens=9).build()
    layer = Deltas(vllm, p).step()
    bases = p.token_lora_mapping < 0
    assert bases.any()
    y = torch.randn(9, p.topk_ids.size(1), p.w13.size(1))
    alone = torch.zeros_like(y)
    layer.gate_up(alone, add_inputs=False)
    added = y.clone()
    layer.gate_up(added)
    torch.testing.assert_close(added, y + alone)
    assert same_bits(added[bases], y[bases]) and alone.any()


def test_fully_sharded_factors(vllm, own):
    """Half of A's rows of w13, half of B's rows of w2: two ranks, of which this is the second."""
    p = Spec(mix="all_different", ranks=(8, 8, 8), tokens=6, pass_ranks=False).build()
    layer = Deltas(vllm, p).step()
    ctx = layer.experts._lora_context
    gathered = []

    def all_gather(h):
        gathered.append(h)
        return torch.cat([torch.zeros_like(h), h], -1)  # the first rank's part is zero

    distributed = "vllm.distributed"
    vllm.set(distributed, "tensor_model_parallel_all_gather", all_gather)
    vllm.set(distributed, "tensor_model_parallel_all_reduce", lambda h: 2 * h)

    rows = p.topk_ids.size(1)
    wanted = torch.randn(6, rows, p.w13.size(1))
    got = wanted.clone()
    a = [s.clone() for s in ctx.w13_lora_a_stacked]
    for s in a:
        s[:, :, :4] = 0
    layer.gate_up(wanted, lora_a_stacked=a)
    lists = layer.gate_up(got, True, lora_a_stacked=[s[:, :, 4:] for s in a])
    torch.testing.assert_close(got, wanted)
    assert gathered[0].shape == (len(a), 6, rows, 4)

    hidden = p.w2.size(1)
    h = torch.randn(6, rows, p.w2.size(2))
    delta, got = torch.zeros(2, 6, rows, hidden)
    layer.down(delta, h, lists)
    (b,) = ctx.w2_lora_b_stacked
    layer.down(got, h, lists, True, tp_rank=1, lora_b_stacked=(b[:, :, hidden // 2 :],))
    torch.testing.assert_close(got[..., hidden // 2 :], 2 * delta[..., hidden // 2 :])
    assert not got[..., : hidden // 2].any()


def test_what_the_operators_refuse_stays_with_vllm(vllm, own, lines):
    p = Spec(mix="many", tokens=8, remote=4).build()
    layer = Deltas(vllm, p).step()
    y = torch.randn(8, p.topk_ids.size(1), p.w13.size(1))
    assert layer.gate_up(y, x=p.hidden_states.double()) == LISTS
    (call,) = own.calls
    assert call.name == "add_lora_w13" and torch.equal(call.topk_ids, p.topk_ids)
    (line,) = lines
    assert line.endswith("vLLM's own kernels add the adapters")

    layer.down(y, y, LISTS)  # vLLM's lists are handed on
    assert own.calls[-1].sorted_token_ids_lora == "sorted"

    lists = layer.gate_up(y)
    z, h = torch.zeros(8, p.topk_ids.size(1), p.w2.size(1)), torch.zeros(8, 2, p.w2.size(2))
    layer.down(z, h.double(), lists)  # too late for vLLM's lists: every row is a block
    call = own.calls[-1]
    assert call.name == "add_lora_w2" and call.sorted_token_ids_lora is None
    assert call.expert_ids_lora.tolist() == p.expert_map[p.topk_ids.reshape(-1).long()].tolist()


def test_a_wrapper_of_another_release_stays_with_vllm(vllm, own, lines):
    p = Spec(mix="many", tokens=8).build()
    layer = Deltas(vllm, p).step()
    del layer.punica.token_mapping_meta
    layer.gate_up(torch.zeros(8, p.topk_ids.size(1), p.w13.size(1)))
    assert [call.name for call in own.calls] == ["add_lora_w13"]
    (line,) = lines
    assert "token_mapping_meta" in line and line.endswith("vLLM's own kernels add the adapters")
