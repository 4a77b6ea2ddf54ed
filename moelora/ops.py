"""The public operators: torch.ops.moelora.* with names, None for what is absent, and checks.

The compiled operators take every argument; an absent tensor is a 1-D tensor of 0 elements there.
Everything about shapes, strides and dtypes is checked once, in C, for all callers; an error of
that kind becomes a ValueError here.

All functions work on CPU and CUDA tensors, all on one device, never synchronise with the host,
and can be captured in a CUDA graph and traced by torch.compile. They have no backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.compiler import is_compiling

from moelora import _C, trace

ACTIVATIONS = {"silu": 0, "gelu": 1, "swigluoai": 2, "relu2": 3}
ALIGN_MODES = {"uniform": 1, "segmented": 2}
# moelora_status of csrc/moelora.h; everything else stays a RuntimeError.
ERRORS = {1: ValueError, 2: NotImplementedError}
PACK = 64

_PLAIN = (Tensor, torch.nn.Parameter)
_operators = torch.ops.moelora
_absent_tensors: dict[torch.device, Tensor] = {}


@dataclass(frozen=True, eq=False)
class PackedWeights:
    """Expert weights in tiles of 64 x 64, as `prepack_weights` makes them.

    Each tile is one contiguous piece of memory, so that a kernel reads it in one burst.

    Attributes
    ----------
    data : Tensor, shape (E, N / 64, K / 64, 64, 64)
        The tiles; `data[e, i, j]` is `w[e, 64*i : 64*i+64, 64*j : 64*j+64]`.
    """

    data: Tensor

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


Weights: TypeAlias = Tensor | PackedWeights
Factors: TypeAlias = Tensor | Sequence[Tensor]


def _absent(like: Tensor) -> Tensor:
    """A tensor that says "none". Cached, except where a tracer must see it made."""
    if is_compiling() or type(like) not in _PLAIN:
        return like.new_empty(0)
    device = like.device
    found = _absent_tensors.get(device)
    if found is None:
        with torch.inference_mode(False):
            found = _absent_tensors[device] = torch.empty(0, device=device)
    return found


def _or_absent(tensor: Tensor | None, absent: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    if tensor is None:
        return absent
    return tensor if dtype is None or tensor.dtype is dtype else tensor.to(dtype)


def _enabled(adapter_enabled: Tensor | None, absent: Tensor) -> Tensor:
    if adapter_enabled is None or adapter_enabled.dtype is torch.bool:
        return _or_absent(adapter_enabled, absent)
    return _or_absent(adapter_enabled, absent, torch.int32)


def _factors(factors: Factors | None) -> list[Tensor]:
    if factors is None:
        return []
    return [factors] if isinstance(factors, Tensor) else list(factors)


def _data(weights: Weights) -> Tensor:
    return weights.data if isinstance(weights, PackedWeights) else weights


def _choose(name: str, value: str, known: dict[str, int]) -> int:
    if value not in known:
        raise ValueError(f"{name} is {value!r}, must be one of {', '.join(map(repr, known))}")
    return known[value]


def _run(op, *args):
    """Calls a compiled operator; its own complaints become the exception that Python expects."""
    if is_compiling():
        return op(*args)
    try:
        return trace.call(op, args) if trace.active else op(*args)
    except RuntimeError as error:
        status, text = _C.last_error()
        if text and text in str(error):
            raise ERRORS.get(status, RuntimeError)(text) from None
        raise


def moe_align_block_size(
    topk_ids: Tensor, block_size: int, num_experts: int, *, expert_map: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort routed rows by expert and pad each expert to whole blocks.

    The routed row of token `m` and choice `j` has the flat index `m * top_k + j`. Rows are
    ordered by (expert, flat index); a row whose expert id is out of range is left out.

    Parameters
    ----------
    topk_ids : Tensor, shape (M, top_k), int32 or int64
        Experts of each token.
    block_size : int
        Rows of one block.
    num_experts : int
        Number of experts; with `expert_map`, of global experts.
    expert_map : Tensor, shape (num_experts,), int32, optional
        Local expert of each global expert, -1 for experts of other ranks.

    Returns
    -------
    sorted_token_ids : Tensor, shape (blocks * block_size,), int32
        Flat row indices; padding is `M * top_k`. `blocks` is an upper bound known without
        looking at `topk_ids`.
    expert_ids : Tensor, shape (blocks,), int32
        Local expert of each block, -1 past the end.
    num_tokens_post_padded : Tensor, shape (1,), int32
        Rows in use, padding included.

    Raises
    ------
    ValueError
        A shape, dtype or value is not as above, or the tensors are on different devices.

    Notes
    -----
    The same function as vLLM's and SGLang's operator of this name
    (`csrc/moe/moe_align_sum_kernels.cu` in vLLM).
    """
    return _run(
        _operators.moe_align_block_size.default,
        topk_ids,
        block_size,
        num_experts,
        _or_absent(expert_map, _absent(topk_ids), torch.int32),
    )


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
    mode: str = "uniform",
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Sort routed rows by (expert, adapter) and pad to whole blocks.

    Rows are ordered by (expert, adapter, flat index), base rows (-1) first.

    Given `sorted_token_ids` and the arguments around it, this is vLLM's operator: one list of
    blocks per adapter, written into the caller's tensors. Its arguments stand in vLLM's order.

    Parameters
    ----------
    topk_ids : Tensor, shape (M, top_k), int32 or int64
        Experts of each token.
    token_lora_mapping : Tensor, shape (M,), int32 or int64
        Adapter slot of each token, -1 for none.
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
    adapter_enabled : Tensor, shape (max_loras,) or (max_loras + 1,), bool or int, optional
        Zero turns an adapter off: its tokens become base rows.
    lora_ids : Tensor, shape (any,), int32, optional
        vLLM's form: adapters whose lists are written. Those of other adapters, and of disabled
        ones, stay as they are; -1 and ids from `max_loras` on are skipped.
    mode : {"uniform", "segmented"}
        "uniform": every block holds one (expert, adapter) pair, and is padded to it.
        "segmented": a block holds one expert, its rows are ordered by adapter, and padding does
        not depend on the number of adapters.

    Returns
    -------
    sorted_token_ids : Tensor, shape (blocks * block_size,), int32
        Flat row indices; padding is `M * top_k`.
    expert_ids : Tensor, shape (blocks,), int32
        Local expert of each block, -1 past the end.
    lora_ids : Tensor, int32
        Adapter of each block ("uniform", shape (blocks,)) or of each row ("segmented", shape
        (blocks * block_size,)); -1 for base rows, padding and past the end.
    num_tokens_post_padded : Tensor, shape (1,), int32
        Rows in use, padding included.

    In vLLM's form: None.

    Raises
    ------
    ValueError
        A shape, dtype or value is not as above, or the tensors are on different devices.

    Notes
    -----
    "uniform" follows vLLM's `moe_lora_align_block_size`, with one sorted list for all adapters
    instead of one list for each.
    """
    absent = _absent(topk_ids)
    if sorted_token_ids is not None:
        if expert_ids is None or num_tokens_post_pad is None or lora_ids is None:
            raise ValueError(
                "expert_ids, num_tokens_post_pad or lora_ids is None, sorted_token_ids is not"
            )
        return _run(
            _operators.moe_lora_align_block_size_out.default,
            _per_adapter("sorted_token_ids", sorted_token_ids, max_loras, max_num_tokens_padded),
            _per_adapter("expert_ids", expert_ids, max_loras, max_num_m_blocks),
            num_tokens_post_pad,
            topk_ids,
            token_lora_mapping,
            num_experts,
            block_size,
            max_loras,
            _enabled(adapter_enabled, absent),
            lora_ids if lora_ids.dtype is torch.int32 else lora_ids.to(torch.int32),
            _or_absent(expert_map, absent, torch.int32),
        )
    return _run(
        _operators.moe_lora_align_block_size.default,
        topk_ids,
        token_lora_mapping,
        num_experts,
        block_size,
        max_loras,
        _choose("mode", mode, ALIGN_MODES),
        _enabled(adapter_enabled, absent),
        _or_absent(expert_map, absent, torch.int32),
    )


def _per_adapter(name: str, lists: Tensor, max_loras: int, width: int | None) -> Tensor:
    """Lists of `width` for each adapter slot, as a matrix; vLLM allocates them flat."""
    if lists.dim() == 1 and width is not None and lists.numel() == max_loras * width:
        return lists.view(max_loras, width)
    if lists.dim() == 1 or (width is not None and lists.size(-1) != width):
        raise ValueError(
            f"{name} has shape {tuple(lists.shape)}, expected ({max_loras}, {width}), or flat"
        )
    return lists


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
    topk_ids : Tensor, shape (M, top_k), int32 or int64
        Experts of each token.
    topk_weights : Tensor, shape (M, top_k)
        Routing weights; cast to float32 if they are not.
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
    num_tokens_post_padded : Tensor, shape (1,), int32
        Rows in use, padding included.

    Raises
    ------
    ValueError
        A shape, dtype or value is not as above, or the tensors are on different devices.

    Notes
    -----
    The form of Composable Kernel's `moe_sorting` (`ck_tile/ops/fused_moe`).
    """
    if out_to_zero is None:
        out_to_zero = topk_weights.new_empty(0)
    return _run(
        _operators.moe_sorting.default,
        topk_ids,
        _or_absent(topk_weights, topk_weights, torch.float32),
        num_experts,
        block_size,
        out_to_zero,
        _or_absent(expert_map, _absent(topk_ids), torch.int32),
    )


