"""Adapters of layers whose base product is vLLM's: moelora's deltas between its kernels.

All vLLM experts classes that support adapters, including quantized ones, add them through
`add_lora_w13` and `add_lora_w2` of `PunicaWrapperGPU`. Here each becomes one operator, which takes
the routing directly: rows are not sorted into blocks for the adapters.

Only the second one reads what the first one returns. vLLM's four lists of blocks are (sorted ids,
expert ids, padded counts, mapping); here they are (None, topk_ids, expert_map, mapping).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from torch import Tensor

from moelora.integrations import reason_against_device
from moelora.integrations.vllm import UNEXPECTED, race, say_once, unexpected, wrap
from moelora.integrations.vllm.ops import fused_moe_lora
from moelora.operators.delta import moe_lora_down_delta, moe_lora_gate_up_delta
from moelora.operators.setting import setting

OWN_ADAPTERS = "vLLM's own kernels add the adapters"
TILES = (64, 64, 64, 8, 4, 3, 1)  # tiles of vLLM's kernels, unused


def install() -> None:
    from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU

    wrap(PunicaWrapperGPU, "add_lora_w13", _gate_up)
    wrap(PunicaWrapperGPU, "add_lora_w2", _down)


_local = threading.local()  # calls that vLLM's own kernels add the adapters of


def left() -> AbstractContextManager[None]:
    """Leave the adapters of a layer to vLLM's own kernels."""
    return setting(_local, "left", True)


def remember_ranks(ctx: Any, ranks: Tensor) -> None:
    """Record the true ranks of a layer's slots for the hooks, which have no context."""
    known = ctx.punica_wrapper.__dict__.setdefault("_moelora_ranks", {})
    for stack in (ctx.w13_lora_a_stacked[0], ctx.w2_lora_a_stacked[0]):
        known[stack.data_ptr()] = ranks


def _ranks(punica: Any, stacks: Sequence[Tensor]) -> Tensor | None:
    return punica.__dict__.get("_moelora_ranks", {}).get(stacks[0].data_ptr())


def mapping_of(punica: Any, num_tokens: int, local: Tensor | None) -> Tensor | None:
    """Slot of each token; None if no token has one, as in `adapters.arguments`."""
    if local is not None:
        return local
    meta = punica.token_mapping_meta
    return None if meta.no_lora_flag_cpu.item() else meta.token_lora_mapping[:num_tokens]


def _factors(stacks: Sequence[Tensor]) -> list[Tensor]:
    """Restore an expert dimension of 1 in stacks that vLLM expanded with stride 0."""
    return [s[:, :1] if s.size(1) > 1 and s.stride(1) == 0 else s for s in stacks]


def _local_ids(topk_ids: Tensor, expert_map: Tensor | None) -> Tensor:
    ids = topk_ids.reshape(-1)
    return ids if expert_map is None else expert_map[ids.long()]


def _gathered(rank: int) -> Callable[[Tensor], Tensor]:
    """Combine the ranks' shrink outputs (..., r): gathered if A is sharded by rows, summed if A is
    sharded by columns and has all `rank` rows.
    """
    from vllm.distributed import tensor_model_parallel_all_gather, tensor_model_parallel_all_reduce

    def gather(h: Tensor) -> Tensor:
        if h.size(-1) == rank:
            return tensor_model_parallel_all_reduce(h)
        return tensor_model_parallel_all_gather(h)

    return gather


def _add(
    self: Any,
    call: GateUp | Down,
    out: Tensor,
    routes: tuple[Tensor, Tensor | None, Tensor],
    experts: int,
    offset: int,
) -> None:
    """Adds the adapters of one projection.

    routes: (topk_ids, expert_map, token_lora_mapping)
    offset: with `fully_sharded_loras` the first of this rank's columns of `out`
    """
    a, b = _factors(call.lora_a_stacked), _factors(call.lora_b_stacked)
    weights, is_down = call.topk_weights, isinstance(call, Down)
    ids, expert_map, mapping = routes
    if call.fully_sharded:  # ranks exchange data between shrink and expand
        fused_moe_lora(
            out,
            call.x,
            a,
            b,
            weights,
            None,
            _local_ids(ids, expert_map),
            None,
            mapping,
            a[0].size(-2),
            weights.size(1),
            None,
            None,
            call.adapter_enabled,
            *TILES,
            *TILES,
            is_down,
            True,
            offset,
            call.add_inputs,
            num_experts=experts,
            gather=_gathered(b[0].size(-1)),
        )
        return
    delta: Callable[..., Tensor] = moe_lora_down_delta if is_down else moe_lora_gate_up_delta
    delta(
        call.x,
        weights if is_down else None,
        ids,
        token_lora_mapping=mapping,
        lora_a=a,
        lora_b=b,
        lora_ranks=_ranks(self, a),
        adapter_enabled=call.adapter_enabled,
        expert_map=expert_map,
        num_experts=experts,
        mul_routed_weight=is_down,
        add_inputs=call.add_inputs,
        out=out,
    )


