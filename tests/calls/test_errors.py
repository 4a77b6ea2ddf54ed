"""Bad input: a Python exception that names the argument, what was got and what was wanted.

C validates arguments, in words that tests/c holds; here is that they reach it under their names,
that meta tensors are refused in the same words, and that nothing is written before. Problems have
M = 5 tokens, top_k = 2, E = 4 experts, K = 64, I = 32, and two adapters of maximum rank R = 16;
those of adapters alone have 9 tokens and three adapters of rank 8, and SGLang's MLP of adapters
is of the first with one slice.
"""

import math
import types

import pytest
import torch
from cases import Spec, same_bits
from delta_cases import PLAIN, Lists, base_output, delta_kwargs

import moelora
from moelora.operators.call import _fits

M, TOP_K, E, K, I, L, R = 5, 2, 4, 64, 32, 2, 16
ERRORS = (ValueError, RuntimeError, TypeError, NotImplementedError)
# The memory that meta tensors have not: a number in it, and what an output shares with an input.
MEMORY = ("shares memory", "share memory", "num_active_loras")


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def ids(*shape, dtype=torch.int32):
    return torch.zeros(shape, dtype=dtype)


def meta(value):
    if isinstance(value, list | tuple):
        return [meta(v) for v in value]
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")


# ---- valid arguments ----


def of_lists():
    p = PLAIN.build()
    return Lists(p, "w13", naive=False).of_fused(base_output(p, 68).tensor)


def of_delta():
    p = PLAIN.build()
    return {**delta_kwargs(p, "w13"), "out": base_output(p, 64).tensor}


def of_mlp():
    given = Spec(slices=1).build().kwargs()
    names = ("hidden_states", "topk_ids", "topk_weights", "w13_lora_a", "w13_lora_b")
    taken = ("x", "expert_ids", "routing_weights", "gate_up_a", "gate_up_b")
    names += ("w2_lora_a", "w2_lora_b", "token_lora_mapping", "lora_ranks", "lora_scalings")
    taken += ("down_a", "down_b", "weight_indices", "lora_ranks", "scalings")
    found = {ours: given[name] for ours, name in zip(taken, names, strict=True)}
    return {**found, "output": torch.ones(M, K)}


ROUTING = {"topk_ids": ids(M, TOP_K), "num_experts": E, "block_size": 4}
CALLS = {
    "layer": (
        moelora.fused_experts_lora,
        lambda: {**Spec().build().kwargs(), "out": torch.ones(M, K)},
    ),
    "gemm": (
        moelora.fused_moe_lora_gemm,
        lambda: {**Spec().build().gemm_kwargs("w13"), "out": torch.ones(M, TOP_K, 2 * I)},
    ),
    "delta": (moelora.moe_lora_gate_up_delta, of_delta),
    "lists": (moelora.fused_moe_lora, of_lists),
    "mlp": (moelora.moe_lora_fused, of_mlp),
    "align": (moelora.moe_align_block_size, lambda: ROUTING),
    "lora align": (moelora.moe_lora_align_block_size, lambda: Spec().build().align_kwargs(4)),
    "sorting": (moelora.moe_sorting, lambda: {**ROUTING, "topk_weights": zeros(M, TOP_K)}),
    "prepack": (moelora.prepack_weights, lambda: {"w": zeros(2, 64, 64)}),
}
A13, B13, BF16 = zeros(L, E, R, K), zeros(L, E, I, R), torch.bfloat16
ONE_A = "expected a normal float32 above 0"
OAI = {"activation": "swigluoai"}

