"""Installs a wheel into a fresh environment of every Python here and runs self-test and demo.

    python tests/check_wheel.py dist/moelora-0.1.0-cp310-abi3-linux_x86_64.whl
    python tests/check_wheel.py WHEEL --pythons python3.12 --no-demo

torch and the demo's packages are installed too, of the versions in the requirements files, unless
this environment has the same minor version of Python: then the fresh one borrows its packages,
moelora excepted, and needs no network. Pythons that are not there are named and left out.
"""

import argparse
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("python3.11", "python3.12", "python3.13")
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
    code = "import sys; print(*sys.version_info[:2])"
    return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()


def audit(wheel):
    """What the wheel needs of a system; torch's libraries come with torch."""
    if importlib.util.find_spec("auditwheel") is None:
        print("auditwheel is not installed: the wheel's symbols are NOT CHECKED")
        return
    run(sys.executable, "-m", "auditwheel", "show", wheel)


def check(python, wheel, demo, folder):
    venv = folder / Path(python).name
    run(python, "-m", "venv", venv)
    fresh = venv / "bin" / "python"
    if version_of(python) == version_of(sys.executable):
        (site,) = venv.glob("lib/python*/site-packages")
        (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    else:
        torch = (ROOT / "requirements-torch.txt").read_text().split()
        run(fresh, "-m", "pip", "install", "--quiet", *torch)
        run(fresh, "-m", "pip", "install", "--quiet", "-r", ROOT / "requirements.txt")
    run(fresh, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", wheel)
    run(fresh, "-c", PROBE, ROOT, cwd=folder)
    run(fresh, "-m", "moelora", "info", cwd=folder)
    if demo:
        run(fresh, ROOT / "examples" / "demo.py", cwd=folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--pythons", default=",".join(PYTHONS))
    parser.add_argument("--no-demo", action="store_true")
    args = parser.parse_args()
    wheel = args.wheel.resolve()
    if "-abi3-" not in wheel.name:
        raise SystemExit(f"{wheel.name} is not an abi3 wheel")
    audit(wheel)
    checked, absent = [], []
    for name in args.pythons.split(","):
        python = shutil.which(name)
        if python is None or not version_of(python):
            absent.append(name)
            continue
        with tempfile.TemporaryDirectory() as folder:
            check(python, wheel, not args.no_demo, Path(folder))
        checked.append(name)
    print(f"{wheel.name}: works with {', '.join(checked)}; not here: {', '.join(absent) or 'none'}")
    if not checked:
        raise SystemExit("no Python was checked")


if __name__ == "__main__":
    main()
