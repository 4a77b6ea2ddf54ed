"""Adapters of vLLM's linear layers: its two hooks for them are moelora's deltas."""

import logging
from types import SimpleNamespace

import pytest
import torch
from cases import same_bits
from checks import assert_close_to_ref
from vllm_layer import load

import moelora
from moelora.reference.delta import moe_lora_delta_ref

pytest_plugins = ["vllm_fixtures"]

HIDDEN, SPARE = 48, 8
THEIRS = "vLLM's own kernels add the adapters of its linear layers"
QKV = (64, 16, 16)
# Columns of the slices, and the rank of each slot; 0: an adapter without factors for the layer.
SPECS = {
    "qkv": (QKV, (8, 3, 16)),
    "qkv, four slices of no multiple": ((13, 1, 7, 30), (5, 0, 2)),
    "one slice": ((40,), (4, 16, 0, 1)),
    "gate and up": ((24, 24), (8, 8)),
}


class Linear:
    """A layer with adapters, as vLLM's LoRA manager makes it, and what its slots hold."""

    def __init__(self, vllm, widths=QKV, ranks=(8, 3, 16), sharded=False, tokens=32):
        self.widths, self.slots = widths, len(ranks)
        place = load("vllm.lora.layers.column_parallel_linear")
        name = f"MergedColumnParallelLinearWith{'Sharded' * sharded}LoRA"
        cls = getattr(place, name)
        self.layer = layer = cls.__new__(cls)
        torch.nn.Module.__init__(layer)
        layer.tp_size, layer.tp_rank, layer.n_slices = 1, 0, len(widths)
        layer.output_slices, layer.input_size, layer.device = widths, HIDDEN, "cpu"
        layer.output_sizes = list(widths)
        config = SimpleNamespace(lora_dtype=torch.float32, fully_sharded_loras=sharded)
        config.max_lora_rank = max(ranks) + SPARE
        layer.create_lora_weights(self.slots, config)
        self.meta = vllm.LoRAKernelMeta.make(self.slots, tokens, "cpu")
        punica = vllm.PunicaWrapperGPU.__new__(vllm.PunicaWrapperGPU)
        punica.token_mapping_meta = punica.prompt_mapping_meta = self.meta
        punica.lora_config = SimpleNamespace(specialize_active_lora=False)
        layer.punica_wrapper = punica
        self.make = torch.Generator().manual_seed(5)
        self.x, self.y = self.numbers(9, HIDDEN), self.numbers(9, sum(widths))
        self.held = {}
        for slot, rank in enumerate(ranks):
            self.load(slot, rank)

    def numbers(self, *shape):
        return torch.randn(*shape, generator=self.make) / shape[-1] ** 0.5

    def load(self, slot, rank, without=()):
        """Activates an adapter in a slot; slices `without` have no factors."""
        if rank == 0:
            self.layer.reset_lora(slot)
            self.held.pop(slot, None)
            return
        a = [self.numbers(rank, HIDDEN) for _ in self.widths]
        b = [self.numbers(n, rank) for n in self.widths]
        for slice_ in without:
            a[slice_] = b[slice_] = None
        self.layer.set_lora(slot, a, b)
        self.held[slot] = a, b

    def step(self, mapping):
        self.mapping = torch.tensor(mapping)
        self.meta.prepare_tensors(self.mapping)

    def __call__(self, run=None, x=None):
        y = self.y.clone()
        return (run or self.layer._apply_lora_to_output)(self.x if x is None else x, y)

    def check(self, y):
        """Against the products of what the slots were given; other rows keep their bits."""
        rank = max((a[0].size(0) for a, _ in self.held.values() if a[0] is not None), default=1)
        a = [torch.zeros(self.slots, 1, rank, HIDDEN) for _ in self.widths]
        b = [torch.zeros(self.slots, 1, n, rank) for n in self.widths]
        for slot, factors in self.held.items():
            for stacks, given in zip((a, b), factors, strict=True):
                for stack, factor in zip(stacks, given, strict=True):
                    if factor is not None:
                        stack[slot, 0, : factor.size(0), : factor.size(1)] = factor
        ids, rows = torch.zeros(9, 1, dtype=torch.int32), self.mapping[:9]
        call = {"token_lora_mapping": rows, "lora_a": a, "lora_b": b, "num_experts": 1}
        delta, _ = moe_lora_delta_ref(self.x, None, ids, **call)
        naive, _ = moe_lora_delta_ref(self.x, None, ids, **call, dtype=torch.float32)
        active = torch.tensor([slot in self.held for slot in rows.tolist()])
        assert same_bits(y[~active], self.y[~active])
        if active.any():
            ref = (self.y + delta[:, 0])[active]
            assert_close_to_ref(y[active], ref, (self.y + naive[:, 0])[active], torch.float32)


