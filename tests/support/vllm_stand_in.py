"""As much of vLLM as `moelora.integrations.vllm` touches, to test it where vLLM is not installed.

Same names, signatures and state as in vLLM 0.26 and 0.33; the tests run on the real modules too,
where they can be imported, and so tell if this drifts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from math import prod
from pathlib import Path
from types import SimpleNamespace

import torch
from stand_in import chosen, takes

OWN = 77.0  # what vLLM's own path writes


class MoEActivation(Enum):
    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    SWIGLUOAI = "swigluoai"
    SWIGLUOAI_UNINTERLEAVE = "swigluoai_uninterleave"
    SITU = "situ"
    SWIGLUSTEP = "swiglustep"
    RELU2_NO_MUL = "relu2_no_mul"
    SILU_NO_MUL = "silu_no_mul"


def biased_moe_quant_config(
    w1_bias, w2_bias, gemm1_alpha=None, gemm1_beta=None, gemm1_clamp_limit=None
):
    return SimpleNamespace(
        quant_dtype=None,
        weight_quant_dtype=None,
        w1_bias=w1_bias,
        w2_bias=w2_bias,
        gemm1_alpha=gemm1_alpha,
        gemm1_beta=gemm1_beta,
        gemm1_clamp_limit=gemm1_clamp_limit,
    )


def fp8_w8a8_moe_quant_config(w1_scale, w2_scale):
    config = biased_moe_quant_config(None, None)
    config.quant_dtype = config.weight_quant_dtype = torch.float8_e4m3fn
    return config


class TritonExperts:
    _lora_context = None

    def __init__(self, moe_config, quant_config):
        self.moe_config, self.quant_config = moe_config, quant_config

    @property
    def w1_bias(self):
        return self.quant_config.w1_bias

    @property
    def w2_bias(self):
        return self.quant_config.w2_bias

    @property
    def a2_scale(self):
        return None

    @staticmethod
    def _supports_parallel_config(moe_parallel_config):
        return not moe_parallel_config.all2all_backend.startswith("flashinfer_nvlink_")

    def moe_problem_size(self, a1, w1, w2, topk_ids):
        return w1.size(0), a1.size(0), w1.size(1), a1.size(1), topk_ids.size(1)

    def set_lora_context(self, ctx):
        self._lora_context = ctx

    def workspace_shapes(
        self, M, N, K, topk, global_num_experts, local_num_experts, expert_tokens_meta, activation
    ):
        width = N if activation.value.endswith("_no_mul") else N // 2
        return (M, topk, max(width, K)), (M, topk, max(N, K)), (M, K)

    apply = takes(
        "self output hidden_states w1 w2 topk_weights topk_ids activation global_num_experts "
        "expert_map a1q_scale a2_scale workspace13 workspace2 expert_tokens_meta "
        "apply_router_weight_on_input"
    )


@dataclass
class ExpertTokensMetadata:
    expert_num_tokens: torch.Tensor
    expert_num_tokens_cpu: torch.Tensor | None


class BatchedTritonExperts:
    """Rows of each expert in a block of their own."""

    def __init__(self, moe_config, quant_config, max_num_tokens, num_dispatchers):
        self.moe_config, self.quant_config = moe_config, quant_config
        self.max_num_tokens, self.num_dispatchers = max_num_tokens, num_dispatchers

    w1_bias, w2_bias = TritonExperts.w1_bias, TritonExperts.w2_bias

    def moe_problem_size(self, a1, w1, w2, topk_ids):
        return w1.size(0), a1.size(1), w1.size(1), a1.size(2), topk_ids.size(1)

    def workspace_shapes(
        self, M, N, K, topk, global_num_experts, local_num_experts, expert_tokens_meta, activation
    ):
        rows = self.max_num_tokens * self.num_dispatchers
        sizes = max(K, N), N // 2, K
        return tuple((local_num_experts, rows, size) for size in sizes)

    apply = TritonExperts.apply


class OtherExperts(TritonExperts):
    pass


class TritonWNA16Experts(TritonExperts):
    pass


class MoEPrepareAndFinalizeNoDPEPModular:
    pass


class MoEPrepareAndFinalizeNaiveDPEPModular:
    """Tokens of all ranks, with the adapters that the sender's context has."""

    def __init__(self, is_sequence_parallel=False, num_dispatchers=1):
        self._lora_context = None

    def set_lora_context(self, ctx):
        self._lora_context = ctx

    def prepare(
        self, a1, topk_weights, topk_ids, num_experts, expert_map, apply_router_weight_on_input,
        quant_config, defer_input_quant=False,
    ):  # fmt: skip
        ctx, more = self._lora_context, []
        if ctx is not None:
            meta = ctx.punica_wrapper.token_mapping_meta
            more = [meta.token_lora_mapping[: a1.shape[0]]]
        a1, topk_weights, topk_ids, *more = map(gathered, (a1, topk_weights, topk_ids, *more))
        if ctx is not None:
            (ctx.local_token_lora_mapping,) = more
        return a1, None, None, topk_ids, topk_weights


