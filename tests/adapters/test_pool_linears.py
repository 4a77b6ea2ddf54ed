"""AdapterPool of linear layers and embeddings: what lies in their stacks, and where."""

import torch
from linear_cases import EXPERTS, GATE, HEAD, LINEARS, PREFIX, E, K, Q, pair

from moelora.adapters import AdapterPool, LinearLayer

CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 12, "rank_pattern": {"lm_head": 2}}


def make_pool(**options):
    defaults = {"dtype": torch.float32, "linears": LINEARS, "max_linear_rank": 5}
    return AdapterPool(EXPERTS, 2, 16, **defaults | options)


def state(seed=0):
    torch.manual_seed(seed)
    q, q_factors = pair(Q, K, 10)
    head, head_factors = pair(HEAD, K, 20, 2)
    a, b = torch.randn(4, 20), torch.randn(K, 4)
    embedding = f"{PREFIX}model.embed_tokens.lora_embedding_"
    whole = {**q, **head, f"{embedding}A": a, f"{embedding}B": b}
    return whole, {Q: q_factors, HEAD: head_factors, "model.embed_tokens": (a, b)}


def delta_of(pool, name, slot):
    """What the stacks add to the weight of a layer, (out, in)."""
    factors = pool.linear(name)
    a, b = factors["lora_a"][slot, 0], factors["lora_b"][slot, 0]
    rank = int(factors["lora_ranks"][slot])
    a = a.T if pool.linears[name].embedding else a
    assert not a[rank:].any() and not b[:, rank:].any(), "nothing beyond the rank"
    return b.float() @ a.float()


def test_factors_scaling_and_ranks():
    pool = make_pool()
    whole, factors = state()
    pointers = [t.data_ptr() for t in pool._tensors()]
    slot = pool.add("a", whole, config=CONFIG)
    for name in pool.linears:
        wanted = torch.zeros(pool.linears[name].out_features, pool.linears[name].in_features)
        if name in factors:
            a, b = factors[name]
            wanted = (6.0 if name == HEAD else 3.0) * b @ a
        torch.testing.assert_close(delta_of(pool, name, slot), wanted, rtol=1e-5, atol=1e-5)
    ranks = {name: pool.linear(name)["lora_ranks"].tolist() for name in (Q, HEAD, GATE)}
    assert ranks == {Q: [4, 0], HEAD: [2, 0], GATE: [0, 0]}
    assert pool.lora_ranks.tolist() == [0, 0], "no factors of experts"
    only = pair(GATE, K, E)[0]
    pool.add("b", only, config=CONFIG)
    pool.add("a", only, config=CONFIG, replace=True)
    assert not delta_of(pool, Q, slot).any() and delta_of(pool, GATE, slot).any()
    assert pool.linear(Q)["lora_ranks"].tolist() == [0, 0]
    assert [t.data_ptr() for t in pool._tensors()] == pointers


def test_memory():
    bare, pool = make_pool(linears=()), make_pool()
    numbers = sum(8 * (layer.in_features + layer.out_features) for layer in LINEARS)  # R is 8
    assert pool.memory_bytes() - bare.memory_bytes() == 2 * 4 * (numbers + len(LINEARS))


def test_places():
    other = torch.device("cpu", 0)
    places = {Q: (other, torch.bfloat16), EXPERTS[1].name: (other, torch.float16)}
    pool = make_pool(places=places)
    assert pool.devices == (torch.device("cpu"), other)
    assert pool.linear(Q)["lora_a"].dtype == torch.bfloat16
    assert pool.layer(EXPERTS[1].name)["w2_lora_a"].dtype == torch.float16
    assert pool.layer(EXPERTS[0].name)["w2_lora_a"].dtype == torch.float32
    pool.add("a", state()[0], config=CONFIG)
    tables = [pool.layer(layer.name)["adapter_enabled"] for layer in EXPERTS]
    assert tables[0] is not tables[1] and tables[0].tolist() == tables[1].tolist() == [True, False]
    pool.disable("a")
    assert not any(table.any() for table in tables)


def test_linear_layers_alone():
    alone = AdapterPool([], 1, 4, linears=[LinearLayer("x", 8, 8)], dtype=torch.float32)
    alone.add("a", pair("x", 8, 8)[0], config=CONFIG)
