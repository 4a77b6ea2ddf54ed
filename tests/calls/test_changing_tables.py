"""Tables that another stream writes to during a call: a row is of the old or of the new state."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import Problem, Spec, same_bits
from conftest import needs_gpu
from delta_cases import DELTAS, columns_of, delta_kwargs
from quantized_cases import FORMATS, quantize

import moelora

pytestmark = [pytest.mark.gpu, needs_gpu]

# One launch for a layer; one CTA's sort, a sort of one and of two launches; two sorts.
SIZES = {
    "decode": Spec(tokens=2, top_k=8, experts=16),
    "tiny": Spec(tokens=8, top_k=6, experts=16),
    "small": Spec(tokens=200, top_k=6, experts=16),
    "large": Spec(tokens=6000, top_k=4, experts=8),
    "two_sorts": Spec(tokens=300, top_k=4, experts=200, ranks=(4,) * 60),
}
CALLS = 60


def layer_case(p: Problem):
    kwargs = p.kwargs()
    return lambda: moelora.fused_experts_lora(**kwargs)


def quantized_layer_case(p: Problem):
    w13, w2 = (quantize(w.cpu(), FORMATS["mxfp4"]) for w in (p.w13, p.w2))
    kwargs = p.kwargs()
    kwargs["w13"] = w13.pack(p.spec.dtype, "concatenated").to("cuda")
    kwargs["w2"] = w2.pack(p.spec.dtype).to("cuda")
    return lambda: moelora.fused_experts_lora(**kwargs)


def projection_case(p: Problem):
    kwargs = p.gemm_kwargs("w13")
    return lambda: moelora.fused_moe_lora_gemm(**kwargs)


def delta_case(projection):
    def case(p: Problem):
        kwargs = delta_kwargs(p, projection)
        base = torch.randn(p.topk_ids.shape + (columns_of(p, projection),), device="cuda")
        base = base.to(p.spec.dtype)

        def run():
            out = base.clone()
            DELTAS[projection](**kwargs, out=out)
            return out

        return run

    return case


CASES = {
    "layer": layer_case,
    "quantized_layer": quantized_layer_case,
    "projection": projection_case,
    "gate_up_delta": delta_case("w13"),
    "down_delta": delta_case("w2"),
}


def build(size: str) -> Problem:
    spec = replace(SIZES[size], hidden=256, inter=128, dtype=torch.bfloat16, mix="many")
    if len(spec.ranks) == 2:
        spec = replace(spec, ranks=(16, 8, 32, 4))
    return spec.build().to("cuda")


class Switching:
    """A side stream that writes one value after the other into a tensor, while it is entered."""

    def __init__(self, table: torch.Tensor, *values: torch.Tensor):
        self.table, self.values, self.stream = table, values, torch.cuda.Stream()
        self.graph = torch.cuda.CUDAGraph()
        for value in values:
            table.copy_(value)
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph, stream=self.stream):
            for _ in range(200):
                for value in values:
                    table.copy_(value)

    def go_on(self):
        with torch.cuda.stream(self.stream):
            self.graph.replay()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_a_slot_switched_during_a_call(name, size):
    """Adapters of other tokens change no bit, so each token has two rows to choose from."""
    p = build(size)
    slots = len(p.spec.ranks)
    p.adapter_enabled = torch.ones(slots, dtype=torch.bool, device="cuda")
    run = CASES[name](p)
    on = run()
    p.adapter_enabled.zero_()
    off = run()
    assert not same_bits(on, off)
    values = [torch.full_like(p.adapter_enabled, value) for value in (True, False)]
    switching = Switching(p.adapter_enabled, *values)
    outputs = []
    for _ in range(CALLS):
        switching.go_on()
        outputs += [run() for _ in range(4)]
    torch.cuda.synchronize()
    seen = set()
    for out in outputs:
        as_on = (out == on).flatten(1).all(1)
        as_off = (out == off).flatten(1).all(1)
        assert bool((as_on | as_off).all()), f"rows of neither state: {(~as_on & ~as_off).sum()}"
        seen.add((bool(as_on.all()), bool(as_off.all())))
    assert len(seen) > 1, "the switch was never seen: the test tests nothing"
    p.adapter_enabled.fill_(True)
    assert same_bits(run(), on)


@pytest.mark.parametrize("size", SIZES)
def test_any_table_written_during_a_call(size):
    """Ids in and out of range, ranks and maps come and go; afterwards all is as it was."""
    p = build(size)
    experts, slots = p.w13.size(0), len(p.spec.ranks)
    p.expert_map = torch.arange(experts, dtype=torch.int32, device="cuda")
    p.adapter_enabled = torch.ones(slots, dtype=torch.bool, device="cuda")
    run = {name: case(p) for name, case in CASES.items()}
    align = p.align_kwargs(16)
    run["uniform"] = lambda: moelora.moe_lora_align_block_size(**align, mode="uniform")
    run["segmented"] = lambda: moelora.moe_lora_align_block_size(**align, mode="segmented")
    run["sorting"] = lambda: moelora.moe_sorting(
        p.topk_ids, p.topk_weights, experts, 16, expert_map=p.expert_map
    )
    tables = {
        "topk_ids": (-2, experts + 2),
        "token_lora_mapping": (-2, slots + 2),
        "expert_map": (-1, experts + 1),
        "lora_ranks": (-1, 40),
        "adapter_enabled": (0, 2),
    }
    before = {name: getattr(p, name).clone() for name in tables}
    generator = torch.Generator("cuda").manual_seed(1)

    def drawn(table, low, high):
        values = torch.randint(low, high, table.shape, device="cuda", generator=generator)
        return values.to(table.dtype)

    switches = [
        Switching(getattr(p, name), before[name], drawn(getattr(p, name), *bounds))
        for name, bounds in tables.items()
    ]
    for name in tables:
        getattr(p, name).copy_(before[name])
    want = {name: call() for name, call in run.items()}
    torch.cuda.synchronize()  # the switches wait for nobody
    for _ in range(CALLS // 4):
        for switch in switches:
            switch.go_on()
        for call in run.values():
            call()
    torch.cuda.synchronize()
    for name in tables:
        getattr(p, name).copy_(before[name])
    for name, call in run.items():
        got, expected = call(), want[name]
        pairs = [(got, expected)] if torch.is_tensor(got) else zip(got, expected, strict=True)
        assert all(same_bits(a, b) for a, b in pairs), name


def test_a_layer_in_a_green_context():
    """A part of the SMs holds fewer CTAs at once than a launch that waits for itself asks for."""
    green = pytest.importorskip("torch.cuda.green_contexts")
    p = Spec(tokens=1, top_k=8, experts=16, hidden=2048, inter=768, dtype=torch.bfloat16).build()
    p = p.to("cuda")
    want = moelora.fused_experts_lora(**p.kwargs()).double()
    context = green.GreenContext.create(num_sms=16, device_id=0)
    context.set_context()
    try:
        got = [moelora.fused_experts_lora(**p.kwargs()).double() for _ in range(3)]
        torch.cuda.synchronize()
    finally:
        context.pop_context()
    for out in got:
        assert (out - want).abs().max() <= 2**-6 * want.abs().max()
    assert torch.equal(moelora.fused_experts_lora(**p.kwargs()).double(), want)
