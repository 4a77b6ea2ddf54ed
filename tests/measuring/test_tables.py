"""Tables of engines, before their files are there, while rows are missing, and when all are."""

import importlib.util
import re

import pytest
from checkout import needs_checkout

from benchmarks import ROOT, tables
from benchmarks.compare.__main__ import COMMANDS
from benchmarks.tables.columns import TABLES
from moelora import _C
from moelora.bench import results


@pytest.fixture
def write(monkeypatch, tmp_path):
    monkeypatch.setattr(tables.files, "ROOT", tmp_path)
    folder = tmp_path / "benchmarks/results"
    about = {"device": "NVIDIA H200"}

    def write(file, *rows, **meta):
        results.write(folder / f"{file}.json", list(rows), **about | meta)

    return write


def speed(engine, lora, batch, prefill, decode, **more):
    row = {"topic": "speed", "engine": engine, "lora_enabled": lora, "batch": batch}
    return row | {"prefill_tok_s": prefill, "decode_tok_s": decode, **more}


LORA = (
    speed("vllm", True, "base", 1100, 110),
    speed("vllm", True, "4 mixed", 1000, 100),
    speed("moelora", True, "base", 2500, 250),
    speed("moelora", True, "4 mixed", 2000, 150),
)
ENGINE = "vLLM 0.33.0", "H200"
ANSWERS = {"topic": "answers", "compared": "moelora, vllm", "ok": True}


def cells(table):
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [line.strip("| ").split(" | ") for line in lines[2:]]


def test_a_file_that_misses_cases_stands_beside_others(write):
    write("h200-e2e-int4", *LORA, date="2026-01-01")
    write("h100-e2e-int4", *LORA, device="NVIDIA H100", date="2026-02-02", missing="a model")
    assert tables.section("engines_int4").startswith("NVIDIA H200:")
    assert tables.files.other_devices("e2e-int4") == ["NVIDIA H100"]


def test_layers_of_another_card_name_what_they_miss(write):
    row = {"format": "int4", "tokens": 4, "rank": 16, "share": 0.25, "share_base": 0.5}
    write("h200-formats", row, date="2026-01-01")
    assert tables.section("layers_on_others") == tables.files.AWAITED
    write("h100-formats", row, device="NVIDIA H100", date="2026-02-02", missing="a model")
    table = tables.section("layers_on_others")
    assert cells(table) == [["four bits", "1 and 4", "**0.25**", "**0.50**"]]
    assert "NVIDIA H100" in table and "Not measured: a model." in table


def test_the_newest_card_is_taken_and_named(write):
    write("h100-e2e-int4", *LORA, device="NVIDIA H100", date="2026-01-01")
    write("cpu-e2e-int4", *LORA, device="a CPU", date="2026-03-03")
    assert tables.section("engines_int4").startswith("NVIDIA H100:")
    write("h200-e2e-int4", *LORA, date="2026-02-02")
    write("h200-more-e2e-int4", *LORA, device="another topic", date="2026-03-03")
    assert tables.section("engines_int4").startswith("NVIDIA H200:")
    assert "results/h200-e2e-int4.json`, NVIDIA H200" in tables.section("from e2e-int4")
    assert tables.files.path_of("e2e-int4", "NVIDIA H100").name == "h100-e2e-int4.json"


def test_commands_of_result_files_are_there():
    for path in (tables.files.ROOT / "benchmarks/results").glob("*.json"):
        _, flag, module, *words = tables.files.read(path)[0]["command"].split()
        assert flag == "-m" and importlib.util.find_spec(module), path.name
        if module == "benchmarks.compare":
            assert words[0] in COMMANDS, path.name


SOURCES = [p for p in (ROOT / "csrc").rglob("*") if p.suffix in (".cu", ".cuh", ".h", ".inc")]
WORDS = {word for path in SOURCES for word in re.findall(r"\w+", path.read_text())}
# In an engine's trace, those of others are in namespaces or have no arguments.
OURS = re.compile(r"(?:void )?(?:\(anonymous namespace\)::)?\w+[<(]")


def gone(case):
    """Variants of a case's plan, and words of its kernels, that this tree does not have."""
    found = set()
    for variant in re.findall(r"(?:\w+=)(\w+)", case.get("plan", "")):
        try:
            _C.force_variant(variant)
        except ValueError:
            found.add(variant)
        finally:
            _C.force_variant(None)
    kernels = [case["kernel"]] if "kernel" in case else []
    if case.get("engine", "").startswith("moelora"):
        traces = [value["top"] for value in case.values() if isinstance(value, dict)]
        names = [name for top in traces for row in top for name in row if isinstance(name, str)]
        kernels += filter(OURS.match, names)
    for kernel in kernels:
        cut = re.search(r"[<(].*\w$", kernel)
        words = re.findall(r"[A-Za-z_]\w*", kernel.replace("(anonymous namespace)", ""))
        found |= {*words[: -1 if cut else None]} - WORDS
    return found


