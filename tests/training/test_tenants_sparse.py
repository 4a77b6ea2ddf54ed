"""Gradients of touched pairs by autograd, and tenants that train with them."""

from dataclasses import replace

import pytest
import torch
from backward_cases import LAYER, OPERATORS, SPARSE, SPARSE_SPECS, each, with_factors
from cases import same_bits
from checks import largest_allocation
from conftest import on_gpu
from gradient_cases import FEW_PLACES, grad_like, leaves
from tenant_house import LAYERS, PLACES, House, K, alone, draw, same

import moelora
from moelora.adapters.write import peft_tensors, save
from moelora.operators.call import factor_list
from moelora.operators.sparse import set_sparse
from moelora.training import Tenants, touched_pairs
from moelora.training.tenants import tenants as module

SPARSE_PLACES = [p for p in PLACES if p.values[0][3]]


# ---- by autograd ----


def gradients(operator, arguments, grad_seed, sparse, wide=False, function=None):
    """Gradients of x and of all factors, and the leaves of factors."""
    if wide:
        arguments = with_factors(arguments, torch.Tensor.float)
    given = leaves(arguments, (operator.x, *operator.factors))
    factors = [t for n in operator.factors for t in factor_list(given[n])]
    set_sparse(factors, sparse)
    out = (function or operator)(**given)
    out.backward(grad_like(out.shape, out.dtype, out.device, grad_seed))
    return [given[operator.x].grad, *(f.grad for f in factors)], factors


@each(OPERATORS)
@pytest.mark.parametrize("name", SPARSE_SPECS)
@pytest.mark.parametrize("place", FEW_PLACES)
def test_bits_of_dense_gradients(place, name, operator):
    p = replace(SPARSE_SPECS[name], dtype=place[1]).build().to(place[0])
    experts, loras = p.w13.size(0), p.w2_lora_b.size(0)
    pairs, count = touched_pairs(p.topk_ids, p.token_lora_mapping, loras, experts, p.expert_map)
    for wide in (False, True):
        dense, found = (
            gradients(operator, operator.arguments(p), 1, sparse, wide)[0]
            for sparse in (False, True)
        )
        assert same_bits(found[0], dense[0])
        for got, want in zip(found[1:], dense[1:], strict=True):
            if want.size(1) == experts:
                assert got.is_sparse and got._nnz() == count
                assert torch.equal(got.coalesce().indices(), (pairs >= 0).nonzero().T)
                got = got.to_dense()
            assert got.dtype == want.dtype and torch.equal(got, want)


@pytest.mark.parametrize("place", FEW_PLACES)
def test_a_factor_of_two_calls(place):
    """Autograd adds them up, of the pairs of either."""
    arguments, _ = LAYER.problem(SPARSE, place)
    _, factors = gradients(LAYER, arguments, 1, True)
    other = arguments | {"topk_ids": (arguments["topk_ids"] + 1) % 5}
    shared = dict(zip(LAYER.factors, [factors[:2], factors[2:4], *factors[4:]], strict=True))
    out = LAYER(**other | shared)
    grad_out = grad_like(out.shape, out.dtype, out.device, 2)
    out.backward(grad_out)
    assert all(factor.grad.is_sparse for factor in factors)
    once, _ = gradients(LAYER, arguments, 1, True)
    second, _ = gradients(LAYER, other, 2, True)
    for factor, a, b in zip(factors, once[1:], second[1:], strict=True):
        torch.testing.assert_close(factor.grad.to_dense(), a.to_dense() + b.to_dense())


