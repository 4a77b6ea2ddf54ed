"""The models that engines are measured with, and what their answers and rows are held against."""

import json

import pytest
import torch
from hf_models import transformers  # skips where there is none
from safetensors.torch import load_file

import moelora
from benchmarks.engines import answers, engine_model, trainer, vllm_quantize
from benchmarks.engines.vllm_rows import Calls
from moelora.adapters import AdapterPool
from moelora.integrations.transformers import load_adapters, use_adapters
from moelora.integrations.transformers.projection import expert_weights

PROMPTS = [[5 + 3 * i + j * j % 89 for j in range(12 + i)] for i in range(4)]
SMALL = engine_model.Shape(256, 2, 4, 2, 128, 4, 2, 16)


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Makes a small model and adapters of ranks 4 and 8: their folder."""
    monkeypatch.setattr(engine_model, "GPT_OSS_20B", SMALL)
    monkeypatch.setitem(engine_model.PRESETS, "micro", SMALL)

    def make(preset, *words):
        out = tmp_path / preset
        words = "--preset", preset, "--adapters", "4,8", "--out", str(out), *words
        engine_model.main(words)
        return out

    return make


def quantized(folder, format):
    out = folder.with_name(format)
    vllm_quantize.main(["--model", str(folder), "--format", format, "--out", str(out)])
    return out


def manifest_of(folder):
    return json.loads((folder / "manifest.json").read_text())


@pytest.mark.parametrize(("preset", "wrong"), [("micro", 0.0), ("gpt-oss", 0.2)])
def test_answers_are_held_against_merged_adapters(make, tmp_path, preset, wrong):
    """transformers finds every tensor; what is wrong with moelora's answers is told."""
    folder = make(preset, "--attention")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        manifest_of(folder)["base"], dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    pool, alone = load_adapters(model, manifest_of(folder)["adapters"]), []
    for name in (None, *pool.names()):
        with use_adapters(model, [name]):
            found = trainer.prompt_logprobs(model, PROMPTS)
        alone.append([{"prompt": [lp + wrong for lp in row], "tokens": []} for row in found])
    check = {"names": ["base", *pool.names()], "prompts": PROMPTS, "alone": alone}
    engine, out = tmp_path / "engine.json", tmp_path / "reference.json"
    engine.write_text(json.dumps({"check": check}))
    words = ["--as", "reference", "--model", folder, "--engine", engine, "--out", out]
    trainer.main(list(map(str, words)))
    gaps = json.loads(out.read_text())["gap"]
    rows = answers.held(gaps, answers.SAME)
    found = {row["who"]: row["median"] for row in rows}
    assert found == pytest.approx(dict.fromkeys(("base", "lora1-r4", "lora2-r8"), wrong), abs=1e-3)
    assert all(row["ok"] == (not wrong) for row in rows)
    assert all(row["ok"] for row in answers.held(gaps, float("inf"))), "any distance is reported"


@pytest.mark.parametrize("format", vllm_quantize.FORMATS)
def test_quantized_checkpoints_are_near_their_dense_ones(make, format):
    """The reference of engines' answers holds the numbers themselves against the dense ones."""
    plain = make("gpt-oss" if format == "mxfp4" else "micro")
    out = quantized(plain, format)
    assert "quantization_config" in json.loads((out / "base/config.json").read_text())

    def load(folder):
        files = (folder / "base").glob("*.safetensors")
        return {name: t for file in files for name, t in load_file(file).items()}

    engines, dense = load(out), load(out.with_name(f"{format}-dense"))
    for name, was in load(plain).items():
        if ".experts." not in name or name.endswith("bias"):
            assert torch.equal(engines[name], was) and torch.equal(dense[name], was)
        else:
            error = (dense[name] - was).float().norm() / was.float().norm()
            assert 0 < error < 0.15 and (name not in engines or engines[name].dtype != was.dtype)


def serve(calls, learner, folders):
    """Calls of a layer's operator as vLLM makes them: adapters in two slices, scaled B."""
    stacks = AdapterPool(learner.pool.layers.values(), 2, 16, dtype=torch.bfloat16)
    for folder in folders:
        stacks.add(folder.name, folder)
    operator = calls.recording(moelora.fused_experts_lora)
    draw = torch.Generator().manual_seed(0)
    for name, (module, _) in zip(learner.pool.layers, learner.experts(), strict=True):
        factors = stacks.layer(name)
        scalings = factors.pop("lora_scalings").bfloat16().reshape(-1, 1, 1, 1)
        factors["w13_lora_b"] = [b * scalings for b in factors["w13_lora_b"]]
        factors["w2_lora_b"] = factors["w2_lora_b"] * scalings
        for calls.phase, slots in ((0, [0] * 3), (1, [1] * 3), (-1, [0, 1, -1, 1, 0] * 7)):
            x = torch.randn(len(slots), SMALL.hidden, generator=draw).bfloat16()
            weights, ids = torch.rand(len(slots), 4, generator=draw).softmax(-1).topk(2)
            factors |= {"token_lora_mapping": torch.tensor(slots, dtype=torch.int32)}
            args = (x, *expert_weights(module), weights, ids.int())
            operator(*args, out=torch.empty_like(x), **factors)
    return calls.finished()


@pytest.mark.parametrize("format", [None, "fp8_channel"])
def test_a_trainer_has_the_bits_of_an_engine(make, format):
    plain = make("micro", "--adapters", "16,16")
    folder = quantized(plain, format) if format else plain
    learner = trainer.Trainer(manifest_of(folder), "cpu")
    calls = serve(Calls(), learner, [plain / name for name in learner.names])
    counts = {"rows": 2 * 35, "elements": 2 * 35 * SMALL.hidden}
    assert learner.repeat(calls) == counts | {"differing": 0}
    calls[1]["adapters"].clamp_(max=0)  # those of other tenants
    assert learner.repeat(calls)["differing"] > 0
