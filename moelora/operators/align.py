"""Alignment: routed rows sorted by expert and adapter, and padded to blocks."""

from typing import Literal, TypeAlias, overload

from torch import Tensor

from moelora.operators.call import (
    absent_tensor,
    choose,
    enabled_or_absent,
    ids_or_absent,
    operators,
    run,
    typed,
    weights_or_absent,
)

AlignMode: TypeAlias = Literal["uniform", "segmented"]
ALIGN_MODES = {"uniform": 1, "segmented": 2}


@typed
def moe_align_block_size(
    topk_ids: Tensor, block_size: int, num_experts: int, *, expert_map: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort routed rows by expert and pad each expert to whole blocks.

    The routed row of token `m` and choice `j` has the flat index `m * top_k + j`. Rows are
    ordered by (expert, flat index); a row whose expert id is out of range is left out.

    Parameters
    ----------
    {topk_ids}
    block_size : int
        Rows of one block.
    num_experts : int
        Number of experts; with `expert_map`, of global experts.
    expert_map : Tensor, shape (num_experts,), int32, optional
        Local expert of each global expert, -1 for experts of other ranks.

    Returns
    -------
    {sorted_rows} `blocks` is an upper bound known without
        looking at `topk_ids`.
    expert_ids : Tensor, shape (blocks,), int32
        Local expert of each block, -1 past the end.
    {num_tokens_post_padded}

    Raises
    ------
    {ValueError}
    {TypeError}

    Notes
    -----
    The same function as vLLM's and SGLang's operator of this name
    (`csrc/moe/moe_align_sum_kernels.cu` in vLLM).
    """
    return run(
        operators.moe_align_block_size.default,
        topk_ids,
        block_size,
        num_experts,
        ids_or_absent("expert_map", expert_map, absent_tensor(topk_ids)),
    )


@overload
def moe_lora_align_block_size(
    topk_ids: Tensor,
    token_lora_mapping: Tensor,
    num_experts: int,
    block_size: int,
    max_loras: int,
    *,
    adapter_enabled: Tensor | None = None,
    expert_map: Tensor | None = None,
    mode: AlignMode = "uniform",
) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...
@overload
def moe_lora_align_block_size(
    topk_ids: Tensor,
    token_lora_mapping: Tensor,
    num_experts: int,
    block_size: int,
    max_loras: int,
    max_num_tokens_padded: int | None,
    max_num_m_blocks: int | None,
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_post_pad: Tensor,
    adapter_enabled: Tensor | None,
    lora_ids: Tensor,
    expert_map: Tensor | None = None,
) -> None: ...
@typed
def moe_lora_align_block_size(
    topk_ids: Tensor,
    token_lora_mapping: Tensor,
    num_experts: int,
    block_size: int,
    max_loras: int,
    max_num_tokens_padded: int | None = None,
    max_num_m_blocks: int | None = None,
    sorted_token_ids: Tensor | None = None,
    expert_ids: Tensor | None = None,
    num_tokens_post_pad: Tensor | None = None,
    adapter_enabled: Tensor | None = None,
    lora_ids: Tensor | None = None,
    expert_map: Tensor | None = None,
    *,
    mode: AlignMode = "uniform",
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Sort routed rows by (expert, adapter) and pad to whole blocks.

    Rows are ordered by (expert, adapter, flat index), base rows (-1) first.

    Given `sorted_token_ids` and the arguments around it, this is vLLM's operator: one list of
    blocks per adapter, written into the caller's tensors. Its arguments stand in vLLM's order.

    Parameters
    ----------
    {topk_ids}
    {token_lora_mapping}
    num_experts, block_size, expert_map
        As in `moe_align_block_size`.
    max_loras : int
        Number of adapter slots; ids from there on count as -1.
    max_num_tokens_padded, max_num_m_blocks : int, optional
        vLLM's form: rows and blocks of each list, at least
        `M * top_k + min(M * top_k, num_experts) * (block_size - 1)` rows.
    sorted_token_ids : Tensor, shape (max_loras, max_num_tokens_padded), or flat, int32, optional
        vLLM's form, written: flat row indices of each list, padding `M * top_k`.
    expert_ids : Tensor, shape (max_loras, max_num_m_blocks), or flat, int32, optional
        vLLM's form, written: expert of each block, -1 past the end.
    num_tokens_post_pad : Tensor, shape (max_loras,), int32, optional
        vLLM's form, written: rows in use of each list, padding included.
    {adapter_enabled?} Tokens of one that is off become base rows.
    lora_ids : Tensor, shape (any,), int32, optional
        vLLM's form: adapters whose lists are written. Those of other adapters, and of disabled
        ones, stay as they are; -1 and ids from `max_loras` on are skipped.
    mode : {"uniform", "segmented"}
        "uniform": every block holds one (expert, adapter) pair, and is padded to it.
        "segmented": a block holds one expert, its rows are ordered by adapter, and padding does
        not depend on the number of adapters.

    Returns
    -------
    {sorted_rows}
    expert_ids : Tensor, shape (blocks,), int32
        Local expert of each block, -1 past the end.
    lora_ids : Tensor, int32
        Adapter of each block ("uniform", shape (blocks,)) or of each row ("segmented", shape
        (blocks * block_size,)); -1 for base rows, padding and past the end.
    {num_tokens_post_padded}

    In vLLM's form: None.

    Raises
    ------
    {ValueError}
    {TypeError}

    Notes
    -----
    "uniform" follows vLLM's `moe_lora_align_block_size`, with one sorted list for all adapters
    instead of one list for each.
    """
    absent = absent_tensor(topk_ids)
    if sorted_token_ids is not None:
        if expert_ids is None or num_tokens_post_pad is None or lora_ids is None:
            raise ValueError(
                "expert_ids, num_tokens_post_pad or lora_ids is None, sorted_token_ids is not"
            )
        return run(
            operators.moe_lora_align_block_size_out.default,
            _per_adapter("sorted_token_ids", sorted_token_ids, max_loras, max_num_tokens_padded),
            _per_adapter("expert_ids", expert_ids, max_loras, max_num_m_blocks),
            num_tokens_post_pad,
            topk_ids,
            token_lora_mapping,
            num_experts,
            block_size,
            max_loras,
            enabled_or_absent(adapter_enabled, absent),
            ids_or_absent("lora_ids", lora_ids, absent),
            ids_or_absent("expert_map", expert_map, absent),
        )
    return run(
        operators.moe_lora_align_block_size.default,
        topk_ids,
        token_lora_mapping,
        num_experts,
        block_size,
        max_loras,
        choose("mode", mode, ALIGN_MODES),
        enabled_or_absent(adapter_enabled, absent),
        ids_or_absent("expert_map", expert_map, absent),
    )


def _per_adapter(name: str, lists: Tensor, max_loras: int, width: int | None) -> Tensor:
    """Lists of `width` for each adapter slot, as a matrix; vLLM allocates them flat."""
    if lists.dim() == 1 and width is not None and lists.numel() == max_loras * width:
        return lists.view(max_loras, width)
    if lists.dim() < 2 or (width is not None and lists.size(-1) != width):
        raise ValueError(
            f"{name} has shape {tuple(lists.shape)}, expected ({max_loras}, {width}), or flat"
        )
    return lists


@typed
def moe_sorting(
    topk_ids: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    block_size: int,
    *,
    out_to_zero: Tensor | None = None,
    expert_map: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sort routed rows by expert, with their weights, and zero an output in the same launch.

    Parameters
    ----------
    {topk_ids}
    {topk_weights}
    num_experts, block_size, expert_map
        As in `moe_align_block_size`.
    out_to_zero : Tensor, contiguous, floating point, optional
        Filled with zeros: the tensor that a later kernel adds its results to.

    Returns
    -------
    sorted_token_ids : Tensor, shape (blocks * block_size,), int32
        Token indices; padding is `M * top_k`.
    sorted_weights : Tensor, shape (blocks * block_size,), float32
        The weight of each row, 0 in padding.
    sorted_expert_ids : Tensor, shape (blocks,), int32
        Local expert of each block, -1 past the end. An expert without rows has one block.
    {num_tokens_post_padded}

    Raises
    ------
    {ValueError}
    {TypeError}
    {RuntimeError}

    Notes
    -----
    The form of Composable Kernel's `moe_sorting` (`ck_tile/ops/fused_moe`).
    """
    if out_to_zero is None:
        out_to_zero = topk_weights.new_empty(0)
    return run(
        operators.moe_sorting.default,
        topk_ids,
        weights_or_absent("topk_weights", topk_weights, topk_weights),
        num_experts,
        block_size,
        out_to_zero,
        ids_or_absent("expert_map", expert_map, absent_tensor(topk_ids)),
    )
