"""A gpt-oss checkpoint of random MXFP4 experts, the same unquantized, and adapters for it.

    python -m benchmarks.engines.vllm_gpt_oss --out /tmp/tiny-mxfp4 --layers 4 --ranks 16,64

OUT and OUT-dense have the same numbers: MXFP4 is exact in bfloat16. The layers are those of
gpt-oss-20b, biases and all; adapters have the layout of PEFT's `target_parameters`. With
--only-quantized there is no OUT-dense.
"""

import argparse
import math
import pathlib
import shutil

import torch

from benchmarks.engines import engine_model
from benchmarks.engines.engine_model import COMMON, VOCAB, describe, save, save_adapter

HIDDEN, INTER, EXPERTS, TOP_K, HEADS, KV_HEADS, HEAD = 2880, 2880, 32, 4, 64, 8, 64
VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
PLAIN = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


class Maker(engine_model.Maker):
    def mxfp4(self, rows, columns):
        """Blocks, scales, and the numbers (E, rows, columns), of variance near 1 / columns."""
        shape = (EXPERTS, rows, columns // 32)
        draw = {"generator": self.random, "device": self.device, "dtype": torch.uint8}
        blocks = torch.randint(256, (*shape, 16), **draw)
        most = 127 - round(math.log2(2.93 * math.sqrt(columns)))
        scales = torch.randint(most - 1, most + 1, shape, **draw)
        nibbles = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
        powers = torch.exp2(scales.float() - 127)[..., None]
        dense = (VALUES.to(self.device)[nibbles.long()] * powers).bfloat16()
        return blocks, scales, dense.flatten(2)

    def layer(self, prefix):
        """Tensors of one layer: common ones, those of the quantized and those of the dense
        checkpoint."""
        q, kv = HEADS * HEAD, KV_HEADS * HEAD
        std = 1 / math.sqrt(HIDDEN)
        common = {}
        for name, rows, columns in (
            ("q_proj", q, HIDDEN),
            ("k_proj", kv, HIDDEN),
            ("v_proj", kv, HIDDEN),
            ("o_proj", HIDDEN, q),
        ):
            scale = 1 / math.sqrt(columns)
            common[f"self_attn.{name}.weight"] = self.normal(rows, columns, std=scale)
            common[f"self_attn.{name}.bias"] = self.normal(rows, std=0.1)
        common["self_attn.sinks"] = self.normal(HEADS, std=1.0)
        common["mlp.router.weight"] = self.normal(EXPERTS, HIDDEN, std=1.5 * std)
        common["mlp.router.bias"] = self.normal(EXPERTS, std=0.1)
        for name in ("input_layernorm", "post_attention_layernorm"):
            common[f"{name}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
        common["mlp.experts.gate_up_proj_bias"] = self.normal(EXPERTS, 2 * INTER, std=0.1)
        common["mlp.experts.down_proj_bias"] = self.normal(EXPERTS, HIDDEN, std=0.1)
        quantized, plain = {}, {}
        for name, rows, columns in (
            ("gate_up_proj", 2 * INTER, HIDDEN),
            ("down_proj", HIDDEN, INTER),
        ):
            blocks, scales, dense = self.mxfp4(rows, columns)
            quantized[f"mlp.experts.{name}_blocks"] = blocks
            quantized[f"mlp.experts.{name}_scales"] = scales
            plain[f"mlp.experts.{name}"] = dense.transpose(1, 2)
        return [{f"{prefix}{n}": t for n, t in part.items()} for part in (common, quantized, plain)]

    def adapter(self, folder, rank, layers):
        """A of variance 1 / columns; B so that the delta is half as large as the base product."""
        tensors = {}
        for i in range(layers):
            experts = f"base_model.model.model.layers.{i}.mlp.experts"
            for name, rows, columns in (
                (f"{experts}.base_layer", 2 * INTER, HIDDEN),
                (experts, HIDDEN, INTER),
            ):
                a = self.normal(EXPERTS * rank, columns, std=1 / math.sqrt(columns))
                b = self.normal(rows, rank * EXPERTS, std=0.25 / math.sqrt(rank))
                tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = a, b
        config = {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": 2 * rank,
            "target_modules": ["experts"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            "bias": "none",
        }
        save_adapter(folder, tensors, config)


def settings(layers):
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": HIDDEN,
        "intermediate_size": INTER,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "vocab_size": VOCAB,
        "attention_bias": True,
        "sliding_window": 128,
        "layer_types": [("sliding", "full")[i % 2] + "_attention" for i in range(layers)],
        "max_position_embeddings": 131072,
        "rope_scaling": ROPE,
        "rope_theta": ROPE["rope_theta"],
        "rms_norm_eps": 1e-5,
        "swiglu_limit": 7.0,
        **COMMON,
    }


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--out", type=pathlib.Path, required=True)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--ranks", default="16,16,64,64")
    p.add_argument("--only-quantized", action="store_true", help="no OUT-dense")
    p.add_argument("--vocab", type=int, default=VOCAB, help="tokens")
    args = p.parse_args(argv)
    make = Maker(engine_model.device())
    folders = [args.out, args.out.with_name(f"{args.out.name}-dense")]
    folders = folders[:1] if args.only_quantized else folders
    indices = [{} for _ in folders]
    for out in folders:
        shutil.rmtree(out, ignore_errors=True)

    def put(name, *parts):
        for out, index, tensors in zip(folders, indices, parts, strict=False):
            index.update(save(out / "base", f"{name}.safetensors", tensors))

    ends = {
        "model.embed_tokens.weight": make.normal(args.vocab, HIDDEN, std=1.0),
        "model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
        "lm_head.weight": make.normal(args.vocab, HIDDEN, std=3 / math.sqrt(HIDDEN)),
    }
    put("ends", ends, ends)
    for i in range(args.layers):
        common, quantized, plain = make.layer(f"model.layers.{i}.")
        put(f"layer-{i:02}", common | quantized, common | plain)

    adapters = []
    for i, rank in enumerate(int(r) for r in args.ranks.split(",")):
        adapters.append(args.out / f"lora{i + 1}-r{rank}")
        make.adapter(adapters[-1], rank, args.layers)

    config = settings(args.layers) | {"vocab_size": args.vocab}
    mxfp4 = {"quant_method": "mxfp4", "modules_to_not_convert": PLAIN}
    shape = {"hidden": HIDDEN, "inter": INTER, "experts": EXPERTS, "layers": args.layers}
    for out, index, more in zip(
        folders, indices, ({"quantization_config": mxfp4}, {}), strict=False
    ):
        describe(out, config | more, index, adapters, shape)
    print(f"made {' and '.join(str(f) for f in folders)} on {make.device}")


if __name__ == "__main__":
    main()
