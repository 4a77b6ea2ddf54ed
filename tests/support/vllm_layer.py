"""A MoE layer in vLLM, set up and called as the engine does, for the tests of the drop-in."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from dataclasses import replace
from operator import attrgetter
from types import SimpleNamespace

import torch
import vllm_stand_in
from cases import Problem
from checks import assert_close_to_ref
from vllm_stand_in import platform

from moelora.reference import fused_experts_lora_ref, naive_fused_experts_lora

HERE = "moelora.integrations.vllm"
NUMBERS = "swiglu_alpha", "swiglu_limit", "swiglu_beta"  # of a layer's activation
NUMBERS += "activation_situ_beta", "activation_situ_linear_beta"


def load(name: str):
    return importlib.import_module(name)


def drop(names, monkeypatch):
    """Let modules be imported anew. Both places that name one have the old one after the test."""
    for name in [n for n in sys.modules if n == names or n.startswith(names + ".")]:
        parent, _, child = name.rpartition(".")
        monkeypatch.delattr(sys.modules.get(parent), child, raising=False)
        monkeypatch.delitem(sys.modules, name)


class VLLM:
    """vLLM's classes by name, and the drop-in that was imported beside them."""

    OWN = vllm_stand_in.OWN

    def __init__(self, monkeypatch):
        self.monkeypatch = monkeypatch
        for place, names in vllm_stand_in.PLACES.items():
            for name in names.split():
                setattr(self, name, getattr(load(place), name, None))
        self.plugin = load(HERE)
        self.interface = load(f"{HERE}.interface")
        self.own_calls = 0
        self.methods = {n: f.needed for n, f in load(f"{HERE}.formats").FORMATS.items()}
        Interface = self.interface.Interface
        parts = [part for part in vars(self.interface).values() if isinstance(part, Interface)]
        for part in (*parts, *self.methods.values()):
            for place, names in (*part.replaced.items(), *part.called.items()):
                for name in filter(None, names):
                    self._put_back(place, *name.rpartition(".")[::2])

    def _put_back(self, place, path, name):
        """When the test is over; a release may lack what another one has."""
        try:
            owner = attrgetter(path)(load(place)) if path else load(place)
            self.monkeypatch.setattr(owner, name, inspect.getattr_static(owner, name))
        except (ModuleNotFoundError, AttributeError):
            pass

    def method(self, name: str) -> tuple[str, type | None]:
        """(module, class) of a quantization method; None where this release has no such class."""
        ((place, functions),) = self.methods[name].replaced.items()
        try:
            return place, getattr(load(place), next(iter(functions)).partition(".")[0], None)
        except ModuleNotFoundError:
            return place, None

    def set(self, module: str, name: str, value):
        self.monkeypatch.setattr(load(module), name, value)

    def register(self, **machine):
        """As the engine would, on a `platform` with CUDA; then vLLM's kernels are replaced."""
        with self.monkeypatch.context() as patch:
            patch.setattr(load("vllm.platforms"), "current_platform", platform(**machine))
            patch.setattr("moelora._C.WITH_CUDA", 1)
            self.plugin.register()
        self.monkeypatch.setattr(self.TritonExperts, "apply", self._own_path())
        return self

    def _own_path(self):
        shapes = self.TritonExperts.workspace_shapes
        signature = inspect.signature(self.TritonExperts.apply)

        @functools.wraps(self.TritonExperts.apply)
        def apply(*args, **kwargs):
            call = SimpleNamespace(**signature.bind(*args, **kwargs).arguments)
            wanted = shapes(
                call.self,
                call.hidden_states.size(0),
                call.w1.size(1),
                call.hidden_states.size(1),
                call.topk_ids.size(1),
                call.global_num_experts,
                call.w1.size(0),
                call.expert_tokens_meta,
                call.activation,
            )
            assert call.workspace13.shape == wanted[0]
            assert call.workspace2.shape == wanted[1]
            self.own_calls += 1
            call.output.fill_(self.OWN)

        return apply

    def chosen(self):
        """The class that vLLM gives an unquantized layer."""
        oracle = load("vllm.model_executor.layers.fused_moe.oracle.unquantized")
        return oracle.backend_to_kernel_cls(self.UnquantizedMoeBackend.TRITON)[0]


