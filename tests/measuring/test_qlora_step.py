"""benchmarks.qlora_step: engines differ in the experts alone."""

from dataclasses import replace

import pytest
import torch

import moelora
from benchmarks import grouped_mm, training
from benchmarks.qlora_step import SCALING, Ours, Sizes, measure

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
