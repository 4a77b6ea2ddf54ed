"""Sums whose order no batch changes, in plans for devices that need not be there."""

import pytest
from plan_cases import QWEN3, TOKENS, answer, rows_of

EXPANDS = [
    name
    for kind in ("EXPAND", "EXPAND_THIN")
    for name, dtype, *_ in rows_of(kind, "expand")
    if dtype == "BF16"
]
LONG = {"QWEN3": QWEN3, "DEEP": {"hidden": 4096, "inter": 1408}}


def parts_of(name, depth):
    """Parts of the depth whose sums a shrink adds up: in its name, where it shares them out."""
    method, shape = name.removeprefix("shrink_bf16_").split("_")[:2]
    if method != "segments":
        return int(shape.split("x")[2])
    return 8 if depth >= 4096 else 4


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("shape", LONG)
def test_every_shrink_of_a_depth_adds_up_the_same_parts(capability, shape):
    gpu, sizes = ("cuda", capability), QWEN3 | LONG[shape]
    depths, met = (sizes["hidden"], sizes["inter"], sizes["hidden"]), set()
    for tokens in TOKENS:
        for rank in (8, 16, 64, 256):
            words = answer(gpu, tokens=tokens, rank=rank, **sizes).split()
            alone = answer(gpu, "delta", tokens=tokens, rank=rank, **sizes).split()
            for name, depth in zip((words[4], words[5], alone[2]), depths, strict=True):
                assert parts_of(name, depth) == (8 if depth >= 4096 else 4)
                met.add(name.split("_")[2])
    assert met == {"blocks", "windows", "segments"}


def test_a_forced_shrink_that_adds_up_otherwise_is_passed_over():
    gpu = ("cuda", 90)
    usual = answer(gpu, tokens=64, rank=16)
    other, same = "shrink_bf16_blocks_48x16x8_sm80", "shrink_bf16_blocks_48x64x4_sm80"
    assert answer(gpu, tokens=64, rank=16, env={"MOELORA_FORCE_VARIANT": other}) == usual
    assert same in answer(gpu, tokens=64, rank=16, env={"MOELORA_FORCE_VARIANT": same})


def neighboring_ranks(name):
    """A product of 16 ranks has neighbors: so do the expands of as many ranks."""
    return name.removesuffix("_elements_sm80").removesuffix("_sm80").endswith("x16")


@pytest.mark.parametrize("inter", [768, 772])  # vectors, and rows that allow none
@pytest.mark.parametrize("rank", [8, 12, 16, 24, 64, 256])
def test_every_expand_of_some_factors_adds_up_ranks_in_one_order(rank, inter):
    """Whatever the batch, and whatever is forced: of vectors some are passed over."""

    def expand(tokens, **env):
        words = answer(("cuda", 90), "delta", tokens=tokens, rank=rank, inter=inter, env=env)
        return words.split()[3]

    vectors = rank % 8 == 0 and inter % 8 == 0
    neighbors = rank <= 16 or not vectors
    for tokens in TOKENS:
        assert neighboring_ranks(expand(tokens)) == neighbors
    taken = {name: expand(1024, MOELORA_FORCE_VARIANT=name) for name in EXPANDS}
    assert set(taken.values()) <= {*EXPANDS}
    assert all(one in (name, expand(1024)) for name, one in taken.items())
    assert all(neighboring_ranks(one) == neighbors for one in taken.values())
