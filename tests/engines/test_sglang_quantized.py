"""SGLang's quantized layers become tiles without loss, or stay as they are: FP8 of blocks, and four
bits in the order of Marlin's kernels.

That order follows `get_weight_perm`, `marlin_weights` and `marlin_permute_scales` of vLLM's
quantization/utils/marlin_utils*.py, and `nvfp4_marlin_process_*` of marlin_utils_fp4.py.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from cases import Spec
from quantized_cases import ALL_FORMATS, Format, fitted, quantize
from sglang_stand_in import OWN, dispatched, make_base_layer, run_layer, runner_of
from test_sglang_sources import RELEASES as SGLANG
from torch.nn import Parameter
from torch.nn.functional import pad
from vllm_sources import RELEASES as VLLM
from vllm_sources import Sources

import moelora
import moelora.integrations.sglang as moelora_sglang
from moelora.integrations.sglang import marlin
from moelora.weights.readers import nibbles

pytest_plugins = ["sglang_fixtures"]

BF16 = torch.bfloat16
SPEC = Spec(tokens=9, hidden=128, inter=64, dtype=BF16, scalings=False, mix="all_different")
FORMATS = {
    "nvfp4": ALL_FORMATS["nvfp4"],
    "int4": ALL_FORMATS["int4_g32"],
    "int4_channel": Format("int4", None),
    "fp8": ALL_FORMATS["fp8_block_w8a8"],
}
MARLIN = [form for form in FORMATS if form != "fp8"]


# ---- Marlin's order ----


def weight_perm():
    """(1024,): numbers of four blocks of 16 x 16, in the order in which words have them."""
    perm = []
    for lane in range(32):
        pairs = [2 * (lane % 4), 2 * (lane % 4) + 1, 2 * (lane % 4 + 4), 2 * (lane % 4 + 4) + 1]
        first = [16 * row + lane // 4 + 8 * block for block in (0, 1) for row in pairs]
        perm += [place + 256 * block for block in range(4) for place in first]
    return torch.tensor(perm).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].flatten()


def words(q):
    """(N, K) -> (K / 16, 2 N) int32."""
    rows, columns = q.shape
    tiles = q.t().reshape(columns // 16, 16, rows // 16, 16).permute(0, 2, 1, 3)
    perm = weight_perm()
    flat = tiles.reshape(-1, perm.numel())[:, perm].reshape(columns // 16, -1, 8)
    total = (flat.long() << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


def permuted(scales, single=False):
    """(N, groups) -> (groups, N)."""
    grouped = [i + 8 * j for i in range(8) for j in range(8)]
    alone = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    order = alone if single else grouped
    rows_last = scales.t().contiguous()
    return rows_last.reshape(-1, len(order))[:, order].reshape(rows_last.shape)


def nvfp4_scales(scales):
    """(N, K / 16) e4m3 -> (K / 16, N), the bytes that Marlin multiplies by."""
    halves = permuted(scales.float()).half()
    halves = halves.view(-1, 4)[:, [0, 2, 1, 3]].view(halves.shape)
    short = (halves * 2**7).view(torch.int16) << 1
    return short.view(torch.float8_e4m3fn)[:, 1::2].contiguous()


# ---- layers ----


def parameter(tensors):
    return Parameter(torch.stack(list(tensors)), requires_grad=False)


class Made:
    """`layer` is what SGLang holds of a problem after `process_weights_after_loading`.

    Marlin pads the intermediate size of NVFP4 experts without a gate, to multiples of `pad`.
    """

    def __init__(self, form, spec=SPEC, pad=1):
        self.form = form
        self.dense = p = fitted(spec, spec.dtype, 128 if form == "fp8" else 32).build()
        weights = {"w13": p.w13, "w2": p.w2}
        self.numbers = {n: quantize(w, FORMATS[form], spec.seed) for n, w in weights.items()}
        self.layer = layer = make_base_layer(p)
        self.padding = -p.w2.size(2) % pad
        layer.params_dtype, layer.quant_method = spec.dtype, SimpleNamespace()
        layer.hidden_size, layer.intermediate_size_per_partition = p.w2.shape[1:]
        hold = self.hold_int4 if form.startswith("int4") else getattr(self, f"hold_{form}")
        for name, numbers in self.numbers.items():
            delattr(layer, f"{name}_weight")
            for part, value in hold(name, numbers).items():
                setattr(layer, f"{name}_weight{part}", value)
        if form == "fp8":
            layer.quant_method = SimpleNamespace(block_quant=True, weight_block_size=[128, 128])
        elif form != "nvfp4":
            layer.is_marlin_converted = True
            group = -1 if form == "int4_channel" else 32
            layer.scheme = SimpleNamespace(num_bits=4, sym=True, group_size=group)

    def hold_fp8(self, name, numbers):
        first = torch.searchsorted(numbers.of_rows, torch.arange(int(numbers.of_rows[-1]) + 1))
        return {"": parameter(numbers.q), "_scale_inv": parameter(numbers.scales[:, first])}

    def hold_int4(self, name, numbers):
        single = self.form == "int4_channel"
        return {
            "_packed": parameter(words(q) for q in numbers.q),
            "_scale": parameter(permuted(s.to(BF16), single) for s in numbers.scales),
            "_g_idx": Parameter(torch.empty(len(numbers.q), 0, dtype=torch.int32), False),
        }

    def hold_nvfp4(self, name, numbers):
        numbers.of_tensor = numbers.of_tensor.to(BF16).float()  # as SGLang has it

        def padded(tensor, packing):
            sides = (0, 0, 0, self.padding) if name == "w13" else (0, self.padding // packing)
            return pad(tensor, sides)

        scales = padded(numbers.scales.view(torch.uint8), 16).view(torch.float8_e4m3fn)
        return {
            "": parameter(words(q) for q in padded(numbers.q, 1)),
            "_scale": parameter(nvfp4_scales(s) for s in scales),
            "_scale_2": Parameter(numbers.of_tensor[:, 0].to(BF16) * 2.0 ** (126 - 7), False),
        }

    def weights(self):
        """The same numbers as a user of the operators would bring them."""
        gate_up = "concatenated" if self.dense.spec.activation != "relu2" else None
        w13, w2 = self.numbers["w13"], self.numbers["w2"]
        return {"w13": w13.pack(BF16, gate_up), "w2": w2.pack(BF16)}

    def parameters(self):
        return {n: t for n, t in vars(self.layer).items() if isinstance(t, Parameter)}


NO_GATE = {"activation": "relu2", "slices": 1, "inter": 96}


@pytest.mark.parametrize(
    ("form", "options", "padded"),
    [
        *((f, o, 1) for f in FORMATS for o in ({}, {"sharing": "outer"}, {"mix": "half_base"})),
        ("nvfp4", NO_GATE, 128),
        ("fp8", NO_GATE, 1),
        ("fp8", {"ranks": (1, 33, 16, 64), "spare_rank": 3}, 1),
        ("fp8", {"mix": "none"}, 1),
    ],
)
def test_a_layer_is_what_the_operator_gives(sglang, form, options, padded):
    """With adapters and without. No tensor of the loader stays beside the tiles."""
    made = Made(form, replace(SPEC, **options), padded)
    if padded > 1:
        assert made.layer.w2_weight.size(1) * 16 == padded
    wrapped = sglang.layer(made.layer, max_lora_rank=64)
    got = run_layer(wrapped, made.dense)
    weights = made.weights()
    dense = {**made.dense.kwargs(), **weights}
    assert torch.equal(got.hidden_states, moelora.fused_experts_lora(**dense))
    base = wrapped._base_run_moe_core(dispatch_output=dispatched(made.dense)).hidden_states
    plain = {**made.dense.base().kwargs(), **weights}
    assert torch.equal(base, moelora.fused_experts_lora(**plain))
    held = made.parameters()
    for name in ("w13", "w2"):
        tiles = f"{name}_weight_packed" if form.startswith("int4") else f"{name}_weight"
        assert held.pop(tiles).dtype == torch.uint8
    if form != "fp8":
        assert sum(tensor.nbytes for tensor in held.values()) < 100


def test_every_scale_of_nvfp4_comes_back():
    every = torch.arange(127, dtype=torch.uint8).repeat(64)[: 64 * 16 * 4].reshape(64, -1)
    marlins = nvfp4_scales(every.view(torch.float8_e4m3fn))
    assert torch.equal(marlin.e4m3_scales(marlins).view(torch.uint8), every)


def put(name, value):
    return lambda layer: setattr(layer, name, value)


def of(attribute, **values):
    return lambda layer: vars(getattr(layer, attribute)).update(values)


def fill_nan(name):
    return lambda layer: getattr(layer, name).data.fill_(float("nan"))


def without(name):
    return lambda layer: delattr(layer, name)


def with_integer_scales(layer):
    layer.w2_weight_scale_inv = layer.w2_weight_scale_inv.int()


@pytest.mark.parametrize(
    ("form", "change", "reason"),
    [
        ("int4", of("scheme", num_bits=8), "its weights are of 8 bits"),
        ("int4", of("scheme", sym=False), "its weights have zero points"),
        ("int4", put("w2_weight_g_idx", torch.zeros(4, 64)), "in the order of their activations"),
        ("int4_channel", of("scheme", group_size=64), "Marlin may have in two orders"),
        ("nvfp4", put("params_dtype", torch.float32), "activations are"),
        ("nvfp4", without("w13_weight_scale_2"), "weights are torch.int32, of"),
        ("int4", without("is_marlin_converted"), "its weights are unknown, of"),
        ("nvfp4", fill_nan("w2_weight_scale_2"), "expected finite numbers >= 0"),
        ("fp8", of("quant_method", block_quant=False), "torch.float8_e4m3fn, of SimpleNamespace"),
        ("fp8", of("quant_method", use_mxfp8=True), "torch.float8_e4m3fn, of SimpleNamespace"),
        ("fp8", put("params_dtype", torch.float32), "its activations are torch.float32"),
        ("fp8", fill_nan("w2_weight_scale_inv"), "weight_scale_inv has a scale that is NaN"),
        ("fp8", with_integer_scales, "its scales are torch.float32 and torch.int32"),
    ],
)
def test_other_layers_run_sglangs_own_path_and_keep_their_weights(
    sglang, warned, form, change, reason
):
    made = Made(form)
    change(made.layer)
    before = made.parameters()
    assert runner_of(sglang.layer(made.layer, max_lora_rank=64)).run(None, None) == OWN
    assert reason in warned.text
    assert all(getattr(made.layer, name) is tensor for name, tensor in before.items())


@pytest.mark.parametrize("form", MARLIN)
def test_a_legacy_backend_runs_sglangs_own_path(sglang, warned, form):
    """Its batches without adapters would run Marlin on the tiles."""
    sglang.layer(Made(form).layer, max_lora_rank=64, name="csgmv")
    assert "its weights are quantized, and its backend is not triton_v2" in warned.text


def test_packed_weights_under_a_release_that_reads_them_otherwise(sglang, monkeypatch):
    """Batches without adapters would take tiles for the loader's weights."""
    monkeypatch.setattr(moelora_sglang, "BASE_PATH", "_base_run_moe_core_of_another_release")
    with pytest.raises(RuntimeError, match="has no _base_run_moe_core_of.*MOELORA_SGLANG=0"):
        sglang.layer(Made("fp8").layer)


