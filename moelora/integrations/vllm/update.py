"""Adapters from memory into a running vLLM: `update_adapters`.

    driver                        every worker, over collective_rpc, between two steps
    update_adapters   stage  ->   read as vLLM reads a folder, merge, check; nothing is served yet
                      switch ->   known from now on
                      bring  ->   into slots that are free

A version is a LoRA of its own for vLLM: `law@7`, with an id and a path that no other has. So caches
of prefixes know it apart, running requests go on with theirs, and new ones start on what
`update_adapters` returns. Workers keep each version merged and scaled: what vLLM's cache has
evicted comes back from there.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from moelora.adapters.config import LoraConfig
from moelora.adapters.factors import first_not_finite
from moelora.adapters.files import host_copy
from moelora.adapters.names import check_name
from moelora.integrations import shown
from moelora.integrations.vllm import listed, wrap
from moelora.integrations.vllm.handles import SharedTensors, opened
from moelora.operators.checks import errors_about
from moelora.operators.storage import check_held
from moelora.operators.torch_private import foreach_copy_

PREFIX = "/moelora/"  # an absolute path, which vLLM takes as it is
FIRST_ID = 1_000_000_000  # of vLLM's LoRA ids: below are those of folders

Adapters: TypeAlias = "Mapping[str, tuple[Any, Mapping[str, Tensor] | SharedTensors]]"

_engines = itertools.count()
_turn = threading.Lock()  # threads update one at a time: an asyncio.Lock is for tasks of a loop
_known: set[str] = set()  # paths of versions that requests of this process may name


# -- the driver --


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
        registry = engine._moelora = _Registry(f"{PREFIX}{os.getpid()}-{next(_engines)}/")
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
    return request.lora_path.startswith(PREFIX) and request.lora_path not in _known


# -- the workers --


# What `stage` has `_load_adapter` read, by path.
_reading: dict[str, tuple[dict[str, Any], Mapping[str, Tensor]]] = {}


@dataclass
class _Store:
    """The versions of a worker, merged, by path: staged, or known."""

    staged: dict[str, Any] = field(default_factory=dict)
    models: dict[str, Any] = field(default_factory=dict)


def _store(manager: Any) -> _Store:
    found: _Store = vars(manager).setdefault("_moelora", _Store())
    return found


def is_known(manager: Any, path: str) -> bool:
    """Whether a worker has an adapter of `update_adapters`, with a slot or without."""
    return path in _store(manager).models


def stage(worker: Any, payload: list[Any]) -> str | None:
    """Read adapters as vLLM reads folders; returns why not, before any is known."""
    from vllm.lora.request import LoRARequest

    staged = {}
    try:
        manager = manager_of(worker)
        _store(manager).staged = {}
        for version, number, path, options, config, tensors in payload:
            if number in manager.list_adapters():
                raise ValueError(f"adapter {version!r}: vLLM has an adapter of id {number}")
            if isinstance(tensors, (bytes, bytearray, memoryview)):
                from safetensors.torch import load

                tensors = load(bytes(tensors))
            inner = manager._adapter_manager
            try:
                if handle := isinstance(tensors, (list, tuple)):
                    tensors = opened(tensors, worker)
                _reading[path] = config, tensors
                with _splitting(inner, bool(options), tensors):
                    model = manager._load_adapter(LoRARequest(version, number, path, **options))
                    inner._create_merged_loras_inplace(model)
                _check(inner, model)
                if handle and torch.cuda.is_initialized():  # before the other process writes again
                    torch.cuda.current_stream().synchronize()
            except Exception as error:
                raise ValueError(f"adapter {version!r}: {shown(error)}") from error
            finally:
                _reading.pop(path, None)
            model._moelora_merged = True
            staged[path] = model
    except Exception as error:  # one that leaves a worker would end the engine
        return str(error)
    _store(manager).staged = staged
    return None


@contextmanager
def _splitting(inner: Any, stacks: bool, keys: Iterable[str]) -> Iterator[None]:
    """vLLM splits PEFT's stacks for layers that have gate and up apart, as it does under
    `enable_mixed_moe_lora_format`: a few tensors of a layer take the place of six an expert, whose
    names vLLM then need not look up."""
    changed: dict[str, Any] = {}
    if stacks and not getattr(inner, "_enable_moe_shared_loras", False):
        changed["_enable_mixed_moe_lora_format"] = True
    ends = (end for key in keys for end in key.split(".experts.")[1:])
    if all(end.startswith(("lora_", "base_layer.")) for end in ends):
        every = inner.packed_modules.items()
        changed["packed_modules"] = {n: names for n, names in every if not n.endswith(".experts")}
    before = {name: getattr(inner, name, False) for name in changed}
    vars(inner).update(changed)
    try:
        yield
    finally:
        vars(inner).update(before)


def switch(worker: Any, paths: list[str], kept: list[str]) -> str | None:
    """Make staged adapters known, or drop them without `paths`; of the others only `kept` stay."""
    try:
        manager = manager_of(worker)
    except ValueError as error:
        return str(error)
    store = _store(manager)
    staged, store.staged = store.staged, {}
    if lost := [path for path in paths if path not in staged]:
        return f"{lost[0].rpartition('/')[2]} is not staged any more: update it again"
    leaving = [path for path in store.models if path not in kept]
    for path in leaving:
        manager.remove_adapter(store.models.pop(path).id)
    store.models |= {path: staged[path] for path in paths}
    return None


def bring(worker: Any, paths: list[str]) -> str | None:
    """Write adapters to slots that are free, so that their first batch need not wait for it."""
    manager = manager_of(worker)
    inner = manager._adapter_manager
    for path in paths:
        model = _store(manager).models[path]
        if len(inner._active_adapters) >= inner.lora_slots or len(inner) >= inner.capacity:
            break
        inner.add_adapter(model)
        inner.activate_adapter(model.id)
        inner._last_mapping = None  # of the slots before
    return None


def manager_of(worker: Any) -> Any:
    manager = getattr(worker.model_runner, "lora_manager", None)
    if manager is None:
        raise ValueError("the engine runs without LoRA: start it with enable_lora=True")
    return manager


def _check(inner: Any, model: Any) -> None:
    """ValueError unless merged factors are whole, finite, and fit the stacks of their modules:
    of a smaller one vLLM would fill a part of the slot, without an error."""
    if not model.loras:
        raise ValueError("it has no factors")
    limit, used, names, factors = inner.lora_config.max_lora_rank, set(), [], []
    for name, module in inner.modules.items():
        lora = inner._get_lora_layer_weights(model, name)
        if lora is None:
            continue
        used.add(id(lora))
        a, b = _parts(module, lora.lora_a, lora.lora_b)
        for p, q, shape in zip(a, b, _shapes(module, len(a)), strict=True):
            if (p is None) != (q is None):
                raise ValueError(f"{name} has one of lora_A and lora_B without the other")
            if p is None:
                continue
            if p.shape[-2] != q.shape[-1] or p.shape[-2] > limit:
                raise ValueError(
                    f"{name} has rank {p.shape[-2]} of lora_A and {q.shape[-1]} of lora_B, wanted "
                    f"the same and at most {limit}"
                )
            experts, columns, rows = shape or ((), p.shape[-1], q.shape[-2])
            if (p.shape[-1], q.shape[-2]) != (columns, rows) or {*p.shape[:-2], *q.shape[:-2]} - {
                *experts
            }:
                raise ValueError(
                    f"{name} has factors {tuple(p.shape)} and {tuple(q.shape)}, wanted {columns} "
                    f"columns of lora_A and {rows} rows of lora_B, of {max(experts, default=1)} "
                    "experts"
                )
            names += [name, name]
            factors += [p, q]
    if (n := first_not_finite(factors)) is not None:  # one wait for the GPU
        raise ValueError(f"{names[n]} has factors that are NaN or infinite")
    unknown = [name for name, lora in model.loras.items() if id(lora) not in used]
    if unknown and "PPMissingLayer" not in {type(m).__name__ for m in inner.model.modules()}:
        raise ValueError(f"it has factors of {unknown[0]}, which no layer with LoRA is called")


def _parts(module: Any, a: Any, b: Any) -> tuple[list[Any], list[Any]]:
    """Factors A and B, of a linear layer those that this rank keeps."""
    if isinstance(getattr(module, "lora_a_stacked", None), tuple) and module.tp_size > 1:
        a, b = module.slice_lora_a(a), module.slice_lora_b(b)
    return listed(a), listed(b)


def _shapes(module: Any, count: int) -> list[Any]:
    """(numbers of experts, columns of A, rows of B) of each pair of a module; None if unknown."""
    if hasattr(module, "w13_lora_a_stacked"):
        experts = {1, module.w13_lora_b_stacked[0].shape[1]}
        hidden = module.w13_lora_a_stacked[0].shape[-1]
        inter = module.w2_lora_a_stacked[0].shape[-1] * module.tp_size
        if count == 2:
            return [(experts, hidden, 2 * inter), (experts, inter, hidden)]
        up = experts, hidden, inter
        return [up, (experts, inter, hidden), up]
    stacks = [getattr(module, f"lora_{side}_stacked", ()) for side in "ab"]
    if not isinstance(stacks[0], tuple) or len(stacks[0]) != count:  # embeddings, lm_head
        return [None] * count
    return [((), p.shape[-1], q.shape[-2]) for p, q in zip(*stacks, strict=True)]


# -- hooks --


def install() -> None:
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.lora.worker_manager import WorkerLoRAManager
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.worker.gpu_worker import Worker

    wrap(PEFTHelper, "from_local_dir", _config_of)
    wrap(LoRAModel, "from_local_checkpoint", _tensors_of)
    wrap(WorkerLoRAManager, "_load_adapter", _known_model)
    wrap(LoRAModelManager, "_create_merged_loras_inplace", _merge_once)
    wrap(InputProcessor, "_validate_lora", _refuse_gone)
    Worker.moelora_stage, Worker.moelora_switch, Worker.moelora_bring = stage, switch, bring


def _config_of(from_local_dir: Callable[..., Any], path: str, positions: Any, *rest: Any) -> Any:
    from vllm.lora.peft_helper import PEFTHelper

    if path not in _reading:
        return from_local_dir(path, positions, *rest)
    config = _reading[path][0] | {"vllm_max_position_embeddings": positions}
    return PEFTHelper.from_dict(config)


def _tensors_of(
    from_local_checkpoint: Callable[..., Any], path: str, *args: Any, **named: Any
) -> Any:
    from vllm.lora.lora_model import LoRAModel

    if path not in _reading:
        return from_local_checkpoint(path, *args, **named)
    tensors = _copies(_reading[path][1], named.get("dtype"))
    devices = {tensor.device for tensor in tensors.values()}
    if len(devices) == 1:  # tensors on a GPU stay there: writing a slot copies within it
        named["device"] = str(devices.pop())
    taken = inspect.signature(LoRAModel.from_lora_tensors).parameters
    return LoRAModel.from_lora_tensors(
        tensors=tensors, **{name: value for name, value in named.items() if name in taken}
    )


def _copies(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Copies of all, the factors in the dtype of slots: vLLM multiplies scalings into B in place,
    and trainers write their tensors."""
    empty = partial(torch.empty_like, memory_format=torch.contiguous_format)
    copies = {k: empty(t, dtype=dtype if ".lora_" in k else None) for k, t in tensors.items()}
    foreach_copy_([*copies.values()], [t.detach() for t in tensors.values()])
    return copies


def _known_model(load_adapter: Callable[..., Any], self: Any, lora_request: Any) -> Any:
    path = lora_request.lora_path
    if path.startswith(PREFIX) and path not in _reading:
        models = _store(self).models
        if path not in models:
            raise ValueError(f"adapter {lora_request.lora_name!r} has left this engine")
        return models[path]
    return load_adapter(self, lora_request)


def _merge_once(merge: Callable[..., Any], self: Any, lora_model: Any) -> None:
    if not getattr(lora_model, "_moelora_merged", False):
        merge(self, lora_model)


def _refuse_gone(validate: Callable[..., Any], self: Any, lora_request: Any) -> None:
    """A request for a version that has left would end the engine as its batch starts."""
    if lora_request is not None and has_left(lora_request):
        raise ValueError(
            f"adapter {lora_request.lora_name!r} is no version that this engine serves: take "
            "the request that update_adapters returned last"
        )
    validate(self, lora_request)
