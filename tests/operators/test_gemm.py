"""fused_moe_lora_gemm: one projection, base and LoRA in one pass, against the fp64 loop."""

from dataclasses import replace

import pytest
import torch
from cases import EDGE_CASES, Spec, among, random_specs
from checks import naming
from holding import hold_gemm

import moelora
from moelora import _C


@pytest.mark.parametrize("name", EDGE_CASES)
def test_edge_cases(name, device, dtype):
    p = replace(EDGE_CASES[name], dtype=dtype).build()
    for projection in ("w13", "w2"):
        for mul_routed_weight in (False, True):
            hold_gemm(p, device, projection, mul_routed_weight)


def test_random_problems(device, dtype):
    for spec in random_specs(120, first_seed=1000, dtypes=(dtype,)):
        with naming(spec):
            hold_gemm(spec.build(), device, ("w13", "w2")[spec.seed % 2], spec.seed % 3 == 0)


@pytest.mark.parametrize("slices", [3, 4])
def test_more_slices(slices, device, dtype):
    """Projections such as q, k, v: each slice of N columns has its own pair."""
    p = Spec(
        tokens=9, inter=slices * 10, slices=slices, activation="relu2", mix="many", dtype=dtype
    ).build()
    assert len(p.w13_lora_a) == slices
    hold_gemm(p, device, "w13", False)


def test_input_per_token_is_input_per_row(device, dtype):
    """x (M, K) means the same as its rows repeated top_k times, x (M * top_k, K)."""
    p = Spec(tokens=11, top_k=3, dtype=dtype).build().to(device)
    arguments = p.gemm_kwargs("w13")
    per_token = moelora.fused_moe_lora_gemm(**arguments)
    arguments["x"] = arguments["x"].repeat_interleave(3, dim=0)
    per_row = moelora.fused_moe_lora_gemm(**arguments)
    assert torch.equal(per_token, per_row)


# Tensors of more than 2^31 elements (4.7 GB each): on a CPU only the touched pages take memory.
OFFSETS = {  # experts, adapters, and the sizes of a layer
    "w13_lora_a": (256, 20, {"hidden": 7168, "inter": 32, "ranks": (64,)}),
    "w13_lora_b": (256, 20, {"hidden": 64, "inter": 3584, "ranks": (64,)}),
    "w13": (1024, 1, {"hidden": 7168, "inter": 160, "ranks": (1,)}),
}


@pytest.mark.parametrize("tensor", OFFSETS)
def test_offsets_beyond_int32(tensor, device):
    """A row of adapter 19 and expert 255 starts more than 2^31 elements into its stack."""
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 20e9:
        pytest.skip("needs 20 GB of free GPU memory")
    experts, slots, sizes = OFFSETS[tensor]
    spec = Spec(tokens=4, top_k=1, experts=3, mix="one", slices=1, dtype=torch.bfloat16, **sizes)
    ids = torch.tensor([[0], [2], [1], [2]], dtype=torch.int32)
    p = replace(spec.build(), topk_ids=ids, w2=None, w2_lora_a=None, w2_lora_b=None)
    used = [0, experts // 2, experts - 1]
    large = among(p.to(device), experts, used, slots, [slots - 1])
    assert getattr(large, tensor).numel() > 2**31
    y = hold_gemm(p, device, "w13", False)
    assert torch.equal(moelora.fused_moe_lora_gemm(**large.gemm_kwargs("w13")), y)


@pytest.mark.gpu
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("tokens, tile", [(2048, "144x256x64x2"), (16, "16x128x64")])
def test_projections_take_the_tiles_of_layers(tokens, tile, weighted):
    """Hopper's largest kernels store flat rows, with routing weights and without."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("tiles of Hopper")
    x, w = torch.randn(tokens, 64), torch.randn(4, 256, 64)
    weights, ids = torch.rand(tokens, 4).topk(2)
    arguments = [v.to("cuda", torch.bfloat16) for v in (x, w)] + [weights.cuda(), ids.cuda()]
    got = moelora.fused_moe_lora_gemm(*arguments, mul_routed_weight=weighted)
    assert _C.last_plan().startswith(f"w=gemm_bf16_{tile}_sm90 ")
    x, w = (v.double() for v in arguments[:2])
    ref = torch.einsum("mk,mjnk->mjn", x, w[arguments[3]])
    ref = ref * arguments[2].double().unsqueeze(-1) if weighted else ref
    assert (got.double() - ref).abs().max() <= 2**-8 * ref.abs().max()


@pytest.mark.gpu
def test_tiles_of_neighboring_columns_have_slices_of_their_own():
    """More tiles than Hopper schedules one by one, of few k steps; a tile in two slices."""
    sizes = {"tokens": 6000, "experts": 4, "hidden": 136, "inter": 1088, "ranks": (24, 32)}
    hold_gemm(Spec(**sizes, dtype=torch.bfloat16, mix="many").build(), "cuda", "w13", False)