def gathered(mine):
    raise AssertionError("a test of several ranks replaces it")


def maybe_make_prepare_finalize(
    moe, quant_config, routing_tables=None, allow_new_interface=False, use_monolithic=False
):
    return MoEPrepareAndFinalizeNoDPEPModular()


class FusedMoEKernel:
    def __init__(self, prepare_finalize, fused_experts):
        self.fused_experts = fused_experts

    def apply(self, hidden_states, w1, w2, topk_weights, topk_ids, **call):
        if call["apply_router_weight_on_input"]:
            hidden_states = hidden_states * topk_weights.to(hidden_states.dtype)
        _, m, n, k, topk = self.fused_experts.moe_problem_size(hidden_states, w1, w2, topk_ids)
        sizes = m, n, k, topk, call["global_num_experts"], w1.size(0)
        shapes = self.fused_experts.workspace_shapes(*sizes, None, call["activation"])
        # The output and the first workspace share memory.
        common = hidden_states.new_empty(max(prod(shapes[0]), prod(shapes[2])))
        output = common[: m * k].view(m, k)
        self.fused_experts.apply(
            output=output,
            hidden_states=hidden_states,
            w1=w1,
            w2=w2,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            a1q_scale=None,
            a2_scale=self.fused_experts.a2_scale,
            workspace13=common[: prod(shapes[0])].view(shapes[0]),
            workspace2=hidden_states.new_empty(shapes[1]),
            expert_tokens_meta=None,
            **call,
        )
        return output.clone()


class UnquantizedMoeBackend(Enum):
    TRITON = "TRITON"
    BATCHED_TRITON = "BATCHED_TRITON"
    FLASHINFER_CUTLASS = "FlashInfer CUTLASS"


def backend_to_kernel_cls(backend):
    found = {"TRITON": TritonExperts, "BATCHED_TRITON": BatchedTritonExperts}
    return [found.get(backend.value, OtherExperts)]


@dataclass
class FusedMoEConfig:
    moe_parallel_config: object
    in_dtype: torch.dtype
    activation: MoEActivation
    moe_backend: str


@dataclass
class FusedMoEParallelConfig:
    enable_eplb: bool
    all2all_backend: str
    dp_size: int = 1
    use_batched_activation_format = False

    @classmethod
    def make_no_parallel(cls):
        return cls(enable_eplb=False, all2all_backend="allgather_reducescatter")


@dataclass
class MoELoRAContext:
    w13_lora_a_stacked: tuple
    w13_lora_b_stacked: tuple
    w2_lora_a_stacked: tuple
    w2_lora_b_stacked: tuple
    adapter_enabled: torch.Tensor
    fully_sharded: bool
    punica_wrapper: object
    local_token_lora_mapping: torch.Tensor | None = None


