"""Slow, obvious versions of every operator: what the fast ones are tested against.

`*_ref` functions loop over routed rows in float64 on the CPU and never round, so their result is
the mathematical value of the definition, whatever dtype the inputs had. Alignment references work
on plain Python lists.

`naive_*` functions compute the same values the way a torch user would write them without this
package: one expert at a time, `index_select`, `mm`, and separate LoRA matrix products, in the dtype
and on the device of the inputs. Each product is rounded to that dtype; only the sum over `top_k` is
fp32. Their error against `*_ref` says how much accuracy a dtype allows, and their time is a
baseline.

All take the keyword arguments of the operator whose name they carry. Ids out of range mean the same
everywhere: a row whose expert id (after `expert_map`) is not in [0, E) is skipped, and a row whose
adapter id is not in [0, max_loras), or whose adapter is disabled or has rank 0, is a base row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SWIGLUOAI_ALPHA = 1.702
SWIGLUOAI_LIMIT = 7.0

Factors = Tensor | Sequence[Tensor] | None


def activate(x: Tensor, activation: str) -> Tensor:
    """Apply an expert's activation to the columns (last dimension) of the w13 projection.

    - `silu`:      x = [gate | up];  silu(gate) * up
    - `gelu`:      x = [gate | up];  gelu_tanh(gate) * up
    - `swigluoai`: even columns are gate, odd ones up; gate is clamped to at most 7 and up to
      [-7, 7]; (up + 1) * gate * sigmoid(1.702 * gate)
    - `relu2`:     not gated; relu(x) ** 2

    Works in the dtype of `x`; the gated ones return half of the columns.
    """
    if activation == "relu2":
        return torch.relu(x).square()
    if activation == "swigluoai":
        gate = x[..., 0::2].clamp(max=SWIGLUOAI_LIMIT)
        up = x[..., 1::2].clamp(-SWIGLUOAI_LIMIT, SWIGLUOAI_LIMIT)
        return (up + 1) * gate * torch.sigmoid(SWIGLUOAI_ALPHA * gate)
    gate, up = x.chunk(2, dim=-1)
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    if activation == "gelu":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    raise ValueError(f"activation is {activation!r}, wanted silu, gelu, swigluoai or relu2")


def _as_list(factors: Factors) -> list[Tensor]:
    if factors is None:
        return []
    return [factors] if isinstance(factors, Tensor) else list(factors)


def _max_loras(*stacks: Factors) -> int:
    for stack in stacks:
        for factor in _as_list(stack):
            return factor.size(0)
    return 0


def _optional_list(t: Tensor | None) -> list | None:
    return None if t is None else t.tolist()


def local_expert(global_id: int, num_local: int, expert_map: Sequence[int] | None) -> int:
    """The expert's index on this rank, or -1 if the row is to be skipped."""
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


def _adapter_per_token(num_tokens: int, max_loras: int, mapping, enabled, ranks) -> list[int]:
    if mapping is None:
        return [-1] * num_tokens
    enabled, ranks = _optional_list(enabled), _optional_list(ranks)
    return [active_adapter(a, max_loras, enabled, ranks) for a in mapping.tolist()]


def _expert_per_choice(topk_ids: Tensor, num_local: int, expert_map) -> list[list[int]]:
    expert_map = _optional_list(expert_map)
    return [[local_expert(e, num_local, expert_map) for e in row] for row in topk_ids.tolist()]


def _pair(stack: Tensor, adapter: int, expert: int) -> Tensor:
    """One factor of a stack (max_loras, E or 1, rows, columns)."""
    return stack[adapter, 0 if stack.size(1) == 1 else expert]


