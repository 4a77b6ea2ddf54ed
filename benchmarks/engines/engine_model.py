"""A checkpoint of random weights, and PEFT adapters of its experts: what engines serve.

    python -m benchmarks.engines.engine_model --preset a3b --layers 12 --out /tmp/a3b

It is a Qwen3-MoE, or a gpt-oss with layers of gpt-oss-20b. Writes OUT/base, OUT/lora1-r16 and so
on, and OUT/manifest.json, which names them. Nothing is downloaded. Weights are random, made on the
GPU if there is one. Their scale keeps the norm of activations from layer to layer, makes an
adapter's delta half as large as the output that it is added to, and rarely leaves two tokens with
nearly the same probability.
"""

import argparse
import json
import math
import pathlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from safetensors.torch import save_file

VOCAB = 4096
DELTA = 0.5  # standard deviation of an adapter's delta over that of the base product


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    experts: int
    top_k: int
    inter: int
    heads: int
    kv_heads: int
    head: int = 128


PRESETS = {
    "micro": Shape(64, 2, 4, 2, 32, 4, 2, 16),  # for tests on a CPU
    "tiny": Shape(2048, 4, 32, 4, 768, 16, 4),
    "a3b": Shape(2048, 8, 128, 8, 768, 32, 4),  # layers of Qwen3-30B-A3B
}
GPT_OSS_20B = Shape(2880, 4, 32, 4, 2880, 64, 8, 64)


class Maker:
    """Draws bfloat16 numbers, always the same ones."""

    def __init__(self, device):
        self.device = device
        self.random = torch.Generator(device).manual_seed(0)

    def normal(self, *shape, std=None):
        """The variance is by default 1 / columns."""
        t = torch.randn(*shape, generator=self.random, device=self.device)
        return (t * (std or 1 / math.sqrt(shape[-1]))).bfloat16()


def device():
    """The device that random numbers are generated on."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def ones(size):
    return torch.ones(size, dtype=torch.bfloat16)


def attention(s):
    """(rows, columns) of the linear layers of attention."""
    q, kv = s.heads * s.head, s.kv_heads * s.head
    columns = {"k_proj": (kv, s.hidden), "v_proj": (kv, s.hidden), "o_proj": (s.hidden, q)}
    return {"q_proj": (q, s.hidden)} | columns


def decoder(make, s, router, biases=False):
    """Tensors of one decoder layer but those of its experts."""
    norms = ("input_layernorm", "post_attention_layernorm")
    tensors = {f"{name}.weight": ones(s.hidden) for name in norms}
    linear = {f"self_attn.{name}": shape for name, shape in attention(s).items()}
    for name, (rows, columns) in (linear | {f"mlp.{router}": (s.experts, s.hidden)}).items():
        std = (1.5 if name.startswith("mlp") else 1) / math.sqrt(columns)
        tensors[f"{name}.weight"] = make.normal(rows, columns, std=std)
        if biases:
            tensors[f"{name}.bias"] = make.normal(rows, std=0.1)
    return tensors


def lora(rank, targets):
    """adapter_config.json; alpha is twice the rank."""
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank}
    return config | {"target_modules": targets, "bias": "none"}


def common(s, name, model_type):
    """config.json of every family; what is not said is transformers' default."""
    config = {"architectures": [name], "model_type": model_type, "torch_dtype": "bfloat16"}
    config |= {"tie_word_embeddings": False, "vocab_size": VOCAB, "hidden_size": s.hidden}
    config |= {"num_attention_heads": s.heads, "num_key_value_heads": s.kv_heads}
    config |= {"head_dim": s.head, "num_hidden_layers": s.layers, "num_experts_per_tok": s.top_k}
    return config | {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}


