"""Versions of adapters in a worker: `update_adapters` sends them, vLLM's LoRA managers load them.

A version is staged first: read as vLLM reads a folder, merged, scaled and checked. `switch` makes
it known, for as long as requests need it: hooks in the managers then load its path from here, also
after vLLM's cache has evicted it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moelora.adapters.factors import first_not_finite
from moelora.integrations import shown
from moelora.integrations.vllm import listed, wrap
from moelora.integrations.vllm.handles import opened
from moelora.operators.torch_private import foreach_copy_

PREFIX = "/moelora/"  # an absolute path, which vLLM takes as it is

# What `stage` has `_load_adapter` read, by path.
_reading: dict[str, tuple[dict[str, Any], Mapping[str, Tensor]]] = {}


@dataclass
class _Store:
    """The versions of a worker, merged, by path: staged, or known."""

    staged: dict[str, Any] = field(default_factory=dict)
    models: dict[str, Any] = field(default_factory=dict)


def _store(manager: Any) -> _Store:
    return vars(manager).setdefault("_moelora", _Store())


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


def bring(worker: Any, paths: list[str]) -> None:
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
    from vllm.v1.worker.gpu_worker import Worker

    wrap(PEFTHelper, "from_local_dir", _config_of)
    wrap(LoRAModel, "from_local_checkpoint", _tensors_of)
    wrap(WorkerLoRAManager, "_load_adapter", _known_model)
    wrap(LoRAModelManager, "_create_merged_loras_inplace", _merge_once)
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
