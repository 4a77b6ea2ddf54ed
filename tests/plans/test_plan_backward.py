"""Backwards of layers, projections and adapters alone: plans for devices that need not be there."""

from itertools import product

import pytest
from plan_cases import MIXTRAL, answer, refusal

HOPPER, AMPERE, ADA = ("cuda", 90), ("cuda", 80), ("cuda", 89)
# Formats of weights, and the kernels that are written for them.
KERNELS = {"mxfp4": "mxfp4", "nvfp4": "nvfp4", "nf4": "nf4", "int4": "int4", "fp8": "w8a16"}


def backward(device, *args, of="backward", **problem):
    """(variant, block_rows, sort or shrink, sum) of a backward, or what the refusal says."""
    words = answer(device, of, *args, **problem)
    if why := refusal(words):
        return why
    variant, rows, around, total = words.split()
    return variant, int(rows), around, total


def projection(device, *args, alone=False, **problem):
    """Of the backward of w13, or of its adapters alone."""
    return backward(device, *args, of="alone" if alone else "project", **problem)


both = pytest.mark.parametrize("of", [backward, projection], ids=["layer", "projection"])
TILES = {1: "32x128", 256: "32x128", 512: "96x128", 1024: "96x128", 2048: "128x256x64x2"}
TILES |= {4096: "144x256x64x2", 16384: "128x256x64x2"}


@both
@pytest.mark.parametrize("tokens", TILES)
def test_hopper(tokens, of):
    """Qwen3-30B-A3B has tokens / 16 rows of an expert. A projection has the kernels of a layer."""
    name, rows, around, total = of(HOPPER, tokens=tokens, rank=16)
    assert name in (f"back_bf16_{TILES[tokens]}_sm90", f"back_bf16_{TILES[tokens]}x64_sm90")
    assert rows == int(TILES[tokens].split("x")[0]) and total == "sum_bf16_8_sm80"
    if of is projection:
        assert around.startswith("shrink_bf16_")
        assert projection(HOPPER, tokens=tokens)[2] == "-"


@pytest.mark.parametrize("device", [AMPERE, ADA])
@pytest.mark.parametrize(("tokens", "rows"), [(1, 16), (256, 32), (1024, 64), (16384, 128)])
def test_others(device, tokens, rows):
    """With shared memory that every GPU has."""
    assert backward(device, tokens=tokens, dtype="float16")[0] == f"back_f16_{rows}x128x64_sm80"


def test_sizes_without_vectors():
    for device in (HOPPER, AMPERE):
        name, *_, total = backward(device, tokens=16384, hidden=2044)
        assert name == "back_bf16_32x128x64_sm80" and total == "sum_bf16_1_sm80"


def test_the_kernel_does_not_depend_on_adapters():
    for tokens in (1, 100, 5000):
        with_adapters = backward(HOPPER, tokens=tokens, rank=64, **MIXTRAL)
        assert backward(HOPPER, tokens=tokens, **MIXTRAL)[0] == with_adapters[0]


@both
def test_a_cpu(of):
    name, _, around, total = of(("cpu", 0), dtype="float32", rank=16)
    assert name == "gemm_f32_scalar" and around == total == "-"


@pytest.mark.parametrize("forced", ["back_bf16_64x128x64_sm80", "back_bf16_96x128x64_sm90"])
def test_forced(forced):
    env = {"MOELORA_FORCE_VARIANT": forced}
    assert backward(HOPPER, tokens=4096, env=env)[0] == forced
    other = backward(AMPERE, tokens=4096, env=env)[0]
    assert other == (forced if forced.endswith("sm80") else "back_bf16_128x128x64_sm80")


@both
@pytest.mark.parametrize("name", KERNELS)
def test_quantized_weights(name, of):
    def ask(device, **problem):
        return of(device, "formats", name, name, **problem)[0].removeprefix(kernel)

    kernel = f"back_bf16_{KERNELS[name]}_"
    for device, (tokens, rows) in product((AMPERE, ADA), [(1, 32), (256, 32), (4096, 128)]):
        assert ask(device, tokens=tokens) == f"{rows}x128x64_sm80"
    assert ask(HOPPER) == "128x256x128_sm90"
    assert ask(HOPPER, hidden=2048 + 4) == "32x128x64_sm80"


@pytest.mark.parametrize("device", [HOPPER, AMPERE])
def test_weights_of_two_formats(device):
    """Both products take one alignment of rows; the kernel of w13 is named."""
    assert "_mxfp4_" in backward(device, "formats", "mxfp4", "fp8", tokens=4096)[0]
    assert "_mxfp4_" not in backward(device, "formats", "native", "mxfp4", tokens=4096)[0]


@both
def test_refusals(of):
    assert "no float32 kernel for a backward" in of(HOPPER, dtype="float32", rank=8)
    assert of(HOPPER, rank=4096) == "rank 4096: the GPU kernels take ranks below 4096"


@pytest.mark.parametrize("device", [HOPPER, AMPERE])
@pytest.mark.parametrize(("tokens", "rows"), [(1, 16), (256, 32), (16384, 128)])
def test_adapters_alone(device, tokens, rows):
    """By portable kernels, without weights."""
    name, found, *_ = projection(device, tokens=tokens, rank=16, alone=True)
    assert name == f"back_bf16_{rows}x128x64_sm80" and found == rows