class FusedMoEWithLoRA(torch.nn.Module):
    def create_lora_weights(self, max_loras, lora_config, model_config=None):
        self.fully_sharded = lora_config.fully_sharded_loras
        shared = lora_config.enable_moe_shared_loras
        self.adapter_enabled = torch.zeros(max_loras + 1, dtype=torch.int, device=self.device)
        c, r, dtype = self.moe_config, lora_config.max_lora_rank, lora_config.lora_dtype
        e, k, i = c.num_local_experts, c.hidden_dim, c.intermediate_size_per_partition
        columns = 2 * i if isinstance(self, FusedMoE3DWithLoRA) else i

        def stacks(count, experts, *shape):
            size = (max_loras, experts, *shape)
            return tuple(torch.zeros(size, dtype=dtype, device=self.device) for _ in range(count))

        self.w13_lora_a_stacked = stacks(self._w13_slices, 1 if shared else e, r, k)
        self.w13_lora_b_stacked = stacks(self._w13_slices, e, columns, r)
        self.w2_lora_a_stacked = stacks(1, e, r, i)
        self.w2_lora_b_stacked = stacks(1, 1 if shared else e, k, r)

    def reset_lora(self, index):
        w13 = *self.w13_lora_a_stacked, *self.w13_lora_b_stacked
        for stack in (*w13, *self.w2_lora_a_stacked, *self.w2_lora_b_stacked):
            stack[index] = 0
        self.adapter_enabled[index] = 0

    def set_lora(self, index, lora_a, lora_b):
        self._fill(index, lora_a, lora_b)

    def _fill(self, index, lora_a, lora_b):
        self.reset_lora(index)
        self.adapter_enabled[index] = 1
        # (gate, down, up), or (gate and up, down).
        order = (0, 2)[: self._w13_slices]
        a, b = ([t[i] for i in order] for t in (lora_a, lora_b))
        pairs = [
            *zip(self.w13_lora_a_stacked, a, strict=True),
            *zip(self.w13_lora_b_stacked, b, strict=True),
            (self.w2_lora_a_stacked[0], lora_a[1]),
            (self.w2_lora_b_stacked[0], lora_b[1]),
        ]
        for stack, factor in pairs:
            stack[index, :, : factor.shape[1], : factor.shape[2]].copy_(factor)

    def _build_lora_context(self):
        w13 = self.w13_lora_a_stacked, self.w13_lora_b_stacked
        w2 = self.w2_lora_a_stacked, self.w2_lora_b_stacked
        others = self.adapter_enabled, self.fully_sharded, self.punica_wrapper
        return MoELoRAContext(*w13, *w2, *others)

    def set_mapping(self, punica_wrapper):
        self.punica_wrapper = punica_wrapper
        self._moe_kernel.fused_experts.set_lora_context(self._build_lora_context())


class FusedMoE3DWithLoRA(FusedMoEWithLoRA):
    def set_lora(self, index, lora_a, lora_b):
        self._fill(index, lora_a, lora_b)


class BaseLinearLayerWithLoRA(torch.nn.Module):
    tp_size = 1

    def create_lora_weights(self, max_loras, lora_config, model_config=None):
        r, like = lora_config.max_lora_rank, {"dtype": lora_config.lora_dtype}
        like["device"] = self.device
        widths, shape = self.output_slices, (max_loras, 1, r, self.input_size)
        self.lora_a_stacked = tuple(torch.zeros(shape, **like) for _ in widths)
        self.lora_b_stacked = tuple(torch.zeros(max_loras, 1, n, r, **like) for n in widths)

    def reset_lora(self, index):
        for stack in (*self.lora_a_stacked, *self.lora_b_stacked):
            stack[index] = 0

    def set_lora(self, index, lora_a, lora_b):
        self._fill(index, [lora_a], [lora_b])

    def _fill(self, index, lora_a, lora_b):
        self.reset_lora(index)
        stacks = *self.lora_a_stacked, *self.lora_b_stacked
        for stack, factor in zip(stacks, (*lora_a, *lora_b), strict=True):
            if factor is not None:
                stack[index, 0, : factor.shape[0], : factor.shape[1]].copy_(factor)

    def _apply_lora_to_output(self, x, output):
        stacks = self.lora_a_stacked, self.lora_b_stacked
        self.punica_wrapper.add_lora_linear(output, x, *stacks, 1.0, self.output_slices)
        return output


