"""Arguments of the operators that add adapters alone, from the problems of cases.py."""

from __future__ import annotations

import torch
from cases import Problem, Spec, same_bits
from checks import assert_close_to_ref, guarded_empty
from torch import Tensor

import moelora
from moelora.reference.delta import moe_lora_align_lists_ref, num_experts_of
from moelora.reference.routing import as_list

# vLLM's operators know neither true ranks nor scalings.
PLAIN = Spec(tokens=9, ranks=(8, 8, 8), pass_ranks=False, scalings=False, mix="many")
# Tiles of vLLM's kernels: shrink, then expand.
TILES = (32, 64, 8, 4, 3, 1)


def delta_kwargs(p: Problem, projection: str, **options) -> dict:
    """Arguments of `moe_lora_gate_up_delta` ("w13") and `moe_lora_down_delta` ("w2")."""
    arguments = p.gemm_kwargs(projection)
    for name in ("w", "bias", "mul_routed_weight"):
        del arguments[name]
    return {**arguments, "num_experts": p.w13.size(0), **options}


def delta_operator(projection: str):
    return {"w13": moelora.moe_lora_gate_up_delta, "w2": moelora.moe_lora_down_delta}[projection]


def columns_of(p: Problem, projection: str) -> int:
    return sum(b.size(2) for b in as_list(getattr(p, f"{projection}_lora_b")))


class Lists:
    """vLLM's description of who works on what, as the arguments of its operators."""

    def __init__(self, p: Problem, projection: str, naive: bool, block_size: int = 16, **options):
        self.p, self.projection, self.naive, self.block_size = p, projection, naive, block_size
        self.slots = len(p.spec.ranks)
        self.a = as_list(getattr(p, f"{projection}_lora_a"))
        self.b = as_list(getattr(p, f"{projection}_lora_b"))
        self.x = p.hidden_states if projection == "w13" else p.rows
        # As wide as vLLM's: one entry more than slots, and -1 for what is not active.
        ids = list(range(self.slots)) + [-1, self.slots, self.slots + 9]
        self.lora_ids = torch.tensor(ids, dtype=torch.int32, device=p.topk_ids.device)
        self.num_active = torch.tensor([len(ids)], dtype=torch.int32)
        self.num_experts = p.w13.size(0)
        self.options = options
        self.sorted_token_ids = self.num_tokens_post_padded = None
        self.expert_ids = p.topk_ids.reshape(-1)
        if not naive:
            lists = moe_lora_align_lists_ref(
                p.topk_ids.cpu(),
                p.token_lora_mapping.cpu(),
                num_experts_of((*self.a, *self.b), p.w13.size(0)),
                block_size,
                self.slots,
                lora_ids=self.lora_ids.cpu(),
                untouched=1 << 20,
            )
            self.sorted_token_ids, self.expert_ids, self.num_tokens_post_padded = (
                t.to(p.topk_ids.device) for t in lists
            )

    def who(self) -> tuple:
        p = self.p
        return (
            *(p.topk_weights, self.sorted_token_ids, self.expert_ids),
            *(self.num_tokens_post_padded, p.token_lora_mapping),
        )

    def fused(self, output: Tensor, **options) -> None:
        p, rank = self.p, self.a[0].size(2)
        tiles = (self.block_size, *TILES)
        moelora.fused_moe_lora(
            *(output, self.x, self.a, self.b, *self.who(), rank, p.spec.top_k),
            *(self.lora_ids, self.num_active, p.adapter_enabled, *tiles, *tiles),
            num_experts=self.num_experts,
            **{**self.options, **options},
        )

    def _sizes(self, a: Tensor) -> tuple:
        """device, N, M, EM, K, num_tokens, num_experts, num_slices"""
        p, m = self.p, self.p.spec.tokens
        rows = m * p.spec.top_k
        shape = (a.size(2), m, rows, self.x.size(1), rows)
        return (self.x.device, *shape, self.num_experts, len(self.a))

    def shrink(self, h: Tensor, a: list[Tensor]) -> None:
        p = self.p
        moelora.fused_moe_lora_shrink(
            *(h, self.x, a, *self.who(), p.spec.top_k, self.lora_ids, p.adapter_enabled),
            *(*self._sizes(a[0]), self.block_size, *TILES, self.num_active),
        )

    def expand(self, output: Tensor, h: Tensor, b: list[Tensor], **options) -> None:
        p = self.p
        moelora.fused_moe_lora_expand(
            *(output, h, b, *self.who(), p.spec.top_k, self.lora_ids, p.adapter_enabled),
            *(*self._sizes(self.a[0]), b[0].size(3), b[0].size(2)),
            *(self.block_size, *TILES, self.num_active),
            **options,
        )


def base_output(p: Problem, columns: int, offset: int = 0, extra: int = 0):
    """(M, top_k, offset + columns + extra) of values, some of them -0, between guard bands."""
    make = torch.Generator().manual_seed(1)
    values = torch.randn(*p.topk_ids.shape, offset + columns + extra, generator=make)
    values[..., ::5] = -0.0
    out = guarded_empty(values.shape, p.spec.dtype, p.topk_ids.device)
    out.tensor.copy_(values)
    return out


def check_result(out, before, delta64, naive, active, add, offset=0) -> float:
    """`out` is `before` plus, or is, the delta where rows are active, and its bits elsewhere."""
    dtype, columns = before.dtype, delta64.size(-1)
    y, before = out.cpu(), before.cpu()
    inside = slice(offset, offset + columns)
    rest = y.clone()
    rest[..., inside][active] = before[..., inside][active]
    assert same_bits(rest, before), "a row without an adapter, or another column, has changed"
    base = before[..., inside] if add else torch.zeros_like(before[..., inside])
    ref = (base.double() + delta64)[active]
    return assert_close_to_ref(y[..., inside][active], ref, (base + naive)[active], dtype)
