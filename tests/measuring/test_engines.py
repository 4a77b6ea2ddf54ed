"""The benchmarks of whole engines: every stage once, on stand-ins of vLLM and SGLang; and which
differences of their answers rounding explains."""

import re
import shutil

import pytest

pytest.importorskip("tomllib")

from e2e import runner, topics  # noqa: E402

from benchmarks import sglang_e2e, vllm_e2e, vllm_parallel  # noqa: E402
from benchmarks.engines import answers, jobs  # noqa: E402


@pytest.fixture
def run(tmp_path, monkeypatch):
    return runner(tmp_path, monkeypatch)


@pytest.mark.slow
def test_one_gpu(run):
    code, written, log = run(vllm_e2e.main, "--format fp8")
    assert code == 0, log
    assert {stage["end"] for stage in written["meta"]["stages"]} == {"ok"}
    served = {row["run"]: row["served"] for row in topics(written, "layers")}
    assert all(served[name] == name.startswith("moelora") for name in served) and len(served) == 2
    answers = topics(written, "answers")
    assert {row["compared"] for row in answers} >= {"moelora, vllm", "moelora, vllm: mixed"}
    assert all(row["same_tokens"] == row["requests"] == 6 for row in answers)
    distance = {"topic": "distance", "who": "base", "moelora": 0.01, "vllm": 0.01, "ok": True}
    assert topics(written, "distance") == [distance]


def bits(written):
    counts = ("rows", "matched", "differing", "unmatched")
    return {row["run"]: [row[n] for n in counts] for row in topics(written, "bits")}


@pytest.mark.slow
def test_batch_invariance(run):
    code, written, log = run(vllm_e2e.main, "--only invariance")
    assert code == 0, log
    runs = ("moelora", "vllm", "moelora invariant", "vllm invariant")
    assert bits(written) == dict.fromkeys(runs, [5, 5, 0, 0])


@pytest.mark.slow
def test_every_way_of_several_gpus_is_held_against_float32(run):
    """The stand-in of vLLM cannot run expert parallel without data parallel."""
    code, written, log = run(vllm_parallel.main, "--gpus 2 --at-once 6")
    assert code == 1 and "no experts here" in log
    ends = {stage["stage"]: stage["end"] for stage in written["meta"]["stages"]}
    failed = {name for name, end in ends.items() if end != "ok"}
    assert failed == {"vllm expert", "moelora expert"}
    compared = {row["compared"] for row in topics(written, "answers")}
    ways = ("tensor", "fully sharded", "data and expert")
    assert {f"moelora {way}: mixed, each alone" for way in ways} < compared
    assert all(row["ok"] for row in topics(written, "answers"))
    slots = {row["run"]: row["slots"] for row in topics(written, "layers") if "slots" in row}
    assert len(slots) == 4 and all(s == [[1, 2, 3, 4], [4, 3, 2, 1]] for s in slots.values())
    assert len(topics(written, "reference")) == 6 and len(topics(written, "distance")) == 3
    names = ("moelora data and expert, eager", "vllm data and expert, eager")
    assert bits(written) == dict.fromkeys(names, [5, 5, 0, 0])


@pytest.mark.slow
def test_servers_of_sglang(run):
    code, written, log = run(sglang_e2e.main, "--port 30345")
    assert code == 0, log
    assert {stage["end"] for stage in written["meta"]["stages"]} == {"ok"}
    compared = {row["compared"] for row in topics(written, "answers")}
    assert compared >= {"moelora, v2, sglang, v2", "moelora, v2: mixed, each alone"}
    assert all(row["ok"] for topic in ("acts", "distance") for row in topics(written, topic))


def test_a_layer_that_fell_back_is_found(run, monkeypatch):
    monkeypatch.setenv("SAY", "moelora: no reason; SGLang's own path runs")
    code, written, _ = run(sglang_e2e.main, "--port 30445 --alone")
    assert code == 1
    assert {row["run"]: row["ok"] for row in topics(written, "layers")} == {"moelora, v2": False}
    (compared,) = {row["compared"] for row in topics(written, "answers")}
    assert compared == "moelora, v2: mixed, each alone"


def test_a_stage_ends_at_its_deadline_and_none_starts_after_the_budget(run, tmp_path):
    job = jobs.Job("sleeper", [shutil.which("sleep"), 60], tmp_path, 0.2)
    assert re.fullmatch(r"stopped after \d+ s", job.wait()["end"])
    assert job.process.returncode == -9
    code, written, _ = run(vllm_e2e.main, "--budget-s 0 --only invariance")
    assert code == 1
    (stage,) = written["meta"]["stages"]
    assert stage == {"stage": "make tiny", "seconds": 0, "end": "no time left"}


def reply(tokens, prompt=(-1.0, -2.0), top=None):
    return {"prompt": list(prompt), "tokens": tokens, "top": top or [{str(t): 0.0} for t in tokens]}


@pytest.mark.parametrize(
    ("gap", "wide", "same", "ties", "ok"),
    [
        (0.2, 1, 0, 1, True),
        (2.0, 1, 0, 0, False),
        (2.0, 1, 5, 0, True),  # every hundredth step may be beyond a near-tie
        (2.0, 4, 5, 0, False),
    ],
)
def test_replies_part_at_near_ties_or_by_chance(gap, wide, same, ties, ok):
    ours = reply([1, 2], top=[{"1": 0.0}, {"2": 0.0, "7": -gap}])
    theirs = reply([1, 7], top=[{"1": 0.0}, {"7": 0.0, "2": -gap}])
    replies = [[one] * wide + [reply([1] * 16)] * same for one in (ours, theirs)]
    (row,) = answers.compare("x", ["base"], replies[:1], replies[1:])
    assert (row["same_tokens"], row["near_ties"], row["ok"]) == (same, ties, ok)
    assert row["worst_gap"] == gap and row["steps"] == 2 * wide + 16 * same


def test_wrong_models_and_adapters_that_do_nothing_are_told():
    base, moved = [reply([1])], [reply([1], (-1.0, -2.5))]
    (row,) = answers.compare("x", ["base"], [moved], [base])
    assert row["prompt_median"] == 0.25 and not row["ok"]
    replies = [base, moved, base]
    check = {"names": ["base", "a", "b"], "alone": replies, "mixed": replies}
    assert [row["ok"] for row in answers.adapters_act("x", check)] == [True, False]
    said = {"moelora": {"a": 0.08, "b": 0.09}, "vllm": {"a": 0.07, "b": 0.07}}
    assert [row["ok"] for row in answers.judge(said)] == [True, False]


def test_as_many_steps_differ_as_chance_allows_and_a_near_tie_is_seen_from_all_but_a_hundredth():
    assert [answers.by_chance(n) for n in (5, 6, 35, 36, 82, 83)] == [0, 1, 1, 2, 2, 3]
    assert [answers.near_tie([0.6] * far + [0.0] * 400) for far in (4, 5)] == [answers.TIE, 0.6]
