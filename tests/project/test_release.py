"""What a release consists of: the checks of its files, its index, its bill of materials."""

import hashlib
import io
import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "release"))
import check  # noqa: E402
import hub  # noqa: E402
import index  # noqa: E402
import prepare  # noqa: E402

URLS = [f"Project-URL: {name}, https://example.org/{name}" for name in sorted(check.URLS)]
WHEEL = "moelora-0.1.0-cp310-abi3-manylinux_2_28_x86_64.whl"


def headers(version="0.1.0", urls=URLS):
    lines = ["Metadata-Version: 2.4", "Name: moelora", f"Version: {version}", *urls]
    lines += ["License-Expression: Apache-2.0", "Requires-Dist: torch>=2.11"]
    return "\n".join([*lines, 'Requires-Dist: rich; extra == "cli"', "", ""])


def write_wheel(folder, name=WHEEL, extension=b"\x7fELF", **more):
    with zipfile.ZipFile(folder / name, "w") as archive:
        archive.writestr("moelora/_C.abi3.so", extension)
        archive.writestr("moelora-0.1.0.dist-info/METADATA", headers(**more))
        archive.writestr("moelora-0.1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
    return folder / name


def write_sdist(folder, size=0, **more):
    path = folder / "moelora-0.1.0.tar.gz"
    with tarfile.open(path, "w") as archive:
        for name, data in {"PKG-INFO": headers(**more).encode(), "data": bytes(size)}.items():
            about = tarfile.TarInfo(f"moelora-0.1.0/{name}")
            about.size = len(data)
            archive.addfile(about, io.BytesIO(data))
    return path


def test_files_that_are_fit_to_publish(tmp_path):
    files = [write_sdist(tmp_path), write_wheel(tmp_path)]
    assert check.check(files) == check.check(files, "v0.1.0") == []


@pytest.mark.parametrize(
    ("sdist", "wheel", "tag", "problem"),
    [
        ({"size": 2_000_000}, {}, None, "bytes, wanted at most 2000000: MANIFEST.in"),
        ({}, {"urls": URLS[1:]}, None, "has no Project-URL Changelog: no address"),
        ({}, {"name": WHEEL.replace("manylinux_2_28", "linux")}, None, "is not an abi3 wheel"),
        ({}, {"version": "0.2.0"}, None, "files are of several versions: 0.1.0, 0.2.0"),
        ({}, {}, "v0.2.0", "the tag is v0.2.0, files are of version 0.1.0"),
        (None, {}, None, "there are 0 source distributions and 1 wheels, wanted one"),
    ],
)
def test_what_is_not_fit_to_publish_is_named(tmp_path, sdist, wheel, tag, problem):
    files = [write_wheel(tmp_path, **wheel)]
    files += [] if sdist is None else [write_sdist(tmp_path, **sdist)]
    (found,) = check.check(files, tag)
    assert problem in found


@pytest.mark.parametrize(("limit", "pypi"), [(check.PYPI_BYTES, "true"), (100, "false")])
def test_wheels_that_pypi_refuses_are_for_an_index_page(tmp_path, monkeypatch, limit, pypi):
    folder, output = tmp_path / "dist", tmp_path / "output"
    folder.mkdir()
    write_sdist(folder), write_wheel(folder)
    monkeypatch.setenv("GITHUB_OUTPUT", str(output))
    monkeypatch.setattr(check, "PYPI_BYTES", limit)
    checked = []
    done = subprocess.CompletedProcess([], 0)
    monkeypatch.setattr(check.subprocess, "run", lambda words: checked.append(words) or done)
    assert check.main([str(folder)]) == 0
    assert output.read_text() == f"pypi={pypi}\n"
    assert "--strict" in checked[0]


def test_pip_installs_from_the_index(tmp_path):
    """By name and version; a file with other contents than the page says is refused."""
    wheel = write_wheel(tmp_path)
    page = index.index([wheel], tmp_path / "index")
    words = [sys.executable, "-m", "pip", "download", "--isolated", "-q", "--no-deps"]
    words += [
        "--only-binary=:all:",
        "--platform=manylinux_2_28_x86_64",
        "--index-url",
        (tmp_path / "index").as_uri(),
    ]
    words += ["-d", str(tmp_path / "got"), "moelora==0.1.0"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "got" / WHEEL).read_bytes() == wheel.read_bytes()
    (page.parent / WHEEL).write_bytes(b"another")
    (tmp_path / "got" / WHEEL).unlink()
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode != 0 and "hash" in done.stderr.lower()


def test_the_index_keeps_earlier_releases(tmp_path):
    first, second = write_wheel(tmp_path), write_wheel(tmp_path, WHEEL.replace("0.1.0", "0.2.0"))
    for tag, wheel in (("v0.1.0", first), ("v0.2.0", second)):
        page = index.index([wheel], tmp_path / "index", f"https://example.org/download/{tag}/")
    digest = hashlib.sha256(second.read_bytes()).hexdigest()
    text = page.read_text()
    assert f'"https://example.org/download/v0.2.0/{second.name}#sha256={digest}"' in text
    assert f"download/v0.1.0/{first.name}#sha256=" in text
    assert not list(page.parent.glob("*.whl"))


def test_the_bill_of_materials(tmp_path):
    pytest.importorskip("cyclonedx")
    import sbom

    wheel, out = write_wheel(tmp_path), ["--out", str(tmp_path / "sbom")]
    assert sbom.main([str(tmp_path), *out]) == 0
    bill = json.loads((tmp_path / "sbom/x86_64.cdx.json").read_text())
    root = bill["metadata"]["component"]
    assert root["hashes"][0]["content"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert [part["name"] for part in bill["components"]] == ["torch"]
    write_wheel(tmp_path, extension=b"\x7fELF .nv_fatbin")
    with pytest.raises(SystemExit, match="--cuda names its version"):
        sbom.main([str(tmp_path), *out])
    assert sbom.main([str(tmp_path), *out, "--cuda", "13.0.88"]) == 0
    bill = json.loads((tmp_path / "sbom/x86_64.cdx.json").read_text())
    assert ("cudart_static", "13.0.88") in [
        (p["name"], p.get("version")) for p in bill["components"]
    ]


def test_builds_of_the_hub_run_beside_this_moelora(tmp_path):
    trees = [tmp_path / str(version) for version in (1, 2)]
    for version, tree in enumerate(trees, 1):
        hub.main([str(tree), str(ROOT / "moelora"), "--version", str(version)])
    loads = [sys.executable, ROOT / "tests/project/check_hub.py", *trees]
    out = subprocess.run(loads, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert "moelora" in out.stdout.split()


def test_a_wheel_with_cuda_becomes_a_build_of_its_toolkit(tmp_path):
    wheel = write_wheel(tmp_path, extension=b"\x7fELF .nv_fatbin")
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("moelora/__init__.py", "from moelora import _C\n")
        archive.writestr("moelora/a/b.py", "from moelora.a.c import d\nfrom moelora import e\n")
    hub.main([str(tmp_path / "tree"), str(wheel)])
    build = tmp_path / "tree/build/torch-stable-abi211-cu130-x86_64-linux"
    assert (build / "__init__.py").read_text().startswith("from . import _C\n")
    assert (build / "a/b.py").read_text() == "from ..a.c import d\nfrom .. import e\n"
    metadata = json.loads((build / "metadata.json").read_text())
    assert metadata["backend"] == {"type": "cuda", "archs": ["8.0", "9.0a", "10.0", "12.0"]}
    assert set(metadata["digest"]["files"]) >= {"_C.abi3.so", "__init__.py", "a/b.py", "layers.py"}


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({}, "has no _C.abi3.so: make build, or name a wheel"),
        (
            {"_C.abi3.so": "", "a.py": "import moelora\n"},
            "a.py: line 1: write `from moelora import",
        ),
    ],
)
def test_packages_that_no_build_of_the_hub_can_be_made_of(tmp_path, files, problem, capsys):
    package = tmp_path / "moelora"
    package.mkdir()
    for name, text in files.items():
        (package / name).write_text(text)
    with pytest.raises((SystemExit, ValueError)) as raised:
        hub.main([str(tmp_path / "tree"), str(package)])
    assert problem in f"{raised.value}{capsys.readouterr().err}"


@pytest.fixture
def repository(tmp_path):
    """The files that a release changes, committed, with a release 0.0.9."""
    for name, *_ in prepare.PLACES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    prepare.git("init", "--quiet", root=tmp_path)
    for key, value in (("user.name", "a"), ("user.email", "a@example.org")):
        prepare.git("config", key, value, root=tmp_path)
    prepare.git("add", "--all", root=tmp_path)
    prepare.git("commit", "--quiet", "--message", "all", root=tmp_path)
    prepare.git("tag", "v0.0.9", root=tmp_path)
    return tmp_path


def test_a_release_is_a_commit_and_a_tag(repository):
    assert prepare.prepare("7.8.9", repository) == "v7.8.9"
    shown = prepare.git("show", "--format=%s %D", "v7.8.9^{}", root=repository)
    assert shown.startswith("release: moelora 7.8.9 ")
    assert "tag: v7.8.9" in shown
    for line in ('+#define MOELORA_VERSION "7.8.9"', "+version: 7.8.9", "+## 7.8.9 (20"):
        assert line in shown
    assert prepare.git("status", "--porcelain", root=repository) == ""


@pytest.mark.parametrize(
    ("version", "changes", "problem"),
    [
        ("0.1", {}, "the version is '0.1', wanted three numbers"),
        ("0.0.9", {}, "there are releases 0.0.9"),
        ("0.0.8", {}, "there are releases 0.0.9"),
        ("1.0.0", {"CITATION.cff": "version: 2\n"}, "changes that are not committed"),
        ("1.0.0", {"CHANGELOG.md": "# Changelog\n"}, "CHANGELOG.md has 0 lines"),
    ],
)
def test_releases_that_are_refused_change_nothing(repository, version, changes, problem):
    for name, text in changes.items():
        (repository / name).write_text(text)
    if "not committed" not in problem and changes:
        prepare.git("commit", "--quiet", "--all", "--message", "change", root=repository)
    before = [prepare.git(*words, root=repository) for words in (["rev-parse", "HEAD"], ["diff"])]
    with pytest.raises(ValueError, match=problem):
        prepare.prepare(version, repository)
    after = [prepare.git(*words, root=repository) for words in (["rev-parse", "HEAD"], ["diff"])]
    assert after == before
