"""Where the elements of a tensor lie, and whether its storage still has them.

FSDP and offloading free parameters by `untyped_storage().resize_(0)`: the tensor keeps its shape,
and torch's own operators then read address 0.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last one of a view."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))


def holds(t: Tensor) -> bool:
    """Whether the storage of a tensor has all its elements; True where it has none of its own."""
    if not torch._C._has_storage(t):
        return True
    elements = reach(t.shape, t.stride())
    end = (t.storage_offset() + elements) * t.element_size()
    return elements == 0 or end <= t.untyped_storage().nbytes()
