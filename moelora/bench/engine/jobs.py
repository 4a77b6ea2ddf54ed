"""Commands with deadlines."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Job:
    """A command in a process group of its own, with a log and a deadline."""

    def __init__(
        self,
        name: str,
        command: Sequence[object],
        folder: Path,
        seconds: float,
        environment: Mapping[str, str] | None = None,
        where: Path | None = None,
    ):
        """Start `command` in `where`, by default the current folder; its log goes to `folder`."""
        self.name, self.log = name, folder / f"{name.replace(' ', '-').replace(',', '')}.log"
        self.seconds, self.start = seconds, time.monotonic()
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [str(c) for c in command],
                cwd=where,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def left(self) -> float:
        """Seconds to its deadline."""
        return self.seconds - (time.monotonic() - self.start)

    def wait(self) -> dict[str, Any]:
        """Wait for the process until the deadline, then `stop` it; returns the record of `stop`."""
        try:
            code = self.process.wait(max(self.left(), 0.1))
            end = "ok" if code == 0 else f"exit status {code}"
        except subprocess.TimeoutExpired:
            end = f"stopped after {self.seconds:.0f} s"
        return self.stop(end)

    def stop(self, end: str) -> dict[str, Any]:
        """Kill all processes of the group; returns {"stage", "seconds", "end"}."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        seconds = round(time.monotonic() - self.start, 1)
        print(f"{self.name}: {end}, {seconds} s", flush=True)
        return {"stage": self.name, "seconds": seconds, "end": end}
