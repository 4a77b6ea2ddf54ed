"""Plans of the backward of a layer, for devices that need not be there."""

import pytest
from plan_cases import MIXTRAL, answer, refusal

HOPPER, AMPERE, ADA = ("cuda", 90), ("cuda", 80), ("cuda", 89)


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


TILES = {1: "32x128", 256: "32x128", 512: "96x128", 1024: "96x128", 2048: "128x256x64x2"}
TILES |= {4096: "144x256x64x2", 16384: "128x256x64x2"}


@pytest.mark.parametrize("of", [backward, projection], ids=["layer", "projection"])
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
    name, *_ = backward(device, tokens=tokens, dtype="float16")
    assert name == f"back_f16_{rows}x128x64_sm80"


def test_sizes_without_vectors():
    for device in (HOPPER, AMPERE):
        name, *_, total = backward(device, tokens=16384, hidden=2044)
        assert name == "back_bf16_32x128x64_sm80" and total == "sum_bf16_1_sm80"


def test_the_kernel_does_not_depend_on_adapters():
    for tokens in (1, 100, 5000):
        assert (
            backward(HOPPER, tokens=tokens, **MIXTRAL)[0]
            == (backward(HOPPER, tokens=tokens, rank=64, **MIXTRAL)[0])
        )


def test_a_cpu():
    name, _, sort, total = backward(("cpu", 0), dtype="float32", rank=16)
    assert name == "gemm_f32_scalar" and sort == total == "-"


@pytest.mark.parametrize("forced", ["back_bf16_64x128x64_sm80", "back_bf16_96x128x64_sm90"])
def test_forced(forced):
    env = {"MOELORA_FORCE_VARIANT": forced}
    assert backward(HOPPER, tokens=4096, env=env)[0] == forced
    family = forced[-4:]
    other = backward(AMPERE, tokens=4096, env=env)[0]
    assert other == (forced if family == "sm80" else "back_bf16_128x128x64_sm80")


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "nf4", "int4", "fp8"])
@pytest.mark.parametrize("device", [AMPERE, ADA])
@pytest.mark.parametrize(("tokens", "rows"), [(1, 32), (256, 32), (4096, 128)])
def test_quantized_weights(device, name, tokens, rows):
    kernel = "w8a16" if name == "fp8" else name
    variant, found, *_ = backward(device, "formats", name, name, tokens=tokens)
    assert variant == f"back_bf16_{kernel}_{rows}x128x64_sm80" and found == rows


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "nf4", "int4", "fp8"])
def test_quantized_weights_on_hopper(name):
    kernel = "w8a16" if name == "fp8" else name
    assert backward(HOPPER, "formats", name, name)[0] == f"back_bf16_{kernel}_128x256x128_sm90"
    portable = backward(HOPPER, "formats", name, name, hidden=2048 + 4)
    assert portable[0] == f"back_bf16_{kernel}_32x128x64_sm80"


@pytest.mark.parametrize("device", [HOPPER, AMPERE])
def test_weights_of_two_formats(device):
    """Both products take one alignment of rows; the kernel of w13 is named."""
    assert "_mxfp4_" in backward(device, "formats", "mxfp4", "fp8", tokens=4096)[0]
    assert "_mxfp4_" not in backward(device, "formats", "native", "mxfp4", tokens=4096)[0]


@pytest.mark.parametrize("of", [backward, projection], ids=["layer", "projection"])
def test_refusals(of):
    assert "no float32 kernel for a backward" in of(HOPPER, dtype="float32", rank=8)
    assert of(HOPPER, rank=4096) == "rank 4096: the GPU kernels take ranks below 4096"
    assert of(("cpu", 0), dtype="float32", rank=16)[0] == "gemm_f32_scalar"


# ---- a projection, and adapters alone ----


@pytest.mark.parametrize("device", [HOPPER, AMPERE])
@pytest.mark.parametrize(("tokens", "rows"), [(1, 16), (256, 32), (16384, 128)])
def test_adapters_alone(device, tokens, rows):
    """By portable kernels, without weights."""
    name, found, *_ = projection(device, tokens=tokens, rank=16, alone=True)
    assert name == f"back_bf16_{rows}x128x64_sm80" and found == rows


def test_a_projection_of_quantized_weights():
    name, *_ = projection(HOPPER, "formats", "mxfp4", "native", rank=16)
    assert name == "back_bf16_mxfp4_128x256x128_sm90"
    name, *_ = projection(AMPERE, "formats", "mxfp4", "native", rank=16)
    assert name == "back_bf16_mxfp4_32x128x64_sm80"
