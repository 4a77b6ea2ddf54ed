"""The models that people name: how each is published, and where moelora serves and trains it."""

import ast
import re
from typing import NamedTuple

import pandas as pd

from benchmarks import ROOT
from benchmarks.tables.cases import markdown


class Model(NamedTuple):
    """`model_type` of its configuration, formats of the experts in its publisher's checkpoints (as
    recipes, tests and issues of vLLM 0.33.0 name them), and the experts' activation."""

    model_type: str
    published: str
    activation: str = "silu"


MODELS = {
    "Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder": Model("qwen3_moe", "bf16, FP8 blocks, INT4"),
    "Qwen3-Next-80B-A3B": Model("qwen3_next", "bf16, FP8 blocks"),
    "Qwen3-VL-30B-A3B": Model("qwen3_vl_moe", "bf16, FP8 blocks"),
    "Qwen3.5, Mixture-of-Experts": Model("qwen3_5_moe", "bf16, FP8 blocks, INT4"),
    "gpt-oss-20b, gpt-oss-120b": Model("gpt_oss", "MXFP4", "swigluoai"),
    "DeepSeek-V3, V3.1, R1": Model("deepseek_v3", "FP8 blocks"),
    "DeepSeek-V3.2": Model("deepseek_v32", "FP8 blocks"),
    "Kimi-K2": Model("kimi_k2", "FP8 blocks, INT4"),
    "GLM-4.5, GLM-4.6": Model("glm4_moe", "bf16, FP8"),
    "MiniMax-M2": Model("minimax_m2", "FP8 blocks"),
    "Llama-4 Scout, Maverick": Model("llama4", "bf16, FP8"),
    "Mixtral-8x7B, 8x22B": Model("mixtral", "bf16"),
    "ERNIE-4.5": Model("ernie4_5_moe", "bf16"),
    "Granite 3, MoE": Model("granitemoe", "bf16"),
    "Granite 4, hybrid": Model("granitemoehybrid", "bf16, FP8"),
    "Nemotron 3 Nano": Model("nemotron_h", "bf16, FP8, NVFP4", "relu2"),
    "Phi-3.5-MoE": Model("phimoe", "bf16"),
    "OLMoE": Model("olmoe", "bf16"),
}
# Models that engines run by the class of another one.
AS = {"kimi_k2": "deepseek_v3"}
OF_VLLM = ("bf16", "FP8", "MXFP4", "NVFP4", "INT4")
OF_SGLANG = ("bf16", "FP8 blocks", "NVFP4", "INT4 of compressed-tensors")
FORMATS = (*OF_VLLM, "NF4")  # of transformers
ALL = "all"
# What moelora takes in an engine, by activation. tests/engines hold these against the plugins, and
# tests/huggingface/test_named_models.py trains and serves a small model of each in FORMATS.
TAKEN = {
    "vLLM": {"silu": OF_VLLM, "relu2": OF_VLLM, "swigluoai": ("bf16", "MXFP4")},
    "SGLang": {"silu": OF_SGLANG, "relu2": OF_SGLANG, "swigluoai": ()},
}
# What was run on GPUs: benchmarks/results, and where files are not kept, the notebook.
RUN = {
    ("vLLM", "qwen3_moe"): ("bf16", "FP8", "NVFP4", "INT4"),
    ("vLLM", "gpt_oss"): ("MXFP4",),
    ("vLLM", "mixtral"): ("bf16",),
    ("vLLM", "olmoe"): ("bf16",),
    ("SGLang", "qwen3_moe"): ("bf16", "FP8 blocks", "NVFP4"),
}


def in_engine(engine, model):
    taken, run = TAKEN[engine][model.activation], RUN.get((engine, model.model_type))
    forms = ALL if taken == TAKEN[engine]["silu"] else ", ".join(taken)
    return f"{forms}; run: {', '.join(run)}" if run else f"{forms}; not tried" if taken else "no"


def of_vllm(model, reached):
    """The form of an adapter."""
    kind = AS.get(model.model_type, model.model_type)
    if reached.get(kind) != "yes":
        return "not written"
    return "as PEFT writes it" if kind in stacked() else "`--per-expert`"


def architectures():
    """{model_type: what docs/architectures.md says of it in transformers: yes, no or ?}."""
    text = (ROOT / "docs/architectures.md").read_text()
    return dict(re.findall(r"^\| `([\w-]+)`(?: \*)? \| (\S+) \|", text, re.M))


def stacked():
    """Models whose experts vLLM reads as stacks, of moelora.adapters.engine_names' source."""
    source = (ROOT / "moelora/adapters/engine_names.py").read_text()
    (names,) = re.findall(r"^STACKED = frozenset\(\n(.*?)\.split", source, re.M | re.S)
    return ast.literal_eval(f"({names})").split()


def models():
    reached, listed = architectures(), [", ".join(taken["silu"]) for taken in TAKEN.values()]
    said = [[f"*{ALL}: these formats*", "-", "-", *listed, ", ".join(FORMATS), "-"]]
    for name, model in MODELS.items():
        row = [name, f"`{model.model_type}`", model.published]
        row += [in_engine(engine, model) for engine in TAKEN]
        other = AS.get(model.model_type)
        here = ALL if reached.get(model.model_type) == "yes" else "no"
        said.append([*row, f"as `{other}`" if other else here, of_vllm(model, reached)])
    titles = ["model", "`model_type`", "published in", "vLLM 0.33", "SGLang 0.5.23"]
    titles += ["transformers: served, trained", "adapter for vLLM"]
    return markdown(pd.DataFrame(said, columns=titles))
