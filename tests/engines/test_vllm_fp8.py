"""FP8 layers of vLLM in moelora: what its loader fills gives what the operator gives."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from cases import Spec, same_bits
from vllm_quantized import Kind, QuantizedLayer, check_base_rows

import moelora
from moelora import QuantizedWeights

pytest_plugins = ["vllm_fixtures"]

SPEC = Spec(tokens=9, hidden=256, inter=128, dtype=torch.bfloat16, mix="all_different")
FP8 = {
    "fp8_block": ("fp8", [128, 128]),
    "fp8_tensor": ("fp8", None),
    "fp8_static": ("fp8", None),
    "fp8_compressed_block": ("fp8_compressed_tensors", [128, 128]),
    "fp8_compressed_channel": ("fp8_compressed_tensors", None),
}
INPUT_SCALES = {"w13": torch.tensor(0.02), "w2": torch.tensor(0.03)}


class Fp8Layer(QuantizedLayer):
    """`numbers` are (e4m3, scales) of w13 and w2."""

    backend = "TRITON"
    kinds = {kind: Kind((method,), None) for kind, (method, _) in FP8.items()}

    def __init__(self, vllm, kind, spec, **config):
        self.scheme, self.block = kind, FP8[kind][1]
        super().__init__(vllm, kind, spec, **config)

    def quantize(self, weights, name, seed):
        n, k = self.block or (weights.size(1) // self.halves[name], weights.size(2))
        n = 1 if self.scheme == "fp8_compressed_channel" else n
        blocks = weights.float().unflatten(2, (-1, k)).unflatten(1, (-1, n))
        scales = blocks.abs().amax((2, 4)).clamp(min=1e-6) / 448
        numbers = (blocks / scales[:, :, None, :, None]).to(torch.float8_e4m3fn)
        return SimpleNamespace(
            q=numbers.flatten(1, 2).flatten(2), scales=scales, dequantized=weights.to
        )

    def arguments(self):
        quant = SimpleNamespace(
            weight_block_size=self.block,
            activation_scheme="static" if self.scheme == "fp8_static" else "dynamic",
            is_checkpoint_fp8_serialized=True,
        )
        strategy = "block" if self.block else "channel"
        weights = SimpleNamespace(strategy=strategy, block_structure=self.block, dynamic=False)
        inputs = SimpleNamespace(strategy="group" if self.block else "token", dynamic=True)
        return {"quant_config": quant, "weight_quant": weights, "input_quant": inputs}

    def load_numbers(self, name, numbers):
        get = self.routed.get_parameter
        get(f"{name}_weight").data.copy_(numbers.q)
        scale = "weight_scale_inv" if self.scheme == "fp8_block" else "weight_scale"
        target = get(f"{name}_{scale}").data
        target.copy_(numbers.scales.view(target.shape))
        if self.scheme == "fp8_static":
            get(f"{name}_input_scale").data.fill_(INPUT_SCALES[name])

    def weights(self, name):
        """The same numbers as a user of the operators would bring them."""
        n = self.numbers[name]
        options = {"gate_up": "concatenated" if name == "w13" else None}
        if self.backend == "MARLIN":
            options["activations"] = "native"
        if self.block:
            return QuantizedWeights.from_fp8_block(n.q, n.scales, **options)
        if self.scheme == "fp8_compressed_channel":
            return QuantizedWeights.from_fp8_channel(n.q, n.scales, **options)
        scale = float(INPUT_SCALES[name]) if self.scheme == "fp8_static" else None
        return QuantizedWeights.from_fp8_tensor(n.q, n.scales.squeeze(2), scale, **options)


@pytest.mark.parametrize("options", [{}, {"remote": 4, "top_k": 3}, {"sharing": "outer"}])
@pytest.mark.parametrize("backend", ["TRITON", "MARLIN"])
@pytest.mark.parametrize("scheme", FP8)
def test_a_layer_is_what_the_operator_gives(vllm, lines, monkeypatch, scheme, backend, options):
    vllm.register()
    monkeypatch.setattr(Fp8Layer, "backend", backend)
    layer = Fp8Layer(vllm, scheme, replace(SPEC, **options)).step()
    assert type(layer.experts).__name__ == "QuantizedExpertsWithLoRA"
    weights = {name: layer.weights(name) for name in ("w13", "w2")}
    scalings = layer.p.lora_scalings
    assert scalings is None or not torch.equal(scalings, torch.ones_like(scalings))
    stacks = {
        name: getattr(layer.lora, f"{name}_stacked")
        for name in ("w13_lora_a", "w13_lora_b", "w2_lora_a", "w2_lora_b")
    }
    arguments = layer.p.kwargs() | weights | stacks
    wanted = moelora.fused_experts_lora(**arguments | {"lora_scalings": None})
    got = layer()
    assert same_bits(got, wanted)
    assert lines == []
    assert {n for n, _ in layer.routed.named_parameters()} == {"w13_weight", "w2_weight"}


@pytest.mark.parametrize("scheme", FP8)
def test_base_rows_keep_their_bits(vllm, scheme):
    check_base_rows(Fp8Layer, vllm, scheme, SPEC)
