"""`moelora`: what it imports, suggests and completes, and says where a package is missing."""

import contextlib
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys

import pytest

from moelora import _C
from moelora_cli import COMMANDS, main


def test_info_in_a_pipe_cuts_nothing():
    """Neither the version nor a variant, however narrow it is."""
    command = [sys.executable, "-m", "moelora", "info"]
    env = {**os.environ, "COLUMNS": "80", "MOELORA_NOTE": "x" * 700}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    for text in (_C.__file__, f"MOELORA_NOTE={'x' * 700}", _C.version(), *_C.variants()):
        assert text in done.stdout


def test_without_a_command_help_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["moelora"])
    monkeypatch.delitem(sys.modules, "moelora.__main__", raising=False)
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module("moelora", run_name="__main__")
    assert stopped.value.code == 2
    assert "command" in capsys.readouterr().err


FINE = ["--version"], ["--help"], ["replay", "--help"], ["doctor", "--help"]
REFUSED = ["info"], ["bench", "--help"], ["tune", "--models", "qwen3"], ["bench"]
# Without rich and safetensors: prints, for each words, what main(words) returns or exits with and
# writes to stdout and to stderr, and what reading the adapter in argv[1] raises; then, without rich
# alone, what the replay of a dump does. MOELORA_DUMP names the folder of the dump.
WITHOUT = f"""
import contextlib, io, json, os, sys
from pathlib import Path

missing = {{"rich", "safetensors"}}

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
import moelora
from moelora_cli import main

def call(words):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(words)
        except SystemExit as stopped:
            status = stopped.code
    return status, out.getvalue(), err.getvalue()

found = [call(words) for words in {[*FINE, *REFUSED]}]
from moelora.adapters.weights import open_weights
try:
    with open_weights(Path(sys.argv[1])): raised = None
except BaseException as error:
    raised = type(error).__name__, str(error)
missing.remove("safetensors")
import torch
x = torch.ones(2, 8)
try: moelora.fused_experts_lora(x, x, x, x, x)
except Exception: pass
(file,) = Path(os.environ["MOELORA_DUMP"]).iterdir()
replayed = call(["replay", "--device", "cpu", str(file)])
print(json.dumps([found, replayed, raised]))
"""


@pytest.fixture(scope="module")
def without_packages(tmp_path_factory):
    adapter = tmp_path_factory.mktemp("adapter")
    (adapter / "adapter_model.safetensors").touch()
    env = {**os.environ, "MOELORA_DUMP": str(tmp_path_factory.mktemp("dump"))}
    command = [sys.executable, "-c", WITHOUT, str(adapter)]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_without_rich_commands_without_tables_work_and_others_say_so(without_packages):
    """Whatever they are asked."""
    version = f"moelora {_C.version()}\n"
    fine, refused = without_packages[0][: len(FINE)], without_packages[0][len(FINE) :]
    assert [(status, out == version, err) for status, out, err in fine] == [
        (0, words == ["--version"], "") for words in FINE
    ]
    assert [tuple(each) for each in refused] == [
        (2, "", f"moelora {words[0]} needs rich: pip install rich\n") for words in REFUSED
    ]


