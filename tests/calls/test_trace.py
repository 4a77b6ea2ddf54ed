"""Logs, ranges and dumps around operators, replay, and the self-test of `info`."""

import json
import os
import re
import stat
import subprocess
import sys

import pytest
import torch
from checks import largest_allocation
from conftest import needs_gpu
from safetensors.torch import save_file

import moelora
from moelora import _C
from moelora.__main__ import main
from moelora.commands import selftest
from moelora.operators import dump, trace


@pytest.fixture
def ask(monkeypatch):
    """Turns settings on for one test."""

    def on(**settings):
        monkeypatch.setattr(trace, "settings", trace.Settings(**settings))
        monkeypatch.setattr(trace, "active", trace.settings.active)

    return on


def layer(w2_columns=40, hidden_states=None, **kwargs):
    x = torch.randn(3, 72) if hidden_states is None else hidden_states
    topk_weights, topk_ids = torch.randn(x.size(0), 4).softmax(-1).topk(2)
    w13, w2 = torch.randn(4, 80, 72), torch.randn(4, 72, w2_columns)
    return moelora.fused_experts_lora(x, w13, w2, topk_weights, topk_ids, **kwargs)


def test_nothing_is_on_by_default(monkeypatch):
    monkeypatch.setattr(_C, "logs_shapes", lambda: False)
    monkeypatch.delenv("MOELORA_DUMP", raising=False)
    assert not trace.Settings.from_environment().active


