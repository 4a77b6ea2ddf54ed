"""The benchmarks of whole engines: every stage once, on a pretended vLLM and SGLang."""

import re
import shutil
import sys
import threading
from http.server import HTTPServer, SimpleHTTPRequestHandler

import pytest

pytest.importorskip("tomllib")

from e2e import runner, topics  # noqa: E402

from benchmarks import sglang_e2e, vllm_e2e, vllm_parallel  # noqa: E402
from benchmarks.engines import jobs  # noqa: E402


@pytest.fixture
def run(tmp_path, monkeypatch):
    return runner(tmp_path, monkeypatch)


@pytest.mark.slow
def test_one_gpu(run):
    code, written, log = run(vllm_e2e, "--format", "fp8")
    assert code == 0, log
    assert {stage["end"] for stage in written["meta"]["stages"]} == {"ok"}
    served = {row["run"]: row["served"] for row in topics(written, "layers")}
    assert all(served[name] == name.startswith("moelora") for name in served) and len(served) == 2
    answers = topics(written, "answers")
    assert {row["compared"] for row in answers} >= {"moelora, vllm", "moelora, vllm: mixed"}
    assert all(row["same_tokens"] == row["requests"] == 6 for row in answers)
    distance = {"topic": "distance", "who": "base", "moelora": 0.01, "vllm": 0.01, "ok": True}
    assert topics(written, "distance") == [distance]


@pytest.mark.slow
def test_batch_invariance(run):
    code, written, log = run(vllm_e2e, "--only", "invariance")
    assert code == 0, log
    rows = topics(written, "bits")
    runs = ["moelora", "vllm", "moelora invariant", "vllm invariant"]
    assert [row["run"] for row in rows] == runs
    for row in rows:
        assert (row["layers"], row["rows"], row["matched"]) == (1, 5, 5)
        assert row["differing"] == row["unmatched"] == 0


@pytest.mark.slow
def test_every_way_of_several_gpus_is_held_against_float32(run, tmp_path, monkeypatch):
    """The pretended vLLM cannot run expert parallel without data parallel. Engines whose rows are
    compared take long: references of others that run at the same time do not wait for them."""
    awaited = tmp_path / "work/reference-of-vllm-data-and-expert.log"
    monkeypatch.setenv("AWAITED", str(awaited))
    code, written, log = run(vllm_parallel, "--gpus", "2", "--at-once", "6")
    assert code == 1 and "no experts here" in log
    ends = {stage["stage"]: stage["end"] for stage in written["meta"]["stages"]}
    failed = {name for name, end in ends.items() if end == "exit status 1"}
    assert failed == {"vllm expert", "moelora expert"}
    assert set(ends.values()) == {"ok", "exit status 1"}
    compared = {row["compared"] for row in topics(written, "answers")}
    ways = ("tensor", "fully sharded", "data and expert")
    assert {f"moelora {way}: mixed, each alone" for way in ways} < compared
    assert all(row["ok"] for row in topics(written, "answers"))
    slots = {row["run"]: row["slots"] for row in topics(written, "layers") if "slots" in row}
    assert len(slots) == 4 and all(s == [[1, 2, 3, 4], [4, 3, 2, 1]] for s in slots.values())
    assert len(topics(written, "reference")) == 6 and len(topics(written, "distance")) == 3
    counts = ("rows", "matched", "differing", "unmatched")
    found = {row["run"]: [row[n] for n in counts] for row in topics(written, "bits")}
    names = ("moelora data and expert, eager", "vllm data and expert, eager")
    assert found == dict.fromkeys(names, [5, 5, 0, 0])


@pytest.mark.slow
def test_servers_of_sglang(run):
    code, written, log = run(sglang_e2e, "--port", 30345)
    assert code == 0, log
    assert {stage["end"] for stage in written["meta"]["stages"]} == {"ok"}
    compared = {row["compared"] for row in topics(written, "answers")}
    assert compared >= {"moelora, v2, sglang, v2", "moelora, v2: mixed, each alone"}
    assert all(row["ok"] for topic in ("acts", "distance") for row in topics(written, topic))


def test_a_layer_that_fell_back_is_found(run, monkeypatch):
    monkeypatch.setenv("SAY", "moelora: no reason; SGLang's own path runs")
    code, written, _ = run(sglang_e2e, "--port", 30445, "--alone")
    assert code == 1
    assert {row["run"]: row["ok"] for row in topics(written, "layers")} == {"moelora, v2": False}
    assert {row["compared"] for row in topics(written, "answers")} == {
        "moelora, v2: mixed, each alone"
    }


def test_no_stage_starts_after_the_budget(run):
    code, written, _ = run(vllm_e2e, "--budget-s", "0", "--only", "invariance")
    assert code == 1
    assert written["meta"]["stages"] == [
        {"stage": "make tiny", "seconds": 0, "end": "no time left"}
    ]


def test_a_stage_is_stopped_at_its_deadline(tmp_path):
    job = jobs.Job("sleeper", [shutil.which("sleep"), 60], tmp_path, 0.2)
    assert re.fullmatch(r"stopped after \d+ s", job.wait()["end"])
    assert job.process.returncode == -9
    assert jobs.Job("python", [sys.executable, "-c", ""], tmp_path, 240).wait()["end"] == "ok"


def test_a_server_is_asked_even_if_others_took_all_the_time(tmp_path):
    job = jobs.Job("sleeper", [shutil.which("sleep"), 60], tmp_path, 60)
    with HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.handle_request).start()
        assert jobs.is_up(url, job.process, 0)
    assert not jobs.is_up(url, job.process, 0)
    job.stop("stopped")