MIXED = [0, 1, -1, 1, 0, 2, -1, 2, 1]


@pytest.fixture
def linear(served, lines):
    log = logging.getLogger("vllm.moelora")
    level = log.level
    log.setLevel(logging.INFO)
    yield lambda *args, **named: Linear(served, *args, **named)
    log.setLevel(level)


@pytest.mark.parametrize("name", SPECS)
def test_mixed_adapters_and_ranks(linear, name, lines):
    """What the stacks have past a rank, and in a slot without factors, is never read."""
    widths, ranks = SPECS[name]
    layer = linear(widths, ranks)
    for a, b in zip(layer.layer.lora_a_stacked, layer.layer.lora_b_stacked, strict=True):
        for slot, rank in enumerate(ranks):
            a[slot, :, rank:] = b[slot, ..., rank:] = float("nan")
    layer.step([slot if slot < layer.slots else -1 for slot in MIXED])
    layer.check(layer())
    said = "deltas add the adapters of linear layers; MOELORA_VLLM_LINEAR=0 leaves them to vLLM"
    assert lines == [f"moelora: {said}"]


def test_slots_come_and_go(linear):
    layer = linear(QKV, (8, 3, 16))
    layer.step(MIXED)
    for slot, rank, without in ((1, 0, ()), (1, 12, (1,)), (0, 2, (0, 2)), (2, 0, ()), (2, 16, ())):
        layer.load(slot, rank, without)
        layer.check(layer())
    for slot in range(3):
        layer.load(slot, 0)
    assert same_bits(layer(), layer.y)


def test_a_slot_that_vllm_cannot_fill_counts_as_written(linear, served):
    layer = linear()
    ranks = layer.layer._moelora_ranks
    with pytest.raises(RuntimeError):
        layer.layer.set_lora(1, [torch.ones(4, HIDDEN + 1)] * 3, [torch.ones(1, 4)] * 3)
    assert ranks.tensor.tolist() == ranks.on_host == [8, 16 + SPARE, 16]


def test_padded_tokens_and_steps_without_adapters(linear):
    """A graph for nine tokens that runs fewer: the entries past these are not stale."""
    layer = linear()
    layer.step(MIXED)
    layer.step([1, 0])
    layer.mapping = torch.tensor([1, 0, *[-1] * 7])
    layer.check(layer())
    layer.step([-1] * 9)
    assert same_bits(layer(), layer.y)


def test_a_delta_alone(linear):
    """add_inputs=False, as where the sum is made on another stream."""
    layer = linear()
    layer.step(MIXED)
    alone = torch.zeros_like(layer.y)
    held = layer.layer.lora_a_stacked, layer.layer.lora_b_stacked
    add = layer.layer.punica_wrapper.add_lora_linear
    add(alone, layer.x, *held, 1.0, layer.widths, add_inputs=False)
    torch.testing.assert_close(layer(), layer.y + alone)


