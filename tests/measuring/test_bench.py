"""`moelora bench` checks its baselines, writes what it promises, compares fairly, and draws."""

import argparse
import dataclasses
import json
import re

import pytest
import torch
from checkout import needs_checkout
from conftest import needs_gpu

from moelora.__main__ import main
from moelora.bench import baselines, cases, command, machine, results, shapes
from moelora.bench.baselines import baselines_of
from moelora.bench.baselines.native import GroupedMM
from moelora.bench.baselines.ours import Loop, Ours, Separate
from moelora.bench.formats import FORMATS
from moelora.bench.harness import bound_us, reference_rows, relative_error
from moelora.bench.layer import Layer

# Sizes that no vector length divides, and sizes that every format takes.
TOY = shapes.Model("toy", experts=4, top_k=2, hidden=72, intermediate=40)
BLOCKS = dataclasses.replace(TOY, hidden=256, intermediate=128)
SHAPE, SHAPE_OF_BLOCKS = "4,2,72,40", "4,2,256,128"
BASELINES = {"loop", "grouped_mm_peft", "batched_mm_peft", "grouped_mm_base"}
RESULTS = "benchmarks/results"


def draw_layer(model, dtype="bf16", ranks=(4,)):
    return Layer(model, dtype, ranks, 3, torch.Generator().manual_seed(0))


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Runs the command on a toy; (exit status, rows of the file)."""
    monkeypatch.setattr(machine.CpuYardsticks, "LEAST", 1 << 20)
    monkeypatch.setattr(machine, "last_cache_bytes", lambda: 1 << 18)

    def run(*more, shape=SHAPE, tokens="1,16", device="cpu"):
        path = tmp_path / "bench.json"
        path.unlink(missing_ok=True)
        words = ["bench", "--device", device, "--shape", shape, "--tokens", tokens]
        words += ["--ranks", "4,8", "--adapters", "3", "--budget-ms", "0", "--mm-size", "64"]
        words += ["--patience-s", "60"]  # also on a machine with other work
        status = main([*words, "--out", str(path), *more])
        return status, json.loads(path.read_text())["cases"] if path.exists() else []

    run.path = tmp_path / "bench.json"
    return run


# ---- the command ----


def test_every_baseline_agrees_and_is_written(bench, capsys):
    status, rows = bench()
    assert status == 0
    assert len(rows) == 2 * 2 * 2  # dtypes, tokens, ranks
    meta, _ = results.read(bench.path)
    assert meta["threads"] == torch.get_num_threads()
    assert meta.keys() >= {"commit", "date", "device", "torch", "cuda", "command", "gpu_state"}
    for row in rows:
        assert row["rivals"].keys() == BASELINES
        assert row["relative_error"].keys() == {"ours", "ours_base", *BASELINES}
        assert not row["skipped"]
        assert "gemm_" in row["plan"]
        assert row["bound_us"] >= row["bound_base_us"] > 0
        assert row["share"] == pytest.approx(row["bound_us"] / row["ours_us"], abs=1e-3)
        best = row["rivals"][row["best_rival"]]
        assert row["ratio"] * row["ours_us"] == pytest.approx(best, rel=0.05)
        for who, us in row["rivals"].items():
            low, high = row["spread_us"][who]
            assert low <= us <= high
        assert (row["mm_gflop_s"] is None) == (row["tokens"] == 1)
    line = r"4x2x72x40 fp32 M=1 rank 4: with 3 adapters [\d,.]+ us, without "
    said = rf"\[1/4, \d+ s\] {line}(?s:.*) per layer"
    assert re.search(said, capsys.readouterr().out), "each result is said when it is there"


@pytest.mark.parametrize("activation", ["silu", "swigluoai", "relu2"])
@pytest.mark.parametrize("format", FORMATS)
def test_quantized_layers_are_measured_beside_their_unpacked_weights(bench, format, activation):
    status, rows = bench("--format", format, shape=f"{SHAPE_OF_BLOCKS},{activation}", tokens="1,5")
    assert status == 0
    assert {(row["format"], row["dtype"]) for row in rows} == {(format, "bf16")}
    who = "ours", "ours_bf16", "ours_unpacking"
    ours = {*who, *(f"{name}_base" for name in who)}
    for row in rows:
        assert row["relative_error"].keys() == row["spread_us"].keys() == ours
        assert all(row[f"{name}_us"] > 0 for name in ours) and row["rivals"] == {}
        if format == "fp8_block":
            assert "max_err_ratio" not in row, "of vLLM's, which is not here"
        else:
            assert 0 < row["max_err_ratio"] <= 1.5


def test_several_numbers_of_adapters(bench):
    status, rows = bench("--adapters", "1,3", "--format", "fp32", "--baselines", "loop")
    assert status == 0
    measured = [(row["adapters"], row["tokens"], row["rank"]) for row in rows]
    assert measured == [(a, m, r) for a in (1, 3) for m in (1, 16) for r in (4, 8)]
    assert {(row["format"], row["dtype"]) for row in rows} == {("fp32", "fp32")}
    moved = {key: row["mbytes"] for key, row in zip(measured, rows, strict=True)}
    assert moved[1, 16, 8] < moved[3, 16, 8], "more pairs are touched"


def test_a_deadline_ends_the_run_between_cases(bench, capsys):
    status, rows = bench("--deadline-s", "0", "--baselines", "loop", tokens="1,2,3")
    assert status == 0
    assert {row["tokens"] for row in rows} == {1}
    assert "deadline: 1 of 6 cases done" in capsys.readouterr().out


def test_quick_measures_one_layer_of_few_tokens():
    """And whatever is said beside it goes first."""

    def settled(*words):
        parser = argparse.ArgumentParser()
        command.add_options(parser)
        return command.settle(parser.parse_args(["--device", "cpu", "--quick", *words]))

    args = settled()
    ((key, model),) = args.models
    assert (key, model.experts, args.tokens, args.dtypes) == ("qwen3", 16, [1, 64], ["bf16"])
    assert (args.ranks, args.baselines) == ([16], ["loop", "transformers"])
    assert args.deadline_s == 60
    args = settled("--shape", SHAPE, "--tokens", "7", "--deadline-s", "5", "--baselines", "none")
    assert ([key for key, _ in args.models], args.tokens) == (["4x2x72x40"], [7])
    assert (args.deadline_s, args.baselines) == (5, [])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--models", "qwen4"], "no model is called 'qwen4'"),
        (["--models", "qwen3:200"], "cannot be cut to 200"),
        (["--models", "qwen3", "--tp", "7"], "does not split into 7"),
        (["--shape", "4,2,72"], "a shape is E,top_k,K,I"),
        (["--shape", "2,4,72,40"], "chooses 4 of 2 experts"),
        (["--tokens", "1,many"], "--tokens is '1,many'"),
        (["--dtypes", "fp8"], "'fp8' is none of fp32, bf16, fp16"),
        (["--baselines", "peft"], "'peft' is none of"),
        (["--mix", "some"], "--mix is 'some'"),
        (["--routing", "skewed"], "neither uniform nor zipf nor a file"),
        (["--adapters", "0"], "--adapters is '0'"),
        (["--adapters", "1,some"], "--adapters is '1,some'"),
        (["--max-cc", "8"], "compute_capability is 8, expected 80 or more"),
        (["--threads", "0"], "--threads is 0"),
        (["--mm-size", "0"], "--mm-size is 0, wanted 1 or more"),
        (["--budget-ms", "nan"], "--budget-ms is nan, wanted 0 or more"),
        (["--budget-ms", "inf"], "--budget-ms is inf, wanted a finite time"),
        (["--patience-s", "-1"], "--patience-s is -1.0, wanted 0 or more"),
        (["--deadline-s", "nan"], "--deadline-s is nan, wanted 0 or more"),
        (["--out", "tests"], "--out tests: Is a directory"),
        (["--out", "pyproject.toml/now.json"], "--out pyproject.toml/now.json: "),
        (["--models", ""], "name no layer"),
        (["--shape", "4,2,72,40,selu"], "is none of silu, gelu, swigluoai, relu2"),
        (["--shape", SHAPE, "--routing", "pyproject.toml"], "is not a list of counts"),
        (["--variant", "gemm_f32_typo"], "'gemm_f32_typo' does not exist"),
        (["--model", "nowhere/config.json"], "nowhere/config.json is not a configuration"),
        (["--format", "int3"], "no format is called 'int3'; there are mxfp4, nvfp4, nf4, int4"),
        (["--format", "bf16", "--dtypes", "fp16"], "--format is bf16, but --dtypes is fp16"),
        (["--format", "int4", "--dtypes", "fp32"], "quantized weights serve bf16 and fp16"),
        (["--models", "gpt-oss-20b@int4"], "int4 takes multiples of 128"),
        (["--models", "qwen3", "--tp", "4", "--format", "int4"], "sizes of 2048 and 192"),
        (["--models", "qwen3@int4", "--dir", "plans"], "weights that are not quantized"),
        (["--shape", SHAPE, "--dir", "pyproject.toml"], "--dir pyproject.toml"),
    ],
)
def test_what_cannot_be_measured_is_said_at_once(words, message, capsys):
    assert main(["tune" if "--dir" in words else "bench", "--device", "cpu", *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_where_results_go_is_tried_at_once(tmp_path):
    """And no file is left, or lost, if something else stops the command."""
    kept = tmp_path / "kept.json"
    kept.write_text("{}")
    for out in (kept, tmp_path / "runs" / "now.json"):
        assert main(["bench", "--device", "cpu", "--variant", "typo", "--out", str(out)]) == 2
    assert kept.read_text() == "{}" and not list((tmp_path / "runs").iterdir())


def test_models_and_baselines_are_listed(capsys):
    assert main(["bench", "--list"]) == 0
    out = capsys.readouterr().out
    assert all(model.name in out for model in shapes.MODELS.values())
    assert all(name in out for name in baselines.BASELINES)
    assert all(baselines.BASELINES.keys() >= {*names} for names in baselines.DEFAULTS.values())


# ---- baselines ----


def test_a_wrong_baseline_is_refused(bench, monkeypatch):
    right = Loop.run
    monkeypatch.setattr(Loop, "run", lambda *args: 1.1 * right(*args))
    with pytest.raises(RuntimeError, match="rank 4: loop is off by 0.1"):
        bench("--dtypes", "fp32")


def test_a_slow_baseline_is_left_out_with_a_reason(bench):
    _, rows = bench("--dtypes", "fp32", "--patience-s", "0")
    for row in rows:
        assert row["rivals"].keys() == {"grouped_mm_base"}
        assert "1 tokens, rank 4: about" in row["skipped"]["batched_mm_peft"]
        assert row["best_rival"] is row["ratio"] is None


def test_a_baseline_that_breaks_does_not_end_the_run(bench, monkeypatch):
    def broken(*args):
        raise TypeError("no such kernel\nand more")

    monkeypatch.setattr(Loop, "run", broken)
    status, rows = bench("--baselines", "loop", "--dtypes", "fp32")
    assert status == 0
    assert rows[0]["skipped"] == {"loop": "TypeError: no such kernel"}


@pytest.mark.parametrize(
    ("model", "dtype", "name", "why"),
    [
        (TOY, "fp32", "vllm", "its kernels are for GPUs"),
        (TOY, "fp32", "transformers", "PEFT's expert weights have one A for gate and up"),
        (TOY, "fp32", "unpacked", "weights are not quantized"),
        (dataclasses.replace(TOY, bias=True), "bf16", "grouped_mm", "driven here without biases"),
        (BLOCKS.quantized("mxfp4"), "bf16", "loop", "it reads no quantized weights"),
    ],
)
def test_baselines_say_what_they_need(model, dtype, name, why):
    layer = draw_layer(model, dtype)
    found, absent = baselines_of(layer, [name])
    assert [type(baseline) for baseline in found] == [Ours] and absent == {name: why}


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="torch has no grouped GEMM")
@pytest.mark.parametrize("activation", ["silu", "swigluoai", "relu2"])
def test_adapters_are_added_after_the_base_product(activation):
    model = shapes.Model("toy", 4, 2, 64, 32, activation)
    layer = draw_layer(model, ranks=(4, 16))
    batch = cases.draw_batch(model, 7, 3, torch.Generator().manual_seed(0), mix="half")
    reference = reference_rows(layer, batch, range(7))
    for rank in (0, 4, 16):
        for baseline in (GroupedMM(layer), Separate(layer)):
            assert relative_error(baseline.run(batch, rank), reference[rank]) < 1e-2
        assert not rank or relative_error(reference[0], reference[rank]) > 2e-2


# ---- cases: work, mixes, routing ----


@pytest.mark.parametrize("activation, matrices", [("silu", 3), ("relu2", 2)])
def test_adapters_cost_flops_and_bytes(activation, matrices):
    model = dataclasses.replace(TOY, activation=activation)
    batch = cases.draw_batch(model, 5, 3, torch.Generator().manual_seed(0))
    batch.mapping[:] = 1
    experts = batch.topk_ids.unique().numel()
    flops, moved = cases.work(model, batch, 4)
    base_flops, base_moved = cases.work(model, batch)
    assert base_flops == 2 * matrices * 5 * 2 * 72 * 40
    assert flops - base_flops == 2 * matrices * 5 * 2 * 4 * (72 + 40)
    assert base_moved == 2 * (matrices * experts * 72 * 40 + 2 * 5 * 72)
    assert moved - base_moved == 2 * matrices * experts * 4 * (72 + 40)


@pytest.mark.parametrize("format", FORMATS)
def test_weights_count_as_a_checkpoint_holds_them(format):
    model, bits = BLOCKS.quantized(format), FORMATS[format].bits
    layer = draw_layer(model)
    held = sum(t.nbytes for tensors in layer.checkpoint.values() for t in tensors)
    of_tensors = 2 * 4 * 4 if format == "nvfp4" else 0  # a float32 for each weight and expert
    assert held == 3 * 4 * 256 * 128 * bits / 8 + of_tensors
    assert layer.w13.unpack().float().std() == pytest.approx(0.02, rel=0.3)
    batch = cases.draw_batch(model, 64, 3, torch.Generator().manual_seed(0))
    (flops, moved), native = cases.work(model, batch, 4), cases.work(BLOCKS, batch, 4)
    assert batch.topk_ids.unique().numel() == 4 and flops == native[0]
    assert native[1] - moved == 3 * 4 * 256 * 128 * (2 - bits / 8)
    rate = 2 if format == "fp8_block" else 1  # of products of FP8
    assert bound_us(model, (1e9, 0.0), machine.Peaks(1.0, 1e9)) == 1e6 / rate


def test_mixes_are_what_they_say():
    def mapping(mix):
        return cases.draw_batch(TOY, 400, 3, torch.Generator().manual_seed(0), mix).mapping

    assert mapping("none").eq(-1).all()
    assert mapping("one").eq(0).all()
    assert mapping("many").unique().tolist() == [0, 1, 2]
    assert mapping("different")[:4].tolist() == [0, 1, 2, 0]
    assert mapping("half").eq(-1).float().mean() == pytest.approx(0.5, abs=0.1)
    assert mapping("0.2").eq(-1).float().mean() == pytest.approx(0.2, abs=0.1)


def test_a_recorded_histogram_is_followed(tmp_path):
    path = tmp_path / "counts.json"
    path.write_text(json.dumps({"counts": [70, 0, 20, 10]}))
    generator = torch.Generator().manual_seed(0)
    top1 = shapes.Model("toy", 4, 1, 8, 8)
    batch = cases.draw_batch(top1, 4000, 3, generator, routing=str(path))
    drawn = torch.bincount(batch.topk_ids.flatten().long(), minlength=4) / 4000
    torch.testing.assert_close(drawn, torch.tensor([0.7, 0.0, 0.2, 0.1]), atol=0.03, rtol=0)
    torch.testing.assert_close(batch.topk_weights.sum(1), torch.ones(4000))
    for wrong in ([1, 2, 3], [1, -1, 1, 1], [0, 0, 0, 0]):
        path.write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match="counts"):
            cases.read_histogram(path, 4)


# ---- comparing and drawing ----


def case(us, spread=0.0, **more):
    return {
        "model": "qwen3",
        "tokens": 16,
        "rank": 16,
        "dtype": "bf16",
        "ours_us": us,
        "ours_base_us": 50.0,
        "rivals": {},
        "spread_us": {"ours": [us * (1 - spread), us * (1 + spread)], "ours_base": [50.0, 50.0]},
        **more,
    }


@pytest.mark.parametrize(
    ("before", "after", "status"),
    [
        (case(100.0), case(104.0), 1),
        (case(100.0), case(102.0), 0),  # less than the least that counts
        (case(100.0), case(90.0), 0),
        (case(100.0, spread=0.05), case(108.0, spread=0.05), 0),  # within both spreads
        (case(100.0, spread=0.05), case(112.0, spread=0.05), 1),
        (case(100.0), case(100.0, ours_base_us=60.0), 1),
        (case(100.0), case(200.0, rank=64), 1),  # nothing in common
        (case(100.0), case(100.0, format="int4"), 1),
    ],
)
def test_regressions_beyond_noise(tmp_path, before, after, status):
    paths = tmp_path / "before.json", tmp_path / "after.json"
    for path, row in zip(paths, (before, after), strict=True):
        results.write(path, [row])
    assert main(["bench", "compare", *map(str, paths)]) == status


@needs_checkout
@pytest.mark.parametrize(
    ("file", "words", "drawn"),
    [
        ("h200-layer.json", [], ["Roofline, layer with adapters", "Cost of adapters"]),
        (
            "h200-layer.json",
            ["--picture", "beside", "--vllm-version", "0.33"],
            ["moelora, adapters of rank 64", "Mixtral-8x7B"],
        ),
        ("h200-churn.json", ["--picture", "arrivals"], ["brought ahead (8 slots)"]),
    ],
)
def test_the_committed_results_are_drawn(tmp_path, file, words, drawn):
    pytest.importorskip("matplotlib")
    out = tmp_path / "picture.svg"
    assert main(["bench", "plot", f"{RESULTS}/{file}", *words, "-o", str(out)]) == 0
    assert all(f"<!-- {name} -->" in out.read_text() for name in drawn)


@pytest.mark.parametrize(
    ("words", "tokens", "drawn"),
    [
        (["--adapters", "1,3"], "1,16", ["Cost over the number of adapters"]),
        (  # a curve over tokens would be a point in empty axes
            ["--ranks", "4"],
            "3",
            ["4x2x72x40 fp32 rank 4, 3 tokens, 3 adapters", "lower bound", "moelora"]
            + ["moelora, no adapters", "PyTorch, expert by expert"],
        ),
    ],
)
def test_a_run_is_drawn(bench, tmp_path, words, tokens, drawn):
    pytest.importorskip("matplotlib")
    bench("--dtypes", "fp32", "--baselines", "loop", *words, tokens=tokens)
    out = tmp_path / "picture.svg"
    assert main(["plot", str(bench.path), "-o", str(out)]) == 0
    assert all(f"<!-- {name} -->" in out.read_text() for name in drawn)


@needs_checkout
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["compare", "pyproject.toml", "pyproject.toml"], "is not a result file"),
        (["plot", "pyproject.toml"], "is not a result file"),
        (["plot", f"{RESULTS}/h200-churn.json"], "there is no layer in these files"),
        (["plot", "nowhere.json", "--out", "now"], "wanted a file that ends in .png or .svg"),
        (["plot", f"{RESULTS}/cpu-layer.json", "--picture", "beside"], "no case of rank 16 with"),
        (["plot", f"{RESULTS}/cpu-layer.json", "--picture", "arrivals"], "no case of arrivals"),
        (["plot", f"{RESULTS}/cpu-layer.json", "--picture", "rl"], "no case of a loop of RL"),
    ],
)
def test_files_that_are_none(words, message, capsys):
    assert main(["bench", *words]) == 2
    assert message in capsys.readouterr().err


# ---- on a GPU ----


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("activation", ["silu", "swigluoai", "relu2"])
def test_baselines_of_a_gpu(bench, activation):
    words = ("--baselines", "grouped_mm,loop,separate", "--patience-s", "60")
    shape = f"8,2,256,128,{activation}"
    status, rows = bench(*words, shape=shape, tokens="1,70,1024", device="cuda")
    assert status == 0
    for row in rows:
        found = {"loop", "torch_grouped_mm", "torch_grouped_mm_base", "separate", "separate_base"}
        assert row["rivals"].keys() == found, row["skipped"]
        assert "loop" in row["eager"]


@pytest.mark.gpu
@needs_gpu
def test_a_limit_is_in_the_file(bench):
    words = ("--max-cc", "80", "--baselines", "none", "--adapters", "1,2")
    status, rows = bench(*words, shape="8,2,256,128", tokens="1,70,1024", device="cuda")
    assert status == 0
    assert results.read(bench.path)[0]["max_cc"] == 80
    assert all("_sm80" in row["plan"] for row in rows)
    assert len({row["plan"] for row in rows}) > 1, "the table chooses among them"
