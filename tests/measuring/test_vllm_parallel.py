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


@pytest.mark.slow
def test_data_parallel_ranks_share_prompts(tmp_path, peers, monkeypatch):
    """Their answers are those of one GPU, and each has generated its own."""
    monkeypatch.setitem(vllm_parallel.WAYS, "data and expert", (vllm_parallel.DATA,))
    monkeypatch.setenv("TURNS", str(tmp_path / "turns"))
    words = ("--gpus", "2", "--ways", "data and expert", "--lora-only", "--reps", "1")
    code, written, log = run(tmp_path, peers, *words)
    assert code == 0, log
    assert {row["parallel"] for row in topics(written, "speed")} == {"data and expert"}
    assert all(row["same_tokens"] == row["requests"] for row in topics(written, "answers"))
    turns = [line.split() for line in (tmp_path / "turns").read_text().splitlines()]
    assert len({pid for what, pid in turns if what == "measured"}) == 1 + 2 * 2


@pytest.mark.slow
def test_speed_alone_starts_no_reference(tmp_path, peers):
    words = ("--ways", "fully sharded", "--lora-only", "--only", "speed", "--at-once", "2")
    code, written, log = run(tmp_path, peers, *words, "--reps", "1")
    assert code == 0, log
    assert len(topics(written, "speed")) == 4 and not topics(written, "answers")
    assert "moelora single" not in {stage["stage"] for stage in written["meta"]["stages"]}


@pytest.mark.slow
def test_answers_alone_are_held_against_transformers(tmp_path, peers):
    words = ("--gpus", "4", "--ways", "tensor", "fully sharded", "--only", "answers")
    code, written, log = run(tmp_path, peers, *words, "--at-once", "5")
    assert code == 0, log
    assert not topics(written, "speed")
    ways = "tensor", "fully sharded"
    engines = [f"{engine} {way}" for way in ways for engine in ("moelora", "vllm")]
    assert [r["run"] for r in topics(written, "reference")] == ["moelora single", *engines]
    wanted = {f"{engine}, moelora single" for engine in engines}
    assert {r["compared"] for r in topics(written, "answers")} >= wanted
    assert [
        {*row} >= {f"moelora {way}", f"vllm {way}"}
        for way, row in zip(ways, topics(written, "distance"), strict=True)
    ] == [True, True]


@pytest.mark.slow
def test_a_layer_that_fell_back_is_found(tmp_path, peers, monkeypatch):
    monkeypatch.setenv("SAY", "moelora: no reason; vLLM's own path runs")
    words = ("--ways", "tensor", "--lora-only", "--at-once", "3", "--reps", "1")
    code, written, _ = run(tmp_path, peers, *words)
    assert code == 1
    ours = [row["ok"] for row in topics(written, "layers") if row["run"].startswith("moelora")]
    assert ours == [False, False]


@pytest.mark.slow
def test_an_engine_that_does_not_come_up_is_stopped(tmp_path, peers, monkeypatch):
    monkeypatch.setenv("SLEEP", "TritonExperts")  # vLLM's own
    up = vllm_parallel.Parallel.up

    def patient(bench, run, job):
        bench.args.start_s = 240 if run.ours else 3
        return up(bench, run, job)

    monkeypatch.setattr(vllm_parallel.Parallel, "up", patient)
    words = ("--ways", "tensor", "--lora-only", "--at-once", "3")
    code, written, _ = run(tmp_path, peers, *words)
    assert code == 1
    ends = {stage["stage"]: stage["end"] for stage in written["meta"]["stages"]}
    assert ends["vllm tensor speed, LoRA"] == "not up after 3 s"
    assert {row["engine"] for row in topics(written, "speed")} == {"moelora"}


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
