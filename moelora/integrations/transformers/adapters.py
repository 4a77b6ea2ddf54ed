"""Load adapters into a pool for a model, and select them per row of a batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, ParamSpec

import torch
from transformers import PreTrainedModel

from moelora.adapters import AdapterPool, MoELayer
from moelora.adapters.columns import Layout
from moelora.adapters.names import check_name
from moelora.integrations.transformers.calls import IMPLEMENTATION, no_adapters, take_adapter_names
from moelora.integrations.transformers.deltas import install, uninstall
from moelora.integrations.transformers.experts import activation_of, lay_out
from moelora.integrations.transformers.fp8 import pack_loaded
from moelora.integrations.transformers.hub import local_folder
from moelora.integrations.transformers.layers import moe_layers
from moelora.integrations.transformers.linears import (
    Linear,
    device_of,
    dtype_of,
    linear_layers,
    plain_name,
    plain_weight,
)
from moelora.integrations.transformers.parallel import (
    batch_of,
    experts_shard,
    ranks_of,
    stop_travelling,
)
from moelora.integrations.transformers.projection import (
    Experts,
    expert_weights,
    is_loaded_fp8,
    not_packed,
)
from moelora.integrations.transformers.serving import Serving
from moelora.integrations.transformers.sizing import (
    Targets,
    check_ranks,
    layouts_of,
    named_folders,
    others_of,
    peek_at,
    served_of,
    smallest,
)
from moelora.operators.checks import check_count
from moelora.operators.setting import setting

P = ParamSpec("P")


def new_pool(
    layers: Mapping[str, tuple[Experts, MoELayer]],
    max_loras: int,
    max_rank: int,
    *,
    linears: Mapping[str, Linear] | None = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> AdapterPool:
    """An empty pool for layers of `moe_layers` and `linear_layers`, on their devices.

    `dtype` is that of experts' factors, by default the experts' own. `options` are passed to
    `AdapterPool`. Raises NotImplementedError for experts that moelora cannot run.
    """
    places, shards = {}, {}
    for name, (module, layer) in layers.items():
        shards[name] = experts_shard(name, module, layer)
        if is_loaded_fp8(module):
            raise NotImplementedError(not_packed(name))
        activation_of(module)
        places[name] = device_of(module), dtype or expert_weights(module)[1].dtype
    default = next((own for _, own in places.values()), torch.bfloat16)
    for name, linear in (linears or {}).items():
        places[name] = device_of(linear.module), dtype_of(linear.module, default)
        shards[name] = linear.shard
    return AdapterPool(
        [layer for _, layer in layers.values()],
        max_loras,
        max_rank,
        linears=[linear.layer for linear in (linears or {}).values()],
        dtype=default,
        device=next((device for device, _ in places.values()), "cpu"),
        places=places,
        shards={name: shard for name, shard in shards.items() if shard is not None},
        **options,
    )


def _on_all_ranks(load: Callable[P, AdapterPool]) -> Callable[P, AdapterPool]:
    """`load_adapters`, which succeeds in all processes of a parallel model or in none."""

    @functools.wraps(load)
    def call(*args: P.args, **kwargs: P.kwargs) -> AdapterPool:
        model: Any = args[0] if args else kwargs.get("model")
        ranks = ranks_of(model)
        if ranks is None:
            return load(*args, **kwargs)
        return ranks.together("load_adapters", lambda: load(*args, **kwargs), lambda pool: {})

    return call


@_on_all_ranks
def load_adapters(
    model: PreTrainedModel,
    adapters: Mapping[str, str | Path] | Iterable[str | Path],
    *,
    max_loras: int | None = None,
    host: int = 0,
    max_rank: int | None = None,
    max_linear_rank: int | None = None,
    targets: Targets = None,
    dtype: torch.dtype | None = None,
    w13_slices: Literal[1, 2] | None = None,
    shared_outer: bool | None = None,
    layout: Layout | Mapping[str, Layout] | None = None,
) -> AdapterPool:
    """Loads adapter folders into a pool and attaches it to `model`.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Its experts implementation becomes `"moelora"`; calls, `generate` and `generate_batch` then
        accept `adapter_names`: one name per row of the batch, "__base__" or None for the base
        model. Experts that transformers has loaded in FP8 are packed, as by `enable`.
    adapters : mapping or iterable
        Name -> folder with `adapter_config.json` and `adapter_model.safetensors`, or its id on the
        Hub ("org/name"); or only folders and ids, whose last component is the name. Factors may be
        for experts, linear layers and embeddings: attention, shared experts, dense MLPs, routers,
        `lm_head`, with weights in any format.
    max_loras, max_rank, max_linear_rank : int, optional
        Size of the pool; `max_rank` is for factors of experts, `max_linear_rank` for all others, by
        default `max_rank` if that is larger than what `adapters` need. By default just enough for
        `adapters`, whose ranks must then be at most 512. Set these to add more adapters later with
        `pool.add(name, folder)`.
    host : int, optional
        Number of adapters in host memory. With it there may be more `adapters` than `max_loras`:
        batches bring those that they name, and wait for slots that others use.
    targets : "all" or sequence of str, optional
        Layers that the pool allocates factors for: all, or those whose names end in one of these
        (`["experts", "q_proj"]`). By default those for which `adapters` have factors, or all
        without `adapters`. Each needs memory, and one or two launches in passes with adapters.
    dtype : torch.dtype, optional
        Dtype of experts' factors, by default that of the experts. Factors of other layers have the
        dtype of their layer.
    w13_slices, shared_outer : optional
        See `AdapterPool`; by default suitable for all of `adapters`. Without `adapters`, gate and
        up have one A (`w13_slices=1`), as PEFT's `target_parameters` and `Tenants` write them.
    layout : {"rank_major", "grouped_by_expert"} or mapping, optional
        Order of the columns of `lora_B` of `target_parameters`, for adapters that do not state it,
        or per adapter; see `AdapterPool.add`.

    Notes
    -----
    Every process of a model with `tp_plan` or `DistributedConfig(tp_size=, ep_size=)` makes the
    same calls in the same order, of this function, of the pool's methods and of the model: folders,
    names, versions and slots are compared, and an error of one process is raised by all. A process
    holds the factors that go with its part of the weights, which `pool.describe()` lists.

    Returns
    -------
    AdapterPool
        The model's only pool; `unload_adapters` detaches it.

    Raises
    ------
    ValueError
        An adapter cannot be read, or has factors of a layer that is not served; the message names
        the key, option or layer. The model is unchanged.
    NotImplementedError
        moelora cannot run these experts.
    """
    serving = model.__dict__.get("_moelora")
    if isinstance(serving, Serving) and serving.pool is not None:
        raise RuntimeError(
            "the model has a pool already; add to that one, or unload_adapters first"
        )
    named = named_folders(adapters)
    for name in named:
        check_name(name)
    if max_loras is not None:
        check_count("max_loras", max_loras)
        if len(named) > max_loras and not host:
            raise ValueError(
                f"{len(named)} adapters do not fit into max_loras={max_loras}; pass host= for more "
                "adapters than slots"
            )
    _refuse_peft(model)
    experts = moe_layers(model)
    linears = linear_layers(model, experts)
    specs = [layer for _, layer in experts.values()]

    folders = {name: local_folder(folder, ["adapter_*"]) for name, folder in named.items()}
    layouts = layouts_of(layout, folders)
    infos = {n: peek_at(n, folders[n], specs, linears, layouts.get(n)) for n in folders}
    check_ranks(infos, max_rank, max_linear_rank)
    served_experts, served = served_of(targets, list(infos.values()), experts, linears)
    pack_loaded(model, experts)  # cannot be undone, so after all checks of folders
    given = {
        "w13_slices": w13_slices,
        "shared_outer": shared_outer,
        "max_rank": max_rank,
        "max_linear_rank": max_linear_rank,
    }
    sizes = smallest(list(infos.values()), specs, max_rank)
    sizes |= {name: value for name, value in given.items() if value is not None}
    slots = max(len(folders), 1) if max_loras is None else max_loras
    ranks = ranks_of(model)
    if ranks is not None:
        ranks.together(
            "load_adapters",
            lambda: sizes,
            lambda sizes: {
                "the list of adapters": list(folders),
                "the size of the pool": {"max_loras": slots, "host": host, **sizes},
                "the list of layers": [*served_experts, *served],
            },
        )
    pool = new_pool(
        served_experts,
        slots,
        linears=served,
        host=host,
        dtype=dtype,
        others=others_of(experts, linears, {*served_experts, *served}),
        own=lambda name: plain_weight(linears[name].module),
        ranks=ranks,
        **sizes,
    )
    pool.is_split = any(hasattr(weight, "placements") for weight in model.parameters())
    put = pool.register if host else pool.add
    for name, folder in folders.items():
        put(name, folder, layout=layouts.get(name))
    if host:
        first = list(folders)[: pool.max_loras]
        pool.prefetch(first)  # in threads
        pool.mapping(first)
    _attach(model, pool, served_experts, served)
    return pool


def _attach(
    model: Any,
    pool: AdapterPool,
    experts: Mapping[str, tuple[Experts, MoELayer]],
    linears: Mapping[str, Linear],
) -> None:
    _forget_attachment(model)
    model.set_experts_implementation(IMPLEMENTATION)
    serving = Serving()
    if pool.ranks is not None:
        serving.batch = batch_of(model)
        for name, (module, _) in experts.items():
            if name not in pool.shards:
                continue
            lay_out(module)
            if pool.shards[name].axis == "experts":
                from moelora.integrations.transformers.travelling import let_travel

                let_travel(model, module)
    modules: dict[str, torch.nn.Module] = {n: module for n, (module, _) in experts.items()}
    modules |= {name: linear.module for name, linear in linears.items()}
    configs = {name: module.config for name, (module, _) in experts.items()}
    serving.take(pool, model, modules, configs)
    for name, (module, _) in experts.items():
        module._moelora, module._moelora_layer = serving, name
    install(serving, linears.values())
    model.__dict__["_moelora"] = serving
    take_adapter_names(model)
    if hasattr(type(model), "generate"):
        generate = functools.partial(_generate, model)
        theirs: Any = model.generate  # keeps the signature
        model.__dict__["generate"] = functools.update_wrapper(generate, theirs, (), ())


def _refuse_peft(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        if not (hasattr(module, "base_layer") and hasattr(module, "lora_A")):
            continue
        if "_moelora_replaced" in model.__dict__:
            raise RuntimeError(
                f"{plain_name(name)} is wrapped by PEFT, and the model is attached to PEFT's "
                "adapters; for adapters of moelora take PEFT's away first: "
                "moelora.integrations.peft.detach(peft_model), then peft_model.unload()"
            )
        raise ValueError(
            f"{plain_name(name)} is wrapped by PEFT; load adapters into the plain model (which "
            "peft_model.unload() returns), or attach moelora.integrations.peft to what PEFT has "
            "loaded"
        )


def _forget_attachment(model: torch.nn.Module) -> None:
    """Take away what `moelora.integrations.peft.attach` has left, once PEFT's layers are gone."""
    if model.__dict__.pop("_moelora_replaced", None) is not None:
        model.__dict__.pop("_moelora", None)


