"""Installs a wheel into a fresh environment of every Python here and runs self-test and demo.

    python tests/project/check_wheel.py dist/moelora-0.1.0-cp310-abi3-manylinux_2_28_x86_64.whl
    python tests/project/check_wheel.py WHEEL --pythons 3.12,3.13 --no-demo

A Python is looked for on PATH and among pyenv's; those that are not there are named and left out.
The wheel's extras bring the other packages, torch is that of requirements-torch.txt. Where this
environment has the same minor version of Python, the fresh one borrows its packages, moelora
excepted, and needs no network; --fresh installs them there, too.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from pythons import ROOT, borrow, for_each, is_this, run, torch_words

PYTHONS = "3.10,3.11,3.12,3.13,3.14"
PROBE = """
import sys, moelora
assert not moelora.__file__.startswith(sys.argv[1]), f"not the wheel: {moelora.__file__}"
print("python", sys.version.split()[0], "moelora", moelora.__version__)
"""


def audit(wheel):
    """What the wheel needs of a system; torch's libraries come with torch."""
    if "-manylinux_" not in wheel.name:
        raise SystemExit(f"{wheel.name} is for this machine alone: make wheel gives it its tag")
    run(sys.executable, "-m", "auditwheel", "show", wheel)


def check(version, python, wheel, demo, fresh_packages, folder):
    venv = folder / version
    run(python, "-m", "venv", venv)
    fresh = venv / "bin" / "python"
    pip = [fresh, "-m", "pip", "install", "--quiet"]
    if is_this(version) and not fresh_packages:
        borrow(venv)
        run(*pip, "--no-deps", "--force-reinstall", wheel)
    else:
        run(*pip, *torch_words(), f"{wheel}[{'cli,hf,plot' if demo else 'cli'}]")
    run(fresh, "-c", PROBE, ROOT, cwd=folder)
    run(venv / "bin" / "moelora", "info", cwd=folder)
    if demo:
        run(fresh, ROOT / "examples" / "demo.py", cwd=folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--pythons", default=PYTHONS, help="(default: %(default)s)")
    parser.add_argument("--no-demo", action="store_true")
    parser.add_argument("--fresh", action="store_true")
    args = parser.parse_args()
    wheel = args.wheel.resolve()
    if "-abi3-" not in wheel.name:
        raise SystemExit(f"{wheel.name} is not an abi3 wheel")
    audit(wheel)

    def install_and_run(version, python):
        with tempfile.TemporaryDirectory() as folder:
            check(version, python, wheel, not args.no_demo, args.fresh, Path(folder))

    checked, absent = for_each(args.pythons.split(","), install_and_run)
    print(f"{wheel.name}: works with {', '.join(checked)}; not here: {', '.join(absent) or 'none'}")
    if not checked:
        raise SystemExit("no Python was checked")


if __name__ == "__main__":
    main()
