"""The scheme of a linear layer: its tensors in a folder, and how they are read.

Common to all readers of settings: `Scheme`, and checks of untrusted values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moelora.adapters.patterns import Patterns
from moelora.operators.formats import FORMATS
from moelora.weights import QuantizedWeights
from moelora.weights.fp8 import Activations
from moelora.weights.readers import GateUp

*_FIRST, _LAST = (f.name for f in FORMATS[1:] if f.name.lower() == f.kernel)
KEPT = f"{', '.join(_FIRST)} or {_LAST}"  # as `QuantizedWeights` has them
# Refusal of groups whose columns are ordered by the sizes of activations.
OUT_OF_ORDER = (
    "each expert has its columns in an order of its own (activation order), and no kernel reads x "
    "in several"
)
WAY_OUT = f"quantize the experts to {KEPT}, or load them in `dtype` with dequantize=True"


class Scheme(NamedTuple):
    """How one linear layer is stored."""

    name: str  # in messages
    required: tuple[str, ...]  # tensors
    optional: tuple[str, ...]
    dequantize_weight: Callable[..., Tensor]  # tensors of one layer -> its weight, float32
    settings: dict[str, Any]  # further arguments of `dequantize_weight`
    make: Callable[..., QuantizedWeights] | None = None  # see `pack`
    options: dict[str, Any] = {}  # further arguments of `make`
    renamed: Mapping[str, str] = {}  # arguments of `make` that are not called as their tensors
    rows: int = 0  # dimension in which gate and up are concatenated
    refusal: str = ""  # why `make` is None
    inputs: str = ""  # the folder's dtype of activations, if kernels ignore it
    unused: tuple[str, ...] = ()  # tensors that nothing depends on, wherever they are
    are_apart: bool = False  # whether `make` takes the tensors of gate and up as a list

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.required, *self.optional)))

    @property
    def is_fp8(self) -> bool:
        return self.name.startswith("FP8")

    def taking(self, activations: Activations | None) -> Scheme:
        """The same with other activations (None: unchanged), if weights are FP8."""
        if activations is None or not self.is_fp8:
            return self
        return self._replace(options=self.options | {"activations": activations})

    def pack(
        self, where: str, found: Mapping[str, Any], gate_up: GateUp | None, dtype: torch.dtype
    ) -> QuantizedWeights:
        """Packs experts; `found` maps each name of `required` to a tensor, or to one per expert."""
        self.check(where)
        assert self.make is not None
        try:
            tensors = {self.renamed.get(name, name): tensor for name, tensor in found.items()}
            return self.make(**tensors, **self.options, gate_up=gate_up, dtype=dtype)
        except (ValueError, TypeError) as error:  # TypeError: a setting's type
            raise ValueError(f"{where}: {error}") from None

    def check(self, where: str, dequantize: bool = False) -> None:
        """Raises NotImplementedError if experts cannot have this scheme, packed or dequantized."""
        if self.make is not None or (dequantize and self.dequantize_weight is not unread):
            return
        way_out = f"quantize the experts to {KEPT}" if self.dequantize_weight is unread else WAY_OUT
        raise NotImplementedError(f"{where}: experts are {self.name}; {self.refusal}: {way_out}")


def unread(**tensors: Tensor) -> Tensor:
    """`dequantize_weight` of schemes with unknown tensors."""
    raise NotImplementedError("layers of this scheme are not read")


def check_values(method: str, settings: Mapping[str, Any], **allowed: tuple[Any, ...]) -> None:
    for key, values in allowed.items():
        got = settings.get(key, values[0])
        if got not in values:
            known = " or ".join(map(repr, values))
            raise NotImplementedError(f"{method}: {key} is {got!r:.80}, wanted {known}")


def settings_in(settings: Any, key: str) -> Mapping[str, Any]:
    """Nested settings; empty if absent."""
    value = settings.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{key} is {value!r:.80}, wanted an object")
    return value or {}


def group_columns(settings: Mapping[str, Any], key: str = "group_size") -> int | None:
    """A number of columns; -1: all."""
    size = settings.get(key)
    if size is None or (type(size) is int and (size > 0 or size == -1)):
        return size
    raise ValueError(f"{key} is {size!r:.80}, wanted a number of columns, or -1")


def matches(pattern: str, name: str) -> bool:
    """`re.match` in bounded time, for patterns from untrusted files."""
    try:
        return _pattern(pattern).find(name, False)
    except ValueError as error:
        raise ValueError(f"{pattern!r:.80} is no pattern that is read: {error}") from None


@functools.lru_cache(maxsize=1 << 12)
def _pattern(pattern: str) -> Patterns[bool]:
    return Patterns({f"^(?:{pattern}).*": True}, "quantization_config")


def block_size(sides: Any) -> tuple[int, int]:
    """Rows and columns of a block, as in `weight_block_size`."""
    if isinstance(sides, list | tuple) and len(sides) == 2:
        rows, columns = sides
        if all(type(side) is int and 0 < side < 2**31 for side in sides):
            return rows, columns
    raise ValueError(f"weight_block_size is {sides!r:.80}, wanted two sizes: rows and columns")
