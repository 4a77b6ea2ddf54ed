"""Progress of a measurement: a bar in a terminal; in a file or a pipe, a line for each case."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class CaseProgress:
    """Counts cases. Each result is printed as soon as it is there, and written through to the file:
    above the bar, or after the number of its case and the seconds since the start.
    """

    def __init__(self, console: Console, total: int):
        self.console, self.total = console, total
        self.finished, self.started = 0, time.monotonic()
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        self.bar = Progress(
            *columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal
        )
        self.task = self.bar.add_task("", total=total)

    def __enter__(self) -> CaseProgress:
        self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.bar.stop()

    def begin(self, what: str) -> None:
        """Name the case that is measured now. Outside of a terminal only the first one: the other
        names come with their results."""
        self.bar.update(self.task, description=what)
        if not self.console.is_terminal and self.finished == 0:
            self.say(f"measuring {what}")

    def end(self, *lines: str) -> None:
        """Print the results of a case and count it."""
        self.finished += 1
        self.bar.advance(self.task)
        for line in lines:
            self.say(line)

    def say(self, line: str) -> None:
        if not self.console.is_terminal:
            seconds = time.monotonic() - self.started
            line = f"[{self.finished}/{self.total}, {seconds:.0f} s] {line}"
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)
