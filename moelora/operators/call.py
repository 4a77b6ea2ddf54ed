"""How public operators call compiled ones: absent arguments, and conversion of errors.

Compiled operators take every argument; an absent tensor is a 1-D tensor of 0 elements, an absent
number is 0. Shapes, strides and dtypes are checked once, in C, for all callers; such errors become
a ValueError here.
"""

import functools
import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

from moelora import _C
from moelora._C import error_number
from moelora.operators import autograd, trace
from moelora.operators.checks import dtype_name
from moelora.operators.docstrings import expand
from moelora.operators.schema import OPERATORS
from moelora.operators.storage import holds
from moelora.operators.tiles import TiledWeights

# moelora_status of csrc/moelora.h; everything else stays a RuntimeError.
ERRORS = {1: ValueError, 2: NotImplementedError}

P = ParamSpec("P")
T = TypeVar("T")

Factors: TypeAlias = Tensor | Sequence[Tensor]

operators = OPERATORS

_PLAIN = (Tensor, torch.nn.Parameter)
_absent_tensors: dict[torch.device, Tensor] = {}


def typed(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate an operator to name the argument of a wrong type if a call fails.

    Only failed calls are examined, so that successful ones have no overhead and nothing valid is
    rejected. Also expands the shared entries of its docstring (docstrings.py).
    """

    if function.__doc__:
        function.__doc__ = expand(function.__doc__)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if is_compiling():
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            if mistake := _mistyped(function, args, kwargs):
                raise TypeError(f"{function.__name__}: {mistake}") from None
            raise

    return call


def _mistyped(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Describe the first argument whose type differs from the signature; "" if there is none."""
    try:
        given = inspect.signature(function).bind(*args, **kwargs).arguments
    except TypeError as error:  # specific already, but for options
        return str(error) if hasattr(function, "__signature__") else ""
    for name, wanted in typing.get_type_hints(function).items():
        if name not in given:
            continue
        value = given[name]
        if found := _not_strided(value):
            return f"{name} is {found}, expected a strided tensor"
        if not _fits(value, wanted):
            kind = type(value).__name__
            got = value if value is None else f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
            if isinstance(value, list | tuple):
                inside = ", ".join(sorted({type(item).__name__ for item in value}))
                got = f"{got} of {inside or 'nothing'}"
            return f"{name} is {got}, expected {_in_words(wanted)}"
    return ""


def _not_strided(value: Any) -> str:
    """Describe a tensor, or one of a sequence, that has no strides or no plain numbers."""
    for tensor in value if isinstance(value, list | tuple) else [value]:
        if not isinstance(tensor, Tensor):
            continue
        if tensor.is_nested or tensor.is_quantized:
            return "a nested tensor" if tensor.is_nested else f"a tensor of {tensor.dtype}"
        if tensor.layout is not torch.strided:
            return f"a tensor of layout {tensor.layout}"
    return ""


def _fits(value: Any, wanted: Any) -> bool:
    origin = typing.get_origin(wanted)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, option) for option in typing.get_args(wanted))
    if origin is Collection:  # the operator checks the values
        return isinstance(value, Collection)
    if origin is Sequence:
        (item,) = typing.get_args(wanted)
        is_series = isinstance(value, Iterable) and not isinstance(value, Tensor | str)
        return is_series and all(_fits(v, item) for v in value)
    if origin is typing.Literal:  # the operator checks the values
        return isinstance(value, tuple({type(option) for option in typing.get_args(wanted)}))
    if wanted in (int, bool, float):  # torch accepts numbers of any library
        return hasattr(value, "__float__") and not hasattr(value, "__len__")
    if wanted is Any:
        return True
    # tuple[int, int] is an instance of `type` on Python 3.10
    return isinstance(value, wanted) if origin is None and isinstance(wanted, type) else True


