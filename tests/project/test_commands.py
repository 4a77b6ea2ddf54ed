"""`moelora`: what it says where a package is missing, and into a pipe."""

import json
import os
import re
import subprocess
import sys

import pytest

from moelora import _C
from moelora.__main__ import main


def python(code):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True)


def test_info_in_a_pipe_cuts_nothing():
    long = "x" * 700
    command = [sys.executable, "-m", "moelora", "info", "--no-test"]
    env = {**os.environ, "COLUMNS": "80", "MOELORA_NOTE": long}
    text = subprocess.run(command, capture_output=True, text=True, env=env, check=True).stdout
    assert _C.__file__ in text
    assert f"MOELORA_NOTE={long}" in text


WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
import moelora
from moelora.__main__ import main
"""
# Prints what main(words) returns or exits with, writes to stdout and to stderr, for each words.
CALLS = """
import contextlib, io, json

def call(words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(words)
        except SystemExit as stopped:
            status = stopped.code
    return status, out.getvalue(), err.getvalue()

print(json.dumps([call(words) for words in {words}]))
"""


def test_without_rich_commands_without_tables_work_and_others_say_so():
    """Whatever they are asked."""
    fine = ["--version"], ["--help"], ["replay", "--help"], ["doctor", "--help"]
    refused = ["info"], ["bench", "--help"], ["tune", "--models", "qwen3"], ["bench"]
    words = [*fine, *refused]
    done = python(WITHOUT.format(package="rich") + CALLS.format(words=words))
    assert done.returncode == 0, done.stderr
    found = [tuple(each) for each in json.loads(done.stdout)]
    assert [(status, err) for status, _, err in found[: len(fine)]] == [(0, "")] * len(fine)
    assert ["moelora " + _C.version() in out for _, out, _ in found[: len(fine)]] == [1, 0, 0, 0]
    assert re.search(r"\n +bench +needs rich: pip install 'moelora\[cli\]'\n", found[1][1])
    needs = (2, "", "moelora needs rich: pip install 'moelora[cli]'\n")
    assert found[len(fine) :] == [needs] * len(refused)


def test_without_rich_a_dump_is_replayed(tmp_path):
    code = WITHOUT.format(package="rich") + (
        "import os, torch\n"
        "x = torch.ones(2, 8)\n"
        "try: moelora.fused_experts_lora(x, x, x, x, x)\n"
        "except Exception: pass\n"
        f"(file,) = (entry.path for entry in os.scandir({str(tmp_path)!r}))\n"
        "sys.exit(main(['replay', '--device', 'cpu', file]))"
    )
    command = [sys.executable, "-c", code]
    env = {**os.environ, "MOELORA_DUMP": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 1, done.stderr
    assert "raises now: " in done.stdout


@pytest.mark.parametrize("words", [["info", "--what"], ["bench", "compare", "a", "b", "c"]])
def test_unknown_words_are_refused(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert f"unrecognized arguments: {words[-1]}" in capsys.readouterr().err


def test_without_safetensors_only_reading_adapters_fails(tmp_path):
    (tmp_path / "adapter_model.safetensors").touch()
    code = WITHOUT.format(package="safetensors") + (
        "from pathlib import Path\n"
        "from moelora.adapters.weights import open_weights\n"
        f"with open_weights(Path({str(tmp_path)!r})): pass"
    )
    done = python(code)
    assert "reading adapters needs safetensors: pip install safetensors" in done.stderr
    assert "ModuleNotFoundError" not in done.stderr


def test_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"moelora {_C.version()}\n"


def test_info_ends_with_a_block_for_a_bug_report(capsys):
    assert main(["info", "--no-test"]) == 0
    before, _, block = capsys.readouterr().out.rpartition("```text\n")
    assert "To paste into a bug report" in before
    lines = block.rstrip().splitlines()
    assert lines[-1] == "```"
    assert f"moelora: {_C.version()}" in lines
    assert "self-test: not run" in lines
    assert _C.__file__ not in block


COMMANDS = (["bench"], ["plot"], ["bench", "plot"], ["bench", "compare"], ["tune"], ["replay"])


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_what_is_taken_where_nothing_is_said(command, capsys):
    """Every option that takes a value; one without a default says what its absence means."""
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    text = capsys.readouterr().out
    options = text[text.index("options:") :]
    for option in re.split(r"\n  (?=-)", options)[1:]:
        words = " ".join(option.split())
        flag = re.match(r"(--?[\w-]+(?:, --?[\w-]+)*) (?=[A-Z{])", words)
        if flag and "--list" not in words:
            assert "default: " in words, words
