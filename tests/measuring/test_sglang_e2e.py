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
import importlib.metadata, json, os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

words = sys.argv[1:]
names = [w.split("=")[0] for w in words if w.startswith("lora") and "=" in w]
if "sglang.srt.plugins" in importlib.metadata.entry_points().groups:
    if os.environ["MOELORA_SGLANG"] == "1":
        print("moelora: version 1 runs MoE layers with LoRA", flush=True)
print(os.environ.get("SAY", ""), flush=True)

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


def test_a_layer_that_fell_back_is_found(tmp_path, server, monkeypatch):
    monkeypatch.setenv("SAY", "moelora: no reason; SGLang's own path runs")
    code, written, _ = run(tmp_path, "--only", "speed", "--servers", "moelora", "--sequences", "1")
    assert code == 1
    assert [row["ok"] for row in topics(written, "layers")] == [False]