@needs_checkout
def test_files_name_variants_and_kernels_of_this_tree():
    """What was measured of code that is gone is measured again, or taken out."""
    for path in (ROOT / "benchmarks/results").glob("*.json"):
        assert set().union(*map(gone, tables.files.read(path)[1])) == set(), path.name


@pytest.mark.parametrize(
    ("case", "want"),
    [
        ({"plan": "w13=gemm_bf16_80x128x64_sm90 sum=sum_bf16_8_sm80"}, "gemm_bf16_80x128x64_sm90"),
        ({"kernel": "decode_layer<bf16>"}, "decode_layer"),
        ({"kernel": "gemm_sm90<GoneShape<96, 1>, __nv_bfl"}, "GoneShape"),
        (
            {"engine": "moelora", "decode_gpu_ms": {"top": [["void gone_sm90<8>(x_para", 1.0]]}},
            "gone_sm90",
        ),
    ],
)
def test_what_is_gone_is_found(case, want):
    assert gone(case) == {want}


@needs_checkout
@pytest.mark.parametrize("name", [*TABLES, *tables.MADE])
def test_a_table_has_its_commits_and_dates(name):
    text = tables.section(name)
    said = re.search(r"\b[0-9a-f]{7,12}, 20\d\d-\d\d-\d\d", text)
    assert said or tables.files.AWAITED in text


def test_formats_without_speeds_are_left_out(write):
    assert tables.section("engines_int4") == tables.files.AWAITED
    assert cells(tables.section("engine_ranges")) == []
    write("h200-e2e-fp8", speed("vllm", False, "base", 1600, 160), *LORA, vllm="0.33.0")
    write("h200-e2e-int4", ANSWERS)
    assert tables.section("engines_int4") == tables.files.AWAITED
    fp8 = [
        [*ENGINE, "FP8, Qwen3-30B-A3B", "12", "prefill", "1,600", "1,000", "**2,000**", "2.00"],
        [*ENGINE, "FP8, Qwen3-30B-A3B", "12", "decode", "160", "100", "**150**", "1.50"],
    ]
    assert cells(tables.section("engine_ranges")) == fp8
    write("h200-e2e-int4", ANSWERS, *LORA, vllm="0.33.0")
    assert cells(tables.section("engine_ranges")) == [
        *fp8,
        [*ENGINE, "INT4, Qwen3-30B-A3B", "12", "prefill", "-", "1,000", "**2,000**", "2.00"],
        [*ENGINE, "INT4, Qwen3-30B-A3B", "12", "decode", "-", "100", "**150**", "1.50"],
    ]
    assert len(cells(tables.section("engines_int4"))) == 4


def server(engine, batch, *rates):
    """The speeds of a server of SGLang."""
    return {"topic": "speed", "engine": engine, "batch": batch} | dict(
        zip(("prefill_tok_s", "decode_tok_s"), rates, strict=True)
    )


def test_an_engine_of_sglang_stands_beside_the_faster_of_its_ways(write):
    rows = [
        server("sglang, no LoRA", "base", 3000, 300),
        server("sglang", "4 mixed", 500, 50),
        server("sglang, virtual experts", "4 mixed", 1000, 100),
        server("moelora", "4 mixed", 2000, 150),
    ]
    write("h200-e2e-sglang", *rows, sglang="0.5.16")
    assert cells(tables.section("engine_ranges")) == [
        ["SGLang 0.5.16", "H200", "bf16, Qwen3-30B-A3B", "12", *more]
        for more in (
            ["prefill", "3,000", "1,000", "**2,000**", "2.00"],
            ["decode", "300", "100", "**150**", "1.50"],
        )
    ]


def test_the_second_design_of_sglang_comes_first(write):
    rows = [
        server("sglang, no LoRA", "base", 3000, 300),
        server("sglang, v2", "4 mixed", 1600, 150),
        server("sglang, v2 cutedsl", "4 mixed", 1000, 200),
        server("moelora", "4 mixed", 1, 1),
        server("moelora, v2", "4 mixed", 2400, 240),
    ]
    write("h200-e2e-sglang", *rows, sglang="0.5.23")
    told = [row[4:] for row in cells(tables.section("engine_ranges"))]
    assert told == [
        ["prefill", "3,000", "1,600", "**2,400**", "1.50"],
        ["decode", "300", "200", "**240**", "1.20"],
    ]
    assert [row[1:] for row in cells(tables.section("alternatives"))] == [
        ["1.50", "1.20", "-"],
        ["0.80", "0.80", "-"],
    ]
    sentence = tables.SENTENCES["sglang_ranges"]()
    for ratios in ("1.50 and 1.60", "2.40 and 1.20", "0.80 and 0.80"):
        assert f"{ratios} times as fast as SGLang" in sentence


