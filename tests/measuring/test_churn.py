"""The benchmark of adapters that come, go and change: small sizes on a CPU, and its picture."""

import pytest

from benchmarks import tables
from benchmarks.churn import arrivals
from benchmarks.churn.__main__ import main
from moelora.__main__ import main as moelora
from moelora.bench import results

SMALL = "--preset micro --layers 2 --slots 2 --adapters 4 --ranks 2,4 --rows 3 --prompt 6 --new 3"
SMALL += " --requests 10 --rate 200 --update-layers 2 --update-rank 4 --updates 2 --device cpu"


def test_cases_tables_and_a_picture(tmp_path, monkeypatch, capsys):
    out = tmp_path / "benchmarks/results/h100-churn.json"
    assert main([*SMALL.split(), "--out", str(out)]) == 0
    _, cases = results.read(out)
    first, ahead, blocking = (case for case in cases if case["topic"] == "arrivals")
    assert [c["policy"] for c in (first, ahead, blocking)] == [*arrivals.POLICIES]
    assert (first["slots"], ahead["slots"], first["absent"]) == (4, 2, 0)
    assert first["ttft_ms_ratio"] == first["tok_s_ratio"] == 1
    for case in (first, ahead, blocking):
        assert len(case["waits_ms"]) == 10 and case["ttft_ms"] <= case["ttft_p95_ms"]
    updates = [case for case in cases if case["topic"] == "updates"]
    wanted = [(w, layout) for layout in ("stacked", "peft") for w in ("idle", "under load")]
    assert [(c["what"], c["layout"]) for c in updates] == wanted
    assert all(c["low"] <= c["ms"] <= c["high"] for c in updates)
    assert [bool(c["step_ms"]) for c in updates] == [False, True] * 2
    text = capsys.readouterr().out
    assert text.count(" tokens/s ") == 3 and text.count("update ") == 4

    picture = tmp_path / "arrivals.svg"
    pytest.importorskip("matplotlib")
    words = ["bench", "plot", str(out), "--picture", "arrivals", "--out", str(picture)]
    assert moelora(words) == 0 and "brought ahead (2 slots)" in picture.read_text()
    monkeypatch.setattr(tables.files, "ROOT", tmp_path)
    assert "| ahead | 2 | 4 |" in tables.section("arrivals")
    assert "| 4 | under load | peft | 2 |" in tables.section("updates")


def test_a_file_without_arrivals_is_refused(tmp_path, capsys):
    out = tmp_path / "other.json"
    results.write(out, [{"topic": "updates"}])
    assert moelora(["bench", "plot", str(out), "--picture", "arrivals"]) == 2
    assert "has no case of arrivals" in capsys.readouterr().err
