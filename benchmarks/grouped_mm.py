"""The yardstick of training on quantized experts: dequantize a stack, then call torch._grouped_mm.

As Unsloth and axolotl do where they have no kernel for a format: in the forward and again in the
backward, so that no dequantized stack is kept. NF4 is dequantized by bitsandbytes. One adapter; its
factors are grouped products, too.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F


class Frozen(torch.autograd.Function):
    """x W^T of each expert's rows; W is dequantized in both passes and has no gradient."""

    @staticmethod
    def forward(ctx, x, weights, ends):
        ctx.weights, ctx.ends = weights, ends
        return torch._grouped_mm(x, dense(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx, grad):
        return torch._grouped_mm(grad.contiguous(), dense(ctx.weights), offs=ctx.ends), None, None


@dataclass
class BnbStack:
    """Random weights (E, N, K) in NF4, which bitsandbytes dequantizes."""

    codes: torch.Tensor
    state: Any

    @classmethod
    def like(cls, weights):
        from bitsandbytes.functional import quantize_4bit

        w = torch.randn(weights.shape, device=weights.device, dtype=torch.bfloat16)
        return cls(*quantize_4bit(w, quant_type="nf4"))

    def unpack(self):
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(self.codes, self.state)


def dense(weights):
    return weights if isinstance(weights, torch.Tensor) else weights.unpack()


def fused_experts_lora(
    hidden_states, w13, w2, topk_weights, topk_ids, lora_scalings, token_lora_mapping, **lora
):
    """As `moelora.fused_experts_lora` with SiLU and one adapter of all tokens."""
    experts, top_k = lora["w13_lora_a"].size(1), topk_ids.size(1)
    order = topk_ids.flatten().argsort(stable=True)
    rows = order // top_k
    ends = torch.bincount(topk_ids.flatten(), minlength=experts).cumsum(0).to(torch.int32)

    def projection(x, weights, name):
        a, b = lora[f"{name}_lora_a"][0], lora[f"{name}_lora_b"][0]
        inner = torch._grouped_mm(x, a.transpose(1, 2), offs=ends) * lora_scalings[0].to(x.dtype)
        delta = torch._grouped_mm(inner, b.transpose(1, 2), offs=ends)
        return Frozen.apply(x, weights, ends) + delta

    gate, up = projection(hidden_states[rows], w13, "w13").chunk(2, dim=1)
    out = projection(F.silu(gate) * up, w2, "w2")
    out = out * topk_weights.flatten()[order, None].to(out.dtype)
    return torch.zeros_like(hidden_states).index_add_(0, rows, out)
