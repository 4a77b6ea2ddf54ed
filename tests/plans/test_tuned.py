"""Tuned plans: which layers they serve, their files, and the command that makes them."""

import json
import os
import platform
import re
import subprocess
import sys
import time
import types

import pytest
import torch
from conftest import needs_gpu
from plan_cases import asked

import moelora
from moelora import _C
from moelora.__main__ import main
from moelora.bench import machine, shapes
from moelora.bench.timing import Times
from moelora.commands import tune
from moelora.operators import tuned

SMALL, LARGE = "gemm_bf16_16x128x64_sm90", "gemm_bf16_128x256x64_sm90"
OLD = "gemm_bf16_64x128x64_sm80"
x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="rows of x86 instruction sets")


def plan(tokens, plans, *, units=132, dtype="bfloat16", experts=128, env=None, on=("cuda", 90)):
    """The variant of a layer of QWEN3's shape on an H200, given tuned plans {tokens: variant}, and
    what is said on stderr."""
    words = []
    for most, variant in plans:
        words += ["cuda", "90", str(units), "bfloat16", "128", "8", "2048", "768"]
        words += [f"{most}:{variant}"]
    done = asked(on, *words, dtype=dtype, tokens=tokens, experts=experts, env=env)
    return done.stdout.split()[0], done.stderr


def test_the_fewest_tokens_that_are_enough():
    plans = [(256, LARGE), (16, OLD), (64, SMALL)]
    for tokens, variant in [(1, OLD), (16, OLD), (17, SMALL), (64, SMALL), (65, LARGE)]:
        assert plan(tokens, plans)[0] == variant
    assert plan(100_000, plans)[0] == LARGE, "the largest serves all beyond"
    assert plan(64, [*plans, (64, OLD)])[0] == OLD, "a newer one takes over"


def test_other_layers_and_devices_keep_the_table():
    plans = [(1, LARGE)]
    table = plan(1, [])[0]
    assert table != LARGE
    assert plan(1, plans)[0] == LARGE
    assert plan(1, plans, experts=64)[0] == plan(1, [], experts=64)[0]
    assert plan(1, plans, dtype="float16")[0] == plan(1, [], dtype="float16")[0]
    variant, stderr = plan(1, plans, units=78)
    assert variant == table
    assert "tuned plans are for other devices than this one (sm_90, 132 SMs)" in stderr
    assert stderr.count("\n") == 1
    assert plan(1, plans, on=("cuda", 80))[0] == plan(1, [], on=("cuda", 80))[0]
    assert plan(1, plans, on=("cpu", 0)) == plan(1, [], on=("cpu", 0))


def test_forcing_and_a_limit_go_before_tuning():
    assert plan(1, [(1, LARGE)], env={"MOELORA_FORCE_VARIANT": OLD})[0] == OLD
    env = {"MOELORA_MAX_CC": "80"}
    table = plan(1, [], on=("cuda", 80))[0]
    for measured in (LARGE, OLD):
        assert measured != table
        variant, stderr = plan(1, [(1, measured)], env=env)
        assert variant == table, "the plans of a newer GPU are for another device"
        assert "other devices than this one (sm_80, 132 SMs)" in stderr


CPU = (0, 0, 0, tuned.DTYPES["fp32"], 4, 2, 72, 40)


@pytest.fixture
def no_plans():
    _C.clear_tuned_plans()
    yield
    _C.clear_tuned_plans()


def warnings_of(folder, loaded):
    """What loading a folder warns of, of whose plans as many are loaded."""
    with pytest.warns(RuntimeWarning) as warned:
        assert tuned.load(folder) == loaded
    return [str(w.message) for w in warned]