class GateUp(NamedTuple):
    """Parameters of `add_lora_w13`, by vLLM's names and in its order."""

    y: Tensor
    x: Tensor
    lora_a_stacked: Sequence[Tensor]
    lora_b_stacked: Sequence[Tensor]
    topk_ids: Tensor
    topk_weights: Tensor
    expert_map: Tensor | None
    w1: Tensor
    w2: Tensor
    num_tokens: int
    top_k_num: int
    max_loras: int
    adapter_enabled: Tensor
    local_num_experts: int
    top_k: int
    num_slices: int
    fully_sharded: bool
    use_tuned_config: bool
    add_inputs: bool = True
    token_lora_mapping: Tensor | None = None


def _gate_up(add_lora_w13: Callable[..., Any], self: Any, *args: Any, **named: Any) -> Any:
    reason = reason_against_device()
    if reason is None and not getattr(_local, "left", False):
        try:
            call = GateUp(*args, **named)
            if _is_ours(add_lora_w13, self, call):
                return _add_gate_up(self, call)
        except (ValueError, NotImplementedError) as refusal:  # nothing is written yet
            reason = str(refusal)
        except UNEXPECTED as error:
            reason = unexpected(error)
    if reason is not None:
        say_once(f"{reason}; {OWN_ADAPTERS}")
    return add_lora_w13(self, *args, **named)


def _is_ours(add_lora_w13: Callable[..., Any], self: Any, call: GateUp) -> bool:
    """Whether moelora adds the adapters of a layer that is vLLM's: where it races, if it won.

    What it adds last, those of the down projection, goes the same way: it needs what this returns.
    """
    if not race.is_on():
        return True
    tokens, y = call.num_tokens, call.y
    mapping = mapping_of(self, tokens, call.token_lora_mapping)
    if mapping is None:
        return True  # there is nothing to add
    of = race.identity(
        "adapters of vLLM's",
        a=[tuple(stack.shape) for stack in call.lora_a_stacked],
        b=[tuple(stack.shape) for stack in call.lora_b_stacked],
        top_k=call.top_k_num,
        dtype=y.dtype,
    )
    found = race.table(of)
    if not call.fully_sharded:  # between whose halves ranks exchange

        def sides(count: int, _: bool) -> race.Sides:
            rows = y.view(-1, call.top_k_num, y.size(-1))[:count].clone()
            part = call._replace(
                y=rows.view(-1, y.size(-1)) if y.dim() == 2 else rows,
                x=call.x[:count],
                topk_ids=call.topk_ids[:count],
                topk_weights=call.topk_weights[:count],
                num_tokens=count,
                token_lora_mapping=mapping[:count] if call.token_lora_mapping is not None else None,
            )
            return race.Sides(lambda: _add_gate_up(self, part), lambda: add_lora_w13(self, *part))

        race.race(of, found, tokens, (True,), sides)
    return found.is_ours(tokens, True)


def _add_gate_up(
    self: Any, call: GateUp
) -> tuple[None, Tensor | None, Tensor | None, Tensor | None]:
    mapping = mapping_of(self, call.num_tokens, call.token_lora_mapping)
    if mapping is None:
        return None, None, None, None
    out, routes = call.y.view(-1, call.top_k_num, call.y.size(-1)), (call.topk_ids, call.expert_map)
    _add(self, call, out, (*routes, mapping), call.local_num_experts, 0)
    return None, *routes, mapping


class Down(NamedTuple):
    """Parameters of `add_lora_w2`, by vLLM's names and in its order."""

    y: Tensor
    x: Tensor
    lora_a_stacked: Sequence[Tensor]
    lora_b_stacked: Sequence[Tensor]
    topk_weights: Tensor
    sorted_token_ids_lora: Tensor | None
    expert_ids_lora: Tensor | None
    num_tokens_post_padded_lora: Tensor | None
    token_lora_mapping: Tensor
    num_tokens: int
    w1: Tensor
    w2: Tensor
    top_k_num: int
    max_loras: int
    adapter_enabled: Tensor
    top_k: int
    fully_sharded: bool
    tp_rank: int
    use_tuned_config: bool
    add_inputs: bool = True


def _down(add_lora_w2: Callable[..., Any], self: Any, *args: Any, **named: Any) -> None:
    call = Down(*args, **named)
    if getattr(_local, "left", False):
        return add_lora_w2(self, *call)  # type: ignore[no-any-return]
    topk_ids, expert_map = call.expert_ids_lora, call.num_tokens_post_padded_lora
    if call.sorted_token_ids_lora is None and topk_ids is None and expert_map is None:
        return  # `_gate_up` found that no token has an adapter
    if call.sorted_token_ids_lora is None and topk_ids is not None and topk_ids.dim() == 2:
        experts = call.lora_a_stacked[0].size(1)
        offset = call.tp_rank * call.lora_b_stacked[0].size(-2)
        try:
            _add(
                self, call, call.y, (topk_ids, expert_map, call.token_lora_mapping), experts, offset
            )
            return
        except (ValueError, NotImplementedError) as refusal:
            say_once(f"{refusal}; {OWN_ADAPTERS}")
            call = call._replace(  # one row per block
                expert_ids_lora=_local_ids(topk_ids, expert_map), num_tokens_post_padded_lora=None
            )
    add_lora_w2(self, *call)
