"""Plans for devices that need not be there: what print_plan says of them, and tables of kernels."""

from __future__ import annotations

import re
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

from c_programs import ROOT, compile_program, run

QWEN3 = {"experts": 128, "top_k": 8, "hidden": 2048, "inter": 768}
MIXTRAL = {"experts": 8, "top_k": 2, "hidden": 4096, "inter": 14336}
DTYPES = {"BF16": "bfloat16", "F16": "float16"}
TOKENS = [1, 2, 8, 64, 256, 1024, 4096, 16384, 131072]

_folder = tempfile.TemporaryDirectory()  # until the process ends


@cache
def print_plan() -> Path:
    return compile_program(ROOT / "tests/c/print_plan.c", Path(_folder.name))


def asked(device, *args, dtype="bfloat16", tokens=8, rank=0, remote=0, env=None, **shape):
    """The process that was asked about one problem."""
    s = QWEN3 | shape
    line = [dtype, tokens, s["top_k"], s["experts"], s["experts"] + remote]
    line += [s["hidden"], s["inter"], rank, *device]
    done = run(print_plan(), *args, stdin=" ".join(map(str, line)), **(env or {}))
    assert done.returncode == 0, done.stderr
    return done


def answer(device, *args, **problem) -> str:
    """What print_plan says about one problem."""
    return asked(device, *args, **problem).stdout.strip()


def refusal(words: str) -> str:
    """Why there is no plan; "" if there is one."""
    return words.removeprefix("error: ") if words.startswith("error: ") else ""


class Row(NamedTuple):
    """Of a projection, or what it has in common with that of a layer in one launch."""

    name: str
    dtype: str
    format: str
    family: str
    block_m: int = 0
    block_n: int = 0
    block_k: int = 0
    stages: int = 0
    cluster: int = 1


def rows_of(kind, role):
    """Name, dtype and arguments of the CUDA variants that the rows of one kind define."""
    text = (ROOT / "csrc/cuda/variants.inc").read_text()
    rows = re.findall(rf"^MOELORA_CUDA_{kind}\((.*)\)$", text, re.M)
    pairs = [(row.split(", "), dtype) for row in rows for dtype in ("BF16", "F16")]
    return [[f"{role}_{dtype}_{row[0]}".lower(), dtype, *row[1:]] for row, dtype in pairs]


CUDA_ROWS = [Row(*row[:4], *map(int, row[4:])) for row in rows_of("GEMM", "gemm")]
NATIVE_ROWS = [row for row in CUDA_ROWS if row.format == "NATIVE"]
DECODE_ROWS = [Row(*row) for row in rows_of("DECODE", "decode")]
ROWS = {row.name: row for row in CUDA_ROWS + DECODE_ROWS}


def quantized(device, w13, w2, *args, **problem):
    """(row of w13, row of w2, kernels around them) of one layer, or the message of the refusal."""
    words = answer(device, "formats", w13, w2, *args, **problem)
    if why := refusal(words):
        return why
    variant, block_rows, staged, *around, second = words.split()
    row, of_w2 = ROWS[variant], ROWS[second]
    assert staged == "-" and row.block_m == int(block_rows)
    return row, of_w2, around
