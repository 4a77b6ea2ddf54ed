"""Plans of batch-invariant calls, for devices that need not be there."""

# ruff: noqa: F811  fixtures of another file

import pytest
from test_plan import QWEN3, TOKENS, answer, plan, print_plan, rows_of  # noqa: F401

INVARIANT = {"MOELORA_BATCH_INVARIANT": "1"}
EXPANDS = [
    f"expand_bf16_{row[0]}"
    for kind in ("EXPAND", "EXPAND_THIN")
    for row in rows_of("csrc/cuda/variants.inc", kind)
]
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


def neighbouring_ranks(name):
    """A product of 16 ranks has neighbours: so do the expands of as many ranks."""
    return name.removesuffix("_elements_sm80").removesuffix("_sm80").endswith("x16")


@pytest.mark.parametrize("inter", [768, 772])  # vectors, and rows that allow none
@pytest.mark.parametrize("rank", [8, 12, 16, 24, 64, 256])
def test_every_expand_of_some_factors_adds_up_ranks_in_one_order(answer, rank, inter):
    """Whatever the batch, and whatever is forced: of vectors some could be that are passed over."""

    def expand(tokens, env):
        return answer(
            ("cuda", 90), "delta", tokens=tokens, rank=rank, inter=inter, env=env
        ).split()[5]

    vectors = rank % 8 == 0 and inter % 8 == 0
    neighbours = rank <= 16 or not vectors
    for tokens in TOKENS:
        assert neighbouring_ranks(expand(tokens, INVARIANT)) == neighbours
    passed_over = []
    for name in EXPANDS:
        force = {"MOELORA_FORCE_VARIANT": name}
        usual, taken = (expand(1024, env) for env in (INVARIANT, INVARIANT | force))
        assert taken in (name, usual)
        assert neighbouring_ranks(taken) == neighbours
        if taken != name == expand(1024, force):
            passed_over.append(name)
    assert bool(passed_over) == vectors
