"""The API of vLLM that this integration uses."""

from __future__ import annotations

from moelora.integrations.interface import Interface
from moelora.integrations.interface import problem as problem
from moelora.integrations.vllm.deltas import Down, GateUp
from moelora.integrations.vllm.served import Call

_MOE = "vllm.model_executor.layers.fused_moe"
_EXPERTS = {  # methods of experts classes
    "moe_problem_size": "self a1 w1 w2 topk_ids",
    "workspace_shapes": (
        "self M N K topk global_num_experts local_num_experts expert_tokens_meta activation"
    ),
    "apply": " ".join(("self", *Call._fields)),
}
_CREATE, _SET = "self max_loras lora_config model_config", "self index lora_a lora_b"

LAYERS = Interface(
    replaced={
        f"{_MOE}.experts.triton_moe": {
            "TritonExperts.__init__": "self moe_config quant_config",
            "TritonExperts.set_lora_context": "self ctx",
            **{f"TritonExperts.{name}": parameters for name, parameters in _EXPERTS.items()},
        },
        f"{_MOE}.modular_kernel": {
            "FusedMoEKernel.__init__": "self prepare_finalize fused_experts"
        },
        f"{_MOE}.oracle.unquantized": {"backend_to_kernel_cls": "backend"},
        "vllm.lora.layers.fused_moe": {
            "FusedMoEWithLoRA._build_lora_context": "self",
            "FusedMoEWithLoRA.create_lora_weights": _CREATE,
            "FusedMoE3DWithLoRA.create_lora_weights": _CREATE,
            "FusedMoEWithLoRA.set_lora": _SET,
            "FusedMoE3DWithLoRA.set_lora": _SET,
        },
        "vllm.lora.ops.triton_ops.lora_kernel_metadata": {
            "LoRAKernelMeta.prepare_tensors": "self token_lora_mapping",
        },
    },
    fields={
        f"{_MOE}.experts.lora_context": {
            "MoELoRAContext": (
                "w13_lora_a_stacked w13_lora_b_stacked w2_lora_a_stacked w2_lora_b_stacked "
                "adapter_enabled fully_sharded punica_wrapper local_token_lora_mapping"
            ),
        },
        "vllm.lora.ops.triton_ops.lora_kernel_metadata": {
            "LoRAKernelMeta": "token_lora_mapping no_lora_flag_cpu",
        },
    },
)

# Layers whose tokens come batched by expert.
BATCHED = Interface(
    replaced={
        f"{_MOE}.experts.fused_batched_moe": {
            "BatchedTritonExperts.__init__": (
                "self moe_config quant_config max_num_tokens num_dispatchers"
            ),
            **{f"BatchedTritonExperts.{name}": parameters for name, parameters in _EXPERTS.items()},
        },
    },
    fields={f"{_MOE}.modular_kernel": {"ExpertTokensMetadata": "expert_num_tokens"}},
)

DELTAS = Interface(
    replaced={
        "vllm.lora.punica_wrapper.punica_gpu": {
            "PunicaWrapperGPU.add_lora_w13": " ".join(("self", *GateUp._fields)),
            "PunicaWrapperGPU.add_lora_w2": " ".join(("self", *Down._fields)),
        },
    },
    called={
        "vllm.distributed": {
            "tensor_model_parallel_all_gather": "input_",
            "tensor_model_parallel_all_reduce": "input_",
        },
    },
)

_MAPPED = (
    "token_lora_mapping token_indices_sorted_by_lora_ids num_tokens_per_lora lora_token_start_loc "
    "lora_ids no_lora_flag_cpu num_active_loras"
)

# Adapters of linear layers.
LINEAR = Interface(
    replaced={
        "vllm.compilation.caching": {"aot_compile_hash_factors": "vllm_config"},
        "vllm.lora.layers.base_linear": {
            "BaseLinearLayerWithLoRA.create_lora_weights": _CREATE,
            "BaseLinearLayerWithLoRA.set_lora": _SET,
            "BaseLinearLayerWithLoRA.reset_lora": "self index",
        },
        "vllm.lora.layers.column_parallel_linear": {
            "MergedColumnParallelLinearWithLoRA.create_lora_weights": _CREATE,
            "MergedColumnParallelLinearWithLoRA.set_lora": _SET,
        },
        "vllm.lora.layers.logits_processor": {
            "LogitsProcessorWithLoRA.create_lora_weights": _CREATE,
            "LogitsProcessorWithLoRA.set_lora": _SET,
            "LogitsProcessorWithLoRA.reset_lora": "self index",
        },
        "vllm.lora.punica_wrapper.punica_gpu": {
            "PunicaWrapperGPU.add_lora_linear": (
                "self y x lora_a_stacked lora_b_stacked scale output_slices buffer kwargs"
            ),
            "PunicaWrapperGPU.add_lora_logits": (
                "self y x lora_a_stacked lora_b_stacked scale buffer kwargs"
            ),
        },
    },
    called={
        "vllm.lora.ops.triton_ops.lora_kernel_metadata": {
            "LoRAKernelMeta.meta_args": "self token_nums specialize_active_lora",
        },
        "vllm.lora.ops.triton_ops.lora_shrink_op": {
            "_lora_shrink": f"inputs lora_a_weights output_tensor {_MAPPED} scaling",
        },
        "vllm.lora.ops.triton_ops.lora_expand_op": {
            "_lora_expand": (
                f"inputs lora_b_weights output_tensor {_MAPPED} offset_start add_inputs"
            ),
        },
    },
    fields=LAYERS.fields,
)

