"""What an adapter changes: a forward of a small model of the same architecture, layer by layer.

The model has the layers of the configuration in small sizes and random weights. Each pair of
factors becomes a random one of these sizes, with the ranks that are not zero in the adapter. A
layer runs twice on the same input, with the adapter and without.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moelora.adapters.layers import Adapter, LinearPair, Pair
from moelora.adapters.write import per_expert_tensors, save
from moelora.integrations.transformers.adapters import load_adapters
from moelora.integrations.transformers.empty import empty_model, factory
from moelora.integrations.transformers.layers import moe_layers
from moelora.integrations.transformers.linears import linear_layers

ROWS, LENGTH, RANK = 2, 12, 4
MOST = 500_000_000  # parameters of a small model
# Sizes of configurations by the names that transformers' models have for them.
_NAMES = {
    1: "n_group topk_group n_groups mamba_n_groups",
    2: "num_key_value_heads linear_num_key_heads num_global_key_value_heads",
    4: "num_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts "
    "num_experts_per_tok top_k_experts moe_k moe_topk num_attention_heads index_n_heads "
    "linear_num_value_heads",
    8: "hidden_size_per_layer_input sliding_window index_topk",
    16: "q_lora_rank kv_lora_rank o_lora_rank head_dim global_head_dim rotary_dim v_head_dim "
    "qk_nope_head_dim qk_rope_head_dim index_head_dim linear_key_head_dim linear_value_head_dim",
    32: "intermediate_size moe_intermediate_size ffn_hidden_size shared_intermediate_size "
    "shared_expert_intermediate_size moe_shared_expert_intermediate_size",
    64: "hidden_size mamba_d_model",
    256: "vocab_size vocab_size_per_layer_input",
}
_SIZES = {name: size for size, names in _NAMES.items() for name in names.split()}
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")


def shrunk(config: Any) -> Any:
    """A copy of a configuration with small sizes and as many layers."""
    small = copy.deepcopy(config)
    for part in (small, *_parts(small)):
        part.allow_global_per_layer_attribute_access = True  # sizes that differ by layer
        heads = getattr(part, "num_attention_heads", None)
        all_heads = heads is not None and heads == getattr(part, "num_key_value_heads", None)
        for name, size in _SIZES.items():
            value = getattr(part, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > size:
                setattr(part, name, size)
        if getattr(part, "mamba_n_heads", None) and getattr(part, "mamba_expand", None):
            part.mamba_n_heads = 4
            part.mamba_d_head = part.mamba_expand * part.hidden_size // part.mamba_n_heads
        if all_heads:
            part.num_key_value_heads = part.num_attention_heads
        for name in _TOKENS:
            if isinstance(getattr(part, name, None), int):
                setattr(part, name, 0 if name == "pad_token_id" else None)
    small.quantization_config = None
    return small


def _parts(config: Any) -> Iterator[Any]:
    for name in getattr(config, "sub_configs", {}):
        if (part := getattr(config, name, None)) is not None:
            yield part
            yield from _parts(part)


def changed(config: Any, adapter: Adapter) -> dict[str, str]:
    """The layers that an adapter has factors of: "" if it changes the layer's output, else why not.

    Raises ValueError or NotImplementedError if no small model of this architecture is made, or it
    does not run.
    """
    small = shrunk(config)
    cls: Any = factory(small)
    generator = torch.Generator().manual_seed(0)
    try:
        count = sum(parameter.numel() for parameter in empty_model(small).parameters())
        if count > MOST:
            raise ValueError(f"it would have {count} parameters")
        make = getattr(cls, "_from_config", None) or cls.from_config
        model = make(small, dtype=torch.float32).eval()
        _fill(model, generator)
        layers = moe_layers(model)
        linears = linear_layers(model, layers)
    except Exception as error:
        raise ValueError(f"no small {type(config).__name__}: {error!s:.200}") from error
    reasons, little = _little(adapter, layers, linears, generator)
    with tempfile.TemporaryDirectory() as folder:
        shapes = {layer.name: layer for _, layer in layers.values()}
        of_linears = {name: one.layer for name, one in linears.items()}
        save(folder, *per_expert_tensors(little, shapes, of_linears))
        load_adapters(model, {"a": folder})
    modules: dict[str, nn.Module] = {name: layers[name][0] for name in little.experts}
    modules |= {name: linears[name].module for name in little.linears}
    try:
        for name, differs in _differing(model, modules, generator).items():
            if not differs and not reasons[name]:
                reasons[name] = "a forward of text does not run it, or its output is the same"
    except Exception as error:
        raise ValueError(f"a small {type(model).__name__} does not run: {error!s:.200}") from error
    return reasons


@torch.no_grad()
def _fill(model: nn.Module, generator: torch.Generator) -> None:
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def _little(
    adapter: Adapter,
    layers: Mapping[str, Any],
    linears: Mapping[str, Any],
    generator: torch.Generator,
) -> tuple[dict[str, str], Adapter]:
    """Why factors do nothing by themselves, by layer, and small factors in their place."""
    reasons: dict[str, str] = {}
    little = Adapter({}, {})

    def draw(live: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        a = torch.randn(RANK, columns, generator=generator)
        b = torch.randn(rows, RANK, generator=generator)
        return a, b * live

    for name, pairs in adapter.experts.items():
        _, layer = layers[name]
        why, there = [], {}
        for projection, pair in pairs.items():
            live, reason = _live(pair.a, pair.b)
            why.append(f"{projection}: {reason}" if reason else "")
            wide, tall = layer.shape(projection)
            some = [draw(live.float(), tall, wide) for _ in range(layer.num_experts)]
            a, b = (torch.stack(one) for one in zip(*some, strict=True))
            there[projection] = Pair(a, b, [1.0])
        reasons[name] = "" if "" in why else "; ".join(why)
        little.experts[name] = there
    for name, pair in adapter.linears.items():
        live, reasons[name] = _live(pair.a[None], pair.b[None])
        layer = linears[name].layer
        a, b = draw(live.float(), layer.out_features, layer.in_features)
        little.linears[name] = LinearPair(a, b, 1.0)
    return reasons, little


def _live(a: Tensor, b: Tensor) -> tuple[Tensor, str]:
    """Whether some rank of A (E or 1, r, in) and B (E or 1, out, r) is in both, and why not."""
    of_a, of_b = a.ne(0).any(2), b.ne(0).any(1)
    if bool((of_a & of_b).any()):
        return torch.tensor(True), ""
    why = "no rank has both factors"
    why = next((f"lora_{s} is zero" for s, of in (("B", of_b), ("A", of_a)) if not of.any()), why)
    return torch.tensor(False), why


@torch.no_grad()
def _differing(
    model: Any, modules: Mapping[str, nn.Module], generator: torch.Generator
) -> dict[str, bool]:
    """Whether the output of each module with the adapter is another one, of the same input."""
    seen: dict[str, tuple[Any, Any, Any]] = {}
    found = dict.fromkeys(modules, False)

    def keep(name: str, module: nn.Module, args: Any, named: Any, out: Any) -> None:
        seen.setdefault(name, (args, named, _tensors(out)))

    def again(name: str, module: nn.Module, args: Any, named: Any) -> tuple[Any, Any] | None:
        return seen[name][:2] if name in seen else None

    def compare(name: str, module: nn.Module, args: Any, named: Any, out: Any) -> None:
        pairs = zip(_tensors(out), seen[name][2], strict=True) if name in seen else ()
        found[name] |= any(not torch.equal(one, other) for one, other in pairs)

    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(1, vocabulary, (ROWS, LENGTH), generator=generator)
    handles = [
        m.register_forward_hook(partial(keep, n), with_kwargs=True) for n, m in modules.items()
    ]
    model(ids, adapter_names=[None] * ROWS, use_cache=False)
    for handle in handles:
        handle.remove()
    for name, module in modules.items():
        module.register_forward_pre_hook(partial(again, name), with_kwargs=True, prepend=True)
        module.register_forward_hook(partial(compare, name), with_kwargs=True)
    model(ids, adapter_names=["a"] * ROWS, use_cache=False)
    return found


def _tensors(out: Any) -> list[Tensor]:
    every = out if isinstance(out, (tuple, list)) else [out]
    return [t.clone() for t in every if isinstance(t, Tensor)]
