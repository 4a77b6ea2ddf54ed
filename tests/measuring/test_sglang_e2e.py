"""The end-to-end benchmark of SGLang: all its stages on a pretended server."""

import json

import pytest

pytest.importorskip("tomllib")

from e2e import pretend, topics  # noqa: E402

from benchmarks import sglang_e2e  # noqa: E402

REFERENCE = """\
import json, sys
assert json.load(open(sys.argv[-1]))["names"][0] == "base"
print("base  |dlp| median 0.0100 p95 0.2   against the wrong model 1.0 ok")
print("reference check OK")
print("judged", *sys.argv[1:])
"""

SERVER = """\
import importlib.metadata, json, os, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

words = sys.argv[1:]
names = [w.split("=")[0] for w in words if w.startswith("lora") and "=" in w]
if "sglang.srt.plugins" in importlib.metadata.entry_points().groups:
    if os.environ["MOELORA_SGLANG"] == "1":
        print("moelora: version 1 runs MoE layers with LoRA", flush=True)
print(os.environ.get("SAY", ""), flush=True)
print("options:", *words[words.index("--port") + 2:], flush=True)
if os.environ.get("FAIL", "-") in words:
    sys.exit("no such thing")
if os.environ.get("HANG", "-") in words:
    time.sleep(60)

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def answer(self, what):
        body = json.dumps(what).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer({})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        who = asked.get("lora_path") or [None] * len(asked["input_ids"])
        new = asked["sampling_params"]["max_new_tokens"]
        self.answer([self.one(ids, w, new) for ids, w in zip(asked["input_ids"], who)])

    def one(self, ids, who, new):
        shift = 1 + names.index(who) if who else 0
        tokens = [(sum(ids) + shift + n) % 100 for n in range(new)]
        return {"output_ids": tokens, "meta_info": {
            "input_token_logprobs": [[None, ids[0], None]] +
                                    [[-1.0 - shift, i, None] for i in ids[1:]],
            "output_token_logprobs": [[-0.1, t, None] for t in tokens],
            "output_top_logprobs": [[[-0.1, t, None], [-3.0, t + 1, None]] for t in tokens],
        }}

port = int(words[words.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def server(tmp_path, monkeypatch):
    pretend(monkeypatch, tmp_path, REFERENCE)
    package = tmp_path / "site/sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(SERVER)
    monkeypatch.syspath_prepend(tmp_path / "site")


def run(tmp_path, *options):
    out = tmp_path / "out.json"
    arguments = ["--out", out, "--work", tmp_path / "work", "--reps", 2]
    code = sglang_e2e.main([str(a) for a in (*arguments, "--port", 30345, *options)])
    return code, json.loads(out.read_text()), out.with_suffix(".log").read_text()


@pytest.mark.slow
def test_all_servers(tmp_path, server):
    code, written, log = run(tmp_path)
    assert code == 0, log
    assert {stage["end"] for stage in written["meta"]["stages"]} == {"ok"}
    assert [(r["engine"], r["batch"]) for r in topics(written, "speed")] == [
        ("sglang, no LoRA", "base"),
        *((name, batch) for name in ("sglang", "sglang, virtual experts", "moelora")
          for batch in ("base", "4 mixed")),
    ]  # fmt: skip
    for row in topics(written, "speed"):
        assert all(row[f"{n}_tok_s"] > 0 for n in ("prefill", "decode_1", "decode_16", "decode"))
        assert row["ttft_ms"] > 0 and "tpot_1_ms" in row
    assert [row["wanted"] for row in topics(written, "target")] == [1.0, 1.3, 1.3]
    assert {row["compared"] for row in topics(written, "answers")} == {
        "sglang: mixed, each alone",
        "moelora: mixed, each alone",
        "moelora, sglang",
        "moelora, sglang: mixed",
    }
    assert all(row["ok"] for row in topics(written, "acts"))
    assert topics(written, "distance") == [
        {"topic": "distance", "who": "base", "moelora": 0.01, "sglang": 0.01, "ok": True}
    ]


@pytest.mark.slow
def test_the_second_design_of_sglang(tmp_path, server):
    servers = "sglang, v2;moelora, v2"
    words = ("--servers", servers, "--checked", "sglang, v2", "--sequences", "1")
    code, written, log = run(tmp_path, *words)
    assert code == 0, log
    assert {row["engine"] for row in topics(written, "speed")} == {*servers.split(";")}
    compared = {row["compared"] for row in topics(written, "answers")}
    assert "moelora, v2, sglang, v2: mixed" in compared
    (row,) = topics(written, "distance")
    assert row["moelora, v2"] == row["sglang, v2"] == 0.01
    assert [row["what"] for row in topics(written, "target")] == [
        "prefill, moelora, v2 4 mixed / sglang, v2 4 mixed"
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "format, names, tolerance",
    [
        ("fp8", ("sglang, v2", "moelora, v2"), "--tol 0.5 "),
        ("modelopt", ("sglang, marlin", "moelora, marlin"), ""),
    ],
)
def test_quantized_experts(tmp_path, server, format, names, tolerance):
    """Judged by the same numbers unquantized; quantized activations have a tolerance of their
    own."""
    words = ("--servers", ";".join(names), "--checked", names[0], "--sequences", "1")
    code, written, log = run(tmp_path, *words, "--format", format)
    assert code == 0, log
    stages = [stage["stage"] for stage in written["meta"]["stages"]]
    assert stages.count("quantize model") == 2
    assert {row["run"] for row in topics(written, "reference")} == {*names}
    for row in topics(written, "reference"):
        said = row["said"][-1]
        assert row["ok"] and said.startswith(f"judged {tolerance}--model")
        assert f"model-{format}-dense" in said


def test_answers_of_another_backend_are_compared_with_the_runner_that_replaces_it(tmp_path, server):
    words = ("--only", "answers", "--checked", "sglang, v2 cutedsl", "--sequences", "1")
    code, written, log = run(tmp_path, *words)
    assert code == 0, log
    compared = {row["compared"] for row in topics(written, "answers")}
    assert "moelora, v2, sglang, v2 cutedsl: mixed" in compared


def test_a_layer_that_fell_back_is_found(tmp_path, server, monkeypatch):
    monkeypatch.setenv("SAY", "moelora: no reason; SGLang's own path runs")
    code, written, _ = run(tmp_path, "--only", "speed", "--servers", "moelora", "--sequences", "1")
    assert code == 1
    assert [row["ok"] for row in topics(written, "layers")] == [False]


def test_a_server_that_does_not_start_costs_its_own_figures(tmp_path, server, monkeypatch):
    monkeypatch.setenv("FAIL", "--lora-use-virtual-experts")
    servers = "sglang, virtual experts;sglang, no LoRA"
    words = ("--only", "speed", "--servers", servers, "--sequences", "1")
    code, written, log = run(tmp_path, *words)
    assert code == 1
    assert [row["engine"] for row in topics(written, "speed")] == ["sglang, no LoRA"]
    assert "no such thing" in log
    first, second = written["meta"]["stages"][1:]
    assert first["end"] == "exit status 1" and second["end"] == "ok"


def test_servers_that_start_together(tmp_path, server, monkeypatch):
    monkeypatch.setenv("FAIL", "--lora-use-virtual-experts")
    servers = "sglang, virtual experts;sglang, no LoRA;moelora"
    words = ("--only", "speed", "--servers", servers, "--sequences", "2", "--at-once", "3")
    _, written, log = run(tmp_path, *words)
    assert {row["engine"] for row in topics(written, "speed")} == {"sglang, no LoRA", "moelora"}, (
        log
    )
    assert [stage["end"] for stage in written["meta"]["stages"][1:]] == [
        "exit status 1",
        "ok",
        "ok",
    ]


def test_all_servers_have_the_same_options(tmp_path, server):
    servers = "sglang, no LoRA;sglang, v2;moelora, v2"
    _, written, _ = run(tmp_path, "--only", "speed", "--servers", servers, "--sequences", "2")
    options = written["meta"]["server_options"]
    assert "--disable-prefill-cuda-graph" in options
    for name in ("sglang-no-LoRA", "sglang-v2", "moelora-v2"):
        assert f"options: {options}" in (tmp_path / f"work/{name}.log").read_text()


def test_a_server_that_takes_too_long_is_stopped(tmp_path, server, monkeypatch):
    hangs = "sglang, virtual experts"
    monkeypatch.setenv("HANG", "--lora-use-virtual-experts")
    is_up = sglang_e2e.Bench.is_up

    def patient(bench, name, *server):
        bench.args.start_s = 0.5 if name == hangs else 240
        return is_up(bench, name, *server)

    monkeypatch.setattr(sglang_e2e.Bench, "is_up", patient)
    words = ("--only", "speed", "--servers", f"{hangs};sglang, no LoRA", "--sequences", "1")
    code, written, _ = run(tmp_path, *words)
    assert code == 1
    ends = [stage["end"] for stage in written["meta"]["stages"][1:]]
    assert ends == ["not up in time", "ok"]


def test_no_stage_starts_after_the_budget(tmp_path, server):
    code, written, _ = run(tmp_path, "--budget-s", "0")
    assert code == 1
    none = {"stage": "make model", "seconds": 0, "end": "no time left"}
    assert written["meta"]["stages"] == [none, none]