# Where adapter configurations are loaded.
CONFIGS = Interface(called={"vllm.lora.peft_helper": {"PEFTHelper.from_dict": "config_dict"}})

# What `update_adapters` calls and replaces.
UPDATES = Interface(
    replaced={
        "vllm.lora.worker_manager": {"WorkerLoRAManager._load_adapter": "self lora_request"},
        "vllm.lora.model_manager": {
            "LoRAModelManager._create_merged_loras_inplace": "self lora_model",
        },
        "vllm.v1.engine.input_processor": {"InputProcessor._validate_lora": "self lora_request"},
    },
    called={
        "vllm.lora.peft_helper": {
            "PEFTHelper.from_local_dir": "lora_path max_position_embeddings",
            "PEFTHelper.from_dict": "config_dict",
        },
        "vllm.lora.lora_model": {
            "LoRAModel.from_local_checkpoint": "lora_dir expected_lora_modules peft_helper",
            "LoRAModel.from_lora_tensors": "lora_model_id tensors peft_helper",
        },
        "vllm.lora.worker_manager": {
            "WorkerLoRAManager.list_adapters": "self",
            "WorkerLoRAManager.remove_adapter": "self adapter_id",
        },
        "vllm.lora.model_manager": {
            "LoRAModelManager.add_adapter": "self adapter",
            "LoRAModelManager.activate_adapter": "self lora_id",
            "LoRAModelManager._get_lora_layer_weights": "self lora_model module_name",
        },
        "vllm.v1.worker.gpu_worker": {"Worker.add_lora": "self lora_request"},
    },
    fields={"vllm.lora.request": {"LoRARequest": "lora_name lora_int_id lora_path"}},
)

# What copies adapters to slots ahead of the step that runs them.
PREFETCH = Interface(
    replaced={
        "vllm.lora.model_manager": {
            "LoRAModelManager._create_merged_loras_inplace": "self lora_model",
            "LoRAModelManager.activate_adapter": "self lora_id",
        },
        "vllm.lora.worker_manager": {
            "WorkerLoRAManager.set_active_adapters": "self requests mapping",
        },
        "vllm.v1.core.sched.scheduler": {
            "Scheduler._handle_blocked_waiting_request": "self request",
        },
        "vllm.v1.engine.core": {
            "EngineCore.step": "self",
            "EngineCore.step_with_batch_queue": "self",
        },
    },
    called={
        "vllm.lora.model_manager": {
            "LoRAModelManager._get_lora_layer_weights": "self lora_model module_name",
            "LoRAModelManager.deactivate_adapter": "self adapter_id",
        },
        "vllm.lora.worker_manager": {"LRUCacheWorkerLoRAManager.add_adapter": "self lora_request"},
        "vllm.utils.cache": {"LRUCache.touch": "self key"},
        "vllm.utils.torch_utils": {"current_stream": ""},
        "vllm.v1.executor.abstract": {"Executor.collective_rpc": "self method args non_block"},
        "vllm.v1.worker.gpu_worker": {"Worker.add_lora": "self lora_request"},
    },
    fields={"vllm.lora.request": {"LoRARequest": "lora_name lora_int_id load_inplace"}},
)

# What `share_experts` of moelora.integrations.transformers calls.
SHARED = Interface(called={"vllm.v1.engine.llm_engine": {"LLMEngine.apply_model": "self func"}})
# Where tokens of data-parallel ranks are exchanged, and slots are filled.
TRAVEL = Interface(
    replaced={
        f"{_MOE}.prepare_finalize.naive_dp_ep": {
            "MoEPrepareAndFinalizeNaiveDPEPModular.prepare": (
                "self a1 topk_weights topk_ids num_experts expert_map apply_router_weight_on_input "
                "quant_config defer_input_quant"
            ),
        },
        "vllm.lora.model_manager": {"LoRAModelManager.activate_adapter": "self lora_id"},
        "vllm.lora.worker_manager": {
            "WorkerLoRAManager._load_adapter": "self lora_request",
            "WorkerLoRAManager.add_dummy_lora": "self lora_request rank",
        },
    },
    fields={
        f"{_MOE}.experts.lora_context": {
            "MoELoRAContext": "punica_wrapper local_token_lora_mapping"
        },
        "vllm.lora.request": {"LoRARequest": "lora_name lora_int_id lora_path"},
    },
)

# Required by any quantized layer, in addition to its method.
QUANTIZED = Interface(
    called={
        "vllm.config": {"get_current_vllm_config_or_none": ""},
        f"{_MOE}.config": {
            "biased_moe_quant_config": ("w1_bias w2_bias gemm1_alpha gemm1_beta gemm1_clamp_limit"),
        },
        f"{_MOE}.all2all_utils": {
            "maybe_make_prepare_finalize": (
                "moe quant_config routing_tables allow_new_interface use_monolithic"
            ),
        },
        f"{_MOE}.experts.triton_moe": {
            "TritonExperts._supports_parallel_config": "moe_parallel_config"
        },
    },
    fields={
        f"{_MOE}.config": {
            "FusedMoEConfig": "moe_parallel_config in_dtype activation moe_backend",
            "FusedMoEParallelConfig": "enable_eplb all2all_backend",
        },
    },
)
