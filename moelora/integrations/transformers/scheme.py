"""One linear layer's scheme: what tensors it has in a folder, and what reads them.

What the readers of settings share: `Scheme`, and checks of values that are not trusted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moelora import QuantizedWeights
from moelora.adapters.patterns import Patterns
from moelora.quantized_fp8 import Activations, GateUp

KEPT = "INT4 (W4A16), MXFP4, NVFP4 or FP8"
# Of groups that columns are of in an order of their own, that of the activations' sizes.
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
    numbers: Callable[..., Tensor]  # of the tensors of one layer: its weight, float32
    settings: dict[str, Any]  # that `numbers` takes beside
    make: Callable[..., QuantizedWeights] | None = None  # of those of experts; None: not read
    options: dict[str, Any] = {}  # that `make` takes beside
    rows: int = 0  # the dimension along which gate and up follow each other
    refusal: str = ""  # why there is no `make`
    inputs: str = ""  # what the folder quantizes activations to, where kernels keep `dtype`

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.required, *self.optional)))

    def taking(self, activations: Activations | None) -> Scheme:
        """The same with these activations; ValueError if weights are not FP8. None: as it says."""
        if activations is None:
            return self
        if not self.name.startswith("FP8"):
            raise ValueError(
                f"activations is {activations!r}, wanted None: the weights are not FP8"
            )
        return self._replace(options=self.options | {"activations": activations})

    def pack(
        self, where: str, found: Mapping[str, Any], gate_up: GateUp | None, dtype: torch.dtype
    ) -> QuantizedWeights:
        """`found` has a tensor, or one for each expert, for every name of `required`."""
        self.check(where)
        assert self.make is not None
        try:
            return self.make(**found, **self.options, gate_up=gate_up, dtype=dtype)
        except (ValueError, TypeError) as error:  # TypeError: of a setting
            raise ValueError(f"{where}: {error}") from None

    def check(self, where: str, dequantize: bool = False) -> None:
        """NotImplementedError if experts cannot be of this scheme: packed, or else dequantized."""
        if self.make is not None or (dequantize and self.numbers is not unread):
            return
        way_out = f"quantize the experts to {KEPT}" if self.numbers is unread else WAY_OUT
        raise NotImplementedError(f"{where}: experts are {self.name}; {self.refusal}: {way_out}")


def unread(**tensors: Tensor) -> Tensor:
    """`numbers` of schemes whose tensors nothing here knows."""
    raise NotImplementedError("layers of this scheme are not read")


def check_values(method: str, settings: Mapping[str, Any], **allowed: tuple[Any, ...]) -> None:
    for key, values in allowed.items():
        got = settings.get(key, values[0])
        if got not in values:
            known = " or ".join(map(repr, values))
            raise NotImplementedError(f"{method}: {key} is {got!r:.80}, wanted {known}")


def settings_in(settings: Any, key: str) -> Mapping[str, Any]:
    """Settings within settings; empty where there are none."""
    value = settings.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{key} is {value!r:.80}, wanted an object")
    return value or {}


def group_columns(settings: Mapping[str, Any], key: str = "group_size") -> int | None:
    """A number of columns; -1 is all of them."""
    size = settings.get(key)
    if size is None or (type(size) is int and (size > 0 or size == -1)):
        return size
    raise ValueError(f"{key} is {size!r:.80}, wanted a number of columns, or -1")


def matches(pattern: str, name: str) -> bool:
    """`re.match`, for a pattern of a file that is not trusted: without backtracking."""
    try:
        return _pattern(pattern).find(name, False)
    except ValueError as error:
        raise ValueError(f"{pattern!r:.80} is no pattern that is read: {error}") from None


@functools.lru_cache(maxsize=1 << 12)
def _pattern(pattern: str) -> Patterns[bool]:
    return Patterns({f"^(?:{pattern}).*": True}, "quantization_config")


def block_size(sides: Any) -> tuple[int, int]:
    """`weight_block_size` and its like: rows and columns of a block."""
    if isinstance(sides, list | tuple) and len(sides) == 2:
        rows, columns = sides
        if all(type(side) is int and 0 < side < 2**31 for side in sides):
            return rows, columns
    raise ValueError(f"weight_block_size is {sides!r:.80}, wanted two sizes: rows and columns")
