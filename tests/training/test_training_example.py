"""examples/train.py and train_qlora.py: they learn as they should, and what they save is served."""

import json
import sys
import warnings

import pytest
from checkout import needs_checkout

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("rich")

import train
import train_qlora

pytestmark = needs_checkout

ARGUMENTS = ["--adapters", "charmap", "--steps", "3", "--batch", "2", "--windows", "2"]


def test_both_runs_have_the_same_losses(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", *ARGUMENTS, "--out", str(tmp_path)])
    assert train.main() == 0
    assert "the same loss in every step: True" in capsys.readouterr().out
    runs = json.loads((tmp_path / "training.json").read_text())["charmap"]
    assert [len(runs[engine]["losses"]) for engine in train.ENGINES] == [3, 3]
    assert (tmp_path / "training.png").stat().st_size > 10_000
    assert (tmp_path / "moelora/charmap/adapter_model.safetensors").exists()


@pytest.mark.parametrize("more", [[], ["--experts", "nf4"]], ids=["mxfp4", "nf4"])
def test_qlora_of_a_folder_made_on_the_spot(tmp_path, monkeypatch, capsys, more):
    words = ["--steps", "6", "--batch", "4", "--length", "24", "--lr", "1e-2", *more]
    monkeypatch.setattr(sys, "argv", ["train_qlora.py", *words, "--out", str(tmp_path)])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert train_qlora.main() == 0
    assert not [w for w in warned if "config.json" in str(w.message)]  # PEFT looks on the Hub
    text = capsys.readouterr().out
    assert "it learned and is served: True" in text and text.count("sampled:") == 3
    assert (tmp_path / "adapter/adapter_model.safetensors").exists()


def test_qlora_of_one_step_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_qlora.py", "--steps", "1"])
    with pytest.raises(SystemExit):
        train_qlora.main()
    assert "argument --steps: 1, wanted >= 2" in capsys.readouterr().err
