"""The benchmark of servers under load, on a pretended vLLM."""

import json

import pytest

pytest.importorskip("tomllib")

from safetensors.torch import load_file  # noqa: E402

from benchmarks import tables  # noqa: E402
from benchmarks.serving import __main__ as serving  # noqa: E402
from benchmarks.serving.__main__ import main  # noqa: E402

SERVER = """
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200), self.end_headers()
ours = "1" in (os.environ.get("MOELORA_VLLM"), os.environ.get("MOELORA_SGLANG"))
print("moelora: version" if ours else "", os.environ.get("TRITON_CACHE_DIR"), sys.argv, flush=True)
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Health).serve_forever()
"""
# SGLang: adapters are loaded by the base model's load format, once plugins have set their hooks.
SGLANG = {
    "launch_server.py": """
import importlib.metadata, sys
from sglang.srt.lora.lora import LoRAAdapter
for entry in importlib.metadata.entry_points(group="sglang.srt.plugins"):
    entry.name == "moelora" or entry.load()()
if "--lora-paths" in sys.argv:
    LoRAAdapter(sys.argv[sys.argv.index("--load-format") + 1]).initialize_weights()
"""
    + SERVER,
    "srt/lora/lora.py": """
import dataclasses
@dataclasses.dataclass
class LoadConfig:
    load_format: str
class LoRAAdapter:
    def __init__(self, load_format):
        self.load_config = LoadConfig(load_format)
    def initialize_weights(self):
        assert self.load_config.load_format == "auto", "DUMMY should use DummyModelLoader"
""",
    "srt/plugins/hook_registry.py": """
import enum, importlib
HookType = enum.Enum("HookType", "AROUND")
class HookRegistry:
    def register(target, hook, kind):
        module, owner, name = target.rsplit(".", 2)
        owner = getattr(importlib.import_module(module), owner)
        original = getattr(owner, name)
        setattr(owner, name, lambda *args: hook(original, *args))
""",
}
BENCH = """
def add_cli_args(parser):
    for name in ("base-url", "model", "tokenizer", "dataset-name", "random-input-len", "seed",
                 "random-output-len", "num-prompts", "temperature", "percentile-metrics",
                 "metric-percentiles", "ready-check-timeout-sec", "lora-assignment",
                 "request-rate", "max-concurrency", "random-range-ratio", "burstiness"):
        parser.add_argument("--" + name)
    parser.add_argument("--disable-tqdm", action="store_true")
    parser.add_argument("--goodput", nargs="+")
    parser.add_argument("--lora-modules", nargs="+")
get_tokenizer = print
async def main_async(args):
    print(args.base_url, args.lora_modules)
    return {"completed": int(args.num_prompts), "failed": 0, "median_ttft_ms": 1.23456,
            "p99_ttft_ms": None, "median_tpot_ms": 32.0, "not kept": 3,
            "duration": (args.lora_modules or []).count("a0-r4")}
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the benchmark with options; what it wrote."""
    for name, text in {
        "vllm/__init__.py": "",
        "vllm/entrypoints/cli/main.py": SERVER,
        "vllm/benchmarks/serve.py": BENCH,
        "sglang/__init__.py": "",
        **{f"sglang/{name}": text for name, text in SGLANG.items()},
    }.items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))

    def run(*options, code=0):
        out = tmp_path / "benchmarks/results/h100-serving.json"
        words = ["--work", str(tmp_path / "work"), "--out", str(out), *options]
        assert main(words) == code, out.with_suffix(".log").read_text()
        return json.loads(out.read_text())

    return run


def section(name):
    """A table without the spaces that align its columns."""
    return " ".join(tables.section(name).split())


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
    assert "| bf16, micro | decode of 64 | 2,000 | - | **2,000** |" in section("serving_rates")
    assert "| vllm + moelora | load_8 | 4 |" in section("serving_all")


def test_servers_that_are_up_together_take_turns(run):
    words = ("--layers", "1", "--at-once", "--only-adapters", "--workloads", "warm_up,decode_64")
    both = ("vllm + moelora", "vllm without LoRA")
    written = run("--model", "micro", *words, "--engines", ",".join(both), "--server-args", "--x")
    rows = written["cases"]
    assert [(r["engine"], r["workload"], r["adapters"]) for r in rows] == [
        (name, load, 4 * (name == both[0])) for load in ("warm_up", "decode_64") for name in both
    ]
    assert all("served" not in row for row in rows) and rows[0]["lora_enabled"]
    assert [stage["end"] for stage in written["meta"]["stages"]] == [
        "ok",
        "ok",
        "stopped",
        "stopped",
    ]
    assert written["meta"]["server_args"] == ["--x"]


def test_a_server_that_did_not_answer_is_named(run, tmp_path):
    more = {"engines": {"mute": {"command": ["sleep", "60"]}}}
    (tmp_path / "more.json").write_text(json.dumps(more))
    words = ("--model", "micro", "--layers", "1", "--more", str(tmp_path / "more.json"))
    written = run(*words, "--engines", "mute", "--start-s", "0.5", code=1)
    (end,) = (s["end"] for s in written["meta"]["stages"] if s["stage"] == "serve mute")
    assert end == "did not answer within 0.5 s" and not written["cases"]


