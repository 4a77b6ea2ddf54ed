"""The adapter of each token of a pass, for layers with differently shaped inputs.

A pass has a batch of rows, each with one adapter. Inputs of layers are (rows, length, K),
flattened, or some tokens of each row, as for `lm_head`. In continuous batching there is one row, in
which requests of any length are concatenated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from moelora.adapters.held import Held
from moelora.operators.align import moe_lora_align_block_size

# Up to this number of tokens, kernels group tokens by adapter themselves; more are sorted once for
# all layers of a pass.
FEW_TOKENS = 512
BLOCK = 64


class Lists(NamedTuple):
    """Tokens in blocks of one adapter: outputs of `moe_lora_align_block_size`."""

    sorted_token_ids: torch.Tensor
    expert_ids: torch.Tensor
    num_tokens_post_padded: torch.Tensor
    lora_ids: torch.Tensor


@dataclass(eq=False)
class Tokens:
    """The slots of the tokens of one pass, on every device of a pool: `slots`, by device, has those
    of rows, (rows,) int32, or with `packed` those of tokens."""

    slots: Mapping[torch.device, torch.Tensor]
    rows: int
    length: int
    packed: bool = False  # the batch is one row of several requests
    kept: torch.Tensor | None = None  # with `packed`: indices of tokens whose logits are computed
    arriving: Held | None = None  # adapters whose copies each layer waits for

    def __post_init__(self) -> None:
        self.all = self.slots
        if not self.packed:
            each = {d: s[:, None].expand(-1, self.length) for d, s in self.slots.items()}
            self.all = {device: slots.reshape(-1) for device, slots in each.items()}
        self._lists: dict[torch.device, Lists] = {}

    @property
    def count(self) -> int:
        return self.rows * self.length

    def is_whole(self, shape: torch.Size) -> bool:
        """Whether a layer with inputs of this shape gets all tokens, in order."""
        return tuple(shape) in ((self.rows, self.length), (self.count,))

    def of(self, layer: str, shape: torch.Size, device: torch.device) -> torch.Tensor:
        """The slot of each token of a layer with inputs of `shape`, (tokens,) int32.

        Raises RuntimeError if the layer may have got other tokens than those of the batch.
        """
        if self.is_whole(shape):
            return self.all[device]
        if self.packed:
            if self.kept is not None and tuple(shape) == (1, self.kept.size(0)):
                return self.all[device][self.kept.to(device)]
        elif self.rows == 1 or self._has_rows(shape):
            slots = self.slots[device]
            return slots.view(-1, *[1] * (len(shape) - 1)).expand(shape).reshape(-1)
        raise RuntimeError(
            f"use_adapters: {layer} was called with tokens {tuple(shape)} in a batch of "
            f"{(self.rows, self.length)}; whose rows they are is not known. Call the model that "
            "was given to use_adapters, with rows of one adapter at a time if that is what it does"
        )

    def _has_rows(self, shape: torch.Size) -> bool:
        """Whether the first dimension is the batch, of some tokens per row or of all, divided."""
        inner = tuple(shape[1:])
        if shape[0] != self.rows or not inner:
            return False
        return len(inner) == 1 or inner[0] == self.length or inner == (1, self.length)

    def lists(self, device: torch.device, adapter_enabled: torch.Tensor) -> Lists:
        """All tokens sorted by adapter; computed once per device."""
        if device not in self._lists:
            self._lists[device] = _sort(self.all[device], adapter_enabled)
        return self._lists[device]


def _sort(mapping: torch.Tensor, adapter_enabled: torch.Tensor) -> Lists:
    slots, tokens, device = adapter_enabled.size(0), mapping.size(0), mapping.device
    experts = torch.zeros(1, 1, dtype=torch.int32, device=device).expand(tokens, 1)
    blocks = -(-tokens // BLOCK)

    def table(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    lists = Lists(
        table(slots, blocks * BLOCK),
        table(slots, blocks),
        table(slots).zero_(),
        torch.arange(slots, dtype=torch.int32, device=device),
    )
    sizes = 1, BLOCK, slots, blocks * BLOCK, blocks  # of one expert
    enabled = adapter_enabled, lists.lora_ids
    moe_lora_align_block_size(experts, mapping, *sizes, *lists[:3], *enabled)
    return lists
