"""What a plan says of every launch, as MOELORA_LOG=plan prints it: launchers decide nothing."""

import re

import pytest
from plan_cases import asked

H200 = ("cuda", 90)
A100 = ("cuda", 80)


def launches(device, w13="native", w2=None, **problem):
    """{part of a layer: {"kernel": name, key: value}} in the order of launches."""
    done = asked(device, "formats", w13, w2 or w13, env={"MOELORA_LOG": "plan"}, **problem)
    parts = re.findall(r"^moelora:   (\w+): (\S+) ?(.*)$", done.stderr, re.M)
    return {
        part: {"kernel": kernel} | dict(re.findall(r"(\w+)=(\S+)", rest))
        for part, kernel, rest in parts
    }


def test_launches_come_in_their_order():
    assert [*launches(H200, tokens=64)] == ["resolve", "sort", "w13", "w2", "sum"]
    assert [*launches(H200, tokens=8)] == ["sort", "w13", "w2", "sum"], "which reads tables itself"
    with_adapters = ["resolve", "sort", "shrink13", "w13", "shrink2", "w2", "sum"]
    assert [part for part in launches(H200, tokens=64, rank=16) if part != "segments"] == (
        with_adapters
    )


def test_epilogues():
    few, many = launches(H200, tokens=64), launches(H200, tokens=4096)
    assert few["w13"]["epilogue"] == many["w13"]["epilogue"] == "gated"
    assert few["w2"]["epilogue"] == "plain"
    assert many["w2"]["epilogue"] == "plain"


@pytest.mark.parametrize("device", [A100, H200])
@pytest.mark.parametrize("tokens", [16, 64, 512, 4096])
def test_grids(device, tokens):
    """CTAs are spread over SMs behind the other projection, and nowhere else."""
    plain = launches(device, tokens=tokens)
    assert plain["w13"]["grid"] == "overlapped"
    shares_sm = device == H200 and "x128x" in plain["w2"]["kernel"]
    assert plain["w2"]["grid"] == ("spread" if shares_sm else "overlapped")
    adapted = launches(device, tokens=tokens, rank=16)
    assert adapted["w13"]["grid"] == adapted["w2"]["grid"] == "overlapped"


@pytest.mark.parametrize("format, inter", [("native", 512), ("w8a8", 1024)])
def test_tiles_with_few_k_steps_run(format, inter):
    many = {"tokens": 16384, "hidden": 7168}  # 28 columns
    at_most, more = (launches(H200, format, inter=i, **many) for i in (inter, inter + 128))
    assert (at_most["w13"]["run"], at_most["w2"]["run"]) == ("1", "7")
    assert more["w2"]["run"] == "1"
    assert launches(H200, format, inter=inter, tokens=64, hidden=7168)["w2"]["run"] == "1"
    assert launches(A100, format, inter=inter, **many)["w2"]["run"] == "1"


@pytest.mark.parametrize(
    "format, tokens, again",
    [
        ("native", 16, "0"),
        ("native", 4096, "0"),
        ("native", 8192, "1"),
        ("mxfp4", 1024, "0"),
        ("mxfp4", 4096, "1"),
        ("w8a8", 4096, "0"),
        ("w8a8", 4112, "1"),
    ],
)
def test_weights_of_long_experts_are_read_again(format, tokens, again):
    """Those with more rows than the blocks of a cluster."""
    plan = launches(H200, format, tokens=tokens)
    assert (plan["w13"]["weights_again"], plan["w2"]["weights_again"]) == (again, again)


@pytest.mark.parametrize("hidden, tokens", [(4096, 4096), (2048, 16384)])
def test_shrinks_of_much_x_go_by_adapter(hidden, tokens):
    much = launches(H200, tokens=tokens, hidden=hidden, rank=16)
    assert (much["shrink13"]["by_adapter"], much["shrink2"]["by_adapter"]) == ("1", "0")
    little = launches(H200, tokens=tokens // 2, hidden=hidden, rank=16)
    assert little["shrink13"]["by_adapter"] == ("1" if tokens > 4096 else "0")


@pytest.mark.parametrize("format", ["mxfp4", "int4"])
def test_few_rows_of_four_bits_start_behind_a_shrink(format):
    adapted = launches(H200, format, tokens=32, rank=16)
    assert {adapted["w13"]["grid"], adapted["w2"]["grid"]} == {"overlapped"}
    assert launches(H200, format, tokens=32)["w2"]["grid"] == "spread"


def test_activations_become_e4m3_once():
    """In launches of their own, or h by the epilogue that makes it, if that holds whole groups."""
    small, large = launches(H200, "w8a8", tokens=64), launches(H200, "w8a8", tokens=4096)
    assert small["w13"]["quantizes_x"] == small["w2"]["quantizes_x"] == "1"
    assert small["w13"]["stores_e4m3"] == "0"
    assert (large["w13"]["quantizes_x"], large["w2"]["quantizes_x"]) == ("1", "0")
    assert large["w13"]["quantizes_vectors"] == "1"
    assert (large["w13"]["stores_e4m3"], large["w13"]["stores_out"]) == ("1", "0")
    adapted = launches(H200, "w8a8", tokens=4096, rank=16)
    assert adapted["w13"]["stores_out"] == "1", "adapters of w2 read h as it is"
    odd = launches(H200, "w8a8", tokens=4096, inter=704)
    assert (odd["w13"]["stores_e4m3"], odd["w2"]["quantizes_x"]) == ("0", "1"), "half a group"
    native = launches(H200, "fp8", tokens=4096)
    assert native["w13"]["quantizes_x"] == native["w2"]["quantizes_x"] == "0"


def test_dynamic_schedules_have_a_counter_for_each_tile():
    assert launches(H200, tokens=64)["w13"]["counters"] == "1"
    many = launches(H200, tokens=4096)["w13"]
    assert "x256x" in many["kernel"]
    assert int(many["counters"]) % (2 * 768 // 256) == 0
    assert int(many["counters"]) > 8 * 4096 // 288
    assert launches(A100, tokens=4096)["w13"]["counters"] == "1"


def test_one_launch_names_what_stands_in_for_it():
    one = launches(A100, "mxfp4", tokens=1)
    assert [*one] == ["layer", "sort", "w13", "w2", "sum"]
    assert one["layer"]["kernel"].startswith("decode_")


def test_a_forced_row_that_is_passed_over_says_why():
    for name, formats, why in (
        ("gemm_bf16_64x128x64_sm80", ("mxfp4", "mxfp4"), "it is for weights of another format"),
        ("decode_bf16_mxfp4_sm80", ("mxfp4",) * 2, "it only takes a few tokens of a whole layer"),
        (
            "gemm_bf16_mxfp4_64x128x128_sm90",
            ("mxfp4", "native"),
            "no row like it is for the format",
        ),
    ):
        env = {"MOELORA_LOG": "plan", "MOELORA_FORCE_VARIANT": name}
        done = asked(H200, "formats", *formats, tokens=64, env=env)
        assert f"moelora: {name} is passed over: {why}" in done.stderr
        assert name not in done.stdout
