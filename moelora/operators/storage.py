"""Check whether the storage of a tensor still contains its elements.

FSDP and offloading free parameters by `untyped_storage().resize_(0)`: the tensor keeps its shape,
and torch's own operators then read address 0.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moelora.operators.torch_private import FakeTensor, has_storage


def reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Number of elements from the first to the last one of a view."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))


def holds(t: Tensor) -> bool:
    """Whether the storage of a tensor has all its elements; True if it has no storage."""
    if not has_storage(t):
        return True
    return _end(t) <= t.untyped_storage().nbytes()


def check_held(name: str, t: Tensor) -> None:
    """Raise ValueError, as the compiled operators do, for a tensor whose storage was freed.

    Called before torch functions, which would read it nevertheless.
    """
    if torch.compiler.is_compiling() or isinstance(t, FakeTensor):  # whose sizes may be symbols
        return
    if not holds(t):
        raise ValueError(
            f"{name} has elements up to byte {_end(t)} of a storage of "
            f"{t.untyped_storage().nbytes()} bytes: it was freed or shrunk, as by FSDP or "
            "offloading; expected a tensor whose storage holds its elements: gather or load it "
            "before the call"
        )


def _end(t: Tensor) -> int:
    """End of a tensor within its storage, in bytes; 0 without elements."""
    elements = t.numel() if t.is_contiguous() else reach(t.shape, t.stride())
    return (int(t.storage_offset()) + elements) * t.element_size() if elements else 0