class Layer:
    """A MoE layer with its adapters loaded, as vLLM's model and its LoRA manager set it up."""

    def __init__(self, vllm: VLLM, p: Problem, device="cpu", spare_tokens=5, **config):
        self.vllm, self.device = vllm, device
        self.p = p = p.to(device)
        s = p.spec
        name = {"gelu": "gelu_tanh", "relu2": "relu2_no_mul"}.get(s.activation, s.activation)
        self.activation = vllm.MoEActivation(name)
        place = load("vllm.model_executor.layers.fused_moe.config")
        quant = config.pop("quant", place.biased_moe_quant_config(p.w13_bias, p.w2_bias))
        beta = 1.0 if s.activation == "swigluoai_uninterleave" else None
        of_swiglu, of_situ = (s.alpha, s.limit), (None, None)
        if s.activation == "situ":
            of_swiglu, of_situ = of_situ, of_swiglu
        numbers = dict(zip(NUMBERS, (*of_swiglu, beta, *of_situ), strict=True))
        numbers = {name: config.pop(name, number) for name, number in numbers.items()}
        parallel = place.FusedMoEParallelConfig.make_no_parallel()
        parallel.dp_size = config.pop("dp_size", 1)
        self.moe_config = SimpleNamespace(
            activation=self.activation,
            is_act_and_mul=s.activation != "relu2",
            num_experts=s.experts + s.remote,
            num_local_experts=s.experts,
            hidden_dim=s.hidden,
            intermediate_size_per_partition=s.inter,
            experts_per_token=s.top_k,
            moe_parallel_config=parallel,
            in_dtype=s.dtype,
            **numbers,
            moe_backend="auto",
            tp_size=1,
            has_bias=s.bias,
            is_lora_enabled=s.mix != "absent",
            w13_num_shards=1 + (s.activation != "relu2"),
            max_capture_size=0,
        )
        self.make_kernel(quant)
        self.lora = None
        if s.mix != "absent":
            self._add_adapters(spare_tokens, **config)

    def make_kernel(self, quant):
        self.experts = self.vllm.chosen()(self.moe_config, quant)
        prepare = self.vllm.MoEPrepareAndFinalizeNoDPEPModular()
        self.kernel = self.vllm.FusedMoEKernel(prepare, self.experts)

    def _add_adapters(self, spare_tokens, fully_sharded=False):
        vllm, s = self.vllm, self.p.spec
        self.slots = len(s.ranks)
        gated = self.moe_config.is_act_and_mul
        three_d = gated and s.slices == 1
        cls = vllm.FusedMoE3DWithLoRA if three_d else vllm.FusedMoEWithLoRA
        self.lora = lora = cls.__new__(cls)
        torch.nn.Module.__init__(lora)
        lora.moe_config, lora.device = self.moe_config, self.device
        lora.tp_size, lora.tp_rank = 1, 0
        lora._w13_slices = s.slices
        lora._enable_aux_cuda_stream, lora._lora_stream, lora._events = False, None, None
        lora.enable_moe_shared_loras = s.sharing == "outer"
        lora._moe_kernel = SimpleNamespace(fused_experts=self.experts, prepare_finalize=None)
        lora_config = SimpleNamespace(
            max_loras=self.slots,
            max_lora_rank=max(s.ranks) + s.spare_rank,
            lora_dtype=s.dtype,
            fully_sharded_loras=fully_sharded,
            enable_moe_shared_loras=s.sharing == "outer",
        )
        lora.create_lora_weights(self.slots, lora_config, SimpleNamespace(architectures=["Any"]))
        self.meta = vllm.LoRAKernelMeta.make(self.slots, s.tokens + spare_tokens, self.device)
        # Uninitialized memory, in the engine.
        garbage = torch.tensor([0, self.slots, -(2**31), 2**31 - 1, -7], dtype=torch.int32)
        buffer = self.meta.token_lora_mapping
        buffer.copy_(garbage.repeat(buffer.numel() // 5 + 1)[: buffer.numel()])
        lora.set_mapping(SimpleNamespace(token_mapping_meta=self.meta))
        enabled = self.p.adapter_enabled
        for slot in range(self.slots):
            self.load_adapter(slot)
            if enabled is not None and not enabled[slot]:
                lora.reset_lora(slot)

    def load_adapter(self, slot: int, rank: int | None = None):
        """What the LoRA manager does: true-rank factors, the scaling in B."""
        p = self.p
        rank = p.spec.ranks[slot] if rank is None else rank
        scaling = 1.0 if p.lora_scalings is None else p.lora_scalings[slot].item()
        a13 = p.w13_lora_a if isinstance(p.w13_lora_a, list) else [p.w13_lora_a]
        b13 = p.w13_lora_b if isinstance(p.w13_lora_b, list) else [p.w13_lora_b]
        # As vLLM does, from the host.
        a = [t[slot][:, :rank].cpu() for t in (*a13, p.w2_lora_a)]
        b = [(t[slot][:, :, :rank] * scaling).cpu() for t in (*b13, p.w2_lora_b)]
        if len(a) == 3:  # vLLM's order is w1, w2, w3
            a, b = [[t[0], t[2], t[1]] for t in (a, b)]
        elif not self.moe_config.is_act_and_mul:
            a, b = [[t[0], t[1], t[0]] for t in (a, b)]
        self.lora.set_lora(slot, a, b)

    def stacks(self):
        """[slots, experts or 1, ...] and the dimension that is the rank."""
        for name, dim in (("a", 2), ("b", 3)):
            for projection in ("w13", "w2"):
                for stack in getattr(self.lora, f"{projection}_lora_{name}_stacked"):
                    yield stack, dim

    def fill_padding(self, value: float) -> None:
        """What the stacks have beyond the rank of each adapter."""
        for stack, dim in self.stacks():
            for slot, rank in enumerate(self.p.spec.ranks):
                stack[slot].narrow(dim - 1, rank, stack.size(dim) - rank).fill_(value)

    def step(self, mapping: torch.Tensor | None = None):
        """The scheduler's part of a step."""
        mapping = self.p.token_lora_mapping if mapping is None else mapping
        self.meta.prepare_tensors(mapping.to(self.device, torch.long))
        return self

    def __call__(self, **changes) -> torch.Tensor:
        p = self.p
        call = {
            "hidden_states": p.hidden_states,
            "w1": p.w13,
            "w2": p.w2,
            "topk_weights": p.topk_weights,
            "topk_ids": p.topk_ids,
            "activation": self.activation,
            "global_num_experts": self.moe_config.num_experts,
            "expert_map": p.expert_map,
            "apply_router_weight_on_input": p.spec.weight_on_input,
        }
        return self.kernel.apply(**(call | changes))

    def check(self, y: torch.Tensor):
        there = self.p.kwargs()
        here = self.p.to("cpu").kwargs()
        ref, naive = fused_experts_lora_ref(**here), naive_fused_experts_lora(**there)
        assert_close_to_ref(y, ref, naive, self.p.spec.dtype)


def base(p: Problem) -> Problem:
    return replace(p.base(), spec=replace(p.spec, mix="absent"))
