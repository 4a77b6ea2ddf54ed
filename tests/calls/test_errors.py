"""Bad input: a Python exception that names the argument, what was got and what was wanted.

C validates arguments, in words that tests/c holds; here is that they reach it under their names,
that meta tensors are refused in the same words, and that nothing is written before. What is changed
are the arguments of `glue_cases.public_calls`.
"""

import math
import types

import pytest
import torch
from cases import Spec, same_bits
from glue_cases import LORAS as L
from glue_cases import TOP_K, E, I, K, M, R, public_calls

import moelora
from moelora.operators.call import _fits

ERRORS = (ValueError, RuntimeError, TypeError, NotImplementedError)
# The memory that meta tensors have not: a number in it, and what an output shares with an input.
MEMORY = ("shares memory", "share memory", "num_active_loras")


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def ids(*shape, dtype=torch.int32):
    return torch.zeros(shape, dtype=dtype)


def meta(value):
    if isinstance(value, list | tuple):
        return type(value)(meta(v) for v in value)
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")


A13, B13, BF16 = zeros(L, E, R, K), zeros(L, E, I, R), torch.bfloat16
LAYER, DELTA, LISTS = "fused_experts_lora", "moe_lora_gate_up_delta", "fused_moe_lora"
ONE_A = "expected a normal float32 above 0"
OAI = {"activation": "swigluoai"}

# For each operator: what it is given instead, and the message behind its name.
REFUSED = {
    LAYER: [
        ({"hidden_states": zeros(*[1] * 6)}, "hidden_states has 6 dimensions"),
        ({"hidden_states": zeros(K, M).t()}, "hidden_states.stride(1) is 6, expected 1: the last"),
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
        ({"w2": None}, "w2 is None, expected Tensor or PackedWeights"),
        ({"w13_lora_a": 3}, "w13_lora_a is an int, expected Tensor or a"),
        ({"w13_lora_a": ["a"]}, "w13_lora_a is a list of str, expected Tensor"),
        ({"adapter_enabled": (True,)}, "adapter_enabled is a tuple of bool"),
        ({"activation": ["silu"]}, "activation is a list of str, expected str"),
        ({"out": "x"}, "out is a str, expected Tensor or None"),
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
    "fused_moe_lora_gemm": [
        ({"lora_a": [A13] * 5, "lora_b": [zeros(L, E, 12, R)] * 5}, "lora_a has 5 slices, at"),
        ({"token_lora_mapping": None}, "token_lora_mapping is None, but lora_a is not"),
        ({"token_lora_mapping": ids(0)}, "token_lora_mapping is None, but lora_a is not"),
    ],
    DELTA: [
        ({"num_experts": 5}, "lora_a[0].size(1) is 4, num_experts is 5: expected as many"),
        ({"num_experts": "4"}, "num_experts is a str, expected int or None"),
    ],
    LISTS: [
        ({"offset": 5}, "offset is 5, expected 0 or more and at most 0: output has 64 columns,"),
        ({"offset": -1}, "offset is -1, expected 0 or more"),
        ({"max_lora_rank": 16}, "max_lora_rank is 16, lora_a_stacked[0].size(2) is 8"),
        ({"top_k_num": 3}, "top_k_num is 3, topk_weights.size(1) is 2"),
        ({"shrink_num_warps": 0}, "shrink_num_warps is 0, expected an int of at least 1"),
        ({"sorted_token_ids": ids(3, 64).long()}, "sorted_token_ids has dtype int64, expected"),
        ({"num_active_loras": ids(2)}, "num_active_loras has 2 elements on cpu, expected 1 on"),
    ],
    "moe_lora_fused": [
        ({"output": zeros(M, 63)}, "output.size(1) is 63, x.size(1) is 64"),
        ({"output": zeros(100).as_strided((M, K), (1, 1))}, "output.stride"),
        ({"gate_up_b": zeros(L, E, 63, R)}, "63 columns"),
        ({"down_a": zeros(L, E, R, 30)}, "down_a[0].size(3) is 30, half of the columns of gate"),
        ({"down_b": zeros(L, E, 60, R)}, "down_b[0].size(2) is 60, x.size(1) is 64"),
        ({"down_b": zeros(1, E, K, R)}, "down_b[0].size(0) is 1, gate"),
        ({"down_b": zeros(L, 3, K, R)}, "down_b[0].size(1) is 3, num_experts is 4"),
        ({"weight_indices": ids(4)}, "weight_indices.size(0) is 4, expert_ids"),
    ],
    "moe_align_block_size": [
        ({"block_size": -(2**31) - 1}, "block_size is -2147483649, which is outside int32"),
        ({"num_experts": -1}, "num_experts is -1, expected at least 1"),
        *(
            ({"block_size": size}, f"blocks of block_size, which is {size}, are")
            for size in (2**31 - 1, 2**30)  # before it allocates them
        ),
    ],
    "moe_lora_align_block_size": [
        ({"block_size": 2**31}, "block_size is 2147483648, which is outside int32"),
        ({"block_size": None}, "block_size is None, expected int"),
        ({"mode": "base"}, "mode is 'base', must be one of 'uniform', 'segmented'"),
    ],
    "moe_sorting": [
        ({"topk_weights": zeros(M, 3)}, "topk_weights.size(1) is 3, topk_ids.size(1) is 2"),
    ],
    "prepack_weights": [
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
    function, arguments = public_calls()[call]
    arguments = {**arguments, **changes}
    before = [t.clone() for t in tensors_of(arguments)]
    with pytest.raises((ValueError, TypeError)) as caught:
        function(**arguments)
    assert message in str(caught.value)
    assert caught.type is ValueError or str(caught.value).startswith(f"{call}: ")
    for now, then in zip(tensors_of(arguments), before, strict=True):
        assert same_bits(now, then), "something was written before the error"
    if call != LISTS:
        with pytest.raises((ValueError, TypeError)) as again:
            function(**{name: meta(value) for name, value in arguments.items()})
        assert str(again.value) == str(caught.value)


# ---- types ----


def test_any_value_fits_a_type_with_parameters():
    """Python 3.10 takes tuple[int, int] for a class, and raises if asked for instances of it."""

    class Alias(types.GenericAlias):
        __class__ = property(lambda self: type)

    assert _fits((0, 1), Alias(tuple, (int, int)))


def test_a_layout_of_torch_is_a_type():
    with pytest.raises(
        TypeError, match="^prepack_weights: w is a tensor of layout torch.sparse_co"
    ):
        moelora.prepack_weights(zeros(2, 2).to_sparse())


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
    p = Spec(tokens=M, spare_rank=0, pass_ranks=False, ranks=(R, R)).build()
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
    p = Spec(tokens=M, hidden=K).build()
    rows = torch.zeros(M + 1, K)
    p.hidden_states = rows[:M]
    with pytest.raises(ERRORS, match="out shares memory with hidden_states"):
        moelora.fused_experts_lora(**p.kwargs(), out=rows[1:])
    assert not rows.any()
    _, arguments = public_calls()[LISTS]
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
