"""Small models of many families, adapters of all their layers, and the models merged with these."""

import json
from functools import partial

import torch
from dialects import PREFIX, draw, linears, merge_state, per_expert, save
from hf_models import make_model, oracle, tokens
from safetensors.torch import load_file

ATTENTION = ("self_attn", "linear_attn")


def make_whole_model(config, dtype=torch.float32, device="cpu"):
    """As `make_model`, with routers, embeddings and norms that matter, too."""
    model = make_model(config, torch.float32)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "embed" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.to(device, dtype)


def write_adapter(model, folder, seed, chosen, r=4, alpha=8, **config):
    """Writes an adapter with random factors of all layers whose name `chosen` takes."""
    drawn = draw(model, "split", seed, r, embeddings=True, chosen=chosen)
    config = {"peft_type": "LORA", "lora_alpha": alpha, "lora_dropout": 0.1, **config}
    return save(folder, linears(drawn) | per_expert(drawn), config, drawn)


def merged(model, folder):
    """A copy of a model with an adapter of `write_adapter` in its weights."""
    config = json.loads((folder / "adapter_config.json").read_text())
    scaling = config["lora_alpha"] / config["r"] ** (0.5 if config.get("use_rslora") else 1)
    state = load_file(folder / "adapter_model.safetensors", device=str(model.device))
    return merge_state(model, {k.removeprefix(PREFIX): v for k, v in state.items()}, scaling)


def write_adapters(model, folder):
    """Three adapters of different layers, ranks and scalings: all, attention and more, experts."""

    def chosen(name):
        return any(part in name for part in ATTENTION) or name == "lm_head"

    options = {"r": 6, "use_rslora": True}
    return {
        "all": write_adapter(model, folder / "all", 1, lambda name: True),
        "attention": write_adapter(model, folder / "attention", 2, chosen, **options),
        "mlp": write_adapter(model, folder / "mlp", 3, lambda name: "mlp" in name, r=3, alpha=2),
    }


def served(folder, config="qwen3_moe", place=("cpu", torch.float32), **sizes):
    """(model, tokens of these sizes, folders of `write_adapters`)."""
    model = make_whole_model(config, place[1], place[0])
    return model, tokens(device=model.device, **sizes), write_adapters(model, folder)


ROWS = ["all", None, "attention", "mlp", "all"]
wanted_logits = partial(oracle, adapted=merged)  # by merged weights


def relative(got, wanted):
    return float((got.float() - wanted).norm() / wanted.norm())
