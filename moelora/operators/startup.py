"""Explain import errors: the requirements of `import moelora` on torch."""

import importlib.metadata
import platform
import re
from pathlib import Path

import torch

LOWEST_TORCH = (2, 11)  # the first with all functions of csrc/glue/abi.h


def check_torch(version: str) -> None:
    """ImportError for a torch without the C ABI that the extension uses."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and tuple(map(int, found.groups())) < LOWEST_TORCH:
        wanted = ".".join(map(str, LOWEST_TORCH))
        raise ImportError(f"torch is {version}, moelora needs {wanted} or later: its stable C ABI")


def explain(error: ImportError, folder: Path = Path(__file__).parents[2]) -> ImportError:
    """Why the extension of the package in `folder` does not load, and what to do about it."""
    if isinstance(error, ModuleNotFoundError) or "cannot import name '_C'" in str(error):
        if not (folder / "csrc").is_dir():
            return ImportError(
                f"moelora's extension, _C.abi3.so, is not in {folder / 'moelora'}: the wheel was "
                f"for another platform than {platform.system()} {platform.machine()}"
            )
        build = "run pip install --no-build-isolation -e . there, or make build"
        # A source tree on the path may hide an installed moelora that has its extension.
        found = importlib.metadata.distributions(name="moelora")
        if any(Path(str(d.locate_file("moelora/_C.abi3.so"))).is_file() for d in found):
            build = (
                f"{build}, for its notebooks and examples; or leave this folder, for the moelora "
                "that is installed"
            )
        return ImportError(f"{folder} is a source tree of moelora that is not built: {build}")
    return ImportError(
        f"moelora's extension does not load with torch {torch.__version__}: {error}. It calls "
        "torch's stable C ABI and libc: build it anew on this machine (in a checkout of moelora, "
        "pip install --no-build-isolation .), and report this message"
    )


check_torch(torch.__version__)
try:
    from moelora import _C  # noqa: F401
except ImportError as problem:
    raise explain(problem) from None
