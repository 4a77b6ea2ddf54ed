"""16-bit weights that are rounded to a format."""

import pytest
import torch
from checks import freed
from quantized_cases import HALVES

from moelora import QuantizedWeights
from moelora.weights.rounding import ROUNDINGS

# The largest distance of neighbors in a format, relative to the largest number of a group.
STEPS = {"nf4": 0.31, "fp4": 0.34, "mxfp4": 0.5, "nvfp4": 0.36, "int4": 1 / 7, "fp8": 1 / 14}


def drawn(*shape):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.05
    w[0, 1], w[1, 2, 0] = 0, 3
    return w


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("format", ROUNDINGS)
def test_numbers_are_near_and_stay_when_rounded_again(format, dtype):
    w = drawn(2, 6, 192).to(dtype)
    rounded = QuantizedWeights.from_dense(w, format, dtype=dtype).unpack()
    largest = w.float().unflatten(2, (-1, 64)).abs().amax(3, keepdim=True)
    if format == "fp8":
        largest = w.float().abs().amax(2, keepdim=True)[..., None]
    error = (rounded.float() - w.float()).unflatten(2, (-1, 64)).abs()
    assert (error <= largest * (STEPS[format] / 2 + 2.0**-7)).all()
    assert (error.sum() > 0) and not rounded[0, 1].any()
    again = QuantizedWeights.from_dense(rounded, format, dtype=dtype).unpack()
    assert (
        (again - rounded).float().abs() <= 2.0**-7 * rounded.float().abs() + 1e-6
    ).float().mean() > 0.99


@pytest.mark.parametrize("format", ["nf4", "fp4"])
def test_bitsandbytes_rounds_the_same(format):
    functional = pytest.importorskip("bitsandbytes.functional")
    w = drawn(2, 64, 192)
    each = [functional.quantize_4bit(one, quant_type=format) for one in w]
    theirs = QuantizedWeights.from_bnb(*zip(*each, strict=True))
    assert torch.equal(QuantizedWeights.from_dense(w, format).data, theirs.data)


def test_a_sequence_makes_experts_one_by_one():
    asked = []

    class Lazy(list):
        def __getitem__(self, expert):
            asked.append(expert)
            return drawn(3, 6, 192)[expert]

    lazy = Lazy(range(3))
    packed = QuantizedWeights.from_dense(lazy, "nf4", gate_up="concatenated")
    assert asked[-3:] == [0, 1, 2]
    whole = QuantizedWeights.from_dense(drawn(3, 6, 192), "nf4", gate_up="concatenated")
    assert torch.equal(packed.data, whole.data)


@pytest.mark.parametrize(
    ("w", "format", "message"),
    [
        (torch.zeros(1, 2, 64), "nf5", "format is 'nf5', expected one of 'nf4', 'fp4', 'mxfp4'"),
        (torch.zeros(1, 2, 96), "nf4", "K is 96, expected a multiple of 64 for nf4"),
        (torch.zeros(2, 64), "nf4", r"w\[0\] has shape \(64,\), expected"),
        (torch.zeros(0, 2, 64), "nf4", "w has no experts"),
        ([torch.zeros(2, 64), torch.zeros(4, 64)], "int4", r"w\[1\] has shape \(4, 64\), expected"),
        (torch.zeros(1, 2, 64, dtype=torch.int32), "fp8", r"w\[0\] has dtype torch.int32"),
        (torch.full((1, 2, 64), torch.inf), "mxfp4", r"w\[0\] has a NaN or an infinity"),
        (torch.zeros(1, 2, 64).double(), "nf4", r"w\[0\] has dtype torch.float64, expected float"),
        (torch.zeros(1, 2, 64).to(torch.float8_e4m3fn), "nf4", "has dtype torch.float8_e4m3fn"),
        (torch.full((1, 2, 64), 12.5), "mxfp4", "of magnitude 12.5, expected at most 12 for mxfp4"),
        (torch.full((1, 2, 64), 1e5), "nf4", "of magnitude 100000, expected at most 65504 for nf4"),
        ([torch.zeros(2, 64), freed(torch.zeros(2, 64))], "fp8", r"w\[1\] has elements up to byte"),
    ],
)
def test_bad_weights_are_named(w, format, message):
    with pytest.raises(ValueError, match=message):
        QuantizedWeights.from_dense(w, format)
