"""Expert weights in tiles, as operators take them in the place of a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

NOT_QUANTIZED = (0, 0, 0, 0, 0.0)


class TiledWeights:
    """Base of `PackedWeights` and `QuantizedWeights`: tiles that kernels read.

    Attributes
    ----------
    data : Tensor, shape (E, ...)
        The tiles.
    layout : tuple
        moelora_layout of csrc/moelora.h: format, order, rows, format and scale of x.
    shape : torch.Size
        The logical shape (E, N, K).
    dtype : torch.dtype
        Dtype of the activations.
    device : torch.device
    """

    data: Tensor
    if TYPE_CHECKING:  # dataclasses would take an inherited property for a default

        @property
        def layout(self) -> tuple[int, int, int, int, float]: ...
        @property
        def shape(self) -> torch.Size: ...
        @property
        def dtype(self) -> torch.dtype: ...
        @property
        def device(self) -> torch.device: ...
        def unpack(self) -> Tensor: ...
