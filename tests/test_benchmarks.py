"""The CPU benchmark runs, checks its rivals, and writes what it promises."""

import json

import pytest
import torch

from benchmarks import cases, cpu_layer

# Sizes that no vector length divides.
TOY = cases.Model("toy", experts=4, top_k=2, hidden=72, intermediate=40)
RIVALS = {"loop", "grouped_mm_peft", "batched_mm_peft", "grouped_mm_base"}


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setattr(cpu_layer, "MODELS", {"qwen3": TOY, "mixtral": TOY})
    monkeypatch.setattr(cpu_layer, "last_cache_bytes", lambda: 1 << 20)
    return ["--tokens", "1,16", "--ranks", "4,8", "--adapters", "3", "--budget-s", "0"]


def test_every_rival_agrees_and_is_written(toy, tmp_path, capsys):
    path = tmp_path / "cpu-layer.json"
    rows = cpu_layer.main([*toy, "--mm-size", "64", "--out", str(path)])
    written = json.loads(path.read_text())
    assert written["cases"] == rows
    assert len(rows) == 2 * 2 * 2 * 2  # models, dtypes, tokens, ranks
    assert written["meta"]["cores"] >= 1
    assert written["meta"]["threads"] == torch.get_num_threads()
    for row in rows:
        assert row["rivals"].keys() == RIVALS
        assert row["relative_error"].keys() == {"ours", *RIVALS}
        assert not row["skipped"]
        assert row["bound_us"] >= row["bound_base_us"] > 0
        assert row["ratio"] * row["ours_us"] == pytest.approx(
            row["rivals"][row["best_rival"]], rel=0.05
        )
        assert (row["mm_gflop_s"] is None) == (row["tokens"] == 1)
    assert "milliseconds per layer" in capsys.readouterr().out


def test_a_wrong_rival_is_refused(toy, monkeypatch):
    right = cpu_layer.loop
    monkeypatch.setattr(cpu_layer, "loop", lambda *args: 1.1 * right(*args))
    with pytest.raises(RuntimeError, match="rank 4: loop is off by 0.1"):
        cpu_layer.main([*toy, "--models", "qwen3", "--dtypes", "fp32"])


def test_a_slow_rival_is_left_out_with_a_reason(toy):
    rows = cpu_layer.main([*toy, "--models", "qwen3", "--dtypes", "fp32", "--patience-s", "0"])
    for row in rows:
        assert row["rivals"].keys() == {"loop", "grouped_mm_base"}
        assert "1 tokens, rank 4: about" in row["skipped"]["batched_mm_peft"]


def test_adapters_cost_flops_and_bytes():
    batch = cases.draw_batch(TOY, 5, 3, torch.Generator().manual_seed(0))
    batch.mapping[:] = 1
    experts = batch.topk_ids.unique().numel()
    flops, moved = cases.work(TOY, batch, 4)
    base_flops, base_moved = cases.work(TOY, batch)
    assert base_flops == 6 * 5 * 2 * 72 * 40
    assert flops - base_flops == 6 * 5 * 2 * 4 * (72 + 40)
    assert base_moved == 2 * (3 * experts * 72 * 40 + 2 * 5 * 72)
    assert moved - base_moved == 2 * 3 * experts * 4 * (72 + 40)


def test_repeated_draws_differ_between_experts():
    generator = torch.Generator().manual_seed(0)
    w = cases.normal((3, 1024, 2048), 1.0, generator, torch.float32)
    assert not torch.equal(w[0], w[2])
    assert w[2].std() == pytest.approx(1.0, abs=0.01)
