"""AdapterPool while it serves: slots, eviction, pins, mappings, threads."""

import pytest
import torch
from adapter_cases import (
    CONFIG,
    LAYERS,
    E,
    K,
    N,
    add,
    assert_unchanged,
    change,
    check,
    make_pool,
    per_expert,
    snapshot,
    wrapped,
)

from moelora.adapters import AdapterPool


def test_sources_of_adapters_that_do_not_go_together():
    pool = make_pool()
    with pytest.raises(ValueError, match="a state dict needs config="):
        pool.add("a", wrapped()[0])
    with pytest.raises(ValueError, match="config= is for state dicts"):
        pool.add("a", "folder", config=CONFIG)
    for factors in (pool.layer, pool.linear):
        with pytest.raises(KeyError, match="'x' is none of the pool's l"):
            factors("x")


def test_hot_add_and_remove():
    pool = make_pool(max_loras=2)
    pointers = [t.data_ptr() for t in pool._tensors()]
    assert [add(pool, "a"), add(pool, "b", 1)] == [0, 1]
    with pytest.raises(ValueError, match="'a' is already loaded"):
        add(pool, "a", 2)
    pool.remove("a")
    assert "a" not in pool and pool.adapter_enabled.tolist() == [False, True]
    assert pool.lora_ranks.tolist() == [0, 4]
    with pytest.raises(KeyError, match=r"no adapter 'a' is loaded; loaded are \['b'\]"):
        pool.lookup("a")
    assert add(pool, "c", 5) == 0
    check(pool, "c", wrapped(seed=5)[1], 2.0)
    check(pool, "b", wrapped(seed=1)[1], 2.0)
    assert add(pool, "b", 6, replace=True) == 1
    check(pool, "b", wrapped(seed=6)[1], 2.0)
    assert pointers == [t.data_ptr() for t in pool._tensors()]


def test_slot_of_larger_adapter_leaves_nothing_behind():
    pool = make_pool(max_loras=1)
    add(pool, "large", r=8)
    pool.add("small", wrapped(r=4, r_down=2)[0], config=CONFIG | {"rank_pattern": {"down_proj": 2}})
    assert pool.names() == ["small"]
    stacks = pool.layer(LAYERS[0].name)
    assert not stacks["w2_lora_a"][0, :, 2:].any() and not stacks["w2_lora_b"][0, :, :, 2:].any()


def test_adapters_with_one_a_for_gate_and_up_are_marked():
    """In two slices they have it twice, and a layer reads one of both."""
    pool = make_pool(max_loras=1)
    table = pool.layer(LAYERS[0].name)["w13_one_a"]
    add(pool, "fused")
    assert table.tolist() == [1]
    apart = per_expert()[0]
    assert pool.add("apart", apart, config=CONFIG) == 0
    assert table.tolist() == [0]
    key = "base_model.model.model.layers.0.mlp.experts.{}.{}_proj.lora_A.weight"
    for e in range(E):
        apart[key.format(e, "up")] = apart[key.format(e, "gate")].clone()
    pool.add("equal", apart, config=CONFIG)
    assert table.tolist() == [1]
    pool.add("half", {k: t for k, t in apart.items() if ".up_proj." not in k}, config=CONFIG)
    assert table.tolist() == [0]


def test_least_recently_used_is_evicted(caplog):
    pool = make_pool(max_loras=3)
    for seed, name in enumerate("abc"):
        add(pool, name, seed)
    pool.mapping(["a", None, "a"])
    pool.lookup("b")
    assert pool.names() == ["c", "a", "b"]
    assert add(pool, "d", 3) == 2
    assert pool.names() == ["a", "b", "d"]
    assert "adapter 'c' is evicted from slot 2 for 'd'" in caplog.text
    acts = (pool.lookup, pool.version, pool.remove, pool.enable, pool.disable)
    for call in (*acts, lambda name: change(pool, name, 0)):
        with pytest.raises(KeyError, match=r"'c' is loaded: it was evicted for 'd', as .* 3 slots"):
            call("c")
    pool.pin("a")
    assert add(pool, "e", 4, pin=True) == 1
    assert pool.names() == ["a", "d", "e"]
    pool.pin("d")
    before = snapshot(pool)
    with pytest.raises(RuntimeError, match="no slot for adapter 'f': all 3 are pinned or in use"):
        add(pool, "f", 5)
    assert_unchanged(pool, before)
    pool.pin("a", False)
    assert add(pool, "f", 5) == 0
    pool.remove("f")
    add(pool, "c", 2)
    pool.remove("c")
    with pytest.raises(KeyError, match="no adapter 'c' is loaded; loaded are"):
        pool.lookup("c")


