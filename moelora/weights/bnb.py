"""Tensors that bitsandbytes has quantized to four bits, NF4 or FP4."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from moelora.operators.formats import FORMATS, codes_of
from moelora.operators.storage import check_held
from moelora.weights.readers import LARGEST_SCALE, Checkpoint, Format, Numbers

QUANT_TYPES: dict[str, Format] = {
    "nf4": "nf4",
    "fp4": "bnb_fp4",
}  # `QuantizedWeights.format` of bitsandbytes' names
BLOCKS = tuple(64 << i for i in range(7))  # 64 to 4096
STATE = "quant_state.bitsandbytes__"  # and a quant_type: settings in a checkpoint, JSON as bytes
PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")  # beside it
COLUMNS = next(f.group_columns for f in FORMATS if f.kernel == "nf4")  # that share a scale, or more


@dataclass(frozen=True)
class BnbTensor:
    """One tensor: `value = code[q] * absmax`, in blocks of its flattened elements."""

    name: str  # in messages
    codes: Tensor  # (n / 2,) uint8: the first of two codes in the high nibble
    pairs: Tensor  # (256,) uint8: the kernels' two codes of a byte, the first in the low nibble
    absmax: Tensor  # (blocks,) float32
    shape: tuple[int, ...]
    blocksize: int
    quant_type: str

    def rows(self, first: int, count: int, group: int) -> tuple[Tensor, Tensor]:
        """Values (count, K / 2), the even column in the low nibble, and scales (count, K / group)
        of rows from `first` on."""
        columns = self.shape[-1]
        begin, end = first * columns // 2, (first + count) * columns // 2
        codes = self.codes[begin:end].reshape(count, columns // 2)
        row = torch.arange(first, first + count, device=codes.device)[:, None] * columns
        places = row + torch.arange(0, columns, group, device=codes.device)
        blocks = places // self.blocksize
        if not torch.equal(blocks, (places + group - 1) // self.blocksize):
            fail(
                self.name,
                f"has {columns} columns (K) and blocks of {self.blocksize}, of which some end "
                f"within {COLUMNS} columns of a row",
                f"a multiple of {COLUMNS} columns",
            )
        return self.pairs[codes.int()], self.absmax[blocks]


def fail(name: str, got: str, wanted: str) -> NoReturn:
    raise ValueError(f"{name} {got}, expected {wanted}")


def tensor_of(weight: Any, state: Any, name: str = "") -> BnbTensor:
    """A tensor and its statistics: a `QuantState`, or a mapping of a checkpoint's tensors."""
    weight_name, at = f"weight{name}", f"quant_state{name}"
    if not isinstance(weight, Tensor):
        raise TypeError(f"{weight_name} is a {type(weight).__name__}, expected Tensor")
    of = _from_mapping(state, at) if isinstance(state, Mapping) else _from_object(state, at)
    if not isinstance(of["quant_type"], str) or of["quant_type"] not in QUANT_TYPES:
        known = " or ".join(map(repr, QUANT_TYPES))
        fail(at, f"has quant_type {of['quant_type']!r:.80}", known)
    if type(of["blocksize"]) is not int or of["blocksize"] not in BLOCKS:
        fail(at, f"has blocksize {of['blocksize']!r:.80}", f"one of {BLOCKS}")
    shape = of["shape"]
    if not (isinstance(shape, list | tuple) and len(shape) in (2, 3)) or not all(
        type(size) is int and size > 0 for size in shape
    ):
        fail(at, f"has shape {shape!r:.80}", "two or three sizes: (E), N and K")
    if shape[-1] % 2:
        fail(at, f"has shape {tuple(shape)}", "an even number of columns (K)")
    count = math.prod(shape)
    check_held(weight_name, weight)
    for part in ("absmax", "code", "nested_absmax", "nested_code"):
        if isinstance(of.get(part), Tensor):
            check_held(f"{at}: {part}", of[part])
    if weight.numel() * weight.itemsize != count // 2:
        got = f"has {weight.numel() * weight.itemsize} bytes for shape {tuple(shape)}"
        fail(weight_name, got, f"{count // 2}")
    codes = weight.detach().contiguous().reshape(-1).view(torch.uint8)
    absmax = _absmax(of, -(-count // of["blocksize"]), at).to(codes.device)
    pairs = _pairs(of["code"], of["quant_type"], at).to(codes.device)
    return BnbTensor(
        weight_name, codes, pairs, absmax, tuple(shape), of["blocksize"], of["quant_type"]
    )


def _from_object(state: Any, at: str) -> dict[str, Any]:
    """The fields of bitsandbytes' `QuantState`."""
    names = ("absmax", "shape", "code", "blocksize", "quant_type")
    if absent := [name for name in names if getattr(state, name, None) is None]:
        what = f"a {type(state).__name__} without {absent[0]}"
        raise TypeError(
            f"{at} is {what}, expected bitsandbytes' QuantState, or a mapping of its tensors"
        )
    of = {name: getattr(state, name) for name in names}
    of["shape"] = tuple(of["shape"])
    if (inner := getattr(state, "state2", None)) is not None:
        of |= {"nested_absmax": inner.absmax, "nested_code": inner.code}
        of |= {"nested_blocksize": inner.blocksize, "nested_offset": state.offset}
    return of


def _from_mapping(state: Mapping[str, Any], at: str) -> dict[str, Any]:
    """The tensors beside a weight in a checkpoint, by their names after that of the weight."""
    keys = [key for key in state if isinstance(key, str) and key.startswith(STATE)]
    if len(keys) != 1:
        fail(at, f"has {sorted(map(str, state))}", f"one of {STATE}nf4 and {STATE}fp4")
    (key,) = keys
    stored = state[key]
    try:
        settings = json.loads(bytes(stored.cpu().tolist()))
    except (AttributeError, RecursionError, TypeError, ValueError):
        settings = None
    if not isinstance(settings, dict):
        fail(f"{at}[{key!r}]", "is no JSON", "an object, as uint8")
    for name in ("absmax", "quant_map"):
        if not isinstance(state.get(name), Tensor):
            fail(at, f"has no {name}", "a tensor")
    of = {name: settings.get(name) for name in ("quant_type", "blocksize", "shape")}
    of |= {"absmax": state["absmax"], "code": state["quant_map"]}
    if state.get("nested_absmax") is not None:
        of |= {
            "nested_absmax": state["nested_absmax"],
            "nested_code": state.get("nested_quant_map"),
        }
        of |= {name: settings.get(name) for name in ("nested_blocksize", "nested_offset")}
    return of


def _absmax(of: Mapping[str, Any], blocks: int, at: str) -> Tensor:
    """(blocks,) float32; nested ones are dequantized as bitsandbytes does."""
    absmax = of["absmax"]
    if not isinstance(absmax, Tensor) or tuple(absmax.shape) != (blocks,):
        got = tuple(absmax.shape) if isinstance(absmax, Tensor) else type(absmax).__name__
        fail(at, f"has absmax of shape {got}", f"({blocks},)")
    if "nested_absmax" in of:
        absmax = _nested(of, absmax, at)
    elif absmax.dtype != torch.float32:
        fail(at, f"has absmax of {absmax.dtype} and no nested_absmax", "torch.float32")
    if not (absmax.abs() <= LARGEST_SCALE).all():
        got = f"has an absmax that is NaN, infinite or beyond {LARGEST_SCALE:g}"
        fail(at, got, "smaller ones")
    return absmax


def _nested(of: Mapping[str, Any], absmax: Tensor, at: str) -> Tensor:
    code, outer, size = of["nested_code"], of["nested_absmax"], of["nested_blocksize"]
    if absmax.dtype != torch.uint8:
        fail(at, f"has nested absmax of {absmax.dtype}", "torch.uint8")
    if not isinstance(code, Tensor) or tuple(code.shape) != (256,):
        got = tuple(code.shape) if isinstance(code, Tensor) else code
        fail(at, f"has a nested_quant_map of shape {got}", "(256,)")
    if type(size) is not int or size < 1:
        fail(at, f"has nested_blocksize {size!r:.80}", "a number of elements")
    blocks = -(-absmax.numel() // size)
    if not isinstance(outer, Tensor) or outer.numel() != blocks or outer.dtype != torch.float32:
        got = f"{tuple(outer.shape)} of {outer.dtype}" if isinstance(outer, Tensor) else outer
        fail(at, f"has nested_absmax {got}", f"({blocks},) of torch.float32")
    try:
        offset = float(of["nested_offset"])
    except (OverflowError, TypeError, ValueError):
        fail(at, f"has nested_offset {of['nested_offset']!r:.80}", "a number")
    spread = outer.reshape(-1).repeat_interleave(min(size, absmax.numel()))[: absmax.numel()]
    return code.float().to(absmax.device)[absmax.int()] * spread + offset


def _pairs(code: Any, quant_type: str, at: str) -> Tensor:
    """`BnbTensor.pairs` of a quant_map, whose numbers may be in any order."""
    numbers = torch.tensor(codes_of(QUANT_TYPES[quant_type]), device="cpu")
    if not isinstance(code, Tensor) or code.numel() != 16:
        got = tuple(code.shape) if isinstance(code, Tensor) else type(code).__name__
        fail(at, f"has a quant_map of {got}", "16 numbers")
    code = code.detach().float().cpu().reshape(-1)
    if not torch.equal(code.sort().values, numbers.sort().values):
        fail(at, "has a quant_map with other numbers", f"bitsandbytes' of {quant_type}")
    order = (code[:, None] == numbers).byte().argmax(1).byte()  # the first of equal ones
    return (order << 4 | order[:, None]).flatten()


def checkpoint(weight: Any, quant_state: Any) -> Checkpoint:
    """Experts as one tensor, as one for each, or as a pair of gate and up for each."""
    if isinstance(weight, Tensor):
        whole = tensor_of(weight, quant_state)
        if len(whole.shape) != 3:
            fail("quant_state", f"has shape {whole.shape}", "three sizes: E, N and K")
        experts, rows, columns = whole.shape
        places = [[(whole, expert * rows)] for expert in range(experts)]
    else:
        places = [[(one, 0) for one in row] for row in _per_expert(weight, quant_state)]
        rows, columns = places[0][0][0].shape[-2], places[0][0][0].shape[-1]
    first = places[0][0][0]
    for one, _ in (place for row in places for place in row):
        got = one.shape[-2:], one.quant_type
        if got != (first.shape[-2:], first.quant_type):
            fail(one.name, f"is {got[1]} of shape {got[0]}", f"{first.quant_type} of {first.shape}")
        if one.codes.device != first.codes.device:
            fail(one.name, f"is on {one.codes.device}", f"{first.codes.device} as {first.name}")
    sizes = {one.blocksize for row in places for one, _ in row}
    group = COLUMNS if columns % COLUMNS == 0 else columns
    if len(sizes) == 1 and columns % first.blocksize == 0:
        group = first.blocksize

    def read(expert: int) -> Numbers:
        parts = [one.rows(at, rows, group) for one, at in places[expert]]
        values, scales = (torch.cat(part) for part in zip(*parts, strict=True))
        return values, scales, None

    shape = len(places), rows * len(places[0]), columns
    return Checkpoint(QUANT_TYPES[first.quant_type], shape, group, False, read)


def _per_expert(weight: Any, quant_state: Any) -> list[list[BnbTensor]]:
    """One tensor for each expert, or two: gate and up."""

    def listed(name: str, value: Any, what: str) -> Sequence[Any]:
        if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not len(value):
            kind = type(value).__name__
            raise TypeError(f"{name} is a {kind}, expected {what}")
        return value

    each = "one for each expert, as weight"
    weights = listed("weight", weight, "a Tensor, or one for each expert")
    states = listed("quant_state", quant_state, each)
    if len(states) != len(weights):
        fail("quant_state", f"has {len(states)} experts", f"{len(weights)} as weight")
    made = []
    for e, (one, state) in enumerate(zip(weights, states, strict=True)):
        if isinstance(one, Tensor):
            made.append([tensor_of(one, state, f"[{e}]")])
            continue
        parts = listed(f"weight[{e}]", one, "a Tensor, or gate and up")
        of = listed(f"quant_state[{e}]", state, "those of gate and up")
        if len(parts) != 2 or len(of) != 2:
            fail(f"weight[{e}]", f"has {len(parts)} tensors and {len(of)} states", "gate and up")
        made.append(
            [tensor_of(p, s, f"[{e}][{i}]") for i, (p, s) in enumerate(zip(parts, of, strict=True))]
        )
    if len({len(row) for row in made}) > 1:
        fail("weight", "has one tensor for some experts and two for others", "as many for all")
    if any(len(one.shape) != 2 for row in made for one in row):
        fail("quant_state", "has three sizes for an expert", "two: N and K")
    return made
