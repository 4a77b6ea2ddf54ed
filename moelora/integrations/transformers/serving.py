"""State of a model with adapters: its pool, and the adapter of each row of a batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from moelora.adapters import AdapterPool
from moelora.adapters.held import Held
from moelora.adapters.linears import LinearFactors
from moelora.adapters.names import BASE, listed
from moelora.adapters.slots import LayerFactors
from moelora.integrations.transformers.calls import batch_shape, check_implementation
from moelora.integrations.transformers.tokens import Tokens
from moelora.operators.setting import setting

WAIT_S = 60.0  # how long a batch waits for slots that others use, in a pool with host memory


class _Now(threading.local):
    """State of the calls of one thread; initially empty in every thread."""

    def __init__(self) -> None:  # torch.compile would treat class attributes as constant
        self.rows: Rows | None = None  # of the innermost use_adapters
        self.tokens: Tokens | None = None  # of the current pass
        self.travelled: torch.Tensor | None = None  # slots of rows from other processes


@dataclass(eq=False)
class Rows:
    """The adapter of each row, for every batch that a thread passes to a model.

    With `layerwise`, copies of adapters may still be in progress, and each layer waits for its own.
    """

    names: list[str | None]
    slots: Mapping[torch.device, torch.Tensor]  # (rows,) int32, on every device of the pool
    held: Held
    layerwise: bool

    def begin_step(self, pool: AdapterPool) -> None:
        """Take new versions of adapters, if they are to be switched to."""
        if self.held.is_behind():
            new = pool.mapping(self.names, held=self.held)
            for slots in self.slots.values():
                slots.copy_(new)


class Routes(NamedTuple):
    """Routing of a token in a layer with one expert, to be expanded to all tokens."""

    topk_ids: torch.Tensor  # (1, 1) int32
    topk_weights: torch.Tensor  # (1, 1) float32


class Home(NamedTuple):
    """A served module, and its original place in the model."""

    parent: nn.Module
    attribute: str
    module: nn.Module

    def now(self) -> nn.Module | None:
        return self.parent._modules.get(self.attribute)

    def is_there(self) -> bool:
        """Whether the model still calls the module, or a compiler's wrapper around it."""
        now = self.now()
        return now is self.module or (
            now is not None and any(module is self.module for module in now.modules())
        )