def _generate(
    model: Any, *args: Any, adapter_names: Sequence[str | None] | None = None, **kwargs: Any
) -> Any:
    """`generate` with the argument `adapter_names`, one per row of the caller's batch."""
    generate = type(model).generate
    if adapter_names is None:
        return generate(model, *args, **kwargs)
    config = kwargs.get("generation_config") or dict(enumerate(args)).get(1)
    config = config or model.generation_config
    copies = (
        kwargs.get(name) or getattr(config, name) or 1
        for name in ("num_beams", "num_return_sequences")
    )
    paged = kwargs.get("cache_implementation") == "paged"  # has one name per request
    with use_adapters(model, adapter_names, expand=1 if paged else max(copies)):
        return generate(model, *args, **kwargs)


def pool(model: torch.nn.Module) -> AdapterPool:
    """The pool of a model, for code that did not call `load_adapters` itself.

    Parameters
    ----------
    model : torch.nn.Module
        A model that went through `load_adapters`, or a PEFT model that went through
        `moelora.integrations.peft.attach`.

    Raises
    ------
    RuntimeError
        The model has no adapters.
    """
    base: Any = model
    if hasattr(model, "get_base_model"):
        base = base.get_base_model()
    found: AdapterPool | None = getattr(base.__dict__.get("_moelora"), "pool", None)
    if found is None:
        raise no_adapters(model)
    return found


