"""Adapters of waiting requests, copied to slots while other requests run.

vLLM gives an adapter a slot in the step that runs it, so that all requests of that step wait for
its copy. Here the loop of the engine asks its workers before each step:

    the engine   first waiting requests in order, as many adapters as slots are left by running ones
    a worker     gives those in host memory a slot that no running request needs, starts copies
                 (`activation`), and returns ids that no batch would wait for, or for their last
                 layers alone
    scheduling   a request whose adapter is on the way is passed over while others run

If none runs, the request is scheduled and its batch waits. Where a reply is late or out of date, a
batch waits as well: order is kept by the workers' streams alone. An adapter that is not in host
memory is read by the step that runs it, as without this. An engine asks where
`activation.is_wanted`, and not while it is paused: in a sleeping one slots have no memory.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from moelora.integrations import shown
from moelora.integrations.vllm import PREFETCH, activation, layers, say_once, wrap
from moelora.integrations.vllm.store import is_known, manager_of

METHOD = "moelora_prefetch"
SERVED = f"adapters are copied to slots while other requests run; {PREFETCH}=0 leaves it to vLLM"
OWN_COPIES = "vLLM copies an adapter to its slot in the step that runs it"
LOOKED_AT = 64  # waiting requests that could run, before each step


def install() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.gpu_worker import Worker

    activation.install()
    wrap(EngineCore, "step", _looking_ahead)
    wrap(EngineCore, "step_with_batch_queue", _looking_ahead)
    wrap(Scheduler, "_handle_blocked_waiting_request", _passing_over)
    setattr(Worker, METHOD, prefetch)


# -- the workers --


def prefetch(
    worker: Any, requests: Sequence[Any], running: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Bring adapters to slots, the first one first, without taking those of `running` ids; returns
    ids that can be scheduled, and those that the step which runs them loads, or refuses."""
    outer = manager_of(worker)
    inner = outer._adapter_manager
    kept, refused = set(running) | inner._active_adapters.pinned_items, []
    for request in requests:
        number = request.lora_int_id
        on_host = number in inner._registered_adapters or is_known(outer, request.lora_path)
        if request.load_inplace or not on_host:  # the step that runs it loads it
            refused.append(number)
            continue
        if len(kept | {number}) > inner.lora_slots:
            break
        activation.touch(inner, kept)
        kept.add(number)
        try:
            outer.add_adapter(request)
            say_once(SERVED, logging.INFO)
        except Exception as error:  # the step that runs it raises it
            refused.append(number)
            say_once(f"adapter {request.lora_name!r} is not copied ahead ({shown(error)})")
    inner._last_mapping = None  # of the slots before
    state = activation.activations(inner)
    if state and state.progress.order:
        state.progress.is_hooked = layers.is_hooked(worker)
    slots = enumerate(inner.lora_index_to_id)
    here = [n for slot, n in slots if n is not None and (not state or state.can_schedule(slot))]
    return here, refused


# -- the engine --


@dataclass
class _Ahead:
    """What an engine knows of its workers' slots, and whether it asks them at all."""

    here: set[int] | None = None  # ids that can be scheduled; None before the first reply
    refused: set[int] = field(default_factory=set)  # ids that the step which runs them loads
    running: set[int] = field(default_factory=set)  # ids of running requests
    reply: Any = None
    is_on: bool | None = None  # None before the first step


def _looking_ahead(step: Callable[..., Any], self: Any, *args: Any, **named: Any) -> Any:
    scheduler = self.scheduler
    if getattr(scheduler, "lora_config", None) is not None:
        ahead = scheduler.__dict__.setdefault("_moelora_ahead", _Ahead())
        if ahead.is_on is not False:
            try:
                _ask(ahead, scheduler, self.model_executor)
            except Exception as error:
                ahead.is_on, ahead.here = False, None
                say_once(f"workers do not copy adapters ahead ({shown(error)}); {OWN_COPIES}")
    return step(self, *args, **named)


def _ask(ahead: _Ahead, scheduler: Any, executor: Any) -> None:
    if ahead.is_on is None:
        config = scheduler.parallel_config
        several = config.world_size_across_dp > 1
        # Its ranks schedule alike by themselves, but copies end when they end.
        alike = several and config.distributed_executor_backend == "external_launcher"
        ahead.is_on = activation.is_wanted(scheduler.lora_config, several) and not alike
    if not ahead.is_on or scheduler.pause_state:
        return
    _take(ahead)
    running = ahead.running = {
        request.lora_request.lora_int_id for request in scheduler.running if request.lora_request
    }
    room = scheduler.lora_config.max_loras - len(running)
    next_ones: dict[int, Any] = {}
    queued = itertools.chain(scheduler.kv_holding_waiting, scheduler.waiting)
    ready = (r for r in queued if not scheduler._is_blocked_waiting_status(r.status))
    for request in itertools.islice(ready, LOOKED_AT) if room > 0 else ():
        lora = request.lora_request
        if lora and lora.lora_int_id not in running:
            next_ones.setdefault(lora.lora_int_id, lora)
            if len(next_ones) == room:
                break
    if ahead.reply is None and not next_ones.keys() <= (ahead.here or set()) | ahead.refused:
        args = list(next_ones.values()), sorted(running)
        ahead.reply = executor.collective_rpc(METHOD, args=args, non_block=True)
        _take(ahead)


def _take(ahead: _Ahead) -> None:
    """Take the reply of all workers, if it is there."""
    if ahead.reply is not None and ahead.reply.done():
        reply, ahead.reply = ahead.reply, None
        here, refused = zip(*reply.result(), strict=True)
        ahead.here, ahead.refused = set.intersection(*map(set, here)), set().union(*refused)


def _passing_over(handle: Callable[..., bool], self: Any, request: Any) -> bool:
    """Whether a waiting request may be scheduled in this step."""
    if not handle(self, request):
        return False
    ahead, lora = self.__dict__.get("_moelora_ahead"), request.lora_request
    if ahead is None or not lora:
        return True
    number = lora.lora_int_id
    known = ahead.here, ahead.refused, ahead.running
    is_late = ahead.here is not None and not any(number in ids for ids in known)
    if is_late and self.running and not self._holds_kv_blocks(request):
        return False
    ahead.running.add(number)  # others with this adapter need not wait
    ahead.refused.discard(number)  # it may leave its slot: workers are asked again
    return True
