"""The example and the benchmark of whole adapters do what they say."""

import json

import pytest
import torch

from benchmarks import whole_adapters as benchmark

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


def test_the_benchmark(tmp_path, capsys):
    path = tmp_path / "results.json"
    words = ["--preset", "micro", "--layers", "1", "--device", "cpu", "--modes", "eager"]
    sizes = ["--rows", "4", "--prompt", "4", "--steps", "1", "--runs", "1"]
    what = ["--what", "base,mixed,peft,base"]
    assert benchmark.main([*words, *sizes, *what, "--out", str(path)]) == 0
    content = json.loads(path.read_text())
    assert [case["what"] for case in content["cases"]] == [
        *("base", "base", "mixed", "mixed", "peft", "peft", "base", "base")
    ]
    for case in content["cases"]:
        assert case["mode"] in ("eager", "prefill")
        assert case["us"] > 0 and case["ratio"] > 0
    assert content["meta"]["rank"] == 16
    with pytest.raises(SystemExit):
        benchmark.main(["--what", "mixed"])
    assert "does not begin with base" in capsys.readouterr().err
