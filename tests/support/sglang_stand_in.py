"""As much of SGLang as `moelora.integrations.sglang` meets, and a layer as it sets one up.

Fixtures that put it in place are in `sglang_fixtures.py`.
"""

from __future__ import annotations

import importlib
import inspect
from collections import namedtuple
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch

OWN = "SGLang's own"


class StandardDispatcher:
    skip_local_expert_mapping = False


StandardCombineInput = namedtuple("StandardCombineInput", "hidden_states")
StandardDispatchOutput = namedtuple(
    "StandardDispatchOutput", "hidden_states hidden_states_scale topk_output"
)
StandardTopKOutput = namedtuple("StandardTopKOutput", "topk_weights topk_ids router_logits")


class BaseLoRABackend:
    def get_batch_info(self, layout=None):
        pass


@dataclass(kw_only=True)
class MoeLoraBatch:
    gate_up_lora_a: torch.Tensor
    gate_up_lora_b: torch.Tensor
    down_lora_a: torch.Tensor
    down_lora_b: torch.Tensor
    token_lora_mapping: torch.Tensor
    use_cuda_graph: bool = False
    is_prefill: bool = False


@dataclass(kw_only=True)
class LoRAInfo:
    gate_up_lora_a_weights: torch.Tensor
    gate_up_lora_b_weights: torch.Tensor
    down_lora_a_weights: torch.Tensor
    down_lora_b_weights: torch.Tensor
    lora_ranks: torch.Tensor | None
    token_lora_mapping: torch.Tensor | None
    has_active_lora: bool = True


class MoeRunnerBackend(Enum):
    TRITON = "triton"
    MARLIN = "marlin"

    def is_triton(self):
        return self is MoeRunnerBackend.TRITON


class MoeRunner:
    def __init__(self, runner_backend):
        self.runner_backend = runner_backend

    def run(self, dispatch_output, quant_info, lora_info=None):
        return OWN


class LoRABatchLayout(Enum):
    DP_LOCAL = "dp_local"
    TP_GLOBAL = "tp_global"


class HookType(Enum):
    AFTER = "after"
    AROUND = "around"


class HookRegistry:
    hooks: list[tuple[str, Any, HookType]] = []

    @classmethod
    def register(cls, target, hook, hook_type=HookType.AFTER, *, source=None):
        cls.hooks.append((target, hook, hook_type))

    @classmethod
    def apply_hooks(cls):
        for target, hook, hook_type in cls.hooks:
            module, owner, name = target.rsplit(".", 2)
            owner = getattr(importlib.import_module(module), owner)
            method = inspect.getattr_static(owner, name)
            bound = isinstance(method, classmethod)
            wrapped = cls.wrap(method.__func__ if bound else method, hook, hook_type)
            setattr(owner, name, classmethod(wrapped) if bound else wrapped)

    @staticmethod
    def wrap(original, hook, hook_type):
        def around(*args, **kwargs):
            return hook(original, *args, **kwargs)

        def after(*args, **kwargs):
            result = original(*args, **kwargs)
            changed = hook(result, *args, **kwargs)
            return result if changed is None else changed

        return {HookType.AROUND: around, HookType.AFTER: after}[hook_type]


class MoeLoraRunner:
    @classmethod
    def from_layer(cls, base_layer, *, workspace=None, is_shared_outer, physical_rank):
        return cls()

    def run(self, dispatch_output, batch):
        return OWN


class FusedMoEWithLoRA:
    def __init__(
        self, base_layer, lora_backend, *, experts_shared_outer_loras=False, max_lora_rank=None
    ):
        self.base_layer, self.lora_backend = base_layer, lora_backend
        if lora_backend.name != "triton_v2":
            self._lora_runner = MoeRunner(MoeRunnerBackend(lora_backend.runner))
            return
        self._moe_lora_runner = MoeLoraRunner.from_layer(
            base_layer,
            workspace=object(),
            is_shared_outer=experts_shared_outer_loras,
            physical_rank=max_lora_rank,
        )
        self._base_run_moe_core = OWN


def capturing_lora_graph():
    return False


