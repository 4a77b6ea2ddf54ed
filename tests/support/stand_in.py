"""Stands in for an engine where none is installed: its modules, and `moelora doctor` there."""

from __future__ import annotations

import importlib.metadata
import inspect
import re
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import tomllib

import moelora
from moelora.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
GPU = "NVIDIA H100 80GB HBM3"


def modules(contents: Mapping[str, Mapping[str, object]]) -> dict[str, ModuleType]:
    """Entries for `sys.modules`: modules with these names in them, and their packages."""
    made: dict[str, ModuleType] = {}
    for place, names in contents.items():
        parts = place.split(".")
        for count in range(1, len(parts) + 1):
            name = ".".join(parts[:count])
            if name not in made:
                made[name] = module = ModuleType(name)
                module.__spec__, module.__path__ = ModuleSpec(name, None), []
                if count > 1:
                    setattr(made[name.rpartition(".")[0]], parts[count - 1], module)
        vars(made[place]).update(names)
    return made


def chosen(places: Mapping[str, str], namespace: Mapping[str, object]) -> dict[str, dict]:
    """What `modules` takes: in each place these names of a namespace."""
    return {place: {n: namespace[n] for n in names.split()} for place, names in places.items()}


def takes(parameters: str, **defaults) -> Callable:
    """A function of these parameters that a test replaces before it is called."""

    def function(*args, **named):
        raise AssertionError("a test replaces this function before it is called")

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    function.__signature__ = inspect.Signature(
        inspect.Parameter(name, kind, default=defaults.get(name, inspect.Parameter.empty))
        for name in parameters.split()
    )
    return function


def installed(monkeypatch, **versions: str) -> None:
    """These packages, and no others."""

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)


def entry_point(group: str, name: str = "moelora") -> importlib.metadata.EntryPoint:
    """The entry point that pyproject.toml declares."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return importlib.metadata.EntryPoint(name, project["entry-points"][group][name], group)


def sample_in_docs(number: int) -> list[str]:
    """What docs/serving.md shows that `moelora doctor` prints, of the version that is tested."""
    text = (ROOT / "docs/serving.md").read_text().split("$ moelora doctor\n")[number]
    sample = re.sub(r"^moelora [\d.]+,", f"moelora {moelora.__version__},", text)
    return sample.split("```", 1)[0].splitlines()


def doctor_on(monkeypatch, capsys, group: str, torch_version: str, **versions: str):
    """Runs `moelora doctor` on a machine with a GPU and an engine; (exit status, lines)."""
    entries = [entry_point(group)]
    assert entries[0].load().__name__ == "register"
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: entries)
    installed(monkeypatch, **versions)
    monkeypatch.setattr("moelora.commands.doctor.kernels", lambda: (f"correct on {GPU}", True))
    monkeypatch.setattr("moelora._C.WITH_CUDA", 1)
    monkeypatch.setattr("torch.__version__", torch_version)

    def run() -> tuple[int, list[str]]:
        status = main(["doctor"])
        return status, capsys.readouterr().out.splitlines()

    return run
