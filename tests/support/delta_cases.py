"""Arguments of the operators that add adapters alone, from the problems of cases.py."""

from __future__ import annotations

import torch
from cases import Problem, Spec, same_bits
from checks import assert_close_to_ref, guarded_empty
from torch import Tensor

import moelora
from moelora.operators.call import factor_list
from moelora.reference.delta import moe_lora_align_lists_ref, num_experts_of

DELTAS = {"w13": moelora.moe_lora_gate_up_delta, "w2": moelora.moe_lora_down_delta}
# vLLM's operators know neither true ranks nor scalings.
PLAIN = Spec(tokens=9, ranks=(8, 8, 8), pass_ranks=False, scalings=False, mix="many")
# Of tiles of vLLM's kernels, behind the block size.
TILES = {"block_size_n": 32, "block_size_k": 64, "group_size_m": 8}
TILES |= {"num_warps": 4, "num_stages": 3, "split_k": 1}


def delta_kwargs(p: Problem, projection: str, **options) -> dict:
    """Arguments of `moe_lora_gate_up_delta` ("w13") and `moe_lora_down_delta` ("w2")."""
    arguments = p.gemm_kwargs(projection)
    for name in ("w", "bias", "mul_routed_weight"):
        del arguments[name]
    return {**arguments, "num_experts": p.w13.size(0), **options}


def columns_of(p: Problem, projection: str) -> int:
    return sum(b.size(2) for b in factor_list(getattr(p, f"{projection}_lora_b")))


class Lists:
    """vLLM's description of who works on what, as the arguments of its operators."""

    def __init__(self, p: Problem, projection: str, naive: bool, block_size: int = 16, **options):
        self.p, self.projection, self.naive, self.block_size = p, projection, naive, block_size
        self.slots = len(p.spec.ranks)
        self.a = factor_list(getattr(p, f"{projection}_lora_a"))
        self.b = factor_list(getattr(p, f"{projection}_lora_b"))
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

    def _rows(self) -> dict:
        return {
            "topk_weights": self.p.topk_weights,
            "sorted_token_ids": self.sorted_token_ids,
            "expert_ids": self.expert_ids,
            "num_tokens_post_padded": self.num_tokens_post_padded,
            "token_lora_mapping": self.p.token_lora_mapping,
        }

    def _tiles(self, half: str = "") -> dict:
        tiles = {"block_size_m": self.block_size, **TILES}
        return {half + name: number for name, number in tiles.items()}

    def of_fused(self, output: Tensor) -> dict:
        """Arguments of `fused_moe_lora` in vLLM's order; of the halves below."""
        return {
            "output": output,
            "qcurr_hidden_states": self.x,
            "lora_a_stacked": self.a,
            "lora_b_stacked": self.b,
            **self._rows(),
            "max_lora_rank": self.a[0].size(2),
            "top_k_num": self.p.spec.top_k,
            "lora_ids": self.lora_ids,
            "num_active_loras": self.num_active,
            "adapter_enabled": self.p.adapter_enabled,
            **self._tiles("shrink_"),
            **self._tiles("expand_"),
        }

    def _of_half(self, rank: int) -> dict:
        tokens, rows = self.p.spec.tokens, self.p.topk_ids.numel()
        return {
            **self._rows(),
            "top_k_num": self.p.spec.top_k,
            "lora_ids": self.lora_ids,
            "adapter_enabled": self.p.adapter_enabled,
            "device": self.x.device,
            "N": rank,
            "M": tokens,
            "EM": rows,
            "K": self.x.size(1),
            "num_tokens": rows,
            "num_experts": self.num_experts,
            "num_slices": len(self.a),
        }

    def of_shrink(self, h: Tensor, a: list[Tensor]) -> dict:
        first = {"a_intermediate_cache1": h, "qcurr_hidden_states": self.x, "lora_a_stacked": a}
        last = {**self._tiles(), "num_active_loras": self.num_active}
        return {**first, **self._of_half(a[0].size(2)), **last}

    def of_expand(self, output: Tensor, h: Tensor, b: list[Tensor]) -> dict:
        first = {"output": output, "a_intermediate_cache1": h, "lora_b_stacked": b}
        sizes = {"max_lora_rank": b[0].size(3), "w1_output_dim_size": b[0].size(2)}
        last = {**sizes, **self._tiles(), "num_active_loras": self.num_active}
        return {**first, **self._of_half(self.a[0].size(2)), **last}

    # As vLLM calls them: by place.

    def fused(self, output: Tensor, **options) -> None:
        options = {"num_experts": self.num_experts, **self.options, **options}
        moelora.fused_moe_lora(*self.of_fused(output).values(), **options)

    def shrink(self, h: Tensor, a: list[Tensor]) -> None:
        moelora.fused_moe_lora_shrink(*self.of_shrink(h, a).values())

    def expand(self, output: Tensor, h: Tensor, b: list[Tensor], **options) -> None:
        moelora.fused_moe_lora_expand(*self.of_expand(output, h, b).values(), **options)


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
