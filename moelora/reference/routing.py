"""Expert, adapter and factors of a routed row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from moelora.operators.call import factor_list

if TYPE_CHECKING:
    from moelora.operators.experts import Weights

Factors: TypeAlias = Tensor | Sequence[Tensor] | None


def as_tensor(weights: Weights) -> Tensor:
    """Expert weights as numbers: packed and quantized ones are unpacked."""
    return weights if isinstance(weights, Tensor) else weights.unpack()


def max_loras_of(*stacks: Factors) -> int:
    for stack in stacks:
        for factor in factor_list(stack):
            return factor.size(0)
    return 0


def optional_list(t: Tensor | None) -> list[Any] | None:
    return None if t is None else t.tolist()


def local_expert(global_id: int, num_local: int, expert_map: Sequence[int] | None) -> int:
    """Local index of the expert, or -1 if the row is skipped."""
    if expert_map is not None:
        if not 0 <= global_id < len(expert_map):
            return -1
        global_id = expert_map[global_id]
    return global_id if 0 <= global_id < num_local else -1


def active_adapter(
    adapter: int,
    max_loras: int,
    enabled: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
) -> int:
    """The adapter slot to apply, or -1 for a base row."""
    if not 0 <= adapter < max_loras:
        return -1
    if enabled is not None and not enabled[adapter]:
        return -1
    if ranks is not None and ranks[adapter] <= 0:
        return -1
    return adapter


def adapter_per_token(
    num_tokens: int,
    max_loras: int,
    mapping: Tensor | None,
    enabled: Tensor | None,
    ranks: Tensor | None,
) -> list[int]:
    if mapping is None:
        return [-1] * num_tokens
    on, rank = optional_list(enabled), optional_list(ranks)
    return [active_adapter(a, max_loras, on, rank) for a in mapping.tolist()]


def expert_per_choice(
    topk_ids: Tensor, num_local: int, expert_map: Tensor | None
) -> list[list[int]]:
    local = optional_list(expert_map)
    return [[local_expert(e, num_local, local) for e in row] for row in topk_ids.tolist()]


def pair_of(stack: Tensor, adapter: int, expert: int) -> Tensor:
    """One factor of a stack (max_loras, E or 1, rows, columns)."""
    return stack[adapter, 0 if stack.size(1) == 1 else expert]
