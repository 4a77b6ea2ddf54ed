"""Meta tensors and tracers refuse what a call on memory refuses, and with the same words.

The wrong calls are drawn: an operator's valid arguments with one of them changed. Others are in
test_errors.py.
"""

from __future__ import annotations

import contextlib
import random

import pytest
import torch
from covering import extent
from glue_cases import TOP_K, M, inputs, op_calls, operator
from test_errors import ERRORS, MEMORY, meta
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import moelora

SEEDS = extent(nightly=60, ci=6)


def flat(value):
    if isinstance(value, list | tuple):
        return [t for v in value for t in flat(v)]
    return [value] if isinstance(value, torch.Tensor) else []


def refusal(function, *args, **kwargs):
    """(what it returned, "") or (None, why it refused)"""
    try:
        return function(*args, **kwargs), ""
    except ERRORS as error:
        return None, str(error)


# ---- drawn ----


def draw(seed: int):
    """An operator and its arguments, all but one as they should be; that one may be right too."""
    rng = random.Random(seed)
    name, args = rng.choice(op_calls())
    args = [list(a) if isinstance(a, list) else a for a in args]
    place = rng.randrange(len(args))
    value = args[place]
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        value[at] = mutate(value[at], rng)
    elif isinstance(value, list):
        args[place] = rng.choice((value[:-1], value * 2, value * 3, []))
    elif isinstance(value, torch.Tensor):
        args[place] = mutate(value, rng)
    elif isinstance(value, bool):
        args[place] = not value
    else:
        args[place] = rng.choice((0, -1, 1, value + 1, value * 2, 7, 2**31, 2**31 - 1, -(2**40)))
    return name, args


def mutate(t: torch.Tensor, rng: random.Random) -> torch.Tensor:
    how = rng.choice(("size", "size", "size", "dims", "dtype", "stride", "empty"))
    sizes = list(t.shape)
    if how == "size" and sizes:
        at = rng.randrange(len(sizes))
        sizes[at] = max(0, rng.choice((sizes[at] - 1, sizes[at] + 1, 2 * sizes[at], 1, 64)))
        return t.new_zeros(sizes)
    if how == "dims":
        return rng.choice((t.unsqueeze(0), t.flatten(), t.unsqueeze(-1)))
    if how == "dtype":
        known = (torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.bool)
        return torch.zeros(sizes, dtype=rng.choice((*known, torch.uint8, torch.complex64)))
    if how == "stride" and sizes:
        spread = torch.zeros([*sizes[:-1], 2 * sizes[-1]], dtype=t.dtype)
        return rng.choice(
            (
                spread[..., ::2],
                spread[..., : sizes[-1]],
                t.new_zeros(sizes[::-1]).permute(*range(t.dim())[::-1]),
            )
        )
    return t.new_zeros([*sizes[:-1], 0]) if how == "empty" and sizes else t


def check(seed: int) -> str:
    """Compares memory, meta tensors and symbolic tracing; what was refused, and why."""
    name, args = draw(seed)
    op = operator(name)
    on_meta = meta(args)
    out, why = refusal(op, *args)
    if why and any(text in why for text in MEMORY):
        return ""
    found, again = refusal(op, *on_meta)
    assert again.replace("on meta", "on cpu") == why
    assert [(t.shape, t.dtype) for t in flat(found)] == [(t.shape, t.dtype) for t in flat(out)]
    with contextlib.ExitStack() as stack:
        if why:
            stack.enter_context(pytest.raises(ERRORS))
        make_fx(lambda *tensors: op(*rebuild(args, tensors)), tracing_mode="symbolic")(*flat(args))
    return f"{name}: {why}" if why else ""


def rebuild(args, tensors):
    tensors = iter(tensors)

    def fill(value):
        if isinstance(value, list):
            return [fill(v) for v in value]
        return next(tensors) if isinstance(value, torch.Tensor) else value

    return [fill(value) for value in args]


@pytest.mark.parametrize("first", range(0, 5 * SEEDS, SEEDS))
def test_drawn_calls_are_refused_alike(first):
    refused = set()
    for seed in range(first, first + SEEDS):
        try:
            refused.add(check(seed))
        except BaseException as error:
            raise AssertionError(f"seed {seed}, {draw(seed)[0]}: {error}") from error
    assert len(refused) > SEEDS // 4, "the drawn calls are all alike"


# ---- tracers ----


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk_weights": torch.zeros(M, TOP_K + 1)}, r"topk_weights.size\(1\) is 3"),
        ({"token_lora_mapping": None}, "token_lora_mapping is None, but w13_lora_a is not"),
        ({"activation_limit": -1.0}, "activation_limit is -1, expected a normal float32"),
    ],
)
def test_compile_refuses(changes, message, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(
        moelora.fused_experts_lora, fullgraph=True, backend="aot_eager", dynamic=dynamic
    )
    with pytest.raises(RuntimeError, match=message):
        compiled(**{**inputs(), **changes})


@pytest.mark.parametrize("name", sorted({name for name, _ in op_calls()}))
def test_fake_gpu_tensors(name):
    """Traced where there is no GPU. Only the number of active adapters is read on the host."""

    def fake(value, device):
        if isinstance(value, list):
            return [fake(v, device) for v in value]
        if not isinstance(value, torch.Tensor):
            return value
        device = "cpu" if value.shape == (1,) and value is not args[0] else device
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)

    args = next(args for called, args in op_calls(dtype=torch.bfloat16) if called == name)
    schema = operator(name)._schema.arguments
    with FakeTensorMode():
        on_gpu = fake(list(args), "cuda")
        found = operator(name)(*on_gpu)
        assert all(t.device.type == "cuda" for t in flat(found))
        for place, (argument, tensor) in enumerate(zip(schema, on_gpu, strict=False)):
            if place == 0 or not isinstance(tensor, torch.Tensor) or not tensor.numel():
                continue
            there = "cuda" if tensor.device.type == "cpu" else "cpu"
            moved = torch.empty_like(tensor, device=there)
            with pytest.raises(ERRORS, match=rf"{argument.name} is on {there}.*, expected c"):
                operator(name)(*on_gpu[:place], moved, *on_gpu[place + 1 :])


def test_sizes_without_an_example_are_checked_when_the_call_runs():
    """The number of tokens is data: nothing is known of it while it is traced."""
    given = inputs()
    chosen = torch.tensor([0, 2, 3])

    def layer(keep, x, topk_weights, topk_ids, w13, w2):
        (rows,) = keep.nonzero(as_tuple=True)
        return moelora.fused_experts_lora(x[rows], w13, w2, topk_weights[rows], topk_ids[rows])

    keep = torch.zeros(M).index_fill(0, chosen, 1)
    names = ("hidden_states", "topk_weights", "topk_ids", "w13", "w2")
    args = [given[name] for name in names]
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(keep, *args), layer(keep, *args))


def test_deltas_are_traced_with_symbolic_sizes():
    """Whether a storage was freed is not asked of tensors that have none."""
    given = inputs()
    factors = {"lora_a": given["w13_lora_a"], "lora_b": given["w13_lora_b"]}

    def delta(x, topk_weights, topk_ids, mapping):
        return moelora.moe_lora_gate_up_delta(
            x, topk_weights, topk_ids, token_lora_mapping=mapping, **factors
        )

    names = ("hidden_states", "topk_weights", "topk_ids", "token_lora_mapping")
    args = [given[name] for name in names]
    traced = make_fx(delta, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*args)
    fewer = [arg[:4] for arg in args]
    assert torch.equal(traced(*fewer), delta(*fewer))
