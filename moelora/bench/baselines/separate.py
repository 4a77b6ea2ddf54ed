"""Adapters added after the base product by separate kernels, as engines do it, in Triton."""

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

import moelora
from moelora.bench.baselines import Options, require, require_no_biases
from moelora.bench.cases import Batch
from moelora.bench.layer import Layer
from moelora.bench.timing import Run, Runs, on


def block_rows(rows_per_group: float) -> int:
    """Rows per block: the average size of a group, within what tensor cores support well."""
    return next((rows for rows in (16, 32, 64) if rows_per_group <= rows), 128)


class Separate:
    """Grouped GEMM, shrink, expand, activation, grouped GEMM, shrink, expand, sum."""

    def __init__(self, layer: Layer, options: Options):
        require(importlib.util.find_spec("triton"), "triton is not installed")
        require(layer.dtype != "fp32", "its kernels are for bf16 and fp16")
        there = ("silu", "swigluoai", "relu2")
        require(layer.model.activation in there, f"its kernels have {', '.join(there)}")
        require_no_biases(layer)
        self.check_device(layer)
        from moelora.bench.baselines import triton_kernels

        self.kernels, self.layer = triton_kernels, layer

    @staticmethod
    def check_device(layer: Layer) -> None:
        require(layer.device.type == "cuda", "its kernels are for GPUs")

    def project(
        self,
        x: Tensor,
        w: Tensor,
        alignment: tuple[Tensor, Tensor, Tensor],
        batch: Batch,
        block: int,
        weighted: bool,
    ) -> Tensor:
        """[P, N] of x [M, K] or [P, K]."""
        row_ids, expert_ids, num_padded = alignment
        rows, (_, n, k) = batch.topk_ids.numel(), w.shape
        out = x.new_empty(rows, n)
        blocks = len(expert_ids)
        self.kernels.grouped_gemm[lambda meta: (blocks * -(-n // meta["BN"]),)](
            *(x, w, out, batch.topk_weights, row_ids, expert_ids, num_padded, blocks, rows, n, k),
            *(w.stride(0), rows // len(x), weighted),
            BM=block,
        )
        return out

    def add(
        self,
        out: Tensor,
        x: Tensor,
        a: Tensor,
        b: Tensor,
        first_col: int,
        alignment: tuple[Tensor, Tensor, Tensor, Tensor],
        batch: Batch,
        block: int,
        weighted: bool,
    ) -> None:
        """out[:, first_col : first_col + N] += x A^T B^T, row by row."""
        row_ids, expert_ids, lora_ids, num_padded = alignment
        rows, rank, k, n = batch.topk_ids.numel(), a.shape[2], a.shape[3], b.shape[2]
        t = torch.zeros(rows, rank, dtype=torch.float32, device=x.device)
        tile = max(16, 1 << (rank - 1).bit_length())
        blocks = len(expert_ids)
        groups = row_ids, expert_ids, lora_ids, num_padded, blocks, rows, rank
        self.kernels.shrink[lambda meta: (blocks, meta["SPLIT_K"])](
            *(x, a, t, *groups, k, a.stride(0), a.stride(1), rows // len(x)), BM=block, RANK=tile
        )
        self.kernels.expand[lambda meta: (blocks, -(-n // meta["BN"]))](
            *(t, b, out, batch.topk_weights, *groups, n, out.stride(0), first_col),
            *(b.stride(0), b.stride(1), weighted),
            BM=block,
            RANK=tile,
        )

    def run(self, batch: Batch, rank: int) -> Tensor:
        model, (w13, w2) = self.layer.model, self.layer.tensors
        rows, experts = batch.topk_ids.numel(), model.experts
        block = block_rows(rows / experts)
        base = moelora.moe_align_block_size(batch.topk_ids, block, experts)
        gu = self.project(batch.x, w13, base, batch, block, False)
        if rank:
            factors, adapters = self.layer.stacks[rank], self.layer.adapters
            small = min(64, block_rows(rows / experts / adapters))
            pairs = moelora.moe_lora_align_block_size(
                batch.topk_ids, batch.mapping, experts, small, adapters
            )
            for s, (a, b) in enumerate(zip(factors.a13, factors.b13, strict=True)):
                self.add(gu, batch.x, a, b, s * b.shape[2], pairs, batch, small, False)
        h = gu.new_empty(rows, model.intermediate)
        self.kernels.activation[rows, -(-model.intermediate // 1024)](
            *(gu, h, model.intermediate),
            *(model.activation == "swigluoai", model.activation == "relu2", 1024),
        )
        z = self.project(h, w2, base, batch, block, True)
        if rank:
            self.add(z, h, factors.a2, factors.b2, 0, pairs, batch, small, True)
        out = torch.empty_like(batch.x)
        self.kernels.combine[len(out), -(-model.hidden // 1024)](
            z, out, model.hidden, model.top_k, 1024
        )
        return out

    def runs(self, batches: Sequence[Batch]) -> Runs:
        who = {0: "separate_base"} | dict.fromkeys(self.layer.stacks, "separate")
        return {(name, rank): Run(on(batches, self.run, rank)) for rank, name in who.items()}
