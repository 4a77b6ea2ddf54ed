"""The benchmark command checks its baselines, writes what it promises, and compares it fairly."""

import argparse
import contextlib
import dataclasses
import json
import re

import pytest
import torch
from checkout import needs_checkout
from conftest import needs_gpu

from benchmarks.compare import variants
from moelora.__main__ import main
from moelora.bench import cases, compare, machine, results, shapes, timing
from moelora.bench.baselines import ABOUT, DEFAULTS, Options, Skipped, _load, baselines_of
from moelora.bench.baselines.native import GroupedMM
from moelora.bench.baselines.ours import Loop, Ours, Separate
from moelora.bench.command import add_options, settle
from moelora.bench.harness import Bench, reference_rows, relative_error
from moelora.bench.layer import Layer

# Sizes that no vector length divides.
TOY = shapes.Model("toy", experts=4, top_k=2, hidden=72, intermediate=40)
SHAPE = "4,2,72,40"
BASELINES = {"loop", "grouped_mm_peft", "batched_mm_peft", "grouped_mm_base"}


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Runs the command on a toy on the CPU; (exit status, rows of the file)."""
    monkeypatch.setattr(machine.CpuYardsticks, "LEAST", 1 << 20)
    monkeypatch.setattr(machine, "last_cache_bytes", lambda: 1 << 18)

    def run(*more, shape=SHAPE, tokens="1,16", device="cpu"):
        path = tmp_path / "bench.json"
        path.unlink(missing_ok=True)
        words = ["bench", "--device", device, "--shape", shape, "--tokens", tokens]
        words += ["--ranks", "4,8", "--adapters", "3", "--budget-ms", "0", "--mm-size", "64"]
        status = main([*words, "--out", str(path), *more])
        return status, json.loads(path.read_text())["cases"] if path.exists() else []

    run.path = tmp_path / "bench.json"
    return run


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
    out = capsys.readouterr().out
    assert out.index("3 adapters of rank 4: ") < out.index(" per layer")


def test_several_numbers_of_adapters(bench, tmp_path, capsys):
    status, rows = bench("--adapters", "1,3", "--dtypes", "fp32", "--baselines", "loop")
    assert status == 0
    measured = [(row["adapters"], row["tokens"], row["rank"]) for row in rows]
    assert measured == [(a, m, r) for a in (1, 3) for m in (1, 16) for r in (4, 8)]
    assert len({compare.identity(row) for row in rows}) == len(rows)
    moved = {key: row["mbytes"] for key, row in zip(measured, rows, strict=True)}
    assert moved[1, 16, 8] < moved[3, 16, 8], "more pairs are touched"
    out = tmp_path / "picture.svg"
    assert main(["bench", "plot", str(bench.path), "-o", str(out)]) == 0
    assert "<!-- Cost over the number of adapters -->" in out.read_text()


def test_a_limit_holds_for_one_command(monkeypatch):
    limits = []
    monkeypatch.setattr("moelora._C.limit_capability", limits.append)
    monkeypatch.setattr("moelora.bench.command.measure", lambda *_: ([limits.append("now")], []))
    monkeypatch.setattr("moelora.bench.command.show", lambda rows, remarks, console: None)
    monkeypatch.delenv("MOELORA_MAX_CC", raising=False)
    assert main(["bench", "--device", "cpu", "--max-cc", "80"]) == 0
    assert limits == [80, "now", 0]
    monkeypatch.setenv("MOELORA_MAX_CC", "86")
    assert main(["bench", "--device", "cpu"]) == 0
    assert main(["bench", "--device", "cpu", "--max-cc", "80"]) == 0
    assert limits[3:] == [86, "now", 86, 80, "now", 86], "the environment's limit comes back"


def test_a_deadline_ends_the_run_between_cases(bench, capsys):
    status, rows = bench("--deadline-s", "0", "--baselines", "dense", tokens="1,2,3")
    assert status == 0
    assert {row["tokens"] for row in rows} == {1}
    assert "deadline: 1 of 6 cases done" in capsys.readouterr().out


def test_results_go_to_a_file_as_soon_as_they_are_there(bench, monkeypatch, tmp_path, capsys):
    """Not at the end alone: who waits for a file sees at once what is measured, and each result."""
    said = []
    right = Bench.measure

    def measure(self, tokens, generator):
        said.append(capsys.readouterr().out)
        return right(self, tokens, generator)

    monkeypatch.setattr(Bench, "measure", measure)
    bench("--dtypes", "fp32", "--ranks", "4", "--baselines", "loop", "--patience-s", "60")
    begin, look, first = said
    assert re.match(r"\[0/2, \d+ s\] measuring 4x2x72x40 fp32 M=1\n", begin)
    line = r"4x2x72x40 fp32 M=1 rank 4: with 3 adapters [\d,.]+ us, without "
    assert re.match(rf"\[0/2, \d+ s\] first look, baselines follow: {line}", look)
    assert "loop" not in look
    assert re.match(rf"\[1/2, \d+ s\] {line}", first) and "loop with them" in first


def test_quick_measures_one_layer_of_few_tokens(monkeypatch):
    """And whatever is said beside it goes first."""

    def settled(*words):
        parser = argparse.ArgumentParser()
        add_options(parser)
        return settle(parser.parse_args(["--device", "cpu", "--quick", *words]))

    args = settled()
    ((key, model),) = args.models
    assert (key, model.experts, args.tokens, args.dtypes) == ("qwen3", 16, [1, 64], ["bf16"])
    assert (args.ranks, args.baselines) == ([16], ["loop", "transformers"])
    assert args.deadline_s == 60
    args = settled("--shape", SHAPE, "--tokens", "7", "--deadline-s", "5", "--baselines", "none")
    assert ([key for key, _ in args.models], args.tokens) == (["4x2x72x40"], [7])
    assert (args.deadline_s, args.baselines) == (5, [])


@pytest.mark.parametrize(
    ("base_us", "headline", "cost", "runs"),
    [
        (90.0, "the cost of adapters is within noise at 1 tokens", "within noise", 3),
        (141.0, "the cost of adapters is within noise at 1 tokens", "within noise", 3),
        (50.0, "0.50 of the speed without adapters", "+100 %", 1),
    ],
)
def test_quick_draws_no_conclusion_within_noise(
    bench, monkeypatch, capsys, base_us, headline, cost, runs
):
    """It measures again what differs by less than its turns do."""
    times, counted = {"ours": (100.0, 80.0, 120.0), "loop": (300.0, 290.0, 310.0)}, []

    def compare(timer, runs, *_):
        counted.append(len(runs))
        found = times | {"base": (base_us, 0.8 * base_us, 1.2 * base_us)}
        return {
            (who, rank): timing.Times(*found[who if rank else "base"], 9) for who, rank in runs
        }, machine.Peaks(1e10, None)

    monkeypatch.setattr(timing.TurnTimer, "compare", compare)
    bench("--quick", "--baselines", "loop", "--ranks", "4", tokens="1")
    out = " ".join(capsys.readouterr().out.split())
    assert f"of rank 4: {headline} " in out and cost.split()[0] in out.partition("per layer")[2]
    assert len(counted) - 1 == runs  # after a first look
    assert out.count("within noise, measured again: ") == runs - 1


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
        (["--mm-size", "0"], "--mm-size is 0, wanted at least 1"),
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
    ],
)
def test_what_cannot_be_measured_is_said_at_once(words, message, capsys):
    assert main(["bench", "--device", "cpu", *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_where_results_go_is_tried_at_once(tmp_path, capsys):
    """And no file is left, or lost, if something else stops the command."""
    kept = tmp_path / "kept.json"
    kept.write_text("{}")
    for out in (kept, tmp_path / "runs" / "now.json"):
        assert main(["bench", "--device", "cpu", "--variant", "typo", "--out", str(out)]) == 2
    assert kept.read_text() == "{}" and not list((tmp_path / "runs").iterdir())
    assert main(["tune", "--device", "cpu", "--shape", SHAPE, "--dir", "pyproject.toml"]) == 2
    assert "--dir pyproject.toml" in capsys.readouterr().err


def test_models_and_baselines_are_listed(capsys):
    assert main(["bench", "--list"]) == 0
    out = capsys.readouterr().out
    assert all(model.name in out for model in shapes.MODELS.values())
    assert all(name in out for name in ABOUT)
    assert all(name in ABOUT for names in DEFAULTS.values() for name in names)


@pytest.mark.parametrize("activation, matrices", [("silu", 3), ("relu2", 2)])
def test_adapters_cost_flops_and_bytes(activation, matrices):
    model = shapes.Model("toy", 4, 2, 72, 40, activation)
    batch = cases.draw_batch(model, 5, 3, torch.Generator().manual_seed(0))
    batch.mapping[:] = 1
    experts = batch.topk_ids.unique().numel()
    flops, moved = cases.work(model, batch, 4)
    base_flops, base_moved = cases.work(model, batch)
    assert base_flops == 2 * matrices * 5 * 2 * 72 * 40
    assert flops - base_flops == 2 * matrices * 5 * 2 * 4 * (72 + 40)
    assert base_moved == 2 * (matrices * experts * 72 * 40 + 2 * 5 * 72)
    assert moved - base_moved == 2 * matrices * experts * 4 * (72 + 40)


def test_a_model_may_have_biases():
    model = dataclasses.replace(TOY, activation="swigluoai", bias=True)
    generator = torch.Generator().manual_seed(0)
    biased = Layer(model, "fp32", [4], 3, generator)
    found, absent = baselines_of(biased, ["loop", "grouped_mm"], Options())
    assert absent == {"grouped_mm": "driven here without biases"}
    batch = cases.draw_batch(model, 5, 3, generator, dtype=torch.float32)
    reference = reference_rows(biased, batch, range(5))
    for baseline in found:
        for rank in baseline.layer.stacks:
            assert relative_error(baseline.run(batch, rank), reference[rank]) < 1e-5
    biased.b2 = torch.zeros_like(biased.b2)
    assert relative_error(Ours(biased, Options()).run(batch, 4), reference[4]) > 1e-3
    experts = batch.topk_ids.unique().numel()
    plain = cases.work(dataclasses.replace(model, bias=False), batch)[1]
    assert cases.work(model, batch)[1] - plain == 4 * experts * (2 * 40 + 72)


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="torch has no grouped GEMM")
@pytest.mark.parametrize("activation", ["silu", "swigluoai", "relu2"])
def test_adapters_are_added_after_the_base_product(activation, monkeypatch):
    model = shapes.Model("toy", 4, 2, 64, 32, activation)
    generator = torch.Generator().manual_seed(0)
    layer = Layer(model, "bf16", [4, 16], 3, generator)
    batch = cases.draw_batch(model, 7, 3, generator, mix="half")
    reference = reference_rows(layer, batch, range(7))
    added = [baseline(layer, Options()) for baseline in (GroupedMM, Separate)]
    grouped_mm = torch._grouped_mm

    def checked(x, w, offs):
        grouped_mm(x.to("meta"), w.to("meta"), offs=offs.to("meta"))  # strides that a GPU needs
        return grouped_mm(x, w, offs=offs)

    monkeypatch.setattr(torch, "_grouped_mm", checked)
    for rank in (0, 4, 16):
        for baseline in added:
            assert relative_error(baseline.run(batch, rank), reference[rank]) < 1e-2
        assert not rank or relative_error(reference[0], reference[rank]) > 2e-2


def mapping(mix, tokens=400, adapters=3):
    generator = torch.Generator().manual_seed(0)
    return cases.draw_batch(TOY, tokens, adapters, generator, mix).mapping


def test_mixes_are_what_they_say():
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


def files(tmp_path, before, after):
    paths = tmp_path / "before.json", tmp_path / "after.json"
    for path, rows in zip(paths, (before, after), strict=True):
        results.write(path, rows)
    return [str(path) for path in paths]


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
        (case(100.0, dtype="bfloat16"), case(100.0, experts=128, tp=1), 0),  # an older file
    ],
)
def test_regressions_beyond_noise(tmp_path, before, after, status):
    assert main(["bench", "compare", *files(tmp_path, [before], [after])]) == status


@needs_checkout
def test_the_committed_results_can_be_compared_and_drawn(tmp_path, capsys):
    for path in ("benchmarks/results/h200-layer.json", "benchmarks/results/cpu-layer.json"):
        _, rows = results.read(path)
        changes = compare.changes(compare.match(rows, rows), 0.03)
        assert len(changes) == 2 * len(rows)
        assert {c["verdict"] for c in changes} == {"same"}
    out = tmp_path / "picture.png"
    assert main(["bench", "plot", "benchmarks/results/h200-layer.json", "-o", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    # matplotlib would write now.png, and the command would name a file that is not there.
    assert main(["plot", "nowhere.json", "--out", str(tmp_path / "now")]) == 2
    assert "wanted a file that ends in .png or .svg" in capsys.readouterr().err


def test_one_number_of_tokens_is_drawn_as_bars(bench, tmp_path):
    """A curve over tokens would be a point in empty axes."""
    bench("--dtypes", "fp32", "--ranks", "4", tokens="3")
    out = tmp_path / "picture.svg"
    assert main(["plot", str(bench.path), "-o", str(out)]) == 0
    text = out.read_text()
    assert text.count('<g id="axes_') == 1
    assert "<!-- A layer, 4x2x72x40 fp32 rank 4, 3 tokens, 3 adapters -->" in text
    own = ("lower bound", "moelora", "moelora, no adapters")
    for way in (*own, "PyTorch, expert by expert", "grouped mm peft"):
        assert f"<!-- {way} -->" in text, way


@needs_checkout
def test_files_that_are_none(tmp_path, capsys):
    wrong = tmp_path / "wrong.json"
    wrong.write_text("[]")
    assert main(["bench", "compare", str(wrong), str(wrong)]) == 2
    assert main(["bench", "plot", str(wrong)]) == 2
    assert main(["bench", "plot", "benchmarks/results/h200-churn.json"]) == 2
    said = capsys.readouterr().err
    assert "is not a result file" in said
    assert "there is no layer in these files" in said


def test_baselines_say_what_they_need():
    fp32 = Layer(TOY, "fp32", [4], 2, torch.Generator().manual_seed(0))
    found, absent = baselines_of(fp32, ["vllm", "transformers"], Options())
    assert [type(baseline).__name__ for baseline in found] == ["Ours"]
    assert absent["vllm"] == "its kernels are for GPUs"
    assert "one A for gate and up" in absent["transformers"]
    with pytest.raises(Skipped):
        _load("dense")(fp32, Options()).runs([cases.draw_batch(TOY, 4, 2, torch.Generator())])


class Event:
    """torch.cuda.Event on a clock that only baselines move."""

    now = 0.0

    def __init__(self, enable_timing):
        self.at = None

    def record(self):
        self.at = Event.now

    def synchronize(self):
        pass

    def elapsed_time(self, later):
        return later.at - self.at


class Graph:
    def __init__(self, calls):
        self.calls = calls

    def replay(self):
        for call in self.calls:
            call()

    def reset(self):
        self.calls = None


def test_turns_of_a_gpu(monkeypatch):
    """What the timer makes of graphs, without a GPU: microseconds of one call of many."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    timer = timing.GraphTimer.__new__(timing.GraphTimer)
    timer.stream, timer.peaks = None, machine.Peaks(1e9, 1e12)
    seen = []

    def takes(ms):
        def call(i):
            seen.append(i)
            Event.now += ms

        return call

    def capture(calls):
        calls[0]()
        if len(seen) == 1:
            raise RuntimeError("operation not permitted when stream is capturing")
        return Graph(calls)

    timer.capture = capture
    synchronizes, ordinary = timing.Run(takes(0.003)), timing.Run(takes(0.002))
    runs = {("loop", 8): synchronizes, ("ours", 8): ordinary}
    times, peaks = timer.compare(runs, batches=[0, 1, 2], bytes_per_call=96e6, budget_ms=0)
    assert (times["ours", 8].median, times["loop", 8].median) == (2.0, 3.0)
    assert times["ours", 8].turns == 4, "five rounds, of which the first warms up"
    assert synchronizes.eager and not ordinary.eager
    assert {0, 1, 2} <= set(seen), "batches rotate"
    assert peaks.bound(flops=1e9, moved=1e6) == 1e-3


