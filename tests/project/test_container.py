"""The recipes of containers: what can be checked of them without building them."""

import fnmatch
import re
import subprocess
from pathlib import Path

import pytest

import moelora

ROOT = Path(__file__).resolve().parents[2]
INSTRUCTIONS = {
    "FROM",
    "COPY",
    "RUN",
    "ENV",
    "LABEL",
    "ARG",
    "WORKDIR",
    "ENTRYPOINT",
    "CMD",
    "USER",
}
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


def test_instructions_are_known_and_begin_with_the_image(recipe):
    found = [name for name, *_ in instructions(recipe)]
    assert set(found) <= INSTRUCTIONS and found[0] == "FROM"


def test_the_image_is_of_one_release(recipe):
    """A tag that moves would bring an engine that nobody has tried."""
    assert given(recipe, "FROM") == [IMAGES[recipe]]
    assert IMAGES[recipe].partition(":v")[2] in (ROOT / "docs/serving.md").read_text()


@pytest.mark.parametrize("platform", ["manylinux_2_28_x86_64", "linux_x86_64"])
def test_the_wheel_that_is_built_is_copied(platform, recipe):
    ((source, place),) = (rest.split() for rest in given(recipe, "COPY"))
    wheel = f"dist/moelora-{moelora.__version__}-cp310-abi3-{platform}.whl"
    assert fnmatch.fnmatch(wheel, source)
    (run,) = given(recipe, "RUN")
    copied = place + Path(wheel).name
    patterns = [word for word in run.split() if word.startswith(place)]
    assert len(patterns) == 2 and all(fnmatch.fnmatch(copied, pattern) for pattern in patterns)


def test_pip_replaces_nothing_of_the_image_and_leaves_nothing_behind(recipe):
    (run,) = given(recipe, "RUN")
    install = run.split("&&")[0]
    assert " -m pip install " in install
    assert "--no-cache-dir" in install and "--no-deps" in install
    assert " rm " in run, "the wheel does not stay"
    assert "python3 -c" in run.split("&&")[-1], "the build fails where moelora cannot be imported"


def test_shell_commands_parse(recipe):
    for command in given(recipe, "RUN"):
        subprocess.run(["sh", "-n", "-c", command], check=True, capture_output=True)


def test_there_are_no_secrets_and_no_root_paths(recipe):
    text = (ROOT / recipe).read_text()
    assert not re.search(r"(?i)token|password|https?://[^/\s]+@|^USER root", text, re.M)


def test_docs_name_the_recipe(recipe):
    assert recipe in (ROOT / "docs/serving.md").read_text()
