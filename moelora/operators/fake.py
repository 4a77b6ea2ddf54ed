"""Shape functions of the compiled operators, for torch.compile, export and meta tensors.

Only C validates arguments. Before a shape function runs, its arguments are passed there as meta
tensors, so that tracing a call raises the same errors as running it. Symbolic sizes have the values
of the traced example, without guards; a call with sizes that have no example is validated when it
runs.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moelora import _C
from moelora.operators import autograd
from moelora.operators.formats import FORMATS
from moelora.operators.schema import OF_LAYER, OF_PROJECTION, Backward, is_absent
from moelora.operators.torch_private import WithoutTorchDispatch, arguments_of

PACK = 64
COMPUTE_DTYPES = (torch.bfloat16, torch.float16)
BASE, UNIFORM, SEGMENTED, SORTING = range(4)

_validating = getattr(torch.ops, f"{_C.NAMESPACE}_meta")


def max_blocks(mode: int, num_rows: int, num_experts: int, max_loras: int, block_size: int) -> int:
    """moelora_align_max_blocks of csrc/moelora.h; sizes may be symbolic."""
    if mode == SORTING:
        return num_experts + num_rows // block_size
    groups = num_experts * (max_loras + 1) if mode == UNIFORM else num_experts
    groups = torch.sym_min(groups, num_rows)
    return groups + (num_rows - groups) // block_size


class _Unknown(Exception):
    """A size without an example value."""


def _example(value: Any) -> Any:
    """`value` with example sizes, a tensor as a meta tensor."""
    if isinstance(value, list):
        return [_example(item) for item in value]
    if isinstance(value, Tensor):
        sizes, strides = map(_example, value.shape), map(_example, value.stride())
        return torch.empty_strided([*sizes], [*strides], dtype=value.dtype, device="meta")
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        if not isinstance(value.node.hint, int | float):
            raise _Unknown
        return value.node.hint
    return value


def _check_devices(op: Any, args: tuple[Any, ...], on_host: set[str]) -> None:
    """Check what meta tensors cannot express: all tensors of the call are on one device."""
    given = list(zip(arguments_of(op), args, strict=False))
    first = next(value for _, value in given if isinstance(value, Tensor))
    for argument, value in given:
        for tensor in value if isinstance(value, list) else [value]:
            if not isinstance(tensor, Tensor) or is_absent(tensor):
                continue
            is_read = argument.name in on_host and first.device.type != "meta"
            want = torch.device("cpu") if is_read else first.device
            if tensor.device != want:
                why = "it is read there" if is_read else f"as {_first_on(want, given)}"
                raise ValueError(f"{argument.name} is on {tensor.device}, expected {want}: {why}")


def _first_on(device: torch.device, given: list[tuple[Any, Any]]) -> str:
    """Name of the first tensor there, if there is one of those that are only read: others may be
    new, beside it."""
    there = [a for a, value in given if isinstance(value, Tensor) and value.device == device]
    return next((a.name for a in there if a.alias_info is None), there[0].name)


@dataclass
class Operator:
    """What csrc/glue/ops.inc says of an operator beside its schema."""

    on_host: set[str] = field(default_factory=set)  # arguments that are numbers in host memory
    returns: list[tuple[str, list[str]]] = field(default_factory=list)  # dtype and shape


def _operators() -> dict[str, Operator]:
    operators: dict[str, Operator] = {}
    for kind, name, shape in _C.operators():
        if kind == "op":
            operator = operators[name] = Operator()
        elif kind == "host":
            operator.on_host.add(name)
        else:
            operator.returns.append((name, shape.strip("[]").split(", ")))
    return operators


def _blocks(given: dict[str, Any]) -> int:
    """Number of blocks of an alignment, whose mode is an argument or implied by its outputs."""
    mode = given.get("mode", SORTING if "out_to_zero" in given else BASE)
    rows, experts = given["topk_ids"].numel(), given["num_experts"]
    return max_blocks(mode, rows, experts, given.get("max_loras", 0), given["block_size"])


def _rows(given: dict[str, Any]) -> int:
    return _blocks(given) * given["block_size"]


def _row_tiles(given: dict[str, Any]) -> int:
    rows = given["values"].size(1)
    return 2 * -(-rows // (2 * PACK)) if given["order"] else -(-rows // PACK)


def _depth_tiles(given: dict[str, Any]) -> int:
    of = FORMATS[given["format"]]
    return -(-given["values"].size(2) * (8 // of.bits) // of.tile_columns)


def _weight_rows(given: dict[str, Any], name: str) -> Any:
    """Output rows of weights [E, N, K], packed [E, N / 64, K / 64, 64, 64], or tiles."""
    weights = given[name]
    unpacked = weights.size(1) * (PACK if weights.dim() == 5 else 1)
    return given[f"{name}_rows"] if given[f"{name}_format"] else unpacked


# Sizes that no tensor has, computed from the arguments.
DERIVED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "rows": lambda given: given["rows"] if "rows" in given else _rows(given),
    "columns": lambda given: given["columns"],
    "blocks": _blocks,
    "adapter_ids": lambda given: (_blocks if given["mode"] == UNIFORM else _rows)(given),
    # quantized weights
    "N": lambda given: _weight_rows(given, "w"),
    "row_tiles": _row_tiles,
    "depth_tiles": _depth_tiles,
    "tile_bytes": lambda given: FORMATS[given["format"]].tile_bytes,
}


def _size(word: str, given: dict[str, Any]) -> Any:
    """A number, "w.1" for a dimension of an argument, or a derived size; "w.1 / 64": divided."""
    if word.isdigit():
        return int(word)
    name, _, divisor = word.partition(" / ")
    argument, _, dim = name.partition(".")
    size = given[argument].size(int(dim)) if dim else DERIVED[name](given)
    return size // int(divisor) if divisor else size


def _dtype(word: str, given: dict[str, Any]) -> torch.dtype:
    if word == "compute":
        return COMPUTE_DTYPES[given["dtype"]]
    return given[word].dtype if word in given else getattr(torch, word)


def _saved(given: dict[str, Any]) -> tuple[Tensor, ...]:
    """Outputs of a layer's forward that saves."""
    x, ids = given["hidden_states"], given["topk_ids"]
    rows, a13, a2 = ids.size(0) * ids.size(1), given["w13_lora_a"], given["w2_lora_a"]
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        x.new_empty((rows, _weight_rows(given, "w13"))),
        x.new_empty((rows, len(a13), a13[0].size(2)) if a13 else (0,)),
        x.new_empty((rows, a2[0].size(2)) if a2 else (0,)),
    )


