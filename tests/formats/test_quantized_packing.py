"""From checkpoints to tiles and back: every layout bit by bit, and state dicts."""

from dataclasses import replace
from functools import partial

import numpy
import pytest
import torch
from cases import same_bits
from quantized_cases import (
    ALL_FORMATS,
    CODES,
    DEVICES_AND_DTYPES,
    FORMATS,
    FP8_FORMATS,
    HALVES,
    Numbers,
    by_bytes,
    by_words,
    fp8_numbers,
    quantize,
    through_a_file,
)
from vllm_sources import RELEASES, Sources, needs_sources

from moelora import QuantizedWeights

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
every_device = pytest.mark.parametrize("device, dtype", DEVICES_AND_DTYPES)
every_format = pytest.mark.parametrize("name", FORMATS)
every_int4 = pytest.mark.parametrize("name", [name for name in FORMATS if name.startswith("int4")])
GATE_UP = (None, "concatenated", "interleaved")


def numbers(name: str, shape=(2, 72, 96), seed: int = 0) -> Numbers:
    """bitsandbytes' blocks go on in the next row: here a row has whole ones."""
    if FORMATS[name].name in CODES:
        shape = (*shape[:2], -(-shape[2] // 64) * 64)
    make = torch.Generator().manual_seed(seed)
    return quantize(torch.randn(shape, generator=make), FORMATS[name], seed)


# ---- tiles ----


# Bits of four numbers in half of a word, from the lowest on.
NIBBLES = [range(4 * i, 4 * i + 4) for i in range(4)]
E2M1 = [(6, 7, 8, 15), (3, 4, 5, 12), (0, 1, 2, 9), (14, 10, 11, 13)]


def e5m3(scale: torch.Tensor) -> int:
    """Five bits of exponent, 22 is 2^0, and three of mantissa."""
    mantissa, exponent = numpy.frexp(float(scale))
    return int((exponent - 1 + 22) * 8 + (2 * mantissa - 1) * 8) if mantissa else 0


def tiles_of(numbers: Numbers, gate_up: str | None, dtype: torch.dtype) -> torch.Tensor:
    """Tiles made number by number, as csrc/moelora.h describes them."""
    experts, rows, columns = numbers.q.shape
    form, zeros = numbers.format.name, numbers.zeros
    group = columns // numbers.scales.size(2)
    groups = {16: 4, 32: 2}.get(group, 1)
    half = -(-rows // 2 // 64)
    row_tiles = -(-rows // 64) if gate_up is None else 2 * half
    scale_bytes = 4 if form in CODES else 1 if form in ("mxfp4", "nvfp4") else 2
    size = 2048 + 64 * groups * (scale_bytes + (zeros is not None))
    data = torch.zeros(
        experts, row_tiles, -(-columns // 64), size + 16 * (form == "nvfp4"), dtype=torch.uint8
    )
    if form == "nvfp4":
        of_tensor = numbers.of_tensor.repeat_interleave(row_tiles // numbers.of_tensor.size(1), 1)
        data[..., -16:-12] = of_tensor[..., None].view(torch.uint8)[:, :, None]

    def place(n: int) -> tuple[int, int]:
        if gate_up is None:
            return divmod(n, 64)
        up, i = divmod(n, rows // 2) if gate_up == "concatenated" else (n % 2, n // 2)
        return up * half + i // 64, i % 64

    tiles, q = data.numpy(), numbers.q.tolist()
    for e in range(experts):
        for n in range(rows):
            i, r = place(n)
            warp, lane_row, lower = r // 16, r % 8, r // 8 % 2
            for k in range(columns):
                tile, c = tiles[e, i, k // 64], k % 64
                slab, pair = c // 16, c % 8 // 2
                lane = 4 * lane_row + pair
                first, half = ((warp * 32 + lane) * 4 + slab) * 4, c % 2
                number = lower + 2 * (c % 16 // 8)
                if form in CODES:
                    bits = range(4 * (2 * number + half), 4 * (2 * number + half) + 4)
                else:
                    bits = [16 * half + at for at in (NIBBLES if form == "int4" else E2M1)[number]]
                for bit, at in enumerate(bits):
                    tile[first + at // 8] |= (q[e][n][k] >> bit & 1) << at % 8
            for k in range(0, columns, 64 // groups):
                tile, g = tiles[e, i, k // 64], k % 64 * groups // 64
                at = ((warp * 8 + lane_row) * 2 + lower) * groups + g
                scale = numbers.scales[e, n, k // group]
                if form == "nvfp4":
                    tile[2048 + at] = e5m3(scale)
                elif form == "mxfp4":
                    shift = 126 if dtype == torch.bfloat16 else -98
                    tile[2048 + at] = max(0, int(scale) + shift)
                else:
                    stored = scale if form in CODES else scale.to(dtype)
                    bits = stored.reshape(1).view(torch.uint8)
                    at_byte = 2048 + len(bits) * at
                    tile[at_byte : at_byte + len(bits)] = bits
                if zeros is not None:
                    zero = numbers.zeros[e, n, k // group]
                    tile[2048 + 64 * groups * scale_bytes + at] = zero
    return data


@pytest.mark.parametrize("gate_up", GATE_UP)
@every_format
def test_tiles_are_as_they_are_written_down(name, gate_up):
    for dtype in HALVES:
        given = numbers(name, (1, 72, 96))
        assert torch.equal(given.pack(dtype, gate_up).data, tiles_of(given, gate_up, dtype))


@every_device
@every_format
@pytest.mark.parametrize("gate_up", GATE_UP)
@pytest.mark.parametrize("shape", [(1, 2, 32), (2, 72, 96), (3, 320, 256), (2, 130, 160)])
def test_every_number_comes_back(shape, gate_up, name, device, dtype):
    given = numbers(name, shape)
    weights = given.pack(dtype, gate_up).to(device)
    assert (weights.shape, weights.dtype) == (given.q.shape, dtype)
    assert weights.device.type == device
    assert weights.nbytes == weights.data.numel()
    unpacked = weights.unpack()
    assert unpacked.shape == weights.shape
    assert same_bits(unpacked.cpu(), given.dequantized(dtype))


@pytest.mark.parametrize("dtype", HALVES)
def test_every_scale_of_mxfp4(dtype):
    """All 129 exponents with all 16 numbers; float16 rounds the smallest, or to zero."""
    scales = torch.arange(129, dtype=torch.uint8).view(1, 129, 1)
    q = torch.arange(32).remainder(16).view(1, 1, 32).expand(1, 129, 32)
    given = Numbers(q, scales, None, FORMATS["mxfp4"])
    assert same_bits(given.pack(dtype).unpack(), given.dequantized(dtype))


@every_device
def test_every_scale_of_nvfp4(device, dtype):
    """All e4m3 scales from 0 to 448 with all 16 numbers; values of a scale of 0 are zeros."""
    scales = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).view(1, 127, 1)
    q = torch.arange(16).view(1, 1, 16).expand(1, 127, 16)
    given = Numbers(q, scales, None, FORMATS["nvfp4"], torch.tensor([[0.0123]]))
    weights = QuantizedWeights.from_nvfp4(
        by_bytes(q).to(device),
        scales.to(device),
        weight_scale_2=given.of_tensor.to(device),
        dtype=dtype,
    )
    unpacked = weights.unpack().cpu()
    assert same_bits(unpacked[:, 1:], given.dequantized(dtype)[:, 1:])
    assert not unpacked[:, 0].any()


@every_device
def test_zeros_and_float4_of_nvfp4(device, dtype):
    """A minus zero among scales, an expert of zeros, and torch's dtype of two values in a byte."""
    given = numbers("nvfp4", (2, 72, 96))
    scales = given.scales.to(device).view(torch.uint8).clone()
    scales[0, :2, 0] = torch.tensor([[0x00], [0x80]])[:, 0]
    weights = QuantizedWeights.from_nvfp4(
        by_bytes(given.q).to(device).view(torch.float4_e2m1fn_x2),
        scales,
        weight_scale_2=torch.tensor([1.0, 0.0], device=device),
        dtype=dtype,
    )
    unpacked = weights.unpack().cpu()
    wanted = QuantizedWeights.from_nvfp4(
        by_bytes(given.q), given.scales, weight_scale_2=torch.ones(2), dtype=dtype
    ).unpack()[0]
    wanted[:2, :16] = 0
    assert torch.equal(unpacked[0], wanted)
    assert not unpacked[1].any()


@pytest.mark.parametrize("gate_up", ["concatenated", "interleaved"])
@every_device
def test_scales_of_gate_and_of_up(device, dtype, gate_up):
    """NVFP4: each half has the scale of its own tensor, given to multiply or to divide."""
    given = numbers("nvfp4", (2, 72, 96))
    halves = torch.tensor([[1.0, 0.5], [2.0, 8.0]])
    blocks, scales = by_bytes(given.q).to(device), given.scales.to(device)
    options = {"gate_up": gate_up, "dtype": dtype}
    ones = torch.ones(2).to(device)
    one = QuantizedWeights.from_nvfp4(blocks, scales, weight_scale_2=ones, **options).unpack()
    is_up = torch.arange(72) % 2 if gate_up == "interleaved" else torch.arange(72) // 36
    want = one.cpu() * halves[:, is_up][..., None].to(dtype)
    for names in ({"weight_scale_2": halves}, {"weight_global_scale": 1 / halves}):
        ((name, of),) = names.items()
        got = QuantizedWeights.from_nvfp4(blocks, scales, **{name: of.to(device)}, **options)
        assert same_bits(got.unpack().cpu(), want)


@pytest.mark.parametrize("dtype", HALVES)
def test_every_number_and_zero_point_of_int4(dtype):
    q = torch.arange(32).remainder(16).view(1, 1, 32).expand(1, 32, 32)
    zeros = torch.arange(32).remainder(16).view(1, 32, 1)
    scales = torch.linspace(-3, 3, 32).bfloat16().float().view(1, 32, 1)
    given = Numbers(q, scales, zeros, FORMATS["int4_g32_zp"])
    assert same_bits(given.pack(dtype).unpack(), given.dequantized(dtype))


def test_the_numbers_of_transformers():
    """gpt-oss as transformers unpacks it, which gives (E, K, N)."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    make = torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 256, (2, 72, 3, 16), generator=make, dtype=torch.uint8)
    scales = torch.randint(110, 128, (2, 72, 3), generator=make, dtype=torch.uint8)
    theirs = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    ours = QuantizedWeights.from_mxfp4(blocks, scales, gate_up="interleaved").unpack()
    assert same_bits(ours, theirs.transpose(1, 2).contiguous())


# ---- checkpoints ----


def as_stored(t: torch.Tensor) -> torch.Tensor:
    """With the strides of a file's tensor: contiguous() leaves those of dimensions of one."""
    return torch.empty(t.shape, dtype=t.dtype).copy_(t)


def stored(given: Numbers) -> dict[str, list[torch.Tensor | None]]:
    """Numbers, scales and zero points as checkpoints hold them, by constructor; GPTQ's in version
    2, AWQ's with zero points and whole words of rows only."""
    parts = (given.q, given.scales, given.zeros)
    q, scales, zeros = (None if t is None else t.transpose(1, 2) for t in parts)
    points = None if zeros is None else by_words(zeros, pad=True)
    held = {
        "from_gptq": [by_words(given.q).transpose(1, 2), scales, points],
        "from_compressed_tensors": [
            *(by_words(given.q), given.scales.bfloat16()),
            None if points is None else points.transpose(1, 2),
        ],
    }
    if zeros is not None and given.q.size(1) % 8 == 0:
        held["from_awq"] = [by_words(q, AWQ_ORDER), scales, by_words(zeros, AWQ_ORDER)]
    return {n: [None if t is None else as_stored(t) for t in of] for n, of in held.items()}


def placed(tensors, device):
    return [None if t is None else t.to(device) for t in tensors]


def both(make, *tensors):
    """The weights of stacked tensors, which are those of one tensor for each expert."""
    stacked = make(*tensors)
    listed = make(*([e.clone() for e in t] if t is not None else None for t in tensors))
    assert torch.equal(stacked.data, listed.data)
    return stacked


@every_device
@pytest.mark.parametrize("flat", [False, True])
def test_mxfp4(flat, device, dtype):
    given = numbers("mxfp4")
    blocks, scales = by_bytes(given.q).to(device), given.scales.to(device)
    if not flat:
        blocks, scales = blocks.unflatten(2, (-1, 16)), scales.view(torch.float8_e8m0fnu)
    weights = both(lambda b, s: QuantizedWeights.from_mxfp4(b, s, dtype=dtype), blocks, scales)
    assert (weights.format, weights.group_size, weights.has_zeros) == ("mxfp4", 32, False)
    assert same_bits(weights.unpack().cpu(), given.dequantized(dtype))


@every_device
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@every_int4
def test_gptq(name, version, device, dtype):
    given = numbers(name, (2, 72, 128))
    zeros = torch.full_like(given.scales, 8).long() if given.zeros is None else given.zeros
    held = replace(given, zeros=zeros - int(version == "gptq"))
    qweight, scales, qzeros = placed(stored(held)["from_gptq"], device)
    group = 128 // scales.size(1)
    g_idx = (torch.arange(128) // group).int().expand(2, -1).to(device)
    options = {"group_size": group, "sym": given.zeros is None, "checkpoint_format": version}
    make = partial(QuantizedWeights.from_gptq, **options, dtype=dtype)
    weights = both(make, qweight, scales, qzeros, g_idx)
    assert weights.has_zeros == (given.zeros is not None), "zero points of 8 are dropped"
    assert weights.group_size == group
    assert same_bits(weights.unpack().cpu(), given.dequantized(dtype))
    if given.zeros is None:
        assert torch.equal(weights.data, both(make, qweight, scales, None, None).data)


def test_a_zero_point_of_16():
    """Of version 1, where 15 is stored for it."""
    qweight, scales = torch.zeros(1, 8, 8, dtype=torch.int32), torch.ones(1, 1, 8)
    qzeros = torch.full((1, 1, 1), -1, dtype=torch.int32)
    weights = QuantizedWeights.from_gptq(qweight, scales, qzeros)
    assert (weights.unpack() == -16).all()


def test_awq_by_hand():
    """The word that AutoAWQ makes of rows 0 to 7 holds them as 7 5 3 1 6 4 2 0, from the top."""
    word = 0x75316420
    qweight = torch.full((1, 32, 1), word, dtype=torch.int32)
    qzeros, scales = torch.zeros(1, 1, 1, dtype=torch.int32), torch.ones(1, 1, 8)
    unpacked = QuantizedWeights.from_awq(qweight, scales, qzeros).unpack()
    assert torch.equal(unpacked[0], torch.arange(8.0).bfloat16()[:, None].expand(8, 32))


def test_gptq_by_hand():
    qweight = torch.full((1, 4, 8), 0x76543210, dtype=torch.int32)
    unpacked = QuantizedWeights.from_gptq(qweight, torch.ones(1, 1, 8)).unpack()
    assert torch.equal(unpacked[0, 0], (torch.arange(32) % 8 - 8).bfloat16())


# The second to seventh have one word of rows, of columns, or of zero points, as dimensions of one
# have any stride; rows of the last three fill no word.
SHAPES = [(2, 72, 128), (1, 8, 8), (2, 8, 8), (1, 8, 16), (2, 16, 8), (1, 8, 32), (3, 8, 64)]
SHAPES += [(2, 76, 128), *((2, rows, 64) for rows in (1, 3))]


@every_device
@every_int4
@pytest.mark.parametrize("shape", SHAPES)
def test_checkpoints_of_many_and_few_rows_and_columns(shape, name, device, dtype):
    given = numbers(name, shape)
    for name, tensors in stored(given).items():
        options = {
            "from_gptq": {"checkpoint_format": "gptq_v2"},
            "from_compressed_tensors": {"weight_shape": torch.tensor([shape[1:]] * shape[0])},
        }
        make = partial(getattr(QuantizedWeights, name), dtype=dtype, **options.get(name, {}))
        weights = both(make, *placed(tensors, device))
        assert same_bits(weights.unpack().cpu(), given.dequantized(dtype)), name


# ---- packed by others ----


@every_int4
def test_words_of_compressed_tensors(name):
    """By the library itself: 76 rows leave its last word of zero points half empty."""
    theirs = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    given = numbers(name, (2, 76, 128))

    def packed(q, dim):
        return [theirs.pack_to_int32((e - 8).to(torch.int8), 4, packed_dim=dim) for e in q]

    zeros = None if given.zeros is None else packed(given.zeros, 0)
    weights = QuantizedWeights.from_compressed_tensors(packed(given.q, 1), [*given.scales], zeros)
    assert same_bits(weights.unpack(), given.dequantized(torch.bfloat16))


@pytest.fixture(params=RELEASES, ids=lambda path: path.name)
def packers(request):
    """gptq_pack, awq_pack and pack_cols of a release of vLLM, by which it makes its own tests."""
    return Sources(request.param).functions(
        "vllm.model_executor.layers.quantization.utils.quant_utils",
        *("gptq_pack", "awq_pack", "pack_cols", "pack_rows", "get_pack_factor"),
        numpy=numpy,
        torch=torch,
    )[:3]


@needs_sources
@every_int4
def test_words_of_vllm(name, packers):
    gptq_pack, awq_pack, pack_cols = packers
    given = numbers(name, (2, 72, 128))
    scales = given.scales.transpose(1, 2).contiguous()
    zeros = torch.full_like(given.scales, 8).long() if given.zeros is None else given.zeros
    q, zeros = (t.transpose(1, 2).contiguous() for t in (given.q, zeros))

    def packed(pack, numbers):
        return [pack(e, 4, *e.shape) for e in numbers]

    want = given.dequantized(torch.bfloat16)
    stored = packed(pack_cols, zeros - 1)
    gptq = QuantizedWeights.from_gptq(packed(gptq_pack, q), scales, stored)
    assert same_bits(gptq.unpack(), want)
    awq = QuantizedWeights.from_awq(packed(awq_pack, q), scales, packed(awq_pack, zeros))
    assert same_bits(awq.unpack(), want)


# ---- state dicts ----


@pytest.mark.parametrize(
    ("name", "gate_up"),
    [(n, g) for n in ALL_FORMATS for g in GATE_UP if n in FORMATS or g != "interleaved"],
)
def test_state_dict(name, gate_up, tmp_path):
    given = fp8_numbers(name) if name in FP8_FORMATS else numbers(name)
    weights = given.pack(torch.float16, gate_up)
    again = through_a_file(weights, tmp_path / "weights.safetensors")
    assert torch.equal(again.data, weights.data)
    fields = ("format", "group_size", "has_zeros", "gate_up", "shape", "dtype", "layout")
    for field in (*fields, "row_scales"):
        assert getattr(again, field) == getattr(weights, field)
    assert same_bits(again.unpack(), weights.unpack())


CHANGED = {
    "mxfp4": ((0, 0), (0, 6), (0, 9), (1, 3), (2, 300), (3, 300), (3, 0), (5, 2), (0, 2)),
    "fp8_static_w8a8": (
        *((0, 2), (0, 7), (0, 8), (0, 9), (6, 4), (6, 0), (7, 0), (7, -1), (3, 300)),
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_layouts_that_are_none(name):
    given = fp8_numbers(name) if name in FP8_FORMATS else numbers(name)
    state = given.pack(torch.bfloat16).state_dict()
    for at, value in CHANGED[name]:
        layout = state["layout"].clone()
        layout[at] = value
        with pytest.raises(ValueError, match=r"layout|rows is 300|columns is|tiles"):
            QuantizedWeights.from_state_dict({**state, "layout": layout})


def test_state_dicts_that_are_none():
    state = numbers("mxfp4").pack(torch.bfloat16).state_dict()
    data, layout = state["data"], state["layout"]
    for wrong, error, why in (
        ({"data": data}, KeyError, "layout"),
        (state | {"layout": layout[:5]}, ValueError, "layout has 5 numbers"),
        (state | {"layout": layout.float()}, ValueError, "layout has dtype .*, expected int64"),
        (state | {"layout": layout[None]}, ValueError, "layout has dtype .*, expected int64"),
        (state | {"layout": layout.to("meta")}, ValueError, r"int64 and shape \(8,\) on meta"),
        (state | {"layout": [1]}, TypeError, "w13.layout is a list, expected Tensor"),
        (state | {"data": [1]}, TypeError, "w13.data is a list, expected Tensor"),
        (state | {"data": data.sum()}, ValueError, "data has no dimensions"),
    ):
        with pytest.raises(error, match=why):
            given = {f"w13.{key}": value for key, value in wrong.items()}
            QuantizedWeights.from_state_dict(given, prefix="w13.")
