"""The bench of quantized weights: what it draws, counts, compares with and writes."""

import dataclasses
import json
import os
from copy import copy
from types import SimpleNamespace

import pytest
import torch

from benchmarks import baselines as peers
from benchmarks import layer
from benchmarks.baselines import vllm_quantized
from moelora.__main__ import main
from moelora.bench import baselines, cases, compare, machine, results, shapes
from moelora.bench.baselines import Options, baselines_of
from moelora.bench.baselines.ours import Ours
from moelora.bench.formats import FORMATS
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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--format", "int3"], "no format is called 'int3'; there are mxfp4, nvfp4, nf4, int4"),
        (["--format", "bf16", "--dtypes", "fp16"], "--format is bf16, but --dtypes is fp16"),
        (["--format", "int4", "--dtypes", "fp32"], "quantized weights serve bf16 and fp16"),
        (["--models", "gpt-oss-20b@int4"], "int4 takes multiples of 128"),
        (["--models", "qwen3", "--tp", "4", "--format", "int4"], "sizes of 2048 and 192"),
    ],
)
def test_what_no_format_holds_is_said_at_once(words, message, capsys):
    assert main(["bench", "--device", "cpu", *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


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


def test_the_reference_unpacks_what_it_reads():
    layer = Layer(TOY.quantized("int4"), "bf16", [4], 3, torch.Generator().manual_seed(0))
    for projection in ("w13", "w2"):
        whole = getattr(layer, projection).unpack()
        assert torch.equal(layer.weights_of(projection, 2), whole[2])


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


class Theirs:
    """What `vk/vq_layer.py` of a copy of vLLM's kernels has, but for the kernels."""

    class Weights:
        def __init__(self, scheme, E, H, I, gen, device):
            self.E, self.H, self.I = E, H, I
            self.Hp, self.Ip = Theirs.pad_dims(scheme, H, I)

        def quantised(self, e, which):  # spelled as the peer does, which calls it
            raise AssertionError("the peer would draw weights of its own")

    @staticmethod
    def pad_dims(scheme, hidden, intermediate):
        return (-(-hidden // 256) * 256, -(-intermediate // 128) * 128)

    HAVE_MARLIN, CUDA_NOTE = True, ""
    L = SimpleNamespace(Lora=lambda *tensors: tensors)


def theirs(monkeypatch, model):
    monkeypatch.setattr(vllm_quantized, "load", lambda: Theirs)
    monkeypatch.setattr(vllm_quantized, "require", lambda condition, why: None)
    layer = Layer(model, "bf16", [4], 3, torch.Generator().manual_seed(0))
    return layer, vllm_quantized.Marlin(layer, Options())


def test_vllm_gets_our_values_padded_as_it_pads(monkeypatch):
    model = shapes.Model("toy", 2, 1, 288, 160, "swigluoai", bias=True, format="mxfp4")
    layer, marlin = theirs(monkeypatch, model)
    values, scales = layer.checkpoint["w13"]
    padded, padded_scales, _ = marlin.weights.quantised(1, "w13")
    assert padded.shape == (2 * 256, 512 // 2)
    assert padded_scales.shape == (2 * 256, 512 // 32)
    halves = padded.view(2, 256, -1)
    assert torch.equal(halves[:, :160, :144].flatten(0, 1), values[1])
    assert not halves[:, 160:].any() and not halves[:, :, 144:].any()
    padded, padded_scales, _ = marlin.weights.quantised(1, "w2")
    assert padded.shape == (512, 256 // 2) and padded_scales.shape == (512, 256 // 32)
    assert torch.equal(padded[:288, :80], layer.checkpoint["w2"][0][1])
    (a13, b13, a2, b2, _) = marlin.loras[4]
    columns = [a13[0].shape[-1], b13[0].shape[-2], a2.shape[-1], b2.shape[-2]]
    assert columns == [512, 256, 256, 512]
    silu = vllm_quantized.computed(layer, "silu")
    assert (silu.model.activation, silu.b13) == ("silu", None)
    assert layer.b13 is not None


def test_vllm_gets_our_fp8(monkeypatch):
    monkeypatch.setattr(vllm_quantized, "load", lambda: Theirs)
    monkeypatch.setattr(vllm_quantized, "require", lambda condition, why: None)
    model = shapes.Model("toy", 2, 1, 256, 128, format="fp8_block")
    layer = Layer(model, "bf16", [4], 3, torch.Generator().manual_seed(0))
    found = vllm_quantized.TritonFP8(layer, Options())
    values, scales, _ = found.weights.quantised(1, "w13")
    assert (values.shape, values.dtype) == ((256, 256), torch.float8_e4m3fn)
    assert scales.shape == (2, 2)
    number = values[130, 5].double() * scales[1, 0].double()
    assert layer.weights_of("w13", 1)[130, 5] == number


@pytest.mark.parametrize(("format", "rate"), [("int4", 1), ("fp8_block", 2)])
def test_products_of_fp8_have_twice_the_rate(bench, monkeypatch, format, rate):
    monkeypatch.setattr(machine.Peaks, "bound", lambda self, flops, moved: flops)
    _, rows = bench("--format", format)
    assert rows[1]["bound_us"] == pytest.approx(1e6 * rows[1]["gflop"] * 1e9 / rate, rel=0.05)


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
