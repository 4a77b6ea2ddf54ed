"""What vLLM calls the layers of its models, where transformers has other names.

Each row: the files (modules, or names in vllm/model_executor/models), the attribute of a decoder
layer that holds the experts, what `get_expert_mapping` calls an expert's gate, down and up
projection, and the names of other layers of a decoder layer, transformers' first.
"""

PROJ, W123 = ("gate_proj", "down_proj", "up_proj"), ("w1", "w2", "w3")
BLOCK = "block_sparse_moe"
ROUTER = {f"{BLOCK}.router": f"{BLOCK}.gate"}
V32 = "vllm.models.deepseek_v32.nvidia.model deepseek_v2"

VLLM = {
    "afmoe": ("afmoe", "mlp", PROJ, {"mlp.router.gate": "mlp.gate"}),
    "deepseek_v3": ("deepseek_v2", "mlp", PROJ, {"mlp.gate": "mlp.gate"}),
    "deepseek_v32": (V32, "mlp", PROJ, {"mlp.gate": "mlp.gate"}),
    "ernie4_5_moe": ("ernie45_moe", "mlp", PROJ, {"mlp.gate": "mlp.gate"}),
    "exaone_moe": ("exaone_moe", "mlp", PROJ, {"mlp.gate": "mlp.gate"}),
    "gemma4_text": ("gemma4", "", PROJ, {"router.proj": "router.proj"}),
    "glm4_moe": ("glm4_moe", "mlp", PROJ, {"mlp.gate": "mlp.gate"}),
    "granitemoe": ("granitemoe", BLOCK, PROJ, ROUTER),
    "granitemoehybrid": ("granitemoehybrid granitemoe", BLOCK, PROJ, ROUTER),
    "granitemoeshared": ("granitemoeshared granitemoe", BLOCK, PROJ, ROUTER),
    "hy_v3": ("hy_v3", "mlp", PROJ, {"mlp.shared_experts.up_proj": "mlp.shared_mlp.up_proj"}),
    "jamba": ("jamba", "feed_forward", PROJ, {"feed_forward.router": "feed_forward.router"}),
    "laguna": ("laguna", "mlp", PROJ, {"mlp.shared_experts.up_proj": "mlp.shared_expert.up_proj"}),
    "lfm2_moe": ("lfm2_moe", "feed_forward", W123, {"feed_forward.gate": "feed_forward.gate"}),
    "minimax_m2": ("minimax_m2", BLOCK, W123, {"mlp.gate": f"{BLOCK}.gate"}),
    "mixtral": ("mixtral", BLOCK, W123, {"mlp.gate": f"{BLOCK}.gate"}),
    "nemotron_h": ("nemotron_h", "mixer", ("up_proj", "down_proj", None), {}),
    "olmoe": ("olmoe", "mlp", PROJ, {"mlp.gate": "mlp.gate"}),
    "phimoe": ("phimoe", BLOCK, W123, {"mlp.router": f"{BLOCK}.gate"}),
    "qwen2_moe": ("qwen2_moe", "mlp", PROJ, {"mlp.shared_expert_gate": "mlp.shared_expert_gate"}),
    "qwen3_moe": ("qwen3_moe", "mlp", PROJ, {"mlp.gate": "mlp.gate"}),
    "qwen3_next": ("qwen3_next", "mlp", PROJ, {"mlp.gate": "mlp.gate"}),
}
