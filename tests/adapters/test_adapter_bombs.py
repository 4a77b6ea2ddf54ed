"""Small files of adapters that claim much: each is refused in the time and memory of its size.

One process reads them all, under limits of its address space and of its CPU time.
"""

import io
import json
import re
import struct
import subprocess
import sys
import zlib

import pytest
import torch

MIB, SECONDS = 256, 120  # for all files together; without a bound they take GiBs or years
READ = """
import resource, sys
from pathlib import Path
from moelora.adapters import LinearLayer, load, peek
from moelora.adapters.describe import describe

kept, *folders = sys.argv[1:]
linears = [LinearLayer("q_proj", 8, 8)]
load(kept, None, [], linears)
describe(kept)
pages = int(Path("/proc/self/statm").read_text().split()[0])
more = [("AS", pages * resource.getpagesize() + MIB * 2**20)]
more += [("CPU", int(resource.getrusage(resource.RUSAGE_SELF).ru_utime) + SECONDS)]
for name, limit in more:
    resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
for folder in folders:
    for call in (lambda f: load(f, None, [], linears), lambda f: peek(f, [], linears), describe):
        try:
            call(folder)
        except ValueError as error:
            print(Path(folder).name, error, flush=True)
""".replace("MIB", str(MIB)).replace("SECONDS", str(SECONDS))


# ---- pickles ----


def text(string):
    return b"X" + struct.pack("<I", len(string)) + string.encode()


def numbers(*values):
    return b"(" + b"".join(b"\x8a\x08" + struct.pack("<q", n) for n in values) + b"t"


def tensor(size, stride, offset=0):
    """A tensor of the float32 storage 0."""
    storage = text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"M\0\4"
    place = b"\x8a\x08" + struct.pack("<q", offset) + numbers(*size) + numbers(*stride)
    hooks = b"\x89ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n_rebuild_tensor_v2\n((" + storage + b"tQ" + place + hooks + b"tR"


def state(**tensors):
    return b"}(" + b"".join(text(key) + value for key, value in tensors.items()) + b"u"


A, B = tensor((2, 8), (8, 1)), tensor((8, 2), (2, 1), offset=16)
KEPT = {f"base_model.model.q_proj.lora_{side}.weight": t for side, t in (("A", A), ("B", B))}
SHARED, ENDLESS = tensor((1024,), (1,)), tensor((0, 1 << 62, 1 << 62), (1, 1, 1))
NESTED = b")" + b"q\0h\0\x86" * 60  # 2^60 leaves, which a hash visits


# ---- archives ----


def archive(*pickles, more=(), byteorder=b"little"):
    """A file of torch.save, with `more` records as (name, content, changes of their entry)."""
    records = [("data.pkl", b"\x80\2" + pickle + b".", {}) for pickle in pickles]
    records += [("byteorder", byteorder, {}), ("version", b"3\n", {})]
    records += [("data/0", bytes(4096), {}), *more]
    content, directory = b"", b""
    for name, data, changes in records:
        path = f"law/{name}".encode()
        entry = {"at": len(content), "size": len(data), "method": 0, "extra": b""} | changes
        sizes = (zlib.crc32(data), len(data), entry["size"], len(path))
        local = (20, 0, entry["method"], 0, 0)
        content += struct.pack("<4s5H3I2H", b"PK\3\4", *local, *sizes, 0) + path + data
        tail = (len(entry["extra"]), 0, 0, 0, 0, entry["at"])
        sizes = (sizes[0], entry.get("packed", entry["size"]), *sizes[2:])
        directory += struct.pack("<4s6H3I5H2I", b"PK\1\2", 20, *local, *sizes, *tail)
        directory += path + entry["extra"]
    return content + directory + end(len(records), len(directory), len(content))


def end(count, size, start):
    return struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, size, start, 0)


def end64(size):
    """The end of an archive whose directory has that size."""
    wide = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, size, 0)
    return wide + struct.pack("<4sIQI", b"PK\6\7", 0, 0, 1) + end(1, 0xFFFFFFFF, 0xFFFFFFFF)


def deflated(size):
    packed = zlib.compress(bytes(size))[2:-4]
    return ("data/1", packed, {"method": 8, "size": size, "packed": len(packed)})


