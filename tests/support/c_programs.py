"""C programs on the C library alone, built for the tests that run them."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Optimized, code with sanitizers takes ten times as long to compile as these programs run.
SANITIZERS = ["-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
FLAGS = ["-std=c11", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-Icsrc", "-Itests/c"]


@cache
def library(sanitize: bool = False) -> Path:
    """libmoelora.a: core and CPU kernels, as setup.py builds it for everyone."""
    env = os.environ | {"MOELORA_SANITIZE": "1" if sanitize else "0"}
    build = [sys.executable, "setup.py", "-q", "build_core"]
    done = subprocess.run(build, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return ROOT / "build" / ("sanitize" if sanitize else "core") / "libmoelora.a"


def compile_program(
    source: Path, directory: Path, sanitize: bool = False, more: tuple[str, ...] = ()
) -> Path:
    program = directory / (source.stem + ("_sanitized" if sanitize else ""))
    command = shlex.split(os.environ.get("CC", "cc")) + FLAGS + (SANITIZERS if sanitize else [])
    command += [str(source), *more, "-o", str(program), str(library(sanitize)), "-lm", "-lpthread"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program


def run(program: Path, *args: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess:
    """Runs it with none of the caller's MOELORA_ variables; `env` adds variables."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MOELORA_")}
    return subprocess.run(
        [program, *args], input=stdin, env=clean | env, capture_output=True, text=True, timeout=280
    )
