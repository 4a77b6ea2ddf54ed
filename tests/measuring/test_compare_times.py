"""Builds take turns on the same layer; whose results differ is said."""

import pytest

from benchmarks.compare import times
from benchmarks.compare.__main__ import COMMANDS, main
from moelora import _C
from moelora.bench import results

SHAPE = "4,2,72,40"


@pytest.mark.parametrize("part", ["layer", "down"])
def test_builds_take_turns(tmp_path, capsys, part):
    """The same module twice, once as another kernel, whose bits differ."""
    out = tmp_path / "times.json"
    words = [f"before={_C.__file__}"]
    words += [f"scalar={_C.__file__},MOELORA_FORCE_VARIANT=gemm_f32_scalar"]
    words += ["--device", "cpu", "--dtype", "fp32", "--shape", SHAPE, "--tokens", "1,9"]
    words += ["--ranks", "0,8", "--adapters", "3", "--turns", "2", "--budget-ms", "0"]
    assert times.main([*words, "--part", part, "--out", str(out)]) == 0
    _, rows = results.read(out)
    ranks = (0, 8) if part == "layer" else (8,)
    assert [(r["tokens"], r["rank"]) for r in rows] == [(m, r) for m in (1, 9) for r in ranks]
    for row in rows:
        assert row["us"].keys() == {"before", "scalar"}
        assert min(row["us"].values()) > 0
        assert row["same_bits"] != ("avx2" in _C.cpu_features())
    assert capsys.readouterr().out.count("before ") == len(rows)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_comparison_says_how_it_is_called(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: benchmarks.compare {command} ")