def _float64(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.detach().cpu().double()


def _project_row(
    x: Tensor,  # (K,) float64
    w: Tensor,  # (E, N, K)
    bias: Tensor | None,  # (E, N)
    lora_a: list[Tensor],  # per slice (max_loras, E or 1, R, K)
    lora_b: list[Tensor],  # per slice (max_loras, E or 1, N / slices, R)
    expert: int,
    adapter: int,
    ranks: list[int] | None,
    scalings: list[float] | None,
) -> Tensor:
    """x W^T + s (x A^T) B^T + bias for one row, in float64: (N,)."""
    y = w[expert] @ x
    if adapter >= 0:
        scaling = 1.0 if scalings is None else scalings[adapter]
        first = 0
        for stack_a, stack_b in zip(lora_a, lora_b, strict=True):
            a = _pair(stack_a, adapter, expert)
            b = _pair(stack_b, adapter, expert)
            rank = a.size(0) if ranks is None else min(ranks[adapter], a.size(0))
            last = first + b.size(0)
            y[first:last] += scaling * (b[:, :rank] @ (a[:rank] @ x))
            first = last
    if bias is not None:
        y += bias[expert]
    return y


def fused_moe_lora_gemm_ref(
    x: Tensor,
    w: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    token_lora_mapping: Tensor | None = None,
    lora_a: Factors = None,
    lora_b: Factors = None,
    lora_ranks: Tensor | None = None,
    lora_scalings: Tensor | None = None,
    adapter_enabled: Tensor | None = None,
    bias: Tensor | None = None,
    expert_map: Tensor | None = None,
    mul_routed_weight: bool = False,
) -> Tensor:
    """One projection of an MoE layer with adapters, row by row in float64.

    For routed row (m, j) with local expert e and adapter l of token m::

        out[m, j] = x W[e]^T + s[l] (x A[l,e]^T) B[l,e]^T + bias[e]     (* topk_weights[m, j])

    where x is row m of an (M, K) input or row m * top_k + j of an (M * top_k, K) one.

    Returns (M, top_k, N), float64, on the CPU; rows of skipped experts are zero.
    """
    num_tokens, top_k = topk_ids.shape
    experts = _expert_per_choice(topk_ids, w.size(0), expert_map)
    adapters = _adapter_per_token(
        num_tokens, _max_loras(lora_a), token_lora_mapping, adapter_enabled, lora_ranks
    )
    row_per_choice = x.size(0) != num_tokens
    x, w, bias = _float64(x), _float64(w), _float64(bias)
    lora_a = [_float64(a) for a in _as_list(lora_a)]
    lora_b = [_float64(b) for b in _as_list(lora_b)]
    ranks, scalings = _optional_list(lora_ranks), _optional_list(lora_scalings)
    weights = _float64(topk_weights) if mul_routed_weight else None

    out = torch.zeros(num_tokens, top_k, w.size(1), dtype=torch.float64)
    for m in range(num_tokens):
        for j in range(top_k):
            e = experts[m][j]
            if e < 0:
                continue
            row = x[m * top_k + j] if row_per_choice else x[m]
            y = _project_row(row, w, bias, lora_a, lora_b, e, adapters[m], ranks, scalings)
            out[m, j] = y if weights is None else y * weights[m, j]
    return out


def fused_experts_lora_ref(
    hidden_states: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    token_lora_mapping: Tensor | None = None,
    w13_lora_a: Factors = None,
    w13_lora_b: Factors = None,
    w2_lora_a: Factors = None,
    w2_lora_b: Factors = None,
    lora_ranks: Tensor | None = None,
    lora_scalings: Tensor | None = None,
    adapter_enabled: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    activation: str = "silu",
    expert_map: Tensor | None = None,
    apply_router_weight_on_input: bool = False,
) -> Tensor:
    """A whole MoE layer with adapters, row by row in float64.

    For routed row (m, j) with local expert e and adapter l of token m::

        gu = x[m] W13[e]^T + s[l] (x[m] A13[l,e]^T) B13[l,e]^T + b13[e]
        h  = activation(gu)
        z  = h W2[e]^T + s[l] (h A2[l,e]^T) B2[l,e]^T + b2[e]
        out[m] = sum over j of topk_weights[m, j] * z

    The adapter enters before the activation. LoRA slices cover the columns of gu in memory order:
    with two slices, slice 0 covers rows 0..I-1 of W13 and slice 1 rows I..2I-1, whatever the
    activation makes of those rows; a single slice covers all of them with one A.
    With `apply_router_weight_on_input` (top_k == 1) the weight multiplies x instead of z.

    Returns (M, K), float64, on the CPU; skipped experts contribute nothing.
    """
    num_tokens, top_k = topk_ids.shape
    experts = _expert_per_choice(topk_ids, w13.size(0), expert_map)
    adapters = _adapter_per_token(
        num_tokens,
        _max_loras(w13_lora_a, w2_lora_a),
        token_lora_mapping,
        adapter_enabled,
        lora_ranks,
    )
    x, w13, w2 = _float64(hidden_states), _float64(w13), _float64(w2)
    w13_bias, w2_bias, weights = _float64(w13_bias), _float64(w2_bias), _float64(topk_weights)
    a13, b13 = ([_float64(t) for t in _as_list(f)] for f in (w13_lora_a, w13_lora_b))
    a2, b2 = ([_float64(t) for t in _as_list(f)] for f in (w2_lora_a, w2_lora_b))
    ranks, scalings = _optional_list(lora_ranks), _optional_list(lora_scalings)

    out = torch.zeros_like(x)
    for m in range(num_tokens):
        for j in range(top_k):
            e, adapter = experts[m][j], adapters[m]
            if e < 0:
                continue
            row = x[m] * weights[m, j] if apply_router_weight_on_input else x[m]
            gu = _project_row(row, w13, w13_bias, a13, b13, e, adapter, ranks, scalings)
            h = activate(gu, activation)
            z = _project_row(h, w2, w2_bias, a2, b2, e, adapter, ranks, scalings)
            out[m] += z if apply_router_weight_on_input else weights[m, j] * z
    return out


def _naive_project(
    x: Tensor,  # (rows, K), rows of one expert
    w: Tensor,
    bias: Tensor | None,
    lora_a: list[Tensor],
    lora_b: list[Tensor],
    expert: int,
    adapters: Tensor,  # (rows,) int64, -1 = base
    ranks: list[int] | None,
    scalings: list[float] | None,
) -> Tensor:
    y = torch.mm(x, w[expert].t())
    if bias is not None:
        y += bias[expert]
    for adapter in adapters.unique().tolist() if lora_a else []:
        if adapter < 0:
            continue
        rows = (adapters == adapter).nonzero().squeeze(1)
        x_adapter = x.index_select(0, rows)
        deltas = []
        for stack_a, stack_b in zip(lora_a, lora_b, strict=True):
            a = _pair(stack_a, adapter, expert)
            b = _pair(stack_b, adapter, expert)
            rank = a.size(0) if ranks is None else min(ranks[adapter], a.size(0))
            delta = torch.mm(torch.mm(x_adapter, a[:rank].t()), b[:, :rank].t())
            deltas.append(delta if scalings is None else delta * scalings[adapter])
        y.index_add_(0, rows, torch.cat(deltas, dim=1))
    return y


def _naive_rows(
    topk_ids: Tensor, num_experts: int, expert_map: Tensor | None
) -> list[tuple[int, Tensor]]:
    """(expert, flat row indices) for every expert that has rows."""
    experts = _expert_per_choice(topk_ids, num_experts, expert_map)
    flat = torch.tensor([e for row in experts for e in row], dtype=torch.int64)
    rows = ((e, (flat == e).nonzero().squeeze(1)) for e in flat.unique().tolist() if e >= 0)
    return [(e, r.to(topk_ids.device)) for e, r in rows]


def naive_fused_moe_lora_gemm(
    x: Tensor,
    w: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    token_lora_mapping: Tensor | None = None,
    lora_a: Factors = None,
    lora_b: Factors = None,
    lora_ranks: Tensor | None = None,
    lora_scalings: Tensor | None = None,
    adapter_enabled: Tensor | None = None,
    bias: Tensor | None = None,
    expert_map: Tensor | None = None,
    mul_routed_weight: bool = False,
) -> Tensor:
    """`fused_moe_lora_gemm_ref` as a loop over experts in the dtype and on the device of `x`."""
    num_tokens, top_k = topk_ids.shape
    adapters = torch.tensor(
        _adapter_per_token(
            num_tokens, _max_loras(lora_a), token_lora_mapping, adapter_enabled, lora_ranks
        ),
        dtype=torch.int64,
        device=x.device,
    )
    lora_a, lora_b = _as_list(lora_a), _as_list(lora_b)
    ranks, scalings = _optional_list(lora_ranks), _optional_list(lora_scalings)
    out = x.new_zeros(num_tokens * top_k, w.size(1))
    for expert, rows in _naive_rows(topk_ids, w.size(0), expert_map):
        tokens = rows // top_k
        x_rows = x.index_select(0, tokens if x.size(0) == num_tokens else rows)
        y = _naive_project(
            x_rows, w, bias, lora_a, lora_b, expert, adapters[tokens], ranks, scalings
        )
        if mul_routed_weight:
            y = (y.float() * topk_weights.reshape(-1)[rows].unsqueeze(1)).to(y.dtype)
        out[rows] = y
    return out.view(num_tokens, top_k, w.size(1))


def naive_fused_experts_lora(
    hidden_states: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    token_lora_mapping: Tensor | None = None,
    w13_lora_a: Factors = None,
    w13_lora_b: Factors = None,
    w2_lora_a: Factors = None,
    w2_lora_b: Factors = None,
    lora_ranks: Tensor | None = None,
    lora_scalings: Tensor | None = None,
    adapter_enabled: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    activation: str = "silu",
    expert_map: Tensor | None = None,
    apply_router_weight_on_input: bool = False,
) -> Tensor:
    """`fused_experts_lora_ref` as a loop over experts in the dtype and on the device of the input.

    The products, the activation and the scaling round to that dtype; the sum over top_k is fp32.
    """
    x = hidden_states
    num_tokens, top_k = topk_ids.shape
    adapters = torch.tensor(
        _adapter_per_token(
            num_tokens,
            _max_loras(w13_lora_a, w2_lora_a),
            token_lora_mapping,
            adapter_enabled,
            lora_ranks,
        ),
        dtype=torch.int64,
        device=x.device,
    )
    a13, b13, a2, b2 = map(_as_list, (w13_lora_a, w13_lora_b, w2_lora_a, w2_lora_b))
    ranks, scalings = _optional_list(lora_ranks), _optional_list(lora_scalings)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert, rows in _naive_rows(topk_ids, w13.size(0), expert_map):
        tokens = rows // top_k
        weights = topk_weights.reshape(-1)[rows].unsqueeze(1)
        x_rows = x.index_select(0, tokens)
        if apply_router_weight_on_input:
            x_rows = (x_rows.float() * weights).to(x.dtype)
        carried = adapters[tokens]
        gu = _naive_project(x_rows, w13, w13_bias, a13, b13, expert, carried, ranks, scalings)
        h = activate(gu, activation)
        z = _naive_project(h, w2, w2_bias, a2, b2, expert, carried, ranks, scalings).float()
        out.index_add_(0, tokens, z if apply_router_weight_on_input else z * weights)
    return out.to(x.dtype)


def align_max_blocks_ref(
    mode: str, num_rows: int, num_experts: int, block_size: int, max_loras: int = 0
) -> int:
    """How many blocks the outputs of an alignment hold, whatever the ids turn out to be.

    `mode` is "base", "uniform", "segmented" or "sorting". Every non-empty group of rows wastes at
    most block_size - 1 places, a group has at least one row, and no more groups than rows exist;
    `sorting` gives each of the empty experts one block too.
    """
    if mode == "sorting":
        return num_experts + num_rows // block_size
    groups = num_experts * (max_loras + 1) if mode == "uniform" else num_experts
    groups = min(groups, num_rows)
    return min(num_rows, (num_rows + groups * (block_size - 1)) // block_size)


def _int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _pad(values: list, length: int, padding) -> list:
    return values + [padding] * (length - len(values))


def moe_lora_align_block_size_ref(
    topk_ids: Tensor,
    token_lora_mapping: Tensor,
    num_experts: int,
    block_size: int,
    max_loras: int,
    *,
    mode: str = "uniform",
    adapter_enabled: Tensor | None = None,
    expert_map: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sort routed rows by (local expert, adapter) and pad each group to whole blocks.

    `uniform`: a group is one (expert, adapter) pair, so a block holds one pair; `lora_ids` has one
    entry per block. `segmented`: a group is one expert, its rows ordered by adapter; `lora_ids` has
    one entry per row. Adapter -1 (base rows) sorts first; equal keys keep the order of the flat row
    index m * top_k + j.

    Returns int32 (sorted_token_ids, expert_ids, lora_ids, num_tokens_post_padded) of the sizes of
    `align_max_blocks_ref`; padding is M * top_k in the row ids and -1 elsewhere.
    """
    num_tokens, top_k = topk_ids.shape
    experts = _expert_per_choice(topk_ids, num_experts, expert_map)
    adapters = _adapter_per_token(num_tokens, max_loras, token_lora_mapping, adapter_enabled, None)
    padding = num_tokens * top_k

    groups: dict[tuple, list[tuple[int, int]]] = {}  # key -> [(adapter, row)]
    for m in range(num_tokens):
        for j in range(top_k):
            e = experts[m][j]
            if e >= 0:
                key = (e, adapters[m]) if mode == "uniform" else (e,)
                groups.setdefault(key, []).append((adapters[m], m * top_k + j))

    sorted_token_ids: list[int] = []
    expert_ids: list[int] = []
    lora_per_row: list[int] = []
    lora_per_block: list[int] = []
    for key in sorted(groups):
        rows = sorted(groups[key])
        num_blocks = -(-len(rows) // block_size)
        sorted_token_ids += _pad([row for _, row in rows], num_blocks * block_size, padding)
        lora_per_row += _pad([adapter for adapter, _ in rows], num_blocks * block_size, -1)
        expert_ids += [key[0]] * num_blocks
        lora_per_block += [rows[0][0]] * num_blocks

    max_blocks = align_max_blocks_ref(mode, padding, num_experts, block_size, max_loras)
    max_rows = max_blocks * block_size
    if mode == "uniform":
        lora_ids = _pad(lora_per_block, max_blocks, -1)
    else:
        lora_ids = _pad(lora_per_row, max_rows, -1)
    return (
        _int32(_pad(sorted_token_ids, max_rows, padding)),
        _int32(_pad(expert_ids, max_blocks, -1)),
        _int32(lora_ids),
        _int32([len(sorted_token_ids)]),
    )


def moe_align_block_size_ref(
    topk_ids: Tensor, block_size: int, num_experts: int, *, expert_map: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort routed rows by local expert and pad each expert's rows to whole blocks.

    Returns int32 (sorted_token_ids, expert_ids, num_tokens_post_padded) like
    `moe_lora_align_block_size_ref` without adapters. An empty expert gets no block.
    """
    mapping = torch.full((topk_ids.size(0),), -1, dtype=torch.int32)
    sorted_token_ids, expert_ids, _, num_tokens_post_padded = moe_lora_align_block_size_ref(
        topk_ids, mapping, num_experts, block_size, 0, mode="segmented", expert_map=expert_map
    )
    return sorted_token_ids, expert_ids, num_tokens_post_padded


def moe_sorting_ref(
    topk_ids: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    block_size: int,
    *,
    out_to_zero: Tensor | None = None,
    expert_map: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """CK-tile's alignment: rows sorted by local expert, with token ids and routing weights.

    `sorted_token_ids` holds tokens m, not flat rows m * top_k + j; `sorted_weights` the matching
    routing weights, 0 in padding. Every local expert without rows gets one block of padding (with
    `expert_map` the local experts are the ids that occur in it). `out_to_zero` is zeroed.

    Returns (sorted_token_ids int32, sorted_weights fp32, sorted_expert_ids int32,
    num_tokens_post_padded int32).
    """
    num_tokens, top_k = topk_ids.shape
    experts = _expert_per_choice(topk_ids, num_experts, expert_map)
    weights = topk_weights.tolist()
    padding = num_tokens * top_k
    here = range(num_experts) if expert_map is None else set(expert_map.tolist())

    sorted_token_ids: list[int] = []
    sorted_weights: list[float] = []
    expert_ids: list[int] = []
    for e in range(num_experts):
        if e not in here:
            continue
        rows = [(m, j) for m in range(num_tokens) for j in range(top_k) if experts[m][j] == e]
        num_blocks = max(1, -(-len(rows) // block_size))
        sorted_token_ids += _pad([m for m, _ in rows], num_blocks * block_size, padding)
        sorted_weights += _pad([weights[m][j] for m, j in rows], num_blocks * block_size, 0.0)
        expert_ids += [e] * num_blocks

    if out_to_zero is not None:
        out_to_zero.zero_()
    max_blocks = align_max_blocks_ref("sorting", padding, num_experts, block_size)
    max_rows = max_blocks * block_size
    return (
        _int32(_pad(sorted_token_ids, max_rows, padding)),
        torch.tensor(_pad(sorted_weights, max_rows, 0.0), dtype=torch.float32),
        _int32(_pad(expert_ids, max_blocks, -1)),
        _int32([len(sorted_token_ids)]),
    )