def layer_plan():
    """What our layer of 4 experts, 2 per token, K 72, I 40 runs on 3 tokens."""
    topk_weights, topk_ids = torch.randn(3, 4).softmax(-1).topk(2)
    w13, w2 = torch.randn(4, 80, 72), torch.randn(4, 72, 40)
    out = moelora.fused_experts_lora(torch.randn(3, 72), w13, w2, topk_weights, topk_ids)
    assert out.isfinite().all()
    return _C.last_plan()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((9, "gemm_f32_typo"), "variant 'gemm_f32_typo' does not exist"),
        ((9, "gemm_bf16_scalar"), "is for another device or another dtype"),
        ((0, 1), "is for another device or another dtype"),
        ((4, 0), "plan.num_experts is 0, expected at least 1"),
        ((6, -1), "plan.hidden is -1, expected at least 1"),
        ((8, 0), "plan.tokens is 0, expected at least 1"),
    ],
)
def test_what_cannot_be_a_plan(no_plans, change, message):
    plan = [*CPU, 16, "gemm_f32_scalar"]
    plan[change[0]] = change[1]
    with pytest.raises(ValueError, match=message):
        _C.add_tuned_plan(*plan)


def test_only_so_many_plans(no_plans):
    with pytest.raises(ValueError, match="expected at most 1024"):
        for tokens in range(1, 1026):
            _C.add_tuned_plan(*CPU, tokens, "gemm_f32_scalar")
    assert "gemm_f32_scalar" in layer_plan()


def content(**more):
    return {
        "moelora": _C.version(),
        "device": tuned.this_device("cpu"),
        "dtype": "fp32",
        "layer": {"experts": 4, "top_k": 2, "hidden": 72, "intermediate": 40},
        "plans": {"16": "gemm_f32_scalar"},
        **more,
    }


def test_a_written_file_is_loaded(no_plans, tmp_path):
    path = tuned.write(tmp_path / "new", content())
    assert path.name.startswith("E=4,top_k=2,K=72,I=40,dtype=fp32,device=")
    assert tuned.load(tmp_path / "new") == 1
    assert layer_plan() == "w13=gemm_f32_scalar w2=gemm_f32_scalar"


DEEP = "[" * 100_000 + "]" * 100_000
NESTED = "[" * 900 + "]" * 900  # JSON takes it, but what it becomes cannot always be printed
NONE = "is not a file of tuned plans"
OF_GPU = {"type": "cuda", "units": 10**400}


@pytest.mark.parametrize("data, message, loaded", [
    ("{", NONE, 0),
    ("[]", NONE, 0),
    (content(dtype="fp8"), NONE, 0),
    (content(layer={"experts": 4}), NONE, 0),
    (content(plans={"many": "gemm_f32_scalar"}), NONE, 0),
    (content(plans={"1": "gone", "2": "gemm_f32_scalar"}), "does not exist", 1),
    (content(plans={"99999999999999999999": "gemm_f32_scalar"}), "too", 0),
    (content(moelora="0.0.1"), "measured by moelora 0.0.1", 1),
    (content(device={"type": "cpu", "features": ["mmx"]}), "other features", 0),
    (DEEP, "RecursionError", 0),
    (json.dumps(content())[:-1] + f', "measured": {DEEP}' + "}", "Recursion", 0),
    (b"\xff\xfe{}", "UnicodeDecodeError", 0),
    ("9" * 5000, NONE, 0),
    (content(device=OF_GPU), "units|too", 0),
    (content(device=OF_GPU | {"units": float("nan")}), "NaN", 0),
    (content(device=OF_GPU | {"units": float("inf")}), "infinity", 0),
    (content(device={"type": ["cuda"]}), "unhashable", 0),
    (content(plans={"1": "a\0b", "2": "\ud800"}), "null", 0),
    (" " * (tuned.MAX_BYTES + 1), "more than 1048576 bytes", 0),
    (content(plans={"1": "a," * 100_000}), "100001 plans, wanted at most 1024", 0),
])  # fmt: skip
def test_files_that_do_not_fit_are_warned_of(no_plans, tmp_path, data, message, loaded):
    data = json.dumps(data) if isinstance(data, dict) else data
    (tmp_path / "plans.json").write_bytes(data.encode() if isinstance(data, str) else data)
    said = warnings_of(tmp_path, loaded)
    assert any(re.search(message, text) for text in said)
    assert all(len(text) < 1000 for text in said)
    assert loaded or ("plans.json" in said[0] and len(said) <= 2)


