"""Which mixture-of-experts architectures of transformers reach moelora, and why others do not.

    python -m benchmarks.architectures --out docs/architectures.md

Every architecture whose code has a class of experts is made with its own default sizes, on the meta
device, and given to `moelora.integrations.transformers.enable`. Only the experts get memory, a few
numbers each, because their activation is found out by calling it.
"""

import argparse
import collections
import contextlib
import importlib
import io
import pathlib
import re
import sys

import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import moelora.integrations.transformers as moelora_hf
from moelora.integrations.transformers.empty import empty_model, factory
from moelora.integrations.transformers.projection import up_name

EXPERTS = re.compile(r"^class \w*(Experts?|MoE|MoeBlock)\b", re.M)

GEMMA = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2}
GEMMA |= {"moe_intermediate_size": 128}
INDEXER = {"n_heads": 4, "kv_heads": 1, "head_dim": 256, "budget": 1024, "compress_ratio": 4}
INDEXER = {f"indexer_{name}": size for name, size in INDEXER.items()}
INDEXER |= {"output_gate_type": "sigmoid"}
SPARSE = {"num_hidden_layers": 12, "mlp_layer_types": ["dense", *11 * ["sparse"]]}
# What default configurations leave out: without it they have no experts, or make no model.
FILLED = {
    "deepseek_ocr2": {"text_config": SPARSE},
    "diffusion_gemma": {"text_config": GEMMA},
    "doge": {"is_moe": True},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "gemma4": {"text_config": GEMMA},
    "gemma4_text": GEMMA,
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 8, "moe_topk": 2},
    "lfm2_moe": {"layer_types": 16 * ["conv", "full_attention"]},
    "qwen4_exp": {"text_config": INDEXER},
    "qwen4_exp_text": INDEXER,
}
TABLE = """\
# Architectures

Of {asked} mixture-of-experts architectures of transformers {version}, each made
from its default configuration, {reached} reach moelora in every layer. For the others `enable` of
`moelora.integrations.transformers` raises, with the reason. Where the default has no experts, or
makes no model, what it leaves out is filled in (*); a question mark stands where that is not
known.

Made by `python -m benchmarks.architectures --out docs/architectures.md`.

| `model_type` | reaches moelora | |
| --- | --- | --- |
"""


def architectures():
    """Model types whose modeling code has experts."""
    for model_type, config in sorted(CONFIG_MAPPING.items()):
        package = config.__module__.rpartition(".")[0]
        name = package.rpartition(".")[2]
        try:
            module = importlib.import_module(f"{package}.modeling_{name}")
        except ImportError:
            continue
        code = pathlib.Path(module.__file__).read_text()
        if EXPERTS.search(code) and factory(config()) is not None:
            yield model_type


def make(model_type):
    """A model without memory, but for tiny zero weights of experts with the experts interface."""
    filled = FILLED.get(model_type, {})
    model = empty_model(transformers.AutoConfig.for_model(model_type, **filled))
    for module in model.modules():
        if hasattr(module, "is_transposed") and hasattr(module, "has_gate"):
            for name, outer in ((up_name(module), 2), ("down_proj", 1)):
                shape = (1, 4, 4 * outer) if module.is_transposed else (1, 4 * outer, 4)
                setattr(module, name, nn.Parameter(torch.zeros(shape)))
    return model


def ask(model_type):
    """Whether every layer reaches moelora: "yes", "no" or "?"; and if not, why."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            model = make(model_type)
    except Exception as error:
        return "?", f"not made from its default configuration: {type(error).__name__}"
    try:
        moelora_hf.enable(model)
    except NotImplementedError as error:
        return "no", str(error)
    return "yes", ""


def table(rows):
    count = collections.Counter(answer for _, answer, _ in rows)
    sizes = {"asked": count["yes"] + count["no"], "reached": count["yes"]}
    text = TABLE.format(**sizes, version=transformers.__version__)
    for model_type, answer, reason in rows:
        filled = " *" if model_type in FILLED else ""
        text += f"| `{model_type}`{filled} | {answer} | {reason} |\n"
    return text


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--out", type=pathlib.Path, help="a Markdown file; absent: standard output")
    p.add_argument("--only", nargs="*", help="model types")
    args = p.parse_args(argv)
    rows = []
    for model_type in args.only or architectures():
        rows.append((model_type, *ask(model_type)))
        print(*rows[-1], file=sys.stderr, flush=True)
    if args.out:
        args.out.write_text(table(rows))
    else:
        print(table(rows))


if __name__ == "__main__":
    main()
