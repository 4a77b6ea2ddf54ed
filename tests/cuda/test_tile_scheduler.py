"""The dynamic tile scheduler: every tile is computed once, by whichever cluster."""

import pytest
import torch
from cases import Spec, same_bits
from checks import beside_other_work
from conftest import CUDA_DTYPES, needs_gpu
from quantized_cases import NATIVE, by_variants, dense, hopper_kernel, made

import moelora

pytestmark = [pytest.mark.gpu, needs_gpu]
ROWS = 256  # of the weights in a dynamically scheduled tile
# Of each form of weights a kernel with a static schedule, then those with a dynamic one.
FOUR_BITS = ("64x128x128", "96x256x128", "128x256x128", "144x256x128")
TILES = {
    NATIVE: ("96x128x64", "128x256x64", "144x256x64x2"),
    **dict.fromkeys(("mxfp4", "nvfp4", "int4_g32", "int4_g64_zp"), FOUR_BITS),
    **dict.fromkeys(("fp8_block_w8a8", "fp8_channel_w8a8"), ("64x128x128", "128x256x128x2")),
}
KERNELS = [(form, size) for form, sizes in TILES.items() for size in sizes[1:]]
TOKENS, EXPERTS = 330, 2
# Waves of tiles, and outputs that the last column of them lacks.
CASES = {
    "one and some": (1.1, 0),
    "two and some": (2.3, 64),
    "some": (0.3, 128),
    "most": (0.8, 192),
}


def hidden_of(case: str, size: str) -> int:
    """How many outputs make so many waves of tiles of one kernel."""
    waves, missing = CASES[case]
    tokens, *_ = map(int, size.split("x"))
    clusters = torch.cuda.get_device_properties("cuda").multi_processor_count
    blocks = EXPERTS * -(-(TOKENS // EXPERTS) // tokens)  # of CTAs, each of a column at a time
    return ROWS * max(2, round(waves * clusters / blocks)) - missing


@pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form, size", KERNELS)
def test_dynamically_scheduled_tiles_have_the_bits_of_others(form, size, case, dtype):
    """With a bias, with adapters, and in the fix-up pass for rows of B in either half of a tile."""
    names = [hopper_kernel(form, s, dtype) for s in (TILES[form][0], size)]
    hidden = hidden_of(case, size)
    sizes = {"hidden": hidden, "inter": 128, "experts": EXPERTS, "tokens": TOKENS, "top_k": 1}
    for mix, bias in (("absent", True), ("many", False)):
        p = made(Spec(**sizes, ranks=(16, 40), mix=mix, bias=bias), form, dtype).to("cuda")
        factors = dense(p).w2_lora_b
        for row in (None, hidden - 5, hidden - 150) if factors is not None else (None,):
            if row is not None:
                factors[0, :, row, 3] = float("nan")
            outputs = by_variants(names, p)
            assert same_bits(*outputs), (mix, row)
            assert torch.isfinite(outputs[0]).all() == (row is None)


@pytest.mark.parametrize("form", ["native", "mxfp4", "fp8_block_w8a8"])
def test_the_cluster_that_computes_a_tile_changes_no_bit(form):
    """Call after call, while work of another stream takes SMs from some clusters."""
    spec = Spec(tokens=1500, hidden=4096, inter=512, experts=6, ranks=(16, 40), mix="many")
    p = made(spec, form, torch.bfloat16).to("cuda")
    want = moelora.fused_experts_lora(**p.kwargs())
    for _ in beside_other_work(60):
        assert same_bits(moelora.fused_experts_lora(**p.kwargs()), want)
