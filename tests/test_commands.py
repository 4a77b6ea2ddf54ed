"""`python -m moelora`: what it says where a package is missing, and into a pipe."""

import os
import subprocess
import sys

from moelora import _C


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


def test_without_rich_the_operators_work_and_commands_say_what_is_missing():
    done = python(WITHOUT.format(package="rich") + "sys.exit(main(['info']))")
    assert done.returncode == 2
    assert done.stderr == "python -m moelora needs rich: pip install rich\n"


def test_without_safetensors_only_reading_adapters_fails(tmp_path):
    (tmp_path / "adapter_model.safetensors").touch()
    code = WITHOUT.format(package="safetensors") + (
        "from pathlib import Path\n"
        "from moelora.adapters.checkpoint import open_weights\n"
        f"with open_weights(Path({str(tmp_path)!r})): pass"
    )
    done = python(code)
    assert "reading adapters needs safetensors: pip install safetensors" in done.stderr
    assert "ModuleNotFoundError" not in done.stderr