# ---- Qwen3-MoE ----

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def layer(make, s):
    tensors = decoder(make, s, "gate")
    tensors |= {f"self_attn.{name}_norm.weight": ones(s.head) for name in "qk"}
    gate_up = make.normal(s.experts, 2, s.inter, s.hidden)
    down = make.normal(s.experts, s.hidden, s.inter, std=2 / math.sqrt(s.inter))
    for e in range(s.experts):
        weights = gate_up[e, 0], gate_up[e, 1], down[e]
        for name, weight in zip(PROJECTIONS, weights, strict=True):
            tensors[f"mlp.experts.{e}.{name}.weight"] = weight
    return tensors


def adapter(make, s, rank, of_attention=False):
    """A pair of factors for each projection of each expert, and if wanted of attention."""
    std_b = DELTA / (2 * math.sqrt(rank))
    tensors = {}
    linear = attention(s) if of_attention else {}
    for i in range(s.layers):
        prefix = f"base_model.model.model.layers.{i}"
        for name, (rows, columns) in linear.items():
            key = f"{prefix}.self_attn.{name}"
            tensors[f"{key}.lora_A.weight"] = make.normal(rank, columns)
            tensors[f"{key}.lora_B.weight"] = make.normal(rows, rank, std=std_b)
        sizes = (s.inter, s.hidden, 1), (s.inter, s.hidden, 1), (s.hidden, s.inter, 2)
        for name, (rows, columns, size) in zip(PROJECTIONS, sizes, strict=True):
            a = make.normal(s.experts, rank, columns)
            b = make.normal(s.experts, rows, rank, std=size * std_b)
            for e in range(s.experts):
                key = f"{prefix}.mlp.experts.{e}.{name}"
                tensors[f"{key}.lora_A.weight"] = a[e]
                tensors[f"{key}.lora_B.weight"] = b[e]
    return tensors, lora(rank, [*PROJECTIONS, *linear])


def settings(s):
    config = {"num_experts": s.experts, "moe_intermediate_size": s.inter, "norm_topk_prob": True}
    config["intermediate_size"] = 4 * s.inter  # of dense layers, of which there are none
    config |= {"max_position_embeddings": 16384, "rope_theta": 1000000.0}
    return common(s, "Qwen3MoeForCausalLM", "qwen3_moe") | config


# ---- gpt-oss ----


def experts_of(s):
    """(rows, columns) of the experts' projections."""
    return {"gate_up_proj": (2 * s.inter, s.hidden), "down_proj": (s.hidden, s.inter)}


def gpt_oss_layer(make, s):
    tensors = decoder(make, s, "router", biases=True)
    tensors["self_attn.sinks"] = make.normal(s.heads, std=1.0)
    for name, (rows, columns) in experts_of(s).items():
        weight = make.normal(s.experts, rows, columns)
        tensors[f"mlp.experts.{name}"] = weight.transpose(1, 2)
        tensors[f"mlp.experts.{name}_bias"] = make.normal(s.experts, rows, std=0.1)
    return tensors


def gpt_oss_adapter(make, s, rank):
    """With the layout of PEFT's `target_parameters`."""
    tensors, std_b = {}, DELTA / (2 * math.sqrt(rank))
    for i in range(s.layers):
        experts = f"base_model.model.model.layers.{i}.mlp.experts"
        modules = f"{experts}.base_layer", experts
        for name, (rows, columns) in zip(modules, experts_of(s).values(), strict=True):
            tensors[f"{name}.lora_A.weight"] = make.normal(s.experts * rank, columns)
            tensors[f"{name}.lora_B.weight"] = make.normal(rows, rank * s.experts, std=std_b)
    parameters = [f"mlp.experts.{name}" for name in experts_of(s)]
    return tensors, lora(rank, ["experts"]) | {"target_parameters": parameters}


def gpt_oss_settings(s):
    rope = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
    rope |= {"truncate": False, "original_max_position_embeddings": 4096, "rope_theta": 150000.0}
    config = {"num_local_experts": s.experts, "intermediate_size": s.inter, "swiglu_limit": 7.0}
    config |= {"rope_scaling": rope, "rope_theta": rope["rope_theta"]}
    return common(s, "GptOssForCausalLM", "gpt_oss") | config


