"""Installs wheels, each into a fresh environment of every Python here; runs self-test and demo.

    python tests/project/check_wheel.py dist/moelora-0.1.0-cp310-abi3-manylinux_2_28_x86_64.whl
    python tests/project/check_wheel.py WHEEL --pythons 3.12,3.13 --no-demo
    python tests/project/check_wheel.py WHEEL --index build/release/index

A Python is looked for on PATH and among pyenv's; those that are not there are named and left out.
The wheel's extras bring the other packages, torch is that of requirements-torch.txt. Where this
environment has the same minor version of Python, the fresh one borrows its packages, moelora
excepted, and needs no network; --fresh installs them there, too. With --index pip gets the name and
the version of the package, as users will type them, and a folder that `release/index.py` wrote.
"""

import argparse
import hashlib
import sys
import tempfile
import zipfile
from pathlib import Path

from pythons import ROOT, borrow, for_each, is_this, run, torch_words

PYTHONS = "3.10,3.11,3.12,3.13,3.14"
PROBE = """
import hashlib, sys, moelora
assert not moelora.__file__.startswith(sys.argv[1]), f"not the wheel: {moelora.__file__}"
with open(moelora._C.__file__, "rb") as file:
    assert hashlib.sha256(file.read()).hexdigest() == sys.argv[2], "not the extension of this wheel"
print("python", sys.version.split()[0], "moelora", moelora.__version__)
"""


def extension_digest(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return hashlib.sha256(archive.read("moelora/_C.abi3.so")).hexdigest()


def requirement(wheel, extras="", index=None):
    """Words by which pip gets this wheel: its path, or its name and version from an index."""
    if index is None:
        return [f"{wheel}{extras}"]
    name, version = wheel.name.split("-")[:2]
    page = index.resolve() / ("cpu" if version.endswith("+cpu") else "")
    return ["--extra-index-url", page.as_uri(), f"{name}{extras}=={version}"]


def audit(wheel):
    """What the wheel needs of a system; torch's libraries come with torch."""
    if "-manylinux_" not in wheel.name:
        raise SystemExit(f"{wheel.name} is for this machine alone: make wheel gives it its tag")
    run(sys.executable, "-m", "auditwheel", "show", wheel)


def check(version, python, wheel, args, folder):
    venv = folder / version
    run(python, "-m", "venv", venv)
    fresh = venv / "bin" / "python"
    pip = [fresh, "-m", "pip", "install", "--quiet"]
    if is_this(version) and not args.fresh:
        borrow(venv)
        run(*pip, "--no-deps", "--force-reinstall", *requirement(wheel, "", args.index))
    else:
        extras = "[cli]" if args.no_demo else "[cli,hf,plot]"
        run(*pip, *torch_words(), *requirement(wheel, extras, args.index))
    run(fresh, "-c", PROBE, ROOT, extension_digest(wheel), cwd=folder)
    run(venv / "bin" / "moelora", "info", cwd=folder)
    if not args.no_demo:
        run(fresh, ROOT / "examples" / "demo.py", cwd=folder)


def check_everywhere(wheel, args):
    if "-abi3-" not in wheel.name:
        raise SystemExit(f"{wheel.name} is not an abi3 wheel")
    audit(wheel)

    def install_and_run(version, python):
        with tempfile.TemporaryDirectory() as folder:
            check(version, python, wheel, args, Path(folder))

    checked, absent = for_each(args.pythons.split(","), install_and_run)
    print(f"{wheel.name}: works with {', '.join(checked)}; not here: {', '.join(absent) or 'none'}")
    if not checked:
        raise SystemExit("no Python was checked")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", type=Path, nargs="+")
    parser.add_argument("--pythons", default=PYTHONS, help="(default: %(default)s)")
    parser.add_argument("--no-demo", action="store_true")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--index", type=Path, help="a folder that has the wheel as an index")
    args = parser.parse_args()
    for wheel in args.wheels:
        check_everywhere(wheel.resolve(), args)


if __name__ == "__main__":
    main()
