"""`adapter_model.bin`, a state dict that torch.save wrote, read without calling what it names.

The file is a zip archive of records that are not compressed:

    NAME/data.pkl    a pickle of the state dict; a tensor in it names its storage
    NAME/data/0      the bytes of storage "0", and so on
    NAME/byteorder

Python's zipfile and the unpickler of its pickle module read it. The latter has only the opcodes of
such pickles, and builds `_Tensor` in place of tensors: nothing but strings is hashed, so that each
opcode takes constant time. Everything else is refused by name: other opcodes, other globals, keys
that are not strings, records and tensors of more bytes than the file has.
"""

from __future__ import annotations

import pickle
import pickletools
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import torch

from moelora.adapters.factors import Stored
from moelora.operators.storage import reach

_STORAGES = {
    "torch.FloatStorage": torch.float32,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.HalfStorage": torch.float16,
    "torch.DoubleStorage": torch.float64,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}
MAX_DIMS = 8


def read_torch_file(path: Path, opened: ExitStack) -> dict[str, Stored]:
    """The tensors of one file, open until `opened` closes. ValueError for anything else in it."""
    length = path.stat().st_size
    storages: dict[str, torch.Tensor] = {}

    def read(tensor: _Tensor) -> torch.Tensor:
        if tensor.storage not in storages:
            with _named(path):
                content = bytearray(archive.read(prefix + tensor.storage)) or bytearray(1)
            storages[tensor.storage] = torch.frombuffer(content, dtype=torch.uint8)
        storage = storages[tensor.storage]
        whole = storage.numel() // tensor.dtype.itemsize * tensor.dtype.itemsize
        values = storage[:whole].view(tensor.dtype)
        return values.as_strided(tensor.shape, tensor.stride, tensor.offset)

    with _named(path):
        archive = opened.enter_context(ZipFile(path))
        sizes = _records(archive, length)
        pickles = [name for name in sizes if re.fullmatch("[^/]*/data.pkl", name)]
        if len(pickles) != 1:
            raise ValueError(f"it has {len(pickles)} records data.pkl, wanted one")
        prefix = pickles[0].removesuffix(".pkl") + "/"
        order = pickles[0].replace("data.pkl", "byteorder")
        if order in sizes and (found := archive.read(order)) != b"little":
            raise ValueError(f"its byte order is {found!r:.40}, wanted little")
        state = _Unpickler(BytesIO(archive.read(pickles[0]))).load()
        _check(state, {name.removeprefix(prefix): size for name, size in sizes.items()}, length)
    return {key: Stored(one.shape, one.dtype, partial(read, one)) for key, one in state.items()}


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors name the file, and say what to do."""
    try:
        yield
    except Exception as damage:  # of zipfile and pickle, for any bytes
        why = str(damage) if isinstance(damage, ValueError) else "it is damaged"
        if isinstance(damage, BadZipFile):
            why = "it is damaged, or no zip file, as torch.save has written since 1.6"
        raise ValueError(
            f"{path} cannot be read as only tensors: {why:.400}; save the tensors as "
            "adapter_model.safetensors, or once more by torch.save"
        ) from None


def _records(archive: ZipFile, length: int) -> dict[str, int]:
    """The bytes of each record; together at most those of the file, which ends with the archive."""
    assert archive.fp is not None
    archive.fp.seek(max(0, length - 22))
    if not archive.fp.read().startswith(b"PK\5\6"):
        raise BadZipFile
    sizes: dict[str, int] = {}
    for record in archive.infolist():
        name = record.filename
        if record.compress_type != ZIP_STORED or record.flag_bits & 1:
            raise ValueError(f"its record {name!r:.80} is compressed or encrypted")
        if record.compress_size != record.file_size:
            raise ValueError(f"its record {name!r:.80} has two sizes")
        if name in sizes:
            raise ValueError(f"it has two records {name!r:.80}")
        record.CRC = None  # type: ignore[assignment] # torch.save may leave it out
        sizes[name] = record.file_size
    if (total := sum(sizes.values())) > length:
        raise ValueError(f"its records have {total} bytes, the file has {length}")
    return sizes


def _check(state: object, sizes: Mapping[str, int], length: int) -> None:
    """ValueError unless it is a dictionary of tensors that the storages have."""
    if not isinstance(state, dict):
        raise ValueError(f"it holds a {_kind(state)}, wanted a dictionary of tensors")
    size = 0
    for key, tensor in state.items():
        if not isinstance(tensor, _Tensor):
            raise ValueError(f"{key:.200} is a {_kind(tensor)}, wanted a tensor")
        if tensor.storage not in sizes:
            raise ValueError(f"it has no record of storage {tensor.storage!r:.80} of {key:.200}")
        size += prod(tensor.shape) * tensor.dtype.itemsize
        end, room = tensor.end() * tensor.dtype.itemsize, sizes[tensor.storage]
        if end > room:
            raise ValueError(f"{key:.200} ends at byte {end} of a storage of {room} bytes")
    if size > length:
        raise ValueError(
            f"its tensors have {size} bytes, the file has {length}: some share memory; call "
            "clone() and contiguous() on them before torch.save"
        )


class _Tensor(NamedTuple):
    """A tensor in a storage; sizes in elements."""

    storage: str
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def end(self) -> int:
        """The element after its last one."""
        elements = reach(self.shape, self.stride)
        return self.offset + elements if elements else 0


class _Storage(NamedTuple):
    dtype: torch.dtype
    record: str


class _Items(dict[str, Any]):
    """A dictionary of a pickle."""

    def __setitem__(self, key: object, value: Any) -> None:
        if type(key) is not str:  # a tuple within tuples may take years to hash
            raise ValueError(f"a key is a {_kind(key)}, wanted a string")
        super().__setitem__(key, value)


def _kind(value: object) -> str:
    return "dict" if isinstance(value, _Items) else type(value).__name__.lstrip("_").lower()


# ---- the pickle ----


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *more: Any) -> _Tensor:
    if len(more) != 2:  # of `tensor.imag` of a conjugate: negated when read
        raise ValueError("a tensor has metadata, such as that of a negated view")
    if len(size) != len(stride) or len(size) > MAX_DIMS:
        raise ValueError(f"a tensor has {len(size)} sizes and {len(stride)} strides")
    if not all(type(n) is int and 0 <= n < 2**63 for n in (offset, *size, *stride)):
        raise ValueError("a tensor has an offset, size or stride out of range")
    dtype, record = storage
    return _Tensor(record, dtype, offset, tuple(size), tuple(stride))


_GLOBALS = {
    **_STORAGES,
    "collections.OrderedDict": lambda: _Items(),  # which takes no arguments here
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
    "torch._utils._rebuild_parameter_with_state": lambda data, *_: data,
}


_OPCODES = (
    "PROTO STOP GLOBAL REDUCE BINPERSID BINUNICODE BININT BININT1 BININT2 LONG1 NONE NEWTRUE "
    "NEWFALSE MARK EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 SETITEM SETITEMS BINPUT LONG_BINPUT "
    "BINGET LONG_BINGET"
)
_CODES = [getattr(pickle, name)[0] for name in _OPCODES.split()]


class _Opcodes(dict[int, Any]):
    """Those of the pickle of a state dict; others are refused."""

    def __missing__(self, code: int) -> None:
        names = (op.name for op in pickletools.opcodes if ord(op.code) == code)
        name = next(names, f"byte {code:02x}")
        raise ValueError(f"its pickle has {name}, which no dictionary of tensors has")


class _Unpickler(pickle._Unpickler):
    """Builds a dictionary of `_Tensor`."""

    def find_class(self, module: str, name: str) -> Any:
        if (full := f"{module}.{name}") not in _GLOBALS:
            raise ValueError(f"its pickle has GLOBAL {full:.100}")
        return _GLOBALS[full]

    def persistent_load(self, pid: Any) -> _Storage:
        match pid:
            case ("storage", torch.dtype() as dtype, str(record), str(), int()):
                return _Storage(dtype, record)
        raise ValueError("its pickle has a reference that is no storage")

    def load_empty_dictionary(self: Any) -> None:
        self.append(_Items())

    def load_build(self: Any) -> None:
        """Drop `_metadata` of a state dict."""
        self.stack.pop()
        if not isinstance(self.stack[-1], _Items):
            raise ValueError("its pickle sets attributes of no dictionary")

    dispatch = _Opcodes((code, pickle._Unpickler.dispatch[code]) for code in _CODES)
    dispatch[ord(pickle.EMPTY_DICT)] = load_empty_dictionary
    dispatch[ord(pickle.BUILD)] = load_build
