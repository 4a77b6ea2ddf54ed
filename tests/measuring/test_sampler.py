"""A trainer repeats the rows of an engine's MoE layers: benchmarks.vllm_e2e --only sampler."""

import json

import pytest
import torch

import moelora
from benchmarks.engines import engine_model, trainer, vllm_quantize
from benchmarks.engines.vllm_rows import Calls
from moelora.adapters import AdapterPool
from moelora.integrations.transformers.projection import expert_weights


@pytest.fixture(params=["bf16", "fp8_channel"])
def folder(request, tmp_path):
    model = tmp_path / "micro"
    engine_model.main(["--preset", "micro", "--adapters", "16,16", "--out", str(model)])
    if request.param == "bf16":
        return model
    quantized = tmp_path / request.param
    words = ["--model", str(model), "--format", request.param, "--out", str(quantized)]
    vllm_quantize.main(words)
    return quantized


def serve(calls, learner, folders):
    """Calls of a layer's operator as vLLM makes them: adapters in two slices, scaled B."""
    layers = learner.pool.layers
    stacks = AdapterPool(layers.values(), 2, 16, dtype=torch.bfloat16)
    for folder in folders:
        stacks.add(folder.name, folder)
    operator = calls.recording(moelora.fused_experts_lora)
    draw = torch.Generator().manual_seed(0)
    for name, (module, _) in zip(layers, learner.experts(), strict=True):
        factors = stacks.layer(name)
        scalings = factors.pop("lora_scalings").bfloat16().reshape(-1, 1, 1, 1)
        for key in ("w13_lora_b", "w2_lora_b"):
            b = factors[key]
            factors[key] = (
                b * scalings if isinstance(b, torch.Tensor) else [v * scalings for v in b]
            )
        for calls.phase, mapping in ((0, [0] * 3), (1, [1] * 3), (-1, [0, 1, -1, 1, 0] * 7)):
            x = torch.randn(len(mapping), 64, generator=draw).bfloat16()
            weights, ids = torch.rand(len(mapping), 4, generator=draw).softmax(-1).topk(2)
            w13, w2 = expert_weights(module)
            operator(
                *(x, w13, w2, weights, ids.int()),
                out=torch.empty_like(x),
                token_lora_mapping=torch.tensor(mapping, dtype=torch.int32),
                **factors,
            )
    return calls.finished()


def test_a_trainer_has_the_bits_of_an_engine(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    learner = trainer.Trainer(manifest, "cpu")
    folders = [folder.parent / "micro" / name for name in learner.names]
    calls = serve(Calls(), learner, folders)
    found = learner.repeat(calls)
    assert found == {"rows": 2 * 35, "elements": 2 * 35 * 64, "differing": 0}
    calls[1]["adapters"].clamp_(max=0)  # those of other tenants
    assert learner.repeat(calls)["differing"] > 0
    calls[0]["out"][3, 5] += 1
    assert learner.repeat(calls[:1])["differing"] == 1
