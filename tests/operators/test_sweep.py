"""The layer at every number of tokens, through all block sizes that its plans choose."""

from __future__ import annotations

from dataclasses import replace

from cases import Spec, same_bits
from checks import assert_close_to_ref, naming
from covering import extent

import moelora
from moelora import _C
from moelora.reference import fused_experts_lora_ref, naive_fused_experts_lora

MOST = 512


def test_every_batch_up_to_512_tokens(device, dtype):
    """With adapters of mixed ranks on half of the tokens, and without any. In CI, on a CPU, every
    fifth."""
    spec = Spec(MOST, experts=8, hidden=136, inter=72, ranks=(8, 64, 1, 17), mix="half_base")
    mixed = replace(spec, dtype=dtype).build()
    problems = mixed, mixed.base()
    refs = [fused_experts_lora_ref(**p.kwargs()) for p in problems]
    naives = [naive_fused_experts_lora(**p.kwargs()) for p in problems]
    there = [p.to(device) for p in problems]
    bare = there[0].token_lora_mapping == -1
    plans = set()
    step = extent(nightly=1, ci=5) if device == "cpu" else 1
    for tokens in range(1, MOST + 1, step):
        made = [moelora.fused_experts_lora(**p.prefix(tokens).kwargs()) for p in there]
        for what, y, ref, naive in zip(("mixed", "base"), made, refs, naives, strict=True):
            with naming(f"{what}, {tokens} tokens"):
                assert_close_to_ref(y, ref[:tokens], naive[:tokens], dtype)
        rows = bare[:tokens]
        assert same_bits(made[0][rows], made[1][rows]), f"base rows of {tokens} tokens"
        plans.add(_C.last_plan())
    assert device == "cpu" or len(plans) > 2, "the sweep meets every block size"