def test_a_batch_that_was_released_is_refused():
    pool, other = make_pool(max_loras=1), make_pool(max_loras=1)
    add(pool, "a")
    add(other, "a")
    with pool.hold(["a"]) as held:
        with pytest.raises(RuntimeError, match="held= is of another pool"):
            other.mapping(["a"], held=held)
    for act in (
        lambda: pool.mapping(["a"], held=held),
        lambda: pool.lookup("a", held=held),
        lambda: held.version("a"),
    ):
        with pytest.raises(RuntimeError, match="this batch was released"):
            act()
    held.wait()  # for nothing


def test_a_version_stays_while_it_is_held():
    pool = make_pool(max_loras=2)
    old = add(pool, "a")
    add(pool, "b", 5)
    with pool.hold(["a"]) as held:
        assert change(pool, "a", 1) == 2
        assert pool.names() == ["a"], "b had to leave its slot"
        new = pool.lookup("a")
        assert new != old and pool.lookup("a", held=held) == old
        assert pool.mapping(["a", None], held=held).tolist() == [old, -1]
        assert pool.mapping(["a", None]).tolist() == [new, -1]
        kept = pool.layer(LAYERS[0].name)["w2_lora_a"]
        check(pool, "a", wrapped(seed=1)[1], 2.0)
        own = make_pool(max_loras=2)
        add(own, "a")
        assert torch.equal(kept[old], own.layer(LAYERS[0].name)["w2_lora_a"][0])
        with pytest.raises(RuntimeError, match="no slot for adapter 'b': all 2 are pinned or in"):
            pool.pin("a")
            add(pool, "b", 5)
        with pool.hold(["a"]):
            with pytest.raises(RuntimeError, match="no slot for the new version of adapter 'a'"):
                change(pool, "a", 2)
        assert change(pool, "a", 2) == 3, "no batch holds the second one"
    add(pool, "b", 5)
    assert pool.lookup("b") == old and pool.names() == ["a", "b"]


def test_mapping():
    pool = make_pool()
    add(pool, "a")
    add(pool, "b", 1)
    got = pool.mapping(["b", None, "a", "b"])
    assert got.dtype == torch.int32 and got.tolist() == [1, -1, 0, 1]
    assert pool.mapping([]).tolist() == []
    out = torch.full((6,), 9, dtype=torch.int32)
    assert pool.mapping(["a", "b"], out=out) is out
    assert out.tolist() == [0, 1, -1, -1, -1, -1]
    with pytest.raises(KeyError, match="no adapter 'c'"):
        pool.mapping(["a", "c"], out=out)
    with pytest.raises(ValueError, match=r"out is torch.int32 \(6,\)"):
        pool.mapping(["a"] * 7, out=out)


def test_memory():
    pool = AdapterPool(LAYERS, 3, 8, dtype=torch.bfloat16)
    factors = 3 * E * 8 * (2 * (K + N) + (N + K)) * 2 * len(LAYERS)
    assert pool.memory_bytes() == factors + 3 * (4 + 4 + 4 + 1)
    # The expert dimension of the three outer factors is gone; R is rounded up to 8.
    shared = AdapterPool(LAYERS, 3, 5, dtype=torch.bfloat16, shared_outer=True)
    outer = 3 * (E - 1) * 8 * 3 * K * 2 * len(LAYERS)
    assert shared.memory_bytes() == pool.memory_bytes() - outer
