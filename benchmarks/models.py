"""Random weights, and what is made of them: models, and adapters."""

from dataclasses import replace

import torch

import moelora
from benchmarks.engines import engine_model
from moelora.bench.cases import normal


def fan_in(make, *size, scale=1.0):
    """Numbers that keep the norm of what they multiply, times `scale`; `make` is a generator."""
    return normal(size, scale * size[-1] ** -0.5, make)


def qwen3_moe(shape, layers, device, **settings):
    """transformers' model of a shape of `engine_model`: bfloat16 on a GPU, float32 on a CPU."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    settings = engine_model.settings(replace(shape, layers=layers)) | settings
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(Qwen3MoeConfig(**settings), dtype=dtype)


def moe_layers(shape, layers):
    return [
        moelora.MoELayer(f"model.layers.{n}.mlp.experts", shape.experts, shape.hidden, shape.inter)
        for n in range(layers)
    ]


def factors(pool, rank, seed, layout="stacked"):
    """A state dict of random factors on the pool's device, and its configuration.

    `layout`: "stacked", (E, r, in) and (E, out, r), or "peft", that of `target_parameters`.
    """
    generator = torch.Generator(pool.device).manual_seed(seed)
    state = {}

    def put(key, *shape):
        numbers = torch.randn(shape, generator=generator, device=pool.device, dtype=pool.dtype)
        state[f"{key}.weight"] = numbers.mul_(0.02)

    for name, layer in pool.layers.items():
        e = layer.num_experts
        for projection, inside in (("gate_up", ".base_layer"), ("down", "")):
            wide, tall = layer.shape(projection)
            if layout == "peft":
                put(f"{name}{inside}.lora_A", e * rank, wide)
                put(f"{name}{inside}.lora_B", tall, rank * e)
            else:
                put(f"{name}.{projection}_proj.lora_A", e, rank, wide)
                put(f"{name}.{projection}_proj.lora_B", e, tall, rank)
    for name, linear in pool.linears.items():
        put(f"{name}.lora_A", rank, linear.in_features)
        put(f"{name}.lora_B", linear.out_features, rank)
    return state, {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