def legacy():
    file = io.BytesIO()
    torch.save({"a": torch.zeros(2)}, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


WIDE = {"size": 0xFFFFFFFF, "extra": struct.pack("<2H2Q", 1, 16, 1 << 62, 1 << 62)}
OVER = "data/0", b"", {"at": 0, "size": 4096}
TORCH = {
    "key-of-nested-tuples": (archive(b"}" + NESTED + b"Ns"), "a key is a tuple"),
    "key-of-deep-tuples": (archive(b"})" + b"\x85" * 200_000 + b"Ns"), "a key is a tuple"),
    "value-of-nested-tuples": (archive(state(a=NESTED)), "a is a tuple, wanted a tensor"),
    "key-of-a-tensor": (archive(b"}" + A + b"Ns"), "a key is a tensor"),
    "expanded": (archive(state(a=tensor((1 << 15, 1 << 15), (0, 0)))), "have 4294967296 bytes"),
    "overlapping": (archive(state(a=tensor((256, 768), (1, 1)))), "have 786432 bytes"),
    "shared": (archive(state(**dict.fromkeys(map(str, range(100)), SHARED))), "409600.*clone"),
    "past-the-end": (archive(state(a=tensor((2,), (1 << 60,)))), "a ends at byte 46116"),
    "negated": (
        archive(state(a=A.replace(b")RtR", b")R}" + text("neg") + b"\x88stR"))),
        "metadata, such as that of a negated view",
    ),
    "negative": (archive(state(a=tensor((-1,), (1,)))), "out of range"),
    "empty-and-endless": (archive(state(**KEPT | {min(KEPT): ENDLESS})), "shape is"),
    "many-sizes": (archive(state(a=tensor((1,) * 2000, (0,) * 2000))), "2000 sizes"),
    "long-integer": (archive(b"}\x8a\xff" + b"\x01" * 255 + b"0"), "POP"),
    "longer-integer": (archive(b"}\x8b" + struct.pack("<i", 1 << 30)), "LONG4"),
    "digits": (archive(b"}L" + b"9" * 1_000_000 + b"L\n"), "LONG,"),
    "many-values": (archive(b"}" * 1_000_000), "no tensors|no LoRA factors"),
    "many-marks": (archive(b"(" * 1_000_000), "damaged"),
    "many-memos": (
        archive(b"}" + b"".join(b"r" + struct.pack("<I", n) for n in range(100_000))),
        "no tensors|no LoRA factors",
    ),
    "unknown-memo": (archive(b"h\7"), "damaged"),
    "long-text": (archive(b"}X\xff\xff\xff\xff"), "damaged"),
    "no-end": (archive(b"}")[:-40], "no zip file"),
    "other-globals": (archive(b"cos\nsystem\n"), r"GLOBAL os\.system"),
    "other-calls": (archive(b"ccollections\nOrderedDict\n" + A + b"\x85R"), "damaged"),
    "other-storage": (archive(text("module") + b"Q"), "reference that is no storage"),
    "items-of-a-tensor": (archive(A + text("a") + b"Ns"), "damaged"),
    "compressed": (archive(state(**KEPT), more=[deflated(1 << 26)]), "compressed"),
    "records-that-overlap": (
        archive(state(**KEPT), more=[(f"data/{n}", *OVER[1:]) for n in range(1, 100)]),
        "its records have 4100.. bytes",
    ),
    "record-of-64-bits": (archive(state(**KEPT), more=[("data/1", b"", WIDE)]), "have 46116860"),
    "record-twice": (archive(state(**KEPT), more=[OVER]), "two records 'law/data/0'"),
    "pickle-twice": (archive(state(**KEPT), b"}"), "two records"),
    "no-pickle": (archive(), "0 records data.pkl"),
    "no-storage": (archive(state(**KEPT)).replace(b"law/data/0", b"law/data/7"), "no record"),
    "directory-past-the-end": (end(1, 1 << 31, 0), "no zip file"),
    "directory-of-64-bits": (end64(1 << 62), "no zip file"),
    "byte-order": (archive(state(**KEPT), byteorder=b"big"), "byte order is b'big'"),
    "legacy": (legacy(), "no zip file"),
    "empty": (b"", "no zip file"),
}


def header(content, length=None):
    data = content.encode()
    return struct.pack("<Q", len(data) if length is None else length) + data


def entry(shape, start=0, stop=0):
    return json.dumps({"dtype": "F32", "shape": shape, "data_offsets": [start, stop]})


SAFETENSORS = {
    "header-of-64-bits": (header("{}", 1 << 63), "cannot be read"),
    "header-past-the-end": (header("{}", 99_000_000), "cannot be read"),
    "header-of-lists": (header('{"a":' + "[" * 100_000), "cannot be read"),
    "shape-past-the-end": (header('{"a":' + entry([1 << 30, 1 << 30], 0, 1 << 62) + "}"), "read"),
    "shape-of-many": (header('{"a":' + entry([0] + [9] * 100_000) + "}"), "a is not a LoRA"),
    "many-tensors": (
        header("{" + ",".join(f'"a{n}":{entry([0])}' for n in range(20_000)) + "}"),
        "is not a LoRA factor",
    ),
}


def write(folder, name, content):
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / f"adapter_model.{name}").write_bytes(content)


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What loading each file says, and describing it."""
    root = tmp_path_factory.mktemp("files")
    write(root / "kept", "bin", archive(state(**KEPT)))
    assert torch.load(root / "kept" / "adapter_model.bin", weights_only=True).keys() == KEPT.keys()
    for files, kind in ((TORCH, "bin"), (SAFETENSORS, "safetensors")):
        for name, (content, _) in files.items():
            write(root / name, kind, content)
    folders = [str(root / name) for name in ("kept", *TORCH, *SAFETENSORS)]
    done = subprocess.run(
        [sys.executable, "-c", READ, *folders], capture_output=True, text=True, check=False
    )
    lines = [line.partition(" ") for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"after {lines[-1:]}: {done.stderr[-500:]}"
    return [(name, words) for name, _, words in lines]


@pytest.mark.parametrize(
    ("name", "message"),
    [(name, why) for files in (TORCH, SAFETENSORS) for name, (_, why) in files.items()],
)
def test_a_file_that_claims_more_than_it_has(said, name, message):
    words = [words for which, words in said if which == name]
    assert len(words) >= 2, "it was loaded"
    for told in words:
        assert re.search(message, told), told