class MergedColumnParallelLinearWithLoRA(BaseLinearLayerWithLoRA):
    def create_lora_weights(self, max_loras, lora_config, model_config=None):
        super().create_lora_weights(max_loras, lora_config, model_config)

    def set_lora(self, index, lora_a, lora_b):
        self._fill(index, lora_a, lora_b)


class MergedColumnParallelLinearWithShardedLoRA(MergedColumnParallelLinearWithLoRA):
    pass


class LogitsProcessorWithLoRA(torch.nn.Module):
    create_lora_weights = takes("self max_loras lora_config model_config", model_config=None)
    set_lora = takes("self index lora_a lora_b")
    reset_lora = takes("self index")


class PunicaWrapperGPU:
    _scaled, _more = (
        "self y x lora_a_stacked lora_b_stacked scale",
        {"buffer": None, "kwargs": None},
    )
    add_lora_linear = takes(f"{_scaled} output_slices buffer kwargs", **_more)
    add_lora_logits = takes(f"{_scaled} buffer kwargs", **_more)
    add_lora_w13 = takes(
        "self y x lora_a_stacked lora_b_stacked topk_ids topk_weights expert_map w1 w2 num_tokens "
        "top_k_num max_loras adapter_enabled local_num_experts top_k num_slices fully_sharded "
        "use_tuned_config add_inputs token_lora_mapping",
        add_inputs=True,
        token_lora_mapping=None,
    )
    add_lora_w2 = takes(
        "self y x lora_a_stacked lora_b_stacked topk_weights sorted_token_ids_lora expert_ids_lora "
        "num_tokens_post_padded_lora token_lora_mapping num_tokens w1 w2 top_k_num max_loras "
        "adapter_enabled top_k fully_sharded tp_rank use_tuned_config add_inputs",
        add_inputs=True,
    )


@dataclass
class LoRAKernelMeta:
    token_lora_mapping: torch.Tensor
    active_lora_ids: torch.Tensor
    no_lora_flag_cpu: torch.Tensor

    @staticmethod
    def make(max_loras, max_num_tokens, device, captured_lora_counts=None):
        return LoRAKernelMeta(
            token_lora_mapping=torch.empty(max_num_tokens, dtype=torch.int32, device=device),
            active_lora_ids=torch.empty(max_loras + 1, dtype=torch.int32, device=device),
            no_lora_flag_cpu=torch.tensor([False]),
        )

    def prepare_tensors(self, token_lora_mapping):
        self.active_lora_ids.fill_(-1)
        self.no_lora_flag_cpu[0] = torch.all(token_lora_mapping == -1)
        if self.no_lora_flag_cpu.item():
            return
        self.token_lora_mapping[: token_lora_mapping.size(0)].copy_(token_lora_mapping)
        ids = token_lora_mapping.unique()
        self.active_lora_ids[: ids.size(0)].copy_(ids)

    def meta_args(self, token_nums, specialize_active_lora):
        """Fewer than the engine's, for functions that a test replaces."""
        mapping = self.token_lora_mapping[:token_nums]
        return mapping, self.active_lora_ids, self.no_lora_flag_cpu


class PEFTHelper:
    def __init__(self, r, lora_alpha):
        self.r, self.lora_alpha = r, lora_alpha

    @classmethod
    def from_dict(cls, config_dict):
        return cls(config_dict["r"], config_dict["lora_alpha"])

    @classmethod
    def from_local_dir(cls, lora_path, max_position_embeddings):
        config = json.loads(Path(lora_path, "adapter_config.json").read_text())
        helper = cls.from_dict(config)
        helper.rank_pattern = config.get("rank_pattern", {})
        helper.alpha_pattern = config.get("alpha_pattern", {})
        return helper

    def validate_legal(self, lora_config):
        if self.r > lora_config.max_lora_rank:
            raise ValueError(f"LoRA rank {self.r} is greater than max_lora_rank")


