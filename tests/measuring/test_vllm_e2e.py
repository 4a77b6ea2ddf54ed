"""The end-to-end benchmark: its comparisons, and all its stages on a pretended vLLM."""

import re
import shutil
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("tomllib")

import e2e_vllm  # noqa: E402
from e2e import topics  # noqa: E402

from benchmarks import vllm_e2e  # noqa: E402
from benchmarks.engines import answers, jobs, vllm_engine  # noqa: E402
from moelora.bench.engine import serving  # noqa: E402


@pytest.fixture
def peers(tmp_path, monkeypatch):
    return e2e_vllm.pack(tmp_path, monkeypatch)


def run(tmp_path, peers, *options):
    return e2e_vllm.run(vllm_e2e, tmp_path, peers, *options)


@pytest.mark.slow
def test_one_gpu(tmp_path, peers):
    code, written, log = run(tmp_path, peers)
    assert code == 0, log
    assert {stage["end"] for stage in written["meta"]["stages"]} == {"ok"}
    assert len(written["meta"]["stages"]) == 12
    rows = topics(written, "speed")
    assert [(r["engine"], r["lora_enabled"], r["batch"]) for r in rows] == [
        ("vllm", False, "base"),
        ("moelora", False, "base"),
        *(("vllm", True, b) for b in ("base", "4 mixed")),
        *(("moelora", True, b) for b in ("base", "4 mixed")),
    ]
    assert all(row["prefill_tok_s"] > 0 and row["decode_tok_s"] > 0 for row in rows)
    assert [row["wanted"] for row in topics(written, "target")] == [1.0, 1.4, 0.92, 1.3]
    said = ["base  |dlp| median 0.0100 p95 0.1", "reference check OK"]
    assert topics(written, "reference")[0]["said"] == said
    served = {row["run"]: row["served"] for row in topics(written, "layers")}
    for how in ("", " compiled"):
        assert served.pop(f"moelora{how}") and not served.pop(f"vllm{how}")
    assert len(served) == 4
    answers = topics(written, "answers")
    assert {row["compared"] for row in answers} >= {"moelora, vllm", "moelora, vllm: mixed"}
    assert all(row["same_tokens"] == row["requests"] == 6 for row in answers)


def test_waiting_kernels_do_not_make_the_gpu_busier():
    """One that was launched early overlaps the one before it; a pause does not count."""
    assert vllm_engine.busy([(5, 9, "launched early"), (0, 6, "before"), (20, 21, "later")]) == 10
    first = {"seconds": [0.5], "new_tokens": 1, "gpu_ms": {"busy": 4.0}}
    decode = {"seconds": [2.0], "new_tokens": 128, "gpu_ms": {"busy": 34.0}}
    found = serving.times_to_tokens({"first_16": first, "decode_16": decode})
    assert found["tpot_busy_16_ms"] == 2.0  # 15 tokens while kernels are timed
    found = serving.times_to_tokens({"first": first | {"gpu_ms": None}, "decode": decode})
    assert set(found) == {"ttft_ms", "tpot_ms"}


def test_an_engine_waits_before_each_repetition():
    """Of prefill, decode and first token, each warmed up before, with adapters and without."""
    asked, results = [], {}
    engine = SimpleNamespace(
        adapters=["law"],
        prompts=lambda lengths: [[0] * n for n in lengths],
        generate=lambda prompts, adapters, new: asked.append((len(prompts), new)),
    )
    turns = [len(asked) for _ in serving.speed(engine, 2, [4], results.update)]
    assert turns == [1, 2, 4, 5, 7, 8, 10, 11, 13, 14, 16, 17]
    assert asked == [(16, 1)] * 3 + [(4, 128)] * 3 + [(4, 1)] * 3 + asked[:9]
    assert set(results["speed"]) == {"base", "1 mixed"}
    assert all(len(one["seconds"]) == 2 for one in results["speed"]["base"].values())


@pytest.mark.slow
def test_batch_invariance(tmp_path, peers):
    code, written, log = run(tmp_path, peers, "--only", "invariance")
    assert code == 0, log
    rows = topics(written, "bits")
    runs = ["moelora", "vllm", "moelora invariant", "vllm invariant"]
    assert [row["run"] for row in rows] == runs
    for row in rows:
        assert (row["layers"], row["rows"], row["matched"]) == (1, 5, 5)
        assert row["differing"] == row["unmatched"] == 0
    compared = {row["compared"] for row in topics(written, "answers")}
    assert compared >= {f"{run}: mixed, each alone" for run in runs}


def test_no_stage_starts_after_the_budget(tmp_path, peers):
    code, written, _ = run(tmp_path, peers, "--budget-s", "0")
    assert code == 1
    assert written["meta"]["stages"] == [{"stage": "unpack", "seconds": 0, "end": "no time left"}]


def test_a_stage_is_stopped_at_its_deadline(tmp_path):
    job = jobs.Job("sleeper", [shutil.which("sleep"), 60], tmp_path, 0.2)
    assert re.fullmatch(r"stopped after \d+ s", job.wait()["end"])
    assert job.process.returncode == -9
    assert jobs.Job("python", [sys.executable, "-c", ""], tmp_path, 240).wait()["end"] == "ok"


