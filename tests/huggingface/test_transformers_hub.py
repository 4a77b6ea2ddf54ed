"""Adapters and checkpoints by their ids on the Hub."""

import pytest
from hf_models import make_model, qwen3, save_adapter
from quantized_folders import make_folder

import moelora.integrations.transformers as moelora_hf


def test_an_adapter_of_the_hub(tmp_path, monkeypatch):
    import huggingface_hub

    model = make_model(qwen3)
    folder = save_adapter(model, tmp_path / "a", 1)
    asked = []

    def snapshot_download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    pool = moelora_hf.load_adapters(model, ["org/law"])
    assert asked == [("org/law", ["adapter_*"])]
    assert pool.names() == ["law"]


def test_a_checkpoint_of_the_hub(tmp_path, monkeypatch):
    make_folder(tmp_path, "mxfp4")
    asked = []

    def snapshot_download(name, **options):
        asked.append((name, options))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    model = moelora_hf.load_quantized("org/gpt")
    moelora_hf.load_quantized_experts(model, "org/gpt")
    wanted = {"allow_patterns": ["*.json", "*.safetensors"], "ignore_patterns": ["*/*"]}
    assert asked == [("org/gpt", wanted)] * 2
    assert model.model.layers[0].mlp.experts.down_proj.weights.format == "mxfp4"


def test_neither_a_folder_nor_on_the_hub(tmp_path, monkeypatch):
    model = make_model(qwen3)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match="org/there-is-none is no folder, and not on the"):
        moelora_hf.load_adapters(model, ["org/there-is-none"])
    with pytest.raises(FileNotFoundError):
        moelora_hf.load_adapters(model, [tmp_path / "there-is-none"])
    with pytest.raises(FileNotFoundError, match="org/there-is-none is no folder, and not on the"):
        moelora_hf.load_quantized("org/there-is-none")
