"""Small checkpoint folders of MoE models, made by the quantizers that people use.

    python make_folders.py TOOL OUT [ARCHITECTURE/SCHEME ...]

TOOL is "llm-compressor", "auto-round" or "gptqmodel", and runs in an environment of its own
(requirements-TOOL.txt), without moelora. Writes OUT/plain/ARCHITECTURE, random models in bfloat16,
and OUT/TOOL/ARCHITECTURE/SCHEME. What a tool cannot make is written as its error, `error.txt`.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import torch
import transformers

COMMON = {"vocab_size": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
COMMON |= {"hidden_size": 256, "intermediate_size": 256, "max_position_embeddings": 256}
COMMON |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
COMMON |= {"head_dim": 64, "num_experts_per_tok": 2}
DEEPSEEK = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1}
DEEPSEEK |= {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_rope_head_dim": 64, "v_head_dim": 64}
DEEPSEEK |= {"qk_nope_head_dim": 64, "num_key_value_heads": 4, "first_k_dense_replace": 1}
ARCHITECTURES = {
    "qwen3_moe": ("Qwen3MoeConfig", {"num_experts": 4, "moe_intermediate_size": 256}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "minimax_m2": ("MiniMaxM2Config", {"num_local_experts": 4, "rotary_dim": 64}),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 4}),
    "deepseek_v3": ("DeepseekV3Config", {**DEEPSEEK, "moe_intermediate_size": 256}),
}
ROUTERS = ["re:.*mlp[.]gate$", "re:.*block_sparse_moe[.]gate$", "re:.*router$", "re:.*_gate$"]


@torch.no_grad()
def plain(out: Path, name: str) -> Path:
    folder = out / "plain" / name
    if folder.is_dir():
        return folder
    kind, sizes = ARCHITECTURES[name]
    config = getattr(transformers, kind)(**{**COMMON, **sizes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for key, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.05)
        elif key.endswith("bias"):
            parameter.normal_(std=0.1)
    model.bfloat16().save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)  # gptqmodel loads one
    return folder


# ---- llm-compressor ----

LLM_COMPRESSOR = {
    **{name: name for name in ("W4A16", "W4A16_ASYM", "W8A16", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK")},
    **{name: name for name in ("NVFP4", "NVFP4A16", "MXFP4A16", "MXFP8A16")},
    "W4A16_experts": "W4A16",  # attention stays in bfloat16
    "FP8_attention_W4A16_experts": None,
    "FP8_DYNAMIC_kv_cache": "FP8_DYNAMIC",
    "W4A16_lm_head": "W4A16",
}


def llm_compressor(source: Path, target: Path, scheme: str) -> None:
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    preset, ignore, options = LLM_COMPRESSOR[scheme], [*ROUTERS], {}
    if scheme != "W4A16_lm_head":
        ignore.append("lm_head")
    if scheme == "W4A16_experts":
        ignore.append("re:.*self_attn.*")
    if preset is not None:
        what = {"targets": "Linear", "scheme": preset}
    else:
        from compressed_tensors.quantization import preset_name_to_scheme

        experts = preset_name_to_scheme("W4A16", ["re:.*experts.*"])
        attention = preset_name_to_scheme("FP8_DYNAMIC", ["re:.*self_attn.*proj$"])
        what = {"config_groups": {"experts": experts, "attention": attention}}
    if scheme.endswith("kv_cache"):
        cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
        what["kv_cache_scheme"] = {**cache, "dynamic": False}
    if scheme in ("NVFP4", "FP8_DYNAMIC_kv_cache"):  # scales of activations want samples
        ids = torch.randint(3, 256, (4, 16), generator=torch.Generator().manual_seed(0))
        rows = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids]
        options["dataset"] = torch.utils.data.DataLoader(rows)
        options |= {"num_calibration_samples": 4, "max_seq_length": 16}
        options["processor"] = word_tokenizer()  # or it looks for that of the model
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    recipe = QuantizationModifier(**what, ignore=ignore)
    oneshot(model=model, recipe=recipe, **options)
    model.save_pretrained(target, save_compressed=True)


# ---- AutoRound ----

AUTO_ROUND = {  # bits, group, symmetric, format
    "auto_gptq": (4, 128, True, "auto_round"),
    "gptqmodel_asym": (4, 128, False, "auto_round:gptqmodel"),
    "auto_round_asym": (4, 128, False, "auto_round"),
    "auto_awq": (4, 128, True, "auto_round:auto_awq"),
    "auto_awq_asym": (4, 128, False, "auto_round:auto_awq"),
    "as_gptq": (4, 128, True, "auto_gptq"),
    "as_awq": (4, 128, False, "auto_awq"),
    "as_llm_compressor": (4, 128, True, "llm_compressor"),
    "bits_8": (8, 128, True, "auto_round"),
}


def auto_round(source: Path, target: Path, scheme: str) -> None:
    from auto_round import AutoRound

    bits, group, sym, form = AUTO_ROUND[scheme]
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    tokenizer = word_tokenizer()
    options = {"iters": 0, "nsamples": 1, "seqlen": 16, "disable_opt_rtn": True}
    rounder = AutoRound(model, tokenizer, bits=bits, group_size=group, sym=sym, **options)
    rounder.quantize_and_save(str(target), format=form)
    for inner in target.glob("*-w*g*"):  # where newer releases put the files
        for file in inner.iterdir():
            file.rename(target / file.name)
        inner.rmdir()


def word_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(255)} | {"[UNK]": 255}
    own = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=own, unk_token="[UNK]", pad_token="w0"
    )


# ---- GPTQModel ----

GPTQMODEL = {  # of QuantizeConfig
    "gptq": {"bits": 4, "group_size": 128, "sym": True, "desc_act": False},
    "gptq_asym": {"bits": 4, "group_size": 128, "sym": False, "desc_act": False},
    "gptq_act_order": {"bits": 4, "group_size": 128, "desc_act": True, "act_group_aware": False},
    "gptq_8bit": {"bits": 8, "group_size": 128, "desc_act": False},
    "awq": {"bits": 4, "group_size": 128, "quant_method": "awq", "format": "gemm"},
}


def gptqmodel(source: Path, target: Path, scheme: str) -> None:
    cores = os.cpu_count() or 1
    os.cpu_count = lambda: max(4, cores)  # gptqmodel 7.7 fails with fewer
    from gptqmodel import GPTQModel, QuantizeConfig

    # "original": others compile an extension first.
    config = QuantizeConfig(**GPTQMODEL[scheme], pack_impl="original")
    model = GPTQModel.load(str(source), config, device="cpu")
    make = torch.Generator().manual_seed(0)
    rows = torch.randint(3, 256, (16, 64), generator=make)
    model.quantize([{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows])
    model.save(str(target))


TOOLS = {
    "llm-compressor": (llm_compressor, LLM_COMPRESSOR),
    "auto-round": (auto_round, AUTO_ROUND),
    "gptqmodel": (gptqmodel, GPTQMODEL),
}


def main() -> int:
    tool, out, *only = sys.argv[1:]
    make, schemes = TOOLS[tool]
    out = Path(out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    os.chdir(out)  # where gptqmodel puts its logs
    for name in ARCHITECTURES:
        for scheme in schemes:
            target = out / tool / name / scheme
            if (only and f"{name}/{scheme}" not in only) or target.is_dir():
                continue
            try:
                make(plain(out, name), target, scheme)
            except Exception as error:  # of a tool, in whatever way
                traceback.print_exc()
                target.mkdir(parents=True, exist_ok=True)
                (target / "error.txt").write_text(f"{type(error).__name__}: {error}"[:500])
    return 0


if __name__ == "__main__":
    sys.exit(main())
