"""What readers of checkpoints have in common: experts one by one, as values, scales and zeros.

Packing takes 4-bit values (N, K / 2) uint8, the even column in the low nibble; scales
(N, K / group); zeros (N, K / group) uint8, or None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn, TypeAlias, TypeVar

import torch
from torch import Tensor

from moelora.operators.checks import dtype_name
from moelora.operators.storage import check_held

PerExpert: TypeAlias = Tensor | Sequence[Tensor]
Numbers: TypeAlias = tuple[Tensor, Tensor, Tensor | None]
GateUp: TypeAlias = Literal["concatenated", "interleaved"]
XFormat: TypeAlias = Literal["native", "group", "token", "static"]
Format: TypeAlias = Literal["mxfp4", "nvfp4", "int4", "fp8", "nf4", "bnb_fp4"]  # type of a value

BLOCK = 32  # columns that share an MXFP4 scale
NVFP4_BLOCK = 16  # that share one of NVFP4
LARGEST_E8M0 = 128  # a scale of 2
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each nibble of a word
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}  # offset of stored zeros


@dataclass(frozen=True)
class Checkpoint:
    """Quantized weights to be packed, expert by expert."""

    format: Format
    shape: tuple[int, int, int]
    group_size: int
    has_zeros: bool
    read: Callable[[int], Numbers]
    row_scales: bool = False  # of FP8, as `block`
    block: tuple[int, int] = (0, 0)
    tensor_scales: Tensor | None = None  # of NVFP4: (E, 1) or (E, 2) float32


Made = TypeVar("Made", bound="Packable")


class Packable:
    """Base of the constructors of `QuantizedWeights`, one class for each kind of value."""

    @classmethod
    def _pack(
        cls: type[Made],
        checkpoint: Checkpoint,
        gate_up: GateUp | None,
        dtype: torch.dtype,
        x_format: XFormat = "native",
        x_scale: float = 0.0,
    ) -> Made:
        raise NotImplementedError  # quantized.py


class Stack:
    """One tensor for all experts, or one each, with its name in messages."""

    def __init__(self, name: str, tensors: PerExpert):
        self.name = name
        self.is_tensor = isinstance(tensors, Tensor)
        if isinstance(tensors, Tensor) and tensors.dim() == 0:
            raise ValueError(f"{name} has no dimensions, expected one for experts")
        self.tensors = tensors if self.is_tensor else list(tensors)
        if not len(self.tensors):
            raise ValueError(f"{name} has no experts, expected at least 1")
        for expert, tensor in enumerate([tensors] if self.is_tensor else self.tensors):
            check_held(self._name(expert), tensor)

    def __len__(self) -> int:
        return len(self.tensors)

    def __getitem__(self, expert: int) -> Tensor:
        return self.tensors[expert]

    def fail(self, expert: int, got: str, wanted: str) -> NoReturn:
        raise ValueError(f"{self._name(expert)} {got}, expected {wanted}")

    def _name(self, expert: int) -> str:
        return self.name if self.is_tensor else f"{self.name}[{expert}]"

    def check(self, like: Stack, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
        """Check that every expert of `like` is present, with this shape and one of these dtypes."""
        if len(self) != len(like):
            raise ValueError(
                f"{self.name} has {len(self)} experts, expected {len(like)} as {like.name}"
            )
        for expert in range(1 if self.is_tensor else len(self)):
            tensor = self[expert]
            if tuple(tensor.shape) != shape:
                self.fail(expert, f"has shape {self._shape(tensor)}", self._text(shape))
            if tensor.dtype not in dtypes:
                wanted = " or ".join(dtype_name(d) for d in dtypes)
                got = dtype_name(tensor.dtype)
                self.fail(expert, f"has dtype {got}", wanted)
            if tensor.device != like[0].device:
                self.fail(expert, f"is on {tensor.device}", f"{like[0].device} as {like.name}")

    def matrix(self, wanted: str) -> tuple[int, int]:
        """Shape of the first expert, which must have two non-empty dimensions."""
        if self[0].dim() != 2:
            self.fail(0, f"has shape {self._shape(self[0])}", wanted)
        self.refuse_empty()
        rows, columns = self[0].shape
        return rows, columns

    def refuse_empty(self) -> None:
        if not self[0].numel():
            self.fail(0, f"has shape {self._shape(self[0])}", "no empty dimension")

    def _shape(self, tensor: Tensor) -> str:
        return self._text(tuple(tensor.shape))

    def _text(self, shape: tuple[int, ...]) -> str:
        return str((len(self), *shape) if self.is_tensor else shape)


SCALES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_SCALE = 65504.0  # largest float16 value


def check_scales(scales: Stack, expert: int, largest: float = LARGEST_SCALE) -> None:
    if not (scales[expert].to(torch.float32).abs() <= largest).all():
        got = f"has a scale that is NaN, infinite or beyond {largest:g}"
        scales.fail(expert, got, "smaller ones")


def nibbles(bytes_: Tensor) -> Tensor:
    """(..., n) uint8 -> (..., 2 n), the low nibble first."""
    return torch.stack((bytes_ & 15, bytes_ >> 4), dim=-1).flatten(-2)


def words(packed: Tensor) -> Tensor:
    """(..., n) int32 -> (..., 4 n) uint8, the low byte first."""
    # contiguous() keeps any stride of a dimension of size one; that of a vector then becomes 1
    return packed.contiguous().reshape(-1).view(torch.uint8).reshape(*packed.shape[:-1], -1)