# ---- files ----


class Family(NamedTuple):
    layer: Callable  # (make, shape): tensors
    adapter: Callable  # (make, shape, rank): tensors, configuration
    settings: Callable  # (shape): config.json


QWEN3 = Family(layer, adapter, settings)
GPT_OSS = Family(gpt_oss_layer, gpt_oss_adapter, gpt_oss_settings)


def save_json(path, what):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(what, indent=1))


def save(folder, name, tensors):
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {key: t.cpu().contiguous() for key, t in tensors.items()}
    save_file(tensors, folder / name, metadata={"format": "pt"})


def save_weights(folders, files):
    """Write `files`, (name, the tensors for each folder), and the index of each folder."""
    indices = [{} for _ in folders]
    for name, parts in files:
        for folder, index, tensors in zip(folders, indices, parts, strict=False):
            save(folder, name, tensors)
            index.update(dict.fromkeys(tensors, name))
    for folder, index in zip(folders, indices, strict=True):
        save_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})


def tensor_files(make, family, s, vocab):
    """(name, tensors) of each file of a checkpoint."""
    ends = {"model.embed_tokens.weight": make.normal(vocab, s.hidden, std=1.0)}
    ends["model.norm.weight"] = ones(s.hidden)
    ends["lm_head.weight"] = make.normal(vocab, s.hidden, std=3 / math.sqrt(s.hidden))
    yield "ends.safetensors", ends
    for i in range(s.layers):
        layer = family.layer(make, s).items()
        yield f"layer-{i:02}.safetensors", {f"model.layers.{i}.{name}": t for name, t in layer}


def save_tokenizer(folder, vocab):
    """A word for each token, for engines that look for a tokenizer though they are given ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(vocab)}, unk_token="<0>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": "<0>", "pad_token": "<1>", "eos_token": "<2>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)


def write(out, family, s, ranks, vocab=VOCAB, change=lambda tensors: tensors, **config):
    """Write a checkpoint and adapters; `config` is more of its config.json, and `change` what is
    done to the tensors of a file, None: no weights."""
    shutil.rmtree(out, ignore_errors=True)
    make, base = Maker(device()), out / "base"
    if change:
        files = tensor_files(make, family, s, vocab)
        save_weights([base], ((name, [change(tensors)]) for name, tensors in files))
    save_json(base / "config.json", family.settings(s) | {"vocab_size": vocab} | config)
    save_tokenizer(base, vocab)
    adapters = [out / f"lora{i}-r{rank}" for i, rank in enumerate(ranks, 1)]
    for folder, rank in zip(adapters, ranks, strict=True):
        tensors, config = family.adapter(make, s, rank)
        save(folder, "adapter_model.safetensors", tensors)
        save_json(folder / "adapter_config.json", config | {"base_model_name_or_path": str(base)})
    manifest = {"base": str(base), "adapters": [str(a) for a in adapters], "vocab": vocab}
    save_json(out / "manifest.json", manifest)
    print(f"made {base} and {len(adapters)} adapters on {make.device}")
    return base, adapters


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--out", type=pathlib.Path, required=True)
    p.add_argument("--preset", choices=[*PRESETS, "gpt-oss"], default="tiny")
    p.add_argument("--layers", type=int, help="(default: the preset's)")
    p.add_argument("--adapters", default="16,16,64,64", help="ranks, commas between")
    p.add_argument("--attention", action="store_true", help="adapters of attention, too")
    args = p.parse_args(argv)
    family, shape = GPT_OSS, GPT_OSS_20B
    if args.preset in PRESETS:
        more = partial(adapter, of_attention=args.attention)
        family, shape = QWEN3._replace(adapter=more), PRESETS[args.preset]
    shape = replace(shape, layers=args.layers or shape.layers)
    write(args.out, family, shape, [int(rank) for rank in args.adapters.split(",")])


if __name__ == "__main__":
    main()
