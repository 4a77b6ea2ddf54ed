"""Builds take turns on the same layer; whose results differ is said."""

import pytest

from benchmarks.compare import times
from benchmarks.compare.__main__ import COMMANDS, main
from moelora import _C
from moelora.bench import results

SHAPE = "4,2,72,40"


def test_builds_take_turns(tmp_path, capsys):
    """The same module twice, once as another kernel."""
    out = tmp_path / "times.json"
    words = [f"before={_C.__file__}"]
    words += [f"scalar={_C.__file__},MOELORA_FORCE_VARIANT=gemm_f32_scalar"]
    words += ["--device", "cpu", "--dtype", "fp32", "--shape", SHAPE, "--tokens", "1,9"]
    words += ["--ranks", "0,8", "--adapters", "3", "--turns", "2", "--budget-ms", "0"]
    assert times.main([*words, "--out", str(out)]) == 0
    _, rows = results.read(out)
    assert [(r["tokens"], r["rank"]) for r in rows] == [(1, 0), (1, 8), (9, 0), (9, 8)]
    for row in rows:
        assert row["us"].keys() == {"before", "scalar"}
        assert min(row["us"].values()) > 0
    assert capsys.readouterr().out.count("before ") == len(rows)


def test_builds_with_other_results_are_found():
    class Fake:
        def __init__(self, name, digest):
            self.name, self.digest = name, digest

        def ask(self, do, **_):
            return {"load": "toy", "draw": {"0": self.digest}, "turn": 2.0}[do]

    options = type("Options", (), {"models": ["toy"], "shape": None, "tokens": [1], "ranks": [0]})
    options.device, options.dtype, options.adapters, options.tp = "cpu", "bf16", 3, 1
    options.mix, options.routing, options.turns = "many", "uniform", 2
    options.budget_ms, options.deadline_s = 0, 1e9
    (same,) = times.compare([Fake("a", "1"), Fake("b", "1")], options)
    (other,) = times.compare([Fake("a", "1"), Fake("b", "2")], options)
    assert same["same_bits"] and not other["same_bits"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_comparison_says_how_it_is_called(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: benchmarks.compare {command} ")
