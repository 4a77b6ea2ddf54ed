"""The models that people name: what each is called, and where it is served."""

import ast
import re

from benchmarks import ROOT
from benchmarks.tables.text import markdown

# Name, `model_type` of its configuration, formats of the experts in checkpoints of its publisher:
# those that recipes, tests and issues of vLLM 0.33.0 name.
MODELS = (
    ("Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder", "qwen3_moe", "bf16, FP8 blocks, INT4"),
    ("Qwen3-Next-80B-A3B", "qwen3_next", "bf16, FP8 blocks"),
    ("Qwen3-VL-30B-A3B", "qwen3_vl_moe", "bf16, FP8 blocks"),
    ("Qwen3.5, Mixture-of-Experts", "qwen3_5_moe", "bf16, FP8 blocks, INT4"),
    ("gpt-oss-20b, gpt-oss-120b", "gpt_oss", "MXFP4"),
    ("DeepSeek-V3, V3.1, R1", "deepseek_v3", "FP8 blocks"),
    ("DeepSeek-V3.2", "deepseek_v32", "FP8 blocks"),
    ("Kimi-K2", "kimi_k2", "FP8 blocks, INT4"),
    ("GLM-4.5, GLM-4.6", "glm4_moe", "bf16, FP8"),
    ("MiniMax-M2", "minimax_m2", "FP8 blocks"),
    ("Llama-4 Scout, Maverick", "llama4", "bf16, FP8"),
    ("Mixtral-8x7B, 8x22B", "mixtral", "16 bits"),
    ("ERNIE-4.5", "ernie4_5_moe", "bf16"),
    ("Granite 3, MoE", "granitemoe", "16 bits"),
    ("Granite 4, hybrid", "granitemoehybrid", "16 bits, FP8"),
    ("Nemotron 3 Nano", "nemotron_h", "bf16, FP8, NVFP4"),
    ("Phi-3.5-MoE", "phimoe", "16 bits"),
    ("OLMoE", "olmoe", "16 bits"),
)


def architectures():
    """{model_type: what docs/architectures.md says of it in transformers: yes, no or ?}."""
    text = (ROOT / "docs/architectures.md").read_text()
    return dict(re.findall(r"^\| `([\w-]+)`(?: \*)? \| (\S+) \|", text, re.M))


def stacked():
    """Models whose experts vLLM reads as stacks, of moelora.adapters.engine_names' source."""
    source = (ROOT / "moelora/adapters/engine_names.py").read_text()
    (names,) = re.findall(r"^STACKED = frozenset\(\n(.*?)\.split", source, re.M | re.S)
    return ast.literal_eval(f"({names})").split()


def checked():
    """Models whose names of experts are compared with vLLM's sources, of the tests' table."""
    source = (ROOT / "tests/support/vllm_names.py").read_text()
    return re.findall(r'^    "(\w+)": \(', source, re.M)


def table():
    reached, stacks, pairs = architectures(), stacked(), checked()
    rows = [
        [
            name,
            f"`{kind}`",
            formats,
            "as PEFT writes it" if kind in stacks else "`--per-expert`" if kind in pairs else "?",
            reached.get(kind, "no: no class of its own"),
        ]
        for name, kind, formats in MODELS
    ]
    titles = "model", "`model_type`", "published in", "adapter for vLLM", "transformers, training"
    return markdown(titles, rows)
