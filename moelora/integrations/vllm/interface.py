"""The API of vLLM that this integration uses."""

from __future__ import annotations

from moelora.integrations.interface import Interface as Interface
from moelora.integrations.interface import interface
from moelora.integrations.interface import problem as problem
from moelora.integrations.vllm.deltas import Down, GateUp
from moelora.integrations.vllm.served import Call

_MOE = "vllm.model_executor.layers.fused_moe"
_CREATE, _SET = "self max_loras lora_config model_config", "self index lora_a lora_b"


def _experts(cls: str) -> str:
    """Methods of an experts class."""
    return f"""
        replaced {cls}.moe_problem_size self a1 w1 w2 topk_ids
        replaced {cls}.workspace_shapes self M N K topk global_num_experts local_num_experts \
            expert_tokens_meta activation
        replaced {cls}.apply self {" ".join(Call._fields)}
    """


LAYERS = interface(f"""
    {_MOE}.experts.triton_moe
        replaced TritonExperts.__init__ self moe_config quant_config
        replaced TritonExperts.set_lora_context self ctx
        {_experts("TritonExperts")}
    {_MOE}.modular_kernel
        replaced FusedMoEKernel.__init__ self prepare_finalize fused_experts
    {_MOE}.oracle.unquantized
        replaced backend_to_kernel_cls backend
    vllm.lora.layers.fused_moe
        replaced FusedMoEWithLoRA._build_lora_context self
        replaced FusedMoEWithLoRA.create_lora_weights {_CREATE}
        replaced FusedMoE3DWithLoRA.create_lora_weights {_CREATE}
        replaced FusedMoEWithLoRA.set_lora {_SET}
        replaced FusedMoE3DWithLoRA.set_lora {_SET}
    {_MOE}.experts.lora_context
        fields MoELoRAContext w13_lora_a_stacked w13_lora_b_stacked w2_lora_a_stacked \
            w2_lora_b_stacked adapter_enabled fully_sharded punica_wrapper \
            local_token_lora_mapping
    vllm.lora.ops.triton_ops.lora_kernel_metadata
        replaced LoRAKernelMeta.prepare_tensors self token_lora_mapping
        fields LoRAKernelMeta token_lora_mapping no_lora_flag_cpu
""")

# Layers whose tokens come batched by expert.
BATCHED = interface(f"""
    {_MOE}.experts.fused_batched_moe
        replaced BatchedTritonExperts.__init__ self moe_config quant_config \
            max_num_tokens num_dispatchers
        {_experts("BatchedTritonExperts")}
    {_MOE}.modular_kernel
        fields ExpertTokensMetadata expert_num_tokens
""")

DELTAS = interface(f"""
    vllm.lora.punica_wrapper.punica_gpu
        replaced PunicaWrapperGPU.add_lora_w13 self {" ".join(GateUp._fields)}
        replaced PunicaWrapperGPU.add_lora_w2 self {" ".join(Down._fields)}
    vllm.distributed
        called tensor_model_parallel_all_gather input_
        called tensor_model_parallel_all_reduce input_
""")

_MAPPED = (
    "token_lora_mapping token_indices_sorted_by_lora_ids num_tokens_per_lora lora_token_start_loc "
    "lora_ids no_lora_flag_cpu num_active_loras"
)

# Adapters of linear layers.
LINEAR = interface(f"""
    vllm.compilation.caching
        replaced aot_compile_hash_factors vllm_config
    vllm.lora.layers.base_linear
        replaced BaseLinearLayerWithLoRA.create_lora_weights {_CREATE}
        replaced BaseLinearLayerWithLoRA.set_lora {_SET}
        replaced BaseLinearLayerWithLoRA.reset_lora self index
    vllm.lora.layers.column_parallel_linear
        replaced MergedColumnParallelLinearWithLoRA.create_lora_weights {_CREATE}
        replaced MergedColumnParallelLinearWithLoRA.set_lora {_SET}
    vllm.lora.layers.logits_processor
        replaced LogitsProcessorWithLoRA.create_lora_weights {_CREATE}
        replaced LogitsProcessorWithLoRA.set_lora {_SET}
        replaced LogitsProcessorWithLoRA.reset_lora self index
    vllm.lora.punica_wrapper.punica_gpu
        replaced PunicaWrapperGPU.add_lora_linear self y x lora_a_stacked lora_b_stacked scale \
            output_slices buffer kwargs
        replaced PunicaWrapperGPU.add_lora_logits self y x lora_a_stacked lora_b_stacked scale \
            buffer kwargs
    vllm.lora.ops.triton_ops.lora_kernel_metadata
        called LoRAKernelMeta.meta_args self token_nums specialize_active_lora
        fields LoRAKernelMeta token_lora_mapping no_lora_flag_cpu
    vllm.lora.ops.triton_ops.lora_shrink_op
        called _lora_shrink inputs lora_a_weights output_tensor {_MAPPED} scaling
    vllm.lora.ops.triton_ops.lora_expand_op
        called _lora_expand inputs lora_b_weights output_tensor {_MAPPED} offset_start add_inputs
""")

# Where adapter configurations are loaded.
CONFIGS = interface("""
    vllm.lora.peft_helper
        called PEFTHelper.from_dict config_dict
""")

