"""Triton kernels of a layer that adds its adapters after the base product, one kernel per step.

    c13 = x w13^T        grouped_gemm, rows sorted by expert, padded to blocks
    t   = x A^T          shrink, rows sorted by (expert, adapter), float32
    c13 += t B^T         expand
    h   = act(c13)       activation
    c2  = weight * h w2^T, shrink and expand once more
    out = sum over top_k combine

Rows are flat indices m * top_k + j; sorted lists come from moelora's alignment operators, and
entries from num_rows on are padding. Every kernel is tuned for its shape on its first call.
"""

import triton
import triton.language as tl

GEMM_CONFIGS = [
    triton.Config({"BN": bn, "BK": bk, "GROUP": group}, num_warps=warps, num_stages=stages)
    for bn, bk, group, warps, stages in [
        (64, 64, 1, 4, 4),
        (64, 128, 1, 4, 4),
        (128, 64, 1, 4, 4),
        (128, 64, 16, 8, 3),
        (128, 128, 1, 8, 3),
        (256, 64, 16, 8, 3),
    ]
]
SHRINK_CONFIGS = [
    triton.Config({"SPLIT_K": split, "BK": bk}, num_warps=4, num_stages=3)
    for split, bk in [(1, 128), (1, 256), (4, 128), (8, 128)]
]
EXPAND_CONFIGS = [
    triton.Config({"BN": bn}, num_warps=warps, num_stages=2)
    for bn, warps in [(64, 4), (128, 4), (256, 8)]
]


def quickly(call, quantiles):
    return triton.testing.do_bench(call, warmup=5, rep=20, quantiles=quantiles)


