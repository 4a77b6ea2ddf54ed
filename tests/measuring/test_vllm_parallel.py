"""The benchmark of engines on several GPUs, on a pretended vLLM."""

import pytest

pytest.importorskip("tomllib")

import e2e_vllm  # noqa: E402
from e2e import topics  # noqa: E402

from benchmarks import vllm_parallel  # noqa: E402

# The pretended vLLM cannot run expert parallel.


@pytest.fixture
def peers(tmp_path, monkeypatch):
    return e2e_vllm.pack(tmp_path, monkeypatch)


def run(tmp_path, peers, *options):
    return e2e_vllm.run(vllm_parallel, tmp_path, peers, *options)


@pytest.mark.slow
def test_every_way_is_timed_and_held_against_one_gpu(tmp_path, peers):
    words = ("--gpus", "4", "--at-once", "10", "--reps", "2")
    code, written, log = run(tmp_path, peers, *words)
    assert code == 1 and "no experts here" in log
    ends = {stage["stage"]: stage["end"] for stage in written["meta"]["stages"]}
    assert ends.pop("moelora expert speed, LoRA") == "exit status 1"
    assert ends.pop("vllm expert speed, LoRA") == "exit status 1"
    for engine in ("moelora", "vllm"):
        assert ends.pop(f"{engine} data and expert speed, LoRA") == "exit status 1"
    assert set(ends.values()) == {"ok"} and "moelora fully sharded speed, LoRA" in ends
    rows = topics(written, "speed")
    assert [(r["parallel"], r["engine"], r["lora_enabled"], r["batch"]) for r in rows] == [
        ("tensor", "vllm", False, "base"),
        *(
            (way, engine, True, batch)
            for way in ("tensor", "fully sharded")
            for engine in ("vllm", "moelora")
            for batch in ("base", "4 mixed")
        ),
    ]
    assert all(len(row["decode_s"]) == 2 and row["decode_gpu_ms"] is None for row in rows)
    assert all(row["gpus"] == 4 for row in rows)
    assert [(row["what"].split(",")[0], row["wanted"]) for row in topics(written, "target")] == [
        ("prefill", 1.0),
        ("prefill", 1.4),
        ("decode", 0.92),
        ("decode", 1.3),
        ("prefill", 1.4),
        ("decode", 1.3),
    ]
    compared = {row["compared"] for row in topics(written, "answers")}
    for name in ("vllm tensor", "moelora tensor", "moelora fully sharded"):
        assert f"{name} speed, LoRA, moelora single" in compared
    assert "moelora expert speed, LoRA, moelora single" not in compared
    assert all(row["ok"] for row in topics(written, "answers"))


def test_answers_may_differ_by_what_the_kernels_of_vllm_differ():
    """The model decides by how much rounding moves log-probabilities."""

    def check(shift):
        reply = {"prompt": [-1.0 + shift] * 30, "tokens": [1], "top": [{"1": -0.1}]}
        return {"check": {"names": ["base"], "alone": [[reply]], "mixed": [[reply]]}}

    def judged(vllm, moelora):
        runs = {
            "moelora single": check(0.0),
            "vllm tensor": check(vllm),
            "moelora tensor": check(moelora),
        }
        rows = vllm_parallel.answers(runs)
        assert all(row["ok"] for row in rows if row["compared"].startswith("vllm"))
        wanted = {"moelora tensor, moelora single", "moelora tensor, moelora single: mixed"}
        (ok,) = {row["ok"] for row in rows if row["compared"] in wanted}
        return ok

    assert judged(0.01, 0.09) and not judged(0.01, 0.11)
    assert judged(0.2, 0.24) and not judged(0.2, 0.26)
