"""vLLM's operators that add adapters to a projection, with its arguments in its order.

`fused_moe_lora` and its halves. They write in place; rows without an adapter or without a
local expert keep their bits. They never synchronize, and can be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from moelora.operators.call import (
    absent_tensor,
    enabled_or_absent,
    ids_or_absent,
    operators,
    or_absent,
    run,
    typed,
    weights_or_absent,
)
from moelora.operators.delta import known_experts, one_expert
from moelora.operators.dump import UNLIMITED

P = ParamSpec("P")
T = TypeVar("T")

TILES = (
    *("block_size_m", "block_size_n", "block_size_k"),
    *("group_size_m", "num_warps", "num_stages", "split_k"),
)


def _checking_tiles(function: Callable[P, T]) -> Callable[P, T]:
    """Check the arguments that are tiles of vLLM's kernels, which are otherwise ignored."""
    names = enumerate(inspect.signature(function).parameters)
    tiles = [(at, name) for at, name in names if name.endswith(TILES)]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        for at, name in tiles:
            value = args[at] if at < len(args) else kwargs.get(name, 1)  # the call misses it
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}, expected an int of at least 1")
        return function(*args, **kwargs)

    return call


def _check_equal(name: str, got: Any, source: str, want: Any) -> None:
    if got != want:
        raise ValueError(f"{name} is {got}, {source} is {want}")


def _check_size(name: str, got: int, source: str, tensor: Tensor, dim: int) -> None:
    if tensor.dim() <= dim:
        raise ValueError(f"{source} has {tensor.dim()} dimensions, expected at least {dim + 1}")
    _check_equal(name, got, f"{source}.size({dim})", tensor.size(dim))


def _lists(
    factors: Sequence[Tensor],
    topk_weights: Tensor,
    top_k_num: int,
    blocks: tuple[Tensor | None, Tensor, Tensor | None, int],
    token_lora_mapping: Tensor | None,
    adapters: tuple[Tensor | None, Tensor | int | None, Tensor | None],
    num_experts: int | None,
) -> tuple[Any, ...]:
    """Convert vLLM's description of rows and adapters to arguments of the compiled operators.

    blocks: (sorted_token_ids, expert_ids, num_tokens_post_padded, rows of a block)
    adapters: (lora_ids, num_active_loras, adapter_enabled)
    """
    sorted_token_ids, expert_ids, num_tokens_post_padded, block_size = blocks
    lora_ids, num_active_loras, adapter_enabled = adapters
    _check_size("top_k_num", top_k_num, "topk_weights", topk_weights, 1)
    absent = absent_tensor(topk_weights)
    experts = known_experts(factors, num_experts)
    if sorted_token_ids is None:
        if token_lora_mapping is None:
            raise ValueError(
                "token_lora_mapping is None, expected a tensor without sorted_token_ids"
            )
        _check_equal("expert_ids.numel()", expert_ids.numel(), "M * top_k", topk_weights.numel())
        expert_ids, _, experts = one_expert(expert_ids.reshape(-1, top_k_num), None, experts)
    elif num_tokens_post_padded is None or lora_ids is None:
        raise ValueError("num_tokens_post_padded or lora_ids is None, sorted_token_ids is not")
    elif num_active_loras is None:
        num_active_loras = lora_ids.numel()
    if num_active_loras is None or isinstance(num_active_loras, int):
        num_active_loras = torch.tensor([num_active_loras or 0], dtype=torch.int32)
    return (
        weights_or_absent("topk_weights", topk_weights, absent),
        or_absent(sorted_token_ids, absent),
        expert_ids,
        or_absent(num_tokens_post_padded, absent),
        or_absent(token_lora_mapping, absent),
        top_k_num,
        ids_or_absent("lora_ids", lora_ids, absent),
        num_active_loras,
        enabled_or_absent(adapter_enabled, absent),
        UNLIMITED if experts is None else experts,
        block_size,
    )


