"""The recipes of containers: what can be checked of them without building them, and hadolint does
not check."""

import fnmatch
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_release import WHEEL, write_wheel

ROOT = Path(__file__).resolve().parents[2]
# Images, of releases that docs/serving.md has been checked against.
IMAGES = {
    "examples/Dockerfile.vllm": "vllm/vllm-openai:v0.33.0",
    "examples/Dockerfile.sglang": "lmsysorg/sglang:v0.5.23",
}


@pytest.fixture(params=IMAGES)
def recipe(request):
    """(its path, what its FROM, COPY and RUN say)"""
    text = re.sub(r"^#.*\n|\\\n", "", (ROOT / request.param).read_text(), flags=re.M)
    steps = [line.split(maxsplit=1) for line in text.splitlines()]
    assert [name for name, _ in steps] == ["FROM", "COPY", "RUN"]
    return request.param, *(rest for _, rest in steps)


def test_the_image_is_of_one_release(recipe):
    """A tag that moves would install an engine that was never tested."""
    path, image, *_ = recipe
    page = (ROOT / "docs/serving.md").read_text()
    assert image == IMAGES[path]
    assert path in page and image.partition(":v")[2] in page


def test_pip_takes_the_newest_wheel_for_this_machine(recipe, tmp_path):
    """Several may be there, of older versions and other machines. pip replaces nothing of the
    image, no wheel stays, and the build fails where moelora cannot be imported."""
    _, _, copied, run = recipe
    source, place = copied.split()
    install, remove, imports = run.split("&&")
    assert place.endswith("/"), "where there are several wheels"
    assert "--no-deps" in install and remove.split() == ["rm", "-r", place.rstrip("/")]
    assert imports.strip() == 'python3 -c "import moelora"'
    machine, wheels = platform.machine(), tmp_path / "wheels"
    other = "aarch64" if machine == "x86_64" else "x86_64"
    wheels.mkdir()
    for version, of in (("0.1.0", machine), ("0.2.0", machine), ("0.3.0", other)):
        name = WHEEL.replace("0.1.0", version).replace("x86_64", of)
        write_wheel(wheels, name)
        assert fnmatch.fnmatch(f"dist/{name}", source)
    words = install.replace("pip install", "pip download").replace(place.rstrip("/"), str(wheels))
    command = [sys.executable, *words.split()[1:], "-d", str(tmp_path / "taken")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (taken,) = (tmp_path / "taken").iterdir()
    assert taken.name == WHEEL.replace("0.1.0", "0.2.0").replace("x86_64", machine)
