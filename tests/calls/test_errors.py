"""Bad input: a Python exception that names the argument, what was got and what was wanted.

Nothing may have been written by then. Problems have M = 5 tokens, top_k = 2, E = 4 experts, K = 64,
I = 32, two adapters of maximum rank R = 16.
"""

import math
import types

import pytest
import torch
from cases import Spec, same_bits
from checks import guarded_empty
from delta_cases import delta_kwargs

import moelora
from moelora.operators.call import _fits

M, TOP_K, E, K, I, L, R = 5, 2, 4, 64, 32, 2, 16
ERRORS = (ValueError, RuntimeError, TypeError)


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def overlapping(rows, columns):
    """A matrix whose rows share memory."""
    return torch.zeros(columns + rows).as_strided((rows, columns), (1, 1))


def ids(*shape, dtype=torch.int32):
    return torch.zeros(shape, dtype=dtype)


# What is passed instead, and what the message must say: the name, then got and wanted.
LAYER = {
    "hidden_states: dimensions": ({"hidden_states": zeros(M, 1, K)}, "hidden_states", "3", "2"),
    "hidden_states: K": ({"hidden_states": zeros(M, 65)}, "hidden_states.size(1)", "65", "64"),
    "hidden_states: M": ({"hidden_states": zeros(9, K)}, "hidden_states.size(0)", "9", "5"),
    "hidden_states: dtype": (
        {"hidden_states": ids(M, K)},
        "hidden_states",
        "int32",
        "float32, bfloat16 or float16",
    ),
    "hidden_states: stride": ({"hidden_states": zeros(K, M).t()}, "hidden_states.stride(1)", "5"),
    "w13: dimensions": ({"w13": zeros(2 * I, K)}, "w13", "2", "3"),
    "w13: K": ({"w13": zeros(E, 2 * I, 60)}, "w13.size(2)", "60", "64"),
    "w13: rows": ({"w13": zeros(E, 62, K)}, "w13.size(1)", "62", "64"),
    "w13: rows if not gated": ({"activation": "relu2"}, "w13.size(1)", "64", "32"),
    "w13: dtype": (
        {"w13": zeros(E, 2 * I, K, dtype=torch.bfloat16)},
        "w13",
        "bfloat16",
        "float32",
    ),
    "w13: stride": ({"w13": zeros(E, K, 2 * I).mT}, "w13.stride(2)", "64", "1"),
    "w13: no experts": ({"w13": zeros(0, 2 * I, K)}, "w13.size(0)", "0", "1"),
    "w2: experts": ({"w2": zeros(3, K, I)}, "w2.size(0)", "3", "4"),
    "w2: K": ({"w2": zeros(E, 63, I)}, "w2.size(1)", "63", "64"),
    "w2: dtype": ({"w2": zeros(E, K, I, dtype=torch.float16)}, "w2", "float16", "float32"),
    "topk_ids: dimensions": ({"topk_ids": ids(M * TOP_K)}, "topk_ids", "1", "2"),
    "topk_ids: dtype": ({"topk_ids": zeros(M, TOP_K)}, "topk_ids", "float32", "int32 or int64"),
    "topk_ids: no choices": ({"topk_ids": ids(M, 0)}, "topk_ids.size(1)", "0", "1"),
    "topk_weights: M": ({"topk_weights": zeros(4, TOP_K)}, "topk_weights.size(0)", "4", "5"),
    "topk_weights: top_k": ({"topk_weights": zeros(M, 3)}, "topk_weights.size(1)", "3", "2"),
    "topk_weights: dimensions": ({"topk_weights": zeros(M)}, "topk_weights", "1", "2"),
    "token_lora_mapping: M": (
        {"token_lora_mapping": ids(4)},
        "token_lora_mapping.size(0)",
        "4",
        "5",
    ),
    "token_lora_mapping: dtype": (
        {"token_lora_mapping": zeros(M)},
        "token_lora_mapping",
        "float32",
        "int32 or int64",
    ),
    "token_lora_mapping: dimensions": (
        {"token_lora_mapping": ids(M, 1)},
        "token_lora_mapping",
        "2",
        "1",
    ),
    "w13_lora_a: dimensions": (
        {"w13_lora_a": [zeros(L, R, K)] * 2},
        "w13_lora_a[0]",
        "3",
        "4",
    ),
    "w13_lora_a: experts": (
        {"w13_lora_a": [zeros(L, 3, R, K)] * 2},
        "w13_lora_a[0].size(1)",
        "3",
        "4",
    ),
    "w13_lora_a: K": (
        {"w13_lora_a": [zeros(L, E, R, 32)] * 2},
        "w13_lora_a[0].size(3)",
        "32",
        "64",
    ),
    "w13_lora_a: ranks differ": (
        {"w13_lora_a": [zeros(L, E, R, K), zeros(L, E, 8, K)]},
        "w13_lora_a[1].size(2)",
        "8",
        "16",
    ),
    "w13_lora_a: slots": (
        {"w13_lora_a": [zeros(L, E, R, K), zeros(3, E, R, K)]},
        "w13_lora_a[1].size(0)",
        "3",
        "2",
    ),
    "w13_lora_a: dtype": (
        {"w13_lora_a": [zeros(L, E, R, K, dtype=torch.float16)] * 2},
        "w13_lora_a[0]",
        "float16",
        "float32",
    ),
    "w13_lora_a: stride": (
        {"w13_lora_a": [zeros(L, E, K, R).mT] * 2},
        "w13_lora_a[0].stride(3)",
        "16",
        "1",
    ),
    "w13_lora_a: three slices": (
        {"w13_lora_a": [zeros(L, E, R, K)] * 3, "w13_lora_b": [zeros(L, E, 22, R)] * 3},
        "w13_lora_a",
        "3",
        "2",
    ),
    "w13_lora_b: fewer slices than A": (
        {"w13_lora_b": [zeros(L, E, 2 * I, R)]},
        "w13_lora_b",
        "1",
        "2",
    ),
    "w13_lora_b: columns": (
        {"w13_lora_b": [zeros(L, E, 2 * I, R)] * 2},
        "w13_lora_b[0].size(2)",
        "64",
        "32",
    ),
    "w13_lora_b: rank": (
        {"w13_lora_b": [zeros(L, E, I, 15)] * 2},
        "w13_lora_b[0].size(3)",
        "15",
        "16",
    ),
    "w2_lora_a: I": ({"w2_lora_a": zeros(L, E, R, 33)}, "w2_lora_a", ".size(3)", "33", "32"),
    "w2_lora_a: slots": ({"w2_lora_a": zeros(3, E, R, I)}, "w2_lora_a", ".size(0)", "3", "2"),
    "w2_lora_b: absent": ({"w2_lora_b": None}, "w2_lora_b", "0", "1"),
    "w2_lora_b: K": ({"w2_lora_b": zeros(L, E, 65, R)}, "w2_lora_b", ".size(2)", "65", "64"),
    "lora_ranks: slots": ({"lora_ranks": ids(3)}, "lora_ranks.size(0)", "3", "2"),
    "lora_ranks: dimensions": ({"lora_ranks": ids(L, 1)}, "lora_ranks", "2", "1"),
    "lora_scalings: slots": ({"lora_scalings": zeros(1)}, "lora_scalings.size(0)", "1", "2"),
    "adapter_enabled: slots": ({"adapter_enabled": ids(5)}, "adapter_enabled.size(0)", "5", "2"),
    "w13_bias: columns": ({"w13_bias": zeros(E, I)}, "w13_bias.size(1)", "32", "64"),
    "w13_bias: experts": ({"w13_bias": zeros(1, 2 * I)}, "w13_bias.size(0)", "1", "4"),
    "w13_bias: dtype": (
        {"w13_bias": zeros(E, 2 * I, dtype=torch.bfloat16)},
        "w13_bias",
        "bfloat16",
        "float32",
    ),
    "w2_bias: columns": ({"w2_bias": zeros(E, I)}, "w2_bias.size(1)", "32", "64"),
    "activation": ({"activation": "swish"}, "activation", "'swish'", "'silu'"),
    "activation_alpha: silu": ({"activation_alpha": 1.5}, "activation_alpha is 1.5", "takes none"),
    "activation_limit: gelu": (
        {"activation": "gelu", "activation_limit": 7},
        *("activation_limit is 7", "takes none", "silu, swigluoai, swigluoai_uninterleave, situ"),
    ),
    **{
        f"{name}: {value}": (
            {"activation": "swigluoai", name: value},
            *(f"{name} is {text}", "expected a normal float32 above 0"),
        )
        for name in ("activation_alpha", "activation_limit")
        for value, text in (
            *((0, "0"), (-0.0, "-0.0"), (-7.0, "-7"), (math.inf, "inf"), (math.nan, "nan")),
            *((1e39, "1e+39"), (1e-39, "1e-39"), (-math.inf, "-inf")),
        )
    },
    "expert_map: dimensions": ({"expert_map": ids(2, 4)}, "expert_map", "2", "1"),
    "apply_router_weight_on_input": (
        {"apply_router_weight_on_input": True},
        "apply_router_weight_on_input",
        "topk_ids.size(1)",
        "2",
        "1",
    ),
    "out: M": ({"out": zeros(4, K)}, "out.size(0)", "4", "5"),
    "out: K": ({"out": zeros(M, 65)}, "out.size(1)", "65", "64"),
    "out: dtype": ({"out": zeros(M, K, dtype=torch.bfloat16)}, "out", "bfloat16", "float32"),
    "out: dimensions": ({"out": zeros(M * K)}, "out", "1", "2"),
    "out: shared memory": ({"out": overlapping(M, K)}, "out.stride", "1", "share memory"),
}


