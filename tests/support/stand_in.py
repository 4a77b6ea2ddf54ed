"""Modules that stand in for an engine's, to test what calls them where it is not installed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType


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
