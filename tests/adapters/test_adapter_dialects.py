"""Every dialect of adapters on every kind of model: what is served is what was trained."""

import functools

import pytest
import torch
from dialects import DIALECTS, draw, merge, save
from hf_models import transformers
from small_models import MODELS, make, make_multimodal, tokens
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import moelora.integrations.transformers as moelora_hf

ROWS = ["a", None, "b"]


@functools.cache
def model_of(model_type):
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    return make(model_type)


@functools.cache
@torch.no_grad()
def wanted(model_type, kind, embeddings):
    """Two adapters of one kind, and the logits of `ROWS` with merged weights."""
    model = model_of(model_type)
    drawn = {
        name: draw(model, kind, seed=seed, rank=rank, embeddings=embeddings)
        for seed, (name, rank) in enumerate({"a": 4, "b": 3}.items())
    }
    ids = tokens()
    logits = model(ids).logits
    for row, name in enumerate(ROWS):
        if name is not None:
            logits[row] = merge(model, drawn[name])(ids).logits[row]
    return drawn, logits


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("dialect", DIALECTS)
@torch.no_grad()
def test_a_mixed_batch_has_the_logits_of_merged_weights(tmp_path, dialect, model_type):
    dialect, model, ids = DIALECTS[dialect], model_of(model_type), tokens()
    drawn, logits = wanted(model_type, dialect.kind, dialect.embeddings)
    folders = {name: dialect.write(tmp_path / name, d) for name, d in drawn.items()}
    moelora_hf.enable(model)
    base = model(ids).logits
    pool = moelora_hf.load_adapters(model, folders, layout=dialect.layout)
    assert pool.shared_outer == (dialect.kind == "shared"), "stacks as small as adapters allow"
    try:
        got = model(ids, adapter_names=ROWS).logits
    finally:
        moelora_hf.unload_adapters(model)
    torch.testing.assert_close(got, logits, rtol=2e-4, atol=2e-4)
    assert (got[0] - base[0]).abs().max() > 0.05, "the adapter must matter"
    assert torch.equal(got[1], base[1]), "rows without an adapter are those of the base model"


@pytest.mark.parametrize("names", ["model.", "language_model.model.", "model.language_model."])
@torch.no_grad()
def test_adapters_of_a_text_model_in_the_multimodal_one(tmp_path, names):
    model, ids = make_multimodal(), tokens()
    dialect = DIALECTS["peft"]
    drawn = dialect.draw(model)
    state = {
        key.replace("model.language_model.", names): tensor
        for key, tensor in dialect.spell(drawn).items()
    }
    folder = save(tmp_path / "a", state, {**dialect.config, **dialect.targets(drawn)}, drawn)
    wanted = merge(model, drawn)(ids).logits[0]
    moelora_hf.load_adapters(model, {"a": folder})
    got = model(ids, adapter_names=["a", None, "a"]).logits[0]
    torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-4)