def unload_adapters(model: PreTrainedModel) -> None:
    """Detaches the pool. The model then runs as base model, and refuses `adapter_names`."""
    if "_moelora_replaced" in model.__dict__:
        _refuse_peft(model)
        _forget_attachment(model)
        return
    serving = _serving(model)
    model.__dict__.pop("generate", None)
    uninstall(model, serving)
    serving.pool = None
    for module in model.modules():
        if module.__dict__.get("_moelora") is serving:
            del module._moelora
            stop_travelling(module)


@contextmanager
def use_adapters(
    model: PreTrainedModel, names: Sequence[str | None], *, expand: int = 1
) -> Iterator[None]:
    """Within the context, row i of every batch of `model` uses adapter `names[i]`.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A model with adapters from `load_adapters`.
    names : sequence of str or None
        One adapter per row, None or "__base__" for the base model.
    expand : int
        Consecutive rows per name: the num_beams or num_return_sequences (whichever is larger) with
        which `generate` copies each row.

    Notes
    -----
    The adapters keep their slots until the context ends. The context only affects the thread that
    enters it: other threads, including those started within it, may call the model concurrently
    with other adapters. Tasks of one event loop share a thread: do not await inside.
    """
    check_count("expand", expand)
    serving = _serving(model)
    with serving.hold(names, expand) as rows, setting(serving.now, "rows", rows):
        yield


def enable_checkpointing(model: PreTrainedModel) -> None:
    """Activation checkpointing of a model whose rows carry adapters.

    `model.gradient_checkpointing_enable` with what the repeated forward of a layer needs: the
    adapters of its rows, after the pass that had them. Without `use_reentrant`.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A model that went through `load_adapters`. In training mode: others are not checkpointed.

    Raises
    ------
    RuntimeError
        The model has no adapters.
    """
    contexts = _serving(model).contexts
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})


def _serving(model: PreTrainedModel) -> Serving:
    serving = model.__dict__.get("_moelora")
    if not isinstance(serving, Serving) or serving.pool is None:
        raise no_adapters(model)
    return serving
