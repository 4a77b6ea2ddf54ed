"""Continuous batching: an adapter per request of `generate_batch` or of a manager.

transformers packs the tokens of many requests into one row and runs the model in another thread, so
neither rows nor the thread identify requests. But every request has arguments for logits
processors, which transformers copies to the device with each batch, as rows of int32, also with
overlapping batches and under CUDA graphs. We add a row with the slot of each request, which the
model reads (`Serving`).

Requests must not share blocks of the key-value cache: keys and values depend on the adapter.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import transformers

from moelora.adapters import AdapterPool
from moelora.adapters.held import Held
from moelora.adapters.names import BASE
from moelora.integrations.transformers.calls import no_adapters
from moelora.integrations.transformers.hooks import around
from moelora.integrations.transformers.serving import WAIT_S, Serving

ADAPTER = "adapter_name"  # argument of add_request
SLOT = "_moelora_slot"  # key of the slot in the request's arguments


@dataclass(eq=False)
class _Slot:
    """The slot of a request. `held` holds it until the request is done; copies share it."""

    pool: AdapterPool
    name: str
    held: Held | None
    last: int = -1

    @property
    def number(self) -> int:
        """The adapter's slot for the next batch; once the request is done, its last slot."""
        if self.held is not None:
            self.last = self.pool.lookup(self.name, held=self.held)
        return self.last

    def __deepcopy__(self, memo: dict[int, Any]) -> _Slot:
        return self

    def __reduce__(self) -> Any:
        return _Sent, (self.name,)  # to other processes of a parallel model


class _Sent(NamedTuple):
    """The adapter of a request from another process, whose slot each process looks up itself."""

    name: str


class _Prompt(list[int]):
    """The tokens of a request with its adapter, as passed to a manager."""

    def __init__(self, tokens: Iterable[int], name: str | None) -> None:
        super().__init__(tokens)
        self.adapter = None if name == BASE else name


def missing() -> str:
    """Why the installed transformers cannot serve requests with adapters; "" if it can."""
    try:
        from transformers import ContinuousBatchingConfig
        from transformers.generation.continuous_batching import cb_logits_processors as cb
        from transformers.generation.continuous_batching import requests
    except ImportError:
        return "has no continuous batching with arguments for each request"
    processors = getattr(cb, "ContinuousBatchingLogitsProcessorList", None)
    parts = (
        *(hasattr(processors, name) for name in ("prepare_tensor_args", "fill_defaults")),
        "requests_in_batch"
        in inspect.signature(getattr(processors, "prepare_tensor_args", len)).parameters,
        "logit_processor_kwargs" in getattr(requests.RequestState, "__dataclass_fields__", {}),
        hasattr(ContinuousBatchingConfig(), "allow_block_sharing"),
    )
    return "" if all(parts) else "hands no arguments of a request to the model"


def _generate_batch(
    generate_batch: Callable[..., Any],
    self: Any,
    inputs: Any,
    *args: Any,
    adapter_names: Sequence[str | None] | None = None,
    **kwargs: Any,
) -> Any:
    """`generate_batch` with the argument `adapter_names`, one name per input."""
    serving = getattr(self, "_moelora", None)
    if adapter_names is not None and serving is None:
        raise no_adapters(self)
    rows = serving.now.rows if isinstance(serving, Serving) else None
    if adapter_names is None and rows is None:
        return generate_batch(self, inputs, *args, **kwargs)
    if not isinstance(serving, Serving):
        raise NotImplementedError(
            "generate_batch with adapter_names: PEFT's names are for rows of a batch; load the "
            "adapters with moelora.integrations.transformers.load_adapters, or call generate"
        )
    pool = serving.loaded()
    if why := missing():
        raise NotImplementedError(
            f"transformers {transformers.__version__} {why}, which generate_batch with "
            "adapters needs; call generate"
        )
    names = list(rows.names if adapter_names is None and rows else adapter_names or ())
    if len(names) != len(inputs):
        raise ValueError(
            f"there are {len(names)} adapter names for {len(inputs)} inputs, wanted one each"
        )
    prompts = [_Prompt(tokens, name) for tokens, name in zip(inputs, names, strict=True)]
    # With host memory, each request loads its adapter when a slot is free.
    with pool.hold(() if pool.host else [prompt.adapter for prompt in prompts]):
        try:
            serving.now.rows = None  # requests have their own from here on
            return generate_batch(self, prompts, *args, **kwargs)
        finally:
            serving.now.rows = rows


