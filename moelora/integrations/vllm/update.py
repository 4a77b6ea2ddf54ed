"""Adapters from memory into a running vLLM: `update_adapters`.

    driver                        every worker, over collective_rpc, between two steps
    update_adapters   stage  ->   read as vLLM reads a folder, merge, check; nothing is served yet
                      switch ->   known from now on
                      bring  ->   into slots that are free

A version is a LoRA of its own for vLLM: `law@7`, with an id and a path that no other has. So caches
of prefixes know it apart, running requests go on with theirs, and new ones start on what
`update_adapters` returns. Workers keep all versions that requests need (`store`).
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor

from moelora.adapters.config import LoraConfig
from moelora.adapters.files import host_copy
from moelora.adapters.names import check_name
from moelora.integrations import shown
from moelora.integrations.vllm import store, wrap
from moelora.integrations.vllm.handles import SharedTensors
from moelora.operators.checks import errors_about
from moelora.operators.storage import check_held

FIRST_ID = 1_000_000_000  # of vLLM's LoRA ids: below are those of folders

Adapters: TypeAlias = "Mapping[str, tuple[Any, Mapping[str, Tensor] | SharedTensors]]"

_engines = itertools.count()
_turn = threading.Lock()  # threads update one at a time: an asyncio.Lock is for tasks of a loop
_known: set[str] = set()  # paths of versions that requests of this process may name


@dataclass
class _Registry:
    """What `update_adapters` has told the workers of an engine."""

    prefix: str
    ids: itertools.count[int] = field(default_factory=lambda: itertools.count(FIRST_ID))
    versions: dict[str, int] = field(default_factory=dict)
    requests: dict[str, list[Any]] = field(default_factory=dict)  # LoRARequests, oldest first
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # workers stage one update at a time

    @staticmethod
    def paths(requests: Mapping[str, list[Any]]) -> list[str]:
        return [request.lora_path for found in requests.values() for request in found]


def update_adapters(llm: Any, adapters: Adapters) -> dict[str, Any]:
    """Give a running engine new adapters, or new versions of some, from memory.

    Parameters
    ----------
    llm : vllm.LLM or vllm.v1.engine.llm_engine.LLMEngine
        With `enable_lora`. For an `AsyncLLM`: `update_adapters_async`.
    adapters : mapping
        Name -> (config, tensors): the content of adapter_config.json or PEFT's `LoraConfig`, and
        the tensors of adapter_model.safetensors by name, or what `share_tensors` made of them in
        another process; they are copied. Experts are in PEFT's stacks or have a pair each. Versions
        stay on the device that they are on, GPU or CPU, for as long as they are served.

    Returns
    -------
    dict
        Name -> `LoRARequest` of the new version, for `generate(..., lora_request=)`; it is called
        `law@7`, with a number that no other version of `law` has.

    Raises
    ------
    ValueError
        A name, the form or an option of an adapter is wrong, or it has a `rank_pattern` or
        `alpha_pattern`, which vLLM does not read. Or a worker refuses one: it does not fit the
        model, a factor is missing, NaN or infinite, or vLLM does not support it. All adapters are
        then as before, on all ranks.
    RuntimeError
        A worker has no such method, since the plugin is off: the message says why. Or it has lost
        what was staged, or the engine is an `AsyncLLM`.

    Notes
    -----
    Requests that run end on their version. The last two versions stay, and others that requests
    run on; a request that names another one is refused as it is added. An engine in a process of
    its own gets tensors as bytes in the form of safetensors, and shared ones as handles.
    """
    update = _update(getattr(llm, "llm_engine", llm), adapters)
    try:
        with _turn:
            update.send(None)  # to its end: an engine that is no AsyncLLM lets nothing wait
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return] # of _update
    update.close()
    raise RuntimeError("the engine answers later, as an AsyncLLM: await update_adapters_async")


async def update_adapters_async(engine: Any, adapters: Adapters) -> dict[str, Any]:
    """`update_adapters` for an `AsyncLLM`."""
    return await _update(engine, adapters)


async def _call(engine: Any, method: str, *args: Any) -> Sequence[Any]:
    """The replies of all workers. RuntimeError if they have no such method."""
    try:
        replies = engine.collective_rpc(method, args=args)
        return await replies if inspect.isawaitable(replies) else replies  # type: ignore[no-any-return]
    except Exception as error:
        if method not in str(error):
            raise
        raise RuntimeError(f"a worker does not know moelora: {_why_unknown(error)}") from error


def _why_unknown(error: Exception) -> str:
    """Why the plugin is off in this process; if it is on, what the engine said."""
    from moelora.integrations.vllm import interface, report

    why = report.REPORT.off() or interface.problem(interface.UPDATES)
    return why or f"install it in the workers' environment, too ({shown(error)})"


def _refusal(replies: Sequence[str | None]) -> str | None:
    """The first of the workers' replies that says why not."""
    why = ((n, reply) for n, reply in enumerate(replies) if reply is not None)
    return next((f"rank {n} of {len(replies)}: {reply}" for n, reply in why), None)


async def _update(engine: Any, adapters: Adapters) -> dict[str, Any]:
    if not isinstance(adapters, Mapping):
        raise ValueError(f"adapters is a {type(adapters).__name__}, wanted a mapping of names")
    registry = getattr(engine, "_moelora", None)
    if registry is None:
        registry = engine._moelora = _Registry(f"{store.PREFIX}{os.getpid()}-{next(_engines)}/")
    async with registry.lock:
        return await _exchange(engine, registry, adapters)


