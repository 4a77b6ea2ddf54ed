"""Autograd support: layers, projections and deltas are recorded, other operators raise.

Every operator has a kernel at the Autograd key, which sees it however it is called: by its wrapper,
as torch.ops.moelora.*, under torch.compile, inside torch.func. Wrappers use `call`, which performs
the same check in a tenth of the time and bypasses the kernel. Under inference mode neither runs.

If autograd would record a call, a layer runs `fused_experts_lora_saving`; projections and deltas
save nothing but their arguments; other operators raise instead of losing the gradient. There are no
second or forward-mode derivatives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from moelora.operators.sparse import Buffers, Pairs, is_marked
from moelora.operators.storage import holds
from moelora.operators.trace import name_of

_AFTER_AUTOGRAD = torch._C._after_autograd_keyset
_written: dict[Any, tuple[int, ...]] = {}
_library = torch.library.Library(
    "moelora", "FRAGMENT"
)  # its kernels live as long as the library object


def call(op: Any, args: tuple[Any, ...]) -> Any:
    """Call `op(*args)` from a wrapper.

    Raises
    ------
    RuntimeError
        An argument without gradient support requires one and grad mode is on, or has a tangent.
    """
    if torch.is_inference_mode_enabled() or _transformed():
        return op(*args)
    if _is_recorded(args):
        return _record(op, args)
    with torch._C._AutoDispatchBelowAutograd():
        result = op(*args)
    _count_writes(op, args)
    return result


def register(names: Sequence[str]) -> None:
    """Register the Autograd kernels of these operators."""
    for name in names:
        op = getattr(torch.ops.moelora, name).default
        arguments = enumerate(op._schema.arguments)
        _written[op] = tuple(i for i, a in arguments if a.alias_info and a.alias_info.is_write)
        _library.impl(name, _kernel_of(op), "Autograd", with_keyset=True)


def _kernel_of(op: Any) -> Callable[..., Any]:
    def kernel(keyset: Any, *args: Any) -> Any:
        _refuse_tangents(op, args)
        if _is_recorded(args):
            return _record(op, args)
        with torch._C._AutoDispatchBelowAutograd():
            result = op.redispatch(keyset & _AFTER_AUTOGRAD, *args)
        _count_writes(op, args)
        return result

    return kernel


def _transformed() -> bool:
    """Whether a tensor may be wrapped by a functional transform, or is a tangent."""
    return forward_ad._current_level >= 0 or peek_interpreter_stack() is not None


def _requires(value: Any) -> bool:
    return getattr(value, "requires_grad", False)


def _is_leaf(value: Any) -> bool:
    return _requires(value) and value.is_leaf


def _has_tangent(value: Any) -> bool:
    return isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None


def _is_recorded(args: tuple[Any, ...]) -> bool:
    if not torch.is_grad_enabled():
        return False
    for value in args:  # this loop is most of the microsecond that grad mode costs per call
        if type(value) is list:
            for item in value:
                if item.requires_grad:
                    return True
        elif getattr(value, "requires_grad", False):
            return True
    return False


def _record(op: Any, args: tuple[Any, ...]) -> Any:
    """Call the operator such that autograd records it."""
    name = name_of(op)
    projects = name in PROJECTIONS
    if projects or name in ("fused_experts_lora", "fused_experts_lora_saving"):
        args = (*args, *(a.default_value for a in op._schema.arguments[len(args) :]))
        _refuse(op, args, _requires, FROZEN)
        if torch._C._are_functorch_transforms_active():
            _refuse(op, args, _requires, dict.fromkeys(_names(op), NO_TRANSFORM))
        counts = [len(a) if isinstance(a, list) else -1 for a in args]
        pairs = _pairs_of(op, args)
        if projects:
            _refuse(op, args[: len(_written[op])], _is_leaf, {"out": LEAF})
            result = _Projection.apply(op, pairs, counts, *_flat(args))  # type: ignore[no-untyped-call]
            return None if _written[op] else result
        keeps = name == "fused_experts_lora_saving"
        results = _Layer.apply(keeps, pairs, counts, *_flat(args))  # type: ignore[no-untyped-call] # of torch
        return results if keeps else results[0]
    _refuse(op, args, _requires, dict.fromkeys(_names(op), NO_BACKWARD.get(name, NONE)))
    raise AssertionError("an argument requires a gradient")


def _pairs_of(op: Any, args: tuple[Any, ...]) -> Pairs | None:
    """The pairs that a call reaches; None unless the gradient of a factor is to be sparse."""
    factors = [f for value in args if type(value) is list for f in value]
    if not any(map(is_marked, factors)) or (
        args[0].is_cuda and torch.cuda.is_current_stream_capturing()
    ):
        return None
    given = dict(zip(_names(op), args, strict=True))
    ids, mapping = given["topk_ids"], given["token_lora_mapping"]
    if _is_absent(mapping) and ids.size(0):
        return None
    tables = ids, mapping, given["expert_map"]
    if mapping.shape != ids.shape[:1] or ids.dim() != 2 or not all(map(holds, tables)):
        return None  # the operator refuses them by name; torch would broadcast, or read address 0
    w = given.get("w", given.get("w13"))
    experts = given["num_experts"] if w is None else w.size(0)
    return Pairs(
        ids,
        mapping,
        (factors[0].size(0), experts),
        None if _is_absent(given["expert_map"]) else given["expert_map"],
    )


NONE = "there is no backward: call it under torch.no_grad(), or pass {name}.detach()"
LEAF = "it is a leaf, to which nothing adds in place: leave {name} away, and add to it"
NO_TRANSFORM = "torch.func cannot see the backward: call torch.autograd.grad, or .backward()"
TWICE = (
    "a backward has none of its own: call it under torch.no_grad(), or torch.autograd.grad without "
    "create_graph"
)
WEIGHTS = (
    "the weights of experts are frozen: their gradient is never computed; pass {name}.detach(), or "
    "{name}.requires_grad_(False)"
)
NO_BACKWARD = {
    "fused_experts_lora_out": "there is no backward of a call with out=: leave it out, or call "
    "under torch.no_grad()",
    "fused_moe_lora_gemm_out": "there is no backward of a call with out=: leave it out, or call "
    "under torch.no_grad()",
    "fused_moe_lora_gemm_backward": TWICE,
    "fused_moe_lora_gemm_backward_out": TWICE,
    "fused_experts_lora_backward": TWICE,
    "fused_experts_lora_backward_out": TWICE,
    "fused_experts_lora_backward_over": TWICE,
}
FROZEN = {
    "w": WEIGHTS,
    "w13": WEIGHTS,
    "w2": WEIGHTS,
    "lora_scalings": "a scaling has no gradient: pass {name}.detach(), and multiply the factors by "
    "what is to be trained",
}


@functools.cache
def _names(op: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in op._schema.arguments)


def _in_order(op: Any, given: dict[str, Any]) -> list[Any]:
    """The arguments of `op` by name; those that `given` lacks are its last, and have defaults."""
    return [given[name] for name in _names(op) if name in given]


def _refuse_tangents(op: Any, args: tuple[Any, ...]) -> None:
    if forward_ad._current_level >= 0:
        why = "there is no forward-mode derivative: pass {name} without its tangent"
        _refuse(op, args, _has_tangent, dict.fromkeys(_names(op), why), "has a tangent")


def _refuse(
    op: Any,
    args: tuple[Any, ...],
    recorded: Callable[[Any], bool],
    reasons: dict[str, str],
    what: str = "requires a gradient",
) -> None:
    """Raise for the first argument that would be recorded, if any."""
    for argument, value in zip(op._schema.arguments, args, strict=False):
        items = enumerate(value) if isinstance(value, list) else [(None, value)]
        for index, item in items:
            if argument.name in reasons and recorded(item):
                name = argument.name if index is None else f"{argument.name}[{index}]"
                why = reasons[argument.name].format(name=name)
                raise RuntimeError(f"{name_of(op)}: {name} {what}, and {why}")


def _count_writes(op: Any, args: tuple[Any, ...]) -> None:
    """Bump version counters, as any in-place operator must: a backward that saved the tensor then
    notices.
    """
    written = _written[op]
    if written:
        torch.autograd.graph.increment_version(_flat(tuple(args[i] for i in written)))


# ---- a layer ----

# Bits of `wanted` of fused_experts_lora_backward, by argument.
WANTED = {
    "hidden_states": 1,
    "topk_weights": 2,
    "w13_lora_a": 4,
    "w13_lora_b": 8,
    "w2_lora_a": 16,
    "w2_lora_b": 32,
    "w13_bias": 64,
    "w2_bias": 128,
}
SAVED = ("gate_up", "w13_shrink", "w2_shrink")


def _flat(args: tuple[Any, ...]) -> list[Any]:
    return [v for a in args for v in (a if isinstance(a, list) else [a])]


def _nested(counts: list[int], flat: Sequence[Any]) -> list[Any]:
    """Inverse of `_flat`: lists of `counts` elements; a negative count is one argument that is no
    list."""
    values = iter(flat)
    return [next(values) if count < 0 else [next(values) for _ in range(count)] for count in counts]


def _in_rows(grad: Tensor) -> Tensor:
    """A gradient with a contiguous last dimension; contiguous() keeps any strides of a tensor
    without elements."""
    if grad.size(-1) > 1 and grad.stride(-1) != 1:
        return grad.clone(memory_format=torch.contiguous_format)
    return grad


def _is_absent(value: Tensor) -> bool:
    return value.dim() == 1 and isinstance(value.size(0), int) and value.size(0) == 0


def _may_overwrite(saved: Tensor) -> bool:
    """Whether a backward has saved tensors to itself: it is the only one of its graph, and runs."""
    asked = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return type(saved) is Tensor and asked is not None and not asked()


class _Layer(torch.autograd.Function):
    """fused_experts_lora_saving, with its list arguments flattened. `keeps`: the caller has what it
    saves, so that the backward may not write to it. `pairs`: of sparse gradients.

    Saves tensors with autograd, so that in-place writes between forward and backward are detected;
    absent ones, which all calls share, are constants.
    """

    @staticmethod
    def forward(ctx: Any, keeps: bool, pairs: Pairs | None, counts: list[int], *flat: Any) -> Any:
        op = torch.ops.moelora.fused_experts_lora_saving.default
        with torch._C._AutoDispatchBelowAutograd():
            out, *saved = op(*_nested(counts, flat))
        saves = [isinstance(v, Tensor) and not _is_absent(v) for v in flat]
        ctx.save_for_backward(*saved, *(v for v, s in zip(flat, saves, strict=True) if s))
        ctx.keeps, ctx.pairs, ctx.counts, ctx.saves = keeps, pairs, counts, saves
        ctx.rest = [v for v, s in zip(flat, saves, strict=True) if not s]
        ctx.mark_non_differentiable(*saved)
        ctx.set_materialize_grads(False)
        return (out, *saved)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, *_: Any) -> Any:
        nothing = [None] * (3 + len(ctx.saves))
        if grad_out is None:
            return tuple(nothing)
        tensors, rest = iter(ctx.saved_tensors), iter(ctx.rest)  # unpacked only once
        saved = [next(tensors) for _ in range(3)]
        names = _names(torch.ops.moelora.fused_experts_lora_saving.default)
        args = _nested(ctx.counts, [next(tensors) if s else next(rest) for s in ctx.saves])
        needs = dict(zip(names, _nested(ctx.counts, ctx.needs_input_grad[3:]), strict=True))
        wanted = sum(bit for name, bit in WANTED.items() if any(_flat((needs[name],))))
        given = dict(zip((*names, *SAVED), (*args, *saved), strict=True))
        given |= {"grad_out": _in_rows(grad_out), "wanted": wanted, "float32": False}
        ops = torch.ops.moelora
        if ctx.pairs is not None:
            out = ops.fused_experts_lora_backward_out.default
            grads = _sparse_gradients(out, given, WANTED, ctx.pairs)
        else:
            over = not ctx.keeps and _may_overwrite(saved[0])
            op = ops.fused_experts_lora_backward_over if over else ops.fused_experts_lora_backward
            found = op.default(*_in_order(op.default, given))
            grads = by_argument(found, len(given["w13_lora_a"]))
        return None, None, None, *_of_inputs(ctx, names, grads, WANTED, wanted)


def _of_inputs(
    ctx: Any, names: Sequence[str], grads: dict[str, Any], bits: dict[str, int], wanted: int
) -> list[Any]:
    """The gradients of all inputs, as `_flat` has them; None of those that are not wanted."""
    none = ([None] * count if count >= 0 else None for count in ctx.counts)
    return _flat(
        tuple(
            grads[name] if bits.get(name, 0) & wanted else nothing
            for name, nothing in zip(names, none, strict=True)
        )
    )


def _sparse_gradients(
    op: Any, given: dict[str, Any], bits: dict[str, int], pairs: Pairs
) -> dict[str, Any]:
    """Gradients by argument of `op`, a backward that writes to buffers; those of factors only for
    `pairs`."""
    wants = {name: bool(bit & given["wanted"]) for name, bit in bits.items()}
    names = [name for name in bits if "lora" in name]
    factors = Buffers([given[name] for name in names], [wants[name] for name in names], pairs)
    others = {n: _like(given[n], is_wanted) for n, is_wanted in wants.items() if n not in names}
    to = others | dict(zip(names, factors.given, strict=True))
    buffers = {f"grad_{name}": value for name, value in to.items()}
    options = {"grad_pairs": pairs.index, "accumulate": False}
    op(*_in_order(op, given | buffers | options))
    return others | dict(zip(names, factors.gradients(), strict=True))


def _like(value: Tensor, wanted: bool) -> Tensor:
    if not wanted or _is_absent(value):
        return value.new_empty(0)
    return torch.empty_like(value, memory_format=torch.contiguous_format)


def by_argument(found: Sequence[Tensor], slices: int) -> dict[str, Any]:
    """Outputs of fused_experts_lora_backward by argument; w13 has `slices`."""
    dx, dt, a0, a1, b0, b1, a2, b2, bias13, bias2 = found
    grads = dx, dt, [a0, a1][:slices], [b0, b1][:slices], [a2], [b2], bias13, bias2
    return dict(zip(WANTED, grads, strict=True))


# ---- projections, and deltas ----

PROJECTIONS = ("fused_moe_lora_gemm", "moe_lora_gate_up_delta", "moe_lora_down_delta")

# Bits of `wanted` of fused_moe_lora_gemm_backward, by the arguments that have gradients.
WANTED_OF_PROJECTION = {"x": 1, "topk_weights": 2, "lora_a": 4, "lora_b": 8, "bias": 16}


class _Projection(torch.autograd.Function):
    """An operator of PROJECTIONS, with its list arguments flattened. A delta writes to its first
    argument, either overwriting it or adding to it."""

    @staticmethod
    def forward(ctx: Any, op: Any, pairs: Pairs | None, counts: list[int], *flat: Any) -> Any:
        args = _nested(counts, flat)
        with torch._C._AutoDispatchBelowAutograd():
            out = op(*args)
        ctx.op, ctx.pairs, ctx.counts = op, pairs, counts
        saves = [isinstance(v, Tensor) and not _is_absent(v) for v in flat]
        if _written[op]:
            out, saves[0] = flat[0], False
            _count_writes(op, tuple(args))
            ctx.mark_dirty(out)
        ctx.save_for_backward(*(v for v, s in zip(flat, saves, strict=True) if s))
        ctx.saves = saves
        ctx.rest = [None if v is out else v for v, s in zip(flat, saves, strict=True) if not s]
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None) -> Any:
        if grad_out is None:
            return tuple([None] * (3 + len(ctx.saves)))
        tensors, rest = iter(ctx.saved_tensors), iter(ctx.rest)
        args = _nested(ctx.counts, [next(tensors) if s else next(rest) for s in ctx.saves])
        names = _names(ctx.op)
        given = dict(zip(names, args, strict=True))
        needs = dict(zip(names, _nested(ctx.counts, ctx.needs_input_grad[3:]), strict=True))
        wanted = sum(
            bit for name, bit in WANTED_OF_PROJECTION.items() if any(_flat((needs.get(name),)))
        )
        grads = {}
        if wanted:
            given |= {"grad_out": _in_rows(grad_out.contiguous()), "wanted": wanted}
            grads = _projection_backward(given, ctx.pairs)
        result = _of_inputs(ctx, names, grads, WANTED_OF_PROJECTION, wanted)
        if needs.get("out") and given["add_inputs"]:
            result[0] = grad_out
        return None, None, None, *result


def _projection_backward(given: dict[str, Any], pairs: Pairs | None) -> dict[str, Any]:
    """Gradients by argument, of the arguments of an operator of PROJECTIONS; those of factors
    only for `pairs`, if given."""
    absent = given["x"].new_empty(0)
    given = {"w": absent, "bias": absent, "num_experts": 0, "float32": False} | given
    ops = torch.ops.moelora
    if pairs is not None:
        op = ops.fused_moe_lora_gemm_backward_out.default
        return _sparse_gradients(op, given, WANTED_OF_PROJECTION, pairs)
    op = ops.fused_moe_lora_gemm_backward.default
    found = op(*_in_order(op, given))
    return by_projection_argument(found, len(given["lora_a"]), len(given["lora_b"]))


def by_projection_argument(found: Sequence[Tensor], num_a: int, num_b: int) -> dict[str, Any]:
    """Outputs of fused_moe_lora_gemm_backward by argument, of factors of so many slices."""
    dx, dt, *factors, bias = found
    grads = dx, dt, factors[:num_a], factors[4 : 4 + num_b], bias
    return dict(zip(WANTED_OF_PROJECTION, grads, strict=True))