def _gathered(h: Tensor, gather: Callable[[Tensor], Tensor] | None) -> Tensor:
    if gather is not None:
        return gather(h)
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        world = distributed.get_world_size()
        if world > 1:
            raise ValueError(
                f"gather is None, fully_sharded is True and there are {world} ranks: expected a "
                "function such as vLLM's tensor_model_parallel_all_gather"
            )
    return h


@typed
@_checking_tiles
def fused_moe_lora(
    output: Tensor,
    qcurr_hidden_states: Tensor,
    lora_a_stacked: Sequence[Tensor],
    lora_b_stacked: Sequence[Tensor],
    topk_weights: Tensor,
    sorted_token_ids: Tensor | None,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor | None,
    token_lora_mapping: Tensor | None,
    max_lora_rank: int,
    top_k_num: int,
    lora_ids: Tensor | None,
    num_active_loras: Tensor | int | None,
    adapter_enabled: Tensor | None,
    shrink_block_size_m: int,
    shrink_block_size_n: int,
    shrink_block_size_k: int,
    shrink_group_size_m: int,
    shrink_num_warps: int,
    shrink_num_stages: int,
    shrink_split_k: int,
    expand_block_size_m: int,
    expand_block_size_n: int,
    expand_block_size_k: int,
    expand_group_size_m: int,
    expand_num_warps: int,
    expand_num_stages: int,
    expand_split_k: int,
    mul_routed_weight: bool = False,
    fully_sharded: bool = False,
    offset: int = 0,
    add_inputs: bool = True,
    *,
    num_experts: int | None = None,
    gather: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """vLLM's `fused_moe_lora`: adds the adapters' part of one projection to `output`, in place.

    Rows are given by lists of blocks per adapter, from `moe_lora_align_block_size` in vLLM's form,
    or, for few rows, only by `expert_ids` and `token_lora_mapping` (`sorted_token_ids=None`, vLLM's
    naive block assignment).

    Parameters
    ----------
    output : Tensor, shape (M, top_k, >= offset + slices * N)
        Added to in place. Rows without an adapter keep their bits.
    qcurr_hidden_states : Tensor, shape (M, K) or (M * top_k, K)
        Input of each token, or of each routed row.
    lora_a_stacked : sequence of 1 to 4 tensors, shape (max_loras, E or 1, R, K)
        Shrink factors of each slice; experts may also be expanded by stride 0.
    lora_b_stacked : sequence of tensors, shape (max_loras, E or 1, N, R)
        Expand factors of each slice.
    {topk_weights}
    sorted_token_ids : Tensor, shape (max_loras, rows), int32, optional
        Flat rows `m * top_k + j` in blocks of `shrink_block_size_m`; other values are padding.
    expert_ids : Tensor, shape (max_loras, blocks), int32
        Expert of each block, -1 to skip it. Without `sorted_token_ids`: `topk_ids`, flat.
    num_tokens_post_padded : Tensor, shape (max_loras,), int32, optional
        Rows in use of each list.
    {token_lora_mapping?} Read without `sorted_token_ids`.
    max_lora_rank : int
        `R` of `lora_a_stacked`.
    top_k_num : int
        `top_k`.
    lora_ids : Tensor, shape (any,), int32, optional
        Adapters whose lists count; -1 and ids from `max_loras` on are skipped.
    num_active_loras : Tensor of one element in host memory, or int, optional
        How many entries of `lora_ids` to look at. Read on the host: a captured graph keeps it,
        and -1 in `lora_ids` marks inactive entries.
    {adapter_enabled?}
    shrink_block_size_m : int
        Rows of a block of `sorted_token_ids`.
    shrink_block_size_n, ..., expand_split_k : int
        Tiles of vLLM's kernels. They must be positive and have no effect.
    {mul_routed_weight}
    fully_sharded : bool
        A is sharded by rank over the tensor-parallel group (or by K), B by its columns: the result
        of the shrink passes through `gather` before the expand.
    offset : int
        First column of `output` that is written.
    add_inputs : bool
        False: rows with an adapter are overwritten by the delta; others keep their bits.
    {num_experts?}
    gather : function from Tensor to Tensor, optional
        For `fully_sharded`: takes (slices, M, top_k, R) and returns all ranks of the adapter, for
        instance vLLM's `tensor_model_parallel_all_gather`.

    Raises
    ------
    {errors}

    Notes
    -----
    Arguments and their order are those of vLLM 0.26 to 0.33
    (`vllm/lora/ops/triton_ops/fused_moe_lora_op.py`), and so is the method: the factors of one
    (expert, adapter) multiply a block of rows at a time. Differences: any rank up to 512 takes the
    same path, only the shape of the input says whether it has a row per token or per choice, and
    the result does not depend on `split_k`.
    """
    a, b = list(lora_a_stacked), list(lora_b_stacked)
    if not a or len(a) != len(b):
        raise ValueError(
            f"lora_a_stacked has {len(a)} slices, lora_b_stacked has {len(b)}, expected as many, "
            "at least 1"
        )
    _check_size("max_lora_rank", max_lora_rank, "lora_a_stacked[0]", a[0], 2)
    blocks = sorted_token_ids, expert_ids, num_tokens_post_padded, shrink_block_size_m
    adapters = lora_ids, num_active_loras, adapter_enabled
    rows = _lists(
        (*a, *b), topk_weights, top_k_num, blocks, token_lora_mapping, adapters, num_experts
    )
    finish = (mul_routed_weight, add_inputs, offset)
    x = qcurr_hidden_states
    if not fully_sharded:
        op = operators.fused_moe_lora.default
        run(op, output, x, a, b, *rows, *finish)
        return
    h = x.new_zeros((len(a), *topk_weights.shape, max_lora_rank))
    run(operators.fused_moe_lora_shrink.default, h, x, a, *rows)
    h = _gathered(h, gather)
    run(operators.fused_moe_lora_expand.default, output, h, b, *rows, *finish)


@typed
@_checking_tiles
def fused_moe_lora_shrink(
    a_intermediate_cache1: Tensor,
    qcurr_hidden_states: Tensor,
    lora_a_stacked: Sequence[Tensor],
    topk_weights: Tensor,
    sorted_token_ids: Tensor | None,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor | None,
    token_lora_mapping: Tensor | None,
    top_k_num: int,
    lora_ids: Tensor | None,
    adapter_enabled: Tensor | None,
    device: torch.device | str,
    N: int,
    M: int,
    EM: int,
    K: int,
    num_tokens: int,
    num_experts: int | None,
    num_slices: int,
    block_size_m: int,
    block_size_n: int,
    block_size_k: int,
    group_size_m: int,
    num_warps: int,
    num_stages: int,
    split_k: int,
    num_active_loras: Tensor | int | None,
    mul_routed_weight: bool = False,
    use_gdc: bool = False,
    use_tma: bool = False,
) -> None:
    """The first half of `fused_moe_lora`: `a_intermediate_cache1[slice, m, j] = x A[slice]^T`.

    With `fully_sharded` factors, gather or reduce the result over the tensor-parallel group, then
    call `fused_moe_lora_expand`.

    Parameters
    ----------
    a_intermediate_cache1 : Tensor, shape (slices, M, top_k, R)
        The result, in the dtype of the input. Rows without an adapter keep their bits.
    qcurr_hidden_states, lora_a_stacked, topk_weights, sorted_token_ids, expert_ids
        As in `fused_moe_lora`.
    num_tokens_post_padded, token_lora_mapping, top_k_num, lora_ids, adapter_enabled
        As in `fused_moe_lora`.
    N, M, K, num_tokens, num_slices : int
        `R`, `M`, `K`, `M * top_k` and the number of slices; checked.
    num_experts : int, optional
        As in `fused_moe_lora`.
    block_size_m : int
        Rows of a block of `sorted_token_ids`.
    num_active_loras
        As in `fused_moe_lora`.
    device, EM, block_size_n, ..., split_k, mul_routed_weight, use_gdc, use_tma
        Of vLLM's kernels; no effect here.

    Raises
    ------
    {errors}
    """
    a = list(lora_a_stacked)
    _check_equal("num_slices", num_slices, "the number of lora_a_stacked", len(a))
    _check_size("N", N, "a_intermediate_cache1", a_intermediate_cache1, 3)
    _check_size("M", M, "topk_weights", topk_weights, 0)
    _check_size("K", K, "qcurr_hidden_states", qcurr_hidden_states, 1)
    _check_equal("num_tokens", num_tokens, "M * top_k", topk_weights.numel())
    blocks = sorted_token_ids, expert_ids, num_tokens_post_padded, block_size_m
    adapters = lora_ids, num_active_loras, adapter_enabled
    rows = _lists(a, topk_weights, top_k_num, blocks, token_lora_mapping, adapters, num_experts)
    op = operators.fused_moe_lora_shrink.default
    run(op, a_intermediate_cache1, qcurr_hidden_states, a, *rows)


@typed
@_checking_tiles
def fused_moe_lora_expand(
    output: Tensor,
    a_intermediate_cache1: Tensor,
    lora_b_stacked: Sequence[Tensor],
    topk_weights: Tensor,
    sorted_token_ids: Tensor | None,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor | None,
    token_lora_mapping: Tensor | None,
    top_k_num: int,
    lora_ids: Tensor | None,
    adapter_enabled: Tensor | None,
    device: torch.device | str,
    N: int,
    M: int,
    EM: int,
    K: int,
    num_tokens: int,
    num_experts: int | None,
    num_slices: int,
    max_lora_rank: int,
    w1_output_dim_size: int,
    block_size_m: int,
    block_size_n: int,
    block_size_k: int,
    group_size_m: int,
    num_warps: int,
    num_stages: int,
    split_k: int,
    num_active_loras: Tensor | int | None,
    mul_routed_weight: bool = False,
    offset: int = 0,
    use_gdc: bool = False,
    use_tma: bool = False,
    *,
    add_inputs: bool = True,
) -> None:
    """The second half of `fused_moe_lora`: adds `a_intermediate_cache1[slice] B[slice]^T`.

    Parameters
    ----------
    output : Tensor, shape (M, top_k, >= offset + slices * N)
        Added to in place. Rows without an adapter keep their bits.
    a_intermediate_cache1 : Tensor, shape (slices, M, top_k, R)
        The result of `fused_moe_lora_shrink`, gathered over the ranks of a sharded adapter.
    lora_b_stacked, topk_weights, sorted_token_ids, expert_ids, num_tokens_post_padded
        As in `fused_moe_lora`.
    token_lora_mapping, top_k_num, lora_ids, adapter_enabled
        As in `fused_moe_lora`.
    M, num_tokens, num_slices, max_lora_rank, w1_output_dim_size : int
        `M`, `M * top_k`, the number of slices, `R` and `N` of one slice; checked.
    num_experts, block_size_m, num_active_loras
        As in `fused_moe_lora_shrink`.
    mul_routed_weight, offset, add_inputs
        As in `fused_moe_lora`.
    device, N, EM, K, block_size_n, ..., split_k, use_gdc, use_tma
        Of vLLM's kernels; no effect here.

    Raises
    ------
    {errors}
    """
    b = list(lora_b_stacked)
    _check_equal("num_slices", num_slices, "the number of lora_b_stacked", len(b))
    _check_size("M", M, "topk_weights", topk_weights, 0)
    _check_equal("num_tokens", num_tokens, "M * top_k", topk_weights.numel())
    if b:
        _check_size("max_lora_rank", max_lora_rank, "lora_b_stacked[0]", b[0], 3)
        _check_size("w1_output_dim_size", w1_output_dim_size, "lora_b_stacked[0]", b[0], 2)
    blocks = sorted_token_ids, expert_ids, num_tokens_post_padded, block_size_m
    adapters = lora_ids, num_active_loras, adapter_enabled
    rows = _lists(b, topk_weights, top_k_num, blocks, token_lora_mapping, adapters, num_experts)
    finish = (mul_routed_weight, add_inputs, offset)
    op = operators.fused_moe_lora_expand.default
    run(op, output, a_intermediate_cache1, b, *rows, *finish)
