"""The recipes of containers: what can be checked of them without building them."""

import fnmatch
import platform
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import moelora

ROOT = Path(__file__).resolve().parents[2]
# Images, of releases that docs/serving.md has been checked against.
IMAGES = {
    "examples/Dockerfile.vllm": "vllm/vllm-openai:v0.33.0",
    "examples/Dockerfile.sglang": "lmsysorg/sglang:v0.5.23",
}


@pytest.fixture(params=IMAGES)
def recipe(request):
    return request.param


def instructions(recipe):
    """(name, arguments), with continued lines joined and comments left out."""
    lines = (ROOT / recipe).read_text().splitlines()
    lines = [line for line in lines if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def given(recipe, name):
    return [rest for instruction, rest in instructions(recipe) if instruction == name]


def test_the_image_is_of_one_release(recipe):
    """A tag that moves would install an engine that was never tested."""
    assert given(recipe, "FROM") == [IMAGES[recipe]]
    assert IMAGES[recipe].partition(":v")[2] in (ROOT / "docs/serving.md").read_text()


@pytest.mark.parametrize("of", ["manylinux_2_28_x86_64", "linux_x86_64"])
def test_the_wheel_that_is_built_is_copied(of, recipe):
    ((source, place),) = (rest.split() for rest in given(recipe, "COPY"))
    assert fnmatch.fnmatch(f"dist/{wheel_name(of)}", source)
    assert place.endswith("/"), "where there are several wheels"
    (run,) = given(recipe, "RUN")
    assert run.split().count(place.rstrip("/")) == 2


def wheel_name(platform, version=moelora.__version__):
    return f"moelora-{version}-py3-none-{platform}.whl"


def write_wheel(folder, platform, version):
    info = f"moelora-{version}.dist-info"
    tag = f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-{platform}\n"
    files = {
        "moelora.py": f"version = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: moelora\nVersion: {version}\n",
        f"{info}/WHEEL": tag,
    }
    record = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(folder / wheel_name(platform, version), "w") as wheel:
        for name, text in (files | {f"{info}/RECORD": record}).items():
            wheel.writestr(name, text)


def test_several_wheels_may_be_there(recipe, tmp_path):
    """Of an older version, and of another machine: the newest one for this machine is installed."""
    machine = platform.machine()
    other = "aarch64" if machine == "x86_64" else "x86_64"
    wheels, target = tmp_path / "wheels", tmp_path / "target"
    wheels.mkdir()
    for version, of in (("0.1.0", machine), ("0.2.0", machine), ("0.3.0", other)):
        write_wheel(wheels, f"manylinux_2_17_{of}", version)
    ((_, place),) = (rest.split() for rest in given(recipe, "COPY"))
    (run,) = given(recipe, "RUN")
    command = run.split("&&")[0].replace(place.rstrip("/"), str(wheels)).split()
    command = [sys.executable, *command[1:], "--target", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (target / "moelora.py").read_text() == "version = '0.2.0'\n"


def test_pip_replaces_nothing_of_the_image_and_leaves_nothing_behind(recipe):
    (run,) = given(recipe, "RUN")
    install = run.split("&&")[0]
    assert " -m pip install " in install
    assert "--no-cache-dir" in install and "--no-deps" in install
    assert " rm " in run, "the wheel does not stay"
    assert "python3 -c" in run.split("&&")[-1], "the build fails where moelora cannot be imported"


def test_there_are_no_secrets_and_no_root_paths(recipe):
    text = (ROOT / recipe).read_text()
    assert not re.search(r"(?i)token|password|https?://[^/\s]+@|^USER root", text, re.M)
    assert recipe in (ROOT / "docs/serving.md").read_text()
