"""Weights of four bits as SGLang holds them for Marlin's kernels, packed by vLLM's rules.

After `get_weight_perm`, `marlin_weights` and `marlin_permute_scales` of vLLM's
quantization/utils/marlin_utils*.py, and `nvfp4_marlin_process_*` of marlin_utils_fp4.py.
"""

from __future__ import annotations

import torch
from torch import Tensor


def weight_perm() -> Tensor:
    """(1024,): numbers of four blocks of 16 x 16, in the order in which words have them."""
    perm = []
    for lane in range(32):
        pairs = [2 * (lane % 4), 2 * (lane % 4) + 1, 2 * (lane % 4 + 4), 2 * (lane % 4 + 4) + 1]
        first = [16 * row + lane // 4 + 8 * block for block in (0, 1) for row in pairs]
        perm += [place + 256 * block for block in range(4) for place in first]
    return torch.tensor(perm).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].flatten()


def words(q: Tensor) -> Tensor:
    """(N, K) -> (K / 16, 2 N) int32."""
    rows, columns = q.shape
    tiles = q.t().reshape(columns // 16, 16, rows // 16, 16).permute(0, 2, 1, 3)
    perm = weight_perm()
    flat = tiles.reshape(-1, perm.numel())[:, perm].reshape(columns // 16, -1, 8)
    total = (flat.long() << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


def permuted(scales: Tensor, single: bool = False) -> Tensor:
    """(N, groups) -> (groups, N)."""
    grouped = [i + 8 * j for i in range(8) for j in range(8)]
    alone = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    order = alone if single else grouped
    rows_last = scales.t().contiguous()
    return rows_last.reshape(-1, len(order))[:, order].reshape(rows_last.shape)


def nvfp4_scales(scales: Tensor) -> Tensor:
    """(N, K / 16) e4m3 -> (K / 16, N), the bytes that Marlin multiplies by."""
    halves = permuted(scales.float()).half()
    halves = halves.view(-1, 4)[:, [0, 2, 1, 3]].view(halves.shape)
    short = (halves * 2**7).view(torch.int16) << 1
    return short.view(torch.float8_e4m3fn)[:, 1::2].contiguous()


def nvfp4_tensor_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    exponent = {torch.float16: 14, torch.bfloat16: 126}[dtype] - 7
    return scale.to(dtype) * 2.0**exponent
