"""Adapters and checkpoints by their ids on the Hub."""

import pytest
from hf_models import make_model, save_adapter
from quantized_folders import make_folder

import moelora.integrations.transformers as moelora_hf


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """What the Hub, which is a folder here, was asked for."""
    calls = []

    def snapshot_download(name, **options):
        calls.append((name, options))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return calls


def test_an_adapter_of_the_hub(tmp_path, asked):
    model = make_model("qwen3_moe")
    save_adapter(model, tmp_path, 1)
    pool = moelora_hf.load_adapters(model, ["org/law"])
    assert asked == [("org/law", {"allow_patterns": ["adapter_*"]})]
    assert pool.names() == ["law"]


def test_a_checkpoint_of_the_hub(tmp_path, asked):
    make_folder(tmp_path, "mxfp4")
    model = moelora_hf.load_quantized("org/gpt")
    moelora_hf.load_quantized_experts(model, "org/gpt")
    wanted = {"allow_patterns": ["*.json", "*.safetensors"], "ignore_patterns": ["*/*"]}
    assert asked == [("org/gpt", wanted)] * 2
    assert model.model.layers[0].mlp.experts.down_proj.weights.format == "mxfp4"


def test_neither_a_folder_nor_on_the_hub(tmp_path, monkeypatch):
    model = make_model("qwen3_moe")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for load in (lambda name: moelora_hf.load_adapters(model, [name]), moelora_hf.load_quantized):
        with pytest.raises(FileNotFoundError, match="org/none is no folder, and not on the"):
            load("org/none")
    with pytest.raises(FileNotFoundError):
        moelora_hf.load_adapters(model, [tmp_path / "none"])
