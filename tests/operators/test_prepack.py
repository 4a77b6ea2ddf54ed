"""prepack_weights: the tiles, and that every operator takes them in place of plain weights."""

from dataclasses import replace

import pytest
import torch
from cases import Spec, same_bits
from holding import hold_gemm, hold_layer

import moelora

PACKABLE = {"hidden": 128, "inter": 64, "experts": 3}


def packed(arguments: dict, *names: str) -> dict:
    return {**arguments, **{name: moelora.prepack_weights(arguments[name]) for name in names}}


@pytest.mark.parametrize("shape", [(1, 64, 64), (3, 128, 64), (2, 64, 192), (5, 320, 256)])
def test_tiles_and_back(shape, device, dtype):
    w = torch.randn(shape).to(device, dtype)
    weights = moelora.prepack_weights(w)
    experts, rows, columns = shape
    assert (weights.shape, weights.dtype, weights.device) == (w.shape, w.dtype, w.device)
    assert weights.data.shape == (experts, rows // 64, columns // 64, 64, 64)
    for i in range(rows // 64):
        for j in range(columns // 64):
            tile = w[:, 64 * i : 64 * (i + 1), 64 * j : 64 * (j + 1)]
            assert same_bits(weights.data[:, i, j], tile)
    assert same_bits(weights.unpack(), w)


def test_strided_weights(device):
    wide = torch.randn(6, 128, 64 + 8, device=device, dtype=torch.bfloat16)
    w = wide[::2, :, 4 : 4 + 64]
    assert same_bits(moelora.prepack_weights(w).unpack(), w)


def packing(operator, names):
    return lambda **arguments: operator(**packed(arguments, *names))


@pytest.mark.parametrize("names", [("w13",), ("w2",), ("w13", "w2")])
@pytest.mark.parametrize("activation", ["silu", "gelu", "swigluoai", "relu2"])
@pytest.mark.parametrize("tokens", [1, 9, 150])
def test_layer_with_packed_weights(names, activation, tokens, device, dtype):
    spec = Spec(**PACKABLE, tokens=tokens, dtype=dtype, bias=True, mix="half_base")
    p = replace(spec, activation=activation, slices=1 + (activation != "relu2")).build()
    y = hold_layer(p, device, packing(moelora.fused_experts_lora, names))
    base = moelora.fused_experts_lora(**packed(p.to(device).base().kwargs(), *names))
    rows = p.token_lora_mapping < 0
    assert same_bits(y.cpu()[rows], base.cpu()[rows])


def test_gemm_with_packed_weights(device, dtype):
    p = Spec(**PACKABLE, tokens=9, dtype=dtype).build()
    hold_gemm(p, device, "w13", False, packing(moelora.fused_moe_lora_gemm, ("w",)))
