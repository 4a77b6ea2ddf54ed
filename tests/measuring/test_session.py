"""A session on a GPU: its parts, and that none of them takes the time of the others."""

import re
import subprocess
import sys

import pytest

from benchmarks import session
from benchmarks.session import Part

WAITS = Part("waits", 1, "-c __import__('time').sleep(60)")
FAILS = Part("fails", 20, "-c raise(SystemExit(3))")
WORKS = Part("works", 20, "-c print('here')")


def run(tmp_path, capsys, parts, *words):
    status = session.main(["--out", str(tmp_path / "out"), *words], parts)
    return status, [line.split(" s   ")[1] for line in capsys.readouterr().out.splitlines()]


def test_no_part_takes_the_time_of_another(tmp_path, capsys):
    status, said = run(tmp_path, capsys, [WAITS, FAILS, WORKS])
    assert (status, said) == (1, ["too long", "failed (3)", "done"])
    assert (tmp_path / "out" / "works.log").read_text() == "here\n"


def test_what_was_not_given_is_left_out(tmp_path, capsys):
    parts = [Part("compares", 20, "-c print('{before}','{peers}')"), WORKS]
    status, said = run(tmp_path, capsys, parts, "--before", "x.so")
    assert (status, said) == (0, ["left out: no --peers", "done"])
    status, said = run(tmp_path, capsys, parts, "--before", "x.so", "--peers", "y")
    assert (status, said) == (0, ["done", "done"])
    assert (tmp_path / "out" / "compares.log").read_text() == "x.so y\n"


def test_no_part_begins_behind_the_budget(tmp_path, capsys):
    status, said = run(tmp_path, capsys, [WORKS, FAILS], "--budget-s", "0")
    assert (status, said) == (0, ["left out: no time"] * 2)


def test_only_some_parts(tmp_path, capsys):
    assert run(tmp_path, capsys, [FAILS, WORKS], "--only", "work") == (0, ["done"])
    with pytest.raises(SystemExit):
        session.main(["--out", str(tmp_path), "--only", "none"], [WORKS])
    assert "no part's name begins so" in capsys.readouterr().err


@pytest.mark.parametrize("part", session.PARTS, ids=lambda part: part.name)
def test_parts_are_commands_with_such_options(part):
    """A word wrong in one of them would be found when the GPU is there."""
    given = dict.fromkeys(("out", "before", "peers", "here"), "x")
    command = part.command(given, part.seconds)
    module = command[1:3] if command[1] == "-m" else command[1:2]
    usage = subprocess.run(
        [sys.executable, *module, "--help"], capture_output=True, text=True, check=True
    ).stdout
    options = re.findall(r" (--[a-z-]+)", " " + " ".join(command[1 + len(module) :]))
    if module[-1] != "pytest":
        assert all(re.search(rf"{option}\b", usage) for option in options)
    assert not re.search(r"[{}]", " ".join(command))
