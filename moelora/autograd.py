"""There is no backward: a call that autograd would record raises, instead of losing the gradient.

A kernel at the Autograd key asks for every operator, however it is called: by its wrapper, as
torch.ops.moelora.*, under torch.compile, inside torch.func. Wrappers take `call`, which asks the
same in a tenth of the time and passes the kernel by. Under inference mode neither runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from moelora.trace import name_of

_AFTER_AUTOGRAD = torch._C._after_autograd_keyset
_written: dict[Any, tuple[int, ...]] = {}
_library = torch.library.Library("moelora", "FRAGMENT")  # its kernels live as long as it does


def call(op: Any, args: tuple[Any, ...]) -> Any:
    """`op(*args)` from a wrapper.

    Raises
    ------
    RuntimeError
        An argument requires a gradient and grad mode is on, or has a tangent.
    """
    if torch.is_inference_mode_enabled() or _transformed():
        return op(*args)
    _refuse_gradients(op, args)
    with torch._C._AutoDispatchBelowAutograd():
        result = op(*args)
    _count_writes(op, args)
    return result


def register(names: Sequence[str]) -> None:
    """Gives the operators of these names their Autograd kernel."""
    for name in names:
        op = getattr(torch.ops.moelora, name).default
        arguments = enumerate(op._schema.arguments)
        _written[op] = tuple(i for i, a in arguments if a.alias_info and a.alias_info.is_write)
        _library.impl(name, _kernel_of(op), "Autograd", with_keyset=True)


def _kernel_of(op: Any) -> Callable[..., Any]:
    def kernel(keyset: Any, *args: Any) -> Any:
        _refuse_gradients(op, args)
        _refuse_tangents(op, args)
        with torch._C._AutoDispatchBelowAutograd():
            result = op.redispatch(keyset & _AFTER_AUTOGRAD, *args)
        _count_writes(op, args)
        return result

    return kernel


def _transformed() -> bool:
    """Whether what a tensor requires may hide below wrappers, or is a tangent."""
    return forward_ad._current_level >= 0 or peek_interpreter_stack() is not None


def _requires(value: Any) -> bool:
    return getattr(value, "requires_grad", False)


def _has_tangent(value: Any) -> bool:
    return isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None


def _refuse_gradients(op: Any, args: tuple[Any, ...]) -> None:
    if torch.is_grad_enabled():
        for value in args:  # most of the microsecond that grad mode costs a call
            if type(value) is list:
                for item in value:
                    if item.requires_grad:
                        _refuse(op, args, _requires)
            elif getattr(value, "requires_grad", False):
                _refuse(op, args, _requires)


def _refuse_tangents(op: Any, args: tuple[Any, ...]) -> None:
    if forward_ad._current_level >= 0:
        _refuse(op, args, _has_tangent)


def _refuse(op: Any, args: tuple[Any, ...], recorded: Callable[[Any], bool]) -> None:
    """Raises for the first argument that is recorded, if one is."""
    for argument, value in zip(op._schema.arguments, args, strict=False):
        items = enumerate(value) if isinstance(value, list) else [(None, value)]
        for index, item in items:
            if recorded(item):
                name = argument.name if index is None else f"{argument.name}[{index}]"
                raise RuntimeError(
                    f"{name_of(op)}: {name} requires a gradient, and there is "
                    f"no backward: call it under torch.no_grad(), or pass {name}.detach()"
                )


def _count_writes(op: Any, args: tuple[Any, ...]) -> None:
    """A backward that saved what was written here must notice, as with any in-place operator."""
    written = _written[op]
    if written:
        torch.autograd.graph.increment_version([args[i] for i in written])
