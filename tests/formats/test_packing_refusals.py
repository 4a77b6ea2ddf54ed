"""Checkpoints and arguments of packing that are refused, by the name of what is wrong."""

import pytest
import torch
from quantized_cases import refusal_tests

from moelora import QuantizedWeights
from moelora.operators.formats import FORMATS as FORMATS_OF_C

N, K = 16, 64


def words(*shape, value=0):
    return torch.full(shape, value, dtype=torch.int32)


def some_bytes(*shape, value=0):
    return torch.full(shape, value, dtype=torch.uint8)


GOOD = {
    "from_mxfp4": {"blocks": some_bytes(2, N, K // 2), "scales": some_bytes(2, N, 2, value=127)},
    "from_nvfp4": {
        "weight": some_bytes(2, N, K // 2),
        "weight_scale": some_bytes(2, N, K // 16, value=56),
        "weight_scale_2": torch.ones(2),
    },
    "from_gptq": {
        "qweight": words(2, K // 8, N),
        "scales": torch.ones(2, 1, N),
        "qzeros": words(2, 1, N // 8),
        "g_idx": words(2, K),
    },
    "from_awq": {
        "qweight": words(2, K, N // 8),
        "scales": torch.ones(2, 1, N),
        "qzeros": words(2, 1, N // 8),
    },
    "from_compressed_tensors": {
        "weight_packed": words(2, N, K // 8),
        "weight_scale": torch.ones(2, N, 1),
        "weight_zero_point": words(2, N // 8, 1),
        "weight_shape": torch.tensor([N, K]),
    },
}
NAN, INF = float("nan"), float("inf")
ODD = {"blocks": some_bytes(2, 15, 32), "scales": some_bytes(2, 15, 2)}
TINY = {"weight_scale_2": None, "weight_global_scale": torch.tensor([1, 2e-39])}
BAD = [
    ("from_mxfp4", {"blocks": some_bytes(2, N, 2, 15)}, r"blocks has shape \(16, 2, 15\)"),
    ("from_mxfp4", {"blocks": some_bytes(2, N, 24)}, "blocks has shape"),
    ("from_mxfp4", {"blocks": words(2, N, K // 2)}, "blocks has dtype int32, expected uint8"),
    ("from_mxfp4", {"blocks": []}, "blocks has no experts"),
    ("from_mxfp4", {"blocks": some_bytes(2, 0, K // 2)}, "blocks has .*, expected no empty"),
    ("from_mxfp4", {"blocks": some_bytes(2, N, 0)}, "blocks has .*, expected no empty"),
    ("from_gptq", {"qweight": words(2, 0, N)}, r"qweight has .*, expected no empty"),
    ("from_awq", {"qweight": words(2, K, 0)}, r"qweight has .*, expected no empty"),
    ("from_mxfp4", {"scales": some_bytes(2, N, 3)}, r"scales has shape \(2, 16, 3\), expected \(2"),
    ("from_mxfp4", {"scales": some_bytes(3, N, 2)}, "scales has 3 experts, expected 2 as blocks"),
    ("from_mxfp4", {"scales": torch.ones(2, N, 2)}, "scales has dtype float32, expected uint8 or"),
    ("from_mxfp4", {"scales": some_bytes(2, N, 2, value=129)}, r"byte 129, 2\^2, expected at most"),
    ("from_mxfp4", {"scales": some_bytes(2, N, 2, value=255)}, "byte 255, NaN, expected at most"),
    ("from_mxfp4", {"scales": [some_bytes(N, 2), some_bytes(N, 3)]}, r"scales\[1\] has .*16, 3\)"),
    ("from_mxfp4", {"gate_up": "both"}, "gate_up is 'both', expected one of None, 'concatenated'"),
    ("from_mxfp4", {"dtype": torch.float32}, "dtype is torch.float32, expected torch.bfloat16"),
    ("from_mxfp4", ODD | {"gate_up": "interleaved"}, "there are 15 rows"),
    ("from_nvfp4", {"weight": some_bytes(2, N, 20)}, "weight has 40 columns .*, expected a mul"),
    ("from_nvfp4", {"weight": words(2, N, K // 2)}, "weight has dtype int32, expected uint8"),
    ("from_nvfp4", {"weight_scale": some_bytes(2, N, 2)}, "weight_scale has shape"),
    ("from_nvfp4", {"weight_scale": some_bytes(2, N, 4, value=127)}, "e4m3 byte 127, NaN, exp"),
    ("from_nvfp4", {"weight_scale": some_bytes(2, N, 4, value=130)}, "e4m3 byte 130, negative"),
    ("from_nvfp4", {"weight_scale_2": None}, "neither is there, expected one of weight_scale_2"),
    ("from_nvfp4", {"weight_global_scale": torch.ones(2)}, "both are there, expected one of"),
    ("from_nvfp4", {"weight_scale_2": torch.ones(2, device="meta")}, "weight_scale_2 is on meta, "),
    ("from_nvfp4", {"weight_scale_2": torch.ones(3)}, "weight_scale_2 has 3 experts, expected 2"),
    ("from_nvfp4", {"weight_scale_2": torch.ones(2, 2)}, "weight_scale_2 has shape"),
    ("from_nvfp4", {"weight_scale_2": torch.tensor([1, INF])}, r"weight_scale_2 is \[inf\], exp"),
    ("from_nvfp4", {"weight_scale_2": torch.tensor([1.0, -1.0])}, "expected finite numbers >= 0"),
    ("from_nvfp4", TINY, r"_scale is \[2\.0+\d*e-39\], expected numbers with a finite reciprocal"),
    ("from_gptq", {"bits": 8}, "bits is 8, expected 4"),
    ("from_gptq", {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin', expected"),
    ("from_gptq", {"qweight": words(2, K)}, "qweight has shape"),
    ("from_gptq", {"scales": torch.ones(2, 4, N)}, "scales has 4 groups for 64 columns, expected"),
    ("from_gptq", {"scales": torch.ones(2, 3, N)}, "scales has 3 groups for 64 columns"),
    ("from_gptq", {"scales": torch.ones(2, 1, N + 1)}, "scales has shape"),
    ("from_gptq", {"scales": torch.full((2, 1, N), NAN)}, "scales has a scale that is NaN, inf"),
    ("from_gptq", {"scales": torch.full((2, 1, N), INF)}, "scales has a scale that is NaN, inf"),
    ("from_gptq", {"scales": torch.full((2, 1, N), -65536.0)}, "beyond 65504"),
    ("from_gptq", {"scales": torch.ones(2, 1, N).double()}, "scales has dtype float64, expected"),
    ("from_gptq", {"group_size": 32}, "scales has groups of 64, expected groups of 32, the group"),
    ("from_gptq", {"qzeros": words(2, 1, 3)}, r"qzeros has shape \(2, 1, 3\), expected \(2, 1"),
    ("from_gptq", {"sym": True}, "qzeros has zero points other than 8, expected none"),
    ("from_gptq", {"sym": False, "qzeros": None}, "qzeros is None, expected zero points"),
    ("from_gptq", {"g_idx": words(2, K, value=1)}, r"g_idx is of weights in the order .*desc_act"),
    ("from_gptq", {"g_idx": words(2, K + 1)}, "g_idx has shape"),
    ("from_awq", {"qweight": words(2, 60, 2)}, "qweight has 60 columns"),
    ("from_awq", {"qzeros": words(2, 2, 2)}, "qzeros has shape"),
    ("from_awq", {"scales": torch.ones(2, 1, N + 1)}, "scales has shape"),
    ("from_awq", {"scales": torch.full((2, 1, N), INF)}, "scales has a scale"),
    ("from_compressed_tensors", {"weight_scale": torch.ones(2, N, 5)}, "weight_scale has 5 groups"),
    ("from_compressed_tensors", {"weight_scale": torch.ones(2, N - 1, 1)}, "weight_scale has sh"),
    ("from_compressed_tensors", {"weight_zero_point": words(2, 1, 1)}, "weight_zero_point has"),
    ("from_compressed_tensors", {"weight_shape": torch.tensor([N, K - 1])}, "weight_shape is"),
]  # fmt: skip


(
    test_what_the_refused_are_made_from_is_right,
    test_bad_checkpoints_name_their_tensor,
) = refusal_tests(GOOD, BAD, (2, N, K))


def test_the_scale_of_a_tensor_has_a_name():
    """ModelOpt's multiplies, compressed-tensors' divides: neither is meant by its place."""
    good = GOOD["from_nvfp4"]
    with pytest.raises(TypeError, match="positional"):
        QuantizedWeights.from_nvfp4(*good.values())


def test_a_state_of_nvfp4_has_groups_of_16():
    state = QuantizedWeights.from_nvfp4(**GOOD["from_nvfp4"]).state_dict()
    state["layout"][4] = 32
    with pytest.raises(ValueError, match="layout has format 9 and group_size 32"):
        QuantizedWeights.from_state_dict(state)


def test_arguments_of_other_types():
    with pytest.raises(TypeError, match="blocks is None, expected Tensor or a sequence of Tensor"):
        QuantizedWeights.from_mxfp4(None, GOOD["from_mxfp4"]["scales"])
    with pytest.raises(TypeError, match="scales is an int"):
        QuantizedWeights.from_gptq(GOOD["from_gptq"]["qweight"], 3)


def pack(values, scales, zeros=None, tensor_scales=None, format=2, order=0, dtype=0, **block):
    absent = torch.empty(0)
    given = [absent if t is None else t for t in (zeros, tensor_scales)]
    pack_quantized = torch.ops.moelora.pack_quantized
    return pack_quantized(values, scales, *given, format, order, dtype, **block)


NVFP4 = {"format": 9, "scales": some_bytes(2, N, 4)}
FP8 = {"values": some_bytes(2, 64, 128, value=56), "scales": torch.ones(2, 1, 1), "format": 6}
FP8 |= {"block_rows": 64, "block_columns": 128}


@pytest.mark.parametrize("arguments, message", [
    ({"values": some_bytes(2, N)}, "values has 2 dimensions, expected 3"),
    ({"values": words(2, N, 32)}, "values has dtype int32, expected uint8"),
    ({"values": some_bytes(2, N, 64)[..., ::2]}, r"values.stride\(2\) is 2, expected 1"),
    ({"scales": torch.ones(2, N, 4)}, r"scales.size\(2\) is 4 for K = 64, expected a scale for"),
    ({"scales": torch.ones(2, N, 1), "format": 3}, "expected a scale for every 32 columns"),
    ({"scales": torch.ones(2, N + 1, 1)}, r"scales.size\(1\) is 17, values.size\(1\) is 16"),
    ({"scales": some_bytes(2, N, 1)}, "scales has dtype uint8, expected float32, bfloat16 or"),
    ({"scales": torch.ones(2, N, 2), "format": 1}, "scales has dtype float32, expected uint8"),
    ({"zeros": some_bytes(2, N, 1)}, r"zeros is there, but INT4 has none"),
    ({"format": 4}, "zeros is absent"),
    ({"tensor_scales": torch.ones(2, 1)}, "tensor_scales is there, but INT4 has none"),
    (NVFP4, "tensor_scales is absent"),
    ({**NVFP4, "scales": some_bytes(2, N, 2)}, "expected a scale for every 16 columns"),
    ({**NVFP4, "scales": torch.ones(2, N, 4)}, "scales has dtype float32, expected uint8"),
    ({**NVFP4, "tensor_scales": torch.ones(2, 2)}, r"tensor_scales.size\(1\) is 2, expected 1$"),
    ({**NVFP4, "tensor_scales": torch.ones(2, 3), "order": 1}, "expected 1, or 2 for gate and up"),
    ({**NVFP4, "tensor_scales": torch.ones(3, 1)}, r"tensor_scales.size\(0\) is 3"),
    ({"zeros": some_bytes(2, N, 2), "format": 4}, r"zeros.size\(2\) is 2, scales.size\(2\) is 1"),
    ({"zeros": torch.ones(2, N, 1), "format": 4}, "zeros has dtype float32, expected uint8"),
    ({"format": 0}, "layout.format is native, expected another"),
    ({"format": len(FORMATS_OF_C)}, f"layout.format is {len(FORMATS_OF_C)}"),
    ({"order": 3}, "layout.order is 3"),
    ({"dtype": 2}, r"dtype is 2, must be 0 \(bfloat16\) or 1"),
    ({"values": some_bytes(2, 15, 32), "scales": torch.ones(2, 15, 1), "order": 1}, "rows is 15"),
    ({**FP8, "block_rows": 0}, "block_rows is 0, expected at least 1"),
    ({**FP8, "block_columns": 64}, "block_columns is 64 for K = 128, expected a multiple of 12"),
    ({**FP8, "block_rows": 32, "scales": torch.ones(2, 2, 1)}, "tile 0 of rows has scales of sev"),
    ({**FP8, "scales": torch.ones(2, 2, 1)}, r"scales.size\(1\) is 2, layout.rows / block_rows, r"),
    ({**FP8, "scales": torch.ones(2, 1, 2)}, r"scales.size\(2\) is 2, K / block_columns, rounded"),
    ({**FP8, "scales": torch.ones(3, 1, 1)}, r"scales.size\(0\) is 3, values.size\(0\) is 2"),
    ({**FP8, "scales": torch.ones(2, 1, 1).half()}, "scales has dtype float16, expected float32"),
    ({**FP8, "zeros": torch.zeros(2, 1, 1).byte()}, "zeros is there, but FP8 has none"),
    ({**FP8, "format": 2}, "block_rows is 64 and block_columns 128, expected 0: INT4 has groups"),
])  # fmt: skip
def test_bad_arguments_of_packing(arguments, message):
    good = {"values": some_bytes(2, N, 32), "scales": torch.ones(2, N, 1)}
    with pytest.raises(RuntimeError, match=message):
        pack(**{**good, **arguments})


@pytest.mark.parametrize("arguments, message", [
    ((some_bytes(2, 1, 2176), 1, 0, 64, 64, 0), "expected"),
    ((some_bytes(2, 1, 1, 2175), 1, 0, 64, 64, 0), r"tiles.size\(3\) is 2175, expected the 2176"),
    ((some_bytes(2, 1, 1, 2176), 1, 0, 65, 64, 0), r"rows is 65, expected 1 to tiles.size\(1\)"),
    ((some_bytes(2, 1, 1, 2176), 1, 0, 64, 65, 0), r"columns is 65, expected 1 to tiles.size\(2\)"),
    ((some_bytes(2, 2, 1, 2176), 1, 0, 64, 64, 0), r"tiles.size\(1\) is 2, expected 1 tiles"),
    ((some_bytes(2, 1, 1, 2176), 1, 1, 64, 64, 0), r"tiles.size\(1\) is 1, expected 2 tiles"),
    ((some_bytes(2, 1, 1, 2176), len(FORMATS_OF_C), 0, 64, 64, 0), "layout.format is 1\\d"),
])  # fmt: skip
def test_bad_arguments_of_unpacking(arguments, message):
    with pytest.raises(RuntimeError, match=message):
        torch.ops.moelora.unpack_quantized(*arguments)


def test_strided_numbers():
    """Rows of a larger matrix, scales shared by experts."""
    make = torch.Generator().manual_seed(1)
    wide = torch.randint(0, 256, (4, 20, 40), generator=make, dtype=torch.uint8)
    scales = torch.rand(1, N, 1, generator=make).expand(2, N, 1)
    views = wide[::2, 2:18, 4:36], scales
    assert torch.equal(pack(*views), pack(*(t.contiguous() for t in views)))
