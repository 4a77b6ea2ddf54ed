"""MoE layer described by a Hugging Face `config.json`."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from moelora.bench.formats import FORMATS
from moelora.bench.shapes import Model
from moelora.operators.experts import Activation

# Names of a layer's sizes in configurations, most specific first.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k", "experts_per_token")
HIDDEN = ("hidden_size", "d_model")
INTERMEDIATE = ("moe_intermediate_size", "expert_ffn_hidden_size", "ffn_hidden_size")
INTERMEDIATE += ("intermediate_size",)
NESTED = ("text_config", "llm_config", "ffn_config")
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "relu2": "relu2"}
ACTIVATIONS |= {"gelu": "gelu", "gelu_pytorch_tanh": "gelu"}


def is_config(text: str) -> bool:
    """Whether `text` is a configuration file or folder, rather than the name of a model."""
    return text.endswith(".json") or "/" in text or (Path(text) / "config.json").is_file()


def read(text: str, format: str | None = None) -> tuple[str, Model]:
    """(key, model) of a configuration or its folder. The weight format is `format`, or that of its
    `quantization_config`; ValueError names what is missing or unsupported.
    """
    path = Path(text)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a configuration: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a configuration: it holds a {type(config).__name__}")
    levels = [config, *(config[name] for name in NESTED if isinstance(config.get(name), dict))]
    gpt_oss = any(level.get("model_type") == "gpt_oss" for level in levels)
    names = EXPERTS, TOP_K, HIDDEN, INTERMEDIATE
    experts, top_k, hidden, inter = (number(path, levels, of_size) for of_size in names)
    kind = "swigluoai" if gpt_oss else activation(path, levels)
    name = config.get("_name_or_path") or config.get("name") or path.resolve().parent.name
    name = Path(str(name)).name or str(config.get("model_type", "model"))
    model = Model(name, experts, top_k, hidden, inter, kind, bias=gpt_oss)
    if not 1 <= model.top_k <= model.experts:
        raise ValueError(f"{path} chooses {model.top_k} of {model.experts} experts")
    if format is None:
        format = format_of(path, levels)
    return model.name, model.quantized(format if format in FORMATS else None)


def number(path: Path, levels: Iterable[Mapping[str, Any]], names: Iterable[str]) -> int:
    for level in reversed(list(levels)):  # nested levels are more specific about experts
        for name in names:
            value = level.get(name)
            if isinstance(value, list) and value:  # one per kind of expert
                value = value[0]
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    raise ValueError(f"{path} describes no mixture of experts: none of {', '.join(names)} is set")


def activation(path: Path, levels: Iterable[Mapping[str, Any]]) -> Activation:
    for level in levels:
        for name in ("hidden_act", "mlp_hidden_act", "hidden_activation", "ffn_act_fn"):
            value = level.get(name)
            value = value.get("name") if isinstance(value, dict) else value
            if value in ACTIVATIONS:
                return ACTIVATIONS[value]
            if value is not None:
                known = ", ".join(ACTIVATIONS)
                raise ValueError(f"{path}: {name} is {value!r}, wanted one of {known}")
    return "silu"


def format_of(path: Path, levels: Iterable[Mapping[str, Any]]) -> str | None:
    """A name of FORMATS, or None for weights that are not quantized."""
    for level in levels:
        quantized = level.get("quantization_config")
        if not isinstance(quantized, dict):
            continue
        method = str(quantized.get("quant_method"))
        if method in FORMATS:
            return method
        if method in ("gptq", "awq", "auto-round", "compressed-tensors") and bits(quantized) == 4:
            return "int4"
        raise ValueError(
            f"{path}: quant_method is {method!r}, of which there is no format to measure; "
            f"say one by --format: bf16, fp16, {', '.join(FORMATS)}"
        )
    return None


def bits(quantized: Mapping[str, Any]) -> int | None:
    """Bits per weight, as stated by GPTQ and AWQ or by compressed-tensors."""
    groups = (quantized.get("config_groups") or {}).values()
    weights = next(((group or {}).get("weights") or {} for group in groups), {})
    packed = weights.get("num_bits") if weights.get("type", "int") == "int" else None
    found = quantized.get("bits", quantized.get("w_bit", packed))
    return found if isinstance(found, int) else None
