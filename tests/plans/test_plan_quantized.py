"""Plans of layers with quantized weights, for devices that need not be there."""

import itertools
from dataclasses import replace

import pytest
import test_decode
import test_variants
import torch
from plan_cases import CUDA_ROWS, DECODE_ROWS, DTYPES, ROWS, TOKENS, answer, quantized, rows_of
from quantized_cases import FORMATS, NATIVE, fitted, forms_of, kernels_of, made

from moelora.operators import formats

SAVING = {row[0] for row in rows_of("SAVING", "gemm")}
# Formats of weights, and the kernels that are written for them; w8a8: with x in FP8.
KERNELS = {"mxfp4": "mxfp4", "nvfp4": "nvfp4", "nf4": "nf4"} | dict.fromkeys(
    ["int4", "int4_g32", "int4_zp", "int4_zp_g32"], "int4"
)
FP8 = dict.fromkeys(["fp8", "fp8_g64", "fp8_rows"], "w8a16") | {"w8a8": "w8a8"}
PAIRS = [(a, b) for a in ("native", "mxfp4", "int4_zp") for b in ("native", "mxfp4", "int4")]
PAIRS += [("nvfp4", "nvfp4"), ("nvfp4", "int4"), ("nf4", "nf4"), ("mxfp4", "nf4")]
FP8_PAIRS = [("fp8", "fp8_rows"), ("fp8", "native"), ("native", "fp8_g64"), ("mxfp4", "fp8")]
FP8_PAIRS += [("w8a8", "w8a8"), ("w8a8", "fp8"), ("native", "w8a8"), ("w8a8", "int4")]
# Formats, a capability, and from how many tokens on a layer of 128 experts and top 8 takes a tile:
# each expert gets a sixteenth of them. Sums of 128 tokens and the partial ones of x in FP8 are more
# than a thread has registers; no stages of 144 tokens with FP8 weights fit.
FEW = {129: "32x128x128", 417: "64x128x128"}
OF_FP8 = {1: "16x128x128", **FEW, 705: "96x256x128", 1313: "128x256x128"}
OF_W8A8 = {1: "16x128x128", **FEW, 705: "96x256x128"}
OF_W8A8 |= {1281: "128x256x128x2", 1729: "96x256x128x2", 2817: "128x256x128x2"}
PORTABLE = {1: "16x128x64", 129: "32x128x64", 417: "64x128x64", 705: "128x128x64"}
TILES = [
    (KERNELS, 80, PORTABLE),
    (KERNELS, 90, OF_FP8 | {1793: "144x256x128"}),
    (["fp8", "fp8_g64", "fp8_rows"], 80, PORTABLE),
    (["fp8", "fp8_g64", "fp8_rows"], 90, OF_FP8),
    (["w8a8"], 80, dict(list(PORTABLE.items())[:3])),
    (["w8a8"], 90, OF_W8A8),
]


def tile(row):
    return f"{row.block_m}x{row.block_n}x{row.block_k}_{row.family.lower()}"


def alignment(row):
    """What rows of both projections have in common."""
    return row.dtype, row.family, row.block_m, row.cluster


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
@pytest.mark.parametrize(
    "name, capability, tiles", [(name, *of) for names, *of in TILES for name in names]
)
def test_tiles(name, capability, tiles, dtype):
    """By the rows of an expert; up to four tokens of four bits may be one launch."""
    short = f"gemm_{dtype.lower()}_{(KERNELS | FP8)[name]}"
    begins = [*tiles, 131073]
    for begin, end in itertools.pairwise(begins):
        for tokens in (max(begin, 5 if name in KERNELS else 1), end - 1):
            layer = {"tokens": tokens, "dtype": DTYPES[dtype]}
            row, of_w2, _ = quantized(("cuda", capability), name, name, **layer)
            assert row.name == of_w2.name == f"{short}_{tiles[begin]}_sm{capability}", tokens


@pytest.mark.parametrize("capability, kib", [(80, 163), (86, 99), (89, 99), (90, 227), (120, 99)])
@pytest.mark.parametrize("pair", PAIRS + FP8_PAIRS, ids="-".join)
def test_projections_of_two_formats_share_an_alignment(pair, capability, kib):
    for tokens in TOKENS:
        words = answer(("cuda", capability), "formats", *pair, tokens=tokens).split()
        row, of_w2 = ROWS[words[0] if words[2] == "-" else words[2]], ROWS[words[7]]
        for one, name in ((row, pair[0]), (of_w2, pair[1])):
            assert one.format.lower() == KERNELS.get(name, name.split("_")[0])
            weights = one.block_n * one.block_k * (2 if name == "native" else 1)
            if name in KERNELS:
                values = 64 * 64 // 2
                scales = {"mxfp4": 128, "nvfp4": 256 + 16, "nf4": 256}.get(name, 64 * 2 * 3)
                weights = one.block_n * one.block_k // 64**2 * (values + scales)
            tile = weights + one.block_m * one.block_k * 2
            assert one.family == "SM90" or one.stages * tile <= kib * 1024, one
        assert alignment(row) == alignment(of_w2)
        assert row.family == ("SM90" if capability == 90 else "SM80")
        alike = KERNELS.get(pair[0], pair[0]) == KERNELS.get(pair[1], pair[1])
        one_launch = alike and pair[0] in KERNELS and capability != 90 and tokens == 1
        assert (words[2] != "-") == one_launch
        assert one_launch == words[0].startswith("decode")


