"""Quantized layers of vLLM in moelora: from what its loader fills to a layer's result."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from cases import Spec, same_bits
from vllm_layer import HERE, Layer, load
from vllm_quantized import FP8, KINDS, Fp8Layer, QuantizedLayer, Routed, quantized_layer

import moelora
from benchmarks.tables import models

pytest_plugins = ["vllm_fixtures"]

BF16 = torch.bfloat16
PLAIN = Spec(tokens=9, hidden=64, inter=96, dtype=BF16)
OURS, OWN = "QuantizedExpertsWithLoRA", object()
GPT_OSS = replace(PLAIN, activation="swigluoai", bias=True, slices=1)
OF_FP8 = replace(PLAIN, hidden=256, inter=128, mix="all_different")


def spec_of(kind: str, **options) -> Spec:
    return replace(GPT_OSS if kind == "gpt_oss" else OF_FP8 if kind in FP8 else PLAIN, **options)


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.mark.parametrize(
    "options",
    [
        {"mix": "absent"},
        {"remote": 4, "top_k": 3},
        {"sharing": "outer"},
        {"dtype": torch.float16},
        {"hidden": 160, "mix": "all_different"},
    ],
    ids=str,
)
def test_a_layer_is_what_the_reference_says(served, lines, kind, options):
    """vLLM's kernels round 2880 up to 3072 and 2944; ours take what blocks of 32 allow."""
    spec = spec_of(kind, **options)
    layer = QuantizedLayer(served, kind, spec)
    assert type(layer.experts).__name__ == OURS
    routed = layer.routed
    assert (routed.hidden_size, routed.intermediate_size_per_partition) == (spec.hidden, spec.inter)
    if spec.mix != "absent":
        layer.step()
    layer.check(layer())
    assert served.own_calls == 0
    assert lines == []


@pytest.mark.parametrize("options", [{}, {"remote": 4, "top_k": 3}, {"sharing": "outer"}])
@pytest.mark.parametrize("backend", ["TRITON", "MARLIN"])
@pytest.mark.parametrize("scheme", FP8)
def test_a_layer_of_fp8_is_what_the_operator_gives(served, lines, scheme, backend, options):
    layer = Fp8Layer(served, scheme, spec_of(scheme, **options), backend=backend).step()
    assert type(layer.experts).__name__ == OURS
    weights = {name: layer.weights(name) for name in ("w13", "w2")}
    scalings = layer.p.lora_scalings
    assert scalings is None or not torch.equal(scalings, torch.ones_like(scalings))
    names = "w13_lora_a", "w13_lora_b", "w2_lora_a", "w2_lora_b"
    stacks = {name: getattr(layer.lora, f"{name}_stacked") for name in names}
    arguments = layer.p.kwargs() | weights | stacks
    wanted = moelora.fused_experts_lora(**arguments | {"lora_scalings": None})
    assert same_bits(layer(), wanted)
    assert lines == []
    assert {n for n, _ in layer.routed.named_parameters()} == {"w13_weight", "w2_weight"}


class MixedLayer(QuantizedLayer):
    """gpt-oss, whose rows of gate and up alternate, with factors for each: `p` has them apart."""

    def make_kernel(self, quant):
        def alternate(t):
            return t.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)

        numbers = self.numbers["w13"]
        changed = replace(numbers, q=alternate(numbers.q), scales=alternate(numbers.scales))
        self.numbers["w13"] = changed
        self.activation = self.vllm.MoEActivation("swigluoai")
        self.moe_config.activation = self.activation
        p, self.p = self.p, replace(self.p, w13_bias=alternate(self.p.w13_bias))
        super().make_kernel(quant)
        self.p = p


