"""Small mixture-of-experts models of transformers, for adapters of every dialect.

Two layers of a few numbers each; the configurations differ in what adapters meet: shared experts,
dense layers, gated and linear attention, routers of several kinds, transposed and interleaved
experts, experts beside an MLP.
"""

import torch
import transformers

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
QWEN = EXPERTS | {"num_experts": 6, "intermediate_size": 40, "head_dim": 8}
LINEAR_ATTENTION = {
    "shared_expert_intermediate_size": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
DEEPSEEK = EXPERTS | {"n_routed_experts": 8, "n_shared_experts": 1, "q_lora_rank": 16}
GROUPS = {"intermediate_size": 40, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}
LOCAL = {"intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2}

MODELS = {
    "qwen3_moe": QWEN | {"mlp_only_layers": [0], "num_experts_per_tok": 3, "norm_topk_prob": True},
    "qwen2_moe": QWEN | {"shared_expert_intermediate_size": 16},
    "qwen3_5_moe_text": EXPERTS | LINEAR_ATTENTION | {"num_experts": 6, "head_dim": 8},
    "qwen3_next": QWEN | LINEAR_ATTENTION,
    "deepseek_v3": DEEPSEEK
    | GROUPS
    | {"num_key_value_heads": 4, "kv_lora_rank": 16, "v_head_dim": 8}
    | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "routed_scaling_factor": 1.5},
    "deepseek_v4": DEEPSEEK
    | {
        "num_key_value_heads": 1,
        "head_dim": 16,
        "o_lora_rank": 8,
        "o_groups": 2,
        "partial_rotary_factor": 0.5,
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "mlp_layer_types": ["hash_moe", "moe"],
        "hc_mult": 2,
        "sliding_window": 8,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 4,
    },
    "gpt_oss": LOCAL | {"head_dim": 8},
    "glm4_moe": DEEPSEEK | GROUPS | {"head_dim": 8, "n_routed_experts": 6},
    "mixtral": LOCAL,
    "granitemoeshared": LOCAL | {"shared_intermediate_size": 16},
    "gemma4_text": {
        "head_dim": 8,
        "global_head_dim": 8,
        "intermediate_size": 40,
        "moe_intermediate_size": 24,
        "num_experts": 6,
        "top_k_experts": 2,
        "enable_moe_block": True,
        "vocab_size_per_layer_input": 61,
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 16,
        "num_kv_shared_layers": 0,
    },
    "minimax_m2": LOCAL | {"head_dim": 8, "rotary_dim": 8},
}


def config(model_type, **more):
    """The configuration of a small model."""
    return transformers.AutoConfig.for_model(model_type, **SIZES | MODELS[model_type] | more)


def multimodal():
    """The configuration of a text model with a tower beside it."""
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    vision |= {"out_hidden_size": 32, "patch_size": 4, "num_position_embeddings": 16}
    text = SIZES | MODELS["qwen3_5_moe_text"]
    return transformers.Qwen3_5MoeConfig(text_config=text, vision_config=vision)


def make(model_type):
    """A model in float32 whose experts and routers are large enough to matter in the logits."""
    return filled(transformers.AutoModelForCausalLM, config(model_type))


def make_multimodal():
    return filled(transformers.AutoModelForImageTextToText, multimodal())


def filled(auto, config):
    """A model of a configuration whose experts and routers matter in the logits."""
    torch.manual_seed(0)
    model = auto.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("experts", "lm_head", "gate", "router")):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval().float()


def tokens(rows=3, length=7):
    generator = torch.Generator().manual_seed(2)
    return torch.randint(2, SIZES["vocab_size"], (rows, length), generator=generator)