def test_calls_that_are_compiled_have_dense_gradients():
    arguments, _ = LAYER.problem(SPARSE, ("cpu", torch.float32))
    want, _ = gradients(LAYER, arguments, 1, False)
    compiled = torch.compile(moelora.fused_experts_lora, backend="aot_eager")
    found, _ = gradients(LAYER, arguments, 1, True, function=compiled)
    assert all(same_bits(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("place", [on_gpu("cuda")])
def test_calls_that_are_captured_have_dense_gradients(place):
    """The number of pairs of a graph's replay is not known."""
    arguments, grad_out = LAYER.problem(SPARSE, (place, torch.bfloat16))
    with torch.cuda.stream(torch.cuda.Stream()):
        gradients(LAYER, arguments, 1, True)
    want, _ = gradients(LAYER, arguments, 1, False)
    graph = torch.cuda.CUDAGraph()
    given = leaves(arguments, LAYER.factors)
    factors = [t for n in LAYER.factors for t in factor_list(given[n])]
    set_sparse(factors, True)
    with torch.cuda.graph(graph):
        out = LAYER(**given)
        found = torch.autograd.grad(out, factors, grad_out)
    graph.replay()
    torch.cuda.synchronize()
    for got, wanted in zip(found, want[1:], strict=True):
        assert same_bits(got, wanted)


@pytest.mark.parametrize("place", [on_gpu("cuda")])
def test_a_stream_of_ones_own(place):
    """The copy of the table to the host is awaited where the backward needs it."""
    arguments, _ = LAYER.problem(SPARSE, (place, torch.bfloat16))
    want, _ = gradients(LAYER, arguments, 1, False)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)
        found, _ = gradients(LAYER, arguments, 1, True)
        dense = [g.to_dense() for g in found[1:]]
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(dense, want[1:], strict=True))


# ---- tenants ----


def test_updates_are_those_of_dense_gradients(monkeypatch):
    """Without the zeros of pairs that no row has reached."""
    place = SPARSE_PLACES[0].values[0]
    factors, steps = alone(place, "code", range(6))
    monkeypatch.setattr(module, "set_sparse", lambda *_: None)
    dense, its_steps = alone(place, "code", range(6))
    assert same(factors, dense)
    assert [s.updated for s in steps] == [s.updated for s in its_steps]


