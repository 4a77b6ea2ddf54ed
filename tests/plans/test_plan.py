"""Plans: which kernel runs what, for devices that need not be there."""

import platform
import re

import pytest
from c_programs import ROOT, compile_program, run
from plan_cases import DTYPES, MIXTRAL, NATIVE_ROWS, QWEN3, ROWS, TOKENS, answer, refusal

AVX2, AVX512, AVX512_BF16 = 1, 2, 4
AMX = AVX2 | AVX512 | AVX512_BF16 | 8

x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="rows of x86 instruction sets")


def plan(device, dtype="bfloat16", tokens=8, **shape):
    """(variant, block_rows) of one layer, or the message of the refusal."""
    words = answer(device, dtype=dtype, tokens=tokens, **shape)
    if why := refusal(words):
        return why
    variant, block_rows, staged, *_ = words.split()
    assert (staged != "-") == variant.startswith("decode_")
    assert not staged.startswith("decode_")
    return variant, int(block_rows)


# Of float32, bfloat16 and float16.
BEST = {
    0: ("f32_scalar", "bf16_scalar", "f16_scalar"),
    AVX2: ("f32_avx2", "bf16_avx2", "f16_avx2"),
    AVX2 | AVX512: ("f32_avx512", "bf16_avx512", "f16_avx512"),
    AVX2 | AVX512 | AVX512_BF16: ("f32_avx512", "bf16_avx512bf16", "f16_avx512"),
    AMX: ("f32_avx512", "bf16_amx", "f16_avx512"),
}


@pytest.mark.parametrize("isa", [pytest.param(isa, marks=[x86] if isa else []) for isa in BEST])
def test_the_best_instruction_set_of_a_cpu(isa):
    plans = [plan(("cpu", isa), dtype) for dtype in ("float32", "bfloat16", "float16")]
    assert tuple(variant for variant, _ in plans) == tuple(f"gemm_{name}" for name in BEST[isa])
    assert all(block_rows > 0 for _, block_rows in plans)


@x86
def test_a_cpu_has_one_variant_for_all_sizes():
    """Variants differ in bits, and a row's bits do not depend on its batch."""
    assert {plan(("cpu", AMX), "bfloat16", tokens)[0] for tokens in TOKENS} == {"gemm_bf16_amx"}


