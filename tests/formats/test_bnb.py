"""NF4 and FP4 of bitsandbytes, which is the oracle: values are equal bit for bit."""

import json

import pytest
import torch
from checks import freed
from quantized_cases import CODES, HALVES, bnb_tensor

from moelora import QuantizedWeights

E, N, K = 3, 8, 192


def quantized(w, **options):
    functional = pytest.importorskip("bitsandbytes.functional")
    return functional.quantize_4bit(w, **options)


def dequantized(weight, state, dtype):
    """As one row: kernels of bitsandbytes 0.50 for AVX-512 take another block's absmax where blocks
    of 128 to 1024 are no divisors of a row."""
    functional = pytest.importorskip("bitsandbytes.functional")
    shape, state.shape, state.dtype = state.shape, torch.Size([state.shape.numel()]), dtype
    flat = functional.dequantize_4bit(weight, state).to(dtype)
    state.shape = shape
    return flat.reshape(shape)


def drawn(*shape, seed=0):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.05
    w.view(-1)[:7] = torch.tensor([0.0, -0.0, 1e-30, 3.0, -3.0, 1e-3, -1e-3])
    return w


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("blocksize", [64, 128, 256, 512, 1024, 2048, 4096])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_values_are_those_of_bitsandbytes(quant_type, blocksize, nested):
    """Blocks that end within a row (K = 192) or span several, of a stack and of each expert."""
    w = drawn(E, N, K).bfloat16()
    options = {"quant_type": quant_type, "blocksize": blocksize, "compress_statistics": nested}
    whole = quantized(w, **options)
    each = [quantized(w[e], **options) for e in range(E)]
    for dtype in HALVES:
        packed = QuantizedWeights.from_bnb(*whole, dtype=dtype)
        assert packed.format == {"nf4": "nf4", "fp4": "bnb_fp4"}[quant_type]
        assert torch.equal(packed.unpack(), dequantized(*whole, dtype))
        packed = QuantizedWeights.from_bnb(*zip(*each, strict=True), dtype=dtype)
        for e in range(E):
            assert torch.equal(packed.unpack()[e], dequantized(*each[e], dtype))


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32])
def test_gate_and_up_apart_and_other_storages(storage):
    """As FSDP wants codes, in the dtype of the other parameters."""
    gate, up = (drawn(E, N, K, seed=seed).bfloat16() for seed in (0, 1))
    options = {"quant_type": "nf4", "quant_storage": storage}
    pairs = [[quantized(of[e], **options) for of in (gate, up)] for e in range(E)]
    weights = [[weight for weight, _ in pair] for pair in pairs]
    states = [[state for _, state in pair] for pair in pairs]
    packed = QuantizedWeights.from_bnb(weights, states, gate_up="concatenated")
    expected = [torch.cat([dequantized(*part, torch.bfloat16) for part in pair]) for pair in pairs]
    assert torch.equal(packed.unpack(), torch.stack(expected))


def test_a_checkpoint_has_the_same(tmp_path):
    """What bitsandbytes writes beside a weight, through a safetensors file."""
    safetensors = pytest.importorskip("safetensors.torch")
    weight, state = quantized(drawn(N, K).bfloat16(), quant_type="nf4", compress_statistics=True)
    tensors = {key.removeprefix("."): value for key, value in state.as_dict(packed=True).items()}
    safetensors.save_file({**tensors, "weight": weight}, tmp_path / "w.safetensors")
    held = safetensors.load_file(tmp_path / "w.safetensors")
    stored = QuantizedWeights.from_bnb([held.pop("weight")], [held])
    assert torch.equal(stored.unpack(), QuantizedWeights.from_bnb([weight], [state]).unpack())


