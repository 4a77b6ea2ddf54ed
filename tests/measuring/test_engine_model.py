"""The models that engines are measured with, and what their answers are held against."""

import json

import pytest
import torch
from hf_models import transformers  # skips where there is none
from safetensors.torch import load_file, save_file

from benchmarks.engines import answers, engine_model, trainer, vllm_quantize
from moelora.integrations.transformers import load_adapters, use_adapters

PROMPTS = [[5 + 3 * i + j * j % 89 for j in range(12 + i)] for i in range(4)]
SMALL = engine_model.Shape(96, 4, 4, 2, 64, 4, 2, 8)


def make(out, preset, patch):
    """(folder of an unquantized model with one layer and two adapters, its manifest)."""
    patch.setattr(engine_model, "GPT_OSS_20B", SMALL)
    words = ["--preset", preset, "--layers", "1", "--adapters", "4,8", "--attention"]
    engine_model.main([*words, "--out", str(out)])
    return out, json.loads((out / "manifest.json").read_text())


def load(manifest):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        manifest["base"], dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    return model


def replies(manifest, wrong):
    """What moelora's layers answer, as a check of `benchmarks.engines.answers.check`."""
    model, alone = load(manifest), []
    pool = load_adapters(model, manifest["adapters"])
    for name in (None, *pool.names()):
        rows = []
        for prompt in PROMPTS:
            with use_adapters(model, [name]):
                (logprobs,) = trainer.prompt_logprobs(model, [prompt])
            rows.append({"prompt": [lp + wrong for lp in logprobs], "tokens": []})
        alone.append(rows)
    return {"names": ["base", *pool.names()], "prompts": PROMPTS, "alone": alone}


@pytest.mark.parametrize(("preset", "wrong"), [("micro", 0.0), ("gpt-oss", 0.2)])
def test_answers_are_held_against_merged_adapters(tmp_path, monkeypatch, preset, wrong):
    """transformers finds every tensor, and another adapter would be far."""
    folder, manifest = make(tmp_path / "model", preset, monkeypatch)
    engine, out = tmp_path / "engine.json", tmp_path / "reference.json"
    engine.write_text(json.dumps({"check": replies(manifest, wrong)}))
    words = ["--as", "reference", "--model", folder, "--engine", engine, "--out", out]
    trainer.main(list(map(str, words)))
    gaps = json.loads(out.read_text())["gap"]
    rows = answers.held(gaps, answers.SAME)
    found = {row["who"]: row["median"] for row in rows}
    assert found == pytest.approx(dict.fromkeys(("base", "lora1-r4", "lora2-r8"), wrong), abs=1e-3)
    assert all(row["ok"] == (not wrong) for row in rows)
    assert all(row["ok"] for row in answers.held(gaps, float("inf"))), "any distance is reported"


@pytest.mark.parametrize("format", vllm_quantize.FORMATS)
def test_quantized_checkpoints_are_near_their_dense_ones(tmp_path, format):
    """The reference of engines' answers holds the numbers themselves against the dense ones."""
    base = tmp_path / "tiny" / "base"
    base.mkdir(parents=True)
    draw = torch.Generator().manual_seed(0)
    expert, gate = "model.layers.0.mlp.experts.0.up_proj.weight", "model.layers.0.mlp.gate.weight"
    plain = {n: torch.randn(256, 128, generator=draw).bfloat16() for n in (expert, gate)}
    if format == "mxfp4":
        expert = "model.layers.0.mlp.experts.gate_up_proj"
        plain = {expert: torch.randn(2, 96, 64, generator=draw).bfloat16(), gate: plain[gate]}
    save_file(plain, base / "m.safetensors")
    (base / "config.json").write_text(json.dumps({"num_hidden_layers": 1}))
    (tmp_path / "tiny" / "manifest.json").write_text(json.dumps({"base": str(base)}))
    out = tmp_path / f"tiny-{format}"
    vllm_quantize.main(["--model", str(tmp_path / "tiny"), "--format", format, "--out", str(out)])
    quantized, dense = (
        load_file(folder / "base" / "m.safetensors")
        for folder in (out, tmp_path / f"tiny-{format}-dense")
    )
    assert "quantization_config" in json.loads((out / "base" / "config.json").read_text())
    error = (dense[expert] - plain[expert]).float().norm() / plain[expert].float().norm()
    assert 0 < error < 0.15 and expert not in quantized.keys() - dense.keys()
    assert torch.equal(quantized[gate], plain[gate]) and torch.equal(dense[gate], plain[gate])