@pytest.mark.parametrize("shape", [QWEN3, MIXTRAL], ids=["qwen3", "mixtral"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
def test_every_gpu_from_ampere_on_has_a_plan(capability, dtype, shape):
    short = {"bfloat16": "bf16", "float16": "f16"}[dtype]
    blocks = []
    for tokens in TOKENS:
        name, block_rows = plan(("cuda", capability), dtype, tokens, **shape)
        row = ROWS[name]
        assert short in name.split("_") and row.format == "NATIVE"
        # wgmma is an instruction of 9.0 and of nothing later
        assert row.family == "SM80" or (row.family, capability) == ("SM90", 90)
        blocks.append(block_rows)
    assert blocks == sorted(blocks), "more tokens never make blocks smaller"
    assert blocks[0] < blocks[-1]


def test_blocks_follow_the_rows_of_an_expert():
    sm80 = ("cuda", 80)
    few = plan(sm80, tokens=16)  # 128 rows over 128 experts
    many = plan(sm80, tokens=16, experts=1, top_k=1)
    crowd = plan(sm80, tokens=4096, experts=8, top_k=2)
    assert crowd[0] == "gemm_bf16_128x256x64_sm80", "the largest tile that fits"
    assert few[1] <= many[1] < crowd[1]
    # An expert sees the same rows whether its neighbors live here or on other ranks.
    assert plan(sm80, tokens=512, experts=16, remote=112) == plan(sm80, tokens=512, experts=128)


@pytest.mark.parametrize("device", [("cpu", 7), ("cuda", 80), ("cuda", 90)])
@pytest.mark.parametrize("tokens", TOKENS)
def test_adapters_never_change_the_kernels_of_projections(device, tokens):
    """They may make several launches of one: those that stand in for it without them."""

    def projections(rank):
        words = answer(device, tokens=tokens, rank=rank).split()
        return words[0] if words[2] == "-" else words[2], words[7]

    assert all(projections(rank) == projections(0) for rank in (1, 16, 256))


def test_what_no_kernel_serves():
    assert plan(("cuda", 90), "float32") == "no float32 kernel for CUDA compute capability 9.0"
    assert plan(("cuda", 75)) == "no bfloat16 kernel for CUDA compute capability 7.5"


def test_rows_that_tma_cannot_read_stay_with_mma_sync():
    """2050 columns of 2 bytes: rows do not start at multiples of 16 bytes."""
    name, _ = plan(("cuda", 90), hidden=2050)
    assert ROWS[name].family == "SM80"


def test_forcing_a_variant():
    def forced(name, *args, **kwargs):
        return plan(*args, env={"MOELORA_FORCE_VARIANT": name}, **kwargs)

    scalar = "gemm_bf16_scalar"
    assert forced(scalar, ("cpu", 7))[0] == scalar
    # of another dtype, of another device: the table decides
    assert forced(scalar, ("cpu", 7), "float32") == plan(("cpu", 7), "float32")
    assert forced(scalar, ("cuda", 80)) == plan(("cuda", 80))
    if platform.machine() == "x86_64":  # of instructions that this CPU lacks
        assert forced("gemm_bf16_avx512", ("cpu", AVX2)) == plan(("cpu", AVX2))
    for row in NATIVE_ROWS:
        for tokens in (1, 8):
            got = forced(row.name, ("cuda", 90), tokens=tokens, dtype=DTYPES[row.dtype])
            assert got == (row.name, row.block_m)
    typo = forced("gemm_bf16_typo", ("cpu", 0))
    assert typo == "MOELORA_FORCE_VARIANT is 'gemm_bf16_typo': no such variant"


@pytest.mark.parametrize("shape", [QWEN3, MIXTRAL], ids=["qwen3", "mixtral"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_newer_gpu_has_the_kernels_of_its_limit(dtype, shape):
    def limited(capability, limit, tokens):
        env = {"MOELORA_MAX_CC": str(limit)}
        return plan(("cuda", capability), dtype, tokens, env=env, **shape)

    for tokens in TOKENS:
        of = {c: plan(("cuda", c), dtype, tokens, **shape) for c in (75, 80, 86, 90, 100, 120)}
        assert limited(90, 80, tokens) == of[80]
        # no kernels of their own, nothing to limit
        assert limited(100, 80, tokens) == limited(100, 90, tokens) == of[100]
        assert limited(120, 80, tokens) == of[120]
        assert all(limited(c, 90, tokens) == of[c] for c in (75, 80, 90))
        # the shared memory of its limit
        small = of[80][0].replace("128x256x64", "128x128x64")
        assert limited(90, 86, tokens) == (small, of[80][1])
    assert len({limited(90, 80, tokens) for tokens in TOKENS}) > 2


def test_a_limit_is_for_gpus_and_refuses_what_is_newer():
    env = {"MOELORA_MAX_CC": "80"}
    assert plan(("cpu", 7), env=env) == plan(("cpu", 7))
    forced = env | {"MOELORA_FORCE_VARIANT": "gemm_bf16_16x128x64_sm90"}
    assert plan(("cuda", 90), env=forced) == plan(("cuda", 80))


@pytest.mark.parametrize("limit", ["8.0", "sm_80", "75", "-80", "99999999999999999999"])
def test_what_is_no_limit(limit):
    assert plan(("cuda", 90), env={"MOELORA_MAX_CC": limit}) == (
        f"MOELORA_MAX_CC is '{limit}', expected a number such as 80"
    )


def test_plans_are_logged_on_request(tmp_path):
    example = compile_program(ROOT / "examples/c/layer.c", tmp_path)
    assert run(example).stderr == ""
    lines = run(example, MOELORA_LOG="plan").stderr.splitlines()
    pattern = (
        r"moelora: (gemm|experts) float32 M=\d+ top_k=\d+ E=\d+ .*: gemm_f32_\w+, blocks of \d+ "
        r"rows \(isa (0x\w+|0), \d+ threads; \d+ rows per expert\)"
    )
    assert len(lines) >= 2
    assert all(re.match(pattern, line) for line in lines), lines
    forced = run(example, MOELORA_LOG="plan", MOELORA_FORCE_VARIANT="gemm_f32_scalar")
    assert all("gemm_f32_scalar" in line for line in forced.stderr.splitlines())
    assert all(line.endswith("; forced)") for line in forced.stderr.splitlines())
    assert run(example, MOELORA_LOG="shapes").stderr.splitlines() == lines
    unknown = run(example, MOELORA_LOG="plans").stderr
    assert unknown == "moelora: MOELORA_LOG=plans: wanted plan or shapes\n"


# What an H200 ran when these were measured: tokens, rank -> the kernels around the projections.
AROUND = {
    (1, 16): "sort_i32_64_sm80 blocks_48x16x4_sm80 blocks_48x16x4_sm80",
    (64, 16): "sort_i32_2048_sm80 blocks_48x16x4_sm80 blocks_48x16x4_sm80",
    (256, 64): "sort_i32_2048_sm80 segments_128x128_sm90 blocks_48x64x4_sm80",
    (1024, 16): "sort_i32_16384_sm80 blocks_48x32x4_sm80 blocks_48x16x4_sm80",
    (2048, 16): "sort_i32_16384_sm80 segments_160x32_sm90 segments_160x32_sm90",
    (4096, 16): "sort_i32_any_sm80 segments_160x32_sm90 segments_160x32_sm90",
    (4096, 64): "sort_i32_any_sm80 segments_128x128_sm90 segments_160x64_sm90",
    (16384, 64): "sort_i32_any_sm80 segments_128x128_sm90 segments_160x64_sm90",
}


def strip(names):
    """Without the role and the dtype of adapters' kernels."""
    return names.replace("shrink_bf16_", "").replace("expand_bf16_", "")


@pytest.mark.parametrize("tokens, rank", AROUND)
def test_kernels_around_the_projections(tokens, rank):
    words = answer(("cuda", 90), tokens=tokens, rank=rank).split()
    assert strip(" ".join(words[3:6])) == AROUND[tokens, rank]
    assert words[6] == "sum_bf16_8_sm80"


@pytest.mark.parametrize(
    "tokens, rank, experts, listed",
    [
        (8, 64, 128, "0 0"),  # the sort lists no segments
        (256, 16, 128, "0 0"),  # two rows of a pair
        (256, 64, 128, "0 1"),  # enough where A is wide; gate and up have whole segments
        (1024, 16, 128, "1 1"),
        (2048, 16, 64, "1 0"),  # the other's segments are long
        (4096, 16, 128, "0 0"),  # both are, with several for each CTA
        (4096, 16, 512, "0 0"),  # to look through all pairs takes longer
    ],
)
def test_who_shares_items_of_listed_segments(tokens, rank, experts, listed):
    problem = {"tokens": tokens, "rank": rank, "experts": experts}
    assert answer(("cuda", 90), "listed", **problem) == listed


def test_a_layer_without_adapters_shrinks_nothing():
    assert answer(("cuda", 90), tokens=64).split()[4:6] == ["-", "-"]
    assert answer(("cpu", 0), tokens=64, rank=16).split()[3:7] == ["-"] * 4


def test_shrinks_of_a_portable_gpu_are_portable():
    for tokens in TOKENS:
        for rank in (8, 16, 64, 256):
            words = answer(("cuda", 80), tokens=tokens, rank=rank).split()
            assert all(name.endswith("_sm80") for name in words[3:])


# All tokens choose one expert: there are few long segments, which CTAs share.
DENSE = {"experts": 1, "top_k": 1, "hidden": 4096, "inter": 2048}
DELTAS = [
    (1, 16, {}, "route - windows_48x16x4_sm80 thin_64x16_sm80 1"),
    (64, 64, {}, "grouped - windows_48x64x4_sm80 thin_32x64_sm80 1"),
    (128, 16, {}, "sorted sort_i32_2048_sm80 windows_48x16x4_sm80 thin_64x16_sm80 1"),
    (4096, 64, {}, "sorted sort_i32_any_sm80 segments_160x64_sm90 64x64_sm80 1"),
    (1, 16, DENSE, "route - windows_48x16x8_sm80 thin_64x16_sm80 1"),
    (64, 64, DENSE, "grouped - windows_48x16x8_sm80 64x64_sm80 1"),
    (256, 16, DENSE, "grouped - windows_48x16x8_sm80 64x16_sm80 1"),
    (8192, 64, DENSE, "sorted sort_i32_16384_sm80 segments_160x64_sm90 64x64_sm80 1"),
]


@pytest.mark.parametrize("tokens, rank, shape, kernels", DELTAS)
def test_kernels_of_adapters_alone(tokens, rank, shape, kernels):
    words = answer(("cuda", 90), "delta", tokens=tokens, rank=rank, **shape)
    assert strip(words) == kernels


ORDER = 0  # of the words of a delta


@pytest.mark.parametrize(
    "sms, bandwidth, tokens, order",
    [
        (132, 4800, 96, "sorted"),  # an H200
        (132, 4800, 80, "route"),
        (132, 3350, 80, "route"),  # an H100 with as many SMs has its choices
        (114, 3350, 80, "sorted"),  # others by their memory: to read factors again takes longer,
        (108, 2039, 72, "sorted"),
        (148, 8000, 112, "route"),  # or not so long
    ],
)
def test_deltas_are_sorted_where_that_takes_less_than_memory(sms, bandwidth, tokens, order):
    words = answer(("cuda", 90), "delta", "on", str(sms), str(bandwidth), tokens=tokens, rank=16)
    assert words.split()[ORDER] == order


def test_one_variant_of_each_role_can_be_forced():
    gpu = ("cuda", 90)

    def forced(*names):
        env = {"MOELORA_FORCE_VARIANT": ",".join(names)}
        return answer(gpu, tokens=64, rank=64, env=env)

    names = ("gemm_bf16_16x128x64_sm90", "shrink_bf16_blocks_48x64x4_sm80")
    names += ("sort_i32_any_sm80", "sum_bf16_1_sm80")
    words = forced(*names).split()
    assert (words[0], words[4], words[3], words[6]) == names
    assert words[5] == words[4]
    # where it cannot serve it is passed over: too many items, no segments, another dtype
    usual = answer(gpu, tokens=64, rank=64)
    assert forced("sort_i32_64_sm80") == forced("shrink_bf16_windows_48x16x4_sm80") == usual
    assert forced("shrink_f16_blocks_48x16x4_sm80") == usual
    two = forced("sort_i32_any_sm80", "sort_i32_64_sm80")
    assert two.endswith("'sort_i32_any_sm80,sort_i32_64_sm80': two variants of one role")
