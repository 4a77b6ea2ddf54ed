"""What a plan says of every launch, as MOELORA_LOG=plan prints it: launchers decide nothing."""

import re

import pytest
from plan_cases import asked

H200 = ("cuda", 90)
A100 = ("cuda", 80)


def launches(device, w13="native", w2=None, *, about=(), **problem):
    """{part of a layer: {"kernel": name, key: value}} in the order of launches."""
    formats = ("formats", w13, w2 or w13)
    done = asked(device, *about, *formats, env={"MOELORA_LOG": "plan"}, **problem)
    parts = re.findall(r"^moelora:   (\w+): (\S+) ?(.*)$", done.stderr, re.M)
    return {
        part: {"kernel": kernel} | dict(re.findall(r"(\w+)=(\S+)", rest))
        for part, kernel, rest in parts
    }


def of_w13_and_w2(key, device, *formats, **problem):
    plan = launches(device, *formats, **problem)
    return plan["w13"][key], plan["w2"][key]


def test_launches_come_in_their_order():
    assert [*launches(H200, tokens=64)] == ["resolve", "sort", "w13", "w2", "sum"]
    assert [*launches(H200, tokens=8)] == ["sort", "w13", "w2", "sum"], "which reads tables itself"
    adapted = [part for part in launches(H200, tokens=64, rank=16) if part != "segments"]
    assert adapted == ["resolve", "sort", "shrink13", "w13", "shrink2", "w2", "sum"]


@pytest.mark.parametrize("tokens", [64, 4096])
def test_epilogues(tokens):
    assert of_w13_and_w2("epilogue", H200, tokens=tokens) == ("gated", "plain")
    for format, epilogue in (("native", "plain"), ("w8a8", "general")):
        alone = launches(H200, format, about=["gemm"], tokens=tokens)["w"]
        assert alone["kernel"].endswith("_sm90") and alone["epilogue"] == epilogue


@pytest.mark.parametrize("device", [A100, H200])
@pytest.mark.parametrize("tokens", [16, 64, 512, 4096])
def test_grids(device, tokens):
    """CTAs are spread over SMs behind the other projection, and nowhere else."""
    shares_sm = device == H200 and "x128x" in launches(device, tokens=tokens)["w2"]["kernel"]
    plain = ("overlapped", "spread" if shares_sm else "overlapped")
    assert of_w13_and_w2("grid", device, tokens=tokens) == plain
    assert of_w13_and_w2("grid", device, tokens=tokens, rank=16) == ("overlapped",) * 2


@pytest.mark.parametrize("format", ["mxfp4", "int4"])
def test_few_rows_of_four_bits_start_behind_a_shrink(format):
    assert of_w13_and_w2("grid", H200, format, tokens=32, rank=16) == ("overlapped",) * 2
    assert of_w13_and_w2("grid", H200, format, tokens=32)[1] == "spread"


@pytest.mark.parametrize("format, inter", [("native", 512), ("w8a8", 1024)])
def test_tiles_with_few_k_steps_run(format, inter):
    def runs(device=H200, tokens=16384, inter=inter):  # hidden: 28 columns
        return of_w13_and_w2("run", device, format, tokens=tokens, inter=inter, hidden=7168)

    assert runs() == ("1", "7")
    assert runs(inter=inter + 128)[1] == runs(tokens=64)[1] == runs(A100)[1] == "1"


@pytest.mark.parametrize(
    "format, at_most, more", [("native", 4096, 8192), ("mxfp4", 1024, 4096), ("w8a8", 4096, 4112)]
)
def test_weights_of_long_experts_are_read_again(format, at_most, more):
    """Those with more rows than the blocks of a cluster."""
    assert of_w13_and_w2("weights_again", H200, format, tokens=16) == ("0", "0")
    assert of_w13_and_w2("weights_again", H200, format, tokens=at_most) == ("0", "0")
    assert of_w13_and_w2("weights_again", H200, format, tokens=more) == ("1", "1")


@pytest.mark.parametrize("hidden, tokens", [(4096, 4096), (2048, 16384)])
def test_shrinks_of_much_x_go_by_adapter(hidden, tokens):
    much = launches(H200, tokens=tokens, hidden=hidden, rank=16)
    assert (much["shrink13"]["by_adapter"], much["shrink2"]["by_adapter"]) == ("1", "0")
    little = launches(H200, tokens=tokens // 2, hidden=hidden, rank=16)
    assert little["shrink13"]["by_adapter"] == ("1" if tokens > 4096 else "0")


def test_activations_become_e4m3_once():
    """In launches of their own, or h by the epilogue that makes it, if that holds whole groups."""
    keys = ("quantizes_x", "stores_e4m3", "stores_out")
    small, large, adapted, odd = (
        [plan["w13"][key] for key in keys] + [plan["w2"]["quantizes_x"]]
        for plan in (
            launches(H200, "w8a8", tokens=64),
            launches(H200, "w8a8", tokens=4096),
            launches(H200, "w8a8", tokens=4096, rank=16),
            launches(H200, "w8a8", tokens=4096, inter=704),
        )
    )
    assert small == ["1", "0", "1", "1"]
    assert large == ["1", "1", "0", "0"]
    assert adapted[2] == "1", "adapters of w2 read h as it is"
    assert (odd[1], odd[3]) == ("0", "1"), "half a group"
    assert launches(H200, "w8a8", tokens=4096)["w13"]["quantizes_vectors"] == "1"
    assert of_w13_and_w2("quantizes_x", H200, "fp8", tokens=4096) == ("0", "0")


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


@pytest.mark.parametrize(
    "name, w2, why",
    [
        ("gemm_bf16_64x128x64_sm80", "mxfp4", "it is for weights of another format"),
        ("decode_bf16_mxfp4_sm80", "mxfp4", "it only takes a few tokens of a whole layer"),
        ("gemm_bf16_mxfp4_64x128x128_sm90", "native", "no row like it is for the format"),
    ],
)
def test_a_forced_row_that_is_passed_over_says_why(name, w2, why):
    env = {"MOELORA_LOG": "plan", "MOELORA_FORCE_VARIANT": name}
    done = asked(H200, "formats", "mxfp4", w2, tokens=64, env=env)
    assert f"moelora: {name} is passed over: {why}" in done.stderr
    assert name not in done.stdout