@pytest.mark.parametrize("capability", [80, 90, 120])
@pytest.mark.parametrize("name", KERNELS)
def test_one_token_of_quantized_weights_is_one_launch_and_more_are_if_forced(name, capability):
    """But for Hopper, whose kernels are faster, where they can take the weights."""

    def first(w2=name, **problem):
        return answer(("cuda", capability), "formats", name, w2, **problem).split()[0]

    one = f"decode_bf16_{KERNELS[name]}_sm80"
    if capability == 90:
        assert first(tokens=1).endswith("_16x128x128_sm90")
        assert first(tokens=1, env={"MOELORA_MAX_CC": "80"}) == one
    else:
        assert first(tokens=1) == one
    assert first(tokens=2).startswith("gemm_") and first("native", tokens=1).startswith("gemm_")
    assert first(tokens=1, top_k=65).startswith("gemm_")
    for row in DECODE_ROWS:
        forced = {"MOELORA_FORCE_VARIANT": row.name}
        for w2 in ("native", *KERNELS):
            serves = row.name == one and KERNELS.get(w2, w2) == KERNELS[name]
            assert first(w2, tokens=4, env=forced) == (one if serves else first(w2, tokens=4))
        for shape in ({"tokens": 9, "top_k": 1}, {"tokens": 5, "top_k": 13}):
            assert first(**shape, env=forced).startswith("gemm_")


def layout_of(p):
    return formats.FORMATS[p.w13.layout[0]].name.lower()


def sizes_of(spec):
    return tuple((n, getattr(spec, n)) for n in ("tokens", "top_k", "experts", "hidden", "inter"))


@pytest.mark.parametrize("capability", [80, 90, 120])
@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("name", FORMATS)
def test_one_launch_serves_what_its_tests_force_it_on(name, dtype, capability):
    """The variant that test_decode.py names, on layers of the formats and sizes that it has."""
    p = test_decode.made(test_decode.SMALL, name, getattr(torch, dtype))
    variant, layout = test_decode.one_launch(p), layout_of(p)
    env = {"MOELORA_FORCE_VARIANT": variant}
    for sizes in {sizes_of(fitted(spec, spec.dtype)) for spec in test_decode.SPECS.values()}:
        problem = {**dict(sizes), "dtype": dtype, "rank": 16, "env": env}
        words = answer(("cuda", capability), "formats", layout, layout, **problem)
        assert words.split()[0] == variant, problem


@pytest.mark.parametrize("row", CUDA_ROWS + DECODE_ROWS, ids=lambda row: row.name)
def test_a_variant_serves_what_its_tests_force_it_on(row):
    """The layers of test_variants.py that are to name it, of each form of weights for it."""
    spec = test_variants.deepest(row.name, getattr(torch, DTYPES[row.dtype]))
    problem = {**dict(sizes_of(spec)), "rank": max(spec.ranks), "dtype": DTYPES[row.dtype]}
    problem["env"] = {"MOELORA_FORCE_VARIANT": row.name}
    for form in forms_of(row.name):
        kernel, layout = kernels_of(form), NATIVE
        if form != NATIVE:
            layout = layout_of(made(replace(spec, hidden=128, inter=128), form, spec.dtype))
        if kernel == "w8a8":
            layout = {"fp8_g64": "w8a8_g64"}.get(layout, "w8a8")
        assert (kernel or NATIVE) == {"FP8": "w8a16"}.get(row.format, row.format.lower())
        gpu = ("cuda", int(row.family.removeprefix("SM")))
        assert answer(gpu, "formats", layout, layout, **problem).split()[0] == row.name, form


def test_a_tile_that_one_format_has_alone_is_no_choice_for_two():
    """Hopper has 144 rows natively in a cluster, quantized without; 96 and 128 of both."""
    gpu = ("cuda", 90)
    for pair in (("native", "mxfp4"), ("int4", "native")):
        blocks = [quantized(gpu, *pair, tokens=tokens)[0].block_m for tokens in (500, 1024, 131072)]
        assert blocks == [96, 96, 128]
    assert quantized(gpu, "mxfp4", "int4", tokens=500)[0].block_m == 64
    # Of the tiles of 128 rows an sm_80 holds the wide one, an sm_86 does not.
    assert tile(quantized(("cuda", 80), "mxfp4", "native", tokens=4096)[1]) == "128x256x64_sm80"
    assert tile(quantized(("cuda", 86), "mxfp4", "native", tokens=4096)[1]) == "128x128x64_sm80"


