"""What is built: the extension, what it exports and needs, the wheel and the source archive."""

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
import torch
from checkout import LEFT_OUT

from moelora import _C
from moelora.operators import startup

ROOT = Path(__file__).resolve().parents[2]
needs_binutils = pytest.mark.skipif(not shutil.which("readelf"), reason="no binutils")


def module_of(path):
    spec = importlib.util.spec_from_file_location(f"moelora_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def setup_py():
    return module_of(ROOT / "setup.py")


@pytest.fixture(scope="module")
def compiling():
    return module_of(ROOT / "csrc/compiling.py")


def output(*command, **kwargs):
    return subprocess.run(command, capture_output=True, text=True, check=True, **kwargs).stdout


@needs_binutils
def test_only_the_module_init_is_exported():
    symbols = output("nm", "-D", "--defined-only", _C.__file__).split()
    assert symbols[2::3] == ["PyInit__C"]


@needs_binutils
def test_the_extension_names_no_place_of_this_machine():
    dynamic = output("readelf", "-d", _C.__file__)
    needed = re.findall(r"NEEDED.*\[(.*)\]", dynamic)
    assert {"libtorch.so", "libtorch_cpu.so"} <= set(needed)
    assert not any("python" in name or "cuda" in name for name in needed)
    assert re.findall(r"(?:RUNPATH|RPATH).*\[(.*)\]", dynamic) == ["$ORIGIN/../torch/lib"]


@needs_binutils
def test_python_symbols_are_of_the_limited_api():
    """Names that CPython's stable ABI of 3.10 has; anything else would tie us to one version."""
    symbols = re.findall(r"U (_?Py\w+)", output("nm", "-D", _C.__file__))
    assert symbols
    allowed_private = {"_Py_Dealloc", "_Py_NoneStruct"}
    assert {s for s in symbols if s.startswith("_Py")} <= allowed_private
    assert _C.__file__.endswith("/_C.abi3.so")


def test_import_brings_the_operators_alone():
    """No engine, no other library, and nothing of moelora that only commands and tests need."""
    code = (
        "import sys, torch; before = set(sys.modules); import moelora; "
        "print(*sorted(set(sys.modules) - before))"
    )
    brought = output(sys.executable, "-c", code, cwd=ROOT).split()
    others = {name.split(".")[0] for name in brought} - sys.stdlib_module_names
    assert others <= {"moelora", "torch"}
    rooms = {name.split(".")[1] for name in brought if name.startswith("moelora.")}
    assert "integrations" in rooms
    assert rooms.isdisjoint({"bench", "commands", "reference"})


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """That for CPUs, as a release builds it: CUDA takes longer than a test may where nothing is
    compiled yet. Whatever interrupts the build, its compilers end with it."""
    where = tmp_path_factory.mktemp("wheel")
    (words,) = re.findall(r"MOELORA_CUDA=0 \$\(WHEEL\) \S+ (.*)", (ROOT / "Makefile").read_text())
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    command += words.split()
    building = subprocess.Popen(
        [*command, "-w", str(where), str(ROOT)],
        cwd=where,
        env={**os.environ, "MOELORA_CUDA": "0"},
        start_new_session=True,
    )
    try:
        assert building.wait() == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(building.pid, signal.SIGKILL)
        building.wait()
    (found,) = where.iterdir()
    return found


def test_wheel(wheel):
    assert re.fullmatch(r"moelora-[\d.]+\+cpu-cp310-abi3-linux_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (n for n in names if n.endswith("/METADATA"))
        headers = HeaderParser().parsestr(archive.read(metadata).decode())
        (entry_points,) = (n for n in names if n.endswith("/entry_points.txt"))
        plugins = archive.read(entry_points).decode()
    modules = {p.relative_to(ROOT).as_posix() for p in (ROOT / "moelora").rglob("*.py")}
    assert {"moelora_cli.py", *modules} <= names
    assert {"moelora/_C.abi3.so", "moelora/_C.pyi", "moelora/py.typed"} <= names
    assert any(n.endswith("/LICENSE") for n in names)
    assert not any(n.startswith(("tests", "csrc", "benchmarks", "examples")) for n in names)
    assert "torch>=2.11" in headers.get_all("Requires-Dist")
    assert headers["Requires-Python"] == ">=3.10"
    assert headers["Version"] == f"{_C.version()}+cpu"
    assert "[vllm.general_plugins]\nmoelora = moelora.integrations.vllm:register" in plugins
    assert "[console_scripts]\nmoelora = moelora_cli:main" in plugins
    assert headers.get_all("Provides-Extra") == ["cli", "hf", "plot", "dev"]
    needed = [r for r in headers.get_all("Requires-Dist") if "extra ==" not in r]
    assert needed == ["torch>=2.11", "numpy", "regex", "safetensors"]


def clear_repository(monkeypatch, setup_py, root):
    """Nothing names the repository of the sources in `root`."""
    monkeypatch.delenv("MOELORA_REPOSITORY", raising=False)
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    monkeypatch.setattr(setup_py, "ROOT", root)


def test_links_of_the_packages_page_lead_somewhere(setup_py, monkeypatch, tmp_path, capsys):
    """Relative ones do not; without the address of a repository their text stays."""
    readme = (ROOT / "README.md").read_text()
    assert "](docs/install.md)" in readme
    (tmp_path / "csrc").mkdir()
    for name in ("README.md", "csrc/moelora.h"):
        shutil.copy(ROOT / name, tmp_path / name)
    clear_repository(monkeypatch, setup_py, tmp_path)
    monkeypatch.setattr(sys, "argv", ["setup.py", "sdist"])
    page = setup_py.package_page()
    assert re.findall(r"\]\((?!http)", page["long_description"]) == []
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]*)\)", page["long_description"])
    assert all(picture.startswith("https://") for picture in pictures)
    assert "project_urls" not in page
    assert "nothing names its repository" in capsys.readouterr().out
    address = "https://example.org/moelora"
    monkeypatch.setenv("MOELORA_REPOSITORY", f"{address}/")
    page = setup_py.package_page()
    links = re.findall(r"\]\(([^)]*)\)", page["long_description"])
    for link in ("blob/v{}/docs/install.md", "raw/v{}/docs/beside.png"):
        assert f"{address}/{link.format(_C.version())}" in links
    assert f"{address}/actions/workflows/test.yml/badge.svg" in links
    assert all(link.startswith(("https://", "#")) for link in links)
    assert page["project_urls"]["Repository"] == address


