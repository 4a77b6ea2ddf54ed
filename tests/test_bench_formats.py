"""The bench of quantised weights: what it draws, counts, compares with and writes."""

import json

import pytest
import torch

from moelora.__main__ import main
from moelora.bench import cases, compare, machine, shapes
from moelora.bench.baselines import Layer, Options, baselines_of
from moelora.bench.formats import FORMATS

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
def test_quantised_layers_are_measured_beside_their_unpacked_weights(bench, format, activation):
    status, rows = bench("--format", format, shape=f"{SHAPE},{activation}")
    assert status == 0
    assert [(row["tokens"], row["format"], row["dtype"]) for row in rows] == [
        (tokens, format, "bf16") for tokens in (1, 5)
    ]
    ours = {"ours", "ours_base", "ours_bf16", "ours_bf16_base"}
    for row in rows:
        assert row["relative_error"].keys() == row["spread_us"].keys() == ours
        assert all(row[f"{name}_us"] > 0 for name in ours)
        assert row["rivals"] == {}
        assert 0 < row["max_err_ratio"] <= 1.5


def test_formats_by_model_and_weights_of_a_dtype(bench):
    status, rows = bench("--format", "bf16", "--baselines", "loop")
    assert status == 0
    assert {(row["format"], row["dtype"]) for row in rows} == {("bf16", "bf16")}
    assert "max_err_ratio" not in rows[0]
    key, model = shapes.find("mixtral:4@int4")
    assert (key, model.experts, model.format) == ("mixtral", 4, "int4")
    (quantised,) = {compare.identity(row | {"format": "int4"}) for row in rows[:1]}
    assert quantised != compare.identity(rows[0])
    del rows[0]["format"]
    assert compare.identity(rows[0]) in {compare.identity(row | {"format": "bf16"}) for row in rows}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--format", "int3"], "no format is called 'int3'; there are mxfp4, int4"),
        (["--format", "bf16", "--dtypes", "fp16"], "--format is bf16, but --dtypes is fp16"),
        (["--format", "int4", "--dtypes", "fp32"], "quantised weights serve bf16 and fp16"),
        (["--models", "gpt-oss-20b@int4"], "int4 takes multiples of 128"),
        (["--models", "qwen3", "--tp", "4", "--format", "int4"], "sizes of 2048 and 192"),
    ],
)
def test_what_no_format_holds_is_said_at_once(words, message, capsys):
    assert main(["bench", "--device", "cpu", *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_plans_are_not_tuned_for_quantised_weights(capsys, tmp_path):
    words = ["tune", "--device", "cpu", "--models", "qwen3@int4", "--dir", str(tmp_path)]
    assert main(words) == 2
    assert "weights that are not quantised" in capsys.readouterr().err


@pytest.mark.parametrize(("format", "bits"), [("mxfp4", 4.25), ("int4", 4.125)])
def test_weights_count_as_a_checkpoint_holds_them(format, bits):
    model = TOY.quantised(format)
    generator = torch.Generator().manual_seed(0)
    layer = Layer(model, "bf16", [4], 3, generator)
    held = sum(t.nbytes for tensors in layer.checkpoint.values() for t in tensors)
    assert held == 3 * 4 * 256 * 128 * bits / 8
    assert layer.w13.unpack().float().std() == pytest.approx(0.02, rel=0.3)
    batch = cases.draw_batch(model, 64, 3, generator)
    flops, moved = cases.work(model, batch, 4)
    native_flops, native_moved = cases.work(TOY, batch, 4)
    assert batch.topk_ids.unique().numel() == 4
    assert flops == native_flops
    assert native_moved - moved == 3 * 4 * 256 * 128 * (2 - bits / 8)


def test_the_reference_unpacks_what_it_reads():
    layer = Layer(TOY.quantised("int4"), "bf16", [4], 3, torch.Generator().manual_seed(0))
    for projection in ("w13", "w2"):
        whole = getattr(layer, projection).unpack()
        assert torch.equal(layer.weights_of(projection, 2), whole[2])


def test_who_reads_no_quantised_weights_says_so():
    layer = Layer(TOY.quantised("mxfp4"), "bf16", [4], 3, torch.Generator().manual_seed(0))
    found, absent = baselines_of(layer, ["loop", "unpacked"], Options())
    assert [type(baseline).__name__ for baseline in found] == ["Ours", "Unpacked"]
    assert absent["loop"] == "it reads no quantised weights"
