"""Small checkpoint folders with quantized experts, made from random weights.

As the real ones have it: gpt-oss with MXFP4 experts, all of a layer in one tensor; Qwen3-MoE with
INT4 ones, in tensors of GPTQ, AWQ or compressed-tensors for each expert, or with FP8 ones, in
blocks as Qwen and DeepSeek publish them or by rows as compressed-tensors does, or with NF4 ones of
bitsandbytes. Attention is FP8 or NF4 too where experts are; routers, embeddings and biases are
bfloat16.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import Tensor

from moelora.operators.formats import FORMATS

COMMON = {
    "vocab_size": 128,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "num_experts_per_tok": 2,
}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def gpt_oss() -> transformers.PreTrainedConfig:
    return transformers.GptOssConfig(**COMMON, intermediate_size=192, num_local_experts=8)


def qwen3_moe() -> transformers.PreTrainedConfig:
    sizes = {"intermediate_size": 192, "moe_intermediate_size": 192, "num_experts": 8}
    return transformers.Qwen3MoeConfig(**COMMON, **sizes, norm_topk_prob=True)


def nibbles_to_words(q: Tensor, order: Sequence[int] = range(8)) -> Tensor:
    """Eight numbers of the last dimension in an int32; number order[i] in the nibble i."""
    shifts = torch.arange(0, 32, 4)
    total = (q.unflatten(-1, (-1, 8))[..., list(order)] << shifts).sum(-1)
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


def mxfp4(w: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """(E, N, K) float -> the suffixes and tensors of gpt-oss, and the numbers that they mean."""
    groups = w.unflatten(-1, (-1, 32))
    largest = groups.abs().amax(-1, keepdim=True).clamp(min=2.0**-20)
    exponents = torch.floor(torch.log2(largest)) - 2
    scaled = groups / torch.exp2(exponents)
    q = (scaled[..., None] - E2M1).abs().argmin(-1)
    tensors = {
        "_blocks": (q[..., 0::2] | q[..., 1::2] << 4).to(torch.uint8),
        "_scales": (exponents + 127).squeeze(-1).to(torch.uint8),
    }
    return tensors, (E2M1[q] * torch.exp2(exponents)).flatten(-2)


def _int4(w: Tensor, group: int, zero: int) -> tuple[Tensor, Tensor, Tensor]:
    """(N, K) float -> numbers, scales of groups, and what they mean."""
    groups = w.unflatten(-1, (-1, group))
    scales = (groups.abs().amax(-1, keepdim=True) / min(zero, 15 - zero)).half().float()
    q = (torch.round(groups / scales) + zero).clamp(0, 15).long()
    return q.flatten(-2), scales.squeeze(-1), ((q - zero) * scales).flatten(-2)


def gptq(w: Tensor, group: int) -> tuple[dict[str, Tensor], Tensor]:
    """(N, K) float -> the tensors of one linear layer, with zero points of 7."""
    q, scales, meant = _int4(w, group, 7)
    stored = torch.full((scales.size(1), w.size(0)), 7 - 1)  # the format adds 1
    tensors = {
        ".qweight": nibbles_to_words(q).t(),
        ".scales": scales.t().half(),
        ".qzeros": nibbles_to_words(stored),
        ".g_idx": torch.arange(w.size(1), dtype=torch.int32) // group,
    }
    return tensors, meant


def awq(w: Tensor, group: int) -> tuple[dict[str, Tensor], Tensor]:
    """(N, K) float -> the tensors of one linear layer, with zero points of 7."""
    q, scales, meant = _int4(w, group, 7)
    tensors = {
        ".qweight": nibbles_to_words(q.t(), AWQ_ORDER),
        ".scales": scales.t().half(),
        ".qzeros": nibbles_to_words(torch.full_like(scales.t().long(), 7), AWQ_ORDER),
    }
    return tensors, meant


def compressed_tensors(w: Tensor, group: int) -> tuple[dict[str, Tensor], Tensor]:
    """(N, K) float -> the tensors of one linear layer, symmetric."""
    q, scales, meant = _int4(w, group, 8)
    tensors = {
        ".weight_packed": nibbles_to_words(q),
        ".weight_scale": scales.half(),
        ".weight_shape": torch.tensor(w.shape),
    }
    return tensors, meant


def fp8_block(w: Tensor, side: int) -> tuple[dict[str, Tensor], Tensor]:
    """(N, K) float -> e4m3 with a scale for every block of `side` rows and columns."""
    rows, columns = (-(-size // side) for size in w.shape)
    padded = torch.nn.functional.pad(w, (0, columns * side - w.size(1), 0, rows * side - w.size(0)))
    blocks = padded.unflatten(1, (-1, side)).unflatten(0, (-1, side))
    scales = blocks.abs().amax((1, 3)) / 448
    spread = scales.repeat_interleave(side, 0).repeat_interleave(side, 1)
    spread = spread[: w.size(0), : w.size(1)]
    q = (w / spread).to(torch.float8_e4m3fn)
    return {".weight": q, ".weight_scale_inv": scales}, q.float() * spread


def fp8_channel(w: Tensor, group: int) -> tuple[dict[str, Tensor], Tensor]:
    """(N, K) float -> e4m3 with a scale for every row, in bfloat16."""
    scales = (w.abs().amax(1, keepdim=True) / 448).bfloat16()
    q = (w / scales.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {".weight": q, ".weight_scale": scales}, q.float() * scales.float()


def nf4(w: Tensor, block: int) -> tuple[dict[str, Tensor], Tensor]:
    """(N, K) float -> NF4 codes of bitsandbytes, with the largest magnitude of each block."""
    codes = torch.tensor(next(f.codes for f in FORMATS if f.kernel == "nf4"))
    blocks = w.float().reshape(-1, block)
    absmax = blocks.abs().amax(1, keepdim=True)
    q = (blocks / absmax).unsqueeze(-1).sub(codes).abs().argmin(-1)
    state = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": list(w.shape)}
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    pairs = q.reshape(-1, 2)
    tensors = {
        ".weight": (pairs[:, :1] << 4 | pairs[:, 1:]).to(torch.uint8),
        ".weight.absmax": absmax.flatten(),
        ".weight.quant_map": codes,
        ".weight.quant_state.bitsandbytes__nf4": text,
    }
    return tensors, (codes[q] * absmax).view_as(w)


FP8 = {"fp8": fp8_block, "float-quantized": fp8_channel}
ATTENTION = {**FP8, "bitsandbytes": nf4}
LINEAR = {"gptq": gptq, "awq": awq, "compressed-tensors": compressed_tensors, **ATTENTION}


def settings(kind: str, group: int) -> dict:
    """`quantization_config` of config.json."""
    if kind == "mxfp4":
        plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
        return {"quant_method": kind, "modules_to_not_convert": [*plain, "model.embed_tokens"]}
    if kind == "gptq":
        config = {"bits": 4, "group_size": group, "sym": False, "desc_act": False}
        return {"quant_method": kind, **config}
    if kind == "awq":
        config = {"bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
        return {"quant_method": kind, **config}
    if kind == "fp8":
        config = {"fmt": "e4m3", "activation_scheme": "dynamic"}
        return {"quant_method": kind, **config, "weight_block_size": [group, group]}
    if kind == "bitsandbytes":
        config = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
        return {"quant_method": kind, **config, "llm_int8_skip_modules": ["lm_head"]}
    if kind == "float-quantized":
        weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
        inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
        linear = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        config = {"ignore": ["lm_head", "re:.*mlp.gate$"], "config_groups": {"group_0": linear}}
        return {"quant_method": "compressed-tensors", "format": kind, **config}
    weights = {"num_bits": 4, "type": "int", "symmetric": True}
    weights |= {"strategy": "group", "group_size": group}
    return {
        "quant_method": kind,
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


@torch.no_grad()
def make_folder(
    folder: Path, kind: str, group: int = 32, config: transformers.PreTrainedConfig | None = None
) -> transformers.PreTrainedModel:
    """Writes a checkpoint; returns the model, in float32, whose experts have what it means.

    Parameters
    ----------
    folder : Path
        Where to.
    kind : {"mxfp4", "gptq", "awq", "compressed-tensors", "fp8", "float-quantized", "bitsandbytes"}
        The format; MXFP4 is a gpt-oss, the others are a Qwen3-MoE.
    group : int
        Columns that share a scale of INT4: 32 or 64. Rows and columns of a block of "fp8"; elements
        of one of "bitsandbytes".
    config : PreTrainedConfig, optional
        Of another model, whose experts are concatenated as those of Qwen3-MoE.
    """
    torch.manual_seed(0)
    if config is None:
        config = gpt_oss() if kind == "mxfp4" else qwen3_moe()
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        if any(part in name for part in (".experts.", "lm_head", ".gate.", ".router.")):
            parameter.normal_(std=0.15)
        parameter.copy_(parameter.bfloat16())
    tensors = {}
    for name, parameter in model.state_dict().items():
        where, _, projection = name.rpartition(".")
        if kind in ATTENTION and name.endswith("_proj.weight"):
            found, meant = ATTENTION[kind](parameter, group)
            parameter.copy_(meant)
            tensors |= {where + suffix: tensor for suffix, tensor in found.items()}
        elif not where.endswith(".experts") or projection.endswith("_bias"):
            tensors[name] = parameter.bfloat16()
        elif kind == "mxfp4":  # this model has (E, K, N), its checkpoint (E, N, K)
            found, meant = mxfp4(parameter.transpose(1, 2))
            parameter.copy_(meant.transpose(1, 2))
            tensors |= {name + suffix: tensor for suffix, tensor in found.items()}
        else:
            quantize = LINEAR[kind]
            parts = ["gate_proj", "up_proj"] if projection == "gate_up_proj" else [projection]
            for expert, stacked in enumerate(parameter):
                for part, weight in zip(parts, stacked.chunk(len(parts)), strict=True):
                    found, meant = quantize(weight, group)
                    weight.copy_(meant)
                    inner = f"{where}.{expert}.{part}"
                    tensors |= {inner + suffix: tensor for suffix, tensor in found.items()}
    config.architectures = [type(model).__name__]
    config.quantization_config = settings(kind, group)
    config.save_pretrained(folder)
    del config.quantization_config
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    return model.eval()


def make_adapters(model: transformers.PreTrainedModel, folder: Path) -> dict[str, Path]:
    """Adapters of several ranks with random factors, saved by PEFT; their folders by name."""
    folders = {}
    for seed, (name, rank) in enumerate({"law": 4, "code": 8, "poems": 16}.items()):
        torch.manual_seed(seed)
        targets = {"target_parameters": TARGETS, "target_modules": []}
        config = LoraConfig(r=rank, lora_alpha=rank, init_lora_weights=False, **targets)
        wrapped = get_peft_model(model, config)
        for key, parameter in wrapped.named_parameters():
            if "lora_" in key:
                parameter.data.normal_(std=0.15)
        folders[name] = folder / name
        wrapped.save_pretrained(folders[name])
        wrapped.unload()
    return folders
