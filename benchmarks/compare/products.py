"""The products of an FP8 layer by an installed DeepGEMM, for `compare times`."""

import torch

from moelora.bench.harness import W8A8_TOLERANCE

BLOCK, LARGEST = 128, 448.0


def quantized(x):
    """x [M, K] in e4m3, and float32 scales [M, K / 128]."""
    groups = x.float().unflatten(-1, (-1, BLOCK))
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / LARGEST
    return (groups / scales).to(torch.float8_e4m3fn).flatten(-2), scales.squeeze(-1)


def product(x, weights, ids, reference):
    """A call of DeepGEMM's grouped product of x [M or M * top_k, K], weights (e4m3 [E, N, K],
    scales) and experts ids [M, top_k].

    It takes rows that are sorted by expert, quantized and padded to its tile, which is done here
    once; moelora's call does that itself. RuntimeError if the product is not `reference`
    [M * top_k, N].
    """
    import deep_gemm

    values, scales = weights
    flat = ids.flatten().long()
    order = flat.argsort(stable=True)
    tile = deep_gemm.get_mk_alignment_for_contiguous_layout()
    counts = flat.bincount(minlength=len(values))
    padded = (counts + tile - 1) // tile * tile
    shift = (padded.cumsum(0) - padded) - (counts.cumsum(0) - counts)
    at = torch.arange(len(flat), device=x.device) + shift[flat[order]]
    spread = x.new_zeros((int(padded.sum()), x.size(1)))
    spread[at] = x[order // (len(flat) // len(x))]
    groups = ids.new_full((len(spread),), -1)
    groups[at] = flat[order].to(groups.dtype)
    out = x.new_empty((len(spread), values.size(1)))
    data, row_scales = quantized(spread)
    left = data, deep_gemm.get_mn_major_tma_aligned_tensor(row_scales)

    def call():
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(left, (values, scales), out, groups)
        return out

    off = (call()[at].float() - reference[order].float()).norm()
    if not off <= W8A8_TOLERANCE * reference.float().norm():
        raise RuntimeError(f"DeepGEMM's product is off by {off:.3g} from moelora's")
    return call
