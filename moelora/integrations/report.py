"""What an engine's plugin does in this environment, part by part, without starting an engine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass

from moelora.integrations import switched_off
from moelora.integrations.interface import Interface, problem


@dataclass(frozen=True)
class Part:
    """Which implementation runs a class of layers, and the reason if it is not moelora."""

    layers: str
    cls: str
    runs: str  # "moelora", "own" or "absent": this release has no such class
    why: str = ""


def part(
    layers: str, cls: str, needed: Interface, off: Callable[[], str | None] = lambda: None
) -> Part:
    """The part that runs if the installed engine has what is needed, unless it is off for a reason.

    A release without the first replaced function has no such layers.
    """
    difference = problem(needed)
    module, names = next(iter(needed.replaced.items()))
    if difference == f"there is no {module}.{next(iter(names))}":
        return Part(layers, cls, "absent")
    why = difference or off()
    return Part(layers, cls, "own", why) if why else Part(layers, cls, "moelora")


@dataclass(frozen=True)
class Report:
    """An engine, and how it finds moelora.

    engine: its name, which is that of its distribution but for case.
    group: the entry points that it loads.
    allowed: an environment variable that restricts which plugins it loads.
    names: the names of plugins in such a variable; None: it restricts nothing.
    switch: moelora's own environment variable; 0, false, off or no turn it off.
    problem_here: why moelora is not installed into the engine, or None.
    parts: layers by class and format, where the plugin is on; imports the engine.
    """

    engine: str
    group: str
    allowed: str
    names: Callable[[str], set[str] | None]
    switch: str
    problem_here: Callable[[], str | None]
    parts: Callable[[], list[Part]]

    def version(self) -> str | None:
        """That of the installed engine; "of an unknown version" if its package has no metadata."""
        name = self.engine.lower()
        try:
            version: str | None = importlib.metadata.version(name)  # None if metadata are damaged
        except (importlib.metadata.PackageNotFoundError, KeyError):
            version = None
        if version is None:
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.origin is not None:  # not a folder of that name
                return "of an unknown version"
        return version

    def off(self) -> str | None:
        """Why the engine runs as if moelora were not installed, or None."""
        ours = [
            entry.name
            for entry in importlib.metadata.entry_points(group=self.group)
            if entry.value.startswith("moelora.")
        ]
        if not ours:
            return (
                f"no installed package has moelora's entry point of {self.group}: pip install the "
                "wheel"
            )
        given = os.environ.get(self.allowed)
        allowed = None if given is None else self.names(given)
        if allowed is not None and allowed.isdisjoint(ours):
            return (
                f"{self.allowed}={given} does not name {ours[0]}, so {self.engine} does not load it"
            )
        return switched_off(self.switch) or self.problem_here()

    def lines(self) -> tuple[list[str], bool]:
        """The report, and whether the plugin is on."""
        reason = self.off()
        if reason is not None:
            return [f"off: {reason}", f"{self.engine}'s own path runs"], False
        every = self.parts()
        on = any(one.runs == "moelora" for one in every)
        said = [f"on: {self.engine} loads the plugin in every process"]
        if not on:
            said = [f"off: no class of this {self.engine} is one that moelora can run"]
        widths = [max(len(getattr(one, name)) for one in every) for name in ("layers", "cls")]
        runs = {
            "moelora": "moelora",
            "own": f"{self.engine}'s own path",
            "absent": "not in this release",
        }
        for one in every:
            why = f": {one.why}" if one.why else ""
            said.append(f"  {one.layers:{widths[0]}}  {one.cls:{widths[1]}}  {runs[one.runs]}{why}")
        return said, on
