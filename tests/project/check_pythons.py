"""Runs the Python tests under every Python here, on one extension.

    python tests/project/check_pythons.py                            # 3.11 to 3.14
    python tests/project/check_pythons.py --pythons 3.12,3.13 -- -k plan     # and words for pytest

A Python is looked for on PATH and among pyenv's; those that are not there are named and left out.
Each gets an environment in build/pythons with what requirements-torch.txt and requirements.txt say,
torch included; the one of the minor version that runs this borrows its packages instead. The
extension, of Python's stable ABI, is the one that is built in this checkout.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from pythons import ROOT, borrow, for_each, is_this, run, torch_words

PYTHONS = "3.11,3.12,3.13,3.14"


def environment(version: str, python: str) -> Path:
    """The interpreter of this version's environment, which has what requirements say now."""
    venv = ROOT / "build" / "pythons" / version
    ours = venv / "bin" / "python"
    if not ours.exists():
        run(python, "-m", "venv", venv)
    if is_this(version):
        borrow(venv)
    else:
        run(ours, "-m", "pip", "install", "--quiet", *torch_words())
        run(ours, "-m", "pip", "install", "--quiet", "-r", ROOT / "requirements.txt")
    return ours


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pythons", default=PYTHONS, help="(default: %(default)s)")
    parser.add_argument("pytest", nargs="*", help="words for pytest, behind --")
    args = parser.parse_args(words)
    failed = []
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

    def check(version: str, python: str) -> None:
        pytest = [environment(version, python), "-m", "pytest", "-q", "-n", "2", "-m", "not gpu"]
        try:
            run(*pytest, *args.pytest, cwd=ROOT, env=env)
        except subprocess.CalledProcessError:
            failed.append(version)

    here, absent = for_each(args.pythons.split(","), check)
    passed = [version for version in here if version not in failed]
    print(
        f"passed with Python {', '.join(passed) or 'none'}; "
        f"failed: {', '.join(failed) or 'none'}; not here: {', '.join(absent) or 'none'}"
    )
    if failed or not passed:
        raise SystemExit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
