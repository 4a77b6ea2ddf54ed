"""What a release consists of: the checks of its files, its index, its bill of materials."""

import hashlib
import io
import json
import platform
import re
import shlex
import subprocess
import sys
import tarfile
import types
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "release"))
import check  # noqa: E402
import hub  # noqa: E402
import index  # noqa: E402
import prepare  # noqa: E402
import sbom  # noqa: E402

URLS = [f"Project-URL: {name}, https://example.org/{name}" for name in sorted(check.URLS)]
WHEEL = "moelora-0.1.0-cp310-abi3-manylinux_2_28_x86_64.whl"
CPU_WHEEL = WHEEL.replace("0.1.0", "0.1.0+cpu")
CUDA = b"\x7fELF .nv_fatbin"


def headers(version="0.1.0", urls=URLS):
    lines = ["Metadata-Version: 2.4", "Name: moelora", f"Version: {version}", *urls]
    lines += ["License-Expression: Apache-2.0", "Requires-Dist: torch>=2.11"]
    return "\n".join([*lines, 'Requires-Dist: rich; extra == "cli"', "", ""])


def write_wheel(folder, name=WHEEL, extension=None, init="", **more):
    with zipfile.ZipFile(folder / name, "w") as archive:
        archive.writestr("moelora/_C.abi3.so", extension or (b"" if "+cpu" in name else CUDA))
        archive.writestr("moelora/__init__.py", init)
        about = headers(**{"version": name.split("-")[1], **more})
        archive.writestr("moelora-0.1.0.dist-info/METADATA", about)
        archive.writestr("moelora-0.1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
    return folder / name


def of_aarch64(name):
    return name.replace("x86_64", "aarch64")


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
    assert check.check(files) == []
    lacking = "there is no wheel for cpu-aarch64, cpu-x86_64, cuda-aarch64"
    assert check.check(files, "v0.1.0") == [lacking]
    names = [CPU_WHEEL, of_aarch64(WHEEL), of_aarch64(CPU_WHEEL)]
    files += [write_wheel(tmp_path, name) for name in names]
    assert check.check(files, "v0.1.0") == []


@pytest.mark.parametrize(
    ("sdist", "wheel", "tag", "problem"),
    [
        ({"size": 2_000_000}, {}, None, "bytes, wanted at most 2000000: MANIFEST.in"),
        ({}, {"urls": URLS[1:]}, None, "has no Project-URL Changelog: no address"),
        ({}, {"name": WHEEL.replace("manylinux_2_28", "linux")}, None, "is not an abi3 wheel"),
        ({}, {"version": "0.2.0"}, None, "files are of several versions: 0.1.0, 0.2.0"),
        ({}, {"extension": b"\x7fELF"}, None, "is a wheel for cpu-x86_64: only those without CUDA"),
        ({}, {"name": CPU_WHEEL, "extension": CUDA}, None, "is a wheel for cuda-x86_64: only"),
        ({}, {}, "v0.2.0", "the tag is v0.2.0, files are of version 0.1.0"),
        (None, {}, None, "there are 0 source distributions and 1 wheels, wanted one"),
    ],
)
def test_what_is_not_fit_to_publish_is_named(tmp_path, sdist, wheel, tag, problem):
    files = [write_wheel(tmp_path, **wheel)]
    files += [] if sdist is None else [write_sdist(tmp_path, **sdist)]
    found, *_ = check.check(files, tag)
    assert problem in found


@pytest.mark.parametrize(("limit", "pypi"), [(20_000, "true"), (100, "false")])
def test_wheels_that_pypi_refuses_are_for_an_index_page(tmp_path, monkeypatch, limit, pypi):
    folder, output = tmp_path / "dist", tmp_path / "output"
    folder.mkdir()
    write_sdist(folder), write_wheel(folder)
    write_wheel(folder, CPU_WHEEL, extension=bytes(50_000))
    monkeypatch.setenv("GITHUB_OUTPUT", str(output))
    monkeypatch.setattr(check, "PYPI_BYTES", limit)
    checked = []
    done = subprocess.CompletedProcess([], 0)
    monkeypatch.setattr(check.subprocess, "run", lambda words: checked.append(words) or done)
    assert check.main([str(folder)]) == 0
    assert output.read_text() == f"pypi={pypi}\n"
    assert "--strict" in checked[0]


@pytest.mark.parametrize(
    ("name", "page", "version"), [(WHEEL, ".", "0.1.0"), (CPU_WHEEL, "cpu", "0.1.0+cpu")]
)
def test_pip_installs_from_the_index(tmp_path, name, page, version):
    """By name and version; a file with other contents than the page says is refused."""
    wheel = write_wheel(tmp_path, name)
    page = tmp_path / "index" / page
    assert index.main([str(tmp_path), "--out", str(tmp_path / "index")]) == 0
    words = [sys.executable, "-m", "pip", "download", "--isolated", "-q", "--no-deps"]
    words += ["--only-binary=:all:", "--platform=manylinux_2_28_x86_64"]
    words += ["--index-url", page.as_uri(), "-d", str(tmp_path / "got"), f"moelora=={version}"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "got" / name).read_bytes() == wheel.read_bytes()
    (page / "moelora" / name).write_bytes(b"another")
    (tmp_path / "got" / name).unlink()
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
    wheel, out = write_wheel(tmp_path, CPU_WHEEL), ["--out", str(tmp_path / "sbom")]
    assert sbom.main([str(tmp_path), *out]) == 0
    bill = json.loads((tmp_path / "sbom/cpu-x86_64.cdx.json").read_text())
    root = bill["metadata"]["component"]
    assert root["version"] == "0.1.0+cpu"
    assert root["hashes"][0]["content"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert [part["name"] for part in bill["components"]] == ["torch"]
    write_wheel(tmp_path)
    with pytest.raises(SystemExit, match="--cuda names its version"):
        sbom.main([str(tmp_path), *out])
    assert sbom.main([str(tmp_path), *out, "--cuda", "13.0.88"]) == 0
    bill = json.loads((tmp_path / "sbom/cuda-x86_64.cdx.json").read_text())
    assert ("cudart_static", "13.0.88") in {
        (p["name"], p.get("version")) for p in bill["components"]
    }


def test_variants_and_versions_of_the_hub_run_beside_this_moelora(tmp_path, monkeypatch):
    """Both variants are the package of this checkout, without the mark of CUDA kernels and with."""
    module = (ROOT / "moelora/_C.abi3.so").read_bytes().replace(b".nv_fatbin", b".no_fatbin")
    packages = [tmp_path / name / "moelora" for name in ("cpu", "cuda")]
    for package, mark in zip(packages, (b"", CUDA), strict=True):
        package.parent.mkdir()
        hub.copy(ROOT / "moelora", package)
        (package / "_C.abi3.so").write_bytes(module + mark)
    trees = [tmp_path / str(version) for version in (1, 2)]
    for version, (tree, some) in enumerate(zip(trees, (packages, packages[:1]), strict=True), 1):
        words = [str(tree), *map(str, some), "--version", str(version), "--cuda", "13.0"]
        hub.main(words)
    loads = [sys.executable, ROOT / "tests/project/check_hub.py", *trees]
    out = subprocess.run(loads, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert len(out.stdout.split()) == 5
    page = (ROOT / "docs/install.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    names = {}
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    exec(code.replace("build/release/hub", str(trees[0])), names)
    assert names["out"].shape == names["x"].shape and names["out"].isfinite().all()


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Of four packages that import nothing."""
    folder = tmp_path_factory.mktemp("hub")
    wheels = [str(write_wheel(folder, name)) for name in (WHEEL, CPU_WHEEL)]
    wheels += [str(write_wheel(folder, of_aarch64(name))) for name in (WHEEL, CPU_WHEEL)]
    hub.main([str(folder / "tree"), *wheels, "--cuda", "13.0.88"])
    return folder / "tree"


@pytest.mark.parametrize(
    ("torch_version", "cuda", "machine", "options", "variant"),
    [
        ("2.11.0+cu130", "13.0", "x86_64", {}, "torch-stable-abi211-cu130-x86_64-linux"),
        ("2.13.0", "13.2", "aarch64", {}, "torch-stable-abi211-cu130-aarch64-linux"),
        ("2.13.0", "13.0", "x86_64", {"backend": "cpu"}, "torch-stable-abi211-cpu-x86_64-linux"),
        ("2.13.0+cpu", None, "x86_64", {}, "torch-stable-abi211-cpu-x86_64-linux"),
        ("2.13.0", None, "aarch64", {}, "torch-stable-abi211-cpu-aarch64-linux"),
        ("2.12.0", "12.8", "x86_64", {"backend": "cpu"}, "torch-stable-abi211-cpu-x86_64-linux"),
    ],
)
def test_kernels_chooses_the_variant_by_torch_and_machine(
    tree, monkeypatch, torch_version, cuda, machine, options, variant
):
    import kernels

    monkeypatch.setattr(torch, "__version__", torch_version)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert variant == Path(kernels.get_local_kernel(tree, **options).__file__).parent.name


def test_a_wheel_with_cuda_becomes_a_build_of_its_toolkit(tmp_path):
    wheel = write_wheel(tmp_path, init="from moelora import _C\n")
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("moelora/a/b.py", "from moelora.a.c import d\nfrom moelora import e\n")
    hub.main([str(tmp_path / "tree"), str(wheel), "--cuda", "13.0"])
    build = tmp_path / "tree/build/torch-stable-abi211-cu130-x86_64-linux"
    assert (build / "__init__.py").read_text().startswith("from . import _C\n")
    assert (build / "a/b.py").read_text() == "from ..a.c import d\nfrom .. import e\n"
    metadata = json.loads((build / "metadata.json").read_text())
    assert metadata["backend"] == {"type": "cuda", "archs": hub.ARCHS}
    assert set(metadata["digest"]["files"]) >= {"_C.abi3.so", "__init__.py", "a/b.py", "layers.py"}


@pytest.mark.parametrize(
    ("files", "times", "problem"),
    [
        ({}, 1, "has no _C.abi3.so: make build, or name a wheel"),
        ({"_C.abi3.so": "", "a.py": "import moelora\n"}, 1, "a.py: line 1: write `from moelora"),
        ({"_C.abi3.so": " .nv_fatbin"}, 1, "moelora: has CUDA kernels: --cuda names the toolkit"),
        ({"_C.abi3.so": "", "__init__.py": ""}, 2, "would be a second "),
    ],
)
def test_packages_that_no_build_of_the_hub_can_be_made_of(tmp_path, files, times, problem, capsys):
    package = tmp_path / "moelora"
    package.mkdir()
    for name, text in files.items():
        (package / name).write_text(text)
    with pytest.raises(SystemExit):
        hub.main([str(tmp_path / "tree"), *[str(package)] * times])
    assert problem in capsys.readouterr().err


def test_notes_are_the_newest_section_with_links_to_the_tag(tmp_path):
    changelog = "# Changelog\n\n## 0.2.0 (2027-01-01)\n\n- [A](docs/a.md)\n\n## 0.1.0\n\n- B\n"
    (tmp_path / "CHANGELOG.md").write_text(changelog)
    words = ["make", "-s", "-C", tmp_path, "-f", ROOT / "Makefile", "release-notes", "TAG=v0.2.0"]
    subprocess.run([*words, "MOELORA_REPOSITORY=https://example.org/m"], check=True)
    notes = (tmp_path / "build/release/notes.md").read_text()
    assert notes.strip() == "- [A](https://example.org/m/blob/v0.2.0/docs/a.md)"


def test_hf_takes_the_upload_that_a_person_runs(tmp_path, monkeypatch):
    """The line of the page; what would reach the Hub is recorded."""
    from huggingface_hub import HfApi
    from huggingface_hub.cli.hf import app

    (line,) = re.findall(r"^hf upload (.*)$", (ROOT / "docs/releasing.md").read_text(), re.M)
    sent = []
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hub").mkdir()
    made = types.SimpleNamespace(repo_id="them/moelora")
    monkeypatch.setattr(HfApi, "create_repo", lambda self, **options: made)
    monkeypatch.setattr(HfApi, "repo_info", lambda self, **options: None)
    monkeypatch.setattr(HfApi, "upload_folder", lambda self, **options: sent.append(options))
    words = ["upload", *shlex.split(line.replace("$OWNER", "them"))]
    app(words, standalone_mode=False)
    (options,) = sent
    names = ("repo_id", "repo_type", "revision", "delete_patterns", "folder_path", "path_in_repo")
    wanted = ["them/moelora", "kernel", "v1", ["build/*"], "hub", "."]
    assert [options[name] for name in names] == wanted


@pytest.fixture
def repository(tmp_path):
    """The files that a release changes, committed, with a release 0.0.9."""
    for name, *_ in prepare.PLACES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    words = (
        "init -q; config user.name a; config user.email a@a.org; add -A; commit -qm all; tag v0.0.9"
    )
    for command in words.split("; "):
        prepare.git(*command.split(), root=tmp_path)
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

    def state():
        return [prepare.git(*words, root=repository) for words in (["rev-parse", "HEAD"], ["diff"])]

    before = state()
    with pytest.raises(ValueError, match=problem):
        prepare.prepare(version, repository)
    assert state() == before
