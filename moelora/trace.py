"""What the environment asks for around every call of an operator; nothing, and no time, by default.

MOELORA_LOG=plan     the library prints what every gemm and layer runs, and why
MOELORA_LOG=shapes   also the arguments of every call, before it is checked
MOELORA_NVTX=1       every call is a range in Nsight's timeline
MOELORA_DUMP=folder  a call that raises leaves its arguments there: moelora replay FILE
MOELORA_DUMP_MIB=n   what all of them may take in one process, 4096 by default
"""

import contextlib
import itertools
import os
import secrets
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moelora import _C
from moelora.storage import holds, reach

MAX_DUMPS = 8  # of one process: an error that repeats should not fill a disk
DUMP_MIB = 4096  # of one process: a layer of a large model, once
SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass
class Settings:
    """What is on."""

    shapes: bool = False
    nvtx: bool = False
    dump: str = ""
    dump_mib: int = DUMP_MIB

    @classmethod
    def from_environment(cls) -> "Settings":
        env = os.environ
        limit = env.get("MOELORA_DUMP_MIB", str(DUMP_MIB))
        if not (limit.isascii() and limit.isdigit() and len(limit) < 10):
            text = f"MOELORA_DUMP_MIB={limit}: wanted a number of MiB, not {DUMP_MIB}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
            limit = str(DUMP_MIB)
        return cls(
            shapes=_C.logs_shapes(),
            nvtx=env.get("MOELORA_NVTX") == "1",
            dump=env.get("MOELORA_DUMP", ""),
            dump_mib=int(limit),
        )

    @property
    def active(self) -> bool:
        """False: operators are called without a detour."""
        return self.shapes or self.nvtx or bool(self.dump)


settings = Settings.from_environment()
active = settings.active
_dumps = itertools.count()
_dumped = 0  # bytes of tensors in the dumps of this process
_dump_lock = threading.Lock()


def call(op: Any, args: tuple[Any, ...]) -> Any:
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


def describe(op: Any, args: tuple[Any, ...]) -> str:
    """The call on one line; absent tensors and numbers are left out."""
    names = (argument.name for argument in op._schema.arguments)
    shown = ((n, _text(a)) for n, a in zip(names, args, strict=False))
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
def _range(op: Any, args: tuple[Any, ...]) -> Iterator[None]:
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


def _dump(op: Any, args: tuple[Any, ...], error: Exception) -> None:
    """Writes the arguments; whatever goes wrong here must not hide `error`."""
    number = next(_dumps)
    if number >= MAX_DUMPS:
        return
    # The folder may be everybody's: nobody else can know the name, or read what is in the file.
    name = f"moelora-{name_of(op)}-{os.getpid()}-{number}-{secrets.token_hex(8)}.pt"
    path = Path(settings.dump) / name
    try:
        _reserve(sum(_elements(t).nbytes for a in args for t in _tensors(a)))
        content = {
            "op": name_of(op),
            "args": [_packed(a) for a in args],
            "error": str(error),
            "moelora": _C.version(),
            "torch": str(torch.__version__),  # a class of its own, which is not data
        }
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(path, content)
        print(f"moelora: arguments of the failed call are in {path}", file=sys.stderr)
    except Exception as problem:
        print(f"moelora: cannot write {path}: {problem}", file=sys.stderr)


def _reserve(size: int) -> None:
    global _dumped
    with _dump_lock:
        if _dumped + size > settings.dump_mib << 20:
            raise ValueError(
                f"its {size >> 20} MiB and the {_dumped >> 20} MiB of earlier dumps are more than "
                f"MOELORA_DUMP_MIB={settings.dump_mib}"
            )
        _dumped += size


def _write(path: Path, content: dict[str, Any]) -> None:
    """Makes a new file that only its owner can read; never follows a link, leaves no half of it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with open(path, "wb", opener=lambda name, _: os.open(name, flags, 0o600)) as file:
        try:
            torch.save(content, file)
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Tensor):
        yield value


def _elements(t: Tensor) -> Tensor:
    """Every element of `t` once, where expanded dimensions show them again."""
    return t.detach()[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in t.stride())]


def _packed(value: Any) -> Any:
    """An argument for a file: of a tensor the elements and how they lie, not the whole storage."""
    if isinstance(value, list | tuple):
        return [_packed(item) for item in value]
    if not isinstance(value, Tensor):
        return value
    if not holds(value):
        raise ValueError(f"the storage of {_text(value)} was freed")
    elements = _elements(value).cpu().contiguous()
    if elements.untyped_storage().nbytes() != elements.nbytes:
        elements = elements.clone()
    return {"elements": elements, "shape": list(value.shape), "strides": list(value.stride())}


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpacked(item) for item in value]
    if isinstance(value, dict):
        return _laid_out(value["elements"], value["shape"], value["strides"], "cpu")
    return value


def _laid_out(elements: Tensor, shape: list[int], strides: list[int], device: str) -> Tensor:
    """A tensor of these strides from its elements; what lies between them is zero."""
    flat = elements.new_zeros(reach(shape, strides), device=device)
    tensor = flat.as_strided(shape, strides)
    _elements(tensor).copy_(elements)
    return tensor


def moved(t: Tensor, device: str) -> Tensor:
    """`t` on a device, with its strides."""
    if t.device.type == device:
        return t
    return _laid_out(_elements(t), list(t.shape), list(t.stride()), device)


def load_dump(path: str | Path) -> dict[str, Any]:
    """What `MOELORA_DUMP` wrote. Nothing in the file is executed.

    Raises
    ------
    ValueError
        It is not such a file.
    """
    try:
        content = torch.load(path, weights_only=True, map_location="cpu")
        op = getattr(torch.ops.moelora, content["op"]).default
        args = content["args"] = _unpacked(content["args"])
        needed = sum(not a.has_default_value() for a in op._schema.arguments)
        if not needed <= len(args) <= len(op._schema.arguments):
            raise ValueError(f"{content['op']} takes {needed} arguments or more")
    except OSError:
        raise
    except Exception as error:
        why = (str(error).splitlines() or [repr(error)])[0]
        raise ValueError(f"{path} is not a dump of moelora: {why}") from error
    return content