@pytest.mark.parametrize(
    ("remote", "page"),
    [
        ("https://example.org/lab/moelora.git", "https://example.org/lab/moelora"),
        ("https://me:secret@example.org/lab/moelora/", "https://example.org/lab/moelora"),
        ("git@example.org:lab/moelora.git", "https://example.org/lab/moelora"),
        ("ssh://git@example.org:22/lab/moelora", "https://example.org/lab/moelora"),
        ("/home/me/moelora", ""),
        ("file:///home/me/moelora.git", ""),
        ("", ""),
    ],
)
def test_the_web_page_of_a_remote(setup_py, remote, page):
    assert setup_py.web_address(remote + "\n") == page


def test_the_project_urls_need_no_environment_variable(setup_py, monkeypatch, tmp_path):
    """A clone has a remote, a source distribution what the clone said, a workflow its own."""
    clear_repository(monkeypatch, setup_py, tmp_path)
    assert setup_py.repository() == ""
    output("git", "init", "-q", tmp_path)
    output("git", "-C", tmp_path, "remote", "add", "origin", "git@example.org:lab/moelora.git")
    assert setup_py.repository() == "https://example.org/lab/moelora"
    urls = "Project-URL: Issues, https://a.org/b/issues\nProject-URL: Repository, https://a.org/b\n"
    (tmp_path / "PKG-INFO").write_text(f"Name: moelora\n{urls}")
    assert setup_py.repository() == "https://a.org/b"
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://github.com")
    monkeypatch.setenv("GITHUB_REPOSITORY", "fork/moelora")
    assert setup_py.repository() == "https://github.com/fork/moelora"
    monkeypatch.setenv("MOELORA_REPOSITORY", "https://example.org/told")
    assert setup_py.repository() == "https://example.org/told"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no git history here")
