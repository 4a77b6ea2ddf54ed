"""Weights of experts in the tiles that kernels read, and readers of checkpoints."""

from moelora.weights.packed import PackedWeights, prepack_weights
from moelora.weights.quantized import QuantizedWeights

__all__ = ["PackedWeights", "QuantizedWeights", "prepack_weights"]
