"""Two layers of experts whose adapters train as `Tenants`."""

import pytest
import torch
from conftest import on_gpu

import moelora
from moelora.training import Tenants

E, K, I, R = 4, 32, 16, 8  # noqa: E741
LAYERS = [moelora.MoELayer(f"layers.{n}.experts", E, K, I) for n in range(2)]
# Device, dtype of activations, dtype of factors, and whether gradients are sparse.
PLACES = [
    pytest.param(("cpu", torch.float32, torch.float32, False), id="cpu-float32"),
    pytest.param(("cpu", torch.bfloat16, torch.bfloat16, False), id="cpu-bfloat16"),
    pytest.param(("cpu", torch.bfloat16, torch.float32, False), id="cpu-float32-factors"),
    pytest.param(("cpu", torch.bfloat16, torch.float32, True), id="cpu-sparse"),
    on_gpu(("cuda", torch.bfloat16, torch.bfloat16, False), id="cuda-bfloat16"),
    on_gpu(("cuda", torch.bfloat16, torch.float32, True), id="cuda-sparse"),
]
FLOAT32 = PLACES[0].values[0]
OPTIONS = {
    "law": {"rank": 4, "lr": 2e-2},
    "code": {"rank": 8, "alpha": 4.0, "lr": 1e-2, "accumulation": 2, "max_norm": 1e-3},
    "med": {"rank": 3, "lr": 5e-2, "weight_decay": 0.1},
}
ROWS = {"law": 5, "code": 9, "med": 6}


def draw(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * shape[-1] ** -0.5


class House:
    """Two layers of experts on a pool, and tenants, which learn targets of their own."""

    def __init__(self, place, *names, max_loras=4, group=None, **options):
        self.place = place
        self.device, self.dtype, factors, self.sparse = place
        options = {"max_rank": R, "dtype": factors, "device": self.device} | options
        self.pool = moelora.AdapterPool(LAYERS, max_loras, w13_slices=1, **options)
        self.tenants = Tenants(self.pool, group=group)
        shapes = ((E, 2 * I, K), (E, K, I))
        self.weights = [
            [draw(10 * n + m, *shape).to(self.device, self.dtype) for m, shape in enumerate(shapes)]
            for n in range(len(LAYERS))
        ]
        for name in names:
            self.add(name)

    def add(self, name, source=None, **changes):
        generator = torch.Generator().manual_seed(sum(name.encode()))
        options = OPTIONS.get(name, {}) | {"generator": generator} | changes
        if self.sparse and "optimizer" not in options:
            options |= {"sparse": True, "weight_decay": 0.0}
        return self.tenants.add(name, source, **options)

    def losses(self, names, number):
        """Losses of a batch of rows of each name, which depends on the name and number alone."""
        seeds = {name: 1000 * number + sum(name.encode()) for name in names}
        x = torch.cat([K**0.5 * draw(seeds[n], ROWS[n], K) for n in names])
        logits = torch.cat([draw(seeds[n] + 7, ROWS[n], E) for n in names])
        topk_weights, topk_ids = logits.softmax(-1).topk(2)
        mapping = self.pool.mapping([n for n in names for _ in range(ROWS[n])])
        x = x.to(self.device, self.dtype)
        for layer, (w13, w2) in zip(LAYERS, self.weights, strict=True):
            given = x, w13, w2, topk_weights.to(self.device), topk_ids.to(self.device)
            lora = {"token_lora_mapping": mapping, **self.pool.layer(layer.name)}
            x = x + moelora.fused_experts_lora(*given, **lora)
        parts = zip(names, x.split([ROWS[n] for n in names]), strict=True)
        return {n: (part.float() - sum(n.encode()) % 3).square().mean() for n, part in parts}

    def steps(self, names, numbers):
        return [self.tenants.step(self.losses(names, n)) for n in numbers]

    def assert_as_alone(self, names, numbers):
        """Each has the factors that these batches give it in a house of its own."""
        for name in names:
            assert same(self.factors(name), alone(self.place, name, numbers)[0]), name

    def factors(self, name):
        adapter = self.tenants[name].adapter()
        return [t for pairs in adapter.experts.values() for p in pairs.values() for t in (p.a, p.b)]


def same(found, wanted):
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


def alone(place, name, numbers):
    house = House(place, name, max_loras=1)
    steps = [step[name] for step in house.steps([name], numbers)]
    return house.factors(name), steps


def calls_in_backward(loss, call):
    """The loss, whose backward calls `call` first."""
    return _Calls.apply(loss, call)


class _Calls(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss, call):
        ctx.call = call
        return loss.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.call()
        return grad, None
