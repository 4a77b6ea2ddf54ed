"""Files with the arguments of a call: written by `MOELORA_DUMP`, read by `moelora replay`.

A safetensors file. Each tensor consists of the bytes of its elements, without repetition in
expanded dimensions; "moelora_dump" of the header's metadata is JSON:

    {"op": ..., "args": [...], "error": ..., "moelora": ..., "torch": ...}

with {"tensor": name, "dtype": ..., "shape": [...], "strides": [...]} for a tensor.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from moelora import _C
from moelora.operators.checks import dtype_name
from moelora.operators.schema import OPERATORS
from moelora.operators.storage import holds, reach
from moelora.operators.torch_private import (
    OpOverload,
    arguments_of,
    name_of,
    tree_leaves,
    tree_map_only,
)

KEY = "moelora_dump"
STRINGS = ("op", "error", "moelora", "torch")
MAX_DIM = 64
# Memory that gaps between elements, expanded dimensions, results and tables of a call may take,
# relative to the size of a file.
TIMES, BYTES = 64, 64 << 20
MAX_INT = 1 << 20  # experts, slots, rows of a block
UNLIMITED = 2**31 - 1  # number of experts for sorted lists, which do not count them


def nbytes(args: Sequence[Any]) -> int:
    """Bytes of the elements that `write` would write."""
    return sum(_elements(tensor).nbytes for tensor in tensors_in(args))


def write(path: Path, op: str, args: Sequence[Any], error: Exception) -> None:
    """Create a file that only its owner can read; never follows links or leaves a partial file."""
    tensors: list[Tensor] = []
    content = {
        "op": op,
        "args": [_packed(value, tensors) for value in args],
        "error": str(error),
        "moelora": _C.version(),
        "torch": str(torch.__version__),
    }
    header: dict[str, Any] = {"__metadata__": {KEY: json.dumps(content)}}
    end = 0
    for number, tensor in enumerate(tensors):
        start, end = end, end + _elements(tensor).nbytes
        entry = {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}
        header[str(number)] = entry
    text = json.dumps(header).encode()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with open(path, "wb", opener=lambda name, _: os.open(name, flags, 0o600)) as file:
        try:
            file.write(struct.pack("<Q", len(text)) + text)
            for tensor in tensors:  # one at a time on the host
                elements = _elements(tensor).cpu().contiguous().reshape(-1)
                file.write(elements.view(torch.uint8).numpy().data)
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def load(path: str | Path) -> dict[str, Any]:
    """Content of a file: "op", "args", and the strings "error", "moelora" and "torch".

    Nothing in the file is executed, and tensors take at most `TIMES` its size plus `BYTES`.

    Raises
    ------
    ValueError
        It is not such a file.
    OSError
        It cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file")
        with safe_open(path, framework="pt") as file:
            content = _content((file.metadata() or {}).get(KEY))
            schema = _schema(content["op"])
            budget = _Budget(status.st_size)
            content["args"] = [_unpacked(value, file, budget) for value in content["args"]]
        _check_call(schema, content["args"], budget)
    except (ValueError, RuntimeError, SafetensorError) as error:
        why = (str(error).splitlines() or [repr(error)])[0]
        raise ValueError(f"{path} is not a dump of moelora: {why:.300}") from None
    return content


def moved(t: Tensor, device: str) -> Tensor:
    """`t` on a device, with its strides."""
    if t.device.type == device:
        return t
    return _laid_out(_elements(t), t.shape, t.stride(), device)


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors of nested lists and tuples."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _elements(t: Tensor) -> Tensor:
    """Elements of `t`, without repetition in expanded dimensions."""
    return t.detach()[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in t.stride())]


def _laid_out(
    elements: Tensor, shape: Sequence[int], strides: Sequence[int], device: str
) -> Tensor:
    """A tensor with these strides from its elements; zeros in between."""
    flat = elements.new_zeros(reach(shape, strides), device=device)
    tensor = flat.as_strided(shape, strides)
    _elements(tensor).copy_(elements)
    return tensor


def _packed(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, list | tuple):
        return [_packed(item, tensors) for item in value]
    if not isinstance(value, Tensor):
        return value
    if not holds(value):
        shape = tuple(value.shape)
        raise ValueError(f"the storage of a tensor of shape {shape} was freed")
    tensors.append(value)
    return {
        "tensor": str(len(tensors) - 1),
        "dtype": dtype_name(value.dtype),
        "shape": list(value.shape),
        "strides": list(value.stride()),
    }


