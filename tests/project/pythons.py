"""The Pythons of a machine, each by its minor version, and environments of theirs."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(*command, **kwargs):
    print("$", *command, flush=True)
    subprocess.run([str(word) for word in command], check=True, **kwargs)


def version_of(python):
    """Its major and minor version; "" for a name behind which there is no Python."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()


def find(version):
    """A Python of this minor version, on PATH or among pyenv's; None if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    candidates = [shutil.which(f"python{version}")]
    candidates += sorted(pyenv.glob(f"versions/{version}.*/bin/python"), reverse=True)
    return next((str(p) for p in candidates if p and version_of(p) == version), None)


def for_each(versions, check):
    """Calls `check(version, python)` for each version that is here; those that are, and others."""
    found = {version: find(version) for version in versions}
    for version, python in found.items():
        if python is not None:
            check(version, python)
    here = [version for version, python in found.items() if python is not None]
    return here, [version for version in versions if version not in here]


def borrow(venv):
    """Lets an environment of this minor version import what this environment has."""
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")


def is_this(version):
    return version == version_of(sys.executable)


def torch_words():
    """How pip is asked for torch, before everything else."""
    return (ROOT / "requirements-torch.txt").read_text().split()
