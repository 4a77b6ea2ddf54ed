"""Adapters of a model: a pool for its experts, and who in a batch carries which."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from moelora.adapters import AdapterInfo, AdapterPool, MoELayer, peek
from moelora.adapters.pool import LayerFactors
from moelora.integrations.transformers.calls import (
    BASE,
    IMPLEMENTATION,
    batch_shape,
    check_implementation,
    no_adapters,
    take_adapter_names,
)
from moelora.integrations.transformers.experts import activation_of
from moelora.integrations.transformers.fp8 import pack_loaded
from moelora.integrations.transformers.hub import local_folder
from moelora.integrations.transformers.layers import moe_layers, offloaded
from moelora.integrations.transformers.projection import (
    expert_weights,
    is_loaded_fp8,
    not_packed,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from moelora.integrations.transformers.projection import Experts


DEFAULT_RANKS = 512  # the largest that engines serve; one expert of a file could have any


class _Now(threading.local):
    """What the calls of one thread carry; every thread finds it empty."""

    def __init__(self) -> None:  # not class attributes: torch.compile would take those for constant
        self.slots: torch.Tensor | None = None  # (rows,) int32, of the innermost use_adapters
        self.mapping: torch.Tensor | None = None  # (tokens,) int32, of the pass under way


class _Serving:
    """What a model with adapters carries: its pool, and which adapter each row of a batch has.

    The model and its experts modules refer to it by plain attributes, which torch.compile can
    read. A copy of the model, or one that was pickled, has no adapters: copies are empty.
    """

    def __init__(self) -> None:
        self.pool: AdapterPool | None = None
        self.layers: dict[str, LayerFactors] = {}
        self.configs: dict[str, Any] = {}  # of the experts modules
        self.now = _Now()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Serving:
        copied = memo[id(self)] = _Serving()
        return copied

    def __reduce__(self) -> tuple[type[_Serving], tuple[()]]:
        return _Serving, ()

    def call(
        self,
        forward: Callable[..., Any],
        adapter_names: Sequence[str | None] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """A forward pass: takes `adapter_names` and spreads the rows over the pass's tokens."""
        if adapter_names is not None:
            with self.hold(adapter_names) as slots:
                return self._pass(slots, forward, args, kwargs)
        if self.now.slots is not None:
            return self._pass(self.now.slots, forward, args, kwargs)
        return forward(*args, **kwargs)

    def _pass(
        self,
        slots: torch.Tensor,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        shape = batch_shape(args, kwargs)
        if shape is None:
            raise ValueError("use_adapters: the model was called without input_ids, inputs_embeds")
        rows, length = shape
        if rows != slots.shape[0]:
            raise ValueError(
                f"use_adapters names {slots.shape[0]} rows, the model was called with {rows}; "
                "if generate made copies of each row (num_beams, num_return_sequences) pass their "
                "number as expand="
            )
        outer = self.now.mapping
        try:
            self.now.mapping = slots[:, None].expand(rows, length).reshape(-1)
            return forward(*args, **kwargs)
        finally:
            self.now.mapping = outer

    @contextmanager
    def hold(self, names: Sequence[str | None], expand: int = 1) -> Iterator[torch.Tensor]:
        """Keeps adapters in their slots; gives the slot of each row, (rows * expand,) int32."""
        if self.pool is None:
            raise RuntimeError("this copy of a model has no adapters; call load_adapters first")
        if isinstance(names, str):
            raise ValueError(f"names is the string {names!r}, wanted one name per row of the batch")
        if expand < 1:
            raise ValueError(f"expand is {expand}, wanted >= 1")
        for layer, config in self.configs.items():
            check_implementation(layer, config)
        names = [None if name == BASE else name for name in names for _ in range(expand)]
        with self.pool.hold(names):
            yield self.pool.mapping(names)

    def adapters(self, layer: str, hidden_states: torch.Tensor) -> dict[str, Any]:
        """The adapter arguments of `fused_experts_lora` for one layer."""
        mapping = self.now.mapping
        if mapping is None and self.now.slots is None:
            return {}
        if mapping is None or mapping.shape[0] != hidden_states.shape[0]:
            tokens = None if mapping is None else mapping.shape[0]
            raise RuntimeError(
                f"use_adapters: {hidden_states.shape[0]} tokens reached the experts, but the call "
                f"of the model had {tokens}; call the model that was given to use_adapters"
            )
        return {"token_lora_mapping": mapping, **self.layers[layer]}


def new_pool(
    layers: Mapping[str, tuple[Experts, MoELayer]],
    max_loras: int,
    max_rank: int,
    *,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> AdapterPool:
    """An empty pool for the result of `moe_layers`, on the device of the experts.

    Raises NotImplementedError for experts that moelora cannot run or that are on several devices.
    """
    for name, (module, _) in layers.items():
        if is_loaded_fp8(module):
            raise NotImplementedError(not_packed(name))
        activation_of(module)
    weights = [expert_weights(module)[1] for module, _ in layers.values()]
    for name, weight in zip(layers, weights, strict=True):
        if weight.device.type == "meta":
            raise NotImplementedError(f"{offloaded(name)}; a pool of adapters needs them in memory")
    devices = {w.device for w in weights}
    if len(devices) > 1:
        raise NotImplementedError(
            f"the experts are on {sorted(map(str, devices))}; a pool of adapters lives on one "
            "device: load the model whole on one, not with device_map='auto'"
        )
    specs = [layer for _, layer in layers.values()]
    dtype = dtype or weights[0].dtype
    return AdapterPool(specs, max_loras, max_rank, dtype=dtype, device=devices.pop(), **options)


def load_adapters(
    model: PreTrainedModel,
    adapters: Mapping[str, str | Path] | Iterable[str | Path],
    *,
    max_loras: int | None = None,
    max_rank: int | None = None,
    dtype: torch.dtype | None = None,
    w13_slices: Literal[1, 2] | None = None,
    shared_outer: bool | None = None,
) -> AdapterPool:
    """Loads PEFT adapter folders into a pool and attaches it to `model`.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Its experts implementation becomes `"moelora"`, and calls of it and of its `generate` take
        `adapter_names`: one name per row of the batch, "__base__" or None for the base model.
        Experts that transformers has loaded in FP8 are packed, as by `enable`.
    adapters : mapping or iterable
        Name -> folder with `adapter_config.json` and `adapter_model.safetensors`, or its id on the
        Hub ("org/name"); or these alone, whose last part becomes the adapter's name. All factors
        must be of experts: adapters of attention, too, are for PEFT and
        `moelora.integrations.peft.attach`.
    max_loras, max_rank : int, optional
        Size of the pool; by default just enough for `adapters`, whose ranks are at most 512 then.
        Give more to add others later with `pool.add(name, folder)`.
    dtype : torch.dtype, optional
        Of the factors, by default that of the experts.
    w13_slices, shared_outer : optional
        See `AdapterPool`; by default what suits all of `adapters`.

    Returns
    -------
    AdapterPool
        The pool; a model has one, `unload_adapters` detaches it.
    """
    if getattr(getattr(model, "_moelora", None), "pool", None) is not None:
        raise RuntimeError(
            "the model has a pool already; add to that one, or unload_adapters first"
        )
    named = _named(adapters)
    if max_loras is not None and len(named) > max_loras:
        raise ValueError(f"{len(named)} adapters do not fit into max_loras={max_loras}")
    found = moe_layers(model)
    for name, (module, _) in found.items():
        if model.get_submodule(name) is not module:
            raise ValueError(
                f"{name} is wrapped by PEFT; load adapters into the plain model, or attach "
                "moelora.integrations.peft to what PEFT has loaded"
            )
    specs = [layer for _, layer in found.values()]

    folders = {name: local_folder(folder, ["adapter_*"]) for name, folder in named.items()}
    infos = [_peek(folder, specs) for folder in folders.values()]
    for name, info in zip(folders, infos, strict=True):
        if max_rank is None and info.max_rank > DEFAULT_RANKS:
            raise ValueError(
                f"adapter {name!r} has rank {info.max_rank}, which all experts of every slot would "
                f"be padded to; by default a pool takes ranks up to {DEFAULT_RANKS}, pass max_rank="
            )
    pack_loaded(model, found)  # for good, so behind what may still refuse the folders
    if w13_slices is None:
        w13_slices = 1 if infos and all(i.fused for i in infos) else 2
    if shared_outer is None:
        shared_outer = bool(infos) and all(i.shared_outer for i in infos)
    if max_rank is None:
        # Gate and up of a checkpoint that keeps them apart share one slice where rows interleave.
        joined = any(layer.interleaved for layer in specs)
        max_rank = max(
            (i.max_rank * (2 if joined and not i.fused else 1) for i in infos), default=16
        )
    pool = new_pool(
        found,
        max(len(folders), 1) if max_loras is None else max_loras,
        max_rank,
        dtype=dtype,
        w13_slices=w13_slices,
        shared_outer=shared_outer,
    )
    for name, folder in folders.items():
        pool.add(name, folder)

    model.set_experts_implementation(IMPLEMENTATION)
    serving = _Serving()
    serving.pool = pool
    serving.layers = {name: pool.layer(name) for name in found}
    serving.configs = {name: module.config for name, (module, _) in found.items()}
    for name, (module, _) in found.items():
        module._moelora, module._moelora_layer = serving, name
    model.__dict__["_moelora"] = serving
    take_adapter_names(model)
    if hasattr(type(model), "generate"):
        generate = functools.partial(_generate, model)
        theirs: Any = model.generate  # for its signature
        model.__dict__["generate"] = functools.update_wrapper(generate, theirs, (), ())
    return pool


def _peek(folder: Path, specs: Sequence[MoELayer]) -> AdapterInfo:
    try:
        return peek(folder, specs)
    except ValueError as error:
        if "is not a LoRA factor of an expert" not in str(error):
            raise
        raise ValueError(
            f"{error}. An adapter of other layers, too, is for PEFT: load it with PeftModel and "
            "call moelora.integrations.peft.attach"
        ) from None


def _named(adapters: Mapping[str, str | Path] | Iterable[str | Path]) -> dict[str, str | Path]:
    if isinstance(adapters, Mapping):
        return dict(adapters)
    if isinstance(adapters, (str, Path)):
        raise ValueError(f"adapters is {str(adapters)!r}, wanted a mapping or a list of folders")
    folders = list(adapters)
    names = [Path(folder).name for folder in folders]
    if len(set(names)) < len(names):
        raise ValueError(f"the folders are called {names}, two the same; pass a mapping")
    return dict(zip(names, folders, strict=True))


def _generate(
    model: Any, *args: Any, adapter_names: Sequence[str | None] | None = None, **kwargs: Any
) -> Any:
    """`generate` with the argument `adapter_names`, one per row that its caller passes."""
    generate = type(model).generate
    if adapter_names is None:
        return generate(model, *args, **kwargs)
    config = kwargs.get("generation_config") or model.generation_config
    copies = (
        kwargs.get(name) or getattr(config, name) or 1
        for name in ("num_beams", "num_return_sequences")
    )
    with use_adapters(model, adapter_names, expand=max(copies)):
        return generate(model, *args, **kwargs)


def unload_adapters(model: PreTrainedModel) -> None:
    """Detaches the pool from the model, which goes on as base model and refuses `adapter_names`."""
    serving = _serving(model)
    model.__dict__.pop("generate", None)
    for module in model.modules():
        if module.__dict__.get("_moelora") is serving:
            del module._moelora


@contextmanager
def use_adapters(
    model: PreTrainedModel, names: Sequence[str | None], *, expand: int = 1
) -> Iterator[None]:
    """Within the context, row i of every batch given to `model` carries adapter `names[i]`.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A model that went through `load_adapters`.
    names : sequence of str or None
        One adapter per row, None or "__base__" for the base model.
    expand : int
        Consecutive rows per name: the num_beams or num_return_sequences (whichever is larger) with
        which `generate` copies each row.

    Notes
    -----
    The adapters stay in their slots until the context ends. The context is that of the thread that
    enters it: other threads, those started inside it too, call the model at the same time with
    adapters of their own or none. Tasks of one event loop share a thread: do not await inside.
    """
    serving = _serving(model)
    with serving.hold(names, expand) as slots:
        outer = serving.now.slots
        try:
            serving.now.slots = slots
            yield
        finally:
            serving.now.slots = outer


def _serving(model: PreTrainedModel) -> _Serving:
    serving = model.__dict__.get("_moelora")
    if not isinstance(serving, _Serving) or serving.pool is None:
        raise no_adapters(model)
    return serving
