"""What the environment asks for around every call of an operator; nothing, and no time, by default.

MOELORA_LOG=plan     the library prints what every gemm and layer runs, and why
MOELORA_LOG=shapes   also the arguments of every call, before it is checked
MOELORA_NVTX=1       every call is a range in Nsight's timeline
MOELORA_DUMP=folder  a call that raises leaves its arguments there: python -m moelora replay FILE
"""

import contextlib
import itertools
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moelora import _C

MAX_DUMPS = 8  # of one process: an error that repeats should not fill a disk
SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass
class Settings:
    """What is on."""

    shapes: bool = False
    nvtx: bool = False
    dump: str = ""

    @classmethod
    def from_environment(cls) -> "Settings":
        env = os.environ
        log = env.get("MOELORA_LOG", "")
        if log not in ("", "plan", "shapes"):
            warnings.warn(f"MOELORA_LOG={log}: wanted plan or shapes", RuntimeWarning, stacklevel=2)
        return cls(
            shapes=log == "shapes",
            nvtx=env.get("MOELORA_NVTX") == "1",
            dump=env.get("MOELORA_DUMP", ""),
        )

    @property
    def active(self) -> bool:
        """False: operators are called without a detour."""
        return self.shapes or self.nvtx or bool(self.dump)


settings = Settings.from_environment()
active = settings.active
_dumps = itertools.count()


def call(op: Any, args: tuple) -> Any:
    """`op(*args)` with what the settings ask for around it."""
    if settings.shapes:
        print(f"moelora: {describe(op, args)}", file=sys.stderr, flush=True)
    with _range(op, args) if settings.nvtx else contextlib.nullcontext():
        try:
            return op(*args)
        except Exception as error:
            if settings.dump:
                _dump(op, args, error)
            raise


def name_of(op: Any) -> str:
    """`fused_experts_lora` of torch.ops.moelora.fused_experts_lora.default."""
    return op._schema.name.split("::")[1]


def describe(op: Any, args: tuple) -> str:
    """The call on one line; absent tensors and numbers are left out."""
    names = (argument.name for argument in op._schema.arguments)
    shown = ((n, _text(a)) for n, a in zip(names, args, strict=True))
    return " ".join([name_of(op), *(f"{n}={text}" for n, text in shown if text)])


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_text, value)) + "]" if value else ""
    if not isinstance(value, Tensor):
        return "" if isinstance(value, float) and value == 0 else str(value)
    if value.dim() == 1 and value.numel() == 0:
        return ""
    dtype = SHORT.get(value.dtype, str(value.dtype).removeprefix("torch."))
    strides = "" if value.is_contiguous() else f" strides {list(value.stride())}"
    return f"{dtype}{list(value.shape)}{strides}@{value.device}".replace(" ", "")


@contextlib.contextmanager
def _range(op: Any, args: tuple) -> Iterator[None]:
    first = next((list(a.shape) for a in args if isinstance(a, Tensor)), "")
    try:
        torch.cuda.nvtx.range_push(f"moelora.{name_of(op)} {first}")
    except RuntimeError:  # a build of torch without CUDA
        settings.nvtx = False
        warnings.warn("MOELORA_NVTX=1: this torch has no NVTX", RuntimeWarning, stacklevel=2)
        yield
        return
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()


def _dump(op: Any, args: tuple, error: Exception) -> None:
    """Writes the arguments; whatever goes wrong here must not hide `error`."""
    number = next(_dumps)
    if number >= MAX_DUMPS:
        return
    path = Path(settings.dump) / f"moelora-{name_of(op)}-{os.getpid()}-{number}.pt"
    content = {
        "op": name_of(op),
        "args": list(args),
        "error": str(error),
        "moelora": _C.version(),
        "torch": str(torch.__version__),  # a class of its own, which is not data
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, path)
        print(f"moelora: arguments of the failed call are in {path}", file=sys.stderr)
    except Exception as problem:
        print(f"moelora: cannot write {path}: {problem}", file=sys.stderr)


def load_dump(path: str | Path) -> dict[str, Any]:
    """What `MOELORA_DUMP` wrote. Nothing in the file is executed.

    Raises
    ------
    ValueError
        It is not such a file.
    """
    try:
        content = torch.load(path, weights_only=True, map_location="cpu")
        op, args = getattr(torch.ops.moelora, content["op"]).default, content["args"]
        if len(args) != len(op._schema.arguments):
            raise ValueError(f"{content['op']} takes {len(op._schema.arguments)} arguments")
    except OSError:
        raise
    except Exception as error:
        why = str(error).splitlines()[0]
        raise ValueError(f"{path} is not a dump of moelora: {why}") from error
    return content