# What `update_adapters` calls and replaces.
UPDATES = interface("""
    vllm.lora.worker_manager
        replaced WorkerLoRAManager._load_adapter self lora_request
    vllm.lora.model_manager
        replaced LoRAModelManager._create_merged_loras_inplace self lora_model
    vllm.v1.engine.input_processor
        replaced InputProcessor._validate_lora self lora_request
    vllm.lora.peft_helper
        called PEFTHelper.from_local_dir lora_path max_position_embeddings
        called PEFTHelper.from_dict config_dict
    vllm.lora.lora_model
        called LoRAModel.from_local_checkpoint lora_dir expected_lora_modules peft_helper
        called LoRAModel.from_lora_tensors lora_model_id tensors peft_helper
    vllm.lora.worker_manager
        called WorkerLoRAManager.list_adapters self
        called WorkerLoRAManager.remove_adapter self adapter_id
    vllm.lora.model_manager
        called LoRAModelManager.add_adapter self adapter
        called LoRAModelManager.activate_adapter self lora_id
        called LoRAModelManager._get_lora_layer_weights self lora_model module_name
    vllm.v1.worker.gpu_worker
        called Worker.add_lora self lora_request
    vllm.lora.request
        fields LoRARequest lora_name lora_int_id lora_path
""")

# What reads adapter files into stacks.
LOADING = interface("""
    vllm.lora.worker_manager
        replaced WorkerLoRAManager._load_adapter self lora_request
    vllm.lora.lora_model
        called LoRAModel.from_local_checkpoint lora_dir expected_lora_modules peft_helper
        called LoRAModel.from_lora_tensors lora_model_id tensors peft_helper
    vllm.lora.lora_weights
        called PackedLoRALayerWeights.pack_moe_stacked loras module_name
    vllm.lora.utils
        called parse_fine_tuned_lora_name name weights_mapper
    vllm.utils.platform_utils
        called is_pin_memory_available
""")

# What copies adapters to slots ahead of the step that runs them.
PREFETCH = interface("""
    vllm.lora.model_manager
        replaced LoRAModelManager._create_merged_loras_inplace self lora_model
        replaced LoRAModelManager.activate_adapter self lora_id
        called LoRAModelManager._get_lora_layer_weights self lora_model module_name
        called LoRAModelManager.deactivate_adapter self adapter_id
    vllm.lora.worker_manager
        replaced WorkerLoRAManager.set_active_adapters self requests mapping
        called LRUCacheWorkerLoRAManager.add_adapter self lora_request
    vllm.v1.core.sched.scheduler
        replaced Scheduler._handle_blocked_waiting_request self request
        called Scheduler._holds_kv_blocks request
        called Scheduler._is_blocked_waiting_status status
    vllm.distributed.parallel_state
        called get_tp_group
        called get_pp_group
        called get_dp_group
    vllm.v1.engine.core
        replaced EngineCore.step self
        replaced EngineCore.step_with_batch_queue self
    vllm.utils.cache
        called LRUCache.touch self key
    vllm.utils.torch_utils
        called current_stream
    vllm.v1.executor.abstract
        called Executor.collective_rpc self method args non_block
    vllm.v1.worker.gpu_worker
        called Worker.add_lora self lora_request
    vllm.lora.request
        fields LoRARequest lora_name lora_int_id load_inplace
""")

# Where layers of a batch are launched.
PER_LAYER = interface("""
    vllm.model_executor.layers.attention.attention
        replaced get_attention_context layer_name
        fields Attention
    vllm.v1.worker.gpu.cudagraph_utils
        replaced CudaGraphManager.run_fullgraph self desc
    vllm.config.compilation
        called CompilationConfig.splitting_ops_contain_attention self
""")

# What `share_experts` of moelora.integrations.transformers calls.
SHARED = interface("""
    vllm.v1.engine.llm_engine
        called LLMEngine.apply_model self func
""")

# Where tokens of data-parallel ranks are exchanged, slots are filled, and idle ranks run.
TRAVEL = interface(f"""
    {_MOE}.prepare_finalize.naive_dp_ep
        replaced MoEPrepareAndFinalizeNaiveDPEPModular.prepare self a1 topk_weights topk_ids \
            num_experts expert_map apply_router_weight_on_input quant_config defer_input_quant
    vllm.lora.model_manager
        replaced LoRAModelManager.activate_adapter self lora_id
    vllm.lora.worker_manager
        replaced WorkerLoRAManager._load_adapter self lora_request
    vllm.v1.worker.gpu_worker
        replaced Worker.execute_dummy_batch self
        replaced Worker.execute_model self scheduler_output
    vllm.v1.worker.lora_model_runner_mixin
        replaced LoRAModelRunnerMixin.maybe_dummy_run_with_lora self lora_config \
            num_scheduled_tokens num_sampled_tokens remove_lora num_active_loras mapping_type
        called LoRAModelRunnerMixin.maybe_select_dummy_loras self lora_config \
            num_scheduled_tokens num_sampled_tokens
    {_MOE}.experts.lora_context
        fields MoELoRAContext punica_wrapper local_token_lora_mapping
    vllm.lora.request
        fields LoRARequest lora_name lora_int_id lora_path
""")

# Required by any quantized layer, in addition to its method.
QUANTIZED = interface(f"""
    vllm.config
        called get_current_vllm_config_or_none
    {_MOE}.config
        called biased_moe_quant_config w1_bias w2_bias gemm1_alpha gemm1_beta gemm1_clamp_limit
        fields FusedMoEConfig moe_parallel_config in_dtype activation moe_backend
        fields FusedMoEParallelConfig enable_eplb all2all_backend
    {_MOE}.all2all_utils
        called maybe_make_prepare_finalize moe quant_config routing_tables allow_new_interface \
            use_monolithic
    {_MOE}.experts.triton_moe
        called TritonExperts._supports_parallel_config moe_parallel_config
""")
