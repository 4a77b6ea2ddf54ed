"""Plans of batch-invariant calls, for devices that need not be there."""

# ruff: noqa: F811  fixtures of another file

import pytest
from test_plan import QWEN3, TOKENS, answer, plan, print_plan  # noqa: F401

INVARIANT = {"MOELORA_BATCH_INVARIANT": "1"}
LONG = {"QWEN3": QWEN3, "DEEP": {"hidden": 4096, "inter": 1408}}


def parts_of(name, depth):
    """Parts of the depth whose sums a shrink adds up: in its name, where it shares them out."""
    method, shape, family = name.removeprefix("shrink_bf16_").split("_")[:3]
    if method != "segments":
        return int(shape.split("x")[2])
    assert (family, int(shape.split("x")[1]) <= 64) == ("sm80", True), name
    return 8 if depth >= 4096 else 4


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("shape", LONG)
def test_every_shrink_of_a_depth_adds_up_the_same_parts(answer, capability, shape):
    gpu, sizes = ("cuda", capability), QWEN3 | LONG[shape]
    depths, met = (sizes["hidden"], sizes["inter"]), set()
    for tokens in TOKENS:
        for rank in (8, 16, 64, 256):
            words = answer(gpu, tokens=tokens, rank=rank, env=INVARIANT, **sizes).split()
            alone = answer(gpu, "delta", tokens=tokens, rank=rank, env=INVARIANT, **sizes).split()
            for name, depth in (
                (words[4], depths[0]),
                (words[5], depths[1]),
                (alone[3], depths[0]),
            ):
                assert parts_of(name, depth) == (8 if depth >= 4096 else 4)
                met.add(name.split("_")[2])
    assert met == {"blocks", "windows", "segments"}


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("tokens", TOKENS)
def test_what_a_batch_invariant_call_does_without(answer, plan, capability, tokens):
    gpu = ("cuda", capability)
    whole = {**INVARIANT, "MOELORA_FORCE_VARIANT": "decode_bf16_sm80,delta_bf16_16x8_sm80"}
    for env in (INVARIANT, whole):
        assert plan(gpu, tokens=tokens, top_k=2, env=env)[0].startswith("gemm_")
        for rank in (8, 64):
            one, _, _, shrink, splits, *_ = answer(
                gpu, "delta", tokens=tokens, rank=rank, env=env
            ).split()
            assert (one, splits) == ("-", "1")
            assert shrink != "-"


def test_a_forced_shrink_that_adds_up_otherwise_is_passed_over(answer):
    gpu = ("cuda", 90)
    force = {"MOELORA_FORCE_VARIANT": "shrink_bf16_blocks_48x16x8_sm80"}
    assert force["MOELORA_FORCE_VARIANT"] in answer(gpu, tokens=64, rank=16, env=force)
    usual = answer(gpu, tokens=64, rank=16, env=INVARIANT)
    assert answer(gpu, tokens=64, rank=16, env=INVARIANT | force) == usual