async def _exchange(engine: Any, registry: _Registry, adapters: Adapters) -> dict[str, Any]:
    from vllm.lora.request import LoRARequest

    states = getattr(getattr(engine, "output_processor", None), "request_states", None)
    running = None if states is None else {s.lora_name for s in states.values()}
    shared = shares_memory(engine)
    new: dict[str, Any] = {}
    payload = []
    for name, given in adapters.items():
        config, tensors = checked(name, given)
        number = registry.versions[name] = registry.versions.get(name, 0) + 1  # of no other, ever
        version = f"{name}@{number}"
        if version in (running or ()):
            raise ValueError(f"adapter {name!r}: a request runs on another LoRA named {version!r}")
        handle = isinstance(tensors, SharedTensors)
        keys = [key for key, *_ in tensors.index] if handle else tensors
        stacks = any(".experts.lora_" in key or ".experts.base_layer." in key for key in keys)
        options = {"is_3d_lora_weight": True} if stacks else {}
        place = version, next(registry.ids), registry.prefix + version
        new[name] = LoRARequest(*place, **options)
        packed = tensors.sent(shared) if handle else tensors if shared else _bytes(tensors)
        payload.append((*place, options, config, packed))
    kept = {
        name: [r for r in found if r is found[-1] or running is None or r.lora_name in running]
        for name, found in registry.requests.items()
    }
    before = registry.paths(registry.requests)
    try:
        why = _refusal(await _call(engine, "moelora_stage", payload))
    except (Exception, asyncio.CancelledError):
        with suppress(Exception):  # of workers that have ended
            await _call(engine, "moelora_switch", [], before)
        raise
    if why:
        await _call(engine, "moelora_switch", [], before)
        raise ValueError(f"{why}; all adapters are as before")
    paths = [request.lora_path for request in new.values()]
    _known.difference_update(before)
    _known.update(registry.paths(kept))
    if why := _refusal(await _call(engine, "moelora_switch", paths, registry.paths(kept))):
        raise RuntimeError(why)
    _known.update(paths)
    registry.requests = kept | {n: [*kept.get(n, ()), request] for n, request in new.items()}
    await _call(engine, "moelora_bring", paths)
    return new


def checked(name: str, given: Any, handles: bool = True) -> tuple[dict[str, Any], Any]:
    """The configuration and the tensors of an adapter, or their handle; ValueError for another form
    or name."""
    check_name(name)
    if "@" in name or "/" in name:
        raise ValueError(f"adapter {name!r} has @ or / in its name, which versions have")
    if not isinstance(given, tuple) or len(given) != 2:
        raise ValueError(f"adapter {name!r} is a {type(given).__name__}, wanted (config, tensors)")
    config, tensors = given
    config = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(config, Mapping):
        raise ValueError(
            f"adapter {name!r}: config is a {type(config).__name__}, wanted the content of "
            "adapter_config.json or a LoraConfig: files are not read here"
        )
    if not (handles and isinstance(tensors, SharedTensors)):
        if not isinstance(tensors, Mapping) or not tensors:
            raise ValueError(
                f"adapter {name!r}: tensors is {tensors!r:.80}, wanted tensors by name"
            )
        for key, tensor in tensors.items():
            if not isinstance(key, str) or not isinstance(tensor, Tensor):
                raise ValueError(f"adapter {name!r}: {key!r:.200} is not a tensor by name")
            check_held(f"adapter {name!r}: {key:.200}", tensor)
    if missing := [key for key in ("r", "lora_alpha", "target_modules") if key not in config]:
        raise ValueError(f"adapter {name!r}: its config has no {missing[0]}")
    for key in ("rank_pattern", "alpha_pattern"):
        if config.get(key):
            raise ValueError(
                f"adapter {name!r}: {key} is {config[key]!r:.200}, which vLLM does not read: "
                "multiply its scalings into B"
            )
    try:
        plain = json.dumps(
            dict(config), default=lambda v: sorted(v) if isinstance(v, set) else str(v)
        )
    except (RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"adapter {name!r}: its config is no JSON ({shown(error)})") from None
    config = json.loads(plain)
    with errors_about(f"adapter {name!r}", ValueError):
        LoraConfig.parse(config)
    return config, tensors


def shares_memory(engine: Any) -> bool:
    """Whether workers run in this process."""
    inside = type(getattr(engine, "engine_core", None)).__name__ == "InprocClient"
    parallel = getattr(getattr(engine, "vllm_config", None), "parallel_config", None)
    return inside and getattr(parallel, "world_size", 0) == 1


def _bytes(tensors: Mapping[str, Tensor]) -> bytes:
    from safetensors.torch import save

    return save({key: host_copy(tensor) for key, tensor in tensors.items()})


def has_left(request: Any) -> bool:
    """Whether a LoRARequest names a version that requests of this process may not name any more."""
    return request.lora_path.startswith(store.PREFIX) and request.lora_path not in _known


def install() -> None:
    from vllm.v1.engine.input_processor import InputProcessor

    wrap(InputProcessor, "_validate_lora", _refuse_gone)
    store.install()


def _refuse_gone(validate: Callable[..., Any], self: Any, lora_request: Any) -> None:
    """A request for a version that has left would end the engine as its batch starts."""
    if lora_request is not None and has_left(lora_request):
        raise ValueError(
            f"adapter {lora_request.lora_name!r} is no version that this engine serves: take "
            "the request that update_adapters returned last"
        )
    validate(self, lora_request)
