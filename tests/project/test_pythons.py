"""`make test-pythons` and `make check-wheel`: which Pythons are found, and what is said of them."""

import subprocess
import sys

import check_pythons
import pytest
import pythons
from small_project import script

HERE = "{}.{}".format(*sys.version_info)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A function that installs a Python called so, which says that it is of some version."""

    def install(place, version):
        return str(script(tmp_path / place, f"echo {version}"))

    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    return install


def test_pythons_are_found_on_path_and_among_pyenvs(machine):
    on_path = machine("bin/python9.7", "9.7")
    machine("pyenv/versions/9.7.1/bin/python", "9.7")
    machine("bin/python9.8", "3.6")  # a shim behind which there is another one
    machine("pyenv/versions/9.8.1/bin/python", "9.8")
    newest = machine("pyenv/versions/9.8.2/bin/python", "9.8")
    called = []
    here, absent = pythons.for_each(["9.7", "9.8", "9.9"], lambda *found: called.append(found))
    assert called == [("9.7", on_path), ("9.8", newest)]
    assert (here, absent) == (["9.7", "9.8"], ["9.9"])


def test_what_passed_failed_and_is_not_here_is_said(machine, monkeypatch, capsys):
    for version in ("9.7", "9.8"):
        machine(f"bin/python{version}", version)
    commands = []

    def run(*command, **options):
        commands.append(command)
        if command[0] == "9.8":
            raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(check_pythons, "environment", lambda version, python: version)
    monkeypatch.setattr(check_pythons, "run", run)
    check_pythons.main(["--pythons", "9.7,9.9", "--", "-k", "plan"])
    assert commands == [("9.7", *"-m pytest -q -n 2 -m".split(), "not gpu", "-k", "plan")]
    with pytest.raises(SystemExit):
        check_pythons.main(["--pythons", "9.7,9.8,9.9"])
    with pytest.raises(SystemExit):
        check_pythons.main(["--pythons", "9.9"])
    assert capsys.readouterr().out.splitlines() == [
        "passed with Python 9.7; failed: none; not here: 9.9",
        "passed with Python 9.7; failed: 9.8; not here: 9.9",
        "passed with Python none; failed: none; not here: 9.9",
    ]


def test_an_environment_is_made_once_and_again_for_other_requirements(tmp_path, monkeypatch):
    """That of this minor version imports what is installed here."""
    monkeypatch.setattr(check_pythons, "ENVIRONMENTS", tmp_path)
    without_pip = lambda *words: pythons.run(*words[:3], "--without-pip", *words[3:])  # noqa: E731
    monkeypatch.setattr(check_pythons, "run", without_pip)  # which takes longer than all else
    python = check_pythons.environment(HERE, sys.executable)
    code = "import pytest, sys; print(pytest.__file__, sys.prefix)"
    words = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
    assert words.split() == [pytest.__file__, str(tmp_path / HERE)]
    monkeypatch.setattr(check_pythons, "run", lambda *command: pytest.fail("it was ready"))
    assert check_pythons.environment(HERE, sys.executable) == python
    monkeypatch.setattr(check_pythons, "REQUIREMENTS", ("requirements.txt",))
    with pytest.raises(pytest.fail.Exception, match="it was ready"):
        check_pythons.environment(HERE, sys.executable)
