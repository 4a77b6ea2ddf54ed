"""Operators in many Python threads while others load, replace, disable and evict adapters."""

import random

import pytest
import torch
from adapter_cases import CONFIG, LAYERS, E, K, N, per_expert
from cases import Spec, same_bits
from threads import run_threads

import moelora
from moelora import _C, AdapterPool

NAMES = [f"adapter{n}" for n in range(6)]
THREADS, ROUNDS = 8, 25


class Layer:
    """One base layer, its pool, and what each adapter makes of one batch."""

    def __init__(self, device, dtype, slots):
        spec = Spec(tokens=9, experts=E, hidden=K, inter=N, mix="absent", dtype=dtype)
        self.arguments = spec.build().to(device).kwargs()
        self.states = {name: per_expert(seed=n)[0] for n, name in enumerate(NAMES)}
        self.pool = AdapterPool(LAYERS[:1], slots, 8, dtype=dtype, device=device)
        self.base = self.run([None] * 9)
        self.want = {}
        for name in NAMES:
            self.pool.add(name, self.states[name], config=CONFIG)
            self.want[name] = self.run([name] * 9)
            self.pool.remove(name)
        assert not same_bits(self.want[NAMES[0]], self.want[NAMES[1]])

    def run(self, names):
        adapters = {"token_lora_mapping": self.pool.mapping(names)}
        adapters |= self.pool.layer(LAYERS[0].name)
        return moelora.fused_experts_lora(**self.arguments | adapters)


@pytest.mark.parametrize("slots", [THREADS, 3], ids=["roomy", "crowded"])
def test_whoever_holds_an_adapter_computes_with_it(device, slots):
    layer = Layer(device, torch.float32 if device == "cpu" else torch.bfloat16, slots)
    pool, served = layer.pool, []

    def load(rng):
        name = rng.choice(NAMES)
        try:
            pool.add(name, layer.states[name], config=CONFIG, replace=rng.random() < 0.3)
        except (ValueError, RuntimeError) as error:
            assert any(w in str(error) for w in ("already loaded", "no slot", "in use"))
        if rng.random() < 0.2:
            try:
                pool.remove(rng.choice(NAMES))
            except (KeyError, RuntimeError) as error:
                assert "no adapter" in str(error) or "in use" in str(error)

    def serve(rng):
        name = rng.choice(NAMES)
        try:
            with pool.hold([name]):
                out = layer.run([name, None] * 4 + [name])
                if device == "cuda":
                    torch.cuda.synchronize()
        except KeyError as error:
            assert "no adapter" in str(error)
            return
        assert same_bits(out[0::2], layer.want[name][0::2]), name
        assert same_bits(out[1::2], layer.base[1::2]), "a base row depends on its neighbors"
        served.append(name)

    def work(number):
        rng = random.Random(number)
        stream = torch.cuda.Stream() if device == "cuda" else None
        with torch.cuda.stream(stream):
            for _ in range(ROUNDS):
                (load if number % 2 else serve)(rng)

    for name in NAMES[:slots]:
        pool.add(name, layer.states[name], config=CONFIG)
    run_threads(work, THREADS)
    assert len(served) > ROUNDS
    assert set(pool.names()) <= set(NAMES)


def test_errors_belong_to_their_thread(device):
    dtype, before = torch.bfloat16, _C.error_number()

    def work(number):
        columns = 100 + number
        x = torch.zeros(2, 64, dtype=dtype, device=device)
        w = torch.zeros(E, 8, columns, dtype=dtype, device=device)
        ids = torch.zeros(2, 1, dtype=torch.int32, device=device)
        for _ in range(ROUNDS):
            with pytest.raises(ValueError, match=rf"w\.size\(2\) is {columns}|is {columns}"):
                moelora.fused_moe_lora_gemm(x, w, torch.ones(2, 1, device=device), ids)
        assert _C.error_number() == ROUNDS, "they are counted there, too"

    run_threads(work, THREADS)
    assert _C.error_number() == before


def test_sorts_of_all_sizes_at_once(device):
    """Those of many keys need more shared memory than a launch gets unasked."""
    sizes = (3800, 1950, 2700, 32)  # of experts, with two keys each
    calls = ROUNDS if device == "cpu" else 200 * ROUNDS

    def draw(experts):
        generator = torch.Generator().manual_seed(experts)
        ids = torch.rand(200, experts, generator=generator).topk(8).indices
        mapping = torch.randint(-1, 1, (200,), generator=generator)
        return ids.to(device), mapping.to(device), experts, 16, 1

    arguments = {experts: draw(experts) for experts in sizes}

    def sort(experts):
        return moelora.moe_lora_align_block_size(*arguments[experts], mode="segmented")

    want = {experts: [t.cpu() for t in sort(experts)] for experts in sizes}

    def work(number):
        experts = sizes[number % len(sizes)]
        stream = torch.cuda.Stream() if device == "cuda" else None
        with torch.cuda.stream(stream):
            for _ in range(calls):  # without a pause between two
                got = sort(experts)
            assert all(torch.equal(t.cpu(), w) for t, w in zip(got, want[experts], strict=True))

    run_threads(work, THREADS)


def test_the_last_plan_belongs_to_its_thread():
    dtypes = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}

    def work(number):
        short, dtype = list(dtypes.items())[number % 3]
        x, w = torch.ones(3, 64, dtype=dtype), torch.ones(E, 8, 64, dtype=dtype)
        ids = torch.zeros(3, 1, dtype=torch.int32)
        for _ in range(ROUNDS):
            out = moelora.fused_moe_lora_gemm(x, w, torch.ones(3, 1), ids)
            assert out.eq(64).all()
            assert f"gemm_{short}_" in _C.last_plan()

    run_threads(work, THREADS)


def test_plans_may_be_added_while_layers_run():
    layer = Layer("cpu", torch.float32, 2)
    variants = [name for name in _C.usable() if name.startswith("gemm_f32")]

    def work(number):
        for i in range(ROUNDS):
            if number == 0:
                name = variants[i % len(variants)]
                _C.add_tuned_plan(0, 0, 0, 0, E, 2, K, N, i + 1, name)
            else:
                torch.testing.assert_close(layer.run([None] * 9), layer.base)

    try:
        run_threads(work, 4)
    finally:
        _C.clear_tuned_plans()
