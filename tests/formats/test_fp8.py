"""FP8 weights: tiles byte by byte, and activations bit by bit."""

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
    by_variants,
    fp8_numbers,
)

import moelora
from moelora import QuantizedWeights
from moelora.reference.fp8 import quantized

E4M3 = torch.float8_e4m3fn
W8A8 = [name for name, format in FP8_FORMATS.items() if format.activations == "fp8"]
GATE_UP = (None, "concatenated", "interleaved")
every_device = pytest.mark.parametrize("device, dtype", DEVICES_AND_DTYPES)
every_format = pytest.mark.parametrize("name", FP8_FORMATS)


# ---- tiles ----


def tiles_of(given: EightBits, gate_up: str | None, row_scales: bool) -> torch.Tensor:
    """Tiles made number by number, as csrc/moelora.h describes them."""
    experts, rows, columns = given.q.shape
    half = -(-rows // 2 // 64)
    row_tiles = -(-rows // 64) if gate_up is None else 2 * half
    size = 64 * 128 + (64 if row_scales else 32) * 4
    data = torch.zeros(experts, row_tiles, -(-columns // 128), size, dtype=torch.uint8)
    tiles, bytes_ = data.numpy(), given.q.view(torch.uint8).numpy()
    scales, spread = tiles[..., 64 * 128 :].view("float32"), given.spread().numpy()
    for n in range(rows):
        if gate_up is None:
            i, r = divmod(n, 64)
        else:
            up, at = divmod(n, rows // 2) if gate_up == "concatenated" else (n % 2, n // 2)
            i, r = up * half + at // 64, at % 64
        for k in range(columns):
            j, c = divmod(k, 128)
            of_sixteen = c % 16
            q, place = of_sixteen % 8 // 2, of_sixteen % 2 + 2 * (of_sixteen // 8)
            at = 128 * r + 16 * ((c // 16) ^ (r & 7)) + 4 * q + place
            tiles[:, i, j, at] = bytes_[:, n, k]
            scales[:, i, j, r if row_scales else c // 64] = spread[:, n, k]
    return data


@pytest.mark.parametrize("gate_up", GATE_UP)
@pytest.mark.parametrize("name", ["fp8_block", "fp8_b64", "fp8_channel", "fp8_tensor_w8a8"])
@pytest.mark.parametrize("shape", [(1, 128, 160), (2, 72, 200)])
def test_tiles_are_as_they_are_written_down(shape, name, gate_up):
    if name == "fp8_b64" and (gate_up == "interleaved" or shape[1] == 72 and not gate_up):
        shape = (1, 64, 160) if gate_up is None else (1, 2, 160)
    given = fp8_numbers(name, shape, halves=gate_up == "concatenated")
    for dtype in HALVES:
        weights = given.pack(dtype, gate_up)
        assert weights.row_scales == (name == "fp8_channel")
        assert torch.equal(weights.data, tiles_of(given, gate_up, weights.row_scales))


@every_device
@every_format
@pytest.mark.parametrize("shape", [(1, 2, 32), (2, 256, 96), (3, 320, 256), (2, 384, 165)])
def test_every_number_comes_back(shape, name, device, dtype):
    given = fp8_numbers(name, shape)
    weights = given.pack(dtype).to(device)
    assert (weights.shape, weights.dtype) == (torch.Size(shape), dtype)
    assert same_bits(weights.unpack().cpu(), given.dequantized(dtype))
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
        return rule_of_groups(x, 64 if name == "fp8_b64_w8a8" else 128)
    return y.clamp(-448, 448).to(E4M3).float(), scale


def rule_of_groups(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """per_token_group_quant_fp8 for a width of groups, as `engines_rule` gives it."""
    parts = [
        part.abs().amax(1, keepdim=True).clamp(min=1e-10).expand_as(part) / 448
        for part in x.split(group, 1)
    ]
    scale = torch.cat(parts, 1)
    return (x * (1.0 / scale)).clamp(-448, 448).to(E4M3).float(), scale


def identity(name: str, size: int, dtype: torch.dtype) -> QuantizedWeights:
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
    return ones.pack(dtype)


def once(x: torch.Tensor, w: QuantizedWeights) -> torch.Tensor:
    """x w^T of one expert."""
    ids = torch.zeros(len(x), 1, dtype=torch.int32, device=x.device)
    return moelora.fused_moe_lora_gemm(x, w, ids.float(), ids)[:, 0]


def rows_to_quantize(columns: int, dtype: torch.dtype) -> torch.Tensor:
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
    x = rows_to_quantize(columns, dtype)
    values, scales = engines_rule(x, name)
    got = once(x.to(device), identity(name, columns, dtype).to(device))
    assert torch.equal(got.cpu().float(), (values * scales).to(dtype).float())


@every_device
@pytest.mark.parametrize(
    "wide, columns, group",
    [(192, 384, 64), (192, 200, 64), (192, 192, 128), (192, 160, 128), (256, 384, 128)],
)
def test_groups_are_narrow_where_a_weight_is_wider_than_its_odd_blocks(
    wide, columns, group, device, dtype
):
    x = rows_to_quantize(columns, dtype)
    values, scales = rule_of_groups(x.float(), group)
    ones = torch.ones(1, -(-columns // 64), -(-columns // wide))
    w = QuantizedWeights.from_fp8_block(
        torch.eye(columns)[None].to(E4M3), ones, block=(64, wide), dtype=dtype
    )
    got = once(x.to(device), w.to(device)).cpu().float()
    assert torch.equal(got, (values * scales).to(dtype).float())
    assert torch.equal(got, quantized(x, w, dtype).to(dtype).float()), "so does the reference"
    other, scales = rule_of_groups(x.float(), 192 - group)
    assert not torch.equal(got, (other * scales).to(dtype).float())


@pytest.fixture(scope="module")
def vllm_ops():
    """Of the library that VQ_CUDA_SO names, built from vLLM's sources, or of an installed vLLM."""
    if library := os.environ.get("VQ_CUDA_SO"):
        torch.ops.load_library(library)
    else:
        pytest.importorskip("vllm._custom_ops", exc_type=ImportError)
    return torch.ops._C


def quantized_by_vllm(ops, x: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
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
    x = rows_to_quantize(384, dtype)
    values, scales = quantized_by_vllm(vllm_ops, x.cuda(), name)
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
    "rounds of the pipeline": Spec(tokens=300, hidden=1100, inter=640, experts=2, mix="many"),
}


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("case", H_BY_TILES)
@pytest.mark.parametrize("name", ["fp8_block_w8a8", "fp8_static_w8a8", "fp8_channel_w8a8"])
def test_h_is_the_same_from_an_epilogue_as_from_a_kernel(name, case):
    """Tiles of 256 weight rows leave h in FP8 where they hold whole groups of it; those of 128
    leave that to a kernel behind them. So they do in the fix-up pass, for a factor of an adapter
    that is not finite."""
    sizes = "64x128x128", "96x256x128", "96x256x128x2", "128x256x128x2"
    tiles = [f"gemm_bf16_w8a8_{size}_sm90" for size in sizes]
    p = build(H_BY_TILES[case], FP8_FORMATS[name], torch.bfloat16).to("cuda")
    for value in (None, "nan", "inf") if p.dense.w13_lora_b else (None,):
        if value:
            p.dense.w13_lora_b[0][0, :, 5, 0] = float(value)
            p.dense.w13_lora_b[-1][0, :, -5, 0] = float(value)
        outputs = by_variants(tiles, p)
        assert all(same_bits(out, outputs[0]) for out in outputs), value
