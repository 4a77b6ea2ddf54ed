"""Expert weights of the compute dtype in tiles of 64 x 64."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moelora.operators.call import operators, run, typed
from moelora.operators.fake import PACK
from moelora.operators.tiles import NOT_QUANTIZED, TiledWeights
from moelora.weights.quantized import QuantizedWeights


@dataclass(frozen=True, eq=False)
class PackedWeights(TiledWeights):
    """Expert weights in tiles of 64 x 64, from `prepack_weights`.

    Each tile is contiguous in memory, so that a kernel reads it in one burst.

    Attributes
    ----------
    data : Tensor, shape (E, N / 64, K / 64, 64, 64)
        The tiles; `data[e, i, j]` is `w[e, 64*i : 64*i+64, 64*j : 64*j+64]`.
    """

    data: Tensor

    @property
    def layout(self) -> tuple[int, int, int, int, float]:
        """moelora_layout of csrc/moelora.h; zeros, as values are not quantized."""
        return NOT_QUANTIZED

    @property
    def shape(self) -> torch.Size:
        """The logical shape (E, N, K)."""
        experts, rows, columns = self.data.shape[:3]
        return torch.Size((experts, rows * PACK, columns * PACK))

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        return self.data.device

    def to(self, device: torch.device | str) -> "PackedWeights":
        """These weights on another device."""
        return PackedWeights(self.data.to(device))

    def unpack(self) -> Tensor:
        """The weights as one tensor of shape (E, N, K)."""
        return self.data.transpose(2, 3).reshape(self.shape)


@typed
def prepack_weights(w: Tensor | QuantizedWeights) -> PackedWeights | QuantizedWeights:
    """Copy expert weights into tiles of 64 x 64 that kernels read in one burst.

    Parameters
    ----------
    w : Tensor, shape (E, N, K), or QuantizedWeights
        Expert weights; `N` and `K` are multiples of 64. Quantized ones are already in tiles
        and are returned unchanged.

    Returns
    -------
    PackedWeights
        Accepted wherever `w13`, `w2` or `w` is.

    Raises
    ------
    ValueError
        `w` is not 3-D, or a size is not a multiple of 64.
    TypeError
        `w` is not a tensor.
    RuntimeError
        `w` requires a gradient, and grad mode is on.
    """
    if isinstance(w, QuantizedWeights):
        return w
    return PackedWeights(run(operators.prepack_weights.default, w))
