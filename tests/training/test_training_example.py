"""examples/train.py: both paths learn alike, and what it saves is served."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("rich")

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import train  # noqa: E402

ARGUMENTS = ["--adapters", "charmap", "--steps", "3", "--batch", "2", "--windows", "2"]


def test_both_runs_have_the_same_losses(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", *ARGUMENTS, "--out", str(tmp_path)])
    assert train.main() == 0
    assert "the same loss in every step: True" in capsys.readouterr().out
    runs = json.loads((tmp_path / "training.json").read_text())["charmap"]
    assert [len(runs[engine]["losses"]) for engine in train.ENGINES] == [3, 3]
    assert (tmp_path / "training.png").stat().st_size > 10_000
    assert (tmp_path / "moelora/charmap/adapter_model.safetensors").exists()


def test_other_losses_are_noticed(tmp_path, monkeypatch):
    attach = train.moelora_peft.attach

    def attach_wrongly(model):
        for name, parameter in model.named_parameters():
            if "lora_A" in name:
                parameter.data.mul_(2)
        return attach(model)

    monkeypatch.setattr(train.moelora_peft, "attach", attach_wrongly)
    monkeypatch.setattr(sys, "argv", ["train.py", *ARGUMENTS, "--out", str(tmp_path)])
    assert train.main() == 1
