"""Autograd support: layers, projections and deltas are recorded, other operators raise.

Every operator has a kernel at the Autograd key, which sees it however it is called: by its wrapper,
as torch.ops.moelora.*, under torch.compile, inside torch.func. Wrappers use `call`, which performs
the same check in a tenth of the time and bypasses the kernel. Under inference mode neither runs.

If autograd would record a call, a layer runs `fused_experts_lora_saving`; projections and deltas
save nothing but their arguments; other operators raise instead of losing the gradient. There are no
second or forward-mode derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from moelora.operators.schema import (
    BACKWARDS,
    NAMESPACE,
    OPERATORS,
    Backward,
    in_order,
    is_absent,
    names_of,
)
from moelora.operators.sparse import Pairs, is_marked
from moelora.operators.storage import holds
from moelora.operators.torch_private import (
    AFTER_AUTOGRAD,
    BelowAutograd,
    arguments_of,
    backward_keeps_graph,
    has_tangents,
    in_torch_func,
    is_wrapped,
    name_of,
)

_written: dict[Any, tuple[int, ...]] = {}
# Its kernels live as long as this object.
_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def call(op: Any, args: tuple[Any, ...]) -> Any:
    """Call `op(*args)` from a wrapper.

    Raises
    ------
    RuntimeError
        An argument without gradient support requires one and grad mode is on, or has a tangent.
    """
    if torch.is_inference_mode_enabled() or is_wrapped():
        return op(*args)
    if _is_recorded(args):
        return _record(op, args)
    with BelowAutograd():
        result = op(*args)
    _count_writes(op, args)
    return result


def register(names: Sequence[str]) -> None:
    """Register the Autograd kernels of these operators."""
    for name in names:
        op = getattr(OPERATORS, name).default
        arguments = enumerate(arguments_of(op))
        _written[op] = tuple(i for i, a in arguments if a.alias_info and a.alias_info.is_write)
        _library.impl(name, _kernel_of(op), "Autograd", with_keyset=True)


def _kernel_of(op: Any) -> Callable[..., Any]:
    def kernel(keyset: Any, *args: Any) -> Any:
        if has_tangents():
            why = "there is no forward-mode derivative: pass {name} without its tangent"
            _refuse(op, args, _has_tangent, dict.fromkeys(names_of(op), why), "has a tangent")
        if _is_recorded(args):
            return _record(op, args)
        with BelowAutograd():
            result = op.redispatch(keyset & AFTER_AUTOGRAD, *args)
        _count_writes(op, args)
        return result

    return kernel


def _requires(value: Any) -> bool:
    return getattr(value, "requires_grad", False)


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
    if name not in BACKWARDS:
        _refuse(op, args, _requires, dict.fromkeys(names_of(op), NO_BACKWARD.get(name, NONE)))
        raise AssertionError("an argument requires a gradient")
    args = (*args, *(a.default_value for a in arguments_of(op)[len(args) :]))
    _refuse(op, args, _requires, FROZEN)
    if in_torch_func():
        _refuse(op, args, _requires, dict.fromkeys(names_of(op), NO_TRANSFORM))
    counts = [len(a) if isinstance(a, list) else -1 for a in args]
    pairs = _pairs_of(op, args)
    _refuse(op, args[: len(_written[op])], lambda t: _requires(t) and t.is_leaf, {"out": LEAF})
    is_layer = name == "fused_experts_lora"  # its saving form returns what the backward needs
    recorded = OPERATORS.fused_experts_lora_saving.default if is_layer else op
    results = _Recorded.apply(recorded, is_layer, pairs, args, counts, *_flat(args))  # type: ignore[no-untyped-call]
    if _written[op]:
        return None
    return results[0] if is_layer else results


def _pairs_of(op: Any, args: tuple[Any, ...]) -> Pairs | None:
    """The pairs that a call reaches; None unless the gradient of a factor is to be sparse."""
    factors = [f for value in args if type(value) is list for f in value]
    if not any(map(is_marked, factors)) or (
        args[0].is_cuda and torch.cuda.is_current_stream_capturing()
    ):
        return None
    given = dict(zip(names_of(op), args, strict=True))
    ids, mapping = given["topk_ids"], given["token_lora_mapping"]
    if is_absent(mapping) and ids.size(0):
        return None
    tables = ids, mapping, given["expert_map"]
    if mapping.shape != ids.shape[:1] or ids.dim() != 2 or not all(map(holds, tables)):
        return None  # the operator refuses them by name; torch would broadcast, or read address 0
    w = given.get("w", given.get("w13"))
    experts = given["num_experts"] if w is None else w.size(0)
    expert_map = None if is_absent(given["expert_map"]) else given["expert_map"]
    return Pairs(ids, mapping, (factors[0].size(0), experts), expert_map)


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
OUT = "there is no backward of a call with out=: leave it out, or call under torch.no_grad()"
NO_BACKWARD = {
    **dict.fromkeys(("fused_experts_lora_out", "fused_moe_lora_gemm_out"), OUT),
    **{f"{of.name}{end}": TWICE for of in BACKWARDS.values() for end in ("", "_out", "_over")},
}
FROZEN = {
    **dict.fromkeys(("w", "w13", "w2"), WEIGHTS),
    "lora_scalings": "a scaling has no gradient: pass {name}.detach(), and multiply the factors by "
    "what is to be trained",
}


def _refuse(
    op: Any,
    args: tuple[Any, ...],
    recorded: Callable[[Any], bool],
    reasons: dict[str, str],
    what: str = "requires a gradient",
) -> None:
    """Raise for the first argument that would be recorded, if any."""
    for argument, value in zip(names_of(op), args, strict=False):
        if argument not in reasons:
            continue
        items = enumerate(value) if isinstance(value, list) else [(None, value)]
        for index, item in items:
            if recorded(item):
                name = argument if index is None else f"{argument}[{index}]"
                why = reasons[argument].format(name=name)
                raise RuntimeError(f"{name_of(op)}: {name} {what}, and {why}")


def _count_writes(op: Any, args: Sequence[Any]) -> None:
    """Bump version counters, as any in-place operator must: a backward that saved the tensor then
    notices.
    """
    if written := _written[op]:
        torch.autograd.graph.increment_version(_flat([args[i] for i in written]))


def _flat(args: Sequence[Any]) -> list[Any]:
    return [v for a in args for v in (a if isinstance(a, list) else [a])]


def _nested(counts: list[int], flat: Sequence[Any]) -> list[Any]:
    """Inverse of `_flat`: lists of `counts` elements; a negative count is one argument that is no
    list."""
    values = iter(flat)
    return [next(values) if count < 0 else [next(values) for _ in range(count)] for count in counts]


def _in_rows(grad: Tensor) -> Tensor:
    """A gradient of contiguous rows, whose spaces may differ only in a matrix; contiguous() keeps
    any strides of a tensor without elements."""
    grad = grad.contiguous() if grad.dim() > 2 else grad
    if grad.size(-1) > 1 and grad.stride(-1) != 1:
        return grad.clone(memory_format=torch.contiguous_format)
    return grad


class _Recorded(torch.autograd.Function):
    """An operator that has a backward, with its list arguments flattened.

    A layer's returns (out, *saved); `over`: nothing else has what it saves, so that its backward
    may write to it. A delta writes to its first argument, either overwriting it or adding to it.
    `pairs`: of sparse gradients.

    Saves tensors with autograd, so that in-place writes between forward and backward are detected;
    absent ones, which all calls share, are constants.
    """

    @staticmethod
    def forward(
        ctx: Any,
        op: Any,
        over: bool,
        pairs: Pairs | None,
        args: tuple[Any, ...],
        counts: list[int],
        *flat: Any,
    ) -> Any:
        with BelowAutograd():
            out = op(*args)
        saves = [isinstance(v, Tensor) and not is_absent(v) for v in flat]
        saved = out[1:] if isinstance(out, tuple) else ()
        if _written[op]:
            out, saves[0] = flat[0], False
            _count_writes(op, args)
            ctx.mark_dirty(out)
        ctx.save_for_backward(*saved, *(v for v, s in zip(flat, saves, strict=True) if s))
        ctx.op, ctx.over, ctx.pairs, ctx.counts, ctx.saves = op, over, pairs, counts, saves
        ctx.rest = [None if v is out else v for v, s in zip(flat, saves, strict=True) if not s]
        ctx.mark_non_differentiable(*saved)
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, *_: Any) -> Any:
        if grad_out is None:
            return tuple([None] * (5 + len(ctx.saves)))
        backward, names = BACKWARDS[name_of(ctx.op)], names_of(ctx.op)
        tensors, rest = iter(ctx.saved_tensors), iter(ctx.rest)  # unpacked only once
        given: dict[str, Any] = {}
        if not backward.saved:  # a delta has no weights
            absent = grad_out.new_empty(0)
            given = {"w": absent, "bias": absent, "num_experts": 0}
        given |= zip(backward.saved, tensors, strict=False)
        args = _nested(ctx.counts, [next(tensors) if s else next(rest) for s in ctx.saves])
        given |= zip(names, args, strict=True)
        needs = dict(zip(names, _nested(ctx.counts, ctx.needs_input_grad[5:]), strict=True))
        wanted = sum(bit for n, bit in backward.bits.items() if any(_flat([needs.get(n)])))
        given |= {"grad_out": _in_rows(grad_out), "wanted": wanted, "float32": False}
        grads: dict[str, Any] = {}
        if wanted and ctx.pairs is not None:
            grads = _sparse_gradients(backward, given, ctx.pairs)
        elif wanted:
            # The only backward of its graph, which runs now, has saved tensors to itself.
            over = ctx.over and type(given[backward.saved[0]]) is Tensor
            op = backward.op("_over" if over and not backward_keeps_graph() else "")
            grads = backward.by_argument(call(op, tuple(in_order(op, given))), given)
        grads = {name: grad for name, grad in grads.items() if backward.bits[name] & wanted}
        if needs.get("out") and given["add_inputs"]:
            grads["out"] = grad_out
        none = ([None] * count if count >= 0 else None for count in ctx.counts)
        of_inputs = [grads.get(name, nothing) for name, nothing in zip(names, none, strict=True)]
        return None, None, None, None, None, *_flat(of_inputs)


def _sparse_gradients(backward: Backward, given: dict[str, Any], pairs: Pairs) -> dict[str, Any]:
    """Gradients by argument, those of factors only for `pairs`."""
    wants = {name: bool(bit & given["wanted"]) for name, bit in backward.bits.items()}
    buffers: dict[str, Any] = {}
    for name, is_wanted in wants.items():
        if name in backward.factors:
            buffers[name] = [pairs.buffer(factor) for factor in given[name] if is_wanted]
        else:
            buffers[name] = _like(given[name], is_wanted)
    options = {"grad_pairs": pairs.index, "accumulate": False}
    op = backward.op("_out")
    op(*in_order(op, given | {f"grad_{name}": to for name, to in buffers.items()} | options))
    for name in backward.factors:
        each = zip(buffers[name], given[name], strict=False)
        buffers[name] = [pairs.gradient(buffer, factor) for buffer, factor in each]
    return buffers


def _like(value: Tensor, wanted: bool) -> Tensor:
    if not wanted or is_absent(value):
        return value.new_empty(0)
    return torch.empty_like(value, memory_format=torch.contiguous_format)