UNKNOWN = ("shape", "PLAN", "plan,shapes", "1")
# Imports torch once, and moelora in a process for each word, as the environment is read once.
RUN = """
import os, sys, torch
folder, *words = sys.argv[1:]
for word in words:
    if os.fork() == 0:
        os.environ["MOELORA_LOG"] = word
        os.dup2(os.open(f"{folder}/of {word}", os.O_CREAT | os.O_WRONLY), 2)
        import moelora
        x, w = torch.ones(2, 4), torch.ones(1, 4, 4)
        for _ in range(2):
            moelora.fused_moe_lora_gemm(x, w, x[:, :1], torch.zeros(2, 1).int())
        os._exit(0)
    assert os.wait()[1] == 0, word
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """{word of MOELORA_LOG: lines on stderr}."""
    folder, words = tmp_path_factory.mktemp("log"), ("", "plan", "shapes", *UNKNOWN)
    env = {"PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", RUN, str(folder), *words], env=env, check=True)
    return {word: (folder / f"of {word}").read_text().splitlines() for word in words}


@pytest.mark.parametrize(
    ("word", "shapes", "plans", "warnings"),
    [("", 0, 0, 0), ("plan", 0, 2, 0), ("shapes", 2, 2, 0), *((w, 0, 0, 1) for w in UNKNOWN)],
)
def test_words_of_the_log(said, word, shapes, plans, warnings):
    """One reader decides for the library and for Python, and tells what it does not know once."""
    lines = said[word]
    assert sum(line.startswith("moelora: fused_moe_lora_gemm x=") for line in lines) == shapes
    assert sum(line.startswith("moelora: gemm float32 M=2") for line in lines) == plans
    assert lines.count(f"moelora: MOELORA_LOG={word}: wanted plan or shapes") == warnings
    assert len(lines) == shapes + plans + warnings


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
    assert capsys.readouterr().err == (
        "moelora: moe_align_block_size topk_ids=int32[2,2]strides[4,2]@cpu block_size=4 "
        "num_experts=3\n"
    )


def test_a_dump_can_be_replayed(dumps, tmp_path, capsys):
    folder = dumps()
    layer()
    assert not folder.exists()
    refused()
    (path,) = folder.iterdir()
    content = dump.load(path)
    assert content["op"] == "fused_experts_lora"
    assert "w2.size" in content["error"]
    assert main(["replay", str(path), "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "w2=fp32[4,72,41]@cpu" in out
    assert "raises now: " in out

    args = list(content["args"])
    args[2] = args[2][:, :, :40]  # strides survive
    right = tmp_path / "right.safetensors"
    dump.write(right, content["op"], args, ValueError("none"))
    assert dump.load(right)["args"][2].stride() == (72 * 41, 41, 1)
    assert main(["replay", str(right), "--device", "cpu"]) == 0
    assert "returns now: [3, 72] torch.float32" in capsys.readouterr().out


@pytest.fixture
def dumps(ask, tmp_path, monkeypatch):
    """A folder for dumps of a process that has written none; `dumps(**settings)` changes more."""

    def on(**settings):
        ask(dump=str(tmp_path / "dumps"), **settings)
        return tmp_path / "dumps"

    monkeypatch.setattr(trace, "_dumps", iter(range(100)))
    monkeypatch.setattr(trace, "_dumped", 0)
    return on


def refused(**arguments):
    with pytest.raises(ValueError, match=r"w2\.size|stride"):
        layer(w2_columns=41, **arguments)


def test_a_dump_is_its_owners_alone(dumps):
    folder = dumps()
    refused()
    refused()
    names = sorted(path.name for path in folder.iterdir())
    assert all(
        re.fullmatch(r"moelora-\w+-\d+-[01]-[0-9a-f]{16}\.safetensors", name) for name in names
    )
    assert names[0].split("-")[-1] != names[1].split("-")[-1]
    assert stat.S_IMODE(folder.stat().st_mode) & 0o077 == 0
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 for path in folder.iterdir())


@pytest.mark.parametrize("kind", ["file", "link", "dangling"])
def test_a_dump_goes_over_nothing_and_follows_no_link(dumps, monkeypatch, capsys, kind):
    """Even where somebody has guessed the name."""
    folder = dumps()
    folder.mkdir()
    monkeypatch.setattr(trace.secrets, "token_hex", lambda n: "0" * 2 * n)
    path = folder / f"moelora-fused_experts_lora-{os.getpid()}-0-{'0' * 16}.safetensors"
    target = path if kind == "file" else folder.parent / "target"
    if kind != "dangling":
        target.write_text("theirs")
    if kind != "file":
        path.symlink_to(target)
    refused()
    assert "cannot write" in capsys.readouterr().err
    assert not target.exists() if kind == "dangling" else target.read_text() == "theirs"


VIEWS = {
    "part of a storage": lambda x: torch.zeros(1 << 22)[: x.numel()].view_as(x).copy_(x),
    "far apart": lambda x: x.new_zeros(3, 1 << 20)[:, :72].copy_(x),
    "expanded": lambda x: x[:1].expand(3, -1),
    "transposed": lambda x: x.t().contiguous().t(),
    "overlapping": lambda x: x.flatten().as_strided((3, 72), (7, 1)),
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_dump_holds_elements_not_storages(dumps, capsys, view):
    folder = dumps()
    hidden_states = VIEWS[view](torch.randn(3, 72))
    refused(hidden_states=hidden_states)
    (path,) = folder.iterdir()
    content = dump.load(path)
    got = content["args"][0]
    assert torch.equal(got, hidden_states)
    assert got.stride() == hidden_states.stride()
    weights = 4 * (4 * 80 * 72 + 4 * 72 * 41)
    assert path.stat().st_size < weights + 20_000
    assert main(["replay", str(path), "--device", "cpu"]) == 1
    assert f"raises now: {content['error']}" in capsys.readouterr().out


@pytest.mark.gpu
@needs_gpu
def test_strides_survive_on_a_gpu():
    cpu = torch.randn(3, 41)[:, :40]
    for t in (cpu, cpu[:1].expand(3, -1), cpu.t()):
        there = dump.moved(t, "cuda")
        assert there.is_cuda and there.stride() == t.stride() and torch.equal(there.cpu(), t)


def test_dumps_end_before_the_disk_is_theirs(dumps, capsys):
    """Their sizes are bounded for a process; a call takes 0.14 MiB here."""
    folder = dumps(dump_mib=1)
    for _ in range(8):
        refused()
    assert 4 < len(list(folder.iterdir())) < 8
    assert sum(path.stat().st_size for path in folder.iterdir()) < 1 << 20
    assert "are more than the 1 MiB of a process" in capsys.readouterr().err


def test_the_bound_counts_elements_before_they_are_copied(dumps, capsys):
    folder = dumps(dump_mib=1)
    refused(hidden_states=torch.zeros(1, 72).expand(3, -1))
    refused(hidden_states=torch.zeros(1 << 20, 72))
    assert len(list(folder.iterdir())) == 1
    assert "its 312 MiB" in capsys.readouterr().err


def test_no_half_of_a_dump_stays(dumps, monkeypatch, capsys):
    def full(tensor):
        raise OSError("no space left")

    folder = dumps()
    monkeypatch.setattr(torch.Tensor, "numpy", full)
    refused()
    assert not list(folder.iterdir())
    assert "no space left" in capsys.readouterr().err


def test_a_dump_keeps_the_numbers_of_an_activation(dumps, capsys):
    folder = dumps(shapes=True)
    numbers = {"activation": "swigluoai_uninterleave", "activation_limit": 0.5}
    refused(**numbers, activation_alpha=1.25)
    assert "activation=4 activation_alpha=1.25 activation_limit=0.5" in capsys.readouterr().err
    (path,) = folder.iterdir()
    assert main(["replay", str(path), "--device", "cpu"]) == 1
    assert "activation_alpha=1.25 activation_limit=0.5" in capsys.readouterr().out


def test_dumps_end_before_the_disk_does(dumps):
    folder = dumps()
    for _ in range(trace.MAX_DUMPS + 3):
        refused()
    assert len(list(folder.iterdir())) == trace.MAX_DUMPS


def test_a_dump_that_cannot_be_written_hides_nothing(dumps, capsys):
    dumps().touch()
    refused()
    assert "cannot write" in capsys.readouterr().err


def packed(**changes):
    """A dump of a call that returns, with changes to its JSON or to how it describes the tensor."""
    tensor = {"tensor": "0", "dtype": "float32", "shape": [1, 64, 64], "strides": [4096, 64, 1]}
    call = {"op": "prepack_weights", "error": "none", "moelora": "0", "torch": "2"}
    at_tensor = changes.keys() & tensor.keys()
    tensor |= {key: changes.pop(key) for key in at_tensor}
    return {**call, "args": [tensor], **changes}


def write_dump(path, call, tensors=None):
    text = call if isinstance(call, str) else json.dumps(call)
    tensors = {"0": torch.zeros(64 * 64 * 4, dtype=torch.uint8)} if tensors is None else tensors
    save_file(tensors, path, {dump.KEY: text})
    return str(path)


IDS = {"tensor": "0", "dtype": "int32", "shape": [64, 64], "strides": [64, 1]}
WEIGHTS = IDS | {"dtype": "float32"}
NONE = {"tensor": "1", "dtype": "int32", "shape": [0], "strides": [1]}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("text", "Expecting value"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "is a list, wanted an object"),
        ({}, "op is a NoneType, wanted a string"),
        *(
            (packed(**{key: value}), f"{key} is a {type(value).__name__}, wanted a string")
            for key in ("op", "error", "moelora", "torch")
            for value in (None, 3, ["x"])
        ),
        (packed(args=None), "args is a NoneType, wanted a list"),
        (packed(args=[]), "prepack_weights takes 1 to 1 arguments"),
        (packed(args=["x"]), "an argument is a str"),
        (packed(args=[[[]]]), "a list holds something else than tensors"),
        (packed(op="gone"), "'gone' is no operator"),
        (packed(op="__class__"), "is no operator"),
        (packed(op="a.b\0c"), "is no operator"),
        (packed(tensor="9"), "9"),
        (packed(tensor=None), "tensor None has dtype"),
        (packed(dtype="Tensor"), "has dtype 'Tensor'"),
        (packed(dtype="float64"), "has \\[16384\\] bytes, wanted those of"),
        (packed(shape=[2]), "wanted as many of both"),
        (packed(shape=["1", 64, 64]), "wanted as many of both"),
        (packed(shape=[True, 64, 64]), "wanted as many of both"),
        (packed(strides=[-1, 64, 1]), "wanted as many of both"),
        (packed(shape=[1] * 100, strides=[1] * 100), "wanted as many of both"),
        (packed(shape=[1, 64, 65]), "has \\[16384\\] bytes, wanted those of"),
        # More than the file explains: gaps, what is expanded, results, tables.
        (packed(strides=[1, 1 << 20, 1]), "takes 264241408 bytes"),
        (packed(strides=[1, 1 << 62, 1]), "takes .* bytes; all of a call, at most"),
        (packed(shape=[1 << 40, 64, 64], strides=[0, 64, 1]), "takes .* bytes; all of a call"),
        (packed(args=packed(strides=[1, 1 << 15, 1])["args"] * 10), "takes 8257792 bytes; all of"),
        (packed(op="moe_align_block_size", args=[IDS, 4, 1 << 30, NONE]), "num_experts is 107"),
        (
            packed(op="moe_sorting", args=[IDS, WEIGHTS, 1 << 19, 1 << 11, NONE, NONE]),
            "a result of",
        ),
    ],
)
def test_other_files_are_not_replayed(call, message, tmp_path, capsys):
    tensors = {name: torch.zeros(n, dtype=torch.uint8) for name, n in (("0", 1 << 14), ("1", 0))}
    path = write_dump(tmp_path / "dump", call, tensors)
    with largest_allocation() as largest:
        assert main(["replay", path, "--device", "cpu"]) == 2
    assert largest.nbytes <= dump.BYTES + dump.TIMES * os.stat(path).st_size
    assert re.search(f"moelora replay: .* is not a dump of moelora: .*{message}", told(capsys))


def told(capsys):
    """What a command wrote to stderr: one line that a terminal does not act on."""
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isprintable()
    return line


def test_lists_that_count_no_experts_are_replayed(tmp_path):
    """As vLLM's operators give them, beside a factor that experts share."""
    one = torch.zeros(1, dtype=torch.int32)
    rows = (torch.ones(1, 1), one[None], one[None], one, one[:0], 1, one, one, one, 2**31 - 1, 1)
    args = [torch.zeros(1, 1, 1, 8), torch.ones(1, 8), [torch.ones(1, 1, 8, 8)], *rows]
    dump.write(tmp_path / "dump", "fused_moe_lora_shrink", args, ValueError("none"))
    assert main(["replay", str(tmp_path / "dump"), "--device", "cpu"]) == 0


