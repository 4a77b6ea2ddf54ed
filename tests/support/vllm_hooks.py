"""Layers whose base product stays with vLLM, and its own hooks for their adapters."""

import inspect
from types import SimpleNamespace

import torch
from vllm_layer import Layer

from moelora.reference import activate

LISTS = "sorted", "experts", "padded", "mapping"


class Own:
    """vLLM's own two hooks: they write nothing, and what they were called with is kept."""

    def __init__(self, vllm):
        self.calls = []
        for name in ("add_lora_w13", "add_lora_w2"):
            signature = inspect.signature(getattr(vllm.PunicaWrapperGPU, name))
            vllm.monkeypatch.setattr(vllm.PunicaWrapperGPU, name, self.recorder(name, signature))

    def recorder(self, name, signature):
        def recorded(*args, **kwargs):
            call = signature.bind(*args, **kwargs)
            self.calls.append(SimpleNamespace(name=name, **call.arguments))
            return LISTS

        recorded.__signature__ = signature
        return recorded


class Deltas(Layer):
    """A layer whose products are plain torch, with the two calls that `LoRAExpertsMixin` makes."""

    def _add_adapters(self, *args, **config):
        super()._add_adapters(*args, **config)
        self.punica = self.vllm.PunicaWrapperGPU.__new__(self.vllm.PunicaWrapperGPU)
        self.punica.token_mapping_meta = self.meta
        self.lora.set_mapping(self.punica)

    def expanded(self, stacks):
        """Factors that all experts share come as stacks of one for each, by stride 0."""
        count = self.moe_config.num_local_experts
        return tuple(s.expand(-1, count, -1, -1) for s in stacks)

    def _add(self, hook, own, changes):
        p, ctx = self.p, self.experts._lora_context
        tokens, top_k = p.topk_ids.shape
        every = {"topk_weights": p.topk_weights, "num_tokens": tokens, "w1": None, "w2": None}
        every |= {"top_k_num": top_k, "top_k": top_k, "max_loras": self.slots}
        every |= {"adapter_enabled": ctx.adapter_enabled, "use_tuned_config": False}
        return hook(**every | own | changes)

    def gate_up(self, y, fully_sharded=False, **changes):
        p, ctx = self.p, self.experts._lora_context
        own = {
            "y": y.view(-1, y.size(-1)),  # as Marlin has it
            "x": p.hidden_states,
            "lora_a_stacked": self.expanded(ctx.w13_lora_a_stacked),
            "lora_b_stacked": ctx.w13_lora_b_stacked,
            "topk_ids": p.topk_ids,
            "expert_map": p.expert_map,
            "local_num_experts": self.moe_config.num_local_experts,
            "num_slices": len(ctx.w13_lora_a_stacked),
            "fully_sharded": fully_sharded,
            "token_lora_mapping": ctx.local_token_lora_mapping,
        }
        return self._add(self.punica.add_lora_w13, own, changes)

    def down(self, z, h, lists, fully_sharded=False, tp_rank=0, **changes):
        ctx = self.experts._lora_context
        names = ("sorted_token_ids_lora", "expert_ids_lora", "num_tokens_post_padded_lora")
        own = dict(zip((*names, "token_lora_mapping"), lists, strict=True)) | {
            "y": z,
            "x": h.flatten(0, 1),
            "lora_a_stacked": ctx.w2_lora_a_stacked,
            "lora_b_stacked": self.expanded(ctx.w2_lora_b_stacked),
            "fully_sharded": fully_sharded,
            "tp_rank": tp_rank,
        }
        self._add(self.punica.add_lora_w2, own, changes)

    def __call__(self):
        p = self.p
        ids = p.topk_ids.long()
        ids = ids if p.expert_map is None else p.expert_map[ids].long()
        here, ids = (ids >= 0)[..., None], ids.clamp(min=0)
        y = torch.einsum("mk,mjnk->mjn", p.hidden_states, p.w13[ids])
        lists = self.gate_up(y)
        h = activate(y.flatten(0, 1), p.spec.activation).view(*ids.shape, -1).to(y.dtype)
        weights = p.topk_weights[..., None].to(y.dtype)
        z = torch.einsum("mji,mjki->mjk", h, p.w2[ids]) * weights
        self.down(z, h, lists)
        return (z * here).sum(1)
