"""Run the experts of a PEFT model in moelora: `adapter_names=` for MoE layers.

    import moelora.integrations.peft as moelora_peft

    model = PeftModel.from_pretrained(model, "adapters/law", adapter_name="law")
    model.load_adapter("adapters/code", adapter_name="code")
    moelora_peft.attach(model)
    model.generate(**batch_of_three, adapter_names=["law", "__base__", "code"])

By itself PEFT merges the adapters of `target_parameters` into the experts' weights, one adapter for
the whole batch, and refuses `adapter_names`. Once attached, the experts read a pool, each row with
its own adapter; routers and shared experts, which see the concatenated tokens of all rows, map
tokens to rows; attention and all other layers, `set_adapter`, `disable_adapter` and beams remain
PEFT's.

In training (`model.train()`, or under grad mode with adapters that require gradients) there are no
copies: gradients are those of PEFT's own parameters. Nor are there any in compiled models.
While adapters are merged, experts run on their merged weights; `unload` and `merge_and_unload`
detach the model.

Import this module before PEFT adds an adapter (`get_peft_model`, `PeftModel.from_pretrained`,
`load_adapter`). It makes `load_adapter` of PEFT and of transformers record the source of an
adapter, since `attach` refuses adapters that PEFT has not loaded completely; gives quantized
experts parameters to target; and makes PEFT target experts that tensor parallelism has split, which
it fails at by itself (`'ParamWrapper' object has no attribute 'weight'`).

`parallel` shares factors and joins gradients among processes; `experts` runs the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MethodType
from typing import Any

import peft
import torch
from peft.tuners.tuners_utils import BaseTuner
from torch import nn
from transformers import PreTrainedModel

from moelora.adapters import AdapterPool
from moelora.integrations.peft import quantized as _quantized  # noqa: F401  places for parameters
from moelora.integrations.peft import sources
from moelora.integrations.peft.experts import AttachedExperts, forward, unwatch
from moelora.integrations.peft.parallel import Part, keep_from_ddp
from moelora.integrations.peft.sources import base_of
from moelora.integrations.peft.tensors import engine_tensors
from moelora.integrations.peft.wrappers import rank_of, wrappers_of
from moelora.integrations.transformers import IMPLEMENTATION, moe_layers, new_pool
from moelora.integrations.transformers.calls import take_adapter_names
from moelora.integrations.transformers.experts import lay_out
from moelora.integrations.transformers.hooks import around
from moelora.integrations.transformers.linears import plain_name
from moelora.integrations.transformers.parallel import multiply_locally, ranks_of, stop_travelling
from moelora.integrations.transformers.projection import is_quantized
from moelora.operators.checks import check_count

__all__ = ["attach", "detach", "engine_tensors"]


def attach(
    model: peft.PeftModel | PreTrainedModel,
    *,
    max_loras: int | None = None,
    max_rank: int | None = None,
    dtype: torch.dtype | None = None,
    folders: Mapping[str, str | Path] | None = None,
) -> AdapterPool:
    """Run the experts of a PEFT model in moelora, each row of a batch with its own adapter.

    Parameters
    ----------
    model : peft.PeftModel or transformers.PreTrainedModel
        A transformers model with LoRA adapters, some of which target the parameters of experts. One
        whose own `load_adapter` loaded them serves the adapter that is active, without
        `adapter_names`.
    max_loras, max_rank : int, optional
        Size of the pool; by default just enough for PEFT's current adapters. Adapters that
        it loads later are copied on first use, replacing the least recently used ones: a call
        raises `moelora.adapters.NoSlot` if its batch has more than `max_loras`, and ValueError if
        an adapter's rank exceeds `max_rank`.
    dtype : torch.dtype, optional
        Of the factors, by default that of the experts.
    folders : mapping, optional
        Adapter -> the folder that PEFT loaded it from, for those that were loaded before this
        module was imported.

    Returns
    -------
    AdapterPool
        A copy of the experts' factors. Each forward pass updates what has changed in PEFT since:
        adapters deleted and loaded anew, hotswapped, rescaled, or written to in any way that torch
        counts or through `data`. Only writes past torch (numpy, `data.data`) need
        `pool.remove(name)`.

    Raises
    ------
    ValueError
        No experts are targeted, an adapter uses an option that moelora does not support, or PEFT
        has not loaded all of its factors, or in another column order; the message names them.
    FileNotFoundError
        One of `folders` is no adapter's.
    NotImplementedError
        moelora cannot run these experts.

    Notes
    -----
    Threads may call the model at the same time with whatever adapter is active. `adapter_names` are
    for one thread at a time: PEFT passes them by hooks on the modules, and does not remove these
    if a call fails or is interrupted; the next call with its own `adapter_names` then fails.
    """
    base = base_of(model)
    ranks_of(base)  # raises for pipelines, of which a process may have no experts
    layers = moe_layers(base)
    outermost: dict[str, nn.Module] = {}
    for name, module in base.named_modules():
        outermost.setdefault(plain_name(name), module)
    wrappers = {name: outermost[name] for name in layers}
    wrapped = {name: layer for name, layer in layers.items() if wrappers[name] is not layer[0]}
    if not wrapped:
        raise ValueError(_no_adapter(model, layers))
    current = getattr(base, "_moelora", None)
    if getattr(current, "pool", None) is not None and not isinstance(current, AttachedExperts):
        raise RuntimeError("load_adapters gave the model a pool; call unload_adapters first")
    sources.check_folders(folders, model.peft_config)
    if max_loras is not None:
        check_count("max_loras", max_loras)
    for name, folder in (folders or {}).items():
        sources.remember(model, name, sources.Load(str(folder)))
    names = list(model.peft_config)
    chains = {name: tuple(wrappers_of(wrappers[name])) for name in wrapped}
    for name, chain in chains.items():
        for wrapper in chain:
            if wrapper.parameter_name not in ("gate_up_proj", "up_proj", "down_proj"):
                raise ValueError(
                    f"{name}.{wrapper.parameter_name} is targeted, but moelora has only adapters "
                    "of the weights of experts: gate_up_proj, or up_proj, and down_proj"
                )
    if max_rank is None:
        every = [w for chain in chains.values() for w in chain]
        max_rank = max((rank_of(w, name) for w in every for name in w.lora_A), default=1)
    slots = len(names) if max_loras is None else max_loras
    pool = new_pool(wrapped, slots, max_rank, dtype=dtype, w13_slices=1)
    parts = {name: Part.of(name, base, *wrapped[name]) for name in wrapped}
    serving = AttachedExperts(
        model, chains, pool, {n: p for n, p in parts.items() if p is not None}
    )
    serving.share()
    for name in names:
        sources.check(model, name)
        serving.checked[name] = sources.load_of(model, name)
    for name in names[: pool.max_loras] if not model.training else ():
        serving.copy(name)
    base.__dict__.setdefault("_moelora_replaced", base.get_experts_implementation())
    base.set_experts_implementation(IMPLEMENTATION)
    base.__dict__["_moelora"] = serving
    take_adapter_names(base)
    for name, (wrapper, *_) in chains.items():
        wrapper._moelora, wrapper._moelora_layer = serving, name
        wrapper.forward = MethodType(forward, wrapper)
        part = serving.parts.get(name)
        if part is not None:
            experts = layers[name][0]
            lay_out(experts)
            if part.shard.axis == "experts":
                from moelora.integrations.transformers.travelling import let_travel

                let_travel(base, experts)
                experts._moelora, experts._moelora_layer = serving.passing, name
    serving.take_layers()
    keep_from_ddp(model)
    return pool


def _no_adapter(model: peft.PeftModel | PreTrainedModel, layers: Mapping[str, Any]) -> str:
    """The message of `attach` if PEFT has wrapped no experts."""
    message = "no adapter of this model targets its experts (target_parameters)"
    targets = {n: getattr(c, "target_parameters", None) for n, c in model.peft_config.items()}
    adapter = next((name for name, targeted in targets.items() if targeted), None)
    name, (experts, _) = next(iter(layers.items()))
    if adapter is None or not is_quantized(experts):
        return message
    return (
        f"{message}: PEFT found none of {targets[adapter]} of {adapter!r} in {name}, whose weights "
        "are quantized; PEFT sees parameters of such experts only if moelora.integrations.peft was "
        "imported; import it before get_peft_model, PeftModel.from_pretrained or load_adapter"
    )


def detach(model: peft.PeftModel | PreTrainedModel) -> None:
    """Return the experts' adapters to PEFT, with the experts implementation that `attach` replaced.

    PEFT's `unload` and `merge_and_unload` do so, too: what they return is a model of transformers.

    Experts that `load_quantized` has read only run in moelora: PEFT cannot apply adapters to them.
    """
    _release(base_of(model))


def _release(base: PreTrainedModel) -> None:
    """What `detach` does, on the transformers model."""
    serving = base.__dict__.get("_moelora")
    if not isinstance(serving, (AttachedExperts, type(None))):
        return  # of load_adapters
    base.__dict__.pop("_moelora", None)
    replaced = base.__dict__.pop("_moelora_replaced", None)
    if replaced is not None:
        current = base.get_experts_implementation()
        base.set_experts_implementation(
            {k: replaced.get(k) if now == IMPLEMENTATION else now for k, now in current.items()}
        )
    if serving is None:
        return
    multiply_locally(base, stop=True)
    passing: Any = serving.passing
    # PEFT's `unload` has taken the wrappers out of the model.
    wrappers = (wrapper for chain in serving.wrappers.values() for wrapper in chain)
    for module in (*base.modules(), *wrappers):
        if module.__dict__.get("_moelora") is passing:
            del module._moelora
            stop_travelling(module)
        if module.__dict__.get("_moelora") is not serving:
            continue
        del module._moelora
        module.__dict__.pop("forward", None)
        for wrapper in wrappers_of(module):
            for side in (wrapper.lora_A, wrapper.lora_B):
                unwatch(side.values())


@around("_unload_and_optionally_merge", BaseTuner)  # of `unload` and `merge_and_unload`
def _detaching(unload: Callable[..., Any], self: BaseTuner, *args: Any, **kwargs: Any) -> Any:
    base = unload(self, *args, **kwargs)
    _release(base)
    return base


# ---- generate: PEFT has names for rows of the caller and for beams ----


def _check_copies(kwargs: dict[str, Any], config: Any) -> None:
    """Raises ValueError if transformers makes more copies of each row than PEFT of each name."""
    beams, answers = (
        kwargs.get(name) or getattr(config, name, None) or 1
        for name in ("num_beams", "num_return_sequences")
    )
    named = kwargs.get("num_beams") or 1
    if max(beams, answers) != named:
        which = "num_return_sequences" if answers > beams else "num_beams"
        remedy = (
            f"repeat each prompt and its name {answers} times, without num_return_sequences"
            if answers > beams
            else f"pass num_beams={beams} to generate, beside adapter_names"
        )
        raise ValueError(
            f"{which}={max(beams, answers)} with adapter_names: generate makes copies of each row, "
            f"and PEFT gives the names to the rows before; {remedy}"
        )


@around("generate", peft.PeftModel, peft.PeftModelForCausalLM, peft.PeftModelForSeq2SeqLM)
def _checked(generate: Callable[..., Any], self: peft.PeftModel, *args: Any, **kwargs: Any) -> Any:
    attached = isinstance(getattr(self.base_model, "_moelora", None), AttachedExperts)
    if attached and kwargs.get("adapter_names") is not None:
        _check_copies(
            kwargs, kwargs.get("generation_config") or getattr(self, "generation_config", None)
        )
    return generate(self, *args, **kwargs)
