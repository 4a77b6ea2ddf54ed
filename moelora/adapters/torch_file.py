"""`adapter_model.bin`, a state dict that torch.save wrote, read without unpickling it.

The file is a zip archive of records that are not compressed:

    NAME/data.pkl    a pickle of the state dict; a tensor in it names its storage
    NAME/data/0      the bytes of storage "0", and so on
    NAME/byteorder

`_Pickle` runs the few opcodes of such a pickle on values that are never hashed, compared or called,
so that each opcode takes constant time. Everything else is refused by name: other opcodes, other
globals, keys that are not strings, records and tensors of more bytes than the file has.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from io import BufferedReader
from math import prod
from pathlib import Path
from struct import Struct, error
from typing import Any, NamedTuple, NoReturn

import torch

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
_DICT = "collections.OrderedDict"
_TENSOR = "torch._utils._rebuild_tensor_v2"
_PARAMETERS = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
_GLOBALS = {*_STORAGES, *_PARAMETERS, _TENSOR, _DICT}

MAX_DIMS = 8
MAX_STACK = 10_000  # values; the pickler of Python writes dictionaries by 1000 items


class TorchFile:
    """The tensors of one file, open until `opened` closes. ValueError for anything else in it."""

    def __init__(self, path: Path, opened: ExitStack):
        self._path = path
        self._storages: dict[str, torch.Tensor] = {}
        file = opened.enter_context(path.open("rb"))
        try:
            self._archive = _Archive(file, path.stat().st_size)
            self._tensors = self._checked(_Pickle(self._archive.read("data.pkl")).run())
        except (ValueError, IndexError, error) as damage:
            raise self._refusal(damage) from None

    def keys(self) -> Sequence[str]:
        return list(self._tensors)

    def shape(self, key: str) -> tuple[int, ...]:
        return self._tensors[key].size

    def dtype(self, key: str) -> torch.dtype:
        return self._tensors[key].dtype

    def tensor(self, key: str) -> torch.Tensor:
        found = self._tensors[key]
        if found.storage not in self._storages:
            try:
                content = self._archive.read(f"data/{found.storage}")
            except ValueError as damage:
                raise self._refusal(damage) from None
            self._storages[found.storage] = torch.frombuffer(
                content or bytearray(1), dtype=torch.uint8
            )
        storage = self._storages[found.storage]
        whole = storage.numel() // found.dtype.itemsize * found.dtype.itemsize
        values = storage[:whole].view(found.dtype)
        return values.as_strided(found.size, found.stride, found.offset)

    def _checked(self, state: object) -> dict[str, _Tensor]:
        if not isinstance(state, dict):
            raise ValueError(f"it holds a {_kind(state)}, wanted a dictionary of tensors")
        size = 0
        for key, tensor in state.items():
            if not isinstance(tensor, _Tensor):
                raise ValueError(f"{key:.200} is a {_kind(tensor)}, wanted a tensor")
            size += prod(tensor.size) * tensor.dtype.itemsize
            room = self._archive.size(f"data/{tensor.storage}")
            if (end := tensor.end() * tensor.dtype.itemsize) > room:
                raise ValueError(f"{key:.200} ends at byte {end} of a storage of {room} bytes")
        if size > self._archive.length:
            raise ValueError(
                f"its tensors have {size} bytes, the file has {self._archive.length}: some share "
                "memory; call clone() and contiguous() on them before torch.save"
            )
        return state

    def _refusal(self, damage: Exception) -> ValueError:
        why = damage if isinstance(damage, ValueError) else "it is damaged"
        return ValueError(
            f"{self._path} cannot be read as only tensors: {why!s:.400}; save the tensors as "
            "adapter_model.safetensors, or once more by torch.save"
        )


class _Tensor(NamedTuple):
    """A tensor in a storage; sizes in elements."""

    storage: str
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def end(self) -> int:
        """The element after its last one."""
        if 0 in self.size:
            return 0
        reach = sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))
        return self.offset + reach + 1


class _Storage(NamedTuple):
    dtype: torch.dtype
    record: str


class _Global(NamedTuple):
    name: str


def _kind(value: object) -> str:
    return "tuple" if type(value) is tuple else type(value).__name__.lstrip("_").lower()


# ---- the archive ----

_END = Struct("<4s4H2IH")
_LOCATOR64 = Struct("<4sIQI")
_END64 = Struct("<4sQ2H2I4Q")
_ENTRY = Struct("<4s6H3I5H2I")
_LOCAL = Struct("<4s5H3I2H")
_IN_EXTRA = 0xFFFFFFFF  # the number is one of 64 bits in the extra field


class _Archive:
    """Records of a zip file that are not compressed. The directory is read, no record is."""

    def __init__(self, file: BufferedReader, length: int):
        self.length = length
        self._file = file
        self._records: dict[str, tuple[int, int]] = {}  # offset of the local header, bytes
        total = 0
        for name, offset, size in self._directory():
            if name in self._records:
                raise ValueError(f"it has two records {name!r:.80}")
            self._records[name] = offset, size
            total += size
        if total > length:
            raise ValueError(f"its records have {total} bytes, the file has {length}")
        pickles = [n for n in self._records if n.endswith("/data.pkl") and n.count("/") == 1]
        if len(pickles) != 1:
            raise ValueError(f"it has {len(pickles)} records data.pkl, wanted one")
        self._prefix = pickles[0].removesuffix("data.pkl")
        if f"{self._prefix}byteorder" in self._records:
            order = self.read("byteorder")
            if order != b"little":
                raise ValueError(f"its byte order is {bytes(order)!r:.40}, wanted little")

    def size(self, name: str) -> int:
        if self._prefix + name not in self._records:
            raise ValueError(f"it has no record {name!r:.80}")
        return self._records[self._prefix + name][1]

    def read(self, name: str) -> bytearray:
        size = self.size(name)
        offset, _ = self._records[self._prefix + name]
        head = self._unpack(_LOCAL, offset, b"PK\3\4")
        return self._bytes(offset + _LOCAL.size + head[9] + head[10], size)

    def _bytes(self, offset: int, size: int) -> bytearray:
        if offset < 0 or offset + size > self.length:
            raise ValueError("it is cut off, or no zip file, as torch.save has written since 1.6")
        self._file.seek(offset)
        content = bytearray(size)
        if self._file.readinto(content) != size:
            raise ValueError("it has become shorter")
        return content

    def _unpack(self, form: Struct, offset: int, mark: bytes) -> tuple[Any, ...]:
        values = form.unpack(self._bytes(offset, form.size))
        if values[0] != mark:
            raise ValueError("it is damaged, or no zip file, as torch.save has written since 1.6")
        return values

    def _directory(self) -> list[tuple[str, int, int]]:
        """(name, offset of the local header, bytes) of each record."""
        at = self.length - _END.size
        end = self._unpack(_END, at, b"PK\5\6")
        size, start = end[5], end[6]
        if _IN_EXTRA in (size, start):
            at = self._unpack(_LOCATOR64, at - _LOCATOR64.size, b"PK\6\7")[2]
            size, start = self._unpack(_END64, at, b"PK\6\6")[8:]
        directory, at, found = self._bytes(start, size), 0, []
        while at < size:
            entry = _ENTRY.unpack_from(directory, at)
            mark, _, _, flags, method, _, _, _, *numbers = entry[:13]
            packed, plain, name_size, extra_size, comment_size = numbers
            at += _ENTRY.size
            name = directory[at : at + name_size].decode()
            if mark != b"PK\1\2" or method or flags & 1:
                raise ValueError(f"its record {name!r:.80} is compressed, encrypted or damaged")
            at += name_size
            extra = memoryview(directory)[at : at + extra_size]
            packed, plain, offset = _wide(extra, packed, plain, entry[16])
            if packed != plain:
                raise ValueError(f"its record {name!r:.80} has two sizes, {packed} and {plain}")
            found.append((name, offset, plain))
            at += extra_size + comment_size
        return found


def _wide(extra: memoryview, packed: int, plain: int, offset: int) -> list[int]:
    """The numbers of an entry, those that are in its extra field from there."""
    at, wide = 0, 0
    while at + 4 <= len(extra) and not wide:
        if int.from_bytes(extra[at : at + 2], "little") == 1:
            wide = at + 4
        at += 4 + int.from_bytes(extra[at + 2 : at + 4], "little")
    numbers = []
    for number in (plain, packed, offset):  # in the order of the field
        if number == _IN_EXTRA:
            number = int.from_bytes(extra[wide : wide + 8], "little") if wide else number
            wide += 8
        numbers.append(number)
    return [numbers[1], numbers[0], numbers[2]]


# ---- the pickle ----


class _Pickle:
    """Runs a pickle of a dictionary of tensors. `_Tensor`, `_Storage` and `_Global` stand for what
    torch.load would make.
    """

    def __init__(self, content: bytearray):
        self._content = bytes(content)
        self._at = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> object:
        while (code := self._take(1)) != b".":
            if (act := _OPCODES.get(code)) is None:
                _refuse_opcode(code)
            act(self)
            if len(self._stack) + len(self._marks) > MAX_STACK:
                raise ValueError(f"its pickle has more than {MAX_STACK} values on the stack")
        return self._pop()

    def _take(self, count: int) -> bytes:
        taken = self._content[self._at : self._at + count]
        self._at += count
        if len(taken) != count:
            raise IndexError
        return taken

    def _number(self, count: int, signed: bool = False) -> int:
        return int.from_bytes(self._take(count), "little", signed=signed)

    def _pop(self) -> Any:
        if self._marks and self._marks[-1] == len(self._stack):
            raise ValueError("its pickle takes values across a mark")
        return self._stack.pop()

    def _pop_to_mark(self) -> list[Any]:
        mark = self._marks.pop()
        values = self._stack[mark:]
        del self._stack[mark:]
        return values

    def _protocol(self) -> None:
        if (version := self._number(1)) != 2:
            raise ValueError(f"its pickle has protocol {version}, wanted 2, that of torch.save")

    def _text(self) -> None:
        self._stack.append(self._take(self._number(4)).decode())

    def _long(self) -> None:
        if (size := self._number(1)) > 8:
            raise ValueError(f"its pickle has an integer of {size} bytes")
        self._stack.append(self._number(size, signed=True))

    def _integer(self, count: int, signed: bool = False) -> None:
        self._stack.append(self._number(count, signed))

    def _global(self) -> None:
        end = self._content.find(b"\n", self._content.find(b"\n", self._at) + 1)
        name = self._content[self._at : end].decode().replace("\n", ".")
        if name not in _GLOBALS:
            raise ValueError(f"its pickle has GLOBAL {name:.100}")
        self._at = end + 1
        self._stack.append(_Global(name))

    def _tuple(self, count: int) -> None:
        values = tuple(self._stack[-count:])
        if len(self._stack) - count < (self._marks[-1] if self._marks else 0):
            raise ValueError("its pickle takes values across a mark")
        self._stack[-count:] = [values]

    def _put(self, count: int) -> None:
        self._memo[self._number(count)] = self._stack[-1]

    def _get(self, count: int) -> None:
        if (index := self._number(count)) not in self._memo:
            raise ValueError(f"its pickle has no value {index}")
        self._stack.append(self._memo[index])

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise ValueError("its pickle sets items of no dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is not str:
                raise ValueError(f"a key is a {_kind(key)}, wanted a string")
            target[key] = value

    def _storage(self) -> None:
        match self._pop():
            case ("storage", _Global(name), str(record), str(), int()) if name in _STORAGES:
                self._stack.append(_Storage(_STORAGES[name], record))
            case _:
                raise ValueError("its pickle has a reference that is no storage")

    def _reduce(self) -> None:
        arguments, function = self._pop(), self._pop()
        match function, arguments:
            case _Global(name), () if name == _DICT:
                made: Any = {}
            case _Global(name), (_Tensor() as made, *_) if name in _PARAMETERS:
                pass
            case (
                _Global(name),
                (_Storage(dtype, record), int(offset), tuple(size), tuple(stride), _, _, *flags),
            ) if name == _TENSOR:
                if flags:  # of `tensor.imag` of a conjugate: negated when read
                    raise ValueError("a tensor has metadata, such as that of a negated view")
                if len(size) != len(stride) or len(size) > MAX_DIMS:
                    raise ValueError(f"a tensor has {len(size)} sizes and {len(stride)} strides")
                numbers = (offset, *size, *stride)
                if not all(isinstance(n, int) and 0 <= n < 2**63 for n in numbers):
                    raise ValueError("a tensor has an offset, size or stride out of range")
                made = _Tensor(record, dtype, offset, size, stride)
            case _:
                raise ValueError("its pickle makes something else than dictionaries and tensors")
        self._stack.append(made)

    def _build(self) -> None:
        """Drop `_metadata` of a state dict."""
        self._pop()
        if type(self._stack[-1]) is not dict:
            raise ValueError("its pickle sets attributes of no dictionary")


def _refuse_opcode(code: bytes) -> NoReturn:
    letter = code.decode("latin-1")
    name = next((op.name for op in pickletools.opcodes if op.code == letter), f"byte {code.hex()}")
    raise ValueError(f"its pickle has {name}, which no dictionary of tensors has")


_OPCODES: dict[bytes, Callable[[_Pickle], Any]] = {
    b"\x80": _Pickle._protocol,
    b"c": _Pickle._global,
    b"X": _Pickle._text,
    b"K": lambda p: p._integer(1),
    b"M": lambda p: p._integer(2),
    b"J": lambda p: p._integer(4, signed=True),
    b"\x8a": _Pickle._long,
    b"N": lambda p: p._stack.append(None),
    b"\x88": lambda p: p._stack.append(True),
    b"\x89": lambda p: p._stack.append(False),
    b"}": lambda p: p._stack.append({}),
    b")": lambda p: p._stack.append(()),
    b"(": lambda p: p._marks.append(len(p._stack)),
    b"t": lambda p: p._stack.append(tuple(p._pop_to_mark())),
    b"\x85": lambda p: p._tuple(1),
    b"\x86": lambda p: p._tuple(2),
    b"\x87": lambda p: p._tuple(3),
    b"q": lambda p: p._put(1),
    b"r": lambda p: p._put(4),
    b"h": lambda p: p._get(1),
    b"j": lambda p: p._get(4),
    b"s": lambda p: p._set_items([p._pop(), p._pop()][::-1]),
    b"u": lambda p: p._set_items(p._pop_to_mark()),
    b"Q": _Pickle._storage,
    b"R": _Pickle._reduce,
    b"b": _Pickle._build,
}