def test_small_models_are_compared_with_the_plugin_off(write):
    assert tables.section("suite_ratios") == tables.files.AWAITED
    write("h100-vllm-suite-models", *(row | {"model": "olmoe"} for row in LORA))
    write("h100-vllm-suite-formats", *(row | {"model": "int4"} for row in LORA))
    assert cells(tables.section("suite_ratios")) == [
        ["OLMoE, bf16", "2.00", "1.50"],
        ["Qwen3-MoE, INT4, compressed-tensors", "2.00", "1.50"],
    ]


def test_decodes_that_are_slower_are_in_the_table_with_the_others(write):
    """By number of sequences, and with adapters, without, and without LoRA."""
    assert tables.section("decode_ratios") == tables.files.AWAITED
    one = [row | {"decode_1_tok_s": tok_s} for row, tok_s in zip(LORA, (10, 10, 9, 4), strict=True)]
    write("h200-e2e-fp8", *one)
    what = "FP8, Qwen3-30B-A3B, H200"
    assert cells(tables.section("decode_ratios")) == [
        [what, "of four adapters", "0.40", "-", "1.50", "-"],
        [what, "of none, LoRA on", "0.90", "-", "2.27", "-"],
    ]
    assert tables.section("decode_busy_ratios") == tables.files.AWAITED
    busy = [row | {"tpot_busy_16_ms": ms} for row, ms in zip(LORA, (3, 2, 2, 4), strict=True)]
    write("h200-e2e-fp8", *busy)
    assert cells(tables.section("decode_busy_ratios")) == [
        [what, "of four adapters", "-", "0.50", "-", "-"],
        [what, "of none, LoRA on", "-", "1.50", "-", "-"],
    ]
    busy = [row | {"tpot_busy_ms": ms} for row, ms in zip(LORA, (3, 2, 2, 4), strict=True)]
    write("h200-e2e-fp8", *busy, vllm="0.33.0")
    assert cells(tables.section("alternatives"))[0][1:] == ["2.00", "1.50", "0.50"]


@pytest.mark.parametrize("page", tables.PAGES)
def test_pages_have_the_numbers_of_the_files(page):
    """Else `python -m benchmarks.tables --write` was forgotten."""
    text = (ROOT / page).read_text()
    assert tables.filled(text) == text


def test_two_gpus_have_a_row_for_each_way_and_phase(write):
    assert tables.section("engines_parallel") == tables.files.AWAITED
    write("h100-e2e-parallel", ANSWERS)
    assert tables.section("engines_parallel") == tables.files.AWAITED
    none = speed("vllm", False, "base", 1600, 160, parallel="tensor")
    tensor = [row | {"parallel": "tensor"} for row in LORA]
    expert = [row | {"parallel": "expert"} for row in LORA[:2]]
    write("h100-e2e-parallel", none, *tensor, *expert)
    assert cells(tables.section("engines_parallel")) == [
        ["tensor", "prefill", "1,600", "1,100", "1,000", "2,500", "**2,000**", "2.00", "1.25"],
        ["tensor", "decode", "160", "110", "100", "250", "**150**", "1.50", "0.94"],
        ["expert", "prefill", "-", "1,100", "1,000", "-", "-", "-", "-"],
        ["expert", "decode", "-", "110", "100", "-", "-", "-", "-"],
    ]
    four = [row | {"gpus": 4} for row in tensor]
    write("h100-e2e-parallel-4", *four, vllm="0.33.0")
    assert tables.section("engines_parallel_4").startswith("Four ")
    assert ", vLLM 0.33.0:" in tables.section("engines_parallel_4")


def step(format, us, shape="qwen3", **peers):
    row = {"shape": shape, "tokens": 4096, "rank": 64, "tenants": 1, "format": format}
    times = {name: {"fwdbwd_us": time} for name, time in peers.items()}
    return row | {"ours_us": us, "peers": times}


def test_steps_beside_peers_and_beside_quantized_weights(write):
    """Columns that no row has are left out, as before they were measured."""
    for name in ("training_peers_64", "from training-64", "training_quantized"):
        assert tables.section(name) == tables.files.AWAITED
    write("h100-training-64", step("bf16", 2000.0, yard=3000.0, unsloth=4000.0))
    head, _, titles, _, row, *_ = tables.section("training_peers_64").splitlines()
    assert head == "NVIDIA H200:"
    assert titles == "| layer | tokens | moelora | torch._grouped_mm | Unsloth |"
    assert row == "| Qwen3-30B-A3B | 4096 | **2,000** | 3,000 | 4,000 |"
    alone = step("bf16", 9.0, "mixtral")  # of no other format
    write("h200-training", step("bf16", 2000.0), step("int4", 2200.0), step("fp8", 1900.0), alone)
    _, _, titles, _, row, *_ = tables.section("training_quantized").splitlines()
    assert titles == "| layer | tokens | INT4 | FP8 |"
    assert row == "| Qwen3-30B-A3B | 4096 | 1.10 | 0.95 |"