def test_files_that_are_no_dumps(tmp_path, capsys):
    path, numbers = tmp_path / "dump", {"0": torch.zeros(1 << 14, dtype=torch.int8)}
    other = "is not a dump of moelora: "
    texts = (b"text", b"", b"\0" * 100, json.dumps(packed()).encode())
    for write, message in (
        *((lambda text=text: path.write_bytes(text), other) for text in texts),
        (lambda: torch.save({"op": "prepack_weights", "args": []}, path), other),  # not unpickled
        (lambda: save_file({"0": torch.zeros(3)}, path), "its header has no moelora_dump"),
        (lambda: write_dump(path, packed(), numbers), "is stored as torch.int8, wanted uint8"),
    ):
        write()
        assert main(["replay", str(path)]) == 2
        assert message in told(capsys)
    os.mkfifo(tmp_path / "pipe")
    for name in ("gone", "pipe", "."):
        assert main(["replay", str(tmp_path / name)]) == 2
        assert str(tmp_path / name) in told(capsys)


def test_strings_of_a_dump_do_not_reach_the_terminal(tmp_path, capsys):
    nasty = "\x1b]0;title\x07\x1b[2J\n\u202e\udc80 ü"
    path = tmp_path / "\x1b[1m"
    call = packed(error=nasty, moelora=nasty, torch=nasty)
    assert main(["replay", write_dump(path, call), "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all(line.isprintable() for line in lines)
    assert lines[1].count(r"\x1b]0;title\x07\x1b[2J\n\u202e\udc80 ü") == 3
    assert main(["replay", write_dump(path, packed(op=nasty)), "--device", "cpu"]) == 2
    assert r"\x1b" in told(capsys)


@pytest.mark.skipif(_C.has_cuda(), reason="there is a GPU")
def test_a_device_that_is_not_there(tmp_path, capsys):
    assert main(["replay", write_dump(tmp_path / "a", packed()), "--device", "cuda"]) == 2
    assert "moelora replay: " in told(capsys)


def test_the_self_test_covers_what_can_run(capsys):
    found = dict(selftest.run())
    assert found.keys() >= {*_C.usable(), "alignment, cpu"}
    assert not any(found.values()), found
    assert main(["info"]) == 0
    assert f"{len(found)} checks, 0 incorrect" in capsys.readouterr().out


def test_the_self_test_says_what_it_did_not_run(monkeypatch, capsys):
    """A kernel that was forced, and is in no plan."""
    monkeypatch.setattr(_C, "last_plan", lambda: "w13=another w2=one")
    assert {found for what, found in selftest.run() if what in _C.usable()} == {None}
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert "usable, not run" in out
    assert f"no layer of them has the other {len(_C.usable())} kernels" in out


@pytest.mark.parametrize("form", ["", "nvfp4", "fp8 x"])
def test_the_self_test_notices(form, monkeypatch, capsys):
    """A product that is wrong for weights of one kind."""
    right = moelora.fused_experts_lora
    layers = list(selftest._layers(_C.usable()[1]))
    wrong = {id(selftest._problem(*layer)["w13"]) for layer in layers if layer[-1] == form}

    def sometimes(**kwargs):
        return right(**kwargs) * (1.1 if id(kwargs["w13"]) in wrong else 1)

    monkeypatch.setattr(moelora, "fused_experts_lora", sometimes)
    assert main(["info"]) == 1
    assert f"{form or 'weights as they are'}, 24 tokens: off by 0.1" in capsys.readouterr().out
    assert main(["info", "--no-test"]) == 0

    def broken(**kwargs):
        raise RuntimeError("no kernel [/image]")

    monkeypatch.setattr(moelora, "fused_experts_lora", broken)
    assert "no kernel [/image]" in dict(selftest.run())[_C.usable()[0]]
    assert main(["info"]) == 1
    assert "[/image]" in capsys.readouterr().out
