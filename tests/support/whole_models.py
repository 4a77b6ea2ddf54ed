"""Small models of many families, adapters of all their layers, and the models merged with these."""

import copy
import json
from functools import partial

import small_models
import torch
from hf_models import deepseek_v3, gpt_oss, make_model, mixtral, oracle, qwen3, tokens
from safetensors.torch import load_file, save_file
from torch import nn

import moelora.integrations.transformers as moelora_hf
from moelora.integrations.transformers.linears import linear_layers


def _small(name, model_type):
    """A function that makes a configuration, as those of `hf_models`."""

    def config():
        return small_models.config(model_type)

    config.__name__ = name
    return config


qwen2_moe = _small("qwen2_moe", "qwen2_moe")
qwen3_5_moe = _small("qwen3_5_moe", "qwen3_5_moe_text")
qwen3_next = _small("qwen3_next", "qwen3_next")
glm4_moe = _small("glm4_moe", "glm4_moe")
granite_shared = _small("granite_shared", "granitemoeshared")
gemma4 = _small("gemma4", "gemma4_text")
minimax_m2 = _small("minimax_m2", "minimax_m2")
deepseek_v4 = _small("deepseek_v4", "deepseek_v4")


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


def served(folder, config=qwen3, place=("cpu", torch.float32), **sizes):
    """(model, tokens of these sizes, folders of `write_adapters`)."""
    model = make_whole_model(config, place[1], place[0])
    return model, tokens(device=model.device, **sizes), write_adapters(model, folder)


ROWS = ["all", None, "attention", "mlp", "all"]


wanted_logits = partial(oracle, adapted=merged)  # by merged weights


def relative(got, wanted):
    return float((got.float() - wanted).norm() / wanted.norm())