class Serving:
    """The pool of a model, and the parts of it that modules read.

    The model and its modules refer to it by plain attributes, which torch.compile can read. Copies
    and pickles of it are empty: a copied model has no adapters.
    """

    def __init__(self) -> None:
        self.pool: AdapterPool | None = None
        self.layers: dict[str, LayerFactors] = {}  # of experts
        self.linears: dict[str, LinearFactors] = {}
        self.devices: dict[str, torch.device] = {}
        self.routes: dict[torch.device, Routes] = {}
        self.configs: dict[str, Any] = {}  # of the experts modules
        self.homes: dict[str, Home] = {}
        self.checkpointed: list[nn.Module] = []  # modules that activation checkpointing may repeat
        self.now = _Now()
        self.batch = 0  # of the batches that a parallel model has at a time

    def __deepcopy__(self, memo: dict[int, Any]) -> Serving:
        copied = memo[id(self)] = Serving()
        return copied

    def __reduce__(self) -> tuple[type[Serving], tuple[()]]:
        return Serving, ()

    def take(
        self,
        pool: AdapterPool,
        model: nn.Module,
        modules: Mapping[str, nn.Module],
        configs: dict[str, Any],
    ) -> None:
        """Start to serve the adapters of a pool.

        `modules` are those of `model`, by layer; `configs` those of its experts modules.
        """
        self.pool = pool
        self.layers = {name: pool.layer(name) for name in pool.layers}
        self.linears = {name: pool.linear(name) for name in pool.linears}
        self.devices = {name: place.device for name, place in pool.places.items()}
        for device in pool.devices:
            first = torch.zeros(1, 1, dtype=torch.int32, device=device)
            self.routes[device] = Routes(first, torch.ones(1, 1, device=device))
        self.configs = configs
        names = {id(module): name for name, module in modules.items()}
        self.homes = {
            names[id(child)]: Home(parent, attribute, child)
            for parent in model.modules()
            for attribute, child in parent._modules.items()
            if id(child) in names and child is not None
        }
        self.checkpointed = [m for m in model.modules() if hasattr(m, "gradient_checkpointing")]

    def call(
        self,
        forward: Callable[..., Any],
        adapter_names: Sequence[str | None] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Runs a forward pass with `adapter_names`, expanded from rows to the pass's tokens."""
        if adapter_names is not None:
            layerwise = not torch.compiler.is_compiling()
            with self.hold(adapter_names, layerwise=layerwise) as rows:
                return self._pass(self._tokens(rows, args, kwargs), forward, args, kwargs)
        row = getattr(kwargs.get("cache"), "_moelora_row", None)  # of continuous batching
        if row is not None:
            slots = kwargs["logits_processor_args"][row]
            return self._pass(self._packed(slots, kwargs), forward, args, kwargs)
        if self.now.rows is not None:
            return self._pass(self._tokens(self.now.rows, args, kwargs), forward, args, kwargs)
        return forward(*args, **kwargs)

    def _pass(
        self,
        tokens: Tokens,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if torch.is_grad_enabled():
            self._check_checkpointing()
        outer = self.now.tokens  # no context: an interrupt as it exits would leave the tokens
        try:
            self.now.tokens = tokens
            return forward(*args, **kwargs)
        finally:
            self.now.tokens = outer

    def _check_checkpointing(self) -> None:
        """Raises RuntimeError if a layer would be repeated without the adapters of its rows."""
        for module in self.checkpointed:
            if not (module.gradient_checkpointing and module.training):
                continue
            function = getattr(module, "_gradient_checkpointing_func", None)
            if getattr(function, "keywords", {}).get("context_fn") != self.contexts:
                raise RuntimeError(
                    "gradient_checkpointing_enable repeats layers in the backward without the "
                    "adapters of their rows; call "
                    "moelora.integrations.transformers.enable_checkpointing(model)"
                )

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """`context_fn` of activation checkpointing: of a part of the pass, and of its repetition.

        That happens in the backward, after the pass and maybe in another thread.
        """
        return nullcontext(), setting(self.now, "tokens", self.now.tokens)

    def _tokens(self, rows: Rows, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tokens:
        shape = batch_shape(args, kwargs)
        if shape is None:
            raise ValueError("use_adapters: the model was called without input_ids, inputs_embeds")
        if shape[0] != len(rows.names):
            raise ValueError(
                f"adapter_names or use_adapters names {len(rows.names)} rows, the model was called "
                f"with {shape[0]}; if generate made copies of each row (num_beams, "
                "num_return_sequences) pass their number as expand="
            )
        if not torch.compiler.is_compiling():  # a compiled pass keeps its versions
            rows.begin_step(self.loaded())
        return Tokens(rows.slots, *shape, arriving=rows.held if rows.layerwise else None)

    def _packed(self, slots: torch.Tensor, kwargs: dict[str, Any]) -> Tokens:
        """Tokens of continuous batching: one row, in which request n starts at the n-th of
        `cu_seq_lens_q`. Tokens after the last request are padding."""
        if not torch.compiler.is_compiling():
            self.loaded().note_stream()  # a manager has one for its batches and one for the model
        length = kwargs["input_ids"].size(1)
        ends = kwargs["cu_seq_lens_q"][1:].contiguous()
        position = torch.arange(length, device=ends.device, dtype=ends.dtype)
        request = torch.searchsorted(ends, position, right=True)
        each = torch.nn.functional.pad(slots, (0, 1), value=-1)[request]
        kept = kwargs.get("logits_to_keep")
        return Tokens(
            {device: each.to(device) for device in self.loaded().devices},
            1,
            length,
            packed=True,
            kept=kept if isinstance(kept, torch.Tensor) else None,
        )

    @contextmanager
    def hold(
        self, names: Sequence[str | None], expand: int = 1, *, layerwise: bool = False
    ) -> Iterator[Rows]:
        """Keeps adapters in their slots, and yields the slots of all rows, (rows * expand,).

        A pool with host memory brings them, and waits for slots that are in use.
        """
        pool = self.loaded()
        plain = [None if name == BASE else name for name in listed(names) for _ in range(expand)]
        self.check()
        timeout = WAIT_S if pool.host else 0.0
        alone = pool.ranks is None or torch.compiler.is_compiling()
        hold = pool.hold if alone else self._hold_on_all_ranks
        with hold(plain, timeout=timeout, layerwise=layerwise) as held:
            slots = pool.mapping(plain, held=held)
            own = {device: slots.to(device) for device in pool.devices}
            yield Rows(plain, own, held, layerwise)

    @contextmanager
    def _hold_on_all_ranks(self, names: list[str | None], **options: Any) -> Iterator[Held]:
        """`AdapterPool.hold`, of the same versions in the same slots on all ranks."""
        pool = self.loaded()
        assert pool.ranks is not None

        def facts(held: Held) -> dict[str, object]:
            places = {name: (held.slot(name), held.version(name)) for name in held.names()}
            each = {f"slot and version of {name}": place for name, place in places.items()}
            return {f"the adapters of rows of batch {self.batch}": names, **each}

        with ExitStack() as stack:
            holding = pool.hold(names, **options)
            yield pool.ranks.together("a batch", lambda: stack.enter_context(holding), facts)

    def loaded(self) -> AdapterPool:
        """The pool; raises RuntimeError without one."""
        if self.pool is None:
            raise RuntimeError("this copy of a model has no adapters; call load_adapters first")
        return self.pool

    def check(self) -> None:
        """Raises RuntimeError if some layers would run without their adapters."""
        for layer, config in self.configs.items():
            check_implementation(layer, config)
        for layer, home in self.homes.items():
            if not home.is_there():
                raise RuntimeError(
                    f"{layer} is a {type(home.now()).__name__} that has taken the place of the one "
                    "that adapters were loaded for; call unload_adapters, then load_adapters"
                )

    def tokens(self, layer: str) -> Tokens | None:
        """The tokens of the current pass of `layer`; None for the base model."""
        tokens = self.now.tokens
        if tokens is None and self.now.rows is not None:
            raise RuntimeError(
                f"use_adapters: {layer} was called outside a call of the model; call the model "
                "that was given to use_adapters"
            )
        if tokens is not None and tokens.arriving is not None:
            tokens.arriving.wait(layer)
        return tokens

    def adapters(self, layer: str, hidden_states: torch.Tensor) -> dict[str, Any]:
        """The adapter arguments of `fused_experts_lora` for one layer."""
        mapping = self.now.travelled
        if mapping is None:
            tokens = self.tokens(layer)
            if tokens is None:
                return {}
            mapping = tokens.of(layer, hidden_states.shape[:-1], self.devices[layer])
        return {"token_lora_mapping": mapping, **self.layers[layer]}

    def slots_of(self, layer: str, hidden_states: torch.Tensor) -> torch.Tensor:
        """The slot of each row, (rows,) int32; -1 in a pass of the base model."""
        tokens = self.tokens(layer)
        if tokens is None:
            return hidden_states.new_full(hidden_states.shape[:1], -1, dtype=torch.int32)
        return tokens.of(layer, hidden_states.shape[:-1], self.devices[layer])
