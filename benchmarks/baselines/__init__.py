"""Baselines of `moelora bench` that a wheel does not have: vLLM's kernels without vLLM.

docs/benchmarks.md says what `$MOELORA_PEERS` must contain.
"""

import functools
import importlib
import os
import pathlib
import sys
import tarfile
from typing import Any

from moelora.bench import baselines
from moelora.bench.baselines import Entry, require

VLLM = f"{__name__}.vllm"
PEERS = {
    "vllm": Entry(f"{VLLM}:VLLM", "vLLM's own kernels, from $MOELORA_PEERS"),
    "marlin": Entry(f"{VLLM}:Marlin", "vLLM's Marlin layer, from $MOELORA_PEERS", True),
    "triton_fp8": Entry(f"{VLLM}:TritonFP8", "vLLM's FP8 layer, from $MOELORA_PEERS", True),
}
TRITON_CACHE = pathlib.Path("/tmp/vq_triton_cache")  # hard-coded in the packed files


@functools.cache
def load(name: str, folder: str) -> Any:
    """Module `name` of the folder vk/ in $MOELORA_PEERS, by default in .peers/`folder`."""
    root = pathlib.Path(os.environ.get("MOELORA_PEERS", f".peers/{folder}")).resolve()
    require((root / "vk" / f"{name}.py").exists(), f"$MOELORA_PEERS has no vk/{name}.py")
    if (packed := root / "bin" / "triton_cache.tar.xz").exists():
        use_compiled(packed)
    os.environ.setdefault("VK_MODE", "cuda")
    sys.path.insert(0, str(root / "vk"))
    return importlib.import_module(name)


def use_compiled(packed: pathlib.Path) -> None:
    """Let Triton find precompiled kernels."""
    os.environ.setdefault("TRITON_CACHE_DIR", str(TRITON_CACHE))
    os.environ.setdefault("TRITON_STORE_BINARY_ONLY", "1")
    if not (mark := TRITON_CACHE / ".vq_unpacked").exists():
        TRITON_CACHE.mkdir(parents=True, exist_ok=True)
        with tarfile.open(packed) as files:
            files.extractall(TRITON_CACHE, filter="data")
        mark.touch()


def register() -> None:
    """Make them known to `moelora bench` in this process; `vllm` replaces that of the wheel."""
    baselines.BASELINES.update(PEERS)
    usual = baselines.DEFAULTS["cuda"]
    usual += [name for name in PEERS if name not in usual]
