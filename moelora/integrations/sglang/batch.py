"""Arguments of `run_moe_lora`: the adapters of tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class MoELoRABatchInfo:
    """Adapters of a batch, and their assignment to tokens.

    Attributes
    ----------
    weight_indices : Tensor, shape (num_tokens,), int32 or int64
        Adapter slot of each token, -1 for none.
    lora_ranks : Tensor, shape (max_loras,), int32
        True rank of each adapter; 0 is an empty slot.
    scalings : Tensor, shape (max_loras,), float32
        Scaling of each adapter.
    adapter_enabled : Tensor, shape (max_loras,), bool, optional
        False turns an adapter off.
    """

    weight_indices: Tensor
    lora_ranks: Tensor
    scalings: Tensor
    adapter_enabled: Tensor | None = None