@pytest.mark.parametrize("option", ["moelora", "dtype", "device", "layer", "plans"])
def test_nested_options_and_escapes_of_terminals_are_warned_of(no_plans, tmp_path, option):
    nasty = "\x1b[2J\r\n"
    text = json.dumps(content(**{option: "here"})).replace('"here"', NESTED)
    (tmp_path / "nested.json").write_text(text)
    for name, changed in {
        "a\x1b[1m": {option: nasty},
        "plan": {"plans": {"1": nasty}},
        "tokens": {"plans": {nasty: "gemm_f32_scalar"}},
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content(**changed)))
    said = warnings_of(tmp_path, 2 if option == "moelora" else 0)
    assert len(said) == 4 and all(text.isprintable() for text in said), said
    assert sum(r"\x1b[2J" in text for text in said) >= 2


def test_what_is_no_file_is_warned_of(no_plans, tmp_path):
    """Neither waited for nor raised about; the file beside them is loaded."""
    tuned.write(tmp_path, content())
    (tmp_path / "folder.json").mkdir()
    os.mkfifo(tmp_path / "pipe.json")
    targets = {"nowhere": tmp_path / "gone", "loop": tmp_path / "loop.json", "endless": "/dev/zero"}
    for name, target in targets.items():
        (tmp_path / f"{name}.json").symlink_to(target)
    told = " ".join(warnings_of(tmp_path, 1))
    for name in ("folder", "pipe", *targets):
        assert f"{name}.json is not a file of tuned plans" in told


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "file", "gone"])
def test_a_folder_that_is_none(tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.warns(RuntimeWarning, match="MOELORA_CONFIG_DIR.*is not a folder"):
        assert tuned.load(tmp_path / name) == 0


def test_no_file_breaks_the_import(tmp_path):
    (tmp_path / "deep.json").write_text(DEEP)
    os.mkfifo(tmp_path / "pipe.json")
    env = os.environ | {"MOELORA_CONFIG_DIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", "import moelora; print(moelora.__name__)"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.stdout == "moelora\n", done.stderr
    assert "deep.json is not a file of tuned plans" in done.stderr
    assert "pipe.json is not a file of tuned plans" in done.stderr


def test_the_environment_names_the_folder(no_plans, tmp_path, monkeypatch):
    monkeypatch.setenv("MOELORA_CONFIG_DIR", str(tmp_path))
    tuned.write(tmp_path, content())
    tuned.load_configured()
    assert "gemm_f32_scalar" in layer_plan()


def timed(median, spread=0.0):
    return {0: Times(median, median * (1 - spread), median * (1 + spread), 10)}


@pytest.mark.parametrize(
    ("table", "other", "kept"),
    [
        (timed(10.0), timed(9.0), "other"),
        (timed(10.0), timed(11.0), "usual"),
        (timed(10.0, spread=0.2), timed(9.0), "usual"),  # better, but by less than the noise
        (timed(10.0, spread=0.2), timed(7.0), "other"),
        (timed(10.0) | {8: timed(10.0)[0]}, timed(5.0) | {8: timed(30.0)[0]}, "usual"),
    ],
)
def test_a_variant_must_be_better_by_more_than_noise(table, other, kept):
    measured = {"table": table, "usual": table, "other": other}
    assert tune.choose(measured, "usual") == kept


class Pretended(tune.Tuner):
    """Of a GPU that takes so many microseconds for what is forced."""

    layer = types.SimpleNamespace(dtype="bf16", device=torch.device("cuda"))
    us = {"table": 10.0, "gemm_bf16_a_sm80": 8.0, "decode_bf16_b_sm80": 9.0}
    more = {"sort_i32_c_sm80": -1.0, "shrink_bf16_d_sm80": 1.0, "shrink_bf16_e_sm80": -2.0}

    def __init__(self):
        self.asked = []

    def table_choice(self, batch):
        return "gemm_bf16_z_sm80"

    def measure(self, batches, names):
        self.asked.append(names)
        return {name: self.time(*name.split(",")) for name in names}

    def time(self, base, *others):
        return timed(self.us[base] + sum(self.more[name] for name in others))


def test_what_is_around_a_projection_is_tuned_behind_it(monkeypatch):
    tuner = Pretended()
    usable = [*tuner.us, *tuner.more, "sum_f16_f_sm80", "expand_bf16_g_sm80", "gemm_f32_scalar"]
    monkeypatch.setattr(tune._C, "usable", lambda: usable)
    best, measured = tuner.tune([None])
    gemm = "gemm_bf16_a_sm80"
    assert best == f"{gemm},sort_i32_c_sm80,shrink_bf16_e_sm80"
    assert tuner.asked == [list(tuner.us), [gemm, *(f"{gemm},{v}" for v in tuner.more)], [best]]
    assert measured.keys() == {name for names in tuner.asked for name in names}
    # A layer in one launch has nothing around it.
    monkeypatch.setitem(tuner.us, "decode_bf16_b_sm80", 1.0)
    assert tuner.tune([None])[0] == "decode_bf16_b_sm80"


def test_a_shrink_need_only_run_where_there_are_adapters(monkeypatch):
    monkeypatch.setattr(tune._C, "last_plan", lambda: "w13=gemm_a w2=gemm_a sort=sort_b")
    assert tune.ran("gemm_a,shrink_c", 0) and not tune.ran("gemm_a,shrink_c", 8)
    assert tune.ran("gemm_a,sort_b", 8) and not tune.ran("gemm_a,sort_c", 0)


@x86
def test_the_command_finds_the_better_variant(no_plans, tmp_path, capsys, monkeypatch):
    """The scalar kernels, by a clock on which all others take eight times as long."""
    call, now = tune.Tuner.call, [0.0]

    def read():
        now[0] += 0.01
        return now[0]

    def timed(self, variant, *of):
        now[0] += 0.0 if variant == "gemm_f32_scalar" else 0.07
        return call(self, variant, *of)

    monkeypatch.setattr(time, "perf_counter", read)
    monkeypatch.setattr(machine.CpuYardsticks, "read", lambda self: 1e9)
    monkeypatch.setattr(tune.Tuner, "call", timed)
    words = ["--shape", "4,2,256,128", "--tokens", "64", "--dtypes", "fp32", "--device", "cpu"]
    words += ["--mm-size", "64", "--budget-ms", "20", "--dir", str(tmp_path)]
    assert main(["tune", *words]) == 0
    (path,) = tmp_path.iterdir()
    written = json.loads(path.read_text())
    (best,) = written["plans"].values()
    assert best == "gemm_f32_scalar", written["measured"]
    scores = written["measured"]["score_us"]["64"]
    assert best == min(scores, key=scores.get)
    assert tuned.load(tmp_path) == 1
    assert main(["tune", *words[:-2]]) == 2
    assert "say where the files go" in capsys.readouterr().err
    assert main(["tune", *words, "--adapters", "1,2"]) == 2
    assert "--adapters is [1, 2], wanted one number" in capsys.readouterr().err


def test_the_command_names_a_cut_model_as_it_was_given(no_plans, tmp_path, capsys, monkeypatch):
    small = shapes.Model("Small", experts=4, top_k=2, hidden=64, intermediate=32)
    monkeypatch.setitem(shapes.MODELS, "small", small)
    words = ["--models", "small:2", "--tokens", "3", "--dtypes", "fp32", "--device", "cpu"]
    words += ["--mm-size", "64", "--budget-ms", "1", "--dir", str(tmp_path)]
    assert main(["tune", *words]) == 0
    said = "".join(capsys.readouterr())
    assert "small:2 fp32 M=3" in said and "small fp32" not in said


def test_a_limited_gpu_is_not_tuned_for(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("MOELORA_MAX_CC", "80")
    monkeypatch.setattr("moelora._C.has_cuda", lambda: True)
    assert main(["tune", "--device", "cuda", "--dir", str(tmp_path)]) == 2
    assert "unset MOELORA_MAX_CC" in capsys.readouterr().err


@pytest.mark.gpu
@needs_gpu
def test_the_command_on_a_gpu(no_plans, tmp_path):
    words = ["--shape", "8,2,512,256", "--tokens", "1,256", "--dtypes", "bf16", "--device", "cuda"]
    assert main(["tune", *words, "--budget-ms", "5", "--dir", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    written = json.loads(path.read_text())
    assert written["device"]["units"] > 0
    names = [name for names in written["plans"].values() for name in names.split(",")]
    assert set(names) <= set(_C.usable())
    assert tuned.load(tmp_path) == len(names)
    many = written["measured"]["score_us"]["256"]
    assert {v.split(",")[1].split("_")[0] for v in many if "," in v} == {"sort", "shrink", "sum"}
