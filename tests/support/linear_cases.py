"""Factors of linear layers and embeddings beside experts, in a model of a few numbers."""

import torch
from adapter_cases import CONFIG, rand

from moelora.adapters import LinearLayer, MoELayer, load

E, K, I, R = 3, 8, 6, 4
EXPERTS = [MoELayer(f"model.layers.{n}.mlp.experts", E, K, I) for n in range(2)]
Q, GATE, HEAD = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.gate", "lm_head"
LINEARS = [
    LinearLayer(Q, K, 10),
    LinearLayer("model.layers.1.self_attn.q_proj", K, 10),
    LinearLayer("model.layers.0.mlp.shared_expert.down_proj", I, K),
    LinearLayer(GATE, K, E),
    LinearLayer(HEAD, K, 20),
    LinearLayer("model.embed_tokens", 20, K, embedding=True),
]
PREFIX = "base_model.model."


def pair(name, wide, tall, r=R, prefix=PREFIX):
    """State dict of one linear layer's factors, and the factors."""
    a, b = rand(r, wide), rand(tall, r)
    return {f"{prefix}{name}.lora_A.weight": a, f"{prefix}{name}.lora_B.weight": b}, (a, b)


def read(state, config=CONFIG, layers=EXPERTS, linears=LINEARS, **options):
    return load(state, config, layers, linears, **options)


def assert_pair(got, factors, scaling=2.0):
    assert torch.equal(got.a, factors[0])
    assert torch.equal(got.b, factors[1])
    assert got.scaling == scaling
