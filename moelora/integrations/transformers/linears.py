"""The linear layers and embeddings of a model, and how adapters apply to each.

There are three ways to serve a layer:

    "output"     the module returns W x (+ bias), with W in any format: plain, FP8, INT4, ...
    "inside"     the module multiplies by its weight and processes the product, as routers do
    "embedding"  the module takes token ids

Layers that cannot be served are listed with the reason; adapters with factors of them are refused.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from transformers import PreTrainedModel

from moelora.adapters import LinearLayer
from moelora.adapters.factors import DTYPES
from moelora.adapters.shards import Shard
from moelora.integrations.transformers.parallel import linear_shard

Way: TypeAlias = Literal["output", "inside", "embedding"]

# Name components inserted by compilers, FSDP, checkpointing and PEFT.
_WRAPPERS = re.compile(
    r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|module|base_layer)(?=\.|$)"
)
_EXPERT = re.compile(r"\.experts\.\d+(\.|$)")
_LINEAR_CALL = re.compile(r"\blinear\(|super\(\)\.forward\(")


@dataclass(frozen=True)
class Linear:
    """A layer of a model; `refusal` states why it cannot be served, "" if it can.

    `shard` is the part of the weight that this process computes with, None: all of it.
    """

    module: nn.Module
    layer: LinearLayer
    way: Way
    refusal: str = ""
    shard: Shard | None = None


def plain_name(name: str) -> str:
    """The name of a module without the components that wrappers insert."""
    return _WRAPPERS.sub("", name).lstrip(".")


def linear_layers(model: nn.Module, experts: Collection[str]) -> dict[str, Linear]:
    """All linear layers and embeddings of a model except its experts, by name.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    experts : collection of str
        Names from `moe_layers`. Modules within these are excluded; the innermost model that
        contains all of them is the text model.
    """
    every = model.named_modules()  # the innermost of wrapped modules comes last
    modules = {plain_name(name): module for name, module in every if ".lora_" not in name}
    text = _text_model(modules, experts)
    found = {}
    for name, module in modules.items():
        if any(name == e or name.startswith(f"{e}.") for e in experts):
            continue
        linear = _linear(name, module)
        if linear is None:
            continue
        refusal = linear.refusal or _elsewhere(name, text)
        if linear.way == "output":
            refusal = refusal or _unread(name, modules)
        way, shard = linear.way, None
        if way != "embedding":  # whose output is whole
            shard = linear_shard(module._parameters.get("weight"))
            # Before the collective that joins the outputs.
            way = "inside" if shard is not None else way
        if getattr(module, "_hf_quantized_needs_local_tp", False):
            refusal = refusal or "which is quantized and tensor parallel; load it in 16 bits"
        found[name] = Linear(module, linear.layer, way, refusal, shard)
    return found


def _text_model(modules: dict[str, nn.Module], experts: Collection[str]) -> str:
    """The name of the innermost model with all experts; "" if that is the outermost."""
    around = [
        name
        for name, module in modules.items()
        if isinstance(module, PreTrainedModel) and all(e.startswith(f"{name}.") for e in experts)
    ]
    return max(around, key=len, default="")


def _elsewhere(name: str, text: str) -> str:
    """Why a layer's tokens may differ from those of the batch; "" if they do not."""
    if _EXPERT.search(name):
        return "of experts that do not go through transformers' experts interface"
    if "." not in name or not text or name.startswith(f"{text}."):
        return ""
    return (
        f"which is outside {text} and takes other tokens than those of the text; merge these "
        "factors into the weights, or train without (exclude_modules)"
    )


def _linear(name: str, module: nn.Module) -> Linear | None:
    own = module._parameters.get("weight")
    cls: Any = type(module)
    if isinstance(module, nn.Embedding):
        layer = LinearLayer(name, module.num_embeddings, module.embedding_dim, embedding=True)
        return Linear(module, layer, "embedding")
    if (sizes := _sizes(module)) is not None:
        layer = LinearLayer(name, *sizes)
        is_own = cls.__module__.startswith("transformers.models.")
        if not is_own or cls.forward is nn.Linear.forward:
            return Linear(module, layer, "output")
    elif own is not None and own.dim() == 2:
        layer = LinearLayer(name, own.size(1), own.size(0))
    else:
        return None
    if own is not None and _multiplies_once(cls):
        return Linear(module, layer, "inside")
    if isinstance(module, nn.Linear):
        why = f"a {cls.__name__}, which computes something else than W x"
        return Linear(module, layer, "inside", why)
    return None


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    """Inputs and outputs of a linear layer, or of what looks like one of GPTQ, AWQ etc."""
    own = module._parameters.get("weight")
    is_matrix = not list(module.children()) and (own is None or own.dim() == 2)
    for names in (("in_features", "out_features"), ("infeatures", "outfeatures")):
        sizes: list[Any] = [getattr(module, name, None) for name in names]
        is_sized = all(isinstance(size, int) for size in sizes)
        if isinstance(module, nn.Linear) or (is_matrix and is_sized):
            return sizes[0], sizes[1]
    return None


@cache
def _multiplies_once(cls: Any) -> bool:
    """Whether `forward` has exactly one product, with the module's weight."""
    source = _text(cls.forward)
    own = "self.weight" in source or "super().forward(" in source
    return own and len(_LINEAR_CALL.findall(source)) == 1


def _unread(name: str, modules: dict[str, nn.Module]) -> str:
    """Why a delta to the layer's output may be ignored: its weight is read elsewhere."""
    parent, _, last = name.rpartition(".")
    around = modules.get(parent)
    kind: Any = type(around)
    # Reading only its shape, dtype or device is harmless, and common.
    read = re.compile(rf"\bself\.{re.escape(last)}\.weight\b(?!\.(dtype|device|shape|size|ndim)\b)")
    if around is None or not read.search(_source(kind)):
        return ""
    return f"whose weight {kind.__name__} reads without calling the layer"


@cache
def _source(cls: Any) -> str:
    """Source of the methods of a class, except those for initialization."""
    texts = []
    for base in cls.__mro__:
        if base.__module__.startswith("torch."):
            continue
        for name, function in vars(base).items():
            if callable(function) and name not in ("__init__", "_init_weights", "reset_parameters"):
                texts.append(_text(function))
    return "\n".join(texts)


def _text(function: object) -> str:
    try:
        return inspect.getsource(inspect.unwrap(function))  # type: ignore[arg-type] # callable
    except (OSError, TypeError):  # generated code
        return ""


def device_of(module: nn.Module) -> torch.device:
    """The device of a module's computation; for offloaded modules from accelerate's hooks."""
    hook = getattr(module, "_hf_hook", None)
    for one in getattr(hook, "hooks", (hook,)):
        where = getattr(one, "execution_device", None)
        if where is not None:
            return torch.device(f"cuda:{where}" if isinstance(where, int) else where)
    tensors = itertools.chain(module.parameters(), module.buffers())
    return next((t.device for t in tensors if not t.is_meta), torch.device("cpu"))


def plain_weight(module: nn.Module) -> torch.Tensor | None:
    """A layer's weight; None if quantized, offloaded or shared by processes."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dtype not in DTYPES:
        return None
    return None if weight.is_meta or hasattr(weight, "placements") else weight


def dtype_of(module: nn.Module, default: torch.dtype) -> torch.dtype:
    """The dtype of a layer's weight; `default` if quantized."""
    weight = module._parameters.get("weight")
    return default if weight is None or weight.dtype not in DTYPES else weight.dtype
