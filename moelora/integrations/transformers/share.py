"""One copy of the experts for a sampler and a trainer in one process: `share_experts`.

    vLLM's layer            w13_weight, w2_weight          16-bit stacks, or moelora's tiles
    transformers' experts   gate_up_proj, down_proj   ->   parameters or buffers of that storage

Layers are paired by the numbers in their names, `model.layers.3.mlp.experts` here and there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from moelora.integrations.transformers.calls import IMPLEMENTATION
from moelora.integrations.transformers.layers import moe_layers
from moelora.integrations.transformers.projection import (
    Experts,
    expert_weights,
    is_interleaved,
    is_quantized,
    set_weights,
    sizes,
    up_name,
)
from moelora.integrations.transformers.quantizer import refuse_saving
from moelora.integrations.vllm import interface
from moelora.integrations.vllm.update import shares_memory
from moelora.operators.checks import dtype_name
from moelora.operators.experts import Weights
from moelora.weights import QuantizedWeights

Pair: TypeAlias = "tuple[Weights, Weights]"
Row: TypeAlias = "tuple[bool, str, str]"  # whether it refuses, why, what to do

LARGEST_ERROR = 0.5  # of a format's rounding; other weights are about 1.4 apart


@dataclass(frozen=True)
class SharedExperts:
    """What `share_experts` has bound.

    Attributes
    ----------
    nbytes : int
        Bytes of the weights that the trainer's experts had before, and have freed.
    """

    nbytes: int
    _bound: Mapping[Experts, Pair]

    def undo(self) -> None:
        """Give the trainer's experts a copy of their weights, in the engine's format.

        Call it before the engine ends or loads other weights.
        """
        for module, (w13, w2) in self._bound.items():
            set_weights(module, (_copy(w13), _copy(w2)), shared=True)


def share_experts(model: nn.Module, llm: Any) -> SharedExperts:
    """Make the frozen experts of a trainer those of a vLLM engine in the same process.

    The trainer's own experts are freed, nothing is copied, and the forward and backward have the
    bits that they have on a copy. Experts of the trainer may be of 16 bits while the engine's are
    quantized: then it trains on the numbers that sample.

    Parameters
    ----------
    model : transformers.PreTrainedModel or peft.PeftModel
        With frozen experts, before `multi_lora`. Experts may be on the meta device. All other
        weights are left as they are.
    llm : vllm.LLM or vllm.v1.engine.llm_engine.LLMEngine
        Made under VLLM_ENABLE_V1_MULTIPROCESSING=0, with layers that run in moelora: bf16, FP8,
        MXFP4, NVFP4 or INT4.

    Returns
    -------
    SharedExperts
        Keep it to undo this.

    Raises
    ------
    ValueError
        The engine or a layer cannot be shared; the message says why and what to do. The model is
        as it was.

    Notes
    -----
    Weights that the engine loads later, into the same storage, are the trainer's, too.
    """
    engine = getattr(llm, "llm_engine", llm)
    _refuse("the engine", _engine_rows(engine))
    if any(hasattr(module, "lora_ranks") for module in model.modules()):
        raise ValueError("the model has MultiLoraExperts: call share_experts before multi_lora")
    served: dict[tuple[str, ...], nn.Module] = {}
    for found in engine.apply_model(_layers):
        served |= {_numbers(name): module for name, module in found}
    layers = {name: module for name, (module, _) in moe_layers(model).items()}
    names = {_numbers(name): name for name in layers}
    if names.keys() != served.keys():
        lacking = [n for key, n in names.items() if key not in served]
        raise ValueError(
            f"the model has {len(names)} layers of experts and the engine {len(served)}"
            + (f", of which none is {lacking[0]}" if lacking else "")
            + ": give both the same checkpoint"
        )
    bound: dict[Experts, Pair] = {}
    freed = 0
    for key, name in names.items():
        _refuse(name, _served_rows(served[key]))
        layer, module = served[key], layers[name]
        experts = _experts(layer)
        pair = experts._weights(*(layer.get_parameter(f"{n}_weight").data for n in ("w13", "w2")))
        _refuse(name, _layer_rows(module, pair, experts))
        bound[module] = pair
        freed += _nbytes(module, pair)
    quantized = any(isinstance(w2, QuantizedWeights) for _, w2 in bound.values())
    for module, pair in bound.items():
        set_weights(module, pair, shared=True)
    if quantized:
        base = getattr(model, "get_base_model", None)  # of a PeftModel
        whole: Any = model if base is None else base()
        refuse_saving(whole)
        whole.set_experts_implementation(IMPLEMENTATION)
    return SharedExperts(freed, bound)


def _numbers(name: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\d+", name))


def _layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Layers of experts of vLLM's model."""
    named = model.named_modules()
    return [(name, m) for name, m in named if any(p.startswith("w13_") for p in m._parameters)]


def _experts(layer: nn.Module) -> Any:
    """The object that runs a layer; None if vLLM has none of this kind."""
    kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
    return getattr(kernel, "fused_experts", None)


# -- what is refused --


def _refuse(what: str, rows: Iterator[Row]) -> None:
    for wrong, why, remedy in rows:
        if wrong:
            raise ValueError(f"{what} {why}: {remedy}; nothing is shared")