PLACES = {  # of sglang.srt
    "layers.moe.token_dispatcher.standard": "StandardCombineInput StandardDispatchOutput",
    "layers.moe.topk": "StandardTopKOutput",
    "layers.moe.moe_runner.runner": "MoeRunner",
    "lora.backend.base_backend": "BaseLoRABackend",
    "lora.lora_moe_runners": "LoRAInfo",
    "lora.utils": "capturing_lora_graph",
    "lora.layers": "FusedMoEWithLoRA",
    "lora.moe.runner": "MoeLoraRunner MoeLoraBatch",
    "runtime_context": "LoRABatchLayout",
}


def layer(base_layer, max_lora_rank=16, shared=False, **backend):
    """What SGLang makes of a layer with adapters, under a LoRA backend."""
    return FusedMoEWithLoRA(
        base_layer,
        make_lora_backend(**backend),
        experts_shared_outer_loras=shared,
        max_lora_rank=max_lora_rank,
    )


def stays(layer) -> bool:
    """Whether SGLang's own runner runs a layer."""
    return type(runner_of(layer)) in (MoeRunner, MoeLoraRunner)


def runner_of(layer):
    return getattr(layer, "_moe_lora_runner", None) or layer._lora_runner


def run_layer(layer, p, batch=None, lora_ranks=None):
    """A forward under the layer's backend, by default with the problem's adapters."""
    batch = make_batch(p) if batch is None else batch
    if hasattr(layer, "_moe_lora_runner"):
        return layer._moe_lora_runner.run(dispatched(p), batch)
    info = make_info(batch, lora_ranks) if isinstance(batch, MoeLoraBatch) else batch
    return layer._lora_runner.run(dispatched(p), None, lora_info=info)


def make_batch(p, zeros=True) -> MoeLoraBatch:
    """The adapters of a problem as SGLang's memory pool has them: slices below each other."""

    def stack(factors):
        factors = torch.cat(factors, dim=2) if isinstance(factors, list) else factors
        return factors.nan_to_num(0.0) if zeros else factors

    return MoeLoraBatch(
        gate_up_lora_a=stack(p.w13_lora_a),
        gate_up_lora_b=stack(p.w13_lora_b),
        down_lora_a=stack(p.w2_lora_a),
        down_lora_b=stack(p.w2_lora_b),
        token_lora_mapping=p.token_lora_mapping,
    )


def make_base_layer(p, **config):
    defaults = {
        "activation": p.spec.activation,
        "is_gated": p.spec.activation != "relu2",
        "top_k": p.spec.top_k,
        "routed_scaling_factor": None,
        "apply_router_weight_on_input": p.spec.weight_on_input,
        "gemm1_alpha": None,
        "gemm1_clamp_limit": None,
        "swiglu_limit": None,
        "no_combine": False,
        "num_fused_shared_experts": 0,
    }
    return SimpleNamespace(
        w13_weight=p.w13,
        w2_weight=p.w2,
        dispatcher=StandardDispatcher(),
        should_fuse_routed_scaling_factor_in_topk=False,
        with_bias=False,
        moe_runner_config=SimpleNamespace(**defaults | config),
    )


def make_lora_backend(
    lora_ranks=None, name="triton_v2", runner="triton", use_cuda_graph=False, has_active_lora=True
):
    """Of the tokens of all ranks it knows the slots' ranks, of those of this one other ones."""
    local = SimpleNamespace(lora_ranks="not these", use_cuda_graph=use_cuda_graph)
    whole = SimpleNamespace(lora_ranks=lora_ranks, has_active_lora=has_active_lora)
    infos = {LoRABatchLayout.TP_GLOBAL: whole, LoRABatchLayout.DP_LOCAL: local}
    return SimpleNamespace(name=name, runner=runner, batch_info=local, get_batch_info=infos.get)


def make_info(batch, lora_ranks=None, **others) -> LoRAInfo:
    """The same adapters as legacy backends hand them over."""
    names = "gate_up_lora_a", "gate_up_lora_b", "down_lora_a", "down_lora_b"
    factors = {f"{name}_weights": getattr(batch, name) for name in names}
    mapping = {"token_lora_mapping": batch.token_lora_mapping}
    return LoRAInfo(**factors | mapping | others, lora_ranks=lora_ranks)


def dispatched(p):
    topk = SimpleNamespace(topk_weights=p.topk_weights, topk_ids=p.topk_ids, router_logits=None)
    return SimpleNamespace(hidden_states=p.hidden_states, topk_output=topk)