def test_adapters_of_gate_and_up_where_rows_alternate(vllm, lines):
    """--enable-mixed-moe-lora-format."""
    lora = SimpleNamespace(enable_mixed_moe_lora_format=True)
    config = SimpleNamespace(lora_config=lora)
    vllm.set("vllm.config", "get_current_vllm_config_or_none", lambda: config)
    vllm.register()
    spec = replace(GPT_OSS, activation="swigluoai_uninterleave", slices=2, mix="all_different")
    layer = MixedLayer(vllm, "gpt_oss", spec).step()
    assert len(layer.experts._lora_context.w13_lora_a_stacked) == 2
    layer.check(layer())
    assert vllm.own_calls == 0 and lines == []


@pytest.mark.parametrize("kind", [*KINDS, *FP8])
def test_base_rows_keep_their_bits(served, kind):
    layer = quantized_layer(served, kind, spec_of(kind, mix="half_base")).step()
    plain = quantized_layer(served, kind, spec_of(kind, mix="absent"))()
    bases = layer.p.token_lora_mapping < 0
    assert bases.any()
    assert same_bits(layer()[bases], plain[bases])


def test_nothing_of_the_loader_stays(served, kind):
    """Tiles are all that a layer holds, with its biases; the tensors that were loaded are freed."""
    layer = QuantizedLayer(served, kind, spec_of(kind, hidden=256, inter=256))
    held = {name for name, _ in layer.routed.named_parameters()}
    biases = {"w13_bias", "w2_bias"} if kind == "gpt_oss" else set()
    assert held == {"w13_weight", "w2_weight"} | biases
    assert layer.routed.w13_weight.dtype == torch.uint8
    assert sum(t.nbytes for t in layer.routed.parameters()) < 1.1 * layer.loaded_bytes


@pytest.mark.parametrize("kind", ["gpt_oss", "mxfp4"])
def test_a_share_that_is_no_whole_block_is_padded(served, kind, monkeypatch):
    """Tensor parallel: the last block of a rank may be partly empty, and adds nothing."""
    spec = spec_of(kind, hidden=64, inter=96, mix="absent")
    plain = QuantizedLayer(served, kind, spec)()

    class Padded(QuantizedLayer):
        def make_method(self):
            method = super().make_method()
            self.moe_config.intermediate_size_per_partition += 32
            return method

    layer = Padded(served, kind, spec)
    assert layer.routed.intermediate_size_per_partition == 128
    layer.check(layer())
    torch.testing.assert_close(layer(), plain)


# ---- what stays with vLLM ----


@pytest.fixture
def own(vllm):
    """Whatever vLLM repacks weights with is not there on a CPU."""

    def process_weights_after_loading(self, layer):
        assert self.experts_cls.__name__ != OURS
        self.moe_kernel = SimpleNamespace(fused_experts=OWN)

    for name in vllm.methods:
        if (cls := vllm.method(name)[1]) is not None:
            function = process_weights_after_loading
            vllm.monkeypatch.setattr(cls, function.__name__, function)
    return vllm.register()


def theirs(layer, lines, reason):
    assert layer.experts is OWN
    assert lines == [f"moelora: {reason}; vLLM's own path runs"]
    assert sum(t.nbytes for t in layer.routed.parameters()) == layer.loaded_bytes


def offload(layer):
    next(layer.parameters())._vllm_is_uva_offloaded = True


def take_mxfp4(layer):
    layer.quant_method.use_cutlass_mxfp4 = True


EXCHANGE = "flashinfer_nvlink_one_sided"
NVFP4 = ["nvfp4_modelopt", "nvfp4_compressed"]
TAKES_FP4 = {"backend": "FLASHINFER_CUTLASS"}  # vLLM's choice on tensor cores of FP4
# Kinds and options of a layer, and why vLLM's own path runs it. vLLM asks a class whether it
# supports an exchange before it selects it; moelora's comes in after that.
STAYS = [
    (KINDS, {"moe_backend": "marlin"}, "moe_backend='marlin' is asked for"),
    (
        KINDS,
        {"exchange": EXCHANGE},
        f"TritonExperts does not take tokens from the exchange {EXCHANGE}",
    ),
    (KINDS, {"changes": offload}, "the expert weights are in host memory"),
    (NVFP4, TAKES_FP4, "vLLM's FLASHINFER_CUTLASS kernels take activations in NVFP4"),
    (["mxfp4_compressed"], {"changes": take_mxfp4}, "vLLM's kernels take activations in MXFP4"),
]


