"""`MultiLoraExperts`: what trains in a slot is what trains alone, whatever the other slots do."""

from copy import deepcopy

import pytest
import torch
from test_sampler_bits import WEIGHTS, draw_weights
from torch.utils._pytree import tree_flatten

import moelora
from moelora.training import Held, LoraSlot, MultiLoraExperts, Tenants, set_adapters

E, TOP_K, K, I, SLOTS = 8, 2, 256, 128, 3  # noqa: E741
RANKS = (16, 3, 8)


def experts(weights, device, slots=SLOTS, dtype=torch.bfloat16, **options):
    made = draw_weights(weights, torch.Generator(device).manual_seed(0), dtype)
    return MultiLoraExperts(*made, slots=slots, max_rank=16, **options)


def opened(module, slot, adapter):
    """Slot with the adapter that is called so; its B is not zero, so that all factors train."""
    draws = torch.Generator().manual_seed(adapter)
    one = LoraSlot(module, slot).open(rank=RANKS[adapter], alpha=8.0, generator=draws)
    held = one.take()
    for pair in held.adapter.experts["experts"].values():
        pair.b.normal_(std=0.1, generator=draws)
    one.put(held)
    return one


def batch(adapters, slots, device="cpu", number=0):
    """Rows of each adapter, which depend on the adapter and number alone, and their slots."""
    seeds = {n: torch.Generator().manual_seed(100 * number + n) for n in adapters}
    rows = {n: 5 + 2 * n for n in adapters}
    x = torch.cat([torch.randn(rows[n], K, generator=seeds[n]) for n in adapters])
    logits = torch.cat([torch.randn(rows[n], E, generator=seeds[n]) for n in adapters])
    weights, ids = logits.softmax(-1).topk(TOP_K)
    index = torch.tensor(slots).repeat_interleave(torch.tensor([rows[n] for n in adapters]))
    return [t.to(device) for t in (x.bfloat16(), ids, weights, index)]


def train(module, adapters, slots, number=0):
    device = module.lora_ranks.device
    module(*batch(adapters, slots, device, number)).float().square().sum().backward()


def gradients(slot):
    return [p.grad for p in slot.parameters()]


def factors(adapter):
    return [(pair.a, pair.b) for pair in adapter.experts["experts"].values()]


def same(found, wanted):
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("weights", WEIGHTS)
def test_gradients_are_those_of_training_alone(weights, device):
    """Of frozen experts in every format, in the bits."""
    module = experts(weights, device)
    slots = [opened(module, 2 - n, n) for n in range(SLOTS)]
    train(module, [2, 0, 1], [0, 2, 1])
    for n, slot in enumerate(slots):
        alone = experts(weights, device, slots=1)
        one = opened(alone, 0, n)
        train(alone, [n], [0])
        assert same(gradients(slot), gradients(one))
        assert all(grad.any() for grad in gradients(slot))
        rank = RANKS[n]
        assert not any(g[:, rank:].any() for g in gradients(slot)[::2])  # beyond the true rank
    assert not [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]


def test_gradients_are_those_of_tenants(tmp_path):
    """What both train from the same factors is the same, and a saved slot continues there."""
    module = experts("16 bits", "cpu")
    slot = opened(module, 1, 0)
    optimizer = torch.optim.AdamW(slot.parameters(), lr=1e-2, weight_decay=0.0)
    slot.save(tmp_path / "before")
    layer = moelora.MoELayer("experts", E, K, I)
    pool = moelora.AdapterPool([layer], 1, 16, w13_slices=1, dtype=torch.float32)
    tenants = Tenants(pool)
    tenant = tenants.add("law", tmp_path / "before", lr=1e-2)
    x, ids, weights, _ = batch([0], [1])

    def both(number):
        x, ids, weights, index = batch([0], [1], number=number)
        module(x, ids, weights, index).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        out = moelora.fused_experts_lora(
            *(x, module.w13, module.w2, weights, ids),
            token_lora_mapping=pool.mapping(["law"] * len(x)),
            **pool.layer("experts"),
        )
        tenants.step({"law": out.float().square().sum()})
        return factors(slot.read().adapter)

    def of_tenant():
        return factors(tenants["law"].adapter())

    assert tenant.updates == 0
    for number in range(3):
        for found, wanted in zip(both(number), of_tenant(), strict=True):
            assert same(found, wanted)
    slot.save(tmp_path / "after", optimizer)
    tenants.remove("law")
    tenants.add("law", tmp_path / "after", resume=True)
    for found, wanted in zip(both(3), of_tenant(), strict=True):
        assert same(found, wanted)