def _in_words(wanted: Any) -> str:
    if typing.get_origin(wanted) in (typing.Union, types.UnionType):
        return " or ".join(map(_in_words, typing.get_args(wanted)))
    if (origin := typing.get_origin(wanted)) in (Collection, Sequence):
        return f"a {origin.__name__.lower()} of {_in_words(typing.get_args(wanted)[0])}"
    if typing.get_origin(wanted) is typing.Literal:
        return " or ".join({type(option).__name__ for option in typing.get_args(wanted)})
    if wanted is TiledWeights:  # users know the classes of it
        return " or ".join(sorted(kind.__name__ for kind in wanted.__subclasses__()))
    return "None" if wanted is types.NoneType else getattr(wanted, "__name__", str(wanted))


def absent_tensor(like: Tensor) -> Tensor:
    """A tensor that stands for None. Cached, except where a tracer must see its creation."""
    if is_compiling() or type(like) not in _PLAIN:
        return like.new_empty(0)
    device = like.device
    found = _absent_tensors.get(device)
    if found is None:
        with torch.inference_mode(False):
            found = _absent_tensors[device] = torch.empty(0, device=device)
    return found


def or_absent(tensor: Tensor | None, absent: Tensor) -> Tensor:
    return absent if tensor is None else tensor


def is_freed(tensor: Tensor) -> bool:
    """Whether its storage is freed; the compiled operator then rejects it, by name."""
    return not is_compiling() and type(tensor) in _PLAIN and not holds(tensor)


def weights_or_absent(name: str, tensor: Tensor | None, absent: Tensor) -> Tensor:
    """Routing weights or scalings, as float32."""
    if tensor is None or tensor.dtype is torch.float32 or is_freed(tensor):
        return or_absent(tensor, absent)
    if tensor.is_complex():
        raise TypeError(f"{name} has dtype {dtype_name(tensor.dtype)}, expected real numbers")
    return tensor.to(torch.float32)


def ids_or_absent(name: str, tensor: Tensor | None, absent: Tensor) -> Tensor:
    """A table of ids or ranks as int32; values beyond int32 remain out of range."""
    if tensor is None or tensor.dtype is torch.int32 or is_freed(tensor):
        return or_absent(tensor, absent)
    if tensor.dtype is torch.bool:
        raise TypeError(f"{name} has dtype bool, expected int32")
    _check_integers(name, tensor, "int32")
    bounds = torch.iinfo(torch.int32)
    return tensor.to(torch.int64).clamp(bounds.min, bounds.max).to(torch.int32)


def enabled_or_absent(adapter_enabled: Tensor | None, absent: Tensor) -> Tensor:
    if adapter_enabled is None or adapter_enabled.dtype in (torch.bool, torch.int32):
        return or_absent(adapter_enabled, absent)
    if is_freed(adapter_enabled):
        return adapter_enabled
    _check_integers("adapter_enabled", adapter_enabled, "bool or int32")
    return adapter_enabled != 0


def check_dimensions(name: str, tensor: Tensor, wanted: int) -> None:
    """Raise ValueError, as the compiled operators do, before a dimension is read in Python."""
    if tensor.dim() != wanted:
        raise ValueError(f"{name} has {tensor.dim()} dimensions, expected {wanted}")


def _check_integers(name: str, tensor: Tensor, wanted: str) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        raise TypeError(f"{name} has dtype {dtype_name(tensor.dtype)}, expected {wanted}")


def factor_list(factors: Factors | None) -> list[Tensor]:
    """A stack for each slice; none if there are no factors."""
    if factors is None:
        return []
    return [factors] if isinstance(factors, Tensor) else list(factors)


def number_or_absent(name: str, number: float | None) -> float:
    if number is not None and number == 0:
        raise ValueError(f"{name} is {number}, expected a normal float32 above 0")
    return 0.0 if number is None else number


def choose(name: str, value: str, known: dict[str, int]) -> int:
    if value not in known:
        raise ValueError(f"{name} is {value!r}, must be one of {', '.join(map(repr, known))}")
    return known[value]


def run(op: Any, *args: Any) -> Any:
    """Call a compiled operator and convert its errors to Python exceptions."""
    if is_compiling():
        return op(*args)
    before = error_number()
    try:
        return trace.call(op, args) if trace.active else autograd.call(op, args)
    except RuntimeError:
        if error_number() == before:  # raised by torch, not by the operator
            raise
        status, text = _C.last_error()
        raise ERRORS.get(status, RuntimeError)(text) from None