# For each call: what it is given instead, and the message behind the operator's name.
REFUSED = {
    "layer": [
        ({"hidden_states": zeros(*[1] * 6)}, "hidden_states has 6 dimensions"),
        ({"hidden_states": zeros(K, M).t()}, "hidden_states.stride(1) is 5, expected 1: the last"),
        *(
            ({"w13": zeros(E, 2 * I, K).to(d)}, f"w13 has dtype {str(d)[6:]}, expected float32")
            for d in (BF16, torch.float64, torch.uint8, torch.float8_e4m3fn, torch.complex64)
        ),
        ({"topk_ids": ids(M, TOP_K).short()}, "topk_ids has dtype int16, expected int32 or int64"),
        ({"token_lora_mapping": zeros(M)}, "token_lora_mapping has dtype float32, expected int32"),
        ({"w13_lora_a": [A13, zeros(L, E, 8, K)]}, "w13_lora_a[1].size(2) is 8, the rank of the"),
        ({"w13_lora_a": [A13] * 6}, "w13_lora_a has 6 slices, at most 4 are known"),
        ({"w13_lora_b": [B13]}, "w13_lora_a has 2 slices, w13_lora_b has 1"),
        ({"w2_lora_b": None}, "w2_lora_a has 1 slices, w2_lora_b has 0"),
        ({"expert_map": ids(2, 4)}, "expert_map has 2 dimensions, expected 1:"),
        ({"activation": "swish"}, "activation is 'swish', must be one of 'silu', 'gelu',"),
        *(
            (OAI | {name: value}, f"{name} is {text}, {ONE_A}")
            for name in ("activation_alpha", "activation_limit")
            for value, text in (
                *((0, "0"), (-0.0, "-0.0"), (-7.0, "-7"), (math.inf, "inf"), (math.nan, "nan")),
                *((1e39, "1e+39"), (1e-39, "1e-39"), (-math.inf, "-inf")),
            )
        ),
    ],
    "gemm": [
        ({"lora_a": [A13] * 5, "lora_b": [zeros(L, E, 12, R)] * 5}, "lora_a has 5 slices, at"),
        ({"token_lora_mapping": None}, "token_lora_mapping is None, but lora_a is not"),
        ({"token_lora_mapping": ids(0)}, "token_lora_mapping is None, but lora_a is not"),
    ],
    "delta": [
        ({"num_experts": 5}, "lora_a[0].size(1) is 4, num_experts is 5: expected as many"),
    ],
    "lists": [
        ({"offset": 5}, "offset is 5, expected 0 or more and at most 4: output has 68 columns,"),
        ({"offset": -1}, "offset is -1, expected 0 or more"),
        ({"max_lora_rank": 16}, "max_lora_rank is 16, lora_a_stacked[0].size(2) is 8"),
        ({"top_k_num": 3}, "top_k_num is 3, topk_weights.size(1) is 2"),
        ({"shrink_num_warps": 0}, "shrink_num_warps is 0, expected an int of at least 1"),
        ({"sorted_token_ids": ids(3, 64).long()}, "sorted_token_ids has dtype int64, expected"),
        ({"num_active_loras": ids(2)}, "num_active_loras has 2 elements on cpu, expected 1 on"),
    ],
    "mlp": [
        ({"output": zeros(M, 63)}, "output.size(1) is 63, x.size(1) is 64"),
        ({"output": zeros(100).as_strided((M, K), (1, 1))}, "output.stride"),
        ({"gate_up_b": zeros(L, E, 63, R)}, "63 columns"),
        ({"down_a": zeros(L, E, R, 30)}, "down_a[0].size(3) is 30, half of the columns of gate"),
        ({"down_b": zeros(L, E, 60, R)}, "down_b[0].size(2) is 60, x.size(1) is 64"),
        ({"down_b": zeros(1, E, K, R)}, "down_b[0].size(0) is 1, gate"),
        ({"down_b": zeros(L, 3, K, R)}, "down_b[0].size(1) is 3, num_experts is 4"),
        ({"weight_indices": ids(4)}, "weight_indices.size(0) is 4, expert_ids"),
    ],
    "align": [
        ({"block_size": -(2**31) - 1}, "block_size is -2147483649, which is outside int32"),
        ({"num_experts": -1}, "num_experts is -1, expected at least 1"),
        *(
            ({"block_size": size}, f"blocks of block_size, which is {size}, are")
            for size in (2**31 - 1, 2**30)  # before it allocates them
        ),
    ],
    "lora align": [
        ({"block_size": 2**31}, "block_size is 2147483648, which is outside int32"),
        ({"mode": "base"}, "mode is 'base', must be one of 'uniform', 'segmented'"),
    ],
    "sorting": [
        ({"topk_weights": zeros(M, 3)}, "topk_weights.size(1) is 3, topk_ids.size(1) is 2"),
    ],
    "prepack": [
        ({"w": zeros(2, 100, 64)}, "w.size(1) is 100, expected a multiple of 64"),
    ],
}  # fmt: skip
ROWS = [(call, *row) for call, rows in REFUSED.items() for row in rows]


def tensors_of(arguments):
    lists = (v if isinstance(v, list | tuple) else [v] for v in arguments.values())
    return [v for values in lists for v in values if isinstance(v, torch.Tensor)]


IDS = [f"{call}-{message.split(' is ')[0]}" for call, _, message in ROWS]


@pytest.mark.parametrize("row", range(len(ROWS)), ids=IDS)
def test_refusals(row):
    call, changes, message = ROWS[row]
    function, arguments = CALLS[call]
    arguments = {**arguments(), **changes}
    before = [t.clone() for t in tensors_of(arguments)]
    with pytest.raises((ValueError, TypeError)) as caught:
        function(**arguments)
    assert message in str(caught.value)
    for now, then in zip(tensors_of(arguments), before, strict=True):
        assert same_bits(now, then), "something was written before the error"
    if call != "lists":
        with pytest.raises((ValueError, TypeError)) as again:
            function(**{name: meta(value) for name, value in arguments.items()})
        assert str(again.value) == str(caught.value)


@pytest.mark.parametrize("call", CALLS)
def test_what_the_refused_are_made_from_is_right(call):
    function, arguments = CALLS[call]
    function(**arguments())


# ---- types ----