def test_logits(linear):
    layer = linear((64,), (8, 3, 16))
    layer.step(MIXED)
    (a,), (b,) = layer.layer.lora_a_stacked, layer.layer.lora_b_stacked
    logits = layer.y.clone()
    layer.layer.punica_wrapper.add_lora_logits(logits, layer.x, a, b, 1.0)
    layer.check(logits)


def test_torch_compile_traces_the_hooks(linear):
    """Without a break; the flag that no token has an adapter, and slots, are not constants."""
    layer = linear()

    def run(x, y):
        return layer.layer._apply_lora_to_output(x + 0, y + 0)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.inference_mode():
        for mapping in (MIXED, [-1] * 9, MIXED[::-1]):
            layer.step(mapping)
            layer.check(layer(compiled))
        layer.load(1, 5)
        layer.check(layer(compiled))


def test_what_the_operator_refuses_stays_with_vllm(linear, served, lines):
    calls = []
    place = "vllm.lora.ops.triton_ops.lora_{0}_op"
    for name in ("shrink", "expand"):
        record = lambda *args, name=name, **named: calls.append((name, args, named))  # noqa: E731
        served.set(place.format(name), f"_lora_{name}", record)
    layer = linear()
    layer.step(MIXED)
    for _ in range(2):
        assert same_bits(layer(x=layer.x.double()), layer.y)
    assert [name for name, *_ in calls] == ["shrink", "expand"] * 2
    (_, shrink, _), (_, expand, named) = calls[:2]
    h, meta = shrink[2], layer.meta.meta_args(9, False)
    assert h.shape == (3, 9, 16 + SPARE) and h.dtype == torch.float32
    assert all(map(torch.equal, shrink[3:-1], meta)) and shrink[-1] == 1.0
    assert expand[0] is h and named == {"offset_start": 0, "add_inputs": True}
    (line,) = lines
    assert line.endswith(f"; {THEIRS}")


def test_fully_sharded_layers_stay_with_vllm(linear, lines):
    layer = linear(sharded=True)
    assert not hasattr(layer.layer, "_moelora_ranks")
    layer.load(0, 0)
    assert lines == [f"moelora: fully_sharded_loras is on; {THEIRS}"]


def test_compiled_models_of_vllm_are_others(vllm):
    """vLLM finds one that it compiled without moelora by the same factors."""
    place, name = "vllm.compilation.caching", "aot_compile_hash_factors"
    vllm.set(place, name, lambda vllm_config: [vllm_config])
    vllm.register()
    assert getattr(load(place), name)("config") == ["config", f"moelora {moelora.__version__}"]


B200, H200 = "NVIDIA B200", "NVIDIA H200"
UNMEASURED = "moelora was not measured on this card, and MOELORA_VLLM_LINEAR is not 1"


@pytest.mark.parametrize(
    ("card", "change", "why"),
    [
        (H200, {"MOELORA_VLLM_LINEAR": "0"}, "MOELORA_VLLM_LINEAR=0"),
        (B200, {}, UNMEASURED),
        (H200, {"MOELORA_MAX_CC": "80"}, UNMEASURED),
        (H200, {"add_lora_linear": lambda self, y, x: None}, "['self', 'y', 'x']"),
        (B200, {"MOELORA_VLLM_LINEAR": "1"}, None),
    ],
)
def test_left_to_vllm(vllm, lines, card, change, why):
    for name, value in change.items():
        if callable(value):
            vllm.monkeypatch.setattr(vllm.PunicaWrapperGPU, name, value)
        else:
            vllm.monkeypatch.setenv(name, value)
    vllm.register(card=card)
    assert hasattr(vllm.PunicaWrapperGPU.add_lora_w13, "_moelora")
    assert hasattr(vllm.PunicaWrapperGPU.add_lora_linear, "_moelora") == (why is None)
    left = [line for line in lines if "adapters of its linear layers" in line]
    assert len(left) == (why is not None)
    assert all(why in line and line.endswith(f"; {THEIRS}") for line in left)
