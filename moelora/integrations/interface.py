"""The API of an engine that an integration uses, and the check that an installed release has it.

Version numbers are not checked: an engine that provides this API is served; otherwise the
difference is reported. Parts are independent, so that an engine of which one part changed still has
the others served.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter

Table = dict[str, dict[str, str]]
Lookup = Callable[[str, str], list[str]]


@dataclass(frozen=True)
class Interface:
    """API that one part uses. Each table is {module: {function or class: parameters or fields}}.

    replaced: functions that the engine calls and that are replaced here, with all their parameters.
    called: functions that are called here with these parameters; the others must have defaults.
    fields: dataclasses of which these fields are read.
    """

    replaced: Table = field(default_factory=dict)
    called: Table = field(default_factory=dict)
    fields: Table = field(default_factory=dict)


def problem(interface: Interface, parameters: Lookup | None = None) -> str | None:
    """First difference between `interface` and the installed engine, whose parameters `parameters`
    looks up; it begins with "there is no" if the release does not have it at all."""
    lookup = parameters or _parameters

    def found(module: str, name: str) -> list[str] | str:
        try:
            return lookup(module, name)
        except AttributeError:
            return f"there is no {module}.{name}"
        except ImportError as error:
            if error.name is None or f"{module}.".startswith(f"{error.name}."):
                return f"there is no {module}.{name}"
            return f"{module} cannot be imported ({error})"

    for module, functions in interface.replaced.items():
        for name, wanted in functions.items():
            got = found(module, name)
            if isinstance(got, str):
                return got
            if got != wanted.split():
                return f"{module}.{name} has the parameters {got}, not {wanted.split()}"
    for table, what in ((interface.called, "does not take"), (interface.fields, "has no")):
        for module, names in table.items():
            for name, wanted in names.items():
                got = found(module, name)
                if isinstance(got, str):
                    return got
                if missing := set(wanted.split()) - set(got):
                    return f"{module}.{name} {what} {', '.join(sorted(missing))}"
    return None


def _parameters(module: str, name: str) -> list[str]:
    found = attrgetter(name)(importlib.import_module(module))
    return list(inspect.signature(found).parameters)
