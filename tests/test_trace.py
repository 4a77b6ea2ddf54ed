"""Logs, ranges and dumps around operators, replay, and the self-test of `info`."""

import subprocess
import sys

import pytest
import torch

import moelora
from moelora import _C, selftest, trace
from moelora.__main__ import main


@pytest.fixture
def ask(monkeypatch):
    """Turns settings on for one test."""

    def on(**settings):
        monkeypatch.setattr(trace, "settings", trace.Settings(**settings))
        monkeypatch.setattr(trace, "active", trace.settings.active)

    return on


def layer(w2_columns=40, **kwargs):
    topk_weights, topk_ids = torch.randn(3, 4).softmax(-1).topk(2)
    w13, w2 = torch.randn(4, 80, 72), torch.randn(4, 72, w2_columns)
    x = torch.randn(3, 72)
    return moelora.fused_experts_lora(x, w13, w2, topk_weights, topk_ids, **kwargs)


def test_nothing_is_on_by_default(monkeypatch):
    for name in ("MOELORA_LOG", "MOELORA_NVTX", "MOELORA_DUMP"):
        monkeypatch.delenv(name, raising=False)
    assert not trace.Settings.from_environment().active
    monkeypatch.setenv("MOELORA_LOG", "plan")  # the library's
    assert not trace.Settings.from_environment().active


def test_a_log_level_that_is_none(monkeypatch):
    monkeypatch.setenv("MOELORA_LOG", "shape")
    with pytest.warns(RuntimeWarning, match="MOELORA_LOG=shape: wanted plan or shapes"):
        assert not trace.Settings.from_environment().active


def test_the_environment_turns_it_on(tmp_path):
    code = "import torch, moelora; moelora.moe_align_block_size(torch.zeros(2, 2).int(), 4, 3)"
    env = {"MOELORA_LOG": "shapes", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (
        done.stderr == "moelora: moe_align_block_size topk_ids=int32[2,2]@cpu block_size=4 "
        "num_experts=3\n"
    )


def test_shapes_of_a_call_that_is_refused(ask, capsys):
    ask(shapes=True)
    with pytest.raises(ValueError, match=r"w2\.size"):
        layer(w2_columns=41)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("moelora: fused_experts_lora hidden_states=fp32[3,72]@cpu w13=")
    assert "w2=fp32[4,72,41]@cpu" in line
    assert "token_lora_mapping" not in line
    assert line.endswith("activation=0 apply_router_weight_on_input=False")
    assert "activation_limit" not in line


def test_strides_are_shown_where_they_matter(ask, capsys):
    ask(shapes=True)
    moelora.moe_align_block_size(torch.zeros(2, 4, dtype=torch.int32)[:, ::2], 4, 3)
    assert "topk_ids=int32[2,2]strides[4,2]@cpu" in capsys.readouterr().err


def test_a_dump_can_be_replayed(ask, tmp_path, capsys):
    ask(dump=str(tmp_path / "dumps"))
    layer()
    assert not (tmp_path / "dumps").exists()
    with pytest.raises(ValueError, match=r"w2\.size"):
        layer(w2_columns=41)
    (path,) = (tmp_path / "dumps").iterdir()
    content = trace.load_dump(path)
    assert content["op"] == "fused_experts_lora"
    assert "w2.size" in content["error"]
    assert main(["replay", str(path), "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "w2=fp32[4,72,41]@cpu" in out
    assert "raises now: " in out

    content["args"][2] = content["args"][2][:, :, :40]  # strides survive
    torch.save(content, path)
    assert trace.load_dump(path)["args"][2].stride() == (72 * 41, 41, 1)
    assert main(["replay", str(path), "--device", "cpu"]) == 0
    assert "returns now: [3, 72] torch.float32" in capsys.readouterr().out


def test_a_dump_keeps_the_numbers_of_an_activation(ask, tmp_path, monkeypatch, capsys):
    ask(dump=str(tmp_path), shapes=True)
    monkeypatch.setattr(trace, "_dumps", iter(range(100)))
    numbers = {"activation": "swigluoai_uninterleave", "activation_limit": 0.5}
    with pytest.raises(ValueError, match=r"w2\.size"):
        layer(w2_columns=41, **numbers, activation_alpha=1.25)
    assert "activation=4 activation_alpha=1.25 activation_limit=0.5" in capsys.readouterr().err
    (path,) = tmp_path.iterdir()
    assert main(["replay", str(path), "--device", "cpu"]) == 1
    assert "activation_alpha=1.25 activation_limit=0.5" in capsys.readouterr().out


def test_dumps_end_before_the_disk_does(ask, tmp_path, monkeypatch):
    ask(dump=str(tmp_path))
    monkeypatch.setattr(trace, "_dumps", iter(range(100)))
    for _ in range(trace.MAX_DUMPS + 3):
        with pytest.raises(ValueError):
            layer(w2_columns=41)
    assert len(list(tmp_path.iterdir())) == trace.MAX_DUMPS


def test_a_dump_that_cannot_be_written_hides_nothing(ask, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setattr(trace, "_dumps", iter(range(100)))
    ask(dump=str(tmp_path / "file"))
    with pytest.raises(ValueError, match=r"w2\.size"):
        layer(w2_columns=41)
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", [b"text", {"op": "gone"}, {"op": "prepack_weights", "args": []}]
)
def test_other_files_are_not_replayed(content, tmp_path, capsys):
    path = tmp_path / "dump.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    assert main(["replay", str(path)]) == 2
    assert "is not a dump of moelora" in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "gone.pt")]) == 2


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has NVTX")
def test_ranges_are_turned_off_where_there_are_none(ask):
    ask(nvtx=True)
    with pytest.warns(RuntimeWarning, match="has no NVTX"):
        assert layer().shape == (3, 72)
    assert not trace.settings.nvtx


@pytest.mark.gpu
def test_ranges_name_the_operator(ask, monkeypatch):
    ask(nvtx=True)
    pushed = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", pushed.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: pushed.append("pop"))
    layer()
    assert pushed == ["moelora.fused_experts_lora [3, 72]", "pop"]


def test_the_self_test_covers_what_can_run(capsys):
    found = dict(selftest.run())
    assert found.keys() >= {*_C.usable(), "alignment, cpu"}
    assert not any(found.values()), found
    assert main(["info"]) == 0
    assert f"{len(found)} checks, 0 wrong" in capsys.readouterr().out


def test_the_self_test_notices(monkeypatch, capsys):
    right = moelora.fused_experts_lora
    monkeypatch.setattr(moelora, "fused_experts_lora", lambda **kw: 1.1 * right(**kw))
    assert main(["info"]) == 1
    assert "off by 0.1" in capsys.readouterr().out
    assert main(["info", "--no-test"]) == 0

    def broken(**kwargs):
        raise RuntimeError("no kernel [/image]")

    monkeypatch.setattr(moelora, "fused_experts_lora", broken)
    assert "no kernel [/image]" in dict(selftest.run())[_C.usable()[0]]
    assert main(["info"]) == 1
    assert "[/image]" in capsys.readouterr().out
