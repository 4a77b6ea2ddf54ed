"""Private symbols of torch that moelora uses, as torch 2.11 to 2.13 have them: no other file
calls any, but for the baselines of `bench`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

__all__ = ["FakeTensor", "OpOverload"]
__all__ += ["tree_flatten", "tree_leaves", "tree_map_only", "tree_unflatten"]

AFTER_AUTOGRAD: Any = torch._C._after_autograd_keyset
BelowAutograd: Any = torch._C._AutoDispatchBelowAutograd
WithoutTorchDispatch: Any = torch._C._DisableTorchDispatch

has_storage = torch._C._has_storage
in_torch_func = torch._C._are_functorch_transforms_active
backward_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
backward_number = torch._C._current_graph_task_id

driver_version = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)  # builds with CUDA have it

foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_div_ = torch._foreach_div_
foreach_norm = torch._foreach_norm
foreach_zero_ = torch._foreach_zero_


def has_tangents() -> bool:
    """Whether forward-mode derivatives are computed."""
    return forward_ad._current_level >= 0


def is_wrapped() -> bool:
    """Whether a tensor may be wrapped by a functional transform, or is a tangent."""
    return forward_ad._current_level >= 0 or peek_interpreter_stack() is not None  # in every call


@functools.cache
def arguments_of(op: Any) -> list[Any]:
    """The arguments of an operator's schema."""
    return op._schema.arguments


@functools.cache
def name_of(op: Any) -> str:
    """`fused_experts_lora` of torch.ops.moelora.fused_experts_lora.default."""
    return op._schema.name.split("::")[1]


def sequence_number(node: Any) -> int:
    """The later a node of autograd's graph was recorded, the larger."""
    return node._sequence_nr()


def sparse_parts(t: Tensor) -> tuple[Tensor, Tensor]:
    """Indices and values of a sparse tensor, which may have indices twice. Not recorded."""
    return t._indices(), t._values()


def when_backward_ends(callback: Callable[[], None]) -> None:
    """Call it as the current backward ends, in its thread."""
    queue: Any = torch.autograd.Variable._execution_engine
    queue.queue_callback(callback)


def coalesced(group: Any) -> AbstractContextManager[Any]:
    """Collectives of a group within are one launch."""
    distributed: Any = torch.distributed
    return distributed._coalescing_manager(group)


def ignore_in_ddp(model: nn.Module, names: set[str]) -> None:
    """Keep parameters and buffers out of what DistributedDataParallel sends."""
    before = {*getattr(model, "_ddp_params_and_buffers_to_ignore", ())}
    ddp: Any = nn.parallel.DistributedDataParallel
    ddp._set_params_and_buffers_to_ignore_for_model(model, before | names)


def shared_fields(storage: Any) -> tuple[Any, ...]:
    """What `open_shared` of another process takes; the storage's owner keeps it."""
    if storage.device.type == "cpu":
        return tuple(storage._share_filename_cpu_())
    _, *fields = storage._share_cuda_()
    # torch would keep a storage whose handle no process opens.
    storage._release_ipc_counter(*fields[3:5], device=storage.device)
    return tuple(fields)


def open_shared(fields: Sequence[Any], gpu: int | None) -> Any:
    """The storage of another process, in the same memory. RuntimeError if it is gone."""
    storage: Any = torch.UntypedStorage
    if gpu is None:
        return storage._new_shared_filename_cpu(*fields)
    return storage._new_shared_cuda(gpu, *fields)
