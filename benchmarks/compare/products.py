"""The two products of an FP8 layer alone: moelora's, and those of an installed DeepGEMM."""

import functools

import torch

import moelora
from moelora.bench.baselines.ours import Ours
from moelora.bench.cases import normal
from moelora.bench.formats import FORMATS

FORMAT = "fp8_block"
BLOCK, LARGEST = 128, 448.0


def quantized(x):
    """x [M, K] in e4m3, and float32 scales [M, K / 128]."""
    groups = x.float().unflatten(-1, (-1, BLOCK))
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / LARGEST
    return (groups / scales).to(torch.float8_e4m3fn).flatten(-2), scales.squeeze(-1)


class DeepGemm:
    """DeepGEMM's grouped product of rows that come sorted by expert, quantized and padded to its
    tile; moelora's call does that itself."""

    def __init__(self):
        try:
            import deep_gemm
        except ImportError as error:
            raise ImportError(f"--products wants an installed DeepGEMM: {error}") from error
        self.library = deep_gemm

    def product(self, x, weights, ids):
        """(call, place, a) for x [M or M * top_k, K] and weights (e4m3 [E, N, K], scales). The
        result [rows, N] of `call` has routed row i of ids [M, top_k] at place[i]; `a` are the bytes
        of its rows of x."""
        values, scales = weights
        flat = ids.flatten().long()
        order = flat.argsort(stable=True)
        tile = self.library.get_mk_alignment_for_contiguous_layout()
        counts = flat.bincount(minlength=len(values))
        padded = (counts + tile - 1) // tile * tile
        shift = (padded.cumsum(0) - padded) - (counts.cumsum(0) - counts)
        at = torch.arange(len(flat), device=x.device) + shift[flat[order]]
        rows, (data, row_scales) = int(padded.sum()), quantized(x)
        source = order // (len(flat) // len(x))
        a = data.new_zeros((rows, x.size(1)), dtype=torch.uint8)
        a[at] = data.view(torch.uint8)[source]
        a_scales = row_scales.new_zeros((rows, row_scales.size(1)))
        a_scales[at] = row_scales[source]
        groups = ids.new_full((rows,), -1)
        groups[at] = flat[order].to(groups.dtype)
        out = x.new_empty((rows, values.size(1)))
        place = torch.empty_like(at)
        place[order] = at
        left = a.view(data.dtype), self.library.get_mn_major_tma_aligned_tensor(a_scales)

        def call():
            self.library.m_grouped_fp8_gemm_nt_contiguous(left, (values, scales), out, groups)
            return out

        return call, place, a


def pairs(layer, batch, generator, peer):
    """{product: ({project: call}, operands to zero, error, operations)} of an FP8 layer. "w13" and
    "w2" are products without activation; "layer" is moelora's whole layer beside the peer's two
    products."""
    model, routing = layer.model, (batch.topk_weights, batch.topk_ids)
    h = normal((batch.topk_ids.numel(), model.intermediate), 1.0, generator, batch.x.dtype)
    made, pack = {}, FORMATS[FORMAT].pack
    for name, x in (("w13", batch.x), ("w2", h)):
        w = pack(*layer.checkpoint[name], dtype=x.dtype)  # a layer's own w13 has another order
        out = x.new_empty((*batch.topk_ids.shape, w.shape[1]))
        ours = functools.partial(moelora.fused_moe_lora_gemm, x, w, *routing, out=out)
        theirs, place, theirs_x = peer.product(x, layer.checkpoint[name], batch.topk_ids)
        reference = ours().flatten(0, 1).float()
        error = (theirs()[place].float() - reference).norm() / reference.norm()
        work = 2 * reference.numel() * w.shape[2]
        made[name] = {"moelora": ours, "deep_gemm": theirs}, (x, theirs_x), float(error), work
    (w13, x, _, work), (w2, h, _, more) = made.values()
    calls = {
        "moelora": functools.partial(Ours(layer).run, batch, 0),
        "deep_gemm": lambda: (w13["deep_gemm"](), w2["deep_gemm"]()),
    }
    return made | {"layer": (calls, (*x, *h), None, work + more)}
