"""What this integration needs of vLLM, and the check that an installed vLLM has it."""

from __future__ import annotations

import importlib
import inspect
from operator import attrgetter

SUPPORTED = ("0.26", "0.33")

_MOE = "vllm.model_executor.layers.fused_moe"

# module: {function: its parameters}. The functions that are called with these arguments by vLLM,
# or wrapped, here.
SIGNATURES = {
    f"{_MOE}.experts.triton_moe": {
        "TritonExperts.__init__": "self moe_config quant_config",
        "TritonExperts.set_lora_context": "self ctx",
        "TritonExperts.workspace_shapes": (
            "self M N K topk global_num_experts local_num_experts expert_tokens_meta activation"
        ),
        "TritonExperts.apply": (
            "self output hidden_states w1 w2 topk_weights topk_ids activation global_num_experts "
            "expert_map a1q_scale a2_scale workspace13 workspace2 expert_tokens_meta "
            "apply_router_weight_on_input"
        ),
    },
    f"{_MOE}.modular_kernel": {"FusedMoEKernel.__init__": "self prepare_finalize fused_experts"},
    f"{_MOE}.oracle.unquantized": {"backend_to_kernel_cls": "backend"},
    "vllm.lora.layers.fused_moe": {
        "FusedMoEWithLoRA._build_lora_context": "self",
        "FusedMoEWithLoRA.set_lora": "self index lora_a lora_b",
        "FusedMoE3DWithLoRA.set_lora": "self index lora_a lora_b",
    },
    "vllm.lora.ops.triton_ops.lora_kernel_metadata": {
        "LoRAKernelMeta.prepare_tensors": "self token_lora_mapping",
    },
}

# module: {dataclass: the fields that are read}.
FIELDS = {
    f"{_MOE}.experts.lora_context": {
        "MoELoRAContext": (
            "w13_lora_a_stacked w13_lora_b_stacked w2_lora_a_stacked w2_lora_b_stacked "
            "adapter_enabled fully_sharded punica_wrapper local_token_lora_mapping"
        ),
    },
    "vllm.lora.ops.triton_ops.lora_kernel_metadata": {
        "LoRAKernelMeta": "token_lora_mapping no_lora_flag_cpu",
    },
}


def version_problem() -> str | None:
    """Says so if the installed vLLM is of a release that was not tried."""
    import vllm

    if ".".join(vllm.__version__.split(".")[:2]) in SUPPORTED:
        return None
    known = " and ".join(f"{version}.x" for version in SUPPORTED)
    return f"vLLM {vllm.__version__} is not supported, {known} are"


def problem() -> str | None:
    """The first difference between the tables above and the installed vLLM."""
    for module, functions in SIGNATURES.items():
        for name, wanted in functions.items():
            got = _parameters(module, name)
            if got != wanted.split():
                return f"{module}.{name} has the parameters {got}, not {wanted.split()}"
    for module, classes in FIELDS.items():
        for name, wanted in classes.items():
            missing = set(wanted.split()) - set(_parameters(module, name))
            if missing:
                return f"{module}.{name} has no {', '.join(sorted(missing))}"
    return None


def _parameters(module: str, name: str) -> list[str]:
    found = attrgetter(name)(importlib.import_module(module))
    return list(inspect.signature(found).parameters)
