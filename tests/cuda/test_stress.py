"""A hundred thousand replays of a CUDA graph, each with other inputs, every output compared.

Nothing goes through the host between replays: the graph itself picks the next of a bank of inputs,
runs the layer, and counts the outputs that are not what the same inputs gave in an eager call. On
the CPU the same steps run a few times, without a graph.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from cases import Spec
from checks import assert_close_to_ref
from conftest import needs_gpu
from streams import Captured

import moelora
from moelora.reference import fused_experts_lora_ref, naive_fused_experts_lora

BANK = 16
REPLAYS = {"cpu": 4 * BANK, "cuda": 100_000}
CHANGING = ("hidden_states", "topk_ids", "topk_weights", "token_lora_mapping")


@pytest.fixture(
    params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.slow, needs_gpu])]
)
def device(request) -> str:
    return request.param


class Bank:
    """Batches of `tokens` for one layer, and what an eager call makes of each."""

    def __init__(self, tokens: int, device: str, seed: int = 0):
        sizes = {"experts": 8, "hidden": 192, "inter": 136, "ranks": (8, 32, 17, 1)}
        p = Spec(BANK * tokens, **sizes, dtype=torch.bfloat16, seed=seed).build()
        there = p.to(device)
        shape = (BANK, tokens)
        self.batches = {name: getattr(there, name).unflatten(0, shape) for name in CHANGING}
        self.now = {name: torch.empty_like(batch[0]) for name, batch in self.batches.items()}
        self.layer = replace(there, **self.now)
        self.entry = torch.zeros(1, dtype=torch.int64, device=device)
        self.steps = torch.zeros_like(self.entry)
        self.wrong = torch.zeros_like(self.entry)
        made = []
        for i in range(BANK):
            self.entry.fill_(i)
            self.pick()
            made.append(moelora.fused_experts_lora(**self.layer.kwargs()))
        self.wanted = torch.stack(made)
        ref, naive = fused_experts_lora_ref(**p.kwargs()), naive_fused_experts_lora(**p.kwargs())
        assert_close_to_ref(self.wanted.flatten(0, 1), ref, naive, torch.bfloat16)

    def pick(self) -> None:
        for name, batch in self.batches.items():
            torch.index_select(batch, 0, self.entry, out=self.now[name].unsqueeze(0))

    def step(self) -> None:
        """Step n goes n batches on, so that a batch follows now one, now another."""
        self.entry.add_(self.steps).remainder_(BANK)
        self.steps.add_(1)
        self.pick()
        y = moelora.fused_experts_lora(**self.layer.kwargs())
        wanted = self.wanted.index_select(0, self.entry)[0]
        self.wrong.add_((y.view(torch.int16) != wanted.view(torch.int16)).sum())


def replayed(bank: Bank, device: str):
    """The step as it is on the CPU; on a GPU a graph of it, which first ran once without one."""
    if device == "cpu":
        return bank.step
    torch.cuda.synchronize()
    return Captured(bank.step).graph.replay


def assert_every_output_was_right(bank: Bank, replay, device: str) -> None:
    before = 0 if device == "cpu" else 1
    assert bank.steps.item() == REPLAYS[device] + before
    assert bank.wrong.item() == 0
    # Two wrong signs show as often as their batches are met: twice each in 2 * BANK steps.
    for batch in (0, BANK - 1):
        bank.wanted[batch, 0, 0].neg_()
    for _ in range(2 * BANK):
        replay()
    assert bank.wrong.item() == 4


@pytest.mark.parametrize("tokens", [1, 4, 16, 64])
def test_replays(tokens, device):
    bank = Bank(tokens, device)
    replay = replayed(bank, device)
    for _ in range(REPLAYS[device]):
        replay()
    assert_every_output_was_right(bank, replay, device)


@pytest.mark.parametrize("tokens", [(4, 64), (16, 16)], ids=str)
def test_replays_on_two_streams_at_once(tokens, device):
    banks = [Bank(count, device, seed) for seed, count in enumerate(tokens)]
    replays = [replayed(bank, device) for bank in banks]
    cuda = device == "cuda"
    streams = [torch.cuda.stream(torch.cuda.Stream()) if cuda else nullcontext() for _ in banks]
    for _ in range(REPLAYS[device]):
        for stream, replay in zip(streams, replays, strict=True):
            with stream:
                replay()
    if cuda:
        torch.cuda.synchronize()
    for bank, replay in zip(banks, replays, strict=True):
        assert_every_output_was_right(bank, replay, device)
