"""Layers and projections of quantized weights, and their way to tiles and back."""

from dataclasses import replace
from functools import cache, partial

import torch
from cases import Problem, Spec

import moelora
from benchmarks.grid.calls import DTYPES, plans, portable, present, with_plans
from moelora.bench.formats import FORMATS as DRAWN

# Format: columns of a group (0: all), zero points.
FORMATS = {
    "mxfp4": (32, False),
    "nvfp4": (16, False),
    "nf4": (64, False),
    "int4": (64, False),
    "int4 zeros": (0, True),
    "int4 of 32": (32, False),
    "int4 of 32 zeros": (32, True),
}
FP8 = {
    "fp8": ("from_fp8_block", "fp8"),
    "fp8 native": ("from_fp8_block", "native"),
    "fp8 rows": ("from_fp8_channel", "fp8"),
    "fp8 static": ("from_fp8_tensor", "fp8"),
}


def kernels_of(name: str) -> str:
    """The name of a format in the names of kernels."""
    fp8 = "w8a16" if name == "fp8 native" else "w8a8"
    return fp8 if name in FP8 else name.split()[0]


KERNELS = {kernels_of(name) for name in (*FORMATS, *FP8)}
WIDE = Spec(tokens=130, top_k=3, experts=5, hidden=320, inter=192, mix="half_base", bias=True)
SPECS = {
    "whole": WIDE,
    "halves": replace(WIDE, tokens=9, hidden=160, inter=96, ranks=(16, 40)),
    "interleaved": replace(WIDE, tokens=33, inter=96, activation="swigluoai", slices=1),
    "relu2": replace(WIDE, tokens=33, activation="relu2", slices=1, bias=False),
}


def packed(w: torch.Tensor, name: str, gate_up: str | None, seed: int):
    """Weights of the shape and dtype of `w`, of numbers that a seed draws."""
    make = torch.Generator().manual_seed(seed)
    if name in FP8:
        return packed_fp8(w, name, gate_up, make)
    (experts, rows, columns), (group, zeros) = w.shape, FORMATS[name]
    groups = columns // (group if group and columns % group == 0 else columns)
    options = {"gate_up": gate_up, "dtype": w.dtype}

    def draw(low, high, *shape, dtype=torch.int32):
        return torch.randint(low, high, shape, generator=make, dtype=dtype).to(w.device)

    if name == "mxfp4":
        blocks = draw(0, 256, experts, rows, columns // 2, dtype=torch.uint8)
        scales = draw(118, 122, experts, rows, groups, dtype=torch.uint8)
        return moelora.QuantizedWeights.from_mxfp4(blocks, scales, **options)
    if name == "nvfp4":
        values = draw(0, 256, experts, rows, columns // 2, dtype=torch.uint8)
        scales = draw(40, 64, experts, rows, groups, dtype=torch.uint8)
        of_tensor = (torch.rand(experts, generator=make) * 0.02 + 0.01).to(w.device)
        make_weights = moelora.QuantizedWeights.from_nvfp4
        return make_weights(values, scales, weight_scale_2=of_tensor, **options)
    if name == "nf4":
        drawn = DRAWN["nf4"].draw(experts, rows, columns, make, w.dtype)
        return DRAWN["nf4"].pack(*(t.to(w.device) for t in drawn), **options)
    words = draw(-(2**31), 2**31, experts, rows, columns // 8)
    scales = torch.rand(experts, rows, groups, generator=make).to(w) * 0.02
    points = draw(-(2**31), 2**31, experts, -(-rows // 8), groups) if zeros else None
    make_weights = moelora.QuantizedWeights.from_compressed_tensors
    return make_weights(words, scales, points, **options)


def packed_fp8(w: torch.Tensor, name: str, gate_up: str | None, make: torch.Generator):
    experts, rows, columns = w.shape
    constructor, activations = FP8[name]
    size = torch.randint(0, 127, w.shape, generator=make, dtype=torch.uint8)
    sign = torch.randint(0, 2, w.shape, generator=make, dtype=torch.uint8) << 7
    values = (size | sign).to(w.device).view(torch.float8_e4m3fn)
    halves = 2 if gate_up == "concatenated" else 1
    shape = {
        "from_fp8_block": (experts, halves * -(-(rows // halves) // 128), -(-columns // 128)),
        "from_fp8_channel": (experts, rows),
        "from_fp8_tensor": (experts,),
    }[constructor]
    scales = (torch.rand(shape, generator=make) * 2e-4).to(w.device)
    given = (values, scales, 0.0125) if name == "fp8 static" else (values, scales)
    pack = getattr(moelora.QuantizedWeights, constructor)
    return pack(*given, activations=activations, gate_up=gate_up, dtype=w.dtype)


def calls(device: str, name: str, spec: Spec):
    p: Problem = spec.build().to(device)
    gate_up = {"swigluoai": "interleaved", "relu2": None}.get(spec.activation, "concatenated")
    w13 = cache(partial(packed, p.w13, name, gate_up, 1))  # made in a call: a build may have none
    w2 = cache(partial(packed, p.w2, name, None, 2))

    def layer(problem: Problem):
        weights = {"w13": w13(), "w2": w2()}
        return moelora.fused_experts_lora(**present(problem.kwargs()) | weights)

    def gemm():
        return moelora.fused_moe_lora_gemm(**present(p.gemm_kwargs("w2")) | {"w": w2()})

    yield "tiles", lambda: w13().data
    yield "unpacked", lambda: w13().unpack()
    yield from with_plans({"layer": partial(layer, p), "gemm w2": gemm}, plans(device, spec.dtype))
    yield from with_plans({"layer, base": partial(layer, p.base())}, portable(device))


def quantized(device):
    """Every format in every order of rows; w2 is of plain order."""
    for shape, spec in SPECS.items():
        for name in (*FORMATS, *FP8):
            for word, dtype in DTYPES["cuda"].items():
                group = f"{shape} {name} {word}"
                yield group, partial(calls, device, name, replace(spec, dtype=dtype))