def reply(tokens, prompt=(-1.0, -2.0), gap=1.0):
    top = [{str(t): 0.0, "7": -gap} for t in tokens]
    return {"prompt": list(prompt), "tokens": tokens, "top": top}


def test_answers_that_part_where_they_were_close_are_near_ties():
    same, close, far = reply([1, 2]), reply([1, 7], gap=0.2), reply([1, 7], gap=2.0)
    close["top"] = [{"1": 0.0}, {"7": 0.0, "2": -0.2}]
    far["top"] = [{"1": 0.0}, {"7": 0.0, "2": -2.0}]
    other = reply([1, 2], gap=2.0)
    (row,) = answers.compare("x", ["base"], [[same, close]], [[same, same]])
    assert (row["same_tokens"], row["near_ties"], row["ok"]) == (1, 1, True)
    assert row["worst_gap"] == 0.2
    (row,) = answers.compare("x", ["base"], [[same, far]], [[same, other]])
    assert (row["same_tokens"], row["near_ties"], row["ok"]) == (1, 0, False)


def test_answers_of_a_wrong_model_are_told_by_their_prompts():
    (row,) = answers.compare("x", ["base"], [[reply([1], (-1.0, -2.5))]], [[reply([1])]])
    assert row["prompt_median"] == 0.25
    assert not row["ok"]


def test_what_rounding_may_do_is_seen_from_all_prompts():
    near, far = reply([1, 2]), reply([1, 7], gap=2.0)
    far["top"] = [{"1": 0.0}, {"7": 0.0, "2": -0.5}]
    near["top"] = [{"1": 0.0}, {"2": 0.0, "7": -0.5}]
    noisy = [reply([1], (-1.0, -1.0, -1.0)), reply([1], (-1.0, -1.0, -1.6))]
    rows = answers.compare("x", ["base", "a"], [[far], noisy[:1]], [[near], noisy[1:]])
    assert [(row["near_ties"], row["ok"]) for row in rows] == [(1, True), (0, True)]


def test_one_position_far_off_makes_no_near_ties():
    near, far = reply([1, 2], [-1.0] * 400), reply([1, 7], [-1.0] * 400, gap=2.0)
    far["top"] = [{"1": 0.0}, {"7": 0.0, "2": -0.5}]
    near["top"] = [{"1": 0.0}, {"2": 0.0, "7": -0.5}]
    far["prompt"][:4] = [-6.0] * 4  # a hundredth
    (row,) = answers.compare("x", ["base"], [[far]], [[near]])
    assert (row["near_ties"], row["near_tie"], row["ok"]) == (0, answers.TIE, False)
    far["prompt"][4] = -1.6
    (row,) = answers.compare("x", ["base"], [[far]], [[near]])
    assert (row["near_ties"], row["near_tie"], row["ok"]) == (1, 0.6, True)


def test_few_replies_may_part_from_a_wider_gap():
    """As many as there would be, were every hundredth step beyond a near-tie."""

    def parting(step, steps=16):
        """Two replies that part there, from far; `steps` says they do not."""
        ours, theirs = reply([1] * steps), reply([1] * steps)
        for side, token in ((ours, 7), (theirs, 8)):
            if step < steps:
                side["tokens"][step] = token
                side["top"][step] = {"7": -2.0 * (token != 7), "8": -2.0 * (token != 8)}
        return ours, theirs

    def verdict(*steps):
        ours, theirs = zip(*map(parting, steps), strict=True)
        (row,) = answers.compare("x", ["a"], [list(ours)], [list(theirs)])
        wide = sum(step < 16 for step in steps)
        assert row["near_ties"] == 0 and row["same_tokens"] == len(steps) - wide
        assert row["steps"] == sum(min(step + 1, 16) for step in steps)
        return row["ok"]

    assert verdict(3, 16, 16, 16, 16, 16) and verdict(3, 9, 16, 16, 16, 16)
    assert not verdict(0, 0, 0, 0, 0, 0) and not verdict(1, 2, 3, 4, 5, 6)
    assert not verdict(3)
    assert [answers.by_chance(n) for n in (5, 6, 35, 36, 82, 83)] == [0, 1, 1, 2, 2, 3]


def test_a_reference_judges_engines_that_round_activations():
    said = {"moelora": ["base   |dlp| median 0.0800 p95 0.3   against ...", "reference check OK"]}
    said["vllm"] = ["base   |dlp| median 0.0700 p95 0.3   against the wrong model 1.8   ok"]
    (row,) = answers.judge(said)
    assert row == {"topic": "distance", "who": "base", "moelora": 0.08, "vllm": 0.07, "ok": True}
    said["moelora"][0] = said["moelora"][0].replace("0.0800", "0.0900")
    assert not answers.judge(said)[0]["ok"]
    assert answers.judge({"moelora": said["moelora"]}) == []


def test_adapters_that_do_nothing_are_told():
    base, moved = [reply([1])], [reply([1], (-3.0, -4.0))]
    check = {"names": ["base", "a", "b"], "alone": [base, moved, base], "mixed": [base] * 3}
    check["mixed"] = [base, moved, base]
    assert [row["ok"] for row in answers.adapters_act("x", check)] == [True, False]