def fused_moe_lora_gemm(
    x: Tensor,
    w: Weights,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    token_lora_mapping: Tensor | None = None,
    lora_a: Factors | None = None,
    lora_b: Factors | None = None,
    lora_ranks: Tensor | None = None,
    lora_scalings: Tensor | None = None,
    adapter_enabled: Tensor | None = None,
    bias: Tensor | None = None,
    expert_map: Tensor | None = None,
    mul_routed_weight: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """One projection of all routed rows, base product and adapters in one pass.

    For token `m`, choice `j`, expert `e = topk_ids[m, j]`, adapter `l = token_lora_mapping[m]`::

        out[m, j] = x w[e]^T + lora_scalings[l] (x lora_a[l, e]^T) lora_b[l, e]^T + bias[e]

    A row with adapter -1, or whose adapter is disabled, has the same bits as without adapters.

    Parameters
    ----------
    x : Tensor, shape (M, K) or (M * top_k, K)
        Input of each token, or of each routed row. float32, bfloat16 or float16 (CUDA: the
        latter two); the dtype of all weights, factors, biases and of the result.
    w : Tensor, shape (E, N, K), or PackedWeights
        Expert weights.
    topk_weights : Tensor, shape (M, top_k)
        Routing weights; cast to float32 if they are not. Read if `mul_routed_weight`.
    topk_ids : Tensor, shape (M, top_k), int32 or int64
        Experts of each token. A row whose id is out of range becomes 0.
    token_lora_mapping : Tensor, shape (M,), int32 or int64, optional
        Adapter slot of each token, -1 for none. Absent: no token has an adapter.
    lora_a : Tensor or sequence of tensors, shape (max_loras, E or 1, R, K), optional
        Shrink factors, one for each slice of the output columns. An expert dimension of 1 is
        one factor shared by all experts.
    lora_b : Tensor or sequence of tensors, shape (max_loras, E or 1, N / slices, R), optional
        Expand factors, one for each slice.
    lora_ranks : Tensor, shape (max_loras,), int32, optional
        True rank of each adapter, `<= R`; the rest of its factors is not read. Absent: `R`.
    lora_scalings : Tensor, shape (max_loras,), float32, optional
        Scaling of each adapter. Absent: 1, that is folded into `lora_b`.
    adapter_enabled : Tensor, shape (max_loras,) or (max_loras + 1,), bool or int, optional
        Zero turns an adapter off. Absent: all are on.
    bias : Tensor, shape (E, N), optional
        Added to each row of an expert.
    expert_map : Tensor, shape (E_global,), int32, optional
        Local expert of each global expert, -1 for experts of other ranks, whose rows become 0.
    mul_routed_weight : bool
        Multiply row (m, j) by `topk_weights[m, j]`.
    out : Tensor, shape (M, top_k, N), optional
        Where to write the result.

    Returns
    -------
    Tensor, shape (M, top_k, N)
        `out`, or a new tensor.

    Raises
    ------
    ValueError
        A shape, dtype, stride or value is not as above, or the tensors are on different devices.
    NotImplementedError
        This build or this device has no kernel for it.

    Notes
    -----
    Rows are grouped by (expert, adapter) as in Punica (Chen et al., 2023, arXiv:2310.18547) and
    S-LoRA (Sheng et al., 2023, arXiv:2311.03285); the low-rank product joins the accumulators of
    the base product instead of being added to its output by further kernels.
    """
    absent = _absent(x)
    args = (
        x,
        _data(w),
        _or_absent(topk_weights, absent, torch.float32),
        topk_ids,
        _or_absent(token_lora_mapping, absent),
        _factors(lora_a),
        _factors(lora_b),
        _or_absent(lora_ranks, absent, torch.int32),
        _or_absent(lora_scalings, absent, torch.float32),
        _enabled(adapter_enabled, absent),
        _or_absent(bias, absent),
        _or_absent(expert_map, absent, torch.int32),
        mul_routed_weight,
    )
    if out is None:
        return _run(_operators.fused_moe_lora_gemm.default, *args)
    _run(_operators.fused_moe_lora_gemm_out.default, *args, out)
    return out


def fused_experts_lora(
    hidden_states: Tensor,
    w13: Weights,
    w2: Weights,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    token_lora_mapping: Tensor | None = None,
    w13_lora_a: Factors | None = None,
    w13_lora_b: Factors | None = None,
    w2_lora_a: Factors | None = None,
    w2_lora_b: Factors | None = None,
    lora_ranks: Tensor | None = None,
    lora_scalings: Tensor | None = None,
    adapter_enabled: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    activation: str = "silu",
    expert_map: Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """A whole mixture-of-experts layer, with every token's own adapter inside both projections.

    For token `m`, choice `j`, expert `e = topk_ids[m, j]`, adapter `l = token_lora_mapping[m]`
    and `s = lora_scalings[l]`::

        g = x Wg[e]^T + s (x Ag[l, e]^T) Bg[l, e]^T + bias         (u likewise)
        h = activation(g, u)
        z = h W2[e]^T + s (h A2[l, e]^T) B2[l, e]^T + bias
        out[m] = sum over j of topk_weights[m, j] * z

    Accumulation and the sum over `j` are in float32. A token with adapter -1, or whose adapter is
    disabled, gets the same bits as without adapters, whatever the other tokens carry. Without
    adapters this is a complete fused MoE layer.

    Parameters
    ----------
    hidden_states : Tensor, shape (M, K)
        Input. float32, bfloat16 or float16 (CUDA: the latter two); the dtype of all weights,
        factors, biases and of the result.
    w13 : Tensor, shape (E, 2 I, K) ((E, I, K) for "relu2"), or PackedWeights
        Gate rows, then up rows of each expert ("swigluoai": interleaved).
    w2 : Tensor, shape (E, K, I), or PackedWeights
        Down projection of each expert.
    topk_weights : Tensor, shape (M, top_k)
        Routing weights; cast to float32 if they are not.
    topk_ids : Tensor, shape (M, top_k), int32 or int64
        Experts of each token. A choice whose id is out of range contributes nothing.
    token_lora_mapping : Tensor, shape (M,), int32 or int64, optional
        Adapter slot of each token, -1 for none. Absent: no token has an adapter.
    w13_lora_a : Tensor or sequence of tensors, shape (max_loras, E or 1, R, K), optional
        Shrink factors of `w13`: one for all its columns, or one for gate and one for up. An
        expert dimension of 1 is one factor shared by all experts.
    w13_lora_b : Tensor or sequence of tensors, shape (max_loras, E or 1, 2 I / slices, R), optional
        Expand factors of `w13`, as many.
    w2_lora_a : Tensor, shape (max_loras, E or 1, R, I), optional
        Shrink factors of `w2`.
    w2_lora_b : Tensor, shape (max_loras, E or 1, K, R), optional
        Expand factors of `w2`.
    lora_ranks : Tensor, shape (max_loras,), int32, optional
        True rank of each adapter, `<= R`; the rest of its factors is not read. Absent: `R`.
    lora_scalings : Tensor, shape (max_loras,), float32, optional
        `alpha / r` of each adapter, `alpha / sqrt(r)` for rsLoRA. Absent: 1, that is folded into
        the expand factors.
    adapter_enabled : Tensor, shape (max_loras,) or (max_loras + 1,), bool or int, optional
        Zero turns an adapter off. Absent: all are on.
    w13_bias : Tensor, shape (E, 2 I), optional
        Bias of `w13`.
    w2_bias : Tensor, shape (E, K), optional
        Bias of `w2`.
    activation : {"silu", "gelu", "swigluoai", "relu2"}
        `silu(g) * u`; `gelu_tanh(g) * u`; gpt-oss's clamped SwiGLU; `relu(g)^2` without up rows.
    expert_map : Tensor, shape (E_global,), int32, optional
        Local expert of each global expert, -1 for experts of other ranks, which contribute
        nothing.
    apply_router_weight_on_input : bool
        Multiply the input instead of the output by the routing weight; needs `top_k == 1`.
    out : Tensor, shape (M, K), optional
        Where to write the result; `hidden_states` itself is allowed.

    Returns
    -------
    Tensor, shape (M, K)
        `out`, or a new tensor.

    Raises
    ------
    ValueError
        A shape, dtype, stride or value is not as above, or the tensors are on different devices.
    NotImplementedError
        This build or this device has no kernel for it.

    Notes
    -----
    The exact MoE LoRA that PEFT trains: the adapters of gate and up enter before the activation.
    For the method see `fused_moe_lora_gemm`.

    Examples
    --------
    >>> import torch, moelora
    >>> x, router = torch.randn(4, 64), torch.randn(4, 8)
    >>> w13, w2 = torch.randn(8, 256, 64), torch.randn(8, 64, 128)
    >>> topk_weights, topk_ids = router.softmax(-1).topk(2)
    >>> moelora.fused_experts_lora(x, w13, w2, topk_weights, topk_ids).shape
    torch.Size([4, 64])
    """
    absent = _absent(hidden_states)
    args = (
        hidden_states,
        _data(w13),
        _data(w2),
        _or_absent(topk_weights, absent, torch.float32),
        topk_ids,
        _or_absent(token_lora_mapping, absent),
        _factors(w13_lora_a),
        _factors(w13_lora_b),
        _factors(w2_lora_a),
        _factors(w2_lora_b),
        _or_absent(lora_ranks, absent, torch.int32),
        _or_absent(lora_scalings, absent, torch.float32),
        _enabled(adapter_enabled, absent),
        _or_absent(w13_bias, absent),
        _or_absent(w2_bias, absent),
        _choose("activation", activation, ACTIVATIONS),
        _or_absent(expert_map, absent, torch.int32),
        apply_router_weight_on_input,
    )
    if out is None:
        return _run(_operators.fused_experts_lora.default, *args)
    _run(_operators.fused_experts_lora_out.default, *args, out)
    return out


def prepack_weights(w: Tensor) -> PackedWeights:
    """Copy expert weights into tiles of 64 x 64 that kernels read in one burst.

    Parameters
    ----------
    w : Tensor, shape (E, N, K)
        Expert weights; `N` and `K` are multiples of 64.

    Returns
    -------
    PackedWeights
        Accepted wherever `w13`, `w2` or `w` is.

    Raises
    ------
    ValueError
        `w` is not 3-D, or a size is not a multiple of 64.
    """
    return PackedWeights(_run(_operators.prepack_weights.default, w))
