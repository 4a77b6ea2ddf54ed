"""Result files: {"meta": {...}, "cases": [...]}, one run each."""

import datetime
import json
import os
import pathlib
import shlex
import subprocess
import sys
import time
from typing import Any, TypeAlias

import torch
from rich.console import Console

from moelora import _C

Case: TypeAlias = dict[str, Any]  # a row of a result file


def commit() -> str:
    """Commit that is measured, or $MOELORA_COMMIT for a tree without history."""
    if given := os.environ.get("MOELORA_COMMIT"):
        return given
    # An installed copy may be inside an unrelated repository.
    ours = _git("ls-files", "--error-unmatch", pathlib.Path(__file__).name)
    return ours and _git("describe", "--always", "--dirty", "--abbrev=12") or "unknown"


def _git(*command: str) -> str:
    here = pathlib.Path(__file__).parent
    try:
        run = subprocess.run(["git", *command], cwd=here, capture_output=True, text=True)
    except OSError:
        return ""
    return run.stdout.strip() if run.returncode == 0 else ""


def gpu_state() -> str:
    """Name, driver, clocks, power and temperature according to the driver."""
    query = "name,driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def meta() -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    return {
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "gpu_state": gpu_state() if cuda else "",
        "moelora": _C.version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "command": "python " + shlex.join(sys.orig_argv[1:]),
    }


def check_writable(option: str, path: str | pathlib.Path) -> None:
    """ValueError, before anything is measured, if no file can be written there.

    Its folder is made; a file that is there stays as it is.
    """
    path = pathlib.Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.exists()
        with path.open("a"):
            pass
        if not there:
            path.unlink()
    except OSError as error:
        raise ValueError(f"{option} {path}: {error.strerror or error}") from None


def write(path: str | pathlib.Path, cases: list[Case], **more: Any) -> None:
    """Write a file, one line per case to keep diffs readable."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join("  " + json.dumps(case) for case in cases)
    head = json.dumps(meta() | more, indent=2)
    path.write_text(f'{{"meta": {head},\n"cases": [\n{lines}\n]}}\n')


def read(path: str | pathlib.Path) -> tuple[dict[str, Any], list[Case]]:
    """(meta, cases) of a result file; ValueError if it is not one."""
    try:
        content = json.loads(pathlib.Path(path).read_text())
        return content["meta"], content["cases"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a result file: {error!r}") from error


def baseline_name(field: str) -> str:
    """A baseline of `rivals` as tables and pictures name it."""
    name, base, _ = field.partition("_base")
    return name.replace("_", " ") + (" without" if base else "")


def shown(us: float) -> str:
    """Microseconds as every table, line and picture has them."""
    return f"{us:,.{0 if us >= 100 else 1}f}"


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
