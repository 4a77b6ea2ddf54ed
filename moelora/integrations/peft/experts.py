"""Experts of a PEFT model: a pool with PEFT's current factors, for rows with any adapter."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import peft
import torch
from torch import nn
from transformers import PreTrainedModel

from moelora.adapters import AdapterPool, NoSlot
from moelora.adapters.names import BASE
from moelora.integrations.peft import linears, sources
from moelora.integrations.peft.parallel import Part, Passing, begin
from moelora.integrations.peft.wrappers import (
    Wrapper,
    factors_of,
    is_trained,
    rank_of,
    trained_arguments,
)
from moelora.integrations.transformers.calls import batch_shape, check_implementation
from moelora.integrations.transformers.experts import lay_out
from moelora.integrations.transformers.projection import Experts, expert_weights, refuse_fsdp1
from moelora.operators.setting import setting

# Options that do not concern experts, and remain PEFT's.
OTHER_LAYERS = ("modules_to_save", "trainable_token_indices")

_data: Any = nn.Parameter.data  # torch's own descriptor


class Watched(nn.Parameter):
    """A PEFT factor that detects writes through `data`, as by PEFT's hotswap.

    Autograd's version counter misses them. Here all tensors that `data` returns alias one tensor,
    and share its version counter.
    """

    @property
    def data(self) -> torch.Tensor:
        plain, alias = _data.__get__(self), self.__dict__.get("_alias")
        if alias is None or not alias.is_set_to(plain):
            with torch.inference_mode(False):  # inference tensors have no counters
                alias = self._alias = _data.__get__(self)
        return alias.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _data.__set__(self, value)
        self._alias = value.detach()


def _watch(module: nn.Module) -> list[Any]:
    """Values that identify the current content of `module.weight`, now and later."""
    refuse_fsdp1(module, "weight")
    weight = module._parameters["weight"]  # avoids the overhead of module.weight
    assert weight is not None
    if weight.is_inference():  # has no counter
        with torch.inference_mode(False), torch.no_grad():
            weight = module.weight = nn.Parameter(weight.clone(), weight.requires_grad)
    if type(weight) is not Watched:
        weight.__class__ = Watched
        weight.__dict__.pop("_alias", None)
    alias = weight.__dict__.get("_alias")
    if alias is None:
        weight.data  # noqa: B018, creates it
        alias = weight.__dict__["_alias"]
    return [weight, weight._version, alias, alias._version]


def unwatch(modules: Iterable[nn.Module]) -> None:
    """Restore the parameters' class, for optimizers and compilers; if served again, they are copied
    again.
    """
    for module in modules:
        if type(module._parameters.get("weight")) is Watched:
            module._parameters["weight"].__class__ = nn.Parameter  # type: ignore[assignment]


def _stamps(wrappers: Sequence[Wrapper], name: str) -> list[Any]:
    """For one layer, everything that an adapter's part of PEFT's result may depend on."""
    stamps: list[Any] = []
    for wrapper in wrappers:
        modules: Any = wrapper._modules
        a, b = (modules[side]._modules.get(name) for side in ("lora_A", "lora_B"))
        if a is not None:
            scaling = wrapper.scaling[name]
            version = scaling._version if isinstance(scaling, torch.Tensor) else 0
            stamps += [*_watch(a), *_watch(b), scaling, version]
    return stamps


def _unchanged(stamps: list[Any], now: list[Any]) -> bool:
    """Objects are compared by identity, numbers by value."""

    def same(x: Any, y: Any) -> bool:
        return x is y or (isinstance(x, (int, float)) and isinstance(y, (int, float)) and x == y)

    return len(stamps) == len(now) and all(map(same, stamps, now))


class _Now(threading.local):
    """The batch, (rows, tokens per row), of the current forward pass of a thread."""

    def __init__(self) -> None:
        self.shape: tuple[int, int] | None = None


@dataclass(eq=False)
class AttachedExperts:
    """Serves the experts modules of an attached model; copies PEFT's factors on first use."""

    model: peft.PeftModel | PreTrainedModel
    wrappers: Mapping[str, Sequence[Wrapper]]  # by layer
    pool: AdapterPool
    parts: Mapping[str, Part] = field(default_factory=dict)  # of layers that processes share
    passing: Passing = field(default_factory=Passing)
    copied: dict[str, dict[str, list[Any]]] = field(default_factory=dict)  # by adapter, by layer
    checked: dict[str, Any] = field(default_factory=dict)  # adapter -> its load that was checked
    known: dict[str, Any] = field(default_factory=dict)  # adapters at the last scan of the layers
    lock: Any = field(default_factory=threading.RLock)
    now: _Now = field(default_factory=_Now)
    _mapping: tuple[Any, torch.Tensor] | None = None  # the latest one

    def __post_init__(self) -> None:
        self.arguments = {name: self.pool.layer(name) for name in self.pool.layers}

    def __getstate__(self) -> tuple[Any, ...]:
        """A copy of the model has an empty pool, which is filled from the copied adapters.

        An unpickled model has to be attached again.
        """
        p = self.pool
        if self.parts:
            raise TypeError("a model that processes share is neither copied nor pickled")
        options = {"dtype": p.dtype, "device": p.device, "places": p.places, "w13_slices": 1}
        return (
            self.model,
            self.wrappers,
            (list(p.layers.values()), p.max_loras, p.max_rank),
            options,
        )

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        model, wrappers, sizes, options = state
        AttachedExperts.__init__(self, model, wrappers, AdapterPool(*sizes, **options))

    def call(
        self,
        forward: Callable[..., Any],
        adapter_names: Sequence[str] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a forward pass of the model within PEFT's."""
        if adapter_names is not None:
            if isinstance(self.model, peft.PeftModel):
                where = "pass adapter_names to the PEFT model, not to the model inside it"
            else:  # only PeftModel has the hooks that pass names to other layers
                where = "model.load_adapter takes no adapter_names; load with peft.PeftModel"
            raise RuntimeError(where)
        self.take_layers()
        outer = self.now.shape
        try:
            self.now.shape = batch_shape(args, kwargs)
            return forward(*args, **kwargs)
        finally:
            self.now.shape = outer

    @property
    def configs(self) -> Mapping[str, Any]:
        """Of current adapters; transformers deletes the attribute with the last one."""
        return getattr(self.model, "peft_config", {})

    def take_layers(self) -> None:
        """Take what PEFT has loaded since: install `adapter_names` support in its layers, and let
        processes share its factors."""
        now = dict(self.configs)
        if list(now) != list(self.known) or any(self.known[n] is not c for n, c in now.items()):
            experts = chain.from_iterable(self.wrappers.values())
            linears.install(self.model, self, experts)
            self.share()
            self.known = now

    def share(self) -> None:
        """`begin`, for factors that processes do not share yet."""
        split = [n for n, part in self.parts.items() if part.shard.axis == "experts"]
        wrappers = chain.from_iterable(self.wrappers[name] for name in split)
        begin(self.model, sources.base_of(self.model), wrappers)

    def copy(self, name: str) -> None:
        """Copy the current factors of a PEFT adapter into the pool."""
        if name not in self.configs:
            raise ValueError(f"no adapter {name!r}; PEFT has {sorted(self.configs)}")
        load = sources.load_of(self.model, name)
        if self.checked.get(name, self) is not load:
            sources.check(self.model, name)
            self.checked[name] = load
        stamps = {layer: _stamps(wrappers, name) for layer, wrappers in self.wrappers.items()}
        found = {
            f"{layer}.{wrapper.parameter_name}": wrapper
            for layer, wrappers in self.wrappers.items()
            for wrapper in wrappers
            if name in wrapper.lora_A
        }
        if found:
            state, config = _checkpoint(found, name, self.configs[name].to_dict())
            self._add(name, state, config)
        elif name in self.pool:
            self.pool.remove(name)
        self.copied[name] = stamps

    def _add(self, name: str, state: Mapping[str, torch.Tensor], config: dict[str, Any]) -> None:
        """Add an adapter to the pool, or raise with the arguments of `attach` that make room."""
        pool = self.pool
        if config["r"] > pool.max_rank:
            raise ValueError(
                f"adapter {name!r} has rank {config['r']}, the pool has room for "
                f"{pool.max_rank}; attach(model, max_rank={config['r']}) makes room"
            )
        try:
            pool.add(name, state, config=config, replace=True)
        except NoSlot as error:
            raise NoSlot(
                f"{error}; attach(model, max_loras=) sets how many adapters a batch, and batches "
                "that run at the same time, may use"
            ) from None

    def slot(self, layer: str, name: str) -> int:
        """Slot with PEFT's current factors; -1 for an adapter without experts' factors."""
        copied = self.copied.get(name)
        if (
            copied is None
            or not _unchanged(copied[layer], _stamps(self.wrappers[layer], name))
            or (name not in self.pool and any(copied.values()))
        ):
            self.copy(name)
        return self.pool.lookup(name) if name in self.pool else -1

    @contextmanager
    def adapters(
        self, layer: str, rows: Sequence[str] | None, active: str, hidden_states: torch.Tensor
    ) -> Iterator[dict[str, Any]]:
        """Adapter arguments of `fused_experts_lora` for one call of one layer.

        `rows` names the adapter of each row of the batch; None: `active` for all rows.
        """
        names = [active] if rows is None else rows
        shape = self.now.shape
        if rows is not None and shape is not None and len(rows) != shape[0]:
            raise ValueError(
                f"adapter_names has {len(rows)} names, the model was called with {shape[0]} rows; "
                "if generate makes copies of each row (num_return_sequences) repeat its name"
            )
        slots = {BASE: -1}
        with ExitStack() as held:
            with self.lock:
                # Adapters of this batch must not evict each other.
                for name in sorted(set(names) - {BASE}, key=lambda n: n not in self.pool):
                    slots[name] = self.slot(layer, name)
                    if slots[name] >= 0:
                        held.enter_context(self.pool.hold([name]))
            ids = [slots[name] for name in names]
            if max(ids, default=-1) < 0:
                yield {}
            else:
                mapping = self._token_mapping(layer, ids, hidden_states)
                yield {"token_lora_mapping": mapping, **self.arguments[layer]}

    def trained(
        self, layer: str, slots: Sequence[str], names: Sequence[str], hidden_states: torch.Tensor
    ) -> dict[str, Any]:
        """The same, read from PEFT's parameters: `slots` are adapters' in this call only.

        For adapters in training, and for compilers, which cannot trace what a pool remembers.
        """
        wrappers = self.wrappers[layer]
        slots = [
            name for name in slots if name in wrappers[0].lora_A
        ]  # others belong to other layers
        if not slots:
            return {}
        if not torch.compiler.is_compiling():
            for wrapper in wrappers:
                for side in (wrapper.lora_A, wrapper.lora_B):
                    unwatch(side[name] for name in slots)
        ids = [slots.index(name) if name in slots else -1 for name in names]
        if len(set(ids)) == 1:  # independent of the tokens
            mapping = hidden_states.new_full((hidden_states.shape[0],), ids[0], dtype=torch.int32)
        else:
            mapping = self._token_mapping(layer, ids, hidden_states)
        experts = wrappers[0].get_base_layer()
        lay_out(experts)
        dtype = expert_weights(experts)[1].dtype
        return trained_arguments(wrappers, slots, mapping, dtype, self.parts.get(layer))

    def run(
        self, layer: str, experts: Experts, adapters: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """The experts, with adapter arguments."""
        part = self.parts.get(layer)
        if part is None or part.shard.axis != "experts":
            return experts(*args, adapters=adapters, **kwargs)
        # transformers' exchange does not pass them on.
        with setting(self.passing, "arguments", adapters):
            return experts(*args, **kwargs)

    def _token_mapping(
        self, layer: str, ids: list[int], hidden_states: torch.Tensor
    ) -> torch.Tensor:
        tokens, shape = hidden_states.shape[0], self.now.shape
        if len(set(ids)) == 1:
            ids = ids[:1]  # independent of the tokens
        elif shape is None or shape[0] * shape[1] != tokens:
            called = "outside a call of the model" if shape is None else f"of {shape} in the batch"
            raise RuntimeError(
                f"{tokens} tokens {called} reached {layer}: rows of different adapters need all "
                "tokens of the batch there; call the PEFT model with one adapter at a time"
            )
        key = (ids, tokens, hidden_states.device)
        latest = None if torch.compiler.is_compiling() else self._mapping
        if latest is None or latest[0] != key:
            rows = torch.tensor(ids, dtype=torch.int32).to(hidden_states.device)
            latest = key, rows[:, None].expand(-1, tokens // len(ids)).reshape(-1)
            if not torch.compiler.is_compiling():
                self._mapping = latest
        return latest[1]


def _checkpoint(
    wrappers: Mapping[str, Wrapper], name: str, config: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """One adapter as a state dict of stacked factors and its configuration.

    Taken from PEFT's modules, since hotswap changes factors and scaling, but not the configuration.
    """
    rank = max(rank_of(wrapper, name) for wrapper in wrappers.values())
    scalings = {key: float(wrapper.scaling[name]) for key, wrapper in wrappers.items()}
    common = next(iter(scalings.values())) if len(set(scalings.values())) == 1 else None
    state = {}
    for key, wrapper in wrappers.items():
        a, b = (factor.detach()[0] for factor in factors_of(wrapper, name))
        if common is None:
            b = b.float() * scalings[key]
        more = rank - a.shape[1]
        state[f"{key}.lora_A.weight"] = nn.functional.pad(a, (0, 0, 0, more))
        state[f"{key}.lora_B.weight"] = nn.functional.pad(b, (0, more))
    return state, config | {
        "r": rank,
        "lora_alpha": rank * (1.0 if common is None else common),
        "use_rslora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_parameters": None,
        **dict.fromkeys(OTHER_LAYERS),
        "peft_version": peft.__version__.partition(".dev")[0],
    }


def forward(
    wrapper: Wrapper,
    hidden_states: torch.Tensor,
    *args: Any,
    adapter_names: Sequence[str] | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Replaces `ParamWrapper.forward`: calls the experts with the rows' adapters."""
    serving: AttachedExperts = wrapper._moelora
    layer = wrapper._moelora_layer
    experts = wrapper.get_base_layer()
    check_implementation(layer, experts.config)
    wrappers = serving.wrappers[layer]
    active = wrapper.active_adapters or [BASE]
    if wrapper.disable_adapters:
        for each in wrappers:
            if each.merged:
                each.unmerge()  # as PEFT does
        active, adapter_names = [BASE], None
    elif any(each.merged for each in wrappers):
        _check_merged(layer, wrappers, active, adapter_names)
        active = [BASE]
    if adapter_names is None and len(active) > 1:
        raise NotImplementedError(
            f"adapters {active} are active at once; moelora applies one per row"
        )
    part = serving.parts.get(layer)
    if adapter_names is not None and part is not None and part.shard.axis == "experts":
        raise NotImplementedError(
            "adapter_names of PEFT in an expert-parallel model, whose rows go to processes with "
            "other names; take moelora.integrations.transformers.load_adapters"
        )
    names = active if adapter_names is None else adapter_names
    trained = sorted(set(names) - {BASE})
    if torch.compiler.is_compiling() or is_trained(wrappers, trained):
        adapters = serving.trained(layer, trained, names, hidden_states)
        return serving.run(layer, experts, adapters, hidden_states, *args, **kwargs)
    with serving.adapters(layer, adapter_names, active[0], hidden_states) as adapters:
        return serving.run(layer, experts, adapters, hidden_states, *args, **kwargs)


def _check_merged(
    layer: str, wrappers: Sequence[Wrapper], active: list[str], names: Sequence[str] | None
) -> None:
    """Raise unless the merged weights alone are what the call asks for."""
    if names is not None:
        raise ValueError(
            f"adapter_names with an adapter merged into {layer}; call unmerge_adapter first"
        )
    for wrapper in wrappers:
        left = [name for name in active if name in wrapper.lora_A]
        if left and not wrapper.merged:
            raise NotImplementedError(
                f"{layer}.{wrapper.parameter_name} has adapter {left[0]!r} beside others that are "
                "merged into the layer; call merge_adapter, or unmerge_adapter, of the model"
            )
