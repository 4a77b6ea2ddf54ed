"""A checkpoint of random weights, and PEFT adapters of its experts: what engines serve.

    python -m benchmarks.engines.engine_model --preset a3b --layers 12 --out /tmp/a3b

It is a Qwen3-MoE. Writes OUT/base, OUT/lora1-r16 and so on, and OUT/manifest.json, which names
them. Nothing is downloaded. Weights are random, made on the GPU if there is one. Their scale keeps
the norm of activations from layer to layer, makes an adapter's delta half as large as the output
that it is added to, and rarely leaves two tokens with nearly the same probability.
"""

import argparse
import json
import math
import pathlib
import shutil
from dataclasses import asdict, dataclass, replace

import torch
from safetensors.torch import save_file

VOCAB = 4096
COMMON = {  # settings of every model
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
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


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class Maker:
    """Draws bfloat16 numbers, always the same ones."""

    def __init__(self, device):
        self.device = device
        self.random = torch.Generator(device).manual_seed(0)

    def normal(self, *shape, std):
        t = torch.randn(*shape, generator=self.random, device=self.device)
        return (t * std).bfloat16()


def device():
    """The device that random numbers are generated on."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def ones(size):
    return torch.ones(size, dtype=torch.bfloat16)


def layer(make, s, prefix):
    """The tensors of one decoder layer."""
    q, kv, std = s.heads * s.head, s.kv_heads * s.head, 1 / math.sqrt(s.hidden)
    tensors = {
        "input_layernorm.weight": ones(s.hidden),
        "post_attention_layernorm.weight": ones(s.hidden),
        "self_attn.q_proj.weight": make.normal(q, s.hidden, std=std),
        "self_attn.k_proj.weight": make.normal(kv, s.hidden, std=std),
        "self_attn.v_proj.weight": make.normal(kv, s.hidden, std=std),
        "self_attn.o_proj.weight": make.normal(s.hidden, q, std=1 / math.sqrt(q)),
        "self_attn.q_norm.weight": ones(s.head),
        "self_attn.k_norm.weight": ones(s.head),
        "mlp.gate.weight": make.normal(s.experts, s.hidden, std=1.5 * std),
    }
    gate_up = make.normal(s.experts, 2, s.inter, s.hidden, std=std)
    down = make.normal(s.experts, s.hidden, s.inter, std=2 / math.sqrt(s.inter))
    for e in range(s.experts):
        weights = gate_up[e, 0], gate_up[e, 1], down[e]
        for name, weight in zip(PROJECTIONS, weights, strict=True):
            tensors[f"mlp.experts.{e}.{name}.weight"] = weight
    return {prefix + name: t for name, t in tensors.items()}


def adapter(make, s, rank, attention=False):
    """Factors of every expert, one pair for each of its projections, and with `attention` of its
    projections, too; alpha is twice the rank."""
    std_b = DELTA / (2 * math.sqrt(rank))
    tensors = {}
    q, kv = s.heads * s.head, s.kv_heads * s.head
    linear = {"q": (q, s.hidden), "k": (kv, s.hidden), "v": (kv, s.hidden), "o": (s.hidden, q)}
    for i in range(s.layers):
        for name, (rows, columns) in linear.items() if attention else ():
            key = f"base_model.model.model.layers.{i}.self_attn.{name}_proj"
            a = make.normal(rank, columns, std=1 / math.sqrt(columns))
            tensors[f"{key}.lora_A.weight"] = a
            tensors[f"{key}.lora_B.weight"] = make.normal(rows, rank, std=std_b)
        sizes = (s.inter, s.hidden, 1), (s.inter, s.hidden, 1), (s.hidden, s.inter, 2)
        for name, (rows, columns, size) in zip(PROJECTIONS, sizes, strict=True):
            a = make.normal(s.experts, rank, columns, std=1 / math.sqrt(columns))
            b = make.normal(s.experts, rows, rank, std=size * std_b)
            for e in range(s.experts):
                key = f"base_model.model.model.layers.{i}.mlp.experts.{e}.{name}"
                tensors[f"{key}.lora_A.weight"] = a[e]
                tensors[f"{key}.lora_B.weight"] = b[e]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": [*PROJECTIONS, *(f"{name}_proj" for name in linear if attention)],
        "bias": "none",
    }
    return tensors, config


def settings(s):
    """config.json."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": s.hidden,
        "intermediate_size": 4 * s.inter,  # of dense layers, of which there are none
        "moe_intermediate_size": s.inter,
        "num_experts": s.experts,
        "num_experts_per_tok": s.top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": s.layers,
        "max_window_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head,
        "attention_bias": False,
        "vocab_size": VOCAB,
        "max_position_embeddings": 16384,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        **COMMON,
    }


def save(folder, name, tensors):
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {key: t.cpu().contiguous() for key, t in tensors.items()}
    save_file(tensors, folder / name, metadata={"format": "pt"})
    return dict.fromkeys(tensors, name)


def save_index(base, index):
    weight_map = {"metadata": {}, "weight_map": index}
    (base / "model.safetensors.index.json").write_text(json.dumps(weight_map))


def save_base(base, make, s, vocab=VOCAB, change=lambda tensors: tensors):
    """Write all weights, each layer as `change` of it; returns the file of each."""
    ends = {
        "model.embed_tokens.weight": make.normal(vocab, s.hidden, std=1.0),
        "model.norm.weight": ones(s.hidden),
        "lm_head.weight": make.normal(vocab, s.hidden, std=3 / math.sqrt(s.hidden)),
    }
    index = save(base, "ends.safetensors", ends)
    for i in range(s.layers):
        tensors = change(layer(make, s, f"model.layers.{i}."))
        index |= save(base, f"layer-{i:02}.safetensors", tensors)
    return index


def save_adapter(folder, tensors, config):
    save(folder, "adapter_model.safetensors", tensors)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1))


def describe(out, config, index, adapters, shape):
    """What makes a model of the files of weights in OUT/base, and the manifest."""
    base = out / "base"
    (base / "config.json").write_text(json.dumps(config, indent=1))
    save_index(base, index)
    manifest = {
        "base": str(base),
        "adapters": [str(a) for a in adapters],
        "vocab": config["vocab_size"],
        "shape": shape,
    }
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1))


def save_tokenizer(folder, vocab=VOCAB):
    """A word for each token, for engines that look for a tokenizer though they are given ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(vocab)}, unk_token="<0>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": "<0>", "pad_token": "<1>", "eos_token": "<2>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--out", type=pathlib.Path, required=True)
    p.add_argument("--preset", choices=PRESETS, default="tiny")
    p.add_argument("--layers", type=int, help="(default: the preset's)")
    p.add_argument("--adapters", default="16,16,64,64", help="ranks, commas between")
    p.add_argument("--attention", action="store_true", help="adapters of attention, too")
    args = p.parse_args(argv)
    shape = PRESETS[args.preset]
    shape = replace(shape, layers=args.layers or shape.layers)
    make = Maker(device())
    shutil.rmtree(args.out, ignore_errors=True)
    base = args.out / "base"
    index = save_base(base, make, shape)
    save_tokenizer(base)
    adapters = []
    for i, rank in enumerate((int(r) for r in args.adapters.split(",")), 1):
        adapters.append(args.out / f"lora{i}-r{rank}")
        save_adapter(adapters[-1], *adapter(make, shape, rank, args.attention))
    describe(args.out, settings(shape), index, adapters, asdict(shape))
    print(f"made {base} and {len(adapters)} adapters on {make.device}")


if __name__ == "__main__":
    main()