def _gradients(backward: Backward, given: dict[str, Any]) -> tuple[Tensor, ...]:
    """Outputs of a backward."""

    def like(name: str, at: int) -> Tensor:
        of = given[name] if isinstance(given[name], list) else [given[name]]
        if not given["wanted"] & backward.bits[name] or at >= len(of) or is_absent(of[at]):
            return given["grad_out"].new_empty((0,), dtype=torch.float32)
        float32 = given["float32"] and ("lora" in name or "bias" in name)
        return of[at].new_empty(of[at].shape, dtype=torch.float32 if float32 else of[at].dtype)

    return tuple(like(name, at) for name, count in backward.places.items() for at in range(count))


# Of operators that return nothing in the place of some tensors.
OUTPUTS: dict[str, Callable[[dict[str, Any]], tuple[Tensor, ...]]] = {
    "fused_experts_lora_saving": _saved,
    "fused_experts_lora_backward": partial(_gradients, OF_LAYER),
    "fused_experts_lora_backward_over": partial(_gradients, OF_LAYER),
    "fused_moe_lora_gemm_backward": partial(_gradients, OF_PROJECTION),
}


def _outputs(operator: Operator, given: dict[str, Any]) -> Any:
    """New tensors, beside the first argument."""
    if not operator.returns:
        return None
    beside = next(iter(given.values()))
    made = tuple(
        beside.new_empty([_size(word, given) for word in shape], dtype=_dtype(dtype, given))
        for dtype, shape in operator.returns
    )
    return made if len(made) > 1 else made[0]


def _register(name: str, operator: Operator) -> None:
    """Shape function of an operator, after validation in C."""
    op = getattr(_validating, name).default
    arguments = arguments_of(op)

    def shapes(*args: Any) -> Any:
        _check_devices(op, args, operator.on_host)
        try:
            with WithoutTorchDispatch():  # a fake tensor mode would create fake tensors again
                op(*_example(list(args)))
        except _Unknown:
            pass
        given = {a.name: a.default_value for a in arguments}
        given.update(zip(given, args, strict=False))
        return OUTPUTS[name](given) if name in OUTPUTS else _outputs(operator, given)

    torch.library.register_fake(f"{_C.NAMESPACE}::{name}", shapes)
    autograd.register([name])


for _name, _operator in _operators().items():
    _register(_name, _operator)