def get_current_vllm_config_or_none():
    return None


def aot_compile_hash_factors(vllm_config):
    return ["vllm"]


_MAPPED = (
    "token_lora_mapping token_indices_sorted_by_lora_ids num_tokens_per_lora lora_token_start_loc "
    "lora_ids no_lora_flag_cpu num_active_loras"
)
_lora_shrink = takes(f"inputs lora_a_weights output_tensor {_MAPPED} scaling")
_lora_expand = takes(f"inputs lora_b_weights output_tensor {_MAPPED} offset_start add_inputs")
tensor_model_parallel_all_gather = takes("input_ dim", dim=-1)
tensor_model_parallel_all_reduce = tensor_model_parallel_all_gather

_MOE = "vllm.model_executor.layers.fused_moe"
_LORA = "vllm.lora.layers"
_OPS = "vllm.lora.ops.triton_ops"
PLACES = {
    f"{_MOE}.activation": "MoEActivation",
    f"{_MOE}.all2all_utils": "maybe_make_prepare_finalize",
    f"{_MOE}.config": "FusedMoEConfig FusedMoEParallelConfig biased_moe_quant_config "
    "fp8_w8a8_moe_quant_config",
    f"{_MOE}.experts.lora_context": "MoELoRAContext",
    f"{_MOE}.experts.fused_batched_moe": "BatchedTritonExperts",
    f"{_MOE}.experts.triton_moe": "TritonExperts TritonWNA16Experts",
    f"{_MOE}.modular_kernel": "FusedMoEKernel ExpertTokensMetadata",
    f"{_MOE}.oracle.unquantized": "UnquantizedMoeBackend backend_to_kernel_cls",
    f"{_MOE}.prepare_finalize": "MoEPrepareAndFinalizeNoDPEPModular",
    f"{_MOE}.prepare_finalize.naive_dp_ep": "MoEPrepareAndFinalizeNaiveDPEPModular",
    "vllm.compilation.caching": "aot_compile_hash_factors",
    "vllm.config": "get_current_vllm_config_or_none",
    "vllm.distributed": "tensor_model_parallel_all_gather tensor_model_parallel_all_reduce",
    f"{_LORA}.fused_moe": "FusedMoEWithLoRA FusedMoE3DWithLoRA",
    f"{_LORA}.base_linear": "BaseLinearLayerWithLoRA",
    f"{_LORA}.column_parallel_linear": "MergedColumnParallelLinearWithLoRA "
    "MergedColumnParallelLinearWithShardedLoRA",
    f"{_LORA}.logits_processor": "LogitsProcessorWithLoRA",
    "vllm.lora.punica_wrapper.punica_gpu": "PunicaWrapperGPU",
    f"{_OPS}.lora_kernel_metadata": "LoRAKernelMeta",
    f"{_OPS}.lora_shrink_op": "_lora_shrink",
    f"{_OPS}.lora_expand_op": "_lora_expand",
    "vllm.lora.peft_helper": "PEFTHelper",
}


def platform(cuda: bool = True, capability: int = 90, card: str = "NVIDIA H200"):
    """vLLM's `current_platform`, as far as registering asks it."""
    return SimpleNamespace(
        is_cuda=lambda: cuda,
        has_device_capability=lambda wanted: capability >= wanted,
        get_device_name=lambda: card,
    )


def contents(version: str) -> dict[str, dict[str, object]]:
    """What is in which module of a release."""
    import vllm_stand_in_engine
    import vllm_stand_in_lora
    import vllm_stand_in_runner
    from vllm_stand_in_methods import places

    others = {
        "vllm": {"__version__": version},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.model_executor.utils": {},
        "vllm.platforms": {"current_platform": platform()},
    }
    found = chosen(PLACES, globals())
    for part in (vllm_stand_in_engine, vllm_stand_in_lora, vllm_stand_in_runner):
        found |= chosen(part.PLACES, vars(part))
    return found | places(version) | others
