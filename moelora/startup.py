"""What `import moelora` needs of torch, in words: the dynamic linker's name a symbol at best."""

import platform
import re

import torch

LOWEST_TORCH = (2, 11)  # the first with every function of csrc/glue/abi.h


def check_torch(version: str) -> None:
    """ImportError for a torch without the C ABI that the extension calls."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and tuple(map(int, found.groups())) < LOWEST_TORCH:
        wanted = ".".join(map(str, LOWEST_TORCH))
        raise ImportError(f"torch is {version}, moelora needs {wanted} or later: its stable C ABI")


def explain(error: ImportError) -> ImportError:
    """Why the extension does not load, with what to do about it."""
    if isinstance(error, ModuleNotFoundError) or "cannot import name '_C'" in str(error):
        return ImportError(
            "moelora's extension, _C.abi3.so, is not there: this is a source tree that is not "
            "built (python setup.py build_ext --inplace), or a wheel for another platform than "
            f"{platform.system()} {platform.machine()}"
        )
    return ImportError(
        f"moelora's extension does not load with torch {torch.__version__}: {error}. It calls "
        "torch's stable C ABI and libc: build it anew on this machine (in a checkout of moelora, "
        "pip install --no-build-isolation .), and report this message"
    )


check_torch(torch.__version__)
try:
    from moelora import _C  # noqa: F401
except ImportError as problem:
    raise explain(problem) from problem
