"""Adapter checkpoints in several forms, with the products B A that they stand for."""

import json
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from moelora.adapters import AdapterPool, MoELayer

E, K, N = 4, 16, 24
LAYERS = [MoELayer(f"model.layers.{n}.mlp.experts", E, K, N) for n in range(2)]
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
SIZES = {"gate": (K, N), "up": (K, N), "down": (N, K), "gate_up": (K, 2 * N)}
WIDE = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
MIXTRAL = {"w1": "gate", "w3": "up", "w2": "down"}


def rand(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype)


def per_expert(layer=0, names=WIDE, r=4, block="mlp", seed=0):
    """State dict of one pair per expert, and delta[projection][e] = B A without scaling."""
    torch.manual_seed(seed)
    state, delta = {}, {}
    for name, projection in names.items():
        wide, tall = SIZES[projection]
        delta[projection] = []
        for e in range(E):
            a, b = rand(r, wide), rand(tall, r)
            key = f"base_model.model.model.layers.{layer}.{block}.experts.{e}.{name}"
            state |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
            delta[projection].append(b @ a)
    return state, {p: torch.stack(d) for p, d in delta.items()}


def wrapped(layer=0, r=4, r_down=None, seed=0):
    """State dict in PEFT's `target_parameters` form."""
    torch.manual_seed(seed)
    r_down = r_down or r
    key = f"base_model.model.model.layers.{layer}.mlp.experts"
    state, delta = {}, {}
    for prefix, projection, rank in ((f"{key}.base_layer", "gate_up", r), (key, "down", r_down)):
        wide, tall = SIZES[projection]
        a, b = rand(E * rank, wide), rand(tall, rank * E)
        state |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
        products = [b[:, e::E] @ a[e * rank : (e + 1) * rank] for e in range(E)]
        delta[projection] = torch.stack(products)
    delta["gate"], delta["up"] = delta.pop("gate_up").chunk(2, dim=1)
    return state, delta


def of_rank(r):
    """The configuration that scales by 2."""
    return CONFIG | {"r": r, "lora_alpha": 2 * r}


def add(pool, name, seed=0, r=4, **options):
    return pool.add(name, wrapped(r=r, seed=seed)[0], config=of_rank(r), **options)


def change(pool, name, seed=0, r=4, **options):
    return pool.update(name, wrapped(r=r, seed=seed)[0], config=of_rank(r), **options)


def register(pool, name, seed=0, r=4):
    pool.register(name, wrapped(r=r, seed=seed)[0], config=of_rank(r))


def delta_of(pool, name, layer=0, held=None):
    """What the pool will add to the weights: s B A per projection and expert."""
    slot = pool.lookup(name, held=held)
    rank = int(pool.lora_ranks[slot])
    scale = float(pool.lora_scalings[slot])
    stacks = pool.layer(LAYERS[layer].name)

    def product(a, b):
        a, b = a[slot].expand(E, -1, -1), b[slot].expand(E, -1, -1)
        # Beyond its rank an adapter must not have anything.
        assert not a[:, rank:].any() and not b[:, :, rank:].any()
        return (scale * b.float() @ a.float()).cpu()

    a, b = stacks["w13_lora_a"], stacks["w13_lora_b"]
    if isinstance(a, torch.Tensor):
        gate, up = product(a, b).chunk(2, dim=1)
    else:
        gate, up = (product(x, y) for x, y in zip(a, b, strict=True))
    down = product(stacks["w2_lora_a"], stacks["w2_lora_b"])
    return {"gate": gate, "up": up, "down": down}


def check(pool, name, delta, scaling, layer=0, held=None):
    got = delta_of(pool, name, layer, held)
    for projection in ("gate", "up", "down"):
        wanted = torch.zeros_like(got[projection])
        if projection in delta:
            wanted = scaling * delta[projection]
        torch.testing.assert_close(got[projection], wanted, rtol=1e-5, atol=1e-5)


def make_pool(max_loras=3, max_rank=8, dtype=torch.float32, **options):
    return AdapterPool(LAYERS, max_loras, max_rank, dtype=dtype, **options)


def before_next(monkeypatch, owner, name, act):
    """Calls `act` once, in the middle of what calls a method next."""
    original = getattr(owner, name)

    def first(*args):
        monkeypatch.undo()
        act()
        return original(*args)

    monkeypatch.setattr(owner, name, first)


def fails(error):
    """A method that raises it."""

    def method(*args):
        raise error

    return method


def write(folder: Path, state, config=CONFIG):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({k: v.clone() for k, v in state.items()}, folder / "adapter_model.safetensors")
    return folder


def snapshot(pool):
    return [t.clone() for t in pool._tensors()], pool.names()


def assert_unchanged(pool, before):
    tensors, names = before
    assert pool.names() == names
    for old, new in zip(tensors, pool._tensors(), strict=True):
        assert torch.equal(old, new)


def folders(tmp_path, number, r=2):
    """Folders of adapters, and what each adds to the weights of layer 0."""
    found = []
    for seed in range(number):
        state, delta = wrapped(r=r, seed=seed)
        found.append((write(tmp_path / f"adapter{seed}", state, of_rank(r)), delta))
    return found


def registered(tmp_path, names, max_loras, **options):
    """A pool that has adapters in folders, and these folders with what they add."""
    pool = make_pool(max_loras=max_loras, **{"host": len(names)} | options)
    made = folders(tmp_path, len(names))
    for name, (path, _) in zip(names, made, strict=True):
        pool.register(name, path)
    return pool, made


def wait_until(condition):
    end = time.monotonic() + 240  # of what a slow machine takes seconds for
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)
