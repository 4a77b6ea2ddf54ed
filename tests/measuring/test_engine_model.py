"""The model that engines are measured with, and what their answers are held against."""

import json
from pathlib import Path

import pytest
import torch
from hf_models import transformers  # skips where there is none

from benchmarks.engines import answers, engine_model, engine_reference
from moelora.integrations.transformers import load_adapters, use_adapters

PROMPTS = [[5 + 3 * i + j * j % 89 for j in range(12 + i)] for i in range(4)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(folder of a model with one layer and two adapters, its manifest)."""
    out = tmp_path_factory.mktemp("engine") / "model"
    words = ["--preset", "micro", "--layers", "1", "--adapters", "4,8", "--out", str(out)]
    engine_model.main(words)
    return out, json.loads((out / "manifest.json").read_text())


def load(manifest):
    return transformers.AutoModelForCausalLM.from_pretrained(manifest["base"], dtype=torch.float32)


def test_a_model_is_what_its_manifest_says(made):
    out, manifest = made
    assert manifest["adapters"] == [str(out / "lora1-r4"), str(out / "lora2-r8")]
    assert manifest["shape"]["layers"] == 1 and manifest["shape"]["hidden"] == 64
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        manifest["base"], dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    assert (model.config.num_hidden_layers, model.config.vocab_size) == (1, manifest["vocab"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(manifest["base"])
    assert tokenizer("<7> <4095>")["input_ids"] == [7, 4095] and tokenizer.eos_token_id == 2


@torch.no_grad()
@pytest.mark.parametrize("family", ["olmoe", "mixtral"])
def test_models_of_other_architectures(tmp_path, family):
    """transformers finds every tensor, and the adapters act."""
    words = ["--preset", "micro", "--layers", "1", "--adapters", "4", "--out", str(tmp_path / "m")]
    engine_model.main([*words, "--family", family])
    manifest = json.loads((tmp_path / "m/manifest.json").read_text())
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        manifest["base"], dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    ids = torch.tensor([PROMPTS[0]])
    base = model(ids).logits
    load_adapters(model, manifest["adapters"])
    with use_adapters(model, [Path(manifest["adapters"][0]).name]):
        assert (model(ids).logits - base).abs().max() > 0.1


def replies(made, wrong=0.0):
    """What moelora's layers answer, as a check of `benchmarks.engines.serving`."""
    _, manifest = made
    model = load(manifest)
    pool = load_adapters(model, manifest["adapters"])
    alone = []
    for name in (None, *pool.names()):
        rows = []
        for prompt in PROMPTS:
            with use_adapters(model, [name]):
                (logprobs,) = engine_reference.prompt_logprobs(model, [prompt])
            rows.append({"prompt": [lp + wrong for lp in logprobs], "tokens": []})
        alone.append(rows)
    return {"names": ["base", *pool.names()], "prompts": PROMPTS, "alone": alone}


@pytest.mark.parametrize("wrong", [0.0, 0.2])
def test_answers_are_held_against_merged_adapters(made, tmp_path, capsys, wrong):
    answers.write_replies(tmp_path / "lps.json", replies(made, wrong))
    capsys.readouterr()
    words = ["--model", str(made[0]), "--lps", str(tmp_path / "lps.json")]
    assert engine_reference.main(words) == (1 if wrong else 0)
    *_, base, first, second, last = capsys.readouterr().out.splitlines()
    assert last == f"reference check {'FAILED' if wrong else 'OK'}"
    found = answers.distances([base, first, second])
    assert found == pytest.approx(dict.fromkeys(("base", "lora1-r4", "lora2-r8"), wrong), abs=1e-3)
    ends = [line.split()[-1] for line in (base, first, second)]
    assert ends == ["BAD" if wrong else "ok"] * 3
