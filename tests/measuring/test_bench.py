"""`moelora bench` checks its baselines, writes what it promises, compares fairly, and draws."""

import argparse
import dataclasses
import json
import re

import pytest
import torch
from checkout import needs_checkout
from conftest import needs_gpu, on_gpu

from moelora.__main__ import main
from moelora.bench import baselines, cases, command, config, machine, results, shapes
from moelora.bench.baselines.ours import Loop
from moelora.bench.formats import FORMATS
from moelora.bench.harness import bound_us
from moelora.bench.layer import Layer

# Sizes that no vector length divides, and sizes that every format takes.
TOY = shapes.Model("toy", experts=4, top_k=2, hidden=72, intermediate=40)
BLOCKS = dataclasses.replace(TOY, hidden=256, intermediate=128)
SHAPE, SHAPE_OF_BLOCKS = "4,2,72,40", "4,2,256,128"
BASELINES = {"loop", "grouped_mm_peft", "batched_mm_peft", "grouped_mm_base"}
RESULTS = "benchmarks/results"


def generator():
    return torch.Generator().manual_seed(0)


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Runs the command on a toy: the rows of its file."""
    monkeypatch.setattr(machine.CpuYardsticks, "LEAST", 1 << 20)
    monkeypatch.setattr(machine, "last_cache_bytes", lambda: 1 << 18)

    def run(*more, shape=SHAPE, tokens="1,16", device="cpu"):
        words = ["bench", "--device", device, "--shape", shape, "--tokens", tokens]
        words += ["--ranks", "4,8", "--adapters", "3", "--budget-ms", "0", "--mm-size", "64"]
        words += ["--patience-s", "60"]  # also on a machine with other work
        assert main([*words, "--out", str(run.path), *more]) == 0
        return results.read(run.path)[1]

    run.path = tmp_path / "bench.json"
    return run


# ---- the command ----


def test_every_baseline_agrees_and_is_written(bench, capsys):
    rows = bench()
    assert len(rows) == 2 * 2 * 2  # dtypes, tokens, ranks
    meta, _ = results.read(bench.path)
    assert meta["threads"] == torch.get_num_threads()
    assert meta.keys() >= {"commit", "date", "device", "torch", "cuda", "command", "gpu_state"}
    for row in rows:
        assert row["rivals"].keys() == BASELINES and not row["skipped"]
        assert row["relative_error"].keys() == {"ours", "ours_base", *BASELINES}
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
    rows = bench("--format", format, shape=f"{SHAPE_OF_BLOCKS},{activation}", tokens="1,5")
    who = "ours", "ours_bf16", "ours_unpacking"
    ours = {*who, *(f"{name}_base" for name in who)}
    for row in rows:
        assert (row["format"], row["dtype"]) == (format, "bf16")
        assert row["relative_error"].keys() == row["spread_us"].keys() == ours
        assert all(row[f"{name}_us"] > 0 for name in ours) and row["rivals"] == {}
        # with FP8 activations of vLLM's layer, which is not here
        assert format == "fp8_block" or 0 < row["max_err_ratio"] <= 1.5
        assert (format == "fp8_block") == ("max_err_ratio" not in row)


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="torch has no grouped GEMM")
@pytest.mark.parametrize("activation", ["silu", "swigluoai", "relu2"])
@pytest.mark.parametrize("device", ["cpu", on_gpu("cuda")])
def test_baselines_that_are_named(bench, device, activation):
    words = "--baselines grouped_mm,loop,separate --dtypes bf16 --mix half".split()
    shape = f"8,2,256,128,{activation}"
    rows = bench(*words, shape=shape, tokens="1,70", device=device)
    for row in rows:
        found = {"loop", "torch_grouped_mm", "torch_grouped_mm_base", "separate", "separate_base"}
        assert row["rivals"].keys() == found, row["skipped"]
        assert device == "cpu" or "loop" in row["eager"]


def test_several_numbers_of_adapters(bench, tmp_path):
    rows = bench("--adapters", "1,3", "--format", "fp32", "--baselines", "loop")
    measured = [(row["adapters"], row["tokens"], row["rank"]) for row in rows]
    assert measured == [(a, m, r) for a in (1, 3) for m in (1, 16) for r in (4, 8)]
    moved = {key: row["mbytes"] for key, row in zip(measured, rows, strict=True)}
    assert moved[1, 16, 8] < moved[3, 16, 8], "more pairs are touched"
    assert "<!-- Cost over the number of adapters -->" in draw(tmp_path, bench.path)


def test_a_deadline_ends_the_run_between_cases(bench, capsys):
    rows = bench("--deadline-s", "0", "--baselines", "loop", tokens="1,2,3")
    assert {row["tokens"] for row in rows} == {1}
    assert "deadline: 1 of 6 cases done" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("", ("qwen3", 16, None, [1, 64], ["bf16"], ["loop", "transformers"], 60)),
        (
            f"--shape {SHAPE} --tokens 7 --deadline-s 5 --baselines none",
            ("4x2x72x40", 4, None, [7], ["bf16"], [], 5),
        ),
        (
            "--models qwen3@int4 --format fp16 --baselines loop",  # of all weights
            ("qwen3", 128, None, [1, 64], ["fp16"], ["loop"], 60),
        ),
    ],
)
def test_quick_measures_one_layer_of_few_tokens_unless_others_are_named(words, wanted):
    parser = argparse.ArgumentParser()
    command.add_options(parser)
    args = command.settle(parser.parse_args(["--device", "cpu", "--quick", *words.split()]))
    ((key, model),) = args.models
    case = key, model.experts, model.format, args.tokens, args.dtypes
    assert (*case, args.baselines, args.deadline_s) == wanted


@needs_checkout
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("bench --models qwen4", "no model is called 'qwen4'"),
        ("bench --models qwen3:200", "cannot be cut to 200"),
        ("bench --models qwen3 --tp 7", "does not split into 7"),
        ("bench --models=", "name no layer"),
        ("bench --model nowhere/config.json", "nowhere/config.json is not a configuration"),
        ("bench --shape 4,2,72", "a shape is E,top_k,K,I"),
        ("bench --shape 2,4,72,40", "chooses 4 of 2 experts"),
        ("bench --shape 4,2,72,40,selu", "is none of silu, gelu, swigluoai, relu2"),
        ("bench --tokens 1,many", "--tokens is '1,many'"),
        ("bench --dtypes fp8", "'fp8' is none of fp32, bf16, fp16"),
        ("bench --mix some", "--mix is 'some'"),
        ("bench --routing skewed", "neither uniform nor zipf nor a file"),
        (f"bench --shape {SHAPE} --routing pyproject.toml", "is not a list of counts"),
        ("bench --max-cc 8", "compute_capability is 8, expected 80 or more"),
        ("bench --mm-size 0", "--mm-size is 0, wanted 1 or more"),
        ("bench --budget-ms nan", "--budget-ms is nan, wanted 0 or more"),
        ("bench --budget-ms inf", "--budget-ms is inf, wanted a finite time"),
        ("bench --out tests", "--out tests: Is a directory"),
        ("bench --variant gemm_f32_typo", "'gemm_f32_typo' does not exist"),
        ("bench --format int3", "no format is called 'int3'; there are mxfp4, nvfp4, nf4, int4"),
        ("bench --format bf16 --dtypes fp16", "--format is bf16, but --dtypes is fp16"),
        ("bench --format int4 --dtypes fp32", "quantized weights serve bf16 and fp16"),
        ("bench --models gpt-oss-20b@int4", "int4 takes multiples of 128"),
        ("tune --models qwen3@int4 --dir plans", "weights that are not quantized"),
        (f"tune --shape {SHAPE} --dir pyproject.toml", "--dir pyproject.toml"),
        ("bench compare pyproject.toml pyproject.toml", "is not a result file"),
        (f"plot {RESULTS}/h200-rl.json", "there is no layer in these files"),
        ("plot nowhere.json --out now", "wanted a file that ends in .png or .svg"),
        (f"plot {RESULTS}/cpu-layer.json --picture beside", "no case of rank 16 with"),
        (f"plot {RESULTS}/cpu-layer.json --picture rl", "no case of rl_reward"),
        ("plot a.json b.json --picture rl", "--picture rl draws one file, not 2"),
    ],
)
def test_what_cannot_be_done_is_said_at_once(words, message, capsys):
    device = ["--device", "cpu"] if re.match("(bench|tune) --", words) else []
    assert main([*words.split(), *device]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_models_and_baselines_are_listed(capsys):
    assert main(["bench", "--list"]) == 0
    out = capsys.readouterr().out
    assert all(model.name in out for model in shapes.MODELS.values())
    assert all(name in out for name in baselines.BASELINES)


# ---- baselines ----


def test_a_wrong_baseline_is_refused(bench, monkeypatch):
    right = Loop.run
    monkeypatch.setattr(Loop, "run", lambda *args: 1.1 * right(*args))
    with pytest.raises(RuntimeError, match="rank 4: loop is off by 0.1"):
        bench("--dtypes", "fp32")


def test_a_baseline_that_is_slow_or_breaks_is_left_out_with_a_reason(bench, monkeypatch):
    def broken(*args):
        raise TypeError("no such kernel\nand more")

    monkeypatch.setattr(Loop, "run", broken)
    rows = bench("--dtypes", "fp32", "--patience-s", "0")
    for row in rows:
        assert row["rivals"].keys() == {"grouped_mm_base"}
        assert "1 tokens, rank 4: about" in row["skipped"]["batched_mm_peft"]
        assert row["skipped"]["loop"] == "TypeError: no such kernel"
        assert row["best_rival"] is row["ratio"] is None


def test_baselines_that_serve_no_case_are_in_the_file(bench, tmp_path):
    sizes = {"num_local_experts": 4, "hidden_size": 64, "intermediate_size": 64}
    with_biases = write(tmp_path, GPT_OSS | sizes)
    for words, why in (
        ("vllm", "its kernels are for GPUs"),
        ("unpacked", "weights are not quantized"),
        ("loop --format nf4", "it reads no quantized weights"),
        (f"grouped_mm --dtypes bf16 --model {with_biases}", "driven here without biases"),
    ):
        bench("--baselines", *words.split(), shape=SHAPE_OF_BLOCKS, tokens="1")
        assert results.read(bench.path)[0]["absent"] == {words.split()[0]: why}


# ---- cases: work, mixes, routing ----


@pytest.mark.parametrize("activation, matrices", [("silu", 3), ("relu2", 2)])
def test_adapters_cost_flops_and_bytes(activation, matrices):
    model = dataclasses.replace(TOY, activation=activation)
    batch = cases.draw_batch(model, 5, 3, generator())
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
    layer = Layer(model, "bf16", [4], 3, generator())
    held = sum(t.nbytes for tensors in layer.checkpoint.values() for t in tensors)
    of_tensors = 2 * 4 * 4 if format == "nvfp4" else 0  # a float32 for each weight and expert
    assert held == 3 * 4 * 256 * 128 * bits / 8 + of_tensors
    batch = cases.draw_batch(model, 64, 3, generator())
    (flops, moved), native = cases.work(model, batch, 4), cases.work(BLOCKS, batch, 4)
    assert batch.topk_ids.unique().numel() == 4 and flops == native[0]
    assert native[1] - moved == 3 * 4 * 256 * 128 * (2 - bits / 8)
    rate = 2 if format == "fp8_block" else 1  # of products of FP8
    assert bound_us(model, (1e9, 0.0), machine.Peaks(1.0, 1e9)) == 1e6 / rate


def test_mixes_are_what_they_say():
    def mapping(mix):
        return cases.draw_batch(TOY, 400, 3, generator(), mix).mapping

    assert mapping("none").eq(-1).all()
    assert mapping("one").eq(0).all()
    assert mapping("many").unique().tolist() == [0, 1, 2]
    assert mapping("different")[:4].tolist() == [0, 1, 2, 0]
    assert mapping("half").eq(-1).float().mean() == pytest.approx(0.5, abs=0.1)
    assert mapping("0.2").eq(-1).float().mean() == pytest.approx(0.2, abs=0.1)


def test_a_recorded_histogram_is_followed(tmp_path):
    path = tmp_path / "counts.json"
    path.write_text(json.dumps({"counts": [70, 0, 20, 10]}))
    top1 = shapes.Model("toy", 4, 1, 8, 8)
    batch = cases.draw_batch(top1, 4000, 3, generator(), routing=str(path))
    drawn = torch.bincount(batch.topk_ids.flatten().long(), minlength=4) / 4000
    torch.testing.assert_close(drawn, torch.tensor([0.7, 0.0, 0.2, 0.1]), atol=0.03, rtol=0)
    torch.testing.assert_close(batch.topk_weights.sum(1), torch.ones(4000))
    for wrong in ("[1, 2, 3]", "[1, -1, 1, 1]"):
        path.write_text(wrong)
        with pytest.raises(ValueError, match="counts"):
            cases.read_histogram(path, 4)


# ---- a layer of a Hugging Face configuration ----

QWEN = {"num_experts": 128, "num_experts_per_tok": 8, "hidden_act": "silu"}
QWEN |= {"hidden_size": 2048, "moe_intermediate_size": 768, "intermediate_size": 6144}
DBRX = {"moe_num_experts": 16, "moe_top_k": 4, "ffn_hidden_size": 10752}
DBRX = {"d_model": 6144, "ffn_config": DBRX | {"ffn_act_fn": {"name": "silu"}}}
GPT_OSS = {"model_type": "gpt_oss", "num_local_experts": 32, "num_experts_per_tok": 4}
GPT_OSS |= {"hidden_size": 2880, "intermediate_size": 2880, "hidden_act": "silu"}
GROUPS = {"group_0": {"weights": {"num_bits": 4, "type": "int"}}}
QWEN3 = shapes.MODELS["qwen3"]


def quantized(method, content=QWEN, **more):
    return content | {"quantization_config": {"quant_method": method, **more}}


def write(folder, content):
    (folder / "config.json").write_text(json.dumps(content))
    return str(folder)


@pytest.mark.parametrize(
    ("content", "format", "wanted"),
    [
        (QWEN, None, QWEN3),
        (DBRX, None, shapes.MODELS["dbrx"]),
        ({"text_config": QWEN, "hidden_size": 1}, None, QWEN3),
        (quantized("mxfp4", GPT_OSS), None, shapes.MODELS["gpt-oss-20b"].quantized("mxfp4")),
        (quantized("gptq", bits=4), None, QWEN3.quantized("int4")),
        (quantized("awq", w_bit=4), "bf16", QWEN3),
        (quantized("awq", w_bit=4), "mxfp4", QWEN3.quantized("mxfp4")),
        (quantized("compressed-tensors", config_groups=GROUPS), None, QWEN3.quantized("int4")),
    ],
)
def test_a_layer_is_that_of_its_configuration(tmp_path, content, format, wanted):
    found = config.read(write(tmp_path, content), format)
    assert found == (tmp_path.name, dataclasses.replace(wanted, name=tmp_path.name))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "it holds a list"),
        ({"hidden_size": 64}, "describes no mixture of experts: none of num_experts"),
        (QWEN | {"hidden_act": "tanh"}, "hidden_act is 'tanh', wanted one of silu"),
        (QWEN | {"num_experts_per_tok": 200}, "chooses 200 of 128 experts"),
        (quantized("gptq", bits=3), "quant_method is 'gptq', of which there is no format"),
    ],
)
def test_a_configuration_that_cannot_be_measured_is_named(tmp_path, content, message, capsys):
    assert main(["bench", "--model", write(tmp_path, content), "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err


# ---- comparing and drawing ----


@pytest.mark.parametrize(
    ("us", "spread", "change", "status"),
    [
        (104.0, 0.0, {}, 1),
        (102.0, 0.0, {}, 0),  # less than the least that counts
        (90.0, 0.0, {}, 0),
        (108.0, 0.05, {}, 0),  # within both spreads
        (112.0, 0.05, {}, 1),
        (100.0, 0.0, {"ours_base_us": 60.0}, 1),
        (100.0, 0.0, {"rank": 64}, 1),  # nothing in common
        (100.0, 0.0, {"format": "int4"}, 1),
    ],
)
def test_regressions_beyond_noise(tmp_path, us, spread, change, status):
    for name, time, more in (("before", 100.0, {}), ("after", us, change)):
        row = {"model": "qwen3", "tokens": 16, "rank": 16, "ours_us": time, "ours_base_us": 50.0}
        row["spread_us"] = {"ours": [time * (1 - spread), time * (1 + spread)]}
        results.write(tmp_path / name, [row | more])
    assert main(["bench", "compare", f"{tmp_path}/before", f"{tmp_path}/after"]) == status


def draw(tmp_path, *words):
    """The text of the picture that `moelora plot` draws."""
    pytest.importorskip("matplotlib")
    out = tmp_path / "picture.svg"
    assert main(["plot", *map(str, words), "-o", str(out)]) == 0
    return out.read_text()


@needs_checkout
@pytest.mark.parametrize(
    ("words", "drawn"),
    [
        ("h200-layer.json", "Roofline, layer with adapters|Cost of adapters"),
        ("h200-layer.json --picture beside --vllm-version 0.33", "Mixtral-8x7B"),
    ],
)
def test_the_committed_results_are_drawn(tmp_path, words, drawn):
    text = draw(tmp_path, *f"{RESULTS}/{words}".split())
    assert all(f"<!-- {name} -->" in text for name in drawn.split("|"))


def test_few_cases_are_bars(bench, tmp_path):
    """A curve over tokens would be a point in empty axes."""
    bench("--dtypes", "fp32", "--baselines", "loop", "--ranks", "4", tokens="3")
    text = draw(tmp_path, bench.path)
    bars = "lower bound|moelora|moelora, no adapters|PyTorch, expert by expert"
    for name in ("4x2x72x40 fp32 rank 4, 3 tokens, 3 adapters", *bars.split("|")):
        assert f"<!-- {name} -->" in text


@pytest.mark.gpu
@needs_gpu
def test_a_limit_is_in_the_file(bench):
    words = ("--max-cc", "80", "--baselines", "none", "--adapters", "1,2")
    rows = bench(*words, shape="8,2,256,128", tokens="1,70,1024", device="cuda")
    assert results.read(bench.path)[0]["max_cc"] == 80
    assert all("_sm80" in row["plan"] for row in rows)
    assert len({row["plan"] for row in rows}) > 1, "the table chooses among them"