def test_sglangs_own_runner_is_made_with_the_layer(sglang):
    """A refusal may come while a graph is captured. Weights in tiles it cannot read."""
    made = []
    for layer in (make_base_layer(Spec(scalings=False).build()), Made("fp8").layer):
        runner = moelora_sglang.from_layer(
            lambda *args, **kwargs: made.append(args), object, layer,
            is_shared_outer=False, physical_rank=16,
        )  # fmt: skip
        assert isinstance(runner, moelora_sglang.MoeLoraRunner) and len(made) == 1


# ---- the engines' own functions, where their sources are ----


@pytest.mark.skipif(not VLLM, reason="no sources of vLLM")
@pytest.mark.parametrize("release", VLLM, ids=lambda path: path.name)
def test_words_are_packed_as_vllms_reference_packs_them(release):
    import numpy as np

    module = "vllm.model_executor.layers.quantization.utils.marlin_utils_test"
    names = "marlin_weights", "marlin_permute_weights", "get_weight_perm"
    needed = {"np": np, "torch": torch, "GPTQ_MARLIN_TILE": 16}
    needed["get_pack_factor"] = lambda b: 32 // b
    pack, _, perm = Sources(release).functions(module, *names, **needed)
    q = torch.randint(0, 16, (128, 96), generator=torch.Generator().manual_seed(0))
    packed = pack(q.t().int(), 96, 128, 4, perm(4))
    assert torch.equal(packed, words(q))
    assert torch.equal(nibbles(marlin.values(packed)).long(), q)