def good():
    make = torch.Generator().manual_seed(0)
    q = torch.randint(0, 16, (N, K), generator=make)
    weight, state = bnb_tensor(q, torch.rand(N, K // 64, generator=make), "nf4")
    return {"weight": [weight], "quant_state": [state]}


SETTINGS = "quant_state.bitsandbytes__nf4"


def changed(tensors=(), **settings):
    """The arguments with other tensors of the state (None: none), or other settings."""
    arguments = good()
    (state,) = arguments["quant_state"]
    state |= dict(tensors)
    stored = json.loads(bytes(state[SETTINGS].tolist())) | settings
    text = json.dumps(stored).encode()
    state[SETTINGS] = torch.tensor(list(text), dtype=torch.uint8)
    arguments["quant_state"] = [{k: v for k, v in state.items() if v is not None}]
    return arguments


NESTED = {
    "absmax": torch.zeros(24, dtype=torch.uint8),
    "nested_absmax": torch.ones(1),
    "nested_quant_map": torch.linspace(-1, 1, 256),
}
DEEP = good()["quant_state"][0] | {SETTINGS: torch.full((10**5,), ord("["), dtype=torch.uint8)}
OF_NAN = {"nested_absmax": torch.full((1,), torch.nan)}
OF_NESTED = {"nested_blocksize": 256, "nested_offset": 1.0}


def test_good_arguments_are_taken():
    assert QuantizedWeights.from_bnb(**good()).shape == (1, N, K)
    assert QuantizedWeights.from_bnb(**changed(NESTED, **OF_NESTED)).unpack().abs().max() == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (changed(quant_type="int8"), r"quant_state\[0\] has quant_type 'int8', expected 'nf4' or"),
        (changed(blocksize=32), "blocksize 32, expected one of .64, 128"),
        (changed(blocksize=96), "blocksize 96"),
        (changed(blocksize=64.0), "blocksize 64.0"),
        (changed(quant_type=["nf4"]), "has quant_type .'nf4'., expected 'nf4' or"),
        (changed({"absmax": freed(torch.ones(24))}), ".0.: absmax has elements up to byte 96"),
        (changed({"quant_map": freed(torch.ones(16))}), ".0.: code has elements up to byte 64"),
        (changed(shape=[N, K, 1, 1]), r"shape \[8, 192, 1, 1\], expected two or three sizes"),
        (changed(shape=[2 * N, K]), r"weight\[0\] has 768 bytes for .*\(16, 192\), expected 1536"),
        (changed(shape=[2 * N, K // 2]), "96 columns .K. and blocks of 64, of which some end with"),
        (changed({"absmax": torch.ones(23)}), r"absmax of shape \(23,\), expected \(24,\)"),
        (changed({"absmax": torch.ones(24).half()}), "absmax of torch.float16 and no nested_abs"),
        (changed({"absmax": torch.full((24,), torch.nan)}), "absmax that is NaN"),
        (changed({"absmax": None}), r"quant_state\[0\] has no absmax"),
        (changed({"quant_map": torch.linspace(-1, 1, 16)}), "quant_map with other numbers"),
        (changed({"quant_map": CODES["bnb_fp4"]}), "quant_map with other numbers, expected bits"),
        (changed({"quant_map": torch.ones(17)}), r"quant_map of \(17,\)"),
        (changed(NESTED), "nested_blocksize None"),
        (changed(NESTED, nested_blocksize=256), "nested_offset None"),
        (changed(NESTED, nested_blocksize=256, nested_offset=10**400), "nested_offset 1000"),
        (changed(NESTED | OF_NAN, **OF_NESTED | {"nested_blocksize": 2**60}), "absmax that is NaN"),
        (changed(NESTED | {"absmax": torch.ones(24)}, **OF_NESTED), "absmax of torch.float32"),
        (changed(NESTED | {"nested_absmax": torch.ones(2)}, **OF_NESTED), "nested_absmax .2,. of"),
        (changed(NESTED | {"nested_quant_map": None}, **OF_NESTED), "quant_map of shape None"),
        (good() | {"quant_state": [{"absmax": 1}]}, "has .'absmax'., expected one of quant_state"),
        (good() | {"quant_state": [DEEP]}, "is no JSON"),
        (good() | {"quant_state": []}, "quant_state is a list, expected one for each expert"),
        (good() | {"quant_state": [None]}, "a NoneType without absmax, expected bitsandbytes' Q"),
        (good() | {"weight": [None]}, r"weight\[0\] is a NoneType, expected a Tensor, or gate"),
        (good() | {"weight": good()["weight"][0]}, "is a list without absmax"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        QuantizedWeights.from_bnb(**arguments)