def changed(arguments, changes):
    """The changes stand for CPU tensors; they move to where the problem is."""
    device = arguments["topk_ids"].device

    def move(value):
        if isinstance(value, list):
            return [move(v) for v in value]
        if not isinstance(value, torch.Tensor) or device.type == "cpu":
            return value
        flat = value.as_strided((value.untyped_storage().nbytes() // value.element_size(),), (1,))
        return flat.to(device).as_strided(value.size(), value.stride())

    return {**arguments, **{name: move(value) for name, value in changes.items()}}


def layer_arguments(device):
    p = Spec(spare_rank=0).build().to(device)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return {k: to_dtype(v, dtype) for k, v in p.kwargs().items()}


def to_dtype(value, dtype):
    if isinstance(value, list):
        return [to_dtype(v, dtype) for v in value]
    is_compute = isinstance(value, torch.Tensor) and value.dim() > 1 and value.is_floating_point()
    return value.to(dtype) if is_compute else value


@pytest.mark.parametrize("name", LAYER)
def test_layer(name):
    changes, argument, *figures = LAYER[name]
    out = guarded_empty((M, K), torch.float32)
    before = out.tensor.clone()
    arguments = changed({**layer_arguments("cpu"), "out": out.tensor}, changes)
    with pytest.raises(ERRORS) as caught:
        moelora.fused_experts_lora(**arguments)
    message = str(caught.value)
    for part in (argument, *figures):
        assert part in message, f"{part!r} is missing in: {message}"
    out.check("out")
    assert same_bits(out.tensor, before)


GEMM = {
    "x: dimensions": ({"x": zeros(K)}, "x", "1", "2"),
    "x: K": ({"x": zeros(M, 65)}, "x.size(1)", "65", "64"),
    "x: rows": ({"x": zeros(7, K)}, "x.size(0)", "7", "5", "10"),
    "x: dtype": ({"x": zeros(M, K, dtype=torch.float16)}, "x", "float16", "float32"),
    "w: dimensions": ({"w": zeros(E, 1, 2 * I, K)}, "w", "4", "3"),
    "w: stride": ({"w": zeros(E, K, 2 * I).mT}, "w.stride(2)", "64", "1"),
    "bias: columns": ({"bias": zeros(E, 65)}, "bias.size(1)", "65", "64"),
    "lora_a: five slices": (
        {"lora_a": [zeros(L, E, R, K)] * 5, "lora_b": [zeros(L, E, 12, R)] * 5},
        "lora_a",
        "5",
        "4",
    ),
    "lora_a: slices do not divide N": (
        {"lora_a": [zeros(L, E, R, K)] * 3, "lora_b": [zeros(L, E, 21, R)] * 3},
        "w.size(1)",
        "64",
        "3",
        "lora_a",
    ),
    "lora_a: without B": ({"lora_b": None}, "lora_b", "0", "2"),
    "lora_b: columns": ({"lora_b": [zeros(L, E, 31, R)] * 2}, "lora_b[0].size(2)", "31", "32"),
    "topk_weights: M": (
        {"topk_weights": zeros(4, TOP_K), "mul_routed_weight": True},
        "topk_weights.size(0)",
        "4",
        "5",
    ),
    "out: top_k": ({"out": zeros(M, 3, 2 * I)}, "out.size(1)", "3", "2"),
    "out: N": ({"out": zeros(M, TOP_K, I)}, "out.size(2)", "32", "64"),
    "out: dimensions": ({"out": zeros(M * TOP_K, 2 * I)}, "out", "2", "3"),
}


@pytest.mark.parametrize("name", GEMM)
def test_gemm(name):
    changes, argument, *figures = GEMM[name]
    out = guarded_empty((M, TOP_K, 2 * I), torch.float32)
    before = out.tensor.clone()
    arguments = {**Spec().build().gemm_kwargs("w13"), "out": out.tensor, **changes}
    with pytest.raises(ERRORS) as caught:
        moelora.fused_moe_lora_gemm(**arguments)
    message = str(caught.value)
    for part in (argument, *figures):
        assert part in message, f"{part!r} is missing in: {message}"
    out.check("out")
    assert same_bits(out.tensor, before)


ALIGN = {
    "topk_ids: dimensions": ({"topk_ids": ids(M)}, "topk_ids", "1", "2"),
    "topk_ids: dtype": ({"topk_ids": zeros(M, 2)}, "topk_ids", "float32", "int32 or int64"),
    "token_lora_mapping: M": ({"token_lora_mapping": ids(4)}, "token_lora_mapping", "4", "5"),
    "num_experts": ({"num_experts": 0}, "num_experts", "0", "1"),
    "num_experts: negative": ({"num_experts": -3}, "num_experts", "-3", "1"),
    "block_size": ({"block_size": 0}, "block_size", "0", "1"),
    "block_size: beyond int32": ({"block_size": 2**31}, "block_size", "2147483648"),
    "max_loras": ({"max_loras": 0}, "max_loras", "0", "1"),
    "mode": ({"mode": "sorted"}, "mode", "'sorted'", "'uniform'", "'segmented'"),
    "adapter_enabled: slots": ({"adapter_enabled": ids(7)}, "adapter_enabled.size(0)", "7", "2"),
    "expert_map: experts": ({"expert_map": ids(9)}, "expert_map.size(0)", "9", "4"),
}


@pytest.mark.parametrize("name", ALIGN)
def test_lora_align(name):
    changes, argument, *figures = ALIGN[name]
    with pytest.raises(ERRORS) as caught:
        moelora.moe_lora_align_block_size(**{**Spec().build().align_kwargs(4), **changes})
    for part in (argument, *figures):
        assert part in str(caught.value), f"{part!r} is missing in: {caught.value}"


SORTING = {
    "topk_weights: shape": ({"topk_weights": zeros(M, 3)}, "topk_weights.size(1)", "3", "2"),
    "out_to_zero: dtype": ({"out_to_zero": ids(3)}, "out_to_zero", "int32", "float32"),
    "out_to_zero: strides": (
        {"out_to_zero": zeros(8, 8)[:, :4]},
        "out_to_zero.stride(0)",
        "8",
        "4",
    ),
}


@pytest.mark.parametrize("name", SORTING)
def test_sorting(name):
    changes, argument, *figures = SORTING[name]
    arguments = {
        "topk_ids": ids(M, TOP_K),
        "topk_weights": zeros(M, TOP_K),
        "num_experts": E,
        "block_size": 4,
        **changes,
    }
    with pytest.raises(ERRORS) as caught:
        moelora.moe_sorting(**arguments)
    for part in (argument, *figures):
        assert part in str(caught.value), f"{part!r} is missing in: {caught.value}"


# ---- types ----

TYPES = [
    ("fused_experts_lora", {"lora_ranks": [8, 16]}, "lora_ranks is a list of int, expected Tensor"),
    ("fused_experts_lora", {"w2": None}, "w2 is None, expected Tensor or PackedWeights"),
    ("fused_experts_lora", {"hidden_states": None}, "hidden_states is None, expected Tensor"),
    ("fused_experts_lora", {"topk_weights": [0.5]}, "topk_weights is a list of float, expected"),
    (
        "fused_experts_lora",
        {"w13_lora_a": 3},
        "w13_lora_a is an int, expected Tensor or a",
    ),
    ("fused_experts_lora", {"w13_lora_a": ["a"]}, "w13_lora_a is a list of str, expected Tensor"),
    ("fused_experts_lora", {"adapter_enabled": (True,)}, "adapter_enabled is a tuple of bool"),
    ("fused_experts_lora", {"activation": ["silu"]}, "activation is a list of str, expected str"),
    ("fused_experts_lora", {"out": "x"}, "out is a str, expected Tensor or None"),
    ("fused_moe_lora_gemm", {"x": None}, "x is None, expected Tensor"),
    ("fused_moe_lora_gemm", {"w": None}, "w is None, expected Tensor or PackedWeights"),
    ("moe_lora_gate_up_delta", {"topk_ids": None}, "topk_ids is None, expected Tensor"),
    ("moe_lora_gate_up_delta", {"x": None}, "x is None, expected Tensor"),
    (
        "moe_lora_gate_up_delta",
        {"token_lora_mapping": None},
        "token_lora_mapping is None, expected",
    ),
    ("moe_lora_gate_up_delta", {"num_experts": "4"}, "num_experts is a str, expected int or None"),
    ("moe_lora_align_block_size", {"topk_ids": [[0]]}, "topk_ids is a list of list, expected"),
    ("moe_lora_align_block_size", {"block_size": None}, "block_size is None, expected int"),
]


@pytest.mark.parametrize(("name", "changes", "message"), TYPES)
def test_types(name, changes, message):
    p = Spec().build()
    arguments = {
        "fused_experts_lora": p.kwargs,
        "fused_moe_lora_gemm": p.gemm_kwargs,
        "moe_lora_gate_up_delta": lambda: delta_kwargs(p, "w13"),
        "moe_lora_align_block_size": lambda: p.align_kwargs(4),
    }[name]()
    with pytest.raises(TypeError, match=f"^{name}: {message}"):
        getattr(moelora, name)(**{**arguments, **changes})


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
    out = torch.zeros(M, K)
    with pytest.raises(ValueError, match=f"token_lora_mapping is None, but {first} is not: .* -1"):
        moelora.fused_experts_lora(**{**arguments, "token_lora_mapping": None}, out=out)
    assert not out.any()
    base = moelora.fused_experts_lora(**p.base().kwargs())
    nobody = torch.full((M,), -1, dtype=torch.int32)
    named = moelora.fused_experts_lora(**{**arguments, "token_lora_mapping": nobody})
    assert same_bits(named, base)


@pytest.mark.parametrize("given", [None, torch.zeros(0, dtype=torch.int32)])
def test_gemm_factors_without_a_mapping(given):
    arguments = {**Spec().build().gemm_kwargs("w13"), "token_lora_mapping": given}
    with pytest.raises(ValueError, match="token_lora_mapping is None, but lora_a is not"):
        moelora.fused_moe_lora_gemm(**arguments)


def test_an_empty_batch_has_an_empty_mapping():
    p = Spec(tokens=0).build()
    assert p.token_lora_mapping.shape == (0,)
    assert moelora.fused_experts_lora(**p.kwargs()).shape == (0, K)


def test_output_must_not_share_memory_with_an_input():
    """Only the layer's hidden_states may be its output, and then exactly."""
    p = Spec(hidden=64, inter=32).build()
    rows = torch.zeros(M + 1, K)
    p.hidden_states = rows[:M]
    with pytest.raises(ERRORS, match="out shares memory with hidden_states"):
        moelora.fused_experts_lora(**p.kwargs(), out=rows[1:])
    assert not rows.any()
    w2 = p.w2.clone()
    with pytest.raises(ERRORS, match="out shares memory with w2"):
        moelora.fused_experts_lora(**p.kwargs(), out=p.w2.view(-1, K)[:M])
    assert same_bits(p.w2, w2)
    x = torch.zeros(M * TOP_K, K)
    arguments = {**p.gemm_kwargs("w13"), "x": x}
    with pytest.raises(ERRORS, match="out shares memory with x"):
        moelora.fused_moe_lora_gemm(**arguments, out=x.view(M, TOP_K, K))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["hidden_states: K", "w2: experts", "topk_ids: dtype", "out: M"])
def test_the_same_on_a_gpu_and_the_next_call_works(name):
    changes, argument, *figures = LAYER[name]
    arguments = layer_arguments("cuda")
    expected = moelora.fused_experts_lora(**arguments)
    wrong = {k: v.bfloat16() if v.is_floating_point() else v for k, v in changes.items()}
    if name == "topk_ids: dtype":
        wrong = changes
    with pytest.raises(ERRORS) as caught:
        moelora.fused_experts_lora(**changed(arguments, wrong))
    for part in (argument, *figures):
        assert part in str(caught.value)
    assert torch.equal(moelora.fused_experts_lora(**arguments), expected)


def test_a_failed_call_leaves_the_next_one_alone():
    arguments = layer_arguments("cpu")
    expected = moelora.fused_experts_lora(**arguments)
    with pytest.raises(ERRORS):
        moelora.fused_experts_lora(**{**arguments, "w2": zeros(1, 1, 1)})
    assert same_bits(moelora.fused_experts_lora(**arguments), expected)


def test_sizes_that_no_memory_holds():
    """Their products and sums pass 2^56 and could wrap at 2^64; strides of 0 make them cheap."""
    rows, hidden, inner = 2**31 - 256, 8, 2**25
    x = torch.empty(1, hidden, dtype=torch.bfloat16)
    w13 = torch.empty(1, 1, hidden, dtype=torch.bfloat16).expand(1, 2 * inner, hidden)
    w2 = torch.empty(1, 1, inner, dtype=torch.bfloat16).expand(1, hidden, inner)
    weights, chosen = torch.ones(1, 1).expand(1, rows), ids(1, 1).expand(1, rows)
    with pytest.raises(
        ValueError, match=f"top_k is {rows}.* K is {hidden}, I is {inner}: too large"
    ):
        moelora.fused_experts_lora(x, w13, w2, weights, chosen)
    wide = torch.empty(1, 1, 1, dtype=torch.bfloat16).expand(1, 2**31 - 1, 1)
    many = ids(1, 1).expand(2**30, 2**31 - 1)
    with pytest.raises(ValueError, match="2147483647 x 2147483647 elements a row is too large"):
        moelora.fused_moe_lora_gemm(x[:, :1], wide, torch.ones(1, 1).expand_as(many), many)
    with pytest.raises(ValueError, match=f"topk_ids has {many.numel()} rows"):
        moelora.moe_align_block_size(many, 16, 4)