@pytest.mark.parametrize("capability", [80, 90])
def test_only_kernels_of_its_format_are_forced_on_a_layer(capability):
    gpu = ("cuda", capability)
    usual = quantized(gpu, "mxfp4", "int4_zp", tokens=2)
    for row in CUDA_ROWS + DECODE_ROWS:
        env = {"MOELORA_FORCE_VARIANT": row.name}
        got = quantized(gpu, "mxfp4", "int4_zp", tokens=2, env=env)
        serves = row in CUDA_ROWS and row.dtype == "BF16" and row.format == "MXFP4"
        if serves and row.family in ("SM80", f"SM{capability}"):
            assert got[0] == row and got[1].name == row.name.replace("mxfp4", "int4")
        else:
            assert got == usual, row


def test_plans_tuned_for_other_formats_do_not_serve():
    key = ["cuda", "90", "132", "bfloat16", "128", "8", "2048", "768"]

    def tuned(variant):
        row, of_w2, _ = quantized(("cuda", 90), "mxfp4", "mxfp4", *key, f"64:{variant}", tokens=64)
        return row.name, of_w2.name

    others = "gemm_bf16_128x256x64_sm90", "decode_bf16_mxfp4_sm80", "gemm_bf16_int4_64x128x128_sm90"
    for other in others:
        assert tuned(other) == ("gemm_bf16_mxfp4_16x128x128_sm90",) * 2
    assert tuned("gemm_bf16_mxfp4_64x128x128_sm90") == ("gemm_bf16_mxfp4_64x128x128_sm90",) * 2


def test_adapters_and_limits_of_quantized_layers():
    def ask(capability, **problem):
        return quantized(("cuda", capability), "mxfp4", "int4", **problem)

    for tokens in TOKENS:
        base = ask(90, tokens=tokens)[:2]
        assert all(ask(90, tokens=tokens, rank=rank)[:2] == base for rank in (1, 16, 256))
        assert ask(90, tokens=tokens, env={"MOELORA_MAX_CC": "80"}) == ask(80, tokens=tokens)


@pytest.mark.parametrize(
    "capability, of_format, native",
    [(90, "128x256x128_sm90", "128x256x64_sm90"), (80, "128x128x64_sm80", "128x128x64_sm80")],
)
def test_what_is_around_the_projections_does_not_depend_on_formats(capability, of_format, native):
    """A shrink reads activations alone. Both have tiles of 128 rows, if not by their own choice."""
    forced, env = (
        {"MOELORA_FORCE_VARIANT": f"gemm_bf16_{name}"} for name in (f"mxfp4_{of_format}", native)
    )
    for tokens in (2048, 4096, 16384):
        for rank in (16, 64):
            problem = {"tokens": tokens, "rank": rank}
            row, _, around = quantized(("cuda", capability), "mxfp4", "int4", env=forced, **problem)
            words = answer(("cuda", capability), env=env, **problem).split()
            assert tile(row) == of_format
            assert words[3:7] == around and "-" not in around


@pytest.mark.parametrize(
    "capability, pair", [(90, ("int4", "mxfp4")), *((80, (name, name)) for name in FP8)]
)
def test_quantized_rows_that_allow_no_vectors(capability, pair):
    for tokens in TOKENS:
        row, of_w2, _ = quantized(("cuda", capability), *pair, tokens=tokens, hidden=2050)
        assert row.family == of_w2.family == "SM80" and row.block_m <= 32


def test_formats_without_a_kernel():
    old = quantized(("cuda", 75), "mxfp4", "mxfp4")
    assert old == "no bfloat16 kernel for MXFP4 weights and CUDA compute capability 7.5"
    wide = quantized(("cuda", 90), "int4_zp", "int4_zp", dtype="float32")
    assert wide == "no float32 kernel for INT4 weights and CUDA compute capability 9.0"


def test_a_cpu_has_one_kernel_for_all_formats():
    for pair in PAIRS + FP8_PAIRS:
        words = answer(("cpu", 7), "formats", *pair).split()
        assert words == answer(("cpu", 7)).split()
        assert words[7] == words[0]


# ---- FP8 ----


def test_fp8_tokens_with_scales_of_64_columns_take_portable_tiles():
    for pair in (("w8a8_g64", "w8a8_g64"), ("fp8", "w8a8_g64")):
        for name in answer(("cuda", 90), "formats", *pair, tokens=1024).split()[0:8:7]:
            assert name.endswith("_sm80")


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_a_layer_trains_by_the_instructions_that_serve_it(dtype):
    """Of rows that store values for a backward, some fit a w2 with FP8 tokens: in one family."""
    kernels = ("native", "mxfp4", "nvfp4", "nf4", "int4", "fp8", "w8a8")
    for name, tokens in itertools.product(kernels, (16, 1024, 4096)):
        problem = {"tokens": tokens, "dtype": DTYPES[dtype.upper()]}
        words = answer(("cuda", 90), "formats", name, "w8a8", **problem).split()
        serves = ROWS[words[0]]
        saving = [
            row
            for row in CUDA_ROWS
            if (row.dtype, row.format) == (serves.dtype, serves.format)
            and (row.format == "NATIVE" or row.name in SAVING)
            and any(w2.format == "W8A8" and alignment(w2) == alignment(row) for w2 in CUDA_ROWS)
        ]
        assert ("SM90" in {row.family for row in saving}) == (serves.family == "SM90")
        assert saving and ROWS[words[7]].family == serves.family


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
