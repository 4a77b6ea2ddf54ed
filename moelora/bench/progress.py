"""Progress of a measurement: a line for each case."""

from __future__ import annotations

import time

from rich.console import Console


class CaseProgress:
    """Counts cases. Each result is printed as soon as it is there, and written through to the file,
    after the number of its case and the seconds since the start.
    """

    def __init__(self, console: Console, total: int):
        self.console, self.total = console, total
        self.finished, self.started = 0, time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def end(self, *lines: str) -> None:
        """Print the results of a case and count it."""
        self.finished += 1
        for line in lines:
            line = f"[{self.finished}/{self.total}, {self.seconds:.0f} s] {line}"
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)