def _init(
    init_continuous_batching: Callable[..., Any], self: Any, *args: Any, **kwargs: Any
) -> Any:
    """Adds the argument `adapter_name` to `add_request` of the manager that is returned."""
    serving = getattr(self, "_moelora", None)
    if not isinstance(serving, Serving) or serving.pool is None or missing():
        return init_continuous_batching(self, *args, **kwargs)  # the base model's
    bound = inspect.signature(init_continuous_batching).bind(self, *args, **kwargs)
    config = bound.arguments.get("continuous_batching_config")
    config = transformers.ContinuousBatchingConfig() if config is None else copy.copy(config)
    config.allow_block_sharing = False
    bound.arguments["continuous_batching_config"] = config
    manager = init_continuous_batching(*bound.args, **bound.kwargs)
    known = getattr(manager, "_moelora", None)
    if known is serving:  # reused from an earlier call
        return manager
    if known is not None or getattr(manager, "batch_processor", None) is not None:
        raise RuntimeError(
            "the model keeps a manager of continuous batching that knows none of its adapters; "
            "call model.destroy_cached_continuous_batching_manager() first"
        )
    manager._moelora = serving
    _carry_slots(manager)
    return manager


def _carry_slots(manager: Any) -> None:
    """Makes a new manager pass slots to the model."""
    processors = manager.logit_processor
    own: Any = type(processors)
    processors.__class__ = _with_slots(own)
    processors._moelora = manager._moelora
    row = processors.tensors_required
    processors.tensors_required = row + 1
    add, create = manager.add_request, manager._create_batch_processor

    @functools.wraps(add)
    def add_request(input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        serving: Serving = manager._moelora
        if serving.now.rows is not None:
            raise RuntimeError(
                "use_adapters is for rows of batches and for generate_batch; give a request its "
                f"adapter, add_request(..., {ADAPTER}=)"
            )
        name = kwargs.pop(ADAPTER, getattr(input_ids, "adapter", None))
        if name not in (None, BASE) and getattr(manager, "is_tp_driver", True):
            kwargs[SLOT] = _held(serving, name)
        return add(input_ids, *args, **kwargs)

    @functools.wraps(create)
    def create_batch_processor() -> Any:
        processor = create()
        processor.cache._moelora_row = row  # the model is called with the cache
        _release_done(processor.scheduler)
        return processor

    manager.add_request = add_request
    manager._create_batch_processor = create_batch_processor


def _held(serving: Serving, name: str) -> _Slot:
    pool = serving.loaded()
    serving.check()
    # KeyError lists loaded adapters. A pool with host memory waits for a slot.
    held = pool.keep([name], timeout=WAIT_S if pool.host else 0.0)
    held.synchronize()  # batches run on a stream of the manager
    return _Slot(pool, name, held)


def _release_done(scheduler: Any) -> None:
    """Releases the adapters of finished, failed and cancelled requests.

    An idle manager would otherwise keep those of its last batch.
    """
    if "finish_request" in vars(scheduler):  # a reused processor
        return
    finish, clear = scheduler.finish_request, scheduler.clear_cancelled_requests

    @functools.wraps(finish)
    def finish_request(request_id: str) -> None:
        state = scheduler.active_requests.get(request_id)
        finish(request_id)  # also called for offloaded requests, which continue later
        if state is not None and state.status.name in ("FINISHED", "FAILED"):
            _release(state)

    @functools.wraps(clear)
    def clear_cancelled_requests() -> Any:
        states = clear()
        for state in states or ():
            _release(state)
        return states

    scheduler.finish_request = finish_request
    scheduler.clear_cancelled_requests = clear_cancelled_requests


def _release(state: Any) -> None:
    slot = state.logit_processor_kwargs.get(SLOT)
    if slot is not None and not state.num_children:  # children are copies that are created later
        released = {SLOT: _Slot(slot.pool, slot.name, None, slot.number)}
        state.logit_processor_kwargs = state.logit_processor_kwargs | released


@functools.cache
def _with_slots(cls: Any) -> Any:
    """transformers' list of logits processors, with an additional row of arguments for slots."""

    class WithSlots(cls):  # type: ignore[misc] # a class of transformers
        def check_kwargs(self, kwargs: dict[str, Any]) -> None:
            if isinstance(sent := kwargs.get(SLOT), _Sent):
                kwargs[SLOT] = _held(self._moelora, sent.name)
            super().check_kwargs({k: v for k, v in kwargs.items() if k != SLOT})

        def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
            super().fill_defaults(int32_tensor)
            int32_tensor[-1].fill_(-1)

        def prepare_tensor_args(self, requests_in_batch: Any, arg_storage: torch.Tensor) -> Any:
            super().prepare_tensor_args(requests_in_batch, arg_storage)
            slots = [_slot(request.state) for request in requests_in_batch]
            arg_storage[-1, : len(slots)] = arg_storage.new_tensor(slots)
            return arg_storage

    return WithSlots


def _slot(state: Any) -> int:
    slot = state.logit_processor_kwargs.get(SLOT)
    return -1 if slot is None else slot.number


try:
    from transformers.generation.continuous_batching import ContinuousMixin
except ImportError:  # a release without
    pass
else:
    for name, hook in (("generate_batch", _generate_batch), ("init_continuous_batching", _init)):
        around(name, ContinuousMixin, optional=True)(hook)