def test_the_source_distribution_builds_and_tests_moelora(tmp_path):
    """It has all that is tracked but data; it is small."""
    command = [sys.executable, "setup.py", "-q", "egg_info", "-e", str(tmp_path)]
    subprocess.run([*command, "sdist", "-d", str(tmp_path)], cwd=ROOT, check=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    assert archive.stat().st_size < 2e6
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    tracked = output("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    left_out = {name for name in set(tracked.split("\n")) - names if name}
    assert {n for n in left_out if not n.startswith(".") and not re.fullmatch(LEFT_OUT, n)} == set()
    assert not any(re.fullmatch(rf"{LEFT_OUT}|.*\.s?o", name) for name in names)


def test_why_the_extension_does_not_load():
    """Said in words: an older torch, a tree that is not built, a symbol that is gone."""
    with pytest.raises(ImportError, match=r"torch is 2\.10\.1, moelora needs 2\.11 or later"):
        startup.check_torch("2.10.1")
    for version in (torch.__version__, "2.11.0+cu130", "3.0.0a0", "nightly"):
        startup.check_torch(version)
    symbol = startup.explain(ImportError("_C.abi3.so: undefined symbol: aoti_torch_gone"))
    assert "undefined symbol: aoti_torch_gone" in str(symbol)
    assert torch.__version__ in str(symbol)
    assert "pip install --no-build-isolation .)" in str(symbol)


def test_what_to_do_about_a_source_tree_that_is_not_built(tmp_path, monkeypatch):
    """Python finds the tree it is started in before the moelora that is installed."""
    absent = ModuleNotFoundError("No module named 'moelora._C'")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), str(tmp_path / "tree")])
    tree = tmp_path / "tree"
    (tree / "csrc").mkdir(parents=True)
    (tree / "moelora.egg-info").mkdir()
    (tree / "moelora.egg-info" / "PKG-INFO").write_text("Name: moelora\nVersion: 0.1.0\n")
    build = "run pip install --no-build-isolation -e . there, or make build"
    begin = f"{tree} is a source tree of moelora that is not built: "
    assert str(startup.explain(absent, tree)) == begin + build

    site = tmp_path / "site"
    for name, text in {
        "moelora-0.1.0.dist-info/METADATA": "Name: moelora\nVersion: 0.1.0\n",
        "moelora/_C.abi3.so": "",
    }.items():
        (site / name).parent.mkdir(parents=True)
        (site / name).write_text(text)
    leave = "; or leave this folder, for the moelora that is installed"
    said = f"{begin}{build}, for its notebooks and examples{leave}"
    assert str(startup.explain(absent, tree)) == said
    assert "the wheel was for another platform than" in str(startup.explain(absent, site))


def test_the_bounds_of_the_extra_are_what_is_tried():
    """`make test-lowest` installs requirements-lowest.txt, everything else requirements.txt."""

    def pins(name):
        lines = (ROOT / name).read_text().splitlines()
        return dict(line.split("==") for line in lines if line and not line.startswith("#"))

    lowest, newest = pins("requirements-lowest.txt"), pins("requirements.txt")
    text = (ROOT / "pyproject.toml").read_text()
    (extra,) = re.findall(r"^hf = \[(.*)\]$", text, re.MULTILINE)
    bounds = dict(re.findall(r'"(\w+) >= ([\d.]+)"', extra))
    assert bounds.keys() == lowest.keys() <= newest.keys()
    for package, bound in bounds.items():
        assert lowest[package] == f"{bound}.0"


def test_types_are_checked_as_the_lowest_python_sees_them():
    """What is newer in the standard library is a mistake that only mypy finds here."""
    text = (ROOT / "pyproject.toml").read_text()
    (lowest,) = re.findall(r'^requires-python = ">=([\d.]+)"$', text, re.MULTILINE)
    assert re.findall(r'^python_version = "([\d.]+)"', text, re.MULTILINE) == [lowest]


def test_the_citation_is_of_this_version():
    text = (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.*)$", text, re.M) == [_C.version()]


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc")
@pytest.mark.parametrize("arch", ["90", "100", "120"])
def test_kernels_overlap_on_every_architecture_that_can(arch):
    """Programmatic dependent launch is in native code, as csrc/cuda/backend.cu expects of it."""
    source = "csrc/cuda/align/pad.cu"
    flags = ["-std=c++17", "-I", "csrc", "-ptx", f"-arch=compute_{arch}"]
    assert "griddepcontrol.wait" in output("nvcc", *flags, source, "-o", "-", cwd=ROOT)
