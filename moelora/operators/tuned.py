"""Files of tuned plans, written by `moelora tune` and read from $MOELORA_CONFIG_DIR.

One file per layer, dtype and device::

    {
      "moelora": "0.1.0",                       the version that measured
      "device": {"type": "cuda", "name": "NVIDIA H200", "compute_capability": 90, "units": 132},
      "dtype": "bf16",
      "layer": {"experts": 128, "top_k": 8, "hidden": 2048, "intermediate": 768},
      "plans": {"16": "gemm_bf16_16x128x64_sm90", "1024": "gemm_bf16_96x128x64_sm90"}
    }

`plans` maps a maximum number of tokens to a variant; the largest also serves larger batches. A
comma-separated list names variants of different roles: a projection, a sort, a shrink, a sum. A
CPU's device is {"type": "cpu", "name": ..., "features": [...]}. Anything else in a file (what was
measured, when) is informative.
"""

import json
import os
import platform
import stat
import warnings
from pathlib import Path
from typing import Any

import torch

from moelora import _C
from moelora.operators.terminal import printable

DEVICES = {"cpu": 0, "cuda": 1}  # moelora_device
DTYPES = {"fp32": 0, "bf16": 1, "fp16": 2}  # moelora_dtype

MAX_BYTES = 1 << 20  # per file; far more than MAX_PLANS plans take
MAX_PLANS = 1 << 10  # per file; the library accepts no more


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def this_device(kind: str) -> dict[str, Any]:
    """Description of the CPU or the current GPU in files."""
    if kind == "cpu":
        return {"type": "cpu", "name": cpu_name(), "features": _C.cpu_features().split()}
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "type": "cuda",
        "name": gpu.name,
        "compute_capability": 10 * gpu.major + gpu.minor,
        "units": gpu.multi_processor_count,
    }


def file_name(content: dict[str, Any]) -> str:
    """File name for `content`, derived from its layer, dtype and device."""
    layer = content["layer"]
    device = "".join(c if c.isalnum() else "_" for c in content["device"]["name"])
    return (
        f"E={layer['experts']},top_k={layer['top_k']},K={layer['hidden']},"
        f"I={layer['intermediate']},dtype={content['dtype']},device={device}.json"
    )


def write(folder: str | Path, content: dict[str, Any]) -> Path:
    """Write a file atomically: other processes read the old or the new one."""
    path = Path(folder) / file_name(content)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(fresh, path)
    return path


def load(folder: str | Path) -> int:
    """Add the plans of all files in `folder` to the library; return their number.

    Warns about files that cannot be read, name unknown variants, or were measured by another
    version, and never raises, since `import moelora` calls it. Plans of other CPUs are skipped with
    a warning; the library recognizes those of other GPUs, since querying a GPU's name would
    initialize CUDA.
    """
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(".json"))
    except (OSError, ValueError) as error:
        _warn(f"MOELORA_CONFIG_DIR: {str(folder):.200} is not a folder that can be read: {error}")
        return 0
    return sum(_load_file(Path(folder, name)) for name in names)


def _read(path: Path) -> str:
    """Text of a regular file; never waits for a pipe."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)

    with open(path, "rb", opener=opener) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("not a regular file")
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError(f"more than {MAX_BYTES} bytes")
    return content.decode()


def _load_file(path: Path) -> int:
    try:
        content = json.loads(_read(path))
        device, layer = content["device"], content["layer"]
        key: list[Any] = [
            DEVICES[device["type"]],
            int(device.get("compute_capability", 0)),
            int(device.get("units", 0)),
            DTYPES[content["dtype"]],
            *(int(layer[name]) for name in ("experts", "top_k", "hidden", "intermediate")),
        ]
        plans = [
            (int(tokens), name)
            for tokens, names in content["plans"].items()
            for name in str(names).split(",")
        ]
        if len(plans) > MAX_PLANS:
            raise ValueError(f"{len(plans)} plans, wanted at most {MAX_PLANS}")
        version = str(content["moelora"])
    except Exception as error:  # a file may contain anything
        _warn(f"{path} is not a file of tuned plans: {error!r:.200}")
        return 0
    if device["type"] == "cpu" and device.get("features") != _C.cpu_features().split():
        _warn(f"{path} was measured on a CPU with other features: left out")
        return 0
    if version != _C.version():
        _warn(f"{path} was measured by moelora {version:.40}, this is {_C.version()}: tune again")
    loaded = 0
    for tokens, name in plans:
        try:
            plan: Any = (*key, tokens, name)
            _C.add_tuned_plan(*plan)
            loaded += 1
        except (ValueError, OverflowError) as error:
            _warn(f"{path}: {error!s:.200}")
    return loaded


def _warn(text: str) -> None:
    warnings.warn(f"moelora: {printable(text)}", RuntimeWarning, stacklevel=3)


def load_configured() -> None:
    """Load $MOELORA_CONFIG_DIR, if set."""
    if folder := os.environ.get("MOELORA_CONFIG_DIR"):
        load(folder)