def test_without_rich_a_dump_is_replayed(without_packages):
    status, out, err = without_packages[1]
    assert status == 1, err
    assert "raises now: " in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["info", "--what"], "unrecognized arguments: --what"),
        (["bench", "compare", "a", "b", "c"], "bench compare: error: unrecognized arguments: c"),
        (["--verison"], "unrecognized arguments: --verison; did you mean --version?"),
        (["adaptors", "--model", "m"], "invalid choice: 'adaptors'"),
        (["adaptors", "--model", "m"], "; did you mean adapters?"),
        (["bench", "--tokns=16"], "unrecognized arguments: --tokns; did you mean --tokens?"),
        (["bench", "--tokns", "16", "plot"], "--tokns; did you mean --tokens?"),
        (["bench", "comprae", "a", "b"], "; did you mean compare?"),
        (["bench", "plot", "a", "--picutre", "b"], "bench plot: error: unrecognized"),
    ],
)
def test_wrong_words_are_refused_with_the_nearest_right_one(words, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_help_and_typos_import_neither_torch_nor_the_package():
    """`main` is what the installed command calls."""
    words = [[], ["--help"], ["-h", "bench"], ["adaptors"]]
    code = f"""
import contextlib, sys
from moelora_cli import main
for words in {words}:
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(sys.stderr):
        main(words)
print(sorted({{"moelora", "torch", "numpy", "rich"}} & sys.modules.keys()))
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert all(about in " ".join(done.stderr.split()) for _, about in COMMANDS.values())


# Each prints what a shell offers after the line in $2, one word a line, by the script in $1.
BASH = r"""
source "$1"
COMP_WORDS=($2); [[ $2 == *' ' ]] && COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
function=$(complete -p moelora) && function=${function##*-F } && function=${function% *}
$function moelora "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\n' "${COMPREPLY[@]}"
"""
FISH = "source $argv[1]; complete -C $argv[2] | string replace -r '\t.*' ''; or true"
ZSH = r"""
zmodload zsh/zpty
zpty shell zsh -f -i
print -r -- '
PROMPT=; autoload -U compinit; compinit -u -D; eval "$(<'$1')"
before () { print; print BEGIN }; after () { print END; exit }
compprefuncs=(before); comppostfuncs=(after)
compadd () {
  [[ ${@[1,(i)(-|--)]} == *-(O|A|D)\ * ]] && { builtin compadd "$@"; return }
  local -a hits; builtin compadd -A hits "$@"; print -rl -- $hits
}
bindkey "^I" complete-word; zstyle ":completion:*" insert-tab false; print -r -- READY' > $1.rc
zpty -w shell "source $1.rc"
while zpty -r shell line; do [[ $line == READY* ]] && break; done
zpty -n -w shell "$2"$'\t'
while zpty -r shell line; do [[ $line == BEGIN* ]] && break; done
while zpty -r shell line; do [[ $line == END* ]] && break; print -r -- $line; done
"""


@pytest.fixture(scope="module", params=["bash", "zsh", "fish"])
def complete(request, tmp_path_factory):
    """Function that completes a line in a shell, as the printed script lets it."""
    shell = request.param
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    script = tmp_path_factory.mktemp("completion") / shell
    (script.parent / "some-folder").mkdir()
    with script.open("w") as file, contextlib.redirect_stdout(file):
        assert main(["completion", shell]) == 0
    first = {"bash": ["-c", BASH, "-"], "zsh": ["-f", "-c", ZSH, "-"], "fish": ["-c", FISH]}[shell]

    def words(line):
        command = [shell, *first, str(script), line]
        done = subprocess.run(
            command, cwd=script.parent, capture_output=True, text=True, check=True
        )
        return {word.rstrip("/") for word in done.stdout.split()}

    return words


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("moelora ad", {"adapters"}),
        ("moelora bench --dev", {"--device"}),
        ("moelora bench --quick --dead", {"--deadline-s"}),
        ("moelora bench --device c", {"cpu", "cuda"}),
        ("moelora bench pl", {"plot"}),
        ("moelora bench plot --picture ", {"roofline", "beside", "rl"}),
        ("moelora completion ", {"bash", "zsh", "fish"}),
        ("moelora info --no", {"--no-test"}),
        ("moelora adapters some", {"some-folder"}),
        ("moelora adapters some-folder --model some", {"some-folder"}),
        ("moelora bench compare a.json some", {"some-folder"}),
        ("moelora bench --tp some", set()),
    ],
)
def test_a_shell_completes_commands_options_values_and_paths(complete, line, words):
    found = complete(line)
    assert found - {"-h", "--help"} == words


def test_without_safetensors_only_reading_adapters_fails(without_packages):
    kind, message = without_packages[2]
    assert "reading adapters needs safetensors: pip install safetensors" in message
    assert kind == "ImportError"


def test_a_reader_that_ends_early_sees_no_traceback():
    program = [sys.executable, "-m", "moelora", "completion", "bash"]
    command = f"{shlex.join(program)} | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=300)
    assert done.stdout.count("\n") == 1 and done.stderr == ""


def test_info_ends_with_a_block_for_a_bug_report(capsys):
    assert main(["info", "--no-test"]) == 0
    before, _, block = capsys.readouterr().out.rpartition("```text\n")
    assert "To paste into a bug report" in before
    lines = block.rstrip().splitlines()
    assert lines[-1] == "```"
    assert f"moelora: {_C.version()}" in lines
    assert "self-test: not run" in lines
    assert _C.__file__ not in block


OF_VALUES = (["bench"], ["plot"], ["bench", "plot"], ["bench", "compare"], ["tune"], ["replay"])


@pytest.mark.parametrize("command", OF_VALUES)
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
