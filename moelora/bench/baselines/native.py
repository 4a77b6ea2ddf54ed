"""Layers without adapters: torch's grouped GEMM, dense products, and an installed vLLM's."""

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from moelora.bench.baselines import Options, require, require_no_biases
from moelora.bench.cases import Batch
from moelora.bench.layer import Layer
from moelora.bench.timing import Run, Runs
from moelora.reference import activate


class GroupedMM:
    """Rows sorted by expert on the device, two grouped GEMMs, activation, weighted sum."""

    def __init__(self, layer: Layer, options: Options):
        require(hasattr(torch, "_grouped_mm"), "this torch has no _grouped_mm")
        require_no_biases(layer)
        self.model = layer.model
        self.w13, self.w2 = (w.transpose(1, 2) for w in layer.tensors)
        self.last = torch.arange(self.model.experts, dtype=torch.int32, device=layer.device)

    def run(self, batch: Batch) -> Tensor:
        ids = batch.topk_ids.flatten()
        ordered, order = ids.sort(stable=True)
        ends = torch.searchsorted(ordered, self.last, right=True).int()
        x = batch.x[order // self.model.top_k]
        h = activate(torch._grouped_mm(x, self.w13, offs=ends), self.model.activation)
        z = torch._grouped_mm(h, self.w2, offs=ends)
        weighted = torch.empty(z.shape, dtype=torch.float32, device=z.device)
        weighted[order] = z.float() * batch.topk_weights.flatten()[order].unsqueeze(1)
        return weighted.view(*batch.topk_ids.shape, -1).sum(1).to(z.dtype)

    def runs(self, batches: Sequence[Batch]) -> Runs:
        return {("torch_grouped_mm_base", 0): Run(lambda i: self.run(batches[i]))}


class Dense:
    """Two products of all rows with one expert's weights: a lower bound without routing. Computes
    another function, so its result is not checked.
    """

    FEWEST = 1024  # below, it would read less memory than any layer must

    def __init__(self, layer: Layer, options: Options):
        self.model = layer.model
        self.w13, self.w2 = (w[0].t() for w in layer.tensors)

    def runs(self, batches: Sequence[Batch]) -> Runs:
        tokens = len(batches[0].x)
        require(tokens >= self.FEWEST, f"from {self.FEWEST} tokens on")
        rows = batches[0].x.repeat(self.model.top_k, 1)
        h = rows.new_zeros(len(rows), self.model.intermediate)

        def call(i: int) -> None:
            torch.mm(rows, self.w13)
            torch.mm(h, self.w2)

        return {("dense_base", 0): Run(call)}


class VLLM:
    """An installed vLLM's layer; its adapters cannot be called from outside of an engine."""

    def __init__(self, layer: Layer, options: Options):
        require(layer.device.type == "cuda", "its kernels are for GPUs")
        require(layer.dtype != "fp32", "its kernels are for bf16 and fp16")
        require(layer.model.activation == "silu", "driven here with silu only")
        require(importlib.util.find_spec("vllm"), "vLLM is not installed")
        from vllm.model_executor.layers.fused_moe import fused_experts

        self.layer, self.run = layer, fused_experts

    def runs(self, batches: Sequence[Batch]) -> Runs:
        def call(i: int) -> Tensor:
            b = batches[i]
            return self.run(b.x, *self.layer.tensors, b.topk_weights, b.topk_ids)

        return {("vllm_base", 0): Run(call)}
