"""Plans of layers with FP8 weights, for devices that need not be there."""

import itertools

import pytest
from plan_cases import CUDA_ROWS, DTYPES, ROWS, TOKENS, answer, quantized, rows_of

SAVING = {row[0] for row in rows_of("SAVING", "gemm")}

# Of x as it is, and of x in FP8.
KERNELS = {"fp8": "w8a16", "fp8_g64": "w8a16", "fp8_rows": "w8a16", "w8a8": "w8a8"}
PAIRS = [("fp8", "fp8_rows"), ("fp8", "native"), ("native", "fp8_g64"), ("mxfp4", "fp8")]
PAIRS += [("w8a8", "w8a8"), ("w8a8", "fp8"), ("native", "w8a8"), ("w8a8", "int4")]


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
@pytest.mark.parametrize("name", KERNELS)
def test_tiles_of_fp8_weights(name, dtype):
    """Sums of 128 tokens and the partial ones of x in FP8 are more than a thread's registers."""
    kernel = KERNELS[name]
    tiles = {1: 16, 64: 16, 129: 32, 416: 32, 417: 64, 704: 64, 705: 128, 131072: 128}
    if kernel == "w8a8":
        tiles = {1: 16, 128: 16, 129: 32, 416: 32, 417: 64, 131072: 64}
    for tokens, rows in tiles.items():
        row, of_w2, _ = quantized(("cuda", 80), name, name, tokens=tokens, dtype=DTYPES[dtype])
        assert row.name == of_w2.name == f"gemm_{dtype.lower()}_{kernel}_{rows}x128x64_sm80"


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
@pytest.mark.parametrize("name", ["fp8", "fp8_g64", "fp8_rows"])
def test_hopper_tiles_of_fp8_weights(name, dtype):
    """By the rows of an expert, a sixteenth of the tokens; no stages of 144 tokens fit."""
    tiles = {1: "16x128", 129: "32x128", 417: "64x128", 705: "96x256", 1313: "128x256"}
    last = {128: "16x128", 416: "32x128", 704: "64x128", 1312: "96x256", 131072: "128x256"}
    for tokens, shape in (tiles | last).items():
        row, of_w2, _ = quantized(("cuda", 90), name, name, tokens=tokens, dtype=DTYPES[dtype])
        assert row.name == of_w2.name == f"gemm_{dtype.lower()}_w8a16_{shape}x128_sm90"


def test_fp8_tokens_with_scales_of_64_columns_take_portable_tiles():
    for pair in (("w8a8_g64", "w8a8_g64"), ("fp8", "w8a8_g64")):
        for name in answer(("cuda", 90), "formats", *pair, tokens=1024).split()[0:8:7]:
            assert name.endswith("_sm80")


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_a_layer_trains_by_the_instructions_that_serve_it(dtype):
    """Of rows that store values for a backward, some fit a w2 with FP8 tokens: in one family."""
    kernels = ("native", "mxfp4", "nvfp4", "nf4", "int4", "fp8", "w8a8")
    for name, tokens in itertools.product(kernels, (16, 1024, 4096)):
        words = answer(
            ("cuda", 90), "formats", name, "w8a8", tokens=tokens, dtype=DTYPES[dtype.upper()]
        ).split()
        serves = ROWS[words[0]]
        saving = [
            row
            for row in CUDA_ROWS
            if (row.dtype, row.format) == (serves.dtype, serves.format)
            and (row.format == "NATIVE" or row.name in SAVING)
            and any(
                (w2.format, w2.dtype, w2.family, w2.block_m, w2.cluster)
                == ("W8A8", row.dtype, row.family, row.block_m, row.cluster)
                for w2 in CUDA_ROWS
            )
        ]
        assert ("SM90" in {row.family for row in saving}) == (serves.family == "SM90")
        assert saving and ROWS[words[7]].family == serves.family


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_projections_of_fp8_and_others_share_an_alignment(pair):
    for capability, tokens in itertools.product((80, 86, 120), TOKENS):
        words = answer(("cuda", capability), "formats", *pair, tokens=tokens).split()
        row, of_w2 = ROWS[words[0]], ROWS[words[7]]
        same = ("dtype", "family", "block_m", "cluster")
        assert [getattr(row, name) for name in same] == [getattr(of_w2, name) for name in same]
        assert [row.format, of_w2.format] == [name.upper().split("_")[0] for name in pair]


def test_tiles_of_fp8_fit_every_gpu():
    """Stages of weights, their scales and x; those of x in FP8 with slots for the scales of both;
    and what is known about a tile's adapters."""
    for row in CUDA_ROWS:
        if row.format in ("FP8", "W8A8") and row.family == "SM80":
            scales = 2 * 256 + (4 * row.block_m if row.format == "W8A8" else 0)
            stage = row.block_n * 64 + row.block_m * 128
            adapters = 16 + row.stages * 32 + 8 * row.block_m
            slots = 8 if row.format == "W8A8" else row.stages
            assert row.stages * stage + slots * scales + adapters <= 99 * 1024, row


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_hopper_tiles_of_fp8_weights_and_tokens(dtype):
    """By the rows of an expert, a sixteenth of the tokens."""
    tiles = {1: "16x128x128", 129: "32x128x128", 417: "64x128x128", 705: "96x256x128"}
    tiles |= {1281: "128x256x128x2", 1729: "96x256x128x2", 2817: "128x256x128x2"}
    last = {128: tiles[1], 416: tiles[129], 704: tiles[417], 1280: tiles[705]}
    last |= {1728: tiles[1281], 2816: tiles[1729], 131072: tiles[2817]}
    for tokens, shape in (tiles | last).items():
        row, of_w2, _ = quantized(("cuda", 90), "w8a8", "w8a8", tokens=tokens, dtype=DTYPES[dtype])
        assert row.name == of_w2.name == f"gemm_{dtype.lower()}_w8a8_{shape}_sm90"


def test_all_calls_stay_with_one_kind_of_tensor_core_instruction():
    """Whatever is forced: mma.sync adds up FP8 products otherwise than wgmma."""
    force = {"MOELORA_FORCE_VARIANT": "gemm_bf16_w8a8_32x128x64_sm80"}
    for tokens, pair in itertools.product((16, 1024), (("w8a8", "w8a8"), ("native", "w8a8"))):
        passed_over, portable = (
            answer(("cuda", capability), "formats", *pair, tokens=tokens, env=force).split()[0]
            for capability in (90, 80)
        )
        assert passed_over.endswith("_sm90") and portable.endswith("_sm80")
        assert (portable == force["MOELORA_FORCE_VARIANT"]) == (pair[0] == "w8a8")


def test_fp8_rows_that_allow_no_vectors():
    for tokens, name in itertools.product(TOKENS, KERNELS):
        row, of_w2, _ = quantized(("cuda", 80), name, name, tokens=tokens, hidden=2050)
        assert row == of_w2 and row.block_m <= 32


def test_a_cpu_has_one_kernel_for_fp8_too():
    for pair in PAIRS:
        assert answer(("cpu", 7), "formats", *pair) == answer(("cpu", 7))
