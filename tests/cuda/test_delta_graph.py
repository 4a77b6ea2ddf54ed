"""The delta in CUDA graphs and under torch.compile: one capture serves any routing and adapters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import Problem, Spec, same_bits
from conftest import DEVICES, on_gpu
from delta_cases import DELTAS, Lists, delta_kwargs
from streams import Captured, busy_stream
from test_graph import SLOTS, layer_problem, overwrite, variations
from test_sglang_ops import RUN, buffers, info

import moelora

BASE = 0.25  # what the captured calls add to
BLOCK = 16


def filled(p: Problem, *shape: int) -> torch.Tensor:
    return torch.full(shape, BASE, dtype=p.spec.dtype, device=p.topk_ids.device)


# Each makes what does not change, and returns the call to capture: its outputs are filled on the
# way, and added to.


def routed(p: Problem):
    """Both deltas from routing and mapping."""

    def run():
        rows = p.topk_ids.shape
        gate_up = filled(p, *rows, 2 * p.spec.inter)
        down = filled(p, *rows, p.spec.hidden)
        moelora.moe_lora_gate_up_delta(**delta_kwargs(p, "w13"), out=gate_up)
        moelora.moe_lora_down_delta(**delta_kwargs(p, "w2", mul_routed_weight=True), out=down)
        return gate_up, down, moelora.moe_lora_gate_up_delta(**delta_kwargs(p, "w13"))

    return run


def vllm(p: Problem):
    """Alignment and `fused_moe_lora` by lists, and by nothing but the mapping."""
    rows, experts = p.topk_ids.numel(), p.w13.size(0)
    width = rows + min(rows, experts) * (BLOCK - 1)
    blocks = -(-width // BLOCK)
    listed, naive = (Lists(p, "w13", naive=True, block_size=BLOCK) for _ in range(2))
    listed.sorted_token_ids, listed.expert_ids, listed.num_tokens_post_padded = made = [
        torch.zeros(shape, dtype=torch.int32, device=p.topk_ids.device)
        for shape in ((SLOTS, width), (SLOTS, blocks), (SLOTS,))
    ]

    def run():
        moelora.moe_lora_align_block_size(
            *(p.topk_ids, p.token_lora_mapping, experts, BLOCK, SLOTS, width, blocks, *made),
            *(p.adapter_enabled, listed.lora_ids),
        )
        outputs = [filled(p, *p.topk_ids.shape, 2 * p.spec.inter) for _ in range(2)]
        listed.fused(outputs[0])
        naive.fused(outputs[1])
        return tuple(outputs)

    return run


def sglang(p: Problem, how: str):
    """`run_moe_lora` by its stages, or at once."""
    routing = p.hidden_states, p.topk_ids, p.topk_weights, info(p)

    def run():
        return (RUN[how](*routing, *buffers(p), filled(p, *p.hidden_states.shape)),)

    return run


RUNS = {
    "routed": routed,
    "vllm": vllm,
    "sglang, staged": lambda p: sglang(p, "staged"),
    "sglang, fused": lambda p: sglang(p, "fused"),
}


def problem_for(name: str, tokens: int) -> Problem:
    p = layer_problem(tokens, torch.bfloat16)
    if name.startswith("sglang"):
        p.w13_lora_a, p.w13_lora_b = p.w13_lora_a[0], torch.cat(p.w13_lora_b, dim=2)
    return p


@pytest.mark.parametrize("device", [on_gpu("cuda")])
@pytest.mark.parametrize("tokens", [1, 7, 33, 300, 700])
@pytest.mark.parametrize("name", RUNS)
def test_replays(name, tokens, device):
    first = problem_for(name, tokens)
    there = first.to(device)
    captured = Captured(RUNS[name](there))
    for change, p in variations(first):
        overwrite(there, p)
        want = RUNS[name](p.to(device))()
        for i, (got, eager) in enumerate(zip(captured.replay(), want, strict=True)):
            assert same_bits(got, eager), f"{change}: output {i}"


@pytest.mark.parametrize("device", [on_gpu("cuda")])
def test_calls_do_not_synchronize(device):
    runs = [make(problem_for(name, 33).to(device)) for name, make in RUNS.items()]
    for run in runs:
        run()
    with busy_stream():
        for run in runs:
            run()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("projection", ["w13", "w2"])
def test_compile(projection, device):
    spec = Spec(tokens=6, ranks=(4, 8), dtype=torch.bfloat16)
    p = spec.build().to(device)
    operator = DELTAS[projection]
    lists = Lists(replace(p, lora_ranks=None), projection, naive=False)

    def deltas(out, h, arguments):
        fresh = operator(**arguments)
        operator(**arguments, out=out)
        lists.fused(out)
        lists.shrink(h, lists.a)
        lists.expand(out, h, lists.b)
        return fresh, out * 2

    def start():
        h = torch.zeros(len(lists.a), 6, 2, lists.a[0].size(2), dtype=torch.bfloat16, device=device)
        return filled(p, 6, 2, 64), h, delta_kwargs(p, projection)

    for values in (p.w13_lora_a, p.w13_lora_b, [p.w2_lora_a], [p.w2_lora_b]):
        for t in values:
            t.nan_to_num_(0)  # vLLM's form works on all of R
    compiled = torch.compile(deltas, fullgraph=True, backend="aot_eager")
    got_args, want_args = start(), start()
    got, want = compiled(*got_args), deltas(*want_args)
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))
    assert same_bits(got_args[0], want_args[0])
