"""The benchmark of servers under load, on a pretended vLLM."""

import json

import pytest

pytest.importorskip("tomllib")

from benchmarks import tables  # noqa: E402
from benchmarks.serving.__main__ import main  # noqa: E402

SERVER = """
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200), self.end_headers()
print("moelora: version" if os.environ["MOELORA_VLLM"] == "1" else "", sys.argv, flush=True)
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Health).serve_forever()
"""
BENCH = """
def add_cli_args(parser):
    for name in ("base-url", "model", "tokenizer", "dataset-name", "random-input-len", "seed",
                 "random-output-len", "num-prompts", "temperature", "percentile-metrics",
                 "metric-percentiles", "ready-check-timeout-sec", "lora-assignment",
                 "request-rate", "max-concurrency"):
        parser.add_argument("--" + name)
    parser.add_argument("--disable-tqdm", action="store_true")
    parser.add_argument("--goodput", nargs="+")
    parser.add_argument("--lora-modules", nargs="+")
async def main_async(args):
    return {"completed": int(args.num_prompts), "failed": 0, "median_ttft_ms": 1.23456,
            "p99_ttft_ms": None, "median_tpot_ms": 32.0, "not kept": 3}
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the benchmark with options; what it wrote."""
    for name, text in {
        "vllm/__init__.py": "",
        "vllm/entrypoints/cli/main.py": SERVER,
        "vllm/benchmarks/serve.py": BENCH,
    }.items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))

    def run(*options):
        out = tmp_path / "benchmarks/results/h100-serving.json"
        code = main(["--work", str(tmp_path / "work"), "--out", str(out), *options])
        assert code == 0, out.with_suffix(".log").read_text()
        return json.loads(out.read_text())

    return run


def test_each_engine_runs_each_load_alone(run, tmp_path, monkeypatch):
    """Rows: all loads with adapters, and without adapters those that show what LoRA costs then."""
    engines = "vllm + moelora,vllm without LoRA"
    written = run("--model", "micro", "--workloads", "decode_64,load_8", "--engines", engines)
    assert [(r["engine"], r["workload"], r["adapters"]) for r in written["cases"]] == [
        ("vllm + moelora", "decode_64", 4),
        ("vllm + moelora", "load_8", 4),
        ("vllm + moelora", "decode_64", 0),
        ("vllm without LoRA", "decode_64", 0),
        ("vllm without LoRA", "load_8", 0),
    ]
    first = written["cases"][0]
    assert first["median_ttft_ms"] == 1.235 and "p99_ttft_ms" not in first and first["start_s"] > 0
    assert all("served" not in row for row in written["cases"])
    assert {stage["end"] for stage in written["meta"]["stages"]} == {"ok", "stopped"}
    monkeypatch.setattr(tables.files, "ROOT", tmp_path)
    assert "| bf16, micro | decode of 64 | 2,000 | - | **2,000** |" in tables.section(
        "serving_rates"
    )
    assert "| vllm + moelora | load_8 | 4 |" in tables.section("serving_all")


def test_a_server_that_somebody_else_started(run):
    words = ("--url", "http://127.0.0.1:1", "--engines", "mine", "--served-model", "law")
    rows = run(*words, "--adapters", "a,b", "--workloads", "load_8")["cases"]
    assert [(r["engine"], r["workload"], r["adapters"]) for r in rows] == [("mine", "load_8", 2)]
