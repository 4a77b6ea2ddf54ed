"""Layers that others wrote: of torch's grouped GEMM, an installed vLLM's."""

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from moelora.bench.baselines import require
from moelora.bench.cases import Batch
from moelora.bench.layer import Factors, Layer
from moelora.bench.timing import Run, Runs, on
from moelora.reference import activate


class GroupedMM:
    """Rows sorted by expert and adapter on the device, two grouped GEMMs, activation, weighted sum;
    per projection two more grouped GEMMs over (expert, adapter) pairs add the adapters.
    """

    name = "torch_grouped_mm"

    def __init__(self, layer: Layer):
        require(hasattr(torch, "_grouped_mm"), "this torch has no _grouped_mm")
        require(not layer.model.bias, "driven here without biases")
        self.model, self.groups = layer.model, layer.adapters + 1
        self.w13, self.w2 = (w.transpose(1, 2) for w in layer.tensors)
        experts = torch.arange(1, self.model.experts + 1, device=layer.device)
        pairs = torch.arange(1, self.model.experts * self.groups + 1, device=layer.device)
        self.last_of_expert, self.last_of_pair = experts * self.groups - 1, pairs - 1
        self.factors = {rank: grouped_factors(f) for rank, f in layer.stacks.items()}

    def run(self, batch: Batch, rank: int) -> Tensor:
        keys = batch.topk_ids * self.groups + (batch.mapping + 1)[:, None]
        ordered, order = keys.flatten().sort(stable=True)
        experts = torch.searchsorted(ordered, self.last_of_expert, right=True).int()
        pairs = torch.searchsorted(ordered, self.last_of_pair, right=True).int()
        x = batch.x[order // self.model.top_k]
        gu = torch._grouped_mm(x, self.w13, offs=experts)
        if rank:
            a13, b13, a2, b2 = self.factors[rank]
            gu += delta(x, a13, b13, pairs)
        h = activate(gu, self.model.activation)
        z = torch._grouped_mm(h, self.w2, offs=experts)
        if rank:
            z += delta(h, a2, b2, pairs)
        weighted = torch.empty(z.shape, dtype=torch.float32, device=z.device)
        weighted[order] = z.float() * batch.topk_weights.flatten()[order].unsqueeze(1)
        return weighted.view(*batch.topk_ids.shape, -1).sum(1).to(z.dtype)

    def runs(self, batches: Sequence[Batch]) -> Runs:
        base: Runs = {(f"{self.name}_base", 0): Run(on(batches, self.run, 0))}
        return base | {(self.name, rank): Run(on(batches, self.run, rank)) for rank in self.factors}


def grouped_factors(factors: Factors) -> tuple[Tensor, list[Tensor], Tensor, list[Tensor]]:
    """A13 [pairs, K, slices R], B13 slices x [pairs, R, I], A2 [pairs, I, R], B2 [pairs, R, K] for
    grouped GEMMs; the first of an expert's pairs is the one without an adapter, all zero. R is the
    rank and zeros up to a multiple of 16 bytes, as torch wants of strides.
    """
    alignment = 16 // factors.a2.element_size()
    more = -factors.a2.size(2) % alignment

    def by_expert(stack: Tensor) -> Tensor:
        zeros = torch.zeros_like(stack[:1])
        return torch.cat([zeros, stack]).transpose(0, 1).flatten(0, 1).transpose(1, 2)

    a13, a2 = ([pad(a, (0, 0, 0, more)) for a in some] for some in (factors.a13, [factors.a2]))
    b13, b2 = ([by_expert(pad(b, (0, more))) for b in some] for some in (factors.b13, [factors.b2]))
    return by_expert(torch.cat(a13, dim=2)), b13, by_expert(*a2), b2


def delta(x: Tensor, a: Tensor, b: list[Tensor], ends: Tensor) -> Tensor:
    """x A^T B^T of each pair's rows, slices beside one another."""
    xa = torch._grouped_mm(x, a, offs=ends)
    parts = xa.chunk(len(b), dim=1)
    return torch.cat(
        [torch._grouped_mm(t.contiguous(), w, offs=ends) for t, w in zip(parts, b, strict=True)], 1
    )


class VLLM:
    """An installed vLLM's layer; its adapters cannot be called from outside of an engine."""

    def __init__(self, layer: Layer):
        require(layer.device.type == "cuda", "its kernels are for GPUs")
        require(layer.dtype != "fp32", "its kernels are for bf16 and fp16")
        require(layer.model.activation == "silu", "driven here with silu only")
        require(importlib.util.find_spec("vllm"), "vLLM is not installed")
        from vllm.model_executor.layers.fused_moe import fused_experts

        self.layer, self.fused_experts = layer, fused_experts

    def run(self, b: Batch) -> Tensor:
        return self.fused_experts(b.x, *self.layer.tensors, b.topk_weights, b.topk_ids)

    def runs(self, batches: Sequence[Batch]) -> Runs:
        return {("vllm_base", 0): Run(on(batches, self.run))}