@pytest.mark.parametrize(
    ("kind", "options", "reason"), [(kind, *row) for kinds, *row in STAYS for kind in kinds]
)
def test_what_stays_with_vllm(own, lines, kind, options, reason):
    theirs(QuantizedLayer(own, kind, spec_with_a_way_back(kind), **options), lines, reason)


def spec_with_a_way_back(kind):
    """Sizes that Marlin takes."""
    return spec_of(kind, hidden=256, inter=128) if kind in ("gpt_oss", "mxfp4") else spec_of(kind)


@pytest.mark.parametrize("activation", models.TAKEN["vLLM"])
def test_formats_by_activation_are_those_of_the_table_of_models(own, activation):
    """docs/answers.md."""
    spec = replace(PLAIN, hidden=256, inter=128, activation=activation, mix="absent")
    bias = activation == "swigluoai"
    spec = replace(spec, slices=1 if activation != "silu" else 2, bias=bias)
    layer = Layer(own, spec.build())
    taken = {"bf16"} if layer.experts.reason_against(layer.activation) is None else set()
    for kind in (*KINDS, *FP8):
        layer = quantized_layer(own, kind, spec)
        if layer.experts is not OWN:
            name = load(f"{HERE}.formats").FORMATS[layer.kind.methods[-1]].about
            taken.add(name.partition(",")[0].partition(" ")[0])
    assert taken == set(models.TAKEN["vLLM"][activation])


@pytest.mark.parametrize("lacks", ["_expert_routing_tables", "moe_backend"])
def test_a_layer_of_another_release(own, lines, kind, lacks, monkeypatch):
    """It lacks what is read while it is packed, or before that; the engine starts all the same."""

    def change(layer):
        owner = Routed if hasattr(Routed, lacks) else layer.moe_config
        monkeypatch.delattr(owner, lacks)

    layer = QuantizedLayer(own, kind, spec_with_a_way_back(kind), changes=change)
    (line,) = lines
    assert line.startswith("moelora: the layer is not as expected (AttributeError: ")
    assert lacks in line and line.endswith("; vLLM's own path runs")
    assert layer.experts is OWN
    assert sum(t.nbytes for t in layer.routed.parameters()) == layer.loaded_bytes


@pytest.mark.parametrize(
    ("kind", "name", "at", "reason"),
    [
        ("gptq", "w2_scales", (1, 0, 0), "has a scale that is NaN"),
        ("compressed", "w2_weight_scale", (1, 0, 0), "has a scale that is NaN"),
        ("awq", "w2_scales", (1, 0, 0), "has a scale that is NaN"),
        ("nvfp4_modelopt", "w2_weight_scale_2", 1, "expected finite numbers >= 0"),
        ("nvfp4_compressed", "w2_weight_global_scale", 1, "expected finite numbers >= 0"),
    ],
)
def test_scales_that_are_not_finite(own, lines, kind, name, at, reason):
    def spoil(layer):
        getattr(layer, name).data[at] = float("nan")

    layer = QuantizedLayer(own, kind, spec_of(kind), changes=spoil)
    (line,) = lines
    assert reason in line
    assert layer.experts is OWN


def spoil(layer):
    layer.w2_weight_scale.data[0, 0, 0] = 129


@pytest.mark.parametrize("kind", ["gpt_oss", "mxfp4"])
def test_scales_above_two(own, lines, kind):
    """Found out too late, where vLLM's own kernels would have wanted other sizes."""
    layer = QuantizedLayer(own, kind, spec_of(kind, hidden=256, inter=128), changes=spoil)
    assert layer.experts is OWN
    (line,) = lines
    assert "has the e8m0 byte 129" in line and line.endswith("vLLM's own path runs")
    with pytest.raises(ValueError, match=r"byte 129.*want the sizes \(256, 128\), not \(64, 96\)"):
        QuantizedLayer(own, kind, spec_of(kind), changes=spoil)


