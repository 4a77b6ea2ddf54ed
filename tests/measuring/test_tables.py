"""Tables of engines, before their files are there, while rows are missing, and when all are."""

import pytest

from benchmarks import tables
from moelora.bench import results


@pytest.fixture
def write(monkeypatch, tmp_path):
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    return lambda file, *rows, **meta: results.write(tables.path_of(file), list(rows), **meta)


def speed(engine, lora, batch, prefill, decode, **more):
    row = {"topic": "speed", "engine": engine, "lora_enabled": lora, "batch": batch}
    return row | {"prefill_tok_s": prefill, "decode_tok_s": decode, **more}


LORA = (
    speed("vllm", True, "base", 1100, 110),
    speed("vllm", True, "4 mixed", 1000, 100),
    speed("moelora", True, "base", 2500, 250),
    speed("moelora", True, "4 mixed", 2000, 150),
)
ANSWERS = {"topic": "answers", "compared": "moelora, vllm", "ok": True}


def cells(table):
    return [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]


def test_formats_without_speeds_are_left_out(write):
    assert tables.section("engines_int4") == tables.AWAITED
    assert cells(tables.section("engine_ranges")) == []
    write("h200-e2e-fp8", speed("vllm", False, "base", 1600, 160), *LORA)
    write("h200-e2e-int4", ANSWERS)
    assert tables.section("engines_int4") == tables.AWAITED
    fp8 = [
        ["vLLM 0.26", "FP8, Qwen3-30B-A3B", "12", "prefill", "1,600", "1,000", "**2,000**", "2.00"],
        ["vLLM 0.26", "FP8, Qwen3-30B-A3B", "12", "decode", "160", "100", "**150**", "1.50"],
    ]
    assert cells(tables.section("engine_ranges")) == fp8
    write("h200-e2e-int4", ANSWERS, *LORA)
    assert cells(tables.section("engine_ranges")) == [
        *fp8,
        ["vLLM 0.26", "INT4, Qwen3-30B-A3B", "12", "prefill", "-", "1,000", "**2,000**", "2.00"],
        ["vLLM 0.26", "INT4, Qwen3-30B-A3B", "12", "decode", "-", "100", "**150**", "1.50"],
    ]
    assert len(cells(tables.section("engines_int4"))) == 4


def test_an_engine_of_sglang_stands_beside_the_faster_of_its_ways(write):
    def server(engine, batch, *rates):
        return {"topic": "speed", "engine": engine, "batch": batch} | dict(
            zip(("prefill_tok_s", "decode_tok_s"), rates, strict=True)
        )

    rows = [
        server("sglang, no LoRA", "base", 3000, 300),
        server("sglang", "4 mixed", 500, 50),
        server("sglang, virtual experts", "4 mixed", 1000, 100),
        server("moelora", "4 mixed", 2000, 150),
    ]
    write("h200-e2e-sglang", *rows, sglang="0.5.16")
    assert cells(tables.section("engine_ranges")) == [
        ["SGLang 0.5.16", "bf16, Qwen3-30B-A3B", "12", *more]
        for more in (
            ["prefill", "3,000", "1,000", "**2,000**", "2.00"],
            ["decode", "300", "100", "**150**", "1.50"],
        )
    ]


def test_two_gpus_have_a_row_for_each_way_and_phase(write):
    assert tables.section("engines_parallel") == tables.AWAITED
    write("h100-e2e-parallel", ANSWERS)
    assert tables.section("engines_parallel") == tables.AWAITED
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
