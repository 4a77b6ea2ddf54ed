"""The bench of quantized weights: what it draws, counts, compares with and writes."""

import dataclasses
import json
import os
from copy import copy

import pytest
import torch

from benchmarks import baselines as peers
from benchmarks import layer
from moelora.__main__ import main
from moelora.bench import baselines, cases, compare, machine, results, shapes
from moelora.bench.baselines import Options, baselines_of
from moelora.bench.baselines.ours import Ours
from moelora.bench.formats import FORMATS
from moelora.bench.harness import bound_us
from moelora.bench.layer import Layer
from moelora.bench.timing import Run

TOY = shapes.Model("toy", experts=4, top_k=2, hidden=256, intermediate=128)
SHAPE = "4,2,256,128"


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Runs the command on a toy on the CPU; (exit status, rows of the file)."""
    monkeypatch.setattr(machine.CpuYardsticks, "LEAST", 1 << 20)
    monkeypatch.setattr(machine, "last_cache_bytes", lambda: 1 << 18)

    def run(*more, shape=SHAPE):
        path = tmp_path / "bench.json"
        words = ["bench", "--device", "cpu", "--shape", shape, "--tokens", "1,5", "--ranks", "4"]
        words += ["--adapters", "3", "--budget-ms", "0", "--mm-size", "64", "--out", str(path)]
        status = main([*words, *more])
        return status, json.loads(path.read_text())["cases"] if path.exists() else []

    return run


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("activation", ["silu", "swigluoai", "relu2"])
def test_quantized_layers_are_measured_beside_their_unpacked_weights(bench, format, activation):
    status, rows = bench("--format", format, shape=f"{SHAPE},{activation}")
    assert status == 0
    assert [(row["tokens"], row["format"], row["dtype"]) for row in rows] == [
        (tokens, format, "bf16") for tokens in (1, 5)
    ]
    who = "ours", "ours_bf16", "ours_unpacking"
    ours = {*who, *(f"{name}_base" for name in who)}
    for row in rows:
        assert row["relative_error"].keys() == row["spread_us"].keys() == ours
        assert all(row[f"{name}_us"] > 0 for name in ours)
        assert row["rivals"] == {}
        if format == "fp8_block":
            assert "max_err_ratio" not in row, "of vLLM's, which is not here"
        else:
            assert 0 < row["max_err_ratio"] <= 1.5


def test_formats_by_model_and_weights_of_a_dtype(bench):
    status, rows = bench("--format", "bf16", "--baselines", "loop")
    assert status == 0
    assert {(row["format"], row["dtype"]) for row in rows} == {("bf16", "bf16")}
    assert "max_err_ratio" not in rows[0]
    key, model = shapes.find("mixtral:4@int4")
    assert (key, model.experts, model.format) == ("mixtral", 4, "int4")
    (quantized,) = {compare.identity(row | {"format": "int4"}) for row in rows[:1]}
    assert quantized != compare.identity(rows[0])
    del rows[0]["format"]
    assert compare.identity(rows[0]) in {compare.identity(row | {"format": "bf16"}) for row in rows}


def test_plans_are_not_tuned_for_quantized_weights(capsys, tmp_path):
    words = ["tune", "--device", "cpu", "--models", "qwen3@int4", "--dir", str(tmp_path)]
    assert main(words) == 2
    assert "weights that are not quantized" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("format", "bits"),
    [("mxfp4", 4.25), ("nvfp4", 4.5), ("int4", 4.125), ("fp8_block", 8 + 32 / 2**14)],
)
def test_weights_count_as_a_checkpoint_holds_them(format, bits):
    model = TOY.quantized(format)
    generator = torch.Generator().manual_seed(0)
    layer = Layer(model, "bf16", [4], 3, generator)
    held = sum(t.nbytes for tensors in layer.checkpoint.values() for t in tensors)
    of_tensors = 2 * 4 * 4 if format == "nvfp4" else 0  # a float32 for each weight and expert
    assert held == 3 * 4 * 256 * 128 * bits / 8 + of_tensors
    assert layer.w13.unpack().float().std() == pytest.approx(0.02, rel=0.3)
    batch = cases.draw_batch(model, 64, 3, generator)
    flops, moved = cases.work(model, batch, 4)
    native_flops, native_moved = cases.work(TOY, batch, 4)
    assert batch.topk_ids.unique().numel() == 4
    assert flops == native_flops
    assert native_moved - moved == 3 * 4 * 256 * 128 * (2 - bits / 8)
    rate = 2 if format == "fp8_block" else 1  # of products of FP8
    assert bound_us(model, (1e9, 0.0), machine.Peaks(1.0, 1e9)) == 1e6 / rate


@pytest.fixture
def registered(monkeypatch):
    """Baselines of a copy of vLLM's kernels, for one test."""
    for name in ("BASELINES", "ABOUT", "READ_QUANTIZED"):
        monkeypatch.setattr(baselines, name, getattr(baselines, name).copy())
    usual = {device: [*names] for device, names in baselines.DEFAULTS_OF_QUANTIZED.items()}
    monkeypatch.setattr(baselines, "DEFAULTS_OF_QUANTIZED", usual)
    peers.register()