@triton.autotune(GEMM_CONFIGS, key=["n", "k", "BM"], do_bench=quickly)
@triton.heuristics({"EVEN_K": lambda args: args["k"] % args["BK"] == 0})
@triton.jit
def grouped_gemm(
    x,  # [num_rows / DIVISOR, k]
    w,  # [E, n, k]
    out,  # [num_rows, n]
    row_weights,  # [num_rows], read if MUL_WEIGHT
    row_ids,  # [padded rows]
    expert_ids,  # [blocks]
    num_padded,  # [1]
    max_blocks,
    num_rows,
    n,
    k,
    stride_we,
    DIVISOR: tl.constexpr,
    MUL_WEIGHT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    pid = tl.program_id(0)
    per_group = GROUP * tl.cdiv(n, BN)
    first = pid // per_group * GROUP
    group_rows = min(max_blocks - first, GROUP)
    block = first + pid % per_group % group_rows
    tile = pid % per_group // group_rows
    if block * BM >= tl.load(num_padded):
        return
    expert = tl.load(expert_ids + block).to(tl.int64)
    rows = tl.load(row_ids + block * BM + tl.arange(0, BM)).to(tl.int64)
    real = rows < num_rows
    cols = tile * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    xs = x + rows[:, None] // DIVISOR * k + depth[None, :]
    ws = w + expert * stride_we + (cols % n).to(tl.int64)[None, :] * k + depth[:, None]
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for at in range(0, k, BK):
        if EVEN_K:
            a = tl.load(xs, mask=real[:, None], other=0.0)
            b = tl.load(ws)
        else:
            a = tl.load(xs, mask=real[:, None] & (at + depth < k)[None, :], other=0.0)
            b = tl.load(ws, mask=(at + depth < k)[:, None], other=0.0)
        acc += tl.dot(a, b)
        xs += BK
        ws += BK
    if MUL_WEIGHT:
        acc *= tl.load(row_weights + rows, mask=real, other=0.0)[:, None]
    target = out + rows[:, None] * n + cols[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=real[:, None] & (cols < n)[None, :])


@triton.autotune(
    SHRINK_CONFIGS, key=["k", "RANK", "BM", "max_blocks"], reset_to_zero=["t"], do_bench=quickly
)
@triton.jit
def shrink(
    x,  # [num_rows / DIVISOR, k]
    a,  # [L, E, rank, k]
    t,  # [num_rows, rank] float32, zero
    row_ids,
    expert_ids,
    lora_ids,
    num_padded,
    max_blocks,
    num_rows,
    rank,
    k,
    stride_al,
    stride_ae,
    DIVISOR: tl.constexpr,
    BM: tl.constexpr,
    RANK: tl.constexpr,  # a power of two, at least 16 and `rank`
    BK: tl.constexpr,
    SPLIT_K: tl.constexpr,
):
    block, part = tl.program_id(0), tl.program_id(1)
    if block * BM >= tl.load(num_padded):
        return
    adapter = tl.load(lora_ids + block).to(tl.int64)
    if adapter < 0:
        return
    expert = tl.load(expert_ids + block).to(tl.int64)
    rows = tl.load(row_ids + block * BM + tl.arange(0, BM)).to(tl.int64)
    real = rows < num_rows
    ranks = tl.arange(0, RANK)
    depth = part * BK + tl.arange(0, BK)
    xs = x + rows[:, None] // DIVISOR * k
    factor = a + adapter * stride_al + expert * stride_ae + ranks[None, :] * k
    acc = tl.zeros((BM, RANK), dtype=tl.float32)
    for _ in range(tl.cdiv(k, BK * SPLIT_K)):
        inside = depth < k
        left = tl.load(xs + depth[None, :], mask=real[:, None] & inside[None, :], other=0.0)
        right_mask = inside[:, None] & (ranks < rank)[None, :]
        acc += tl.dot(left, tl.load(factor + depth[:, None], mask=right_mask, other=0.0))
        depth += BK * SPLIT_K
    target = t + rows[:, None] * rank + ranks[None, :]
    mask = real[:, None] & (ranks < rank)[None, :]
    if SPLIT_K == 1:
        tl.store(target, acc, mask=mask)
    else:
        tl.atomic_add(target, acc, mask=mask)


@triton.autotune(
    EXPAND_CONFIGS, key=["n", "RANK", "BM", "max_blocks"], restore_value=["out"], do_bench=quickly
)
@triton.jit
def expand(
    t,  # [num_rows, rank] float32
    b,  # [L, E, n, rank]
    out,  # [num_rows, row_stride], columns first_col to first_col + n are added to
    row_weights,
    row_ids,
    expert_ids,
    lora_ids,
    num_padded,
    max_blocks,
    num_rows,
    rank,
    n,
    row_stride,
    first_col,
    stride_bl,
    stride_be,
    MUL_WEIGHT: tl.constexpr,
    BM: tl.constexpr,
    RANK: tl.constexpr,
    BN: tl.constexpr,
):
    block = tl.program_id(0)
    if block * BM >= tl.load(num_padded):
        return
    adapter = tl.load(lora_ids + block).to(tl.int64)
    if adapter < 0:
        return
    expert = tl.load(expert_ids + block).to(tl.int64)
    rows = tl.load(row_ids + block * BM + tl.arange(0, BM)).to(tl.int64)
    real = rows < num_rows
    ranks = tl.arange(0, RANK)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    in_rank, in_cols = ranks < rank, cols < n
    left = tl.load(
        t + rows[:, None] * rank + ranks[None, :], mask=real[:, None] & in_rank[None, :], other=0.0
    )
    factor = b + adapter * stride_bl + expert * stride_be
    right = tl.load(
        factor + cols[None, :] * rank + ranks[:, None],
        mask=in_cols[None, :] & in_rank[:, None],
        other=0.0,
    )
    delta = tl.dot(left.to(right.dtype), right)
    if MUL_WEIGHT:
        delta *= tl.load(row_weights + rows, mask=real, other=0.0)[:, None]
    target = out + rows[:, None] * row_stride + first_col + cols[None, :]
    mask = real[:, None] & in_cols[None, :]
    base = tl.load(target, mask=mask, other=0.0)
    tl.store(target, (base.to(tl.float32) + delta).to(out.dtype.element_ty), mask=mask)


@triton.jit
def activation(c13, h, inter, SWIGLUOAI: tl.constexpr, RELU2: tl.constexpr, BLOCK: tl.constexpr):
    """h [rows, inter] of c13 [rows, 2 inter] ([rows, inter] for relu2)."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < inter
    if RELU2:
        x = tl.load(c13 + row * inter + cols, mask=inside, other=0.0).to(tl.float32)
        y = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    elif SWIGLUOAI:
        pair = c13 + row * 2 * inter + 2 * cols
        gate = tl.minimum(tl.load(pair, mask=inside, other=0.0).to(tl.float32), 7.0)
        up = tl.load(pair + 1, mask=inside, other=0.0).to(tl.float32)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        y = (up + 1.0) * gate * tl.sigmoid(1.702 * gate)
    else:
        gate = tl.load(c13 + row * 2 * inter + cols, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(c13 + row * 2 * inter + inter + cols, mask=inside, other=0.0).to(tl.float32)
        y = gate * tl.sigmoid(gate) * up
    tl.store(h + row * inter + cols, y.to(h.dtype.element_ty), mask=inside)


@triton.jit
def combine(c2, out, hidden, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """out [M, hidden]: the sum of the top_k rows of each token in c2 [M, TOP_K, hidden]."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < hidden
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for j in range(TOP_K):
        total += tl.load(c2 + (token * TOP_K + j) * hidden + cols, mask=inside, other=0.0).to(
            tl.float32
        )
    tl.store(out + token * hidden + cols, total.to(out.dtype.element_ty), mask=inside)