LAYER, DELTA = "fused_experts_lora", "moe_lora_gate_up_delta"
TYPES = [
    (LAYER, {"w2": None}, "w2 is None, expected Tensor or PackedWeights"),
    (LAYER, {"w13": zeros(2, 2).to_sparse()}, "w13 is a tensor of layout torch.sparse_coo, exp"),
    (LAYER, {"w13_lora_a": 3}, "w13_lora_a is an int, expected Tensor or a"),
    (LAYER, {"w13_lora_a": ["a"]}, "w13_lora_a is a list of str, expected Tensor"),
    (LAYER, {"adapter_enabled": (True,)}, "adapter_enabled is a tuple of bool"),
    (LAYER, {"activation": ["silu"]}, "activation is a list of str, expected str"),
    (LAYER, {"out": "x"}, "out is a str, expected Tensor or None"),
    (DELTA, {"num_experts": "4"}, "num_experts is a str, expected int or None"),
    ("moe_lora_align_block_size", {"block_size": None}, "block_size is None, expected int"),
]


@pytest.mark.parametrize(("name", "changes", "message"), TYPES)
def test_types(name, changes, message):
    arguments = next(make for function, make in CALLS.values() if function.__name__ == name)
    with pytest.raises(TypeError, match=f"^{name}: {message}"):
        getattr(moelora, name)(**{**arguments(), **changes})


def test_any_value_fits_a_type_with_parameters():
    """Python 3.10 takes tuple[int, int] for a class, and raises if asked for instances of it."""

    class Alias(types.GenericAlias):
        __class__ = property(lambda self: type)

    assert _fits((0, 1), Alias(tuple, (int, int)))


def test_a_wrong_call_says_what_python_says():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'num_experts'"):
        moelora.moe_align_block_size(ids(M, TOP_K), 4)
    with pytest.raises(TypeError, match="unexpected keyword argument 'ranks'"):
        moelora.prepack_weights(zeros(E, K, K), ranks=None)
    with pytest.raises(TypeError, match="^fused_experts_lora_saving: .*keyword argument 'out'"):
        moelora.fused_experts_lora_saving(*[zeros(1)] * 5, out=None)


def test_numbers_of_other_libraries_are_numbers():
    numpy = pytest.importorskip("numpy")
    want = moelora.moe_align_block_size(ids(M, TOP_K), 4, E)
    found = moelora.moe_align_block_size(ids(M, TOP_K), numpy.int64(4), numpy.int32(E))
    assert all(map(torch.equal, found, want))


# ---- absent factors ----


@pytest.mark.parametrize("kept", ["w13", "w2", "both"])
def test_factors_without_a_mapping(kept):
    """Nearly always forgotten; who means it says -1, or passes no factors."""
    p = Spec(spare_rank=0, pass_ranks=False, ranks=(R, R)).build()
    arguments = p.kwargs()
    for name in ("w13", "w2"):
        if kept not in (name, "both"):
            arguments[f"{name}_lora_a"] = arguments[f"{name}_lora_b"] = None
    first = "w2_lora_a" if kept == "w2" else "w13_lora_a"
    with pytest.raises(ValueError, match=f"token_lora_mapping is None, but {first} is not: .* -1"):
        moelora.fused_experts_lora(**{**arguments, "token_lora_mapping": None})
    base = moelora.fused_experts_lora(**p.base().kwargs())
    unmapped = torch.full((M,), -1, dtype=torch.int32)
    named = moelora.fused_experts_lora(**{**arguments, "token_lora_mapping": unmapped})
    assert same_bits(named, base)


def test_output_must_not_share_memory_with_an_input():
    """Only the layer's hidden_states may be its output, and then exactly."""
    p = Spec(hidden=64, inter=32).build()
    rows = torch.zeros(M + 1, K)
    p.hidden_states = rows[:M]
    with pytest.raises(ERRORS, match="out shares memory with hidden_states"):
        moelora.fused_experts_lora(**p.kwargs(), out=rows[1:])
    assert not rows.any()
    arguments = of_lists()
    arguments["qcurr_hidden_states"] = arguments["output"][:, 0, :64]
    with pytest.raises(ERRORS, match="output shares memory with qcurr_hidden_states"):
        moelora.fused_moe_lora(**arguments)


def test_a_failed_call_leaves_the_next_one_alone(device):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    arguments = Spec(dtype=dtype).build().to(device).kwargs()
    expected = moelora.fused_experts_lora(**arguments)
    with pytest.raises(ValueError, match=r"w2.size\(0\) is 3, w13.size\(0\) is 4"):
        moelora.fused_experts_lora(**{**arguments, "w2": arguments["w2"][:3]})
    assert same_bits(moelora.fused_experts_lora(**arguments), expected)


def test_sizes_that_no_memory_holds():
    """That of an output, which is not allocated, could wrap at 2^64; strides of 0 make it cheap."""
    x, wide = zeros(1, 1), zeros(1, 1, 1).expand(1, 2**31 - 1, 1)
    many = ids(1, 1).expand(2**30, 2**31 - 1)
    with pytest.raises(ValueError, match="2147483647 x 2147483647 elements a row is too large"):
        moelora.fused_moe_lora_gemm(x, wide, torch.ones(1, 1).expand_as(many), many)
    with pytest.raises(ValueError, match=f"topk_ids has {many.numel()} rows"):
        moelora.moe_align_block_size(many, 16, 4)
