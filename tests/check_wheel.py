"""Installs a wheel into a fresh environment of every Python here and runs self-test and demo.

    python tests/check_wheel.py dist/moelora-0.1.0-cp310-abi3-manylinux_2_28_x86_64.whl
    python tests/check_wheel.py WHEEL --pythons 3.12,3.13 --no-demo

A Python is looked for on PATH and among pyenv's; those that are not there are named and left out.
The wheel's extras bring the other packages, torch is that of requirements-torch.txt. Where this
environment has the same minor version of Python, the fresh one borrows its packages, moelora
excepted, and needs no network; --fresh installs them there, too.
"""

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = "3.10,3.11,3.12,3.13,3.14"
PROBE = """
import sys, moelora
assert not moelora.__file__.startswith(sys.argv[1]), f"not the wheel: {moelora.__file__}"
print("python", sys.version.split()[0], "moelora", moelora.__version__)
"""


def run(*command, **kwargs):
    print("$", *command, flush=True)
    subprocess.run([str(word) for word in command], check=True, **kwargs)


def version_of(python):
    """Its major and minor version; "" for a name behind which there is no Python."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()


def find(version):
    """A Python of this minor version, or None."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    candidates = [shutil.which(f"python{version}")]
    candidates += sorted(pyenv.glob(f"versions/{version}.*/bin/python"), reverse=True)
    return next((str(p) for p in candidates if p and version_of(p) == version), None)


def audit(wheel):
    """What the wheel needs of a system; torch's libraries come with torch."""
    if "-manylinux_" not in wheel.name:
        raise SystemExit(f"{wheel.name} is for this machine alone: make wheel gives it its tag")
    run(sys.executable, "-m", "auditwheel", "show", wheel)


def check(version, python, wheel, demo, borrow, folder):
    venv = folder / version
    run(python, "-m", "venv", venv)
    fresh = venv / "bin" / "python"
    pip = [fresh, "-m", "pip", "install", "--quiet"]
    if borrow and version == version_of(sys.executable):
        (site,) = venv.glob("lib/python*/site-packages")
        (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
        run(*pip, "--no-deps", "--force-reinstall", wheel)
    else:
        torch = (ROOT / "requirements-torch.txt").read_text().split()
        run(*pip, *torch, f"{wheel}[{'cli,hf,plot' if demo else 'cli'}]")
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
    checked, absent = [], []
    for version in args.pythons.split(","):
        python = find(version)
        if python is None:
            absent.append(version)
            continue
        with tempfile.TemporaryDirectory() as folder:
            check(version, python, wheel, not args.no_demo, not args.fresh, Path(folder))
        checked.append(version)
    print(f"{wheel.name}: works with {', '.join(checked)}; not here: {', '.join(absent) or 'none'}")
    if not checked:
        raise SystemExit("no Python was checked")


if __name__ == "__main__":
    main()
