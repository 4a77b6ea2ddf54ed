"""Small models of many families, adapters of all their layers, and the models merged with these."""

import copy
import json

import torch
from hf_models import COMMON, deepseek_v3, gpt_oss, make_model, mixtral, qwen3, transformers
from safetensors.torch import load_file, save_file
from torch import nn

import moelora.integrations.transformers as moelora_hf
from moelora.integrations.transformers.linears import linear_layers

LINEAR_ATTENTION = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
QWEN_EXPERTS = {
    "head_dim": 8,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}


def qwen3_5_moe():
    return transformers.Qwen3_5MoeTextConfig(**COMMON, **QWEN_EXPERTS, **LINEAR_ATTENTION)


def qwen3_next():
    return transformers.Qwen3NextConfig(
        **COMMON, **QWEN_EXPERTS, **LINEAR_ATTENTION, intermediate_size=40
    )


def glm4_moe():
    return transformers.Glm4MoeConfig(
        **COMMON,
        head_dim=8,
        intermediate_size=40,
        moe_intermediate_size=24,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
    )


def granite_shared():
    return transformers.GraniteMoeSharedConfig(
        **COMMON,
        intermediate_size=24,
        shared_intermediate_size=16,
        num_local_experts=4,
        num_experts_per_tok=2,
    )


def gemma4():
    return transformers.Gemma4TextConfig(
        **COMMON,
        head_dim=8,
        global_head_dim=8,
        intermediate_size=40,
        moe_intermediate_size=24,
        enable_moe_block=True,
        num_experts=6,
        top_k_experts=2,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=16,
    )


def minimax_m2():
    return transformers.MiniMaxM2Config(
        **COMMON,
        head_dim=8,
        rotary_dim=8,
        intermediate_size=24,
        num_local_experts=6,
        num_experts_per_tok=2,
    )


def deepseek_v4():
    return transformers.DeepseekV4Config(
        **COMMON | {"num_key_value_heads": 1, "num_attention_heads": 4},
        head_dim=16,
        q_lora_rank=16,
        moe_intermediate_size=24,
        n_routed_experts=6,
        num_experts_per_tok=2,
        layer_types=["compressed_sparse_attention", "heavily_compressed_attention"],
        compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        mlp_layer_types=["hash_moe", "moe"],
        hc_mult=2,
        partial_rotary_factor=0.5,
        sliding_window=8,
        o_groups=2,
        o_lora_rank=8,
        index_n_heads=2,
        index_head_dim=16,
        index_topk=4,
    )


MODELS = [
    *(qwen3, qwen3_5_moe, qwen3_next, deepseek_v3, deepseek_v4, glm4_moe, mixtral, gpt_oss),
    *(granite_shared, gemma4, minimax_m2),
]


def make_whole_model(config, dtype=torch.float32, device="cpu"):
    """As `make_model`, with routers, embeddings and norms that matter, too."""
    model = make_model(config, torch.float32)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "embed" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.to(device, dtype)


def layers_of(model):
    """Names of what adapters may have factors of: experts, and whatever else is served."""
    experts = moelora_hf.moe_layers(model)
    linears = linear_layers(model, experts)
    return experts, {name: linear for name, linear in linears.items() if not linear.refusal}


ATTENTION = ("self_attn", "linear_attn")


def write_adapter(model, folder, seed, chosen, r=4, alpha=8, **config):
    """Writes an adapter with random factors of all layers whose name `chosen` takes."""
    generator = torch.Generator().manual_seed(seed)
    state = {}

    def pair(key, wide, tall, embedding=False):
        kind = "lora_embedding_" if embedding else "lora_"
        end = "" if embedding else ".weight"
        key = f"base_model.model.{key}.{kind}"
        state[f"{key}A{end}"] = torch.randn(r, wide, generator=generator) * 0.3
        state[f"{key}B{end}"] = torch.randn(tall, r, generator=generator) * 0.3

    experts, linears = layers_of(model)
    for name, (_, layer) in experts.items():
        if chosen(name):
            for expert in range(layer.num_experts):
                for projection in ("gate", "up", "down"):
                    pair(f"{name}.{expert}.{projection}_proj", *layer.shape(projection))
    for name, linear in linears.items():
        if chosen(name):
            own = linear.layer
            pair(name, own.in_features, own.out_features, own.embedding)
    folder.mkdir(parents=True)
    save_file(state, folder / "adapter_model.safetensors")
    full = {"peft_type": "LORA", "r": r, "lora_alpha": alpha, "lora_dropout": 0.1, **config}
    (folder / "adapter_config.json").write_text(json.dumps(full))
    return folder


@torch.no_grad()
def merged(model, folder):
    """A copy of a model with an adapter of `write_adapter` in its weights."""
    config = json.loads((folder / "adapter_config.json").read_text())
    scaling = config["lora_alpha"] / config["r"]
    if config.get("use_rslora"):
        scaling = config["lora_alpha"] / config["r"] ** 0.5
    state = load_file(folder / "adapter_model.safetensors", device=str(model.device))
    model = copy.deepcopy(model)
    modules = dict(model.named_modules())
    for key in state:
        if not key.endswith(("lora_A.weight", "lora_embedding_A")):
            continue
        other = key.replace("lora_A", "lora_B").replace("embedding_A", "embedding_B")
        delta = (scaling * state[other] @ state[key]).to(model.dtype)
        name = key.removeprefix("base_model.model.").partition(".lora_")[0]
        if name in modules:
            module = modules[name]
            weight = module.weight
            module.weight = nn.Parameter(weight + (delta.T if "embedding" in key else delta))
            continue
        name, expert, projection = name.rsplit(".", 2)
        module, n = modules[name], int(expert)
        weight = module.down_proj[n] if projection == "down_proj" else module.gate_up_proj[n]
        weight = weight.T if module.is_transposed else weight
        if projection != "down_proj":
            half = int(projection == "up_proj")
            weight = weight.chunk(2)[half] if module.is_concatenated else weight[half::2]
        weight += delta
    return model


def write_adapters(model, folder):
    """Three adapters of different layers, ranks and scalings: all, attention and more, experts."""
    everything = write_adapter(model, folder / "all", 1, lambda name: True)
    attention = write_adapter(
        model,
        folder / "attention",
        2,
        lambda name: any(part in name for part in ATTENTION) or name == "lm_head",
        r=6,
        use_rslora=True,
    )
    mlp = write_adapter(model, folder / "mlp", 3, lambda name: "mlp" in name, r=3, alpha=2)
    return {"all": everything, "attention": attention, "mlp": mlp}


ROWS = ["all", None, "attention", "mlp", "all"]


@torch.no_grad()
def wanted_logits(model, folders, rows, ids):
    """Logits of a mixed batch by merged weights, one adapter at a time."""
    logits = model(ids).logits
    for name, folder in folders.items():
        chosen = [i for i, row in enumerate(rows) if row == name]
        if chosen:
            logits[chosen] = merged(model, folder)(ids).logits[chosen]
    return logits
