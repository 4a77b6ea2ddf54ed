"""Logging and dumps of operator calls, enabled by environment variables.

MOELORA_LOG=plan     the library prints the kernels of every gemm and layer, and why
MOELORA_LOG=shapes   also the arguments of every call, before it is checked
MOELORA_DUMP=folder  a call that raises writes its arguments there: moelora replay FILE
"""

import itertools
import os
import secrets
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moelora import _C
from moelora.operators import dump
from moelora.operators.checks import dtype_name
from moelora.operators.schema import names_of
from moelora.operators.torch_private import name_of

MAX_DUMPS = 8  # per process: a repeating error should not fill the disk
DUMP_MIB = 4096  # per process: one call of a layer of a large model
SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass
class Settings:
    """Which features are enabled."""

    shapes: bool = False
    dump: str = ""
    dump_mib: int = DUMP_MIB

    @classmethod
    def from_environment(cls) -> "Settings":
        return cls(shapes=_C.logs_shapes(), dump=os.environ.get("MOELORA_DUMP", ""))

    @property
    def active(self) -> bool:
        """False: operators are called directly."""
        return self.shapes or bool(self.dump)


settings = Settings.from_environment()
active = settings.active
_dumps = itertools.count()
_dumped = 0  # bytes of tensors in this process's dumps
_dump_lock = threading.Lock()


def call(op: Any, args: tuple[Any, ...]) -> Any:
    """Call `op(*args)` with the enabled features."""
    if settings.shapes:
        print(f"moelora: {describe(op, args)}", file=sys.stderr, flush=True)
    try:
        return op(*args)
    except Exception as error:
        if settings.dump:
            _dump(op, args, error)
        raise


def describe(op: Any, args: tuple[Any, ...]) -> str:
    """The call on one line, without absent tensors and numbers."""
    shown = ((n, _text(a)) for n, a in zip(names_of(op), args, strict=False))
    return " ".join([name_of(op), *(f"{n}={text}" for n, text in shown if text)])


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_text, value)) + "]" if value else ""
    if not isinstance(value, Tensor):
        return "" if isinstance(value, float) and value == 0 else str(value)
    if value.dim() == 1 and value.numel() == 0:
        return ""
    dtype = SHORT.get(value.dtype, dtype_name(value.dtype))
    strides = "" if value.is_contiguous() else f" strides {list(value.stride())}"
    return f"{dtype}{list(value.shape)}{strides}@{value.device}".replace(" ", "")


def _dump(op: Any, args: tuple[Any, ...], error: Exception) -> None:
    """Write the arguments; failures here must not hide `error`."""
    number = next(_dumps)
    if number >= MAX_DUMPS:
        return
    # The folder may be shared: other users must not guess the name, nor read the file.
    name = f"moelora-{name_of(op)}-{os.getpid()}-{number}-{secrets.token_hex(8)}.safetensors"
    path = Path(settings.dump) / name
    try:
        _reserve(dump.nbytes(args))
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        dump.write(path, name_of(op), args, error)
        print(f"moelora: arguments of the failed call are in {path}", file=sys.stderr)
    except Exception as problem:
        print(f"moelora: cannot write {path}: {problem}", file=sys.stderr)


def _reserve(size: int) -> None:
    global _dumped
    with _dump_lock:
        if _dumped + size > settings.dump_mib << 20:
            raise ValueError(
                f"its {size >> 20} MiB and the {_dumped >> 20} MiB of earlier dumps are more than "
                f"the {settings.dump_mib} MiB of a process"
            )
        _dumped += size
