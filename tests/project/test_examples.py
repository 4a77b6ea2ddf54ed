"""Examples run where the line in their README puts them, with moelora installed and no checkout."""

import json
import os
import re
import socket
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from checkout import needs_checkout
from covering import extent

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))
import make_notebook  # noqa: E402

pytest.importorskip("peft")
pytestmark = needs_checkout

SHORT = """
engines.py
train.py --adapters charmap --steps 1 --batch 1 --windows 1
parallel.py train --steps 1 --batch 2 --length 16
parallel.py serve out/parallel
train_fsdp.py --steps 2 --batch 2 --length 16
training_service.py --help
"""
LONG = """
demo.py --windows 1 --repeats 1
quantized.py
train_demo.py --steps 1 --adapter-steps 1 --adapters charmap --model out/m --adapters-dir out/a
train_qlora.py --steps 6 --batch 4 --length 24 --lr 1e-2
train_qlora.py --experts nf4 --steps 6 --batch 4 --length 24 --lr 1e-2
whole_adapters.py
"""
HELP = re.sub(r"\b.py .*", ".py --help", re.sub(r"^\w+\.py$", "", LONG, flags=re.M))
# Scripts as Python runs them, after one import of torch.
RUN = """
import os, runpy, sys
for line in sys.argv[1].split("\\n"):
    if line:
        name, *words = line.split()
        sys.path[0], sys.argv = "examples", [name, *words]
        try:
            runpy.run_path(f"examples/{name}", run_name="__main__")
        except SystemExit as stopped:
            assert not stopped.code, (line, stopped.code)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An empty folder after the line; moelora alone is on the path, beside what it needs."""
    top = tmp_path_factory.mktemp("anywhere")
    (top / "empty").mkdir()
    (top / "site").mkdir()
    for name in ("moelora", "moelora_cli.py"):
        (top / "site" / name).symlink_to(ROOT / name)
    with tarfile.open(top / "main.tar.gz", "w:gz") as archive:  # as GitHub makes it
        for name in ("examples", "README.md"):
            archive.add(ROOT / name, f"moelora-main/{name}")
    (line,) = re.findall(r"^curl .*", (ROOT / "examples/README.md").read_text(), re.M)
    assert line == f"curl -fL {make_notebook.ARCHIVE} | {make_notebook.UNPACK}"
    assert line in (ROOT / "docs/quick-start.md").read_text()
    line = line.replace(make_notebook.ARCHIVE, (top / "main.tar.gz").as_uri())
    subprocess.run(["bash", "-o", "pipefail", "-c", line], cwd=top / "empty", check=True)
    assert [path.name for path in (top / "empty").iterdir()] == ["examples"]
    return top / "empty"


def run(code, *words, folder):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment = os.environ | alone | {"PYTHONPATH": str(folder.parent / "site")}
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.timeout(1800)
def test_examples_run_from_anywhere(folder):
    """All of them; in CI those that take long only say what they do, where they take arguments."""
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")}
    named = {line.split()[0] for line in f"{SHORT}{LONG}".split("\n") if line}
    modules = {"demo_data.py", "quantized_folders.py"}
    assert scripts - named == modules | {"make_notebook.py"}, "of pages, in a checkout"
    run(RUN, extent(nightly=SHORT + LONG, ci=SHORT + HELP), folder=folder)


def test_notebooks_take_the_examples_themselves(folder, tmp_path):
    for path in make_notebook.NOTEBOOKS.values():
        cells = json.loads(path.read_text())["cells"]
        links = "".join(cells[0]["source"])
        assert links.count(f"/main/examples/{path.name})") == 2, "of itself"
    start = "".join(next(cell for cell in cells if cell["cell_type"] == "code")["source"])
    archive = (folder.parent / "main.tar.gz").as_uri()
    start = start.replace(make_notebook.ARCHIVE, archive)
    place = folder.parent / "notebook"
    place.mkdir()
    run(f"{start}\nassert os.path.isdir('examples/demo_model')", folder=place)
