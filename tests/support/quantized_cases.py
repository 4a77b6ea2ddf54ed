"""Problems with quantized weights: those of cases.py, their weights brought to a format here.

What a checkpoint holds is made with plain torch, so that packing has something to be held against.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace

import pytest
import torch
from cases import DTYPES, Problem, Spec
from checks import assert_close_to_ref
from conftest import on_gpu
from torch import Tensor

import moelora
from moelora import _C, QuantizedWeights
from moelora.operators.formats import FORMATS as ROWS
from moelora.reference import fused_experts_lora_ref, naive_fused_experts_lora

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
HALVES = (torch.bfloat16, torch.float16)
DEVICES_AND_DTYPES = [("cpu", dtype) for dtype in HALVES]
DEVICES_AND_DTYPES += [on_gpu("cuda", dtype) for dtype in HALVES]
GATE_UP = {"swigluoai": "interleaved", "relu2": None}  # others have gate rows before up rows


@dataclass(frozen=True)
class Format:
    """How a test quantizes; group None is all columns."""

    name: str
    group: int | None
    zeros: bool = False
    rows: int = 1  # of a block of FP8
    activations: str = "native"


FORMATS = {
    "mxfp4": Format("mxfp4", 32),
    "nvfp4": Format("nvfp4", 16),
    "int4_g32": Format("int4", 32),
    "int4_g64_zp": Format("int4", 64, zeros=True),
    "int4_g32_zp": Format("int4", 32, zeros=True),
    "int4_channel": Format("int4", None),
    "nf4": Format("nf4", 64),
    "fp4_of_bnb": Format("bnb_fp4", 64),
}
FP8_FORMATS = {
    "fp8_block": Format("fp8_block", 128, rows=128),
    "fp8_block_w8a8": Format("fp8_block", 128, rows=128, activations="fp8"),
    "fp8_b64": Format("fp8_block", 64, rows=64),
    "fp8_b64_w8a8": Format("fp8_block", 64, rows=64, activations="fp8"),
    "fp8_channel": Format("fp8_channel", None),
    "fp8_channel_w8a8": Format("fp8_channel", None, activations="fp8"),
    "fp8_tensor_w8a8": Format("fp8_tensor", None, activations="fp8"),
    "fp8_static_w8a8": Format("fp8_static", None, activations="fp8"),
}
ALL_FORMATS = {**FORMATS, **FP8_FORMATS}
NATIVE = "native"  # a form of weights beside those formats


def each(*forms: str):
    """Every dtype of native weights, on every device; of others, which a CPU makes native, one."""
    cpu = {form: DTYPES if form == NATIVE else HALVES[:1] for form in forms}
    places = [
        *((form, "cpu", dtype) for form in forms for dtype in cpu[form]),
        *(on_gpu(form, "cuda", dtype) for form in forms for dtype in HALVES),
    ]
    return pytest.mark.parametrize("form, device, dtype", places)


# A last bit of h decides to which of two numbers of e4m3 it goes, which lie up to 1/8 apart. In a
# layer a few may fall the other way, in a projection none.
STEPS = {"atol": 5e-2, "steps": 1 / 16}
INPUT_SCALE = 0.0125  # that cuts off a few of the largest of x


@dataclass
class Numbers:
    """Quantized numbers by rows: what every checkpoint says in its own order."""

    q: Tensor  # (E, N, K) int64, 0 to 15
    scales: Tensor  # (E, N, K / group): e8m0 (MXFP4), e4m3, or float32 that bfloat16 has, too
    zeros: Tensor | None  # (E, N, K / group) int64
    format: Format
    of_tensor: Tensor | None = None  # NVFP4: (E, 1), or (E, 2) of the halves of the rows

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """In float64, rounded once. INT4 scales are those of the dtype; NVFP4's numbers are rounded
        to float32 before."""
        groups = self.q.unflatten(2, (self.scales.size(2), -1))
        if self.format.name == "mxfp4":
            values, scales = E2M1.double()[groups], torch.exp2(self.scales.double() - 127)
        elif self.format.name == "nvfp4":
            halves = self.of_tensor.size(1)
            of_rows = self.of_tensor.repeat_interleave(self.q.size(1) // halves, 1)[..., None]
            numbers = (E2M1[groups] * self.scales.float()[..., None]).flatten(2)
            return (numbers * of_rows).to(dtype)
        elif self.format.name in CODES:
            values = CODES[self.format.name][groups] * self.scales[..., None]
            return values.flatten(2).to(dtype)
        else:
            zeros = 8 if self.zeros is None else self.zeros[..., None]
            values, scales = (groups - zeros).double(), self.scales.to(dtype).double()
        return (values * scales[..., None]).flatten(2).to(dtype)

    def pack(self, dtype: torch.dtype, gate_up: str | None = None) -> QuantizedWeights:
        options, make = {"gate_up": gate_up, "dtype": dtype}, QuantizedWeights
        name = self.format.name
        if name == "mxfp4":
            return make.from_mxfp4(by_bytes(self.q), self.scales, **options)
        if name == "nvfp4":
            options["weight_scale_2"] = self.of_tensor
            return make.from_nvfp4(by_bytes(self.q), self.scales, **options)
        if name in CODES:
            parts = [bnb_tensor(*of, name) for of in zip(self.q, self.scales, strict=True)]
            return make.from_bnb(*zip(*parts, strict=True), **options)
        zeros = self.zeros
        if zeros is not None:
            zeros = by_words(zeros.transpose(1, 2), pad=True).transpose(1, 2)
        return make.from_compressed_tensors(by_words(self.q), self.scales, zeros, **options)


@dataclass
class EightBits:
    """FP8 numbers: with a scale for each row and block of columns, alike where blocks are."""

    q: Tensor  # (E, N, K) float8_e4m3fn
    scales: Tensor  # (E, N, blocks) float32
    of_rows: Tensor  # (N,) which block of rows a row is of
    wide: int  # columns of a block
    format: Format

    def spread(self) -> Tensor:
        return self.scales.repeat_interleave(self.wide, 2)[..., : self.q.size(2)]

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """In float64, rounded once. Scales are those of the dtype, of float16 256 times as much."""
        up = 256 if dtype == torch.float16 else 1
        scales = (self.spread() * up).to(dtype).double() / up
        return (self.q.double() * scales).to(dtype)

    def pack(self, dtype: torch.dtype, gate_up: str | None = None) -> QuantizedWeights:
        options = {"activations": self.format.activations, "gate_up": gate_up, "dtype": dtype}
        if self.format.name == "fp8_channel":
            return QuantizedWeights.from_fp8_channel(self.q, self.scales, **options)
        if self.format.name in ("fp8_tensor", "fp8_static"):
            scale = INPUT_SCALE if self.format.name == "fp8_static" else None
            return QuantizedWeights.from_fp8_tensor(self.q, self.scales[:, 0], scale, **options)
        row = torch.arange(len(self.of_rows), device="cpu")
        first = torch.searchsorted(self.of_rows, row[: int(self.of_rows[-1]) + 1])
        runs_on = torch.equal(self.of_rows, row // self.format.rows)
        high, scales = self.format.rows, self.scales[:, first]
        if not runs_on and gate_up != "concatenated":
            high, scales = 1, self.scales
        return QuantizedWeights.from_fp8_block(self.q, scales, block=(high, self.wide), **options)


def to_fp8(w: Tensor, format: Format, halves: bool) -> EightBits:
    """With `halves` blocks begin anew at the middle row."""
    experts, rows, columns = w.shape
    row = torch.arange(rows)
    if format.name in ("fp8_tensor", "fp8_static"):
        of_rows = torch.zeros_like(row)
    elif halves:
        half = rows // 2
        of_rows = row // half * -(-half // format.rows) + row % half // format.rows
    else:
        of_rows = row // format.rows
    wide = format.group or columns
    columns_of = torch.arange(columns) // wide
    largest = torch.full((experts, int(of_rows[-1]) + 1, -(-columns // wide)), 2.0**-20)
    place = (of_rows[:, None] * largest.size(2) + columns_of).flatten().expand(experts, -1)
    largest = largest.flatten(1).scatter_reduce(1, place, w.float().abs().flatten(1), "amax")
    scales = (largest / 448).view(experts, -1, -(-columns // wide))[:, of_rows]
    made = EightBits(w, scales, of_rows, wide, format)
    return replace(made, q=(w.float() / made.spread()).clamp(-448, 448).to(torch.float8_e4m3fn))


def fp8_numbers(name: str, shape=(2, 128, 160), halves: bool = False) -> EightBits:
    make = torch.Generator().manual_seed(0)
    return to_fp8(torch.randn(shape, generator=make), FP8_FORMATS[name], halves)


CODES = {f.kernel: torch.tensor(f.codes) for f in ROWS if "nf4" in f.kernel or "bnb" in f.kernel}


def bnb_tensor(q: Tensor, absmax: Tensor, name: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Codes (N, K) of bitsandbytes and their absmax (N, K / block), as a checkpoint has them."""
    kind = name.removeprefix("bnb_")
    settings = {"quant_type": kind, "blocksize": q.numel() // absmax.numel()}
    settings |= {"shape": list(q.shape), "dtype": "bfloat16"}
    state = {"absmax": absmax.reshape(-1), "quant_map": CODES[name].clone()}
    text = json.dumps(settings).encode()
    text = torch.tensor(list(text), dtype=torch.uint8, device="cpu")
    state[f"quant_state.bitsandbytes__{kind}"] = text
    return by_bytes(q.unflatten(1, (-1, 2)).flip(2).flatten(1)).reshape(-1, 1), state


def by_bytes(q: Tensor) -> Tensor:
    """Two numbers of the last dimension in a byte, the first in the low nibble."""
    return (q[..., 0::2] | q[..., 1::2] << 4).to(torch.uint8)


def by_words(q: Tensor, order=range(8), pad: bool = False) -> Tensor:
    """Eight numbers of the last dimension in an int32; nibble i is number order[i] of them."""
    if pad:
        q = torch.nn.functional.pad(q, (0, -q.size(-1) % 8))
    if list(order) != list(range(8)):
        q = q.unflatten(-1, (-1, 8))[..., list(order)].flatten(-2)
    return by_bytes(q).clone(memory_format=torch.contiguous_format).view(torch.int32)


def quantize(w: Tensor, format: Format, seed: int = 0, halves: bool = False) -> Numbers | EightBits:
    """Float weights (E, N, K) to the nearest numbers of a format, with scales for their groups."""
    if format.name.startswith("fp8"):
        return to_fp8(w, format, halves)
    group = format.group if format.group and w.size(2) % format.group == 0 else w.size(2)
    groups = w.float().unflatten(2, (-1, group))
    largest = groups.abs().amax(-1).clamp(min=2.0**-20)
    if format.name == "mxfp4":
        exponents = (torch.floor(torch.log2(largest)) - 2).clamp(-40, 1)
        scaled = groups / torch.exp2(exponents)[..., None]
        between = (E2M1[1:8] + E2M1[:7]) / 2
        q = torch.bucketize(scaled.abs(), between) | (scaled < 0).long() << 3
        return Numbers(q.flatten(2), (exponents + 127).to(torch.uint8), None, format)
    if format.name == "nvfp4":
        # The largest scale of a tensor is 448; tensors of experts differ.
        of_tensor = (largest.flatten(1).amax(1) / (6 * 448))[:, None].float()
        scales = (largest / 6 / of_tensor[..., None]).to(torch.float8_e4m3fn)
        unit = (scales.float() * of_tensor[..., None]).clamp(min=2.0**-60)[..., None]
        between = (E2M1[1:8] + E2M1[:7]) / 2
        q = torch.bucketize((groups / unit).abs(), between) | (groups < 0).long() << 3
        return Numbers(q.flatten(2), scales, None, format, of_tensor)
    if format.name in CODES:
        # Of two codes that stand for 0, the first.
        order = (numbers := CODES[format.name].unique())[:, None].eq(CODES[format.name])
        order = order.int().argmax(1)
        unit = groups / largest[..., None]
        q = order[torch.bucketize(unit, (numbers[1:] + numbers[:-1]) / 2)]
        return Numbers(q.flatten(2), largest, None, format)
    scales = (largest / 7).bfloat16().float()
    shift = 8
    zeros = None
    if format.zeros:
        make = torch.Generator().manual_seed(seed)
        zeros = torch.randint(5, 12, scales.shape, generator=make)
        shift = zeros[..., None]
    q = (torch.round(groups / scales[..., None]) + shift).clamp(0, 15).long()
    return Numbers(q.flatten(2), scales, zeros, format)


def fitted(spec: Spec, dtype: torch.dtype, unit: int = 32) -> Spec:
    """A spec whose sizes are multiples of 32, as a format's groups want."""
    hidden, inter = (-(-size // unit) * unit for size in (spec.hidden, spec.inter))
    return replace(spec, hidden=hidden, inter=inter, dtype=dtype)


@dataclass
class Quantized:
    """A problem whose dense weights are the numbers that its quantized ones stand for."""

    dense: Problem
    w13: QuantizedWeights
    w2: QuantizedWeights
    w13_plain: QuantizedWeights  # rows in plain order, for a projection by itself

    def to(self, device) -> Quantized:
        weights = (w.to(device) for w in (self.w13, self.w2, self.w13_plain))
        return Quantized(self.dense.to(device), *weights)

    def base(self) -> Quantized:
        return replace(self, dense=self.dense.base())

    @property
    def is_w8a8(self) -> bool:
        return any(w.x_format != "native" for w in (self.w13, self.w2))

    def kwargs(self) -> dict:
        return {**self.dense.kwargs(), "w13": self.w13, "w2": self.w2}

    def gemm_kwargs(self, projection: str = "w13", mul_routed_weight: bool = False) -> dict:
        arguments = self.dense.gemm_kwargs(projection, mul_routed_weight)
        return {**arguments, "w": self.w13_plain if projection == "w13" else self.w2}


def build(
    spec: Spec, format: Format, dtype: torch.dtype, format2: Format | None = None
) -> Quantized:
    """The problem of a spec with w13 of one format and w2 of the same, or of another."""
    format2 = format2 or format
    narrow = any(f.name == "fp8_block" and f.group == 64 for f in (format, format2))
    unit = max(f.group if f.name in CODES else 64 if narrow else 32 for f in (format, format2))
    p = fitted(spec, dtype, unit).build()
    gate_up = GATE_UP.get(spec.activation, "concatenated")
    if narrow and gate_up == "interleaved":  # 128 rows are gate and up rows of two tiles
        format, format2 = replace(format, rows=128), replace(format2, rows=128)
    w13 = quantize(p.w13, format, spec.seed, gate_up == "concatenated")
    w2 = quantize(p.w2, format2, spec.seed + 1)
    dense = replace(p, w13=w13.dequantized(dtype), w2=w2.dequantized(dtype))
    return Quantized(dense, w13.pack(dtype, gate_up), w2.pack(dtype), w13.pack(dtype))


def made(spec: Spec, form: str, dtype: torch.dtype) -> Problem | Quantized:
    """Quantized weights ask for sizes that are multiples of 32."""
    if form == NATIVE:
        return replace(spec, dtype=dtype).build()
    return build(spec, ALL_FORMATS[form], dtype)


def by_variants(names: list[str], p: Problem | Quantized) -> list[Tensor]:
    """A layer's outputs with each of some kernels of Hopper, which must serve it."""
    if not set(names) <= set(_C.usable()):
        pytest.skip("tiles of Hopper")
    outputs = []
    try:
        for name in names:
            _C.force_variant(name)
            outputs.append(moelora.fused_experts_lora(**p.kwargs()))
            assert name in _C.last_plan()
    finally:
        _C.force_variant(None)
    return outputs


def kernels_of(form: str) -> str:
    """The word for weights of a form in the names of kernels that multiply them; native: none."""
    if form == NATIVE:
        return ""
    name, activations = ALL_FORMATS[form].name, ALL_FORMATS[form].activations
    if name.startswith("fp8"):
        return "w8a8" if activations == "fp8" else "w8a16"
    return "nf4" if name in CODES else name


def forms_of(variant: str) -> list[str]:
    """Forms of the layers that a kernel is a part of: for most kernels native weights."""
    word = re.match(r"(?:gemm|back|decode)_b?f16_(?!sm)([a-z][a-z0-9]*)_(?:\w+_)?sm\d+$", variant)
    if word is None:
        return [NATIVE]
    forms = {form: f for form, f in ALL_FORMATS.items() if kernels_of(form) == word[1]}
    assert forms, f"{variant}: no form of ALL_FORMATS has weights for it; add one"
    # Kernels of Hopper for e4m3 x have scales of 128 of its columns.
    portable = variant.endswith("sm80") or word[1] != "w8a8"
    return [form for form, f in forms.items() if portable or f.group != 64]


def has_four_bits(form: str) -> bool:
    """As the table of formats has it."""
    name = NATIVE if form == NATIVE else ALL_FORMATS[form].name
    return any(row.bits == 4 and row.kernel == name for row in ROWS)


def of_each_kernel() -> list[str]:
    """A form for each word of `kernels_of`, native weights first; with zero points if any has."""
    forms: dict[str, str] = {}
    for form in (NATIVE, *sorted(ALL_FORMATS, key=lambda form: not ALL_FORMATS[form].zeros)):
        forms.setdefault(kernels_of(form), form)
    missing = {row.kernel for row in ROWS} - {NATIVE, "fp8", *(f.name for f in FORMATS.values())}
    assert not missing, f"no form of ALL_FORMATS has weights of {missing}; add one"
    return list(forms.values())


def hopper_kernel(form: str, size: str, dtype: torch.dtype) -> str:
    """The GEMM of Hopper with tiles of a size, for weights of a form."""
    kind = "bf16" if dtype == torch.bfloat16 else "f16"
    return "_".join(word for word in ("gemm", kind, kernels_of(form), size, "sm90") if word)


def dense(p: Problem | Quantized) -> Problem:
    return p.dense if isinstance(p, Quantized) else p


def with_dense(p: Problem | Quantized, d: Problem) -> Problem | Quantized:
    """Everything but quantized weights as in `d`."""
    return replace(p, dense=d) if isinstance(p, Quantized) else d


def is_w8a8(p: Problem | Quantized) -> bool:
    return isinstance(p, Quantized) and p.is_w8a8


def check_layer(y: Tensor, p: Problem | Quantized, there: Problem | Quantized | None = None):
    """`there` is p on the device that the yardstick is computed on; None: on that of p."""
    like = there or p
    naive = naive_fused_experts_lora(**(like if is_w8a8(p) else dense(like)).kwargs())
    steps = STEPS if is_w8a8(p) else {}
    assert_close_to_ref(y, fused_experts_lora_ref(**p.kwargs()), naive, y.dtype, **steps)


def through_a_file(weights: QuantizedWeights, path) -> QuantizedWeights:
    """Of the state dict that a checkpoint file, made on the spot, brings back."""
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(weights.state_dict("experts.w13."), path)
    return QuantizedWeights.from_state_dict(safetensors.load_file(path), "experts.w13.")


def refusal_tests(good: dict[str, dict], bad: list[tuple[str, dict, str]], shape: tuple):
    """Two tests: constructors take `good` arguments, and of a `bad` change name the tensor."""

    @pytest.mark.parametrize("name", good)
    def is_right(name):
        assert getattr(QuantizedWeights, name)(**good[name]).shape == shape

    ids = [f"{name}-{i}" for i, (name, *_) in enumerate(bad)]

    @pytest.mark.parametrize("case", range(len(bad)), ids=ids)
    def names_its_tensor(case):
        name, changes, message = bad[case]
        with pytest.raises(ValueError, match=message):
            getattr(QuantizedWeights, name)(**{**good[name], **changes})

    return is_right, names_its_tensor
