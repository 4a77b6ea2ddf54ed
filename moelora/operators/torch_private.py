"""Private symbols of torch that moelora uses, as torch 2.11 to 2.13 have them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

__all__ = ["FakeTensor", "OpOverload"]

AFTER_AUTOGRAD: Any = torch._C._after_autograd_keyset
BelowAutograd: Any = torch._C._AutoDispatchBelowAutograd
WithoutTorchDispatch: Any = torch._C._DisableTorchDispatch

has_storage = torch._C._has_storage
in_torch_func = torch._C._are_functorch_transforms_active
backward_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph

foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
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