def test_pairs_that_every_batch_reaches_move_as_with_adamw():
    """Up to eps, which SparseAdam adds before the correction of bias: gradients are large here."""
    place = PLACES[0].values[0]
    house = House(place)
    start = []
    for name, sparse in (("law", True), ("med", False)):
        generator = torch.Generator().manual_seed(1)
        house.add(name, rank=4, lr=1e-2, weight_decay=0.0, sparse=sparse, generator=generator)
        start.append(house.factors(name))
    assert same(*start)
    w13, w2 = house.weights[0]
    x = draw(0, 8, K)
    ids = torch.arange(4).repeat(2)[:, None]
    for n in range(5):
        out = moelora.fused_experts_lora(
            x.repeat(2, 1),
            *(w13, w2, torch.ones(16, 1), ids.repeat(2, 1)),
            token_lora_mapping=house.pool.mapping(["law"] * 8 + ["med"] * 8),
            **house.pool.layer(LAYERS[0].name),
        )
        law, med = (1e6 * (part - n).square().mean() for part in out.split(8))
        house.tenants.step({"law": law, "med": med})
    for a, b, before in zip(house.factors("law"), house.factors("med"), start[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-4)
        assert before.eq(a).all() or not torch.allclose(a, before, rtol=1e-3)


@pytest.mark.parametrize("place", SPARSE_PLACES)
def test_a_pair_whose_gradient_is_zero_moves_by_its_moments(place):
    """As with dense gradients; one that no row reaches does not."""
    house = House(place)
    house.add("law", lr=1e-2)
    w13, w2 = house.weights[0]

    def step(expert, weight):
        out = moelora.fused_experts_lora(
            *(draw(1, 6, K).to(place[0], place[1]), w13, w2, torch.ones(6, 1, device=place[0])),
            torch.full((6, 1), expert, device=place[0]),
            token_lora_mapping=house.pool.mapping(["law"] * 6),
            **house.pool.layer(LAYERS[0].name),
        )
        before = house.factors("law")
        assert house.tenants.step({"law": out.float().square().mean() * weight})["law"].updated
        changed = [
            (a != b).flatten(1).any(1).tolist()
            for a, b in zip(house.factors("law"), before, strict=True)
        ]
        assert not any(map(any, changed[4:])), "of the other layer"
        assert not any(factor[e] for factor in changed[:4] for e in range(4) if e != expert)
        return changed[3]  # B of w2

    assert step(0, 1.0) == [True, False, False, False]
    assert step(2, 1.0) == [False, False, True, False]
    assert step(0, 0.0) == [True, False, False, False]


@pytest.mark.parametrize("place", SPARSE_PLACES)
def test_tenants_of_both_kinds(place):
    """One has the trajectory that it has alone, whichever gradients the others have."""
    dense = (*place[:3], False)
    house = House(dense, "law")
    house.steps(["law"], range(1))
    house.add("code", sparse=True)
    house.steps(["code", "law"], range(1, 4))
    house.add("med", sparse=True, weight_decay=0.0)
    house.steps(["med", "code", "law"], range(4, 6))
    house.tenants.remove("code")
    house.tenants.remove("med")
    house.steps(["law"], range(6, 7))
    house.assert_as_alone(["law"], range(7))
    again = House(dense, "law")
    again.add("code", sparse=True)
    again.steps(["law", "code"], range(1, 6))
    assert same(again.factors("code"), alone_from(place, "code", range(1, 6)))


@pytest.mark.parametrize("place", SPARSE_PLACES)
@pytest.mark.parametrize("leaves", [1, 2])
def test_sparse_gradients_that_become_dense_within_an_accumulation(place, leaves):
    """A tenant accumulates three batches, the first ones beside a sparse tenant that leaves."""
    place = (*place[:2], place[1], False)
    found = []
    for others in ([], ["med"]):
        house = House(place)
        house.add("law", accumulation=3)
        for name in others:
            house.add(name, sparse=True, weight_decay=0.0)
        house.steps([*others, "law"], range(leaves))
        for name in others:
            house.tenants.remove(name)
        house.steps(["law"], range(leaves, 6))
        found.append(house.factors("law"))
    assert same(*found)


@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
def test_accumulated_gradients_of_scaled_factors_are_resumed(sparse, tmp_path):
    """Where the pool multiplies scalings into B, the parameter's gradient is not the stack's."""
    place = ("cpu", torch.bfloat16, torch.bfloat16, sparse)
    house = House(place, "law")
    adapter = house.tenants["law"].adapter()
    for pairs in adapter.experts.values():
        pairs["down"] = replace(pairs["down"], scalings=[1.3])
    house.tenants.remove("law")
    save(tmp_path, *peft_tensors(adapter, house.pool.layers, {}))
    tenant = house.add("law", tmp_path, accumulation=2)
    house.steps(["law"], range(1))
    house.tenants.save("law", tmp_path)
    again = House(place)
    resumed = again.add("law", tmp_path, resume=True)
    assert resumed.pending == 1
    for found, wanted in zip(resumed.gradients(), tenant.gradients(), strict=True):
        assert same_bits(found.to_dense(), wanted.to_dense())


def alone_from(place, name, numbers):
    house = House(place, max_loras=1)
    house.add(name)
    house.steps([name], numbers)
    return house.factors(name)


def test_a_step_takes_the_memory_of_its_pairs(device):
    """Of 8 slots of 64 experts, four tokens of two tenants reach 8 pairs."""
    experts, slots, rank, wide = 64, 8, 8, 64
    layer = moelora.MoELayer("experts", experts, wide, wide)
    pool = moelora.AdapterPool(
        [layer], slots, rank, dtype=torch.float32, w13_slices=1, device=device
    )
    tenants = Tenants(pool)
    for name in ("law", "med"):
        tenants.add(name, rank=rank, sparse=True, accumulation=2)
    w13, w2 = (draw(n, experts, wide * (2 - n), wide).to(device).bfloat16() for n in range(2))
    x = draw(2, 4, wide).to(device).bfloat16()
    ids = torch.arange(8, device=device).view(4, 2)
    stacks = tenants._stacks
    of_pair = max(stack[0, 0].nbytes for stack in stacks)

    def losses():
        out = moelora.fused_experts_lora(
            *(x, w13, w2, torch.ones(4, 2, device=device), ids),
            token_lora_mapping=pool.mapping(["law", "law", "med", "med"]),
            **pool.layer("experts"),
        )
        return {"law": out[:2].float().sum(), "med": out[2:].float().sum()}

    for _ in range(3):  # the first update makes the moments, of all experts
        tenants.step(losses())
    for name in ("law", "med"):
        assert all(rows.values.size(0) == 4 for rows in tenants[name].current.held)
    with largest_allocation() as found:
        assert all(step.updated for step in tenants.step(losses()).values())
    assert found.nbytes <= 8 * of_pair  # the gradient of both tenants
    assert all(stack.grad is None for stack in stacks)


@pytest.mark.parametrize("place", SPARSE_PLACES)
def test_a_closed_house_has_dense_gradients(place):
    house = House(place, "law")
    stack = house.tenants._stacks[0]
    house.tenants.close()
    stack.requires_grad_()
    house.losses(["law"], 0)["law"].backward()
    assert not stack.grad.is_sparse
