"""benchmarks.qlora_step: engines differ in the experts alone."""

import functools
from dataclasses import replace

import pytest
import torch

import moelora
from benchmarks import grouped_mm, training
from benchmarks.qlora_step import SCALING, Ours, Sizes, main, measure, update_in_backward

SMALL = Sizes(
    layers=2,
    hidden=64,
    inter=64,
    experts=4,
    top_k=2,
    heads=4,
    kv_heads=2,
    head=16,
    vocab=64,
    rank=4,
)


class Dequantized(Ours):
    """The experts as a loop over dequantized weights."""

    def __call__(self, x, ids, weights):
        out = torch.zeros_like(x, dtype=torch.float32)
        a13, b13, a2, b2 = (f[0] for f in self.factors.values())
        w13, w2 = self.w13.unpack(), self.w2.unpack()
        for e in range(len(w13)):
            token, place = (ids == e).nonzero(as_tuple=True)
            given = x[token]
            gate, up = (given @ w13[e].T + SCALING * given @ a13[e].T @ b13[e].T).chunk(2, -1)
            h = torch.nn.functional.silu(gate) * up
            z = h @ w2[e].T + SCALING * h @ a2[e].T @ b2[e].T
            out = out.index_add(0, token, z.float() * weights[token, place, None])
        return out.to(x.dtype)


@pytest.mark.parametrize("format", ["mxfp4", "nf4"])
def test_engines_have_the_same_model(format):
    sizes = replace(SMALL, format=format)
    rows = [
        measure(sizes, make, 2, 24, 1, device="cpu", repeats=repeats)
        for make, repeats in ((Ours, False), (Ours, True), (Dequantized, False))
    ]
    assert rows[0]["loss"] == rows[1]["loss"]
    assert abs(rows[0]["loss"] - rows[2]["loss"]) < 0.02
    assert all(row["tokens_per_s"] > 0 for row in rows)


def test_updates_in_the_backward_keep_no_gradient():
    usual, other = (
        measure(SMALL, Ours, 2, 24, 3, device="cpu", in_backward=early) for early in (False, True)
    )
    assert usual["loss"] == other["loss"]
    parameter = torch.nn.Parameter(torch.ones(3))
    update_in_backward([parameter])
    parameter.sum().backward()
    assert parameter.grad is None and (parameter < 1).all()


def test_the_yardstick_of_training_has_the_same_gradients():
    """benchmarks.grouped_mm dequantizes; moelora does not."""
    arguments, dout = training.draw((4, 2, 64, 64), 24, training.adapters_of("8"), "cpu")
    arguments = training.quantize(arguments, "nf4", (4, 2, 64, 64))
    found = []
    for layer in (moelora.fused_experts_lora, grouped_mm.fused_experts_lora):
        step = training.Step(dict(arguments), dout, layer)
        out = step.forward()
        step.run()
        found.append([out, *(leaf.grad for leaf in step.leaves)])
    for ours, theirs in zip(*found, strict=True):
        ours, theirs = ours.detach().float(), theirs.detach().float()
        assert (ours - theirs).abs().max() <= 0.03 * theirs.abs().max()


def test_float32_factors_and_whole_logits_change_the_loss_by_rounding():
    usual = measure(SMALL, Ours, 2, 24, 1, device="cpu")
    make = functools.partial(Ours, dtype=torch.float32)
    other = measure(SMALL, make, 2, 24, 1, device="cpu", repeats=True, whole_logits=True)
    assert abs(usual["loss"] - other["loss"]) < 0.001


def test_unsloth_takes_no_float32_factors(capsys):
    with pytest.raises(SystemExit):
        main(["--engines", "unsloth", "--peers", ".", "--float32"])
    assert "--float32 needs --engines moelora" in capsys.readouterr().err
