"""The example of whole adapters does what it says."""

import pytest
import torch

pytest.importorskip("peft")
import whole_adapters as example


def test_the_example(monkeypatch, tmp_path):
    """One of its four adapters, in one batch with the base model."""
    torch.manual_seed(0)
    monkeypatch.setattr(example, "STEPS", 24)
    lines = {name: example.LINES[name] for name in ("window",)}
    folders = {name: tmp_path / name for name in lines}
    for name, line in lines.items():
        assert example.train(line, folders[name]) < 0.5
    *texts, base = example.serve(folders)
    for text, line in zip(texts, lines.values(), strict=True):
        assert text.startswith(example.PROMPT + line[:4]), text
    assert base.startswith(example.PROMPT + "__init__")
