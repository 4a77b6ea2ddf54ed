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

from moelora.integrations import shown

Table = dict[str, dict[str, str]]
Lookup = Callable[[str, str], dict[str, bool]]  # {parameter: it has no default}


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


def interface(text: str) -> Interface:
    """An API as text: a module in a line, then "table name parameters" for each of its names."""
    found, module = Interface(), ""
    for first, *rest in filter(None, map(str.split, text.splitlines())):
        if not rest:
            module = first
            continue
        name, *parameters = rest
        getattr(found, first).setdefault(module, {})[name] = " ".join(parameters)
    return found


def is_absent(module: str, error: ImportError) -> bool:
    """Whether it is `module`, or a package of it, that the error does not find."""
    return f"{module}.".startswith(f"{error.name}.")


def problem(interface: Interface, parameters: Lookup | None = None) -> str | None:
    """First difference between `interface` and the installed engine, whose parameters `parameters`
    looks up; it begins with "there is no" if the release does not have it at all."""
    lookup = parameters or _parameters

    for table in (interface.replaced, interface.called, interface.fields):
        for module, names in table.items():
            for name, wanted in names.items():
                full, expected = f"{module}.{name}", wanted.split()
                try:
                    got = lookup(module, name)
                except AttributeError:
                    return f"there is no {full}"
                except ImportError as error:
                    if error.name is None or is_absent(module, error):
                        return f"there is no {full}"
                    return f"{module} cannot be imported ({error})"
                except Exception as error:  # of the import
                    return f"{module} cannot be imported ({shown(error)})"
                if table is interface.replaced:
                    if list(got) != expected:
                        return f"{full} has the parameters {list(got)}, not {expected}"
                    continue
                if missing := set(expected) - set(got):
                    what = "does not take" if table is interface.called else "has no"
                    return f"{full} {what} {', '.join(sorted(missing))}"
                more = {one for one, is_required in got.items() if is_required} - set(expected)
                if table is interface.called and more:
                    return f"{full} requires {', '.join(sorted(more))}"
    return None


def _parameters(module: str, name: str) -> dict[str, bool]:
    found = attrgetter(name)(importlib.import_module(module))
    variadic = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return {
        parameter.name: parameter.default is parameter.empty and parameter.kind not in variadic
        for parameter in inspect.signature(found).parameters.values()
    }