@pytest.mark.skipif(not SGLANG, reason="no sources of SGLang")
@pytest.mark.parametrize("release", SGLANG, ids=lambda path: path.name)
def test_scales_are_permuted_as_sglang_does(release):
    sources, quant = Sources(release), "sglang.srt.layers.quantization"
    names = "marlin_permute_scales", "get_scale_perms"
    permute, _ = sources.functions(f"{quant}.marlin_utils", *names, torch=torch)
    names = "nvfp4_marlin_process_scales", "nvfp4_marlin_process_global_scale"
    try:
        process, whole = sources.functions(
            f"{quant}.marlin_utils_fp4", *names, torch=torch, logger=None
        )
    except (ModuleNotFoundError, KeyError):
        pytest.skip("this release has no NVFP4 in Marlin")
    make = torch.Generator().manual_seed(0)
    scales = torch.randint(0, 127, (128, 8), generator=make).to(torch.uint8)
    scales = scales.view(torch.float8_e4m3fn)
    theirs = process(permute(scales.to(BF16).t().contiguous(), 128, 128, 16))
    assert torch.equal(theirs.view(torch.uint8), nvfp4_scales(scales).view(torch.uint8))
    for group in (32, -1):
        plain = torch.rand(128, 1 if group == -1 else 4, generator=make)
        theirs = permute(plain.t().contiguous(), 128, 128, group)
        assert torch.equal(marlin.scales(theirs, group == -1), plain)
    for dtype in (BF16, torch.float16):
        given = torch.tensor([0.001, 0.75], dtype=dtype)
        assert torch.equal(marlin.tensor_scale(whole(given)), given.float())