def test_who_reads_no_quantized_weights_says_so(registered):
    layer = Layer(TOY.quantized("mxfp4"), "bf16", [4], 3, torch.Generator().manual_seed(0))
    found, absent = baselines_of(layer, ["loop", "unpacked", "marlin"], Options())
    assert [type(baseline).__name__ for baseline in found] == ["Ours", "Unpacked"]
    assert absent["loop"] == "it reads no quantized weights"
    assert absent["marlin"] == "its kernels are for GPUs"
    assert baselines.DEFAULTS_OF_QUANTIZED["cuda"][1:] == ["marlin", "triton_kernels", "triton_fp8"]
    assert "PEERS" in baselines.ABOUT["vllm"]


class Halves(Ours):
    """SiLU of the first half of rows that are interleaved, as vLLM's kernels are driven."""

    def __init__(self, layer, options):
        self.layer = copy(layer)
        self.layer.model = dataclasses.replace(layer.model, activation="silu")
        self.layer.w13, self.layer.w2 = layer.w13.unpack(), layer.w2.unpack()

    def runs(self, batches):
        return {("halves", 4): Run(lambda i: self.run(batches[i], 4), of=self.layer)}


@pytest.mark.parametrize("error", [0.0, 0.1])
def test_a_baseline_of_another_function_is_compared_with_that(bench, monkeypatch, error):
    monkeypatch.setitem(baselines.BASELINES, "unpacked", "ours:Halves")
    monkeypatch.setattr("moelora.bench.baselines.ours.Halves", Halves, raising=False)
    words = "--format", "mxfp4", "--baselines", "unpacked"
    if error:
        right = Halves.run
        monkeypatch.setattr(Halves, "run", lambda *args: (1 + error) * right(*args))
        with pytest.raises(RuntimeError, match="halves is off by 0.1"):
            bench(*words, shape=f"{SHAPE},swigluoai")
        return
    status, rows = bench(*words, shape=f"{SHAPE},swigluoai")
    assert status == 0
    assert rows[0]["rivals"].keys() == {"halves"}
    assert rows[0]["relative_error"]["halves"] < 0.01


# ---- the command and the table ----


def test_a_larger_error_than_that_of_bf16_fails_the_command(monkeypatch, tmp_path, capsys):
    asked = []
    monkeypatch.setattr(layer, "moelora_main", lambda words: asked.append(words) or 0)
    monkeypatch.setenv("MOELORA_PEERS", "elsewhere")
    out = str(tmp_path / "f.json")
    results.write(out, [case(max_err_ratio=1.51), case(tokens=4, max_err_ratio=1.0)])
    assert layer.main(["--peers", "there", "--ranks", "16", "--out", out]) == 1
    assert asked == [["bench", "--ranks", "16", "--out", out]]
    assert os.environ["MOELORA_PEERS"] == "there"
    said = capsys.readouterr().out
    assert said == "qwen3 int4 M=1 rank 16: moelora's error is 1.51 times that in bf16\n"


def case(**more):
    return {
        "model": "qwen3",
        "format": "int4",
        "tokens": 1,
        "rank": 16,
        "bound_us": 5.0,
        "ours_us": 10.0,
        "ours_base_us": 8.0,
        "ours_bf16_us": 30.0,
        "share": 0.5,
        "rivals": {"vllm_lora": 68.3, "vllm_base": 28.9},
        "ratio": 6.83,
        "max_err_ratio": 1.0,
        **more,
    }