def test_servers_of_sglang_started_together(run, tmp_path, monkeypatch):
    """Requests call an adapter `model:adapter`: under another name SGLang runs the base model. The
    model has no weights, which SGLang alone would expect of adapters, too."""
    monkeypatch.setenv("TRITON_CACHE_DIR", "/warm")
    words = ("--model", "micro", "--layers", "1", "--ranks", "4", "--workloads", "decode_64")
    written = run(*words, "--at-once", "--engines", "sglang + moelora,sglang without LoRA")
    rows = [(row["engine"], row["adapters"], "start_s" in row) for row in written["cases"]]
    ours = "sglang + moelora"
    assert rows == [(ours, 4, False), ("sglang without LoRA", 0, False), (ours, 0, False)]
    assert all("served" not in row for row in written["cases"])
    said = (tmp_path / "benchmarks/results/h100-serving.log").read_text()
    base = tmp_path / "work/model/base"
    assert f"http://127.0.0.1:8100 ['{base}:a0-r4', '{base}:a1-r4'" in said
    assert "http://127.0.0.1:8101 None" in said
    assert "'--max-loras-per-batch', '5'" in said, "one slot is the base model's"
    assert "version /warm ['" in said, "how long servers take to start is not measured"
    monkeypatch.setattr(tables.files, "ROOT", tmp_path)
    assert "| bf16, micro, 1 of its layers | decode of 64 |" in section("serving_rates")


def test_a_server_that_somebody_else_started(run):
    words = ("--url", "http://127.0.0.1:1", "--engines", "mine", "--served-model", "law")
    rows = run(*words, "--lora-modules", "a,b", "--workloads", "load_8")["cases"]
    assert [(r["engine"], r["workload"], r["adapters"]) for r in rows] == [("mine", "load_8", 2)]


def test_more_adapters_than_slots_in_an_engine_of_a_file(run, tmp_path, monkeypatch):
    """Words of its own for both pools, its load, and experts whose format wants real weights."""
    python, *command = json.loads((serving.HERE / "engines.json").read_text())["vllm"]["command"]
    engine = {"command": [python, *command], "environment": {"MOELORA_VLLM": "{rank}"}}
    engine |= {"lora": ["--slots", "{slots}", "{modules}", "model"], "host": ["--host", "{host}"]}
    load = {"zipf": 1, "input": 9, "output": 2, "prompts": 3, "range_ratio": 0.5, "source": "ours"}
    more = {"engines": {"mine": engine}, "workloads": {"ours": load, "few": load | {"adapters": 2}}}
    (tmp_path / "mine.json").write_text(json.dumps(more))
    pool = ("--adapters", "8", "--max-loras", "2", "--max-cpu-loras", "4", "--ranks", "4,2")
    words = ("--model", "micro", "--format", "nvfp4", "--more", str(tmp_path / "mine.json"))
    written = run(*words, *pool, "--engines", "mine", "--workloads", "ours,few")
    row, few = written["cases"]
    assert (row["adapters"], row["max_loras"], row["max_cpu_loras"], row["seed"]) == (8, 2, 4, 0)
    assert row["duration"] == 32 and "source" not in row, "the first is named 4 * 8 / 1 times"
    assert (few["adapters"], few["duration"]) == (2, 8)
    assert written["meta"]["slo"] == ["ttft:500", "tpot:50"]
    said = (tmp_path / "benchmarks/results/h100-serving.log").read_text()
    made = tmp_path / "work/model"
    modules = [f"a{i}-r{rank}={made}/adapters/a{i}-r{rank}" for i, rank in enumerate((4, 2) * 4)]
    assert str(["--slots", "2", *modules, "model", "--host", "4"])[1:] in said
    tensors = load_file(made / "base/layer-01.safetensors")
    scale = tensors["model.layers.1.mlp.experts.0.up_proj.weight_scale"].float()
    assert "dummy" not in said and scale.min() >= 0 and scale.max() > 0
    monkeypatch.setattr(tables.files, "ROOT", tmp_path)
    assert "| NVFP4, micro | ours | 8 | 2 | 1.2 |" in section("serving_adapters")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "micro", "--format", "mxfp4"], "micro has no mxfp4"),
        (["--model", "gpt-oss-20b", "--format", "int4"], "gpt-oss-20b has only mxfp4"),
        (["--adapters", "4", "--max-loras", "8"], "1 <= --max-loras <= --max-cpu-loras"),
        (["--adapters", "8", "--max-loras", "4", "--max-cpu-loras", "2"], "--max-cpu-loras"),
        (["--ranks", "0"], "positive --ranks"),
        (["--workloads", "none"], "--workloads has ['none'], known are first_minute"),
        (["--url", "http://127.0.0.1:1"], "the server's --served-model"),
        (["--more", "nowhere.json"], "--more nowhere.json: "),
        ({"workloads": {"mine": {"zipff": 1}}}, "workload mine has ['zipff'], known are adapters"),
        ({"engines": {"mine": {"lora": []}}}, "engines ['mine'] have no command"),
    ],
)
def test_what_cannot_be_measured_is_said_at_once(tmp_path, capsys, words, message):
    if isinstance(words, dict):
        (tmp_path / "more.json").write_text(json.dumps(words))
        words = ["--more", str(tmp_path / "more.json")]
    with pytest.raises(SystemExit):
        main([*words, "--work", str(tmp_path / "work"), "--out", str(tmp_path / "x.json")])
    assert message in capsys.readouterr().err and not (tmp_path / "work").exists()
