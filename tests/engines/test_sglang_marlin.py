"""Four-bit layers of SGLang: from the order of Marlin's kernels into tiles, without loss."""

from dataclasses import replace
from types import SimpleNamespace

import marlin_cases
import pytest
import torch
from cases import Spec
from quantized_cases import ALL_FORMATS, Format, fitted, quantize
from sglang_stand_in import OWN, dispatched, make_base_layer, run_layer, runner_of
from test_sglang_sources import RELEASES as SGLANG
from vllm_sources import RELEASES as VLLM
from vllm_sources import Sources

import moelora
from moelora.integrations.sglang import marlin
from moelora.weights.readers import nibbles

pytest_plugins = ["sglang_fixtures"]

BF16 = torch.bfloat16
SPEC = Spec(tokens=9, hidden=128, inter=64, dtype=BF16, scalings=False, mix="all_different")
FORMATS = {
    "nvfp4": ALL_FORMATS["nvfp4"],
    "int4": ALL_FORMATS["int4_g32"],
    "int4_channel": Format("int4", None),
}


def parameter(tensors):
    return torch.nn.Parameter(torch.stack(list(tensors)), requires_grad=False)


class MarlinLayer:
    """`layer` is what SGLang holds of a problem after `process_weights_after_loading`.

    Marlin pads the intermediate size of NVFP4 experts without a gate, to multiples of `pad`.
    """

    def __init__(self, form: str, spec: Spec = SPEC, pad: int = 1) -> None:
        self.dense = p = fitted(spec, spec.dtype).build()
        self.numbers = {
            name: quantize(getattr(p, name), FORMATS[form], spec.seed) for name in ("w13", "w2")
        }
        self.layer = layer = make_base_layer(p)
        self.is_nvfp4, self.single = form == "nvfp4", form == "int4_channel"
        self.behind = -p.w2.size(2) % pad
        layer.params_dtype, layer.quant_method = spec.dtype, SimpleNamespace()
        layer.hidden_size, layer.intermediate_size_per_partition = p.w2.shape[1:]
        for name in ("w13", "w2"):
            delattr(layer, f"{name}_weight")
            (self.hold_nvfp4 if self.is_nvfp4 else self.hold_int4)(name, self.numbers[name])
        if not self.is_nvfp4:
            layer.is_marlin_converted = True
            group = -1 if self.single else 32
            layer.scheme = SimpleNamespace(num_bits=4, sym=True, group_size=group)

    def hold_int4(self, name, numbers) -> None:
        scales = (marlin_cases.permuted(s.to(BF16), self.single) for s in numbers.scales)
        words = parameter(marlin_cases.words(q) for q in numbers.q)
        setattr(self.layer, f"{name}_weight_packed", words)
        setattr(self.layer, f"{name}_weight_scale", parameter(scales))
        no_order = torch.empty(len(numbers.q), 0, dtype=torch.int32)
        setattr(self.layer, f"{name}_weight_g_idx", torch.nn.Parameter(no_order, False))

    def hold_nvfp4(self, name, numbers) -> None:
        numbers.of_tensor = numbers.of_tensor.to(BF16).float()  # as SGLang has it
        of_tensor = marlin_cases.nvfp4_tensor_scale(numbers.of_tensor[:, 0], BF16)

        def padded(tensor, packing):
            sides = (0, 0, 0, self.behind) if name == "w13" else (0, self.behind // packing)
            return torch.nn.functional.pad(tensor, sides)

        scales = padded(numbers.scales.view(torch.uint8), 16).view(torch.float8_e4m3fn)
        words = parameter(marlin_cases.words(q) for q in padded(numbers.q, 1))
        setattr(self.layer, f"{name}_weight", words)
        scales = parameter(marlin_cases.nvfp4_scales(s) for s in scales)
        setattr(self.layer, f"{name}_weight_scale", scales)
        setattr(self.layer, f"{name}_weight_scale_2", torch.nn.Parameter(of_tensor, False))

    def weights(self):
        """The same numbers as a user of the operators would bring them."""
        gate_up = "concatenated" if self.dense.spec.activation != "relu2" else None
        w13, w2 = self.numbers["w13"], self.numbers["w2"]
        return {"w13": w13.pack(BF16, gate_up), "w2": w2.pack(BF16)}


@pytest.mark.parametrize("options", [{}, {"sharing": "outer"}, {"mix": "half_base"}])
@pytest.mark.parametrize("form", FORMATS)
def test_a_layer_is_what_the_operator_gives(sglang, form, options):
    made = MarlinLayer(form, replace(SPEC, **options))
    wrapped = sglang.layer(made.layer, max_lora_rank=64)
    got = run_layer(wrapped, made.dense)
    dense = {**made.dense.kwargs(), **made.weights()}
    assert torch.equal(got.hidden_states, moelora.fused_experts_lora(**dense))
    base = wrapped._base_run_moe_core(dispatch_output=dispatched(made.dense)).hidden_states
    plain = {**made.dense.base().kwargs(), **made.weights()}
    assert torch.equal(base, moelora.fused_experts_lora(**plain))


@pytest.mark.parametrize("form", FORMATS)
def test_nothing_of_marlins_is_kept(sglang, form):
    made = MarlinLayer(form)
    sglang.layer(made.layer, max_lora_rank=64)
    held = {n: t for n, t in vars(made.layer).items() if isinstance(t, torch.nn.Parameter)}
    tiles = "weight" if form == "nvfp4" else "weight_packed"
    for name in ("w13", "w2"):
        assert held.pop(f"{name}_{tiles}").dtype == torch.uint8
        assert held[f"{name}_weight_scale"].numel() == 0
    assert sum(tensor.nbytes for tensor in held.values()) < 100


def test_nvfp4_without_a_gate_is_padded_by_marlin(sglang):
    spec = replace(SPEC, activation="relu2", slices=1, inter=96)
    made = MarlinLayer("nvfp4", spec, pad=128)
    assert made.layer.w2_weight.size(1) * 16 == 128
    wrapped = sglang.layer(made.layer, max_lora_rank=64)
    got = run_layer(wrapped, made.dense)
    dense = {**made.dense.kwargs(), **made.weights()}
    assert torch.equal(got.hidden_states, moelora.fused_experts_lora(**dense))


def test_every_scale_of_nvfp4_comes_back():
    every = torch.arange(127, dtype=torch.uint8).repeat(64)[: 64 * 16 * 4].reshape(64, -1)
    marlins = marlin_cases.nvfp4_scales(every.view(torch.float8_e4m3fn))
    assert torch.equal(marlin.e4m3_scales(marlins).view(torch.uint8), every)


def set_scheme(**values):
    return lambda layer: vars(layer.scheme).update(values)


@pytest.mark.parametrize(
    ("form", "change", "reason"),
    [
        ("int4", set_scheme(num_bits=8), "its weights are of 8 bits"),
        ("int4", set_scheme(sym=False), "its weights have zero points"),
        (
            "int4",
            lambda layer: setattr(layer, "w2_weight_g_idx", torch.zeros(4, 64)),
            "in the order of their activations",
        ),
        ("int4_channel", set_scheme(group_size=64), "Marlin may have in two orders"),
        ("nvfp4", lambda layer: setattr(layer, "params_dtype", torch.float32), "activations are"),
        (
            "nvfp4",
            lambda layer: delattr(layer, "w13_weight_scale_2"),
            "weights are torch.int32, of",
        ),
        (
            "int4",
            lambda layer: delattr(layer, "is_marlin_converted"),
            "its weights are unknown, of",
        ),
        (
            "nvfp4",
            lambda layer: layer.w2_weight_scale_2.data.fill_(float("nan")),
            "expected finite numbers >= 0",
        ),
    ],
)
def test_other_layers_run_sglangs_own_path_and_keep_their_weights(
    sglang, warned, form, change, reason
):
    made = MarlinLayer(form)
    change(made.layer)
    before = {n: t for n, t in vars(made.layer).items() if isinstance(t, torch.nn.Parameter)}
    assert runner_of(sglang.layer(made.layer, max_lora_rank=64)).run(None, None) == OWN
    assert reason in warned.text
    assert all(getattr(made.layer, name) is tensor for name, tensor in before.items())


@pytest.mark.parametrize("form", FORMATS)
def test_a_legacy_backend_runs_sglangs_own_path(sglang, warned, form):
    """Its batches without adapters would run Marlin on the tiles."""
    made = MarlinLayer(form)
    sglang.layer(made.layer, max_lora_rank=64, name="csgmv")
    assert "its weights are quantized, and its backend is not triton_v2" in warned.text


# ---- the engines' own functions, where their sources are ----


@pytest.mark.skipif(not VLLM, reason="no sources of vLLM")
@pytest.mark.parametrize("release", VLLM, ids=lambda path: path.name)
def test_words_are_packed_as_vllms_reference_packs_them(release):
    import numpy as np

    module = "vllm.model_executor.layers.quantization.utils.marlin_utils_test"
    names = "marlin_weights", "marlin_permute_weights", "get_weight_perm"
    needed = {
        "np": np,
        "torch": torch,
        "GPTQ_MARLIN_TILE": 16,
        "get_pack_factor": lambda b: 32 // b,
    }
    pack, _, perm = Sources(release).functions(module, *names, **needed)
    q = torch.randint(0, 16, (128, 96), generator=torch.Generator().manual_seed(0))
    words = pack(q.t().int(), 96, 128, 4, perm(4))
    assert torch.equal(words, marlin_cases.words(q))
    assert torch.equal(nibbles(marlin.values(words)).long(), q)


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
    assert torch.equal(
        theirs.view(torch.uint8), marlin_cases.nvfp4_scales(scales).view(torch.uint8)
    )
    for group in (32, -1):
        plain = torch.rand(128, 1 if group == -1 else 4, generator=make)
        theirs = permute(plain.t().contiguous(), 128, 128, group)
        assert torch.equal(marlin.scales(theirs, group == -1), plain)
    for dtype in (BF16, torch.float16):
        given = torch.tensor([0.001, 0.75], dtype=dtype)
        assert torch.equal(marlin.tensor_scale(whole(given)), given.float())
