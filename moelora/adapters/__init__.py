"""LoRA adapters: PEFT checkpoints of whole models, and the pool that serves them."""

from moelora.adapters.checkpoint import load, peek
from moelora.adapters.held import NoSlot
from moelora.adapters.layers import (
    Adapter,
    AdapterInfo,
    LinearLayer,
    LinearPair,
    MoELayer,
    Pair,
    Projection,
)
from moelora.adapters.pool import AdapterPool

__all__ = [
    "Adapter",
    "AdapterInfo",
    "AdapterPool",
    "LinearLayer",
    "LinearPair",
    "MoELayer",
    "NoSlot",
    "Pair",
    "Projection",
    "load",
    "peek",
]