# ---- on a GPU ----


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("activation", ["silu", "swigluoai", "relu2"])
def test_baselines_of_a_gpu(bench, activation):
    wanted = ["grouped_mm", "dense", "loop", "separate"]
    shape = f"8,2,256,128,{activation}"
    status, rows = bench(
        *("--baselines", ",".join(wanted), "--patience-s", "60"),
        shape=shape,
        tokens="1,70,1024",
        device="cuda",
    )
    assert status == 0
    for row in rows:
        baselines = {
            "loop",
            *(f"{n}{end}" for n in ("torch_grouped_mm", "separate") for end in ("", "_base")),
        }
        baselines |= {"dense_base"} if row["tokens"] == 1024 else set()
        assert row["rivals"].keys() == baselines, row["skipped"]
        assert "loop" in row["eager"]


@pytest.mark.gpu
@needs_gpu
def test_a_limit_is_in_the_file(bench):
    status, rows = bench(
        *("--max-cc", "80", "--baselines", "none", "--adapters", "1,2"),
        shape="8,2,256,128",
        tokens="1,70,1024",
        device="cuda",
    )
    assert status == 0
    assert results.read(bench.path)[0]["max_cc"] == 80
    assert all("_sm80" in row["plan"] for row in rows)
    assert len({row["plan"] for row in rows}) > 1, "the table chooses among them"


def test_forced_variants_stand_beside_the_plan(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(machine.CpuYardsticks, "LEAST", 1 << 20)
    monkeypatch.setattr(machine, "last_cache_bytes", lambda: 1 << 18)
    out = str(tmp_path / "variants.json")
    words = ["--models", "qwen3:16@int4", "--tokens", "1,3", "--ranks", "16", "--budget-ms", "0"]
    assert variants.main([*words, "--device", "cpu", "--out", out]) == 0
    _, rows = results.read(out)
    assert [(row["tokens"], row["rank"]) for row in rows] == [(1, 0), (1, 16), (3, 0), (3, 16)]
    for row in rows:
        assert row["plan"].startswith("w13=gemm_bf16") and row["us"] > 0
        assert row["variants_us"] and min(row["variants_us"].values()) > 0
    assert rows[0]["bound_us"] < rows[2]["bound_us"]  # more experts
    capsys.readouterr()
    variants.show(rows[0] | {"us": 10.0, "variants_us": {"slower": 11.0, "faster": 9.0}})
    assert capsys.readouterr().out.endswith("slower 11.0  faster 9.0*\n")
