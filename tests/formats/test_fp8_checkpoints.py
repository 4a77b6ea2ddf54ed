"""FP8 weights from checkpoints, and what of them is refused."""

import pytest
import torch
from cases import same_bits
from quantized_cases import DEVICES_AND_DTYPES, FP8_FORMATS, EightBits, fp8_numbers, refusal_tests

from moelora import QuantizedWeights

E4M3 = torch.float8_e4m3fn
every_device = pytest.mark.parametrize("device, dtype", DEVICES_AND_DTYPES)


@every_device
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_blocks(kind, device, dtype):
    given = fp8_numbers("fp8_block", (2, 200, 300))
    blocks = given.scales[:, ::128].to(kind)
    given.scales = blocks.float()[:, given.of_rows]
    q, blocks = given.q.to(device), blocks.to(device)
    weights = QuantizedWeights.from_fp8_block(q, blocks, dtype=dtype)
    listed = QuantizedWeights.from_fp8_block([*q], [*blocks], dtype=dtype)
    assert (weights.format, weights.group_size, weights.x_format) == ("fp8", 128, "group")
    assert torch.equal(weights.data, listed.data)
    assert same_bits(weights.unpack().cpu(), given.dequantized(dtype))


def test_blocks_of_gate_and_up():
    """Of 2 x 192 rows: blocks of 128 that run on, and those that begin anew with up."""
    make = torch.Generator().manual_seed(5)
    q = torch.randn(2, 384, 256, generator=make).to(E4M3)
    row = torch.arange(384)
    for of_rows in (row // 128, row // 192 * 2 + row % 192 // 128):
        scales = torch.rand(2, int(of_rows[-1]) + 1, 2, generator=make) + 0.5
        weights = QuantizedWeights.from_fp8_block(q, scales, gate_up="concatenated")
        given = EightBits(q, scales[:, of_rows], of_rows, 128, FP8_FORMATS["fp8_block"])
        assert not weights.row_scales
        assert same_bits(weights.unpack(), given.dequantized(torch.bfloat16))
    run_on = torch.rand(2, 2, 2, generator=make) + 0.5  # blocks of 192 that a tile is across
    weights = QuantizedWeights.from_fp8_block(
        q[:, :320], run_on, block=(160, 128), gate_up="interleaved"
    )
    assert weights.row_scales


@every_device
def test_channels_and_tensors(device, dtype):
    q = fp8_numbers("fp8_channel", (2, 96, 130)).q.to(device)
    scales = torch.linspace(0.1, 2, 192).view(2, 96).to(device)
    flat = QuantizedWeights.from_fp8_channel(q, scales, dtype=dtype)
    column = QuantizedWeights.from_fp8_channel([*q], [*scales[..., None]], dtype=dtype)
    assert torch.equal(flat.data, column.data)
    assert (flat.x_format, flat.row_scales) == ("token", True)
    two = torch.tensor([[0.5, 2.0], [0.25, 3.0]]).to(device)
    for gate_up, of_rows in (
        ("concatenated", torch.arange(96) // 48),
        ("interleaved", torch.arange(96) % 2),
    ):
        weights = QuantizedWeights.from_fp8_tensor(q, two, gate_up=gate_up, dtype=dtype)
        assert (weights.x_format, weights.row_scales) == ("token", False)
        want = (q.cpu().double() * two.cpu().double()[:, of_rows, None]).to(dtype)
        assert same_bits(weights.unpack().cpu(), want)
    for input_scale in (0.5, torch.tensor(0.5), torch.tensor([0.25, 0.5]), [torch.tensor(0.5)] * 2):
        weights = QuantizedWeights.from_fp8_tensor(q, two[:, 0], input_scale, dtype=dtype)
        assert (weights.x_format, weights.x_scale) == ("static", 0.5)
    native = QuantizedWeights.from_fp8_tensor(q, two[:, 0], 0.5, activations="native", dtype=dtype)
    assert (native.x_format, native.x_scale) == ("native", 0.0)


def test_activations_in_bf16_are_native_ones():
    q, channels = fp8_numbers("fp8_channel", (2, 128, 160)).q, torch.rand(2, 128) + 0.5
    for make, *scales in (
        (QuantizedWeights.from_fp8_block, torch.rand(2, 1, 2) + 0.5),
        (QuantizedWeights.from_fp8_channel, channels),
        (QuantizedWeights.from_fp8_tensor, channels[:, 0], 0.5),
    ):
        native, bf16 = (make(q, *scales, activations=said) for said in ("native", "bf16"))
        assert torch.equal(bf16.data, native.data)
        assert bf16.layout == native.layout


# ---- what is refused ----

N, K = 64, 128
ONES = torch.ones(2, N, K).to(E4M3)
NAN, INF = float("nan"), float("inf")
BLOCK = {"weight": ONES, "weight_scale_inv": torch.ones(2, 1, 1)}
CHANNEL = {"weight": ONES, "weight_scale": torch.ones(2, N)}
TENSOR = {"weight": ONES, "weight_scale": torch.ones(2), "input_scale": torch.ones(2)}
GOOD = {"from_fp8_block": BLOCK, "from_fp8_channel": CHANNEL, "from_fp8_tensor": TENSOR}
NARROW = {"block": (128, 32), "weight_scale_inv": torch.ones(2, 1, 4)}
OF_HALF = {"activations": "bf16", "dtype": torch.float16}
LOW = {"block": (32, 64), "weight_scale_inv": torch.ones(2, 2, 2)}
BAD = [
    ("from_fp8_block", {"weight": torch.ones(2, N, K)}, "weight has dtype float32, expected"),
    ("from_fp8_block", {"weight": ONES[0]}, r"weight has shape \(64, 128\), expected \[N, K\]"),
    ("from_fp8_block", {"weight": []}, "weight has no experts"),
    ("from_fp8_block", {"weight": ONES[:, :0]}, "expected no empty dimension"),
    ("from_fp8_block", {"weight": (ONES.float() * NAN).to(E4M3)}, "weight has a NaN, expected num"),
    ("from_fp8_block", {"weight_scale_inv": torch.ones(2, 1, 2)}, r"has shape \(2, 1, 2\), expect"),
    ("from_fp8_block", {"weight_scale_inv": torch.ones(1, 1, 1)}, "has 1 experts, expected 2 as"),
    ("from_fp8_block", {"weight_scale_inv": torch.ones(2, 1, 1).double()}, "has dtype float64"),
    ("from_fp8_block", {"weight_scale_inv": torch.full((2, 1, 1), NAN)}, "inv has a scale that"),
    ("from_fp8_block", {"weight_scale_inv": torch.full((2, 1, 1), INF)}, "NaN, infinite or"),
    ("from_fp8_block", {"weight_scale_inv": torch.full((2, 1, 1), 256.0)}, "beyond 255"),
    ("from_fp8_block", {"block": 128}, "block is 128, expected two sizes: rows and columns"),
    ("from_fp8_block", {"block": (128, 0)}, r"block is \(128, 0\), expected two sizes"),
    ("from_fp8_block", NARROW, r"block is \(128, 32\), expected columns that are a multiple of 64"),
    ("from_fp8_block", LOW, r"\(32, 64\), expected columns that are a multiple of 128, as rows"),
    ("from_fp8_block", {"activations": "int8"}, "is 'int8', expected 'fp8' or 'native' or 'bf16'"),
    ("from_fp8_block", OF_HALF, "'bf16' and dtype is torch.float16, expected dtype torch.bfloat16"),
    ("from_fp8_block", {"gate_up": "both"}, "gate_up is 'both', expected one of None"),
    ("from_fp8_block", {"dtype": torch.float32}, "dtype is torch.float32, expected torch.bfloat16"),
    ("from_fp8_channel", {"weight_scale": torch.ones(2, N - 1)}, "weight_scale has shape"),
    ("from_fp8_channel", {"weight_scale": torch.ones(2, N, 2)}, "weight_scale has shape"),
    ("from_fp8_tensor", {"weight_scale": torch.ones(2, 3)}, r"weight_scale has shape \(2, 3\)"),
    ("from_fp8_tensor", {"weight_scale": torch.ones(2, 2)}, r"weight_scale has shape \(2, 2\)"),
    ("from_fp8_tensor", {"input_scale": 0.0}, "input_scale is .0.0., expected normal numbers"),
    ("from_fp8_tensor", {"input_scale": torch.tensor([1, NAN])}, "input_scale is .1.0, nan."),
]  # fmt: skip


(
    test_what_the_refused_are_made_from_is_right,
    test_bad_checkpoints_name_their_tensor,
) = refusal_tests(GOOD, BAD, (2, N, K))