def _engine_rows(engine: Any) -> Iterator[Row]:
    problem = interface.problem(interface.SHARED)
    yield problem is not None, f"is of another release: {problem}", "install vLLM 0.33"
    config = engine.vllm_config
    parallel = config.parallel_config
    ranks = getattr(parallel, "world_size", 1)
    yield ranks > 1, f"has {ranks} ranks", "start it with tensor_parallel_size=1"
    yield (
        not shares_memory(engine),
        "runs in another process",
        "set VLLM_ENABLE_V1_MULTIPROCESSING=0 before vllm is imported",
    )
    yield (
        getattr(config.model_config, "enable_sleep_mode", False),
        "may sleep, which frees its weights",
        "start it with enable_sleep_mode=False",
    )
    yield (
        getattr(parallel, "enable_eplb", False),
        "rearranges experts (EPLB)",
        "start it with enable_eplb=False",
    )


def _served_rows(layer: nn.Module) -> Iterator[Row]:
    from moelora.integrations.vllm.experts import TritonExpertsWithLoRA
    from moelora.integrations.vllm.served import IN_HOST_MEMORY, is_in_host_memory

    experts = _experts(layer)
    yield (
        not isinstance(experts, TritonExpertsWithLoRA),
        f"is in the layout of vLLM's {type(experts).__name__}",
        "vLLM's log says why moelora does not run the layer",
    )
    offloaded = is_in_host_memory(*layer.parameters())
    yield offloaded, f"cannot be shared, since {IN_HOST_MEMORY}", "start vLLM without offloading"


def _layer_rows(module: Experts, pair: Pair, experts: Any) -> Iterator[Row]:
    checkpoint = "give both the same checkpoint"
    own, theirs = ([tuple(x) for x in s] for s in (sizes(module), (w.shape for w in pair)))
    yield own != theirs, f"is {own}, and the engine's {theirs}", checkpoint
    interleaved = experts._interleaved(experts.moe_config.activation)
    yield (
        is_interleaved(module) != interleaved,
        f"has rows of gate and up {'apart' if interleaved else 'in turns'}, unlike the engine's",
        "start vLLM without enable_mixed_moe_lora_format" if not interleaved else checkpoint,
    )
    down = module.down_proj
    dtype, other = down.dtype, pair[1].dtype
    yield (
        dtype in (torch.float32, torch.float16, torch.bfloat16) and dtype != other,
        f"is {dtype_name(dtype)}, and the engine's {dtype_name(other)}",
        f"load the model with dtype=torch.{dtype_name(other)}",
    )
    yield (
        any(p.requires_grad for n, p in module.named_parameters(recurse=False) if "bias" not in n),
        "is trained",
        "freeze it: model.requires_grad_(False), and train adapters",
    )
    data = [w.data for w in pair]
    yield (
        any(tensor.is_inference() for tensor in data),
        "is of tensors of inference mode in the engine, which autograd does not take",
        "do not load vLLM under torch.inference_mode()",
    )
    yield (
        _place(module) not in (None, data[0].device),
        f"is on {_place(module)}, and the engine's on {data[0].device}",
        "move the model there",
    )
    yield _differs(module, pair), "has other numbers than the engine's", checkpoint


def _own(module: Experts) -> list[Weights]:
    """The weights of a module as (E, N, K), if they are in memory and in a format that is read."""
    found: list[Any] = [*expert_weights(module)]
    if any(w.device.type == "meta" or w.dtype == torch.float8_e4m3fn for w in found):
        return []
    if module.is_transposed and not is_quantized(module):
        return [w.transpose(1, 2) for w in found]
    return found


def _place(module: Experts) -> torch.device | None:
    return next((w.device for w in _own(module)), None)


def _differs(module: Experts, pair: Pair) -> bool:
    """Whether the first and the last expert of a layer are those of other weights."""
    for own, theirs in zip(_own(module), pair, strict=False):
        for expert in (0, own.shape[0] - 1):
            a, b = (_expert(w, expert) for w in (own, theirs))
            same = isinstance(own, QuantizedWeights) == isinstance(theirs, QuantizedWeights)
            if same and torch.equal(a, b):
                continue
            if isinstance(own, Tensor) and isinstance(theirs, Tensor):
                return True
            if (a.float() - b.float()).norm() > LARGEST_ERROR * b.float().norm():
                return True
    return False


def _expert(weights: Weights, expert: int) -> Tensor:
    if isinstance(weights, Tensor):
        return weights[expert]
    one = replace(
        weights,  # type: ignore[type-var] # QuantizedWeights
        data=weights.data[expert : expert + 1],
        shape=torch.Size((1, *weights.shape[1:])),
    )
    return one.unpack()[0]


def _nbytes(module: Experts, pair: Pair) -> int:
    """Bytes of the weights of a module that are not the engine's already."""
    names = up_name(module), "down_proj"
    held = [
        t
        for n, t in [*module.named_parameters(), *module.named_buffers()]
        if n.startswith(names) and "bias" not in n and not t.is_meta
    ]
    shared = {w.data.untyped_storage().data_ptr() for w in pair}
    return sum(t.nbytes for t in held if t.untyped_storage().data_ptr() not in shared)


# -- binding --


def _copy(weights: Weights) -> Weights:
    if isinstance(weights, Tensor):
        return weights.clone()
    return replace(weights, data=weights.data.clone())  # type: ignore[type-var]