# ---- reading untrusted files ----


class _Budget:
    """Remaining bytes that the content of a file may allocate."""

    def __init__(self, size: int):
        self.most = self.left = TIMES * size + BYTES

    def spend(self, count: int, what: str) -> None:
        if count > self.left:
            raise ValueError(f"{what} takes {count} bytes; all of a call, at most {self.most}")
        self.left -= count


def _content(text: str | None) -> dict[str, Any]:
    if text is None:
        raise ValueError(f"its header has no {KEY}")
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError(f"{KEY} is nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError(f"{KEY} is a {type(content).__name__}, wanted an object")
    for key in STRINGS:
        if not isinstance(content.get(key), str):
            raise ValueError(f"{key} is a {type(content.get(key)).__name__}, wanted a string")
    if not isinstance(content.get("args"), list):
        raise ValueError(f"args is a {type(content.get('args')).__name__}, wanted a list")
    return content


def _schema(op: str) -> Any:
    is_name = re.fullmatch("[a-z][a-z0-9_]{1,63}", op) is not None
    found = getattr(getattr(OPERATORS, op, None), "default", None) if is_name else None
    if not isinstance(found, OpOverload):
        raise ValueError(f"{op!r:.80} is no operator")
    return found


def _unpacked(value: Any, file: Any, budget: _Budget) -> Any:
    if isinstance(value, list):
        if not all(isinstance(item, dict) for item in value):
            raise ValueError("a list holds something else than tensors")
        return [_unpacked(item, file, budget) for item in value]
    if not isinstance(value, dict):
        if isinstance(value, bool | int | float | None):
            return value
        raise ValueError(f"an argument is a {type(value).__name__}")
    name, shape, strides = (value.get(key) for key in ("tensor", "shape", "strides"))
    dtype = getattr(torch, str(value.get("dtype")), None)
    if not isinstance(name, str) or not isinstance(dtype, torch.dtype):
        raise ValueError(f"tensor {name!r:.80} has dtype {value.get('dtype')!r:.80}")
    where = f"tensor {name!r:.80} of shape {shape!r:.80} and strides {strides!r:.80}"
    if not (_are_sizes(shape) and _are_sizes(strides) and len(shape) == len(strides)):
        raise ValueError(f"{where}: wanted as many of both, at most {MAX_DIM}, from 0 up")
    seen = max(math.prod(shape), reach(shape, strides)) * dtype.itemsize
    budget.spend(seen, where)
    stored = [min(n, 1) if stride == 0 else n for n, stride in zip(shape, strides, strict=True)]
    got = file.get_slice(name).get_shape()
    if got != [math.prod(stored) * dtype.itemsize]:
        raise ValueError(f"{where} has {got} bytes, wanted those of {stored} {dtype}")
    raw = file.get_tensor(name)
    if raw.dtype != torch.uint8:
        raise ValueError(f"{where} is stored as {raw.dtype}, wanted uint8")
    elements = raw.clone().view(dtype).reshape(stored)
    return _laid_out(elements, shape, strides, "cpu")


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list)
        and len(value) <= MAX_DIM
        and all(type(n) is int and 0 <= n < 2**63 for n in value)
    )


def _check_call(op: Any, args: list[Any], budget: _Budget) -> None:
    """Check the number of arguments, and that numbers and results are plausible for the file."""
    arguments = arguments_of(op)
    needed = sum(not argument.has_default_value() for argument in arguments)
    if not needed <= len(args) <= len(arguments):
        raise ValueError(f"{name_of(op)} takes {needed} to {len(arguments)} arguments")
    has_lists = any(argument.name == "sorted_token_ids" for argument in arguments)
    for argument, value in zip(arguments, args, strict=False):
        if type(value) is not int or abs(value) <= MAX_INT:
            continue
        if not (argument.name == "num_experts" and value == UNLIMITED and has_lists):
            raise ValueError(f"{argument.name} is {value}, wanted at most {MAX_INT}")
    try:
        results = op(*tree_map_only(Tensor, _on_meta, args))
    except Exception:  # the call itself reports it
        return
    for tensor in tensors_in(results):
        budget.spend(tensor.nbytes, f"a result of shape {tuple(tensor.shape)}")


def _on_meta(t: Tensor) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
