"""LoRA adapters for mixture-of-experts layers: PEFT checkpoints and the pool that serves them."""

from moelora.adapters.checkpoint import AdapterInfo, MoELayer, peek
from moelora.adapters.pool import AdapterPool

__all__ = ["AdapterInfo", "AdapterPool", "MoELayer", "peek"]
