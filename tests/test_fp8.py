"""FP8 weights: tiles byte by byte, activations bit by bit, checkpoints, and what is refused."""

import os

import pytest
import torch
from cases import Spec, same_bits
from conftest import needs_gpu
from quantized_cases import (
    DEVICES_AND_DTYPES,
    FP8_FORMATS,
    HALVES,
    INPUT_SCALE,
    EightBits,
    build,
    to_fp8,
)

import moelora
from moelora import _C, QuantizedWeights

E4M3 = torch.float8_e4m3fn
W8A8 = [name for name, format in FP8_FORMATS.items() if format.activations == "fp8"]
GATE_UP = (None, "concatenated", "interleaved")
every_device = pytest.mark.parametrize("device, dtype", DEVICES_AND_DTYPES)
every_format = pytest.mark.parametrize("name", FP8_FORMATS)


def numbers(name: str, shape=(2, 128, 160), halves: bool = False, seed: int = 0) -> EightBits:
    make = torch.Generator().manual_seed(seed)
    return to_fp8(torch.randn(shape, generator=make), FP8_FORMATS[name], halves)


# ---- tiles ----


def tiles_of(given: EightBits, gate_up: str | None, row_scales: bool) -> torch.Tensor:
    """Tiles made number by number, as csrc/moelora.h describes them."""
    experts, rows, columns = given.q.shape
    half = -(-rows // 2 // 64)
    row_tiles = -(-rows // 64) if gate_up is None else 2 * half
    size = 64 * 128 + (64 if row_scales else 4) * 4
    data = torch.zeros(experts, row_tiles, -(-columns // 128), size, dtype=torch.uint8)
    bytes_, spread = given.q.view(torch.uint8), given.spread()
    for n in range(rows):
        if gate_up is None:
            i, r = divmod(n, 64)
        else:
            up, at = divmod(n, rows // 2) if gate_up == "concatenated" else (n % 2, n // 2)
            i, r = up * half + at // 64, at % 64
        for k in range(columns):
            tile, c = data[:, i, k // 128], k % 128
            of_sixteen = c % 16
            q, place = of_sixteen % 8 // 2, of_sixteen % 2 + 2 * (of_sixteen // 8)
            tile[:, 128 * r + 16 * ((c // 16) ^ (r & 7)) + 4 * q + place] = bytes_[:, n, k]
            scales = tile[:, 64 * 128 :].view(torch.float32)
            scales[:, r if row_scales else c // 64] = spread[:, n, k]
    return data


@pytest.mark.parametrize("gate_up", GATE_UP)
@pytest.mark.parametrize("name", ["fp8_block", "fp8_b64", "fp8_channel", "fp8_tensor_w8a8"])
@pytest.mark.parametrize("shape", [(1, 128, 160), (2, 72, 200)])
def test_tiles_are_as_they_are_written_down(shape, name, gate_up):
    if name == "fp8_b64" and (gate_up == "interleaved" or shape[1] == 72 and not gate_up):
        shape = (1, 64, 160) if gate_up is None else (1, 2, 160)
    given = numbers(name, shape, halves=gate_up == "concatenated")
    for dtype in HALVES:
        weights = given.pack(dtype, gate_up)
        assert weights.row_scales == (name == "fp8_channel")
        assert torch.equal(weights.data, tiles_of(given, gate_up, weights.row_scales))


@every_device
@every_format
@pytest.mark.parametrize("shape", [(1, 2, 32), (2, 256, 96), (3, 320, 256), (2, 384, 165)])
def test_every_number_comes_back(shape, name, device, dtype):
    given = numbers(name, shape)
    weights = given.pack(dtype).to(device)
    assert (weights.shape, weights.dtype) == (torch.Size(shape), dtype)
    assert same_bits(weights.unpack().cpu(), given.dequantised(dtype))
    there = QuantizedWeights.from_fp8_channel(given.q.to(device), torch.ones(shape[:2]).to(device))
    here = QuantizedWeights.from_fp8_channel(given.q, torch.ones(shape[:2]))
    assert torch.equal(there.data.cpu(), here.data), "both devices make the same tiles"


@every_device
@pytest.mark.parametrize("scale", [1.0, 0.37, 2.0**-20, 255.0])
def test_every_number_of_e4m3(scale, device, dtype):
    finite = [byte for byte in range(256) if byte & 127 != 127]
    q = torch.tensor(finite, dtype=torch.uint8).view(E4M3).view(1, 1, -1).to(device)
    weights = QuantizedWeights.from_fp8_tensor(q, torch.tensor([scale]).to(device), dtype=dtype)
    up = 256 if dtype == torch.float16 else 1
    rounded = (torch.tensor(scale) * up).to(dtype).double() / up
    assert same_bits(weights.unpack().cpu(), (q.cpu().double() * rounded).to(dtype))


# ---- activations ----


def engines_rule(x: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """per_token_group_quant_fp8, dynamic per-token and static scaled_fp8_quant of vLLM 0.33 on a
    GPU: values of e4m3 as float32, and scales spread over columns, of rows (M, K)."""
    x = x.float()
    if name == "fp8_static_w8a8":
        scale = torch.full_like(x, INPUT_SCALE)
        y = x * (1.0 / torch.tensor(INPUT_SCALE))
    elif name in ("fp8_channel_w8a8", "fp8_tensor_w8a8"):
        smallest = torch.tensor(1.0) / (torch.tensor(448.0) * 512)
        scale = torch.maximum(x.abs().amax(1, keepdim=True) / 448, smallest).expand_as(x)
        y = x / scale
    else:
        group = 64 if name == "fp8_b64_w8a8" else 128
        parts = [
            part.abs().amax(1, keepdim=True).clamp(min=1e-10).expand_as(part) / 448
            for part in x.split(group, 1)
        ]
        scale = torch.cat(parts, 1)
        y = x * (1.0 / scale)
    return y.clamp(-448, 448).to(E4M3).float(), scale


def identity(name: str, size: int, dtype: torch.dtype, gate_up=None) -> QuantizedWeights:
    """Weights that give back what multiplies them."""
    ones = EightBits(
        torch.eye(size)[None].to(E4M3),
        torch.ones(1, size, -(-size // (FP8_FORMATS[name].group or size))),
        torch.arange(size) // FP8_FORMATS[name].rows,
        FP8_FORMATS[name].group or size,
        FP8_FORMATS[name],
    )
    if name in ("fp8_tensor_w8a8", "fp8_static_w8a8"):
        ones.of_rows = torch.zeros(size, dtype=torch.int64)
    return ones.pack(dtype, gate_up)


def once(x: torch.Tensor, w: QuantizedWeights) -> torch.Tensor:
    """x w^T of one expert."""
    ids = torch.zeros(len(x), 1, dtype=torch.int32, device=x.device)
    return moelora.fused_moe_lora_gemm(x, w, ids.float(), ids)[:, 0]


def rows_to_quantise(columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Of all sizes; the last ones lie between two numbers, so that the last bit of a scale, or of
    its inverse, decides which one they become."""
    make = torch.Generator().manual_seed(4)
    size = torch.tensor([1.0, 100.0, 1e-3, 1e-6, 0.0, 3.0])
    x = torch.randn(90, columns, generator=make) * size.repeat(15)[:, None]
    x[7, :64] = x[7, 5]  # a group of one size
    x[8] = torch.linspace(0, 1, columns)
    found = torch.arange(127, dtype=torch.uint8).view(E4M3).float()
    between = ((found[1:] + found[:-1]) / 2).repeat(-(-columns // 126))[:columns]
    between[::64] = 448
    scales = torch.tensor([1, 1.25, 1.5, 1.75])
    return torch.cat([x, scales[:, None] * between]).to(dtype)


@every_device
@pytest.mark.parametrize("columns", [320, 200])
@pytest.mark.parametrize("name", W8A8)
def test_activations_become_the_numbers_of_engines(name, columns, device, dtype):
    x = rows_to_quantise(columns, dtype)
    values, scales = engines_rule(x, name)
    got = once(x.to(device), identity(name, columns, dtype).to(device))
    assert torch.equal(got.cpu().float(), (values * scales).to(dtype).float())


@pytest.fixture(scope="module")
def vllm_ops():
    """Of the library that VQ_CUDA_SO names, built from vLLM's sources, or of an installed vLLM."""
    if library := os.environ.get("VQ_CUDA_SO"):
        torch.ops.load_library(library)
    else:
        pytest.importorskip("vllm._custom_ops", exc_type=ImportError)
    return torch.ops._C


def quantised_by_vllm(ops, x: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """As `engines_rule` gives them."""
    kind = name.split("_")[1]
    operator = {
        "static": "static_scaled_fp8_quant",
        "channel": "dynamic_per_token_scaled_fp8_quant",
        "tensor": "dynamic_per_token_scaled_fp8_quant",
    }.get(kind, "per_token_group_fp8_quant")
    if not hasattr(ops, operator):
        pytest.skip(f"there is no torch.ops._C.{operator}")
    call, q = getattr(ops, operator), torch.empty_like(x, dtype=E4M3)
    if kind == "static":
        scale = torch.tensor([INPUT_SCALE], device=x.device)
        call(q, x, scale, None)
    elif kind in ("channel", "tensor"):
        scale = torch.empty(len(x), 1, device=x.device)
        call(q, x, scale, None)
    else:
        group = 64 if kind == "b64" else 128
        scale = torch.empty(len(x), x.size(1) // group, device=x.device)
        call(x, q, scale, group, 1e-10, -448.0, 448.0, False, False, False)
        scale = scale.repeat_interleave(group, 1)
    return q.cpu().float(), scale.cpu().expand_as(q)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", W8A8)
def test_activations_become_the_numbers_of_vllm(name, dtype, vllm_ops):
    """By its own kernels; of the rule that other tests go by the scales are the same bits, too."""
    x = rows_to_quantise(384, dtype)
    values, scales = quantised_by_vllm(vllm_ops, x.cuda(), name)
    by_rule = engines_rule(x, name)
    assert same_bits(values, by_rule[0])
    assert same_bits(scales, by_rule[1])
    got = once(x.cuda(), identity(name, 384, dtype).to("cuda"))
    assert torch.equal(got.cpu().float(), (values * scales).to(dtype).float())


@every_device
def test_all_of_float16_is_rounded_as_torch_does(device, dtype):
    """To even, to subnormals, and cut off at 448."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    x = x[torch.isfinite(x)].to(dtype).view(-1, 64)
    values = x.float().clamp(-448, 448).to(E4M3).float()
    ones = torch.eye(64)[None].to(E4M3)
    w = QuantizedWeights.from_fp8_tensor(ones, torch.ones(1), 1.0, dtype=dtype)
    assert torch.equal(once(x.to(device), w.to(device)).cpu().float(), values)


@every_device
@pytest.mark.parametrize("name", W8A8)
def test_nan_and_infinity(name, device, dtype):
    x = torch.ones(4, 256, dtype=dtype)
    x[1, 3], x[2, 200], x[3, 5] = float("nan"), float("inf"), -float("inf")
    got = once(x.to(device), identity(name, 256, dtype).to(device)).cpu().float()
    assert torch.isfinite(got[0]).all()
    assert torch.isnan(got[1, 3])
    if name == "fp8_static_w8a8":
        most = torch.tensor(448 * INPUT_SCALE).to(dtype).float()
        assert got[2, 200] == most
        assert got[3, 5] == -most
    else:
        assert not torch.isfinite(got[2, 200])
        assert not torch.isfinite(got[3, 5])


def test_a_row_does_not_know_its_batch():
    """Of a layer on a CPU: no bits of a token come of how many others there are."""
    for name in W8A8:
        spec = Spec(tokens=70, hidden=320, inter=192, ranks=(16, 5), mix="many")
        p = build(spec, FP8_FORMATS[name], torch.bfloat16)
        whole = moelora.fused_experts_lora(**p.kwargs())
        for tokens in (1, 3, 17):
            few = {**p.kwargs(), **p.dense.prefix(tokens).kwargs(), "w13": p.w13, "w2": p.w2}
            assert same_bits(moelora.fused_experts_lora(**few), whole[:tokens])


@every_device
def test_adapters_take_activations_as_they_are(device, dtype):
    """Base weights of zeros leave what adapters add to a call with weights in `dtype`."""
    p = build(Spec(tokens=20, hidden=256, inter=128), FP8_FORMATS["fp8_block_w8a8"], dtype)
    q, scales = torch.zeros(p.w13.shape).to(E4M3), torch.ones(p.w13.shape[0], 2, 2)
    w = QuantizedWeights.from_fp8_block(q, scales, dtype=dtype).to(device)
    arguments = p.to(device).dense.gemm_kwargs("w13")
    want = moelora.fused_moe_lora_gemm(**{**arguments, "w": torch.zeros_like(arguments["w"])})
    got = moelora.fused_moe_lora_gemm(**{**arguments, "w": w})
    if device == "cpu":
        assert same_bits(got, want)
    torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-3)


H_BY_TILES = {
    "one group": Spec(tokens=60, hidden=256, inter=128, experts=2, top_k=1),
    "full blocks": Spec(tokens=500, hidden=384, inter=256, experts=2, ranks=(16, 40), mix="many"),
    "no adapters": Spec(tokens=500, hidden=256, inter=256, experts=3, mix="absent"),
    "gate and up alternate": Spec(
        tokens=300, hidden=256, inter=384, activation="swigluoai", bias=True, mix="many"
    ),
    "half a group": Spec(tokens=300, hidden=256, inter=192, mix="many"),
    "odd blocks, odd columns": Spec(
        tokens=450, hidden=640, inter=384, experts=3, top_k=2, ranks=(16, 40), mix="many"
    ),
    "blocks without a pair": Spec(tokens=200, hidden=640, inter=384, experts=8, mix="many"),
}


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("case", H_BY_TILES)
@pytest.mark.parametrize("name", ["fp8_block_w8a8", "fp8_static_w8a8"])
def test_h_is_the_same_from_an_epilogue_as_from_a_kernel(name, case):
    """Tiles of 256 weight rows leave h in FP8 where they hold whole groups of it; those of 128
    leave that to a kernel behind them. So they do in the fix-up pass, for a factor of an adapter
    that is not finite."""
    sizes = "64x128x128", "96x256x128", "96x256x128x2", "128x256x128x2"
    tiles = [f"gemm_bf16_w8a8_{size}_sm90" for size in sizes]
    if not set(tiles) <= set(_C.usable()):
        pytest.skip("tiles of Hopper")
    p = build(H_BY_TILES[case], FP8_FORMATS[name], torch.bfloat16).to("cuda")
    for value in (None, "nan", "inf") if p.dense.w13_lora_b else (None,):
        if value:
            p.dense.w13_lora_b[0][0, :, 5, 0] = float(value)
        outputs = []
        try:
            for tile in tiles:
                _C.force_variant(tile)
                outputs.append(moelora.fused_experts_lora(**p.kwargs()))
                assert tile in _C.last_plan()
        finally:
            _C.force_variant(None)
        assert all(same_bits(out, outputs[0]) for out in outputs), value


# ---- checkpoints ----


@every_device
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_blocks(kind, device, dtype):
    given = numbers("fp8_block", (2, 200, 300))
    blocks = given.scales[:, ::128].to(kind)
    given.scales = blocks.float()[:, given.of_rows]
    q, blocks = given.q.to(device), blocks.to(device)
    weights = QuantizedWeights.from_fp8_block(q, blocks, dtype=dtype)
    listed = QuantizedWeights.from_fp8_block([*q], [*blocks], dtype=dtype)
    assert (weights.format, weights.group_size, weights.x_format) == ("fp8", 128, "group")
    assert torch.equal(weights.data, listed.data)
    assert same_bits(weights.unpack().cpu(), given.dequantised(dtype))


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
        assert same_bits(weights.unpack(), given.dequantised(torch.bfloat16))
    run_on = torch.rand(2, 2, 2, generator=make) + 0.5  # blocks of 192 that a tile is across
    weights = QuantizedWeights.from_fp8_block(
        q[:, :320], run_on, block=(160, 128), gate_up="interleaved"
    )
    assert weights.row_scales


@every_device
def test_channels_and_tensors(device, dtype):
    q = numbers("fp8_channel", (2, 96, 130)).q.to(device)
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
    q, channels = numbers("fp8_channel", (2, 128, 160)).q, torch.rand(2, 128) + 0.5
    for make, *scales in (
        (QuantizedWeights.from_fp8_block, torch.rand(2, 1, 2) + 0.5),
        (QuantizedWeights.from_fp8_channel, channels),
        (QuantizedWeights.from_fp8_tensor, channels[:, 0], 0.5),
    ):
        native, bf16 = (make(q, *scales, activations=said) for said in ("native", "bf16"))
        assert torch.equal(bf16.data, native.data)
        assert bf16.layout == native.layout


@every_format
@pytest.mark.parametrize("gate_up", [None, "concatenated"])
def test_state_dict(name, gate_up, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    weights = numbers(name).pack(torch.float16, gate_up)
    safetensors.save_file(weights.state_dict("experts.w13."), tmp_path / "weights.safetensors")
    state = safetensors.load_file(tmp_path / "weights.safetensors")
    again = QuantizedWeights.from_state_dict(state, "experts.w13.")
    assert torch.equal(again.data, weights.data)
    for field in ("format", "group_size", "gate_up", "shape", "dtype", "layout", "row_scales"):
        assert getattr(again, field) == getattr(weights, field)


def test_state_dicts_that_are_none():
    state = numbers("fp8_static_w8a8").pack(torch.bfloat16).state_dict()
    for at, value in ((0, 2), (0, 7), (0, 8), (0, 9), (6, 4), (6, 0), (7, 0), (7, -1), (3, 300)):
        layout = state["layout"].clone()
        layout[at] = value
        with pytest.raises(ValueError, match=r"layout|columns is|tiles"):
            QuantizedWeights.from_state_dict({**state, "layout": layout})


# ---- what is refused ----

N, K = 64, 128
ONES = torch.ones(2, N, K).to(E4M3)
NAN, INF = float("nan"), float("inf")
BLOCK = {"weight": ONES, "weight_scale_inv": torch.ones(2, 1, 1)}
CHANNEL = {"weight": ONES, "weight_scale": torch.ones(2, N)}
TENSOR = {"weight": ONES, "weight_scale": torch.ones(2)}
GOOD = {"from_fp8_block": BLOCK, "from_fp8_channel": CHANNEL, "from_fp8_tensor": TENSOR}
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
    ("from_fp8_block", {"block": (128, 0)}, r"block is \(128, 0\), expected two numbers above 0"),
    (
        "from_fp8_block",
        {"block": (128, 32), "weight_scale_inv": torch.ones(2, 1, 4)},
        r"block is \(128, 32\), expected columns that are a multiple of 64",
    ),
    (
        "from_fp8_block",
        {"block": (32, 64), "weight_scale_inv": torch.ones(2, 2, 2)},
        r"block is \(32, 64\), expected columns that are a multiple of 128, as rows of a tile",
    ),
    ("from_fp8_block", {"activations": "int8"}, "is 'int8', expected 'fp8' or 'native' or 'bf16'"),
    (
        "from_fp8_block",
        {"activations": "bf16", "dtype": torch.float16},
        "activations is 'bf16' and dtype is torch.float16, expected dtype torch.bfloat16, or activ",
    ),
    ("from_fp8_block", {"gate_up": "both"}, "gate_up is 'both', expected one of None"),
    ("from_fp8_block", {"dtype": torch.float32}, "dtype is torch.float32, expected torch.bfloat16"),
    ("from_fp8_channel", {"weight_scale": torch.ones(2, N - 1)}, "weight_scale has shape"),
    ("from_fp8_channel", {"weight_scale": torch.ones(2, N, 2)}, "weight_scale has shape"),
    ("from_fp8_tensor", {"weight_scale": torch.ones(2, 3)}, r"weight_scale has shape \(2, 3\)"),
    ("from_fp8_tensor", {"weight_scale": torch.ones(2, 2)}, r"weight_scale has shape \(2, 2\)"),
    ("from_fp8_tensor", {"input_scale": 0.0}, "input_scale is .0.0., expected normal numbers"),
    ("from_fp8_tensor", {"input_scale": torch.tensor([1, NAN])}, "input_scale is .1.0, nan."),
]  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_what_the_refused_are_made_from_is_right(name):
    assert getattr(QuantizedWeights, name)(**GOOD[name]).shape == (2, N, K)


@pytest.mark.parametrize("case", range(len(BAD)), ids=[f"{n}-{i}" for i, (n, *_) in enumerate(BAD)])
def test_bad_checkpoints_name_their_tensor(case):
    name, changes, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        getattr(QuantizedWeights, name)(**{**GOOD[name], **changes})


@pytest.mark.parametrize("arguments, message", [
    ({"block_rows": 0}, "block_rows is 0, expected at least 1"),
    ({"block_columns": 64}, "block_columns is 64 for K = 128, expected a multiple of 128, or all"),
    ({"block_rows": 32}, "tile 0 of rows has scales of several blocks"),
    ({"scales": torch.ones(2, 2, 1)}, "scales.size\\(1\\) is 2, layout.rows / block_rows, rounded"),
    ({"scales": torch.ones(2, 1, 2)}, "scales.size\\(2\\) is 2, K / block_columns, rounded up, is"),
    ({"scales": torch.ones(3, 1, 1)}, "scales.size\\(0\\) is 3, values.size\\(0\\) is 2"),
    ({"scales": torch.ones(2, 1, 1).half()}, "scales has dtype float16, expected float32"),
    ({"zeros": torch.zeros(2, 1, 1).byte()}, "zeros is there, but FP8 has none"),
    ({"format": 2}, "block_rows is 64 and block_columns 128, expected 0: INT4 has groups"),
])  # fmt: skip
def test_bad_arguments_of_packing(arguments, message):
    good = {"values": ONES.view(torch.uint8), "scales": torch.ones(2, 1, 1)}
    good |= {"zeros": torch.empty(0), "format": 6, "order": 0, "dtype": 0}
    if arguments.get("block_rows") == 32:
        good["scales"] = torch.ones(2, 2, 1)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.moelora.pack_quantized(
            **{**good, "block_rows": 64, "block_columns": 128, **arguments}
        )


def test_layouts_of_the_operator_itself():
    x, ids = torch.zeros(3, K).bfloat16(), torch.zeros(3, 1, dtype=torch.int32)
    tiles, absent = numbers("fp8_block", (1, N, K)).pack(torch.bfloat16).data, torch.empty(0)
    rest = (ids.float(), ids, absent, [], [], *[absent] * 5, False)
    for layout, message in {
        (6, 0, N, 4): "w_layout.x is 4, expected a moelora_x_format",
        (6, 0, N, 1, 0.5): "w_layout.x_scale is 0.5, expected 0, as x is not STATIC",
        (6, 0, N, 3): "w_layout.x_scale is 0, expected a normal float32 above 0",
        (6, 0, N, 3, 1e300): "w_layout.x_scale is inf",
        (1, 0, N, 1): "w_layout.x is 1, expected 0: x as it is, as its format is MXFP4",
        (0, 0, 0, 1): "w_layout.x is 1, expected 0: x as it is, as its format is native",
        (8, 0, N): r"w.size\(3\) is 8208, expected the 8448 bytes of a tile of FP8 \(scales of ro",
    }.items():
        with pytest.raises(RuntimeError, match=message):
            torch.ops.moelora.fused_moe_lora_gemm(x, tiles, *rest, *layout)