REFUSAL = "No MXFP4 MoE backend supports the deployment configuration."


@pytest.fixture(params=["gpt_oss", "mxfp4"])
def without_kernels(vllm, request):
    """Makes a layer for which vLLM has no kernels that are batch invariant and take adapters."""

    def refuse(config):
        raise NotImplementedError(REFUSAL)

    for name in ("select_mxfp4_moe_backend", "select_deepseek_v4_mxfp4_moe_backend"):
        vllm.set("vllm.model_executor.layers.quantization.mxfp4", name, refuse)
    vllm.register()
    spec = spec_of(request.param, hidden=160)
    return lambda **options: QuantizedLayer(vllm, request.param, spec, backend=None, **options)


def test_what_vllm_has_no_kernels_for_is_served(without_kernels, lines):
    layer = without_kernels().step()
    assert type(layer.experts).__name__ == OURS
    layer.check(layer())
    assert lines == []


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"moe_backend": "marlin"}, "moelora: moe_backend='marlin' is asked for"),
        ({"subclass": True}, "moelora: Subclass is not known"),
        ({"changes": spoil}, "has the e8m0 byte 129"),
    ],
)
def test_what_nobody_has_kernels_for_is_refused(without_kernels, options, cause):
    with pytest.raises(NotImplementedError, match=REFUSAL) as raised:
        without_kernels(**options)
    assert cause in str(raised.value.__cause__)


@pytest.mark.parametrize("kind", NVFP4)
def test_checkpoints_that_quantize_weights_alone(served, lines, kind):
    layer = QuantizedLayer(served, kind, spec_of(kind), use_a16=True, **TAKES_FP4).step()
    layer.check(layer())
    assert lines == []


def test_an_activation_that_is_not_there(own, lines, kind):
    spec = spec_of(kind, activation="silu" if kind == "gpt_oss" else "swigluoai")
    reason = "silu with rows of gate and up interleaved"
    if kind != "gpt_oss":
        reason = "swigluoai with rows of gate and up concatenated"
    theirs(QuantizedLayer(own, kind, spec), lines, reason)


def test_a_subclass_keeps_its_own_way(own, kind):
    layer = QuantizedLayer(own, kind, spec_of(kind), subclass=True)
    assert layer.experts is OWN


def test_a_context_that_cannot_be_served_is_refused(served):
    """vLLM's kernels cannot read tiles: there is no way back any more."""
    layer = QuantizedLayer(served, "gptq", spec_of("gptq"))
    context = layer.experts._lora_context
    context.fully_sharded = True
    with pytest.raises(RuntimeError, match="adapters are fully sharded; .* MOELORA_VLLM=0"):
        layer.experts.set_lora_context(context)


def test_what_the_operator_refuses(served):
    layer = QuantizedLayer(served, "gptq", spec_of("gptq", mix="absent"))
    with pytest.raises(RuntimeError, match="quantized for bfloat16, .* MOELORA_VLLM=0"):
        layer(hidden_states=layer.p.hidden_states.to(torch.float16))


def test_the_class_that_drops_adapters_is_named(served, lines):
    """`TritonWNA16Experts` says that it supports LoRA; its apply never reads the context."""
    layer = QuantizedLayer(served, "gptq", spec_of("gptq"))
    place = load("vllm.model_executor.layers.fused_moe.experts.triton_moe")
    theirs = place.TritonWNA16Experts(layer.moe_config, layer.method.moe_quant_config)
    served.FusedMoEKernel(served.MoEPrepareAndFinalizeNoDPEPModular(), theirs)
    said = "vLLM's TritonWNA16Experts IGNORES ADAPTERS: answers are the base model's"
    assert lines[-1] == f"moelora: {said}"
