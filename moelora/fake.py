"""Shape functions of the compiled operators, for torch.compile, export and meta tensors.

What an operator refuses is said in C alone. Before a shape function runs, its arguments go there
as meta tensors, so that a call is refused while it is traced as it would be when it runs. Symbolic
sizes are there what they are in the example that is traced, which puts no guards on them; a call
with sizes that no example has is checked when it runs.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from moelora import autograd

PACK = 64
TILE_BYTES = (0, 2176, 2176, 2304, 2240, 2432, 8208, 8208, 8448)  # moelora_tile_bytes
FP8 = 6  # and all formats behind it
COMPUTE_DTYPES = (torch.bfloat16, torch.float16)
ON_HOST = ("num_active_loras",)
BASE, UNIFORM, SEGMENTED, SORTING = range(4)

Shapes = TypeVar("Shapes", bound=Callable[..., Any])


def max_blocks(mode: int, num_rows: int, num_experts: int, max_loras: int, block_size: int) -> int:
    """moelora_align_max_blocks of csrc/moelora.h; sizes may be symbolic."""
    if mode == SORTING:
        return num_experts + num_rows // block_size
    groups = num_experts * (max_loras + 1) if mode == UNIFORM else num_experts
    groups = torch.sym_min(groups, num_rows)
    return groups + (num_rows - groups) // block_size


class _Unknown(Exception):
    """A size has no example."""


def _example(value: Any) -> Any:
    """`value` as its example has it, a tensor as a meta tensor."""
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


def _check_devices(op: Any, args: tuple[Any, ...]) -> None:
    """What meta tensors cannot say: they have one device, and the call they stand for another."""
    first = next(value for value in args if isinstance(value, Tensor))
    for argument, value in zip(op._schema.arguments, args, strict=False):
        for tensor in value if isinstance(value, list) else [value]:
            if not isinstance(tensor, Tensor) or _is_absent(tensor):
                continue
            on_host = argument.name in ON_HOST and first.device.type != "meta"
            want = torch.device("cpu") if on_host else first.device
            if tensor.device != want:
                why = "it is read there" if on_host else "as the first tensor"
                raise ValueError(f"{argument.name} is on {tensor.device}, expected {want}: {why}")


def _is_absent(tensor: Tensor) -> bool:
    return tensor.dim() == 1 and isinstance(tensor.size(0), int) and tensor.size(0) == 0


def _shape_function(name: str) -> Callable[[Shapes], Shapes]:
    """Registers what follows as the shape function of an operator, behind the checks in C."""
    op = getattr(torch.ops.moelora_meta, name).default

    def register(shapes: Shapes) -> Shapes:
        def checked(*args: Any) -> Any:
            _check_devices(op, args)
            try:
                with torch._C._DisableTorchDispatch():  # a fake tensor mode would make fakes again
                    op(*_example(list(args)))
            except _Unknown:
                pass
            return shapes(*args)

        torch.library.register_fake(f"moelora::{name}", checked)
        autograd.register([name])
        return shapes

    return register


def _align(topk_ids: Tensor, blocks: int, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    def ids(size: int) -> Tensor:
        return topk_ids.new_empty((size,), dtype=torch.int32)

    return ids(blocks * block_size), ids(blocks), ids(1)


@_shape_function("moe_align_block_size")
def _(
    topk_ids: Tensor, block_size: int, num_experts: int, expert_map: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    blocks = max_blocks(BASE, topk_ids.numel(), num_experts, 0, block_size)
    return _align(topk_ids, blocks, block_size)


@_shape_function("moe_lora_align_block_size")
def _(
    topk_ids: Tensor,
    token_lora_mapping: Tensor,
    num_experts: int,
    block_size: int,
    max_loras: int,
    mode: int,
    adapter_enabled: Tensor,
    expert_map: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    blocks = max_blocks(mode, topk_ids.numel(), num_experts, max_loras, block_size)
    rows, experts, num_post = _align(topk_ids, blocks, block_size)
    lora_ids = torch.empty_like(experts if mode == UNIFORM else rows)
    return rows, experts, lora_ids, num_post


@_shape_function("moe_sorting")
def _(
    topk_ids: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    block_size: int,
    out_to_zero: Tensor,
    expert_map: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    blocks = max_blocks(SORTING, topk_ids.numel(), num_experts, 0, block_size)
    rows, experts, num_post = _align(topk_ids, blocks, block_size)
    return rows, torch.empty_like(rows, dtype=torch.float32), experts, num_post


@_shape_function("fused_moe_lora_gemm")
def _(x: Tensor, w: Tensor, topk_weights: Tensor, topk_ids: Tensor, *others: Any) -> Tensor:
    w_format, _, w_rows = (*others[9:12], 0, 0, 0)[:3]  # left out where all are 0
    columns = w_rows if w_format else w.size(1) * (PACK if w.dim() == 5 else 1)
    return x.new_empty((topk_ids.size(0), topk_ids.size(1), columns))


@_shape_function("fused_experts_lora")
def _(hidden_states: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(hidden_states, memory_format=torch.contiguous_format)


@_shape_function("fused_experts_lora_saving")
def _(
    hidden_states: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, *o: Any
) -> tuple[Tensor, ...]:
    rows, (a13, a2) = topk_ids.size(0) * topk_ids.size(1), (o[1], o[3])
    w_format, _, w_rows = (*o[15:18], 0, 0, 0)[:3]  # left out where all are 0
    columns = w_rows if w_format else w13.size(1) * (PACK if w13.dim() == 5 else 1)
    empty = hidden_states.new_empty
    return (
        torch.empty_like(hidden_states, memory_format=torch.contiguous_format),
        empty((rows, columns)),
        empty((rows, len(a13), a13[0].size(2)) if a13 else (0,)),
        empty((rows, a2[0].size(2)) if a2 else (0,)),
    )


@_shape_function("fused_experts_lora_backward")
def _(
    grad_out: Tensor, gate_up: Tensor, w13_shrink: Tensor, w2_shrink: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    hidden_states, weights, (a13, b13, a2, b2) = others[0], others[3], others[6:10]
    wanted, float32 = others[20:22]

    def like(bit: int, tensors: list[Tensor], at: int = 0, keep: bool = False) -> Tensor:
        if not wanted & bit or at >= len(tensors) or _is_absent(tensors[at]):
            return hidden_states.new_empty((0,), dtype=torch.float32)
        dtype = torch.float32 if float32 and not keep else tensors[at].dtype
        return tensors[at].new_empty(tensors[at].shape, dtype=dtype)

    bits = autograd.WANTED
    return (
        like(bits["hidden_states"], [hidden_states], keep=True),
        like(bits["topk_weights"], [weights], keep=True),
        *(like(bits["w13_lora_a"], a13, i) for i in range(2)),
        *(like(bits["w13_lora_b"], b13, i) for i in range(2)),
        like(bits["w2_lora_a"], a2),
        like(bits["w2_lora_b"], b2),
        like(bits["w13_bias"], [others[13]]),
        like(bits["w2_bias"], [others[14]]),
    )


def _writes_in_place(*args: Any) -> None:
    return None


for _name in (
    *("fused_moe_lora_gemm_out", "fused_experts_lora_out", "moe_lora_align_block_size_out"),
    "fused_experts_lora_backward_out",
    *("fused_moe_lora", "fused_moe_lora_shrink", "fused_moe_lora_expand"),
    *("moe_lora_gate_up_delta", "moe_lora_down_delta"),
    *("moe_lora_a", "moe_lora_gate_up_b", "moe_lora_down_combine", "moe_lora_fused"),
):
    _shape_function(_name)(_writes_in_place)


@_shape_function("prepack_weights")
def _(w: Tensor) -> Tensor:
    return w.new_empty((w.size(0), w.size(1) // PACK, w.size(2) // PACK, PACK, PACK))


@_shape_function("pack_quantized")
def _(
    values: Tensor,
    scales: Tensor,
    zeros: Tensor,
    format: int,
    order: int,
    dtype: int,
    block_rows: int = 0,
    block_columns: int = 0,
) -> Tensor:
    experts, rows, depth = values.shape
    row_tiles = 2 * -(-rows // (2 * PACK)) if order else -(-rows // PACK)
    depth_tiles = -(-depth // (2 * PACK)) if format >= FP8 else -(-depth * 2 // PACK)
    return values.new_empty((experts, row_tiles, depth_tiles, TILE_BYTES[format]))


@_shape_function("unpack_quantized")
def _(tiles: Tensor, format: int, order: int, rows: int, columns: int, dtype: int) -> Tensor:
    return tiles.new_empty((tiles.size(0), rows, columns), dtype=COMPUTE_DTYPES[dtype])