@pytest.mark.parametrize("host", [True, False])
def test_its_tensors_are_the_same_adapter(host):
    """For engines, which take them from memory."""
    module = experts("16 bits", "cpu")
    slot = opened(module, 1, 1)
    config, tensors = slot.tensors(host=host)
    held = {p.untyped_storage().data_ptr() for p in slot.parameters()}
    assert not host or not any(t.untyped_storage().data_ptr() in held for t in tensors.values())
    LoraSlot(module, 2).open(tensors, config=config)
    one, two = (module(*batch([0], [n])).float() for n in (1, 2))
    torch.testing.assert_close(one, two, rtol=0.02, atol=1e-3)
    assert (one - module(*batch([0], [-1])).float()).abs().max() > 0.1


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.SGD(p, 1e-2, 0.9),
    ],
)
def test_a_swap_to_the_host_changes_no_bit(device, make):
    """Neither the adapter that comes back to another slot, nor the one that stays, nor what is
    held, which may be put again, changes."""
    stays, goes = [], []
    for swaps in (False, True):
        module = experts("16 bits", device)
        first, second = opened(module, 0, 0), opened(module, 1, 1)
        optimizers = [make(slot.parameters()) for slot in (first, second)]
        train(module, [0, 1], [0, 1], 0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        train(module, [1, 0], [1, 0], 1)  # gradients of which are accumulated
        if swaps:
            held = second.take(optimizers[1])
            pinned = [a.is_pinned() for pair in factors(held.adapter) for a in pair]
            assert all(a.device.type == "cpu" for a, _ in factors(held.adapter))
            assert pinned == [device == "cuda"] * len(pinned)
            before = deepcopy(held.state)
            guest = opened(module, 1, 2)
            train(module, [0, 2], [0, 1], 2)
            guest.close()
            second = LoraSlot(module, 2)
            optimizers[1] = make(second.parameters())
            second.put(held, optimizers[1])
        else:
            train(module, [0], [0], 2)
        at = second.slot
        train(module, [1, 0], [at, 0], 3)
        for optimizer in optimizers:
            optimizer.step()
        for into, slot in ((stays, first), (goes, second)):
            into.append(
                [t for p in slot.read().adapter.experts["experts"].values() for t in (p.a, p.b)]
            )
    assert same(*stays) and same(*goes)
    both = (tree_flatten(state["factors"])[0] for state in (held.state, before))
    assert same(*([t for t in each if isinstance(t, torch.Tensor)] for each in both))


@pytest.mark.parametrize("more", [[], ["other"]])
def test_a_slot_has_the_gradients_of_what_is_put_into_it(more):
    """Neither zeros of a backward of other slots, nor any in layers that the adapter lacks."""
    module = experts("16 bits", "cpu")
    slot = opened(module, 0, 0)
    train(module, [0], [0])
    slot.parameters()[1].grad = None
    before = gradients(slot)
    held = slot.take(torch.optim.AdamW(slot.parameters()))
    opened(module, 1, 1)
    train(module, [1], [1])  # which gives the others zeros
    layers = {"experts": module} | {name: experts("16 bits", "cpu") for name in more}
    slot = LoraSlot(torch.nn.ModuleDict(layers), 2)
    slot.put(held)
    got = gradients(slot)
    assert [grad is None for grad in got] == [False, True, False, False] + [True] * (len(got) - 4)
    assert same(*([g for g in each if g is not None] for each in (got, before)))


def test_rows_and_sequences(tmp_path):
    """An index per sequence is that of its rows; -1, a slot that is not open and one that there is
    not are the base."""
    module = experts("16 bits", "cpu")
    opened(module, 0, 0), opened(module, 2, 1)
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(4, 3, K, generator=draws).bfloat16()
    weights, ids = torch.randn(4, 3, E, generator=draws).softmax(-1).topk(TOP_K)
    index = torch.tensor([2, -1, 0, 1])
    out = module(x, ids, weights, index)
    assert torch.equal(out, module(x, ids, weights, index.repeat_interleave(3)))
    flat = module(x.flatten(0, 1), ids.flatten(0, 1), weights.flatten(0, 1), index)
    assert torch.equal(out.flatten(0, 1), flat)
    base = module(x, ids, weights)
    assert torch.equal(out[[1, 3]], base[[1, 3]]) and not torch.equal(out[[0, 2]], base[[0, 2]])
    far = module(x, ids, weights, torch.tensor([2**32, -(2**32), 3, 2**40 + 2]))
    assert torch.equal(far, base)
    assert module(x[:0], ids[:0], weights[:0], index).shape == x[:0].shape
    set_adapters(torch.nn.Sequential(module), index)
    assert torch.equal(module(x, ids, weights), out)


def test_an_optimizer_writes_what_a_moved_module_reads():
    module = experts("16 bits", "cpu")
    slot = opened(module, 1, 0)
    optimizer = torch.optim.SGD(slot.parameters(), 1.0)
    module._apply(torch.clone)
    train(module, [0], [1])
    rows = batch([0], [1])
    before = module(*rows)
    optimizer.step()
    assert not torch.equal(module(*rows), before)


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("act", ["open", "step"])
def test_a_slot_that_changes_before_the_backward_makes_it_raise(act, moved):
    module = experts("16 bits", "cpu")
    opened(module, 0, 0)
    if act == "step":
        opened(module, 1, 1)
    if moved:
        module.to("cpu")
    loss = module(*batch([0], [0])).sum()
    if act == "open":
        opened(module, 1, 1)
    else:
        parameters = LoraSlot(module, 1).parameters()
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        torch.optim.SGD(parameters, 1.0).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_an_optimizer_writes_to_a_free_slot_is_in_no_adapter():
    """A loop that steps all optimizers: moments move the zeros of a slot that was closed."""
    module = experts("16 bits", "cpu")
    adapter = LoraSlot(module, 0).open(rank=4).take().adapter
    del adapter.experts["experts"]["gate_up"]
    adapter.experts["experts"]["down"].b.fill_(0.1)
    down = Held(adapter, None)
    LoraSlot(module, 1).put(down)
    rows = batch([0], [1])
    wanted = module(*rows)
    slot = opened(module, 0, 0)
    optimizer = torch.optim.AdamW(slot.parameters(), 0.1)
    train(module, [0], [0])
    optimizer.step()
    slot.close()
    train(module, [0], [1])
    optimizer.step()
    slot.put(down)
    assert torch.equal(module(*rows[:3], torch.zeros_like(rows[3])), wanted)


def test_scalings_stay_float32():
    module = experts("16 bits", "cpu")
    LoraSlot(module, 0).open(rank=3, alpha=1.0)
    module.to(torch.bfloat16)
    assert module.lora_scalings.tolist() == torch.tensor([1 / 3, 1.0, 1.0]).tolist()


def adam(module, slot):
    return torch.optim.AdamW(LoraSlot(module, slot).parameters())


BAD = {
    "optimizer": (lambda m: LoraSlot(m, 2).take(adam(m, 1)), "other parameters than slot 2"),
    "slot": (lambda m: LoraSlot(m, 3), "slot is 3, wanted 0 to 2, those of experts"),
    "no experts": (lambda m: LoraSlot(torch.nn.Linear(2, 2), 0), "has no MultiLoraExperts"),
    "rank": (lambda m: LoraSlot(m, 0).open(rank=17), "rank is 17, wanted 1 to 16"),
    "no rank": (lambda m: LoraSlot(m, 0).open(rank=2.5), "rank is 2.5, wanted an integer >= 1"),
    "alpha": (lambda m: LoraSlot(m, 0).open(alpha=float("nan")), "alpha is nan, wanted a finite"),
    "twice": (lambda m: LoraSlot(m, 0).open().open(), "slot 0 has an adapter: take it or close"),
    "empty": (lambda m: LoraSlot(m, 0).take(), "slot 0 has no adapter"),
    "no state": (
        lambda m: LoraSlot(m, 0).put(opened(m, 1, 0).read(), adam(m, 0)),
        "held has no state of an optimizer",
    ),
    "rows": (lambda m: m(*batch([0], [0])[:3], torch.zeros(2).int()), "has 2 numbers for 5 rows"),
    "a list": (lambda m: set_adapters(m, [0]), "adapters is a list, wanted a tensor of integers"),
    "floats": (lambda m: m(*batch([0], [0])[:3], torch.zeros(5)), "torch.float32, wanted integers"),
    "a mask": (lambda m: set_adapters(m, torch.ones(5).bool()), "dtype torch.bool, wanted int"),
    "no slots": (lambda m: set_adapters(torch.nn.ReLU(), torch.tensor([0])), "has no MultiLora"),
    "shapes": (lambda m: again(m, w2=m.w13), "w13 and w2 are .* wanted"),
    "a matrix": (lambda m: again(m, w13=m.w13[0]), "w13 and w2 are .256, 256. and .* wanted"),
}


def again(module, **changed):
    weights = {"w13": module.w13, "w2": module.w2}
    return MultiLoraExperts(**weights | changed, slots=1, max_rank=1)


@pytest.mark.parametrize("bad", BAD)
def test_refusals_write_nothing(bad):
    module = experts("16 bits", "cpu")
    kept = opened(module, 2, 0)
    before = [p.clone() for p in kept.parameters()]
    call, why = BAD[bad]
    with pytest.raises(ValueError, match=why):
        call(module)
    assert same(kept.parameters(), before)
    assert not any(p.any() for p in LoraSlot(module, 0).parameters()) or bad == "twice"


@pytest.mark.parametrize("e, i", [(E, 2 * I), (E, I // 2), (2 * E, I)])
def test_an_adapter_of_other_sizes_is_refused(e, i):
    module = experts("16 bits", "cpu")
    held = opened(module, 0, 0).take()
    other = MultiLoraExperts(torch.ones(e, 2 * i, K), torch.ones(e, K, i), slots=1, max_rank=16)
    slot = LoraSlot(other, 0)
    with pytest.raises(ValueError, match="the adapter's .* of experts is .*, wanted"):
        slot.put(held)
    assert not slot.is_open and not any(p.any() for p in slot.parameters())


def test_another_optimizer_leaves_the_slot_free():
    module = experts("16 bits", "cpu")
    slot = opened(module, 0, 0)
    held = slot.take(torch.optim.AdamW(slot.parameters()))
    with pytest.raises(ValueError, match="is of the optimizer AdamW, not of SGD"):
        slot.put(held, torch.optim.SGD(slot.parameters(), 1.0))
    assert not slot.is_open
    slot.put(held)
