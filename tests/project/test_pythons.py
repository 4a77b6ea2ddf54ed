"""`make test-pythons` and `make check-wheel`: which Pythons they run."""

import pytest
import pythons
from small_project import script


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
