"""The build: what the extension exports and needs, the wheel, and how setup.py reads compilers."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

from moelora import _C

ROOT = Path(__file__).resolve().parents[1]
needs_binutils = pytest.mark.skipif(not shutil.which("readelf"), reason="no binutils")


@pytest.fixture(scope="module")
def setup_py():
    spec = importlib.util.spec_from_file_location("moelora_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    where = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", str(where), str(ROOT)], check=True, cwd=where)
    (found,) = where.iterdir()
    return found


def test_wheel(wheel):
    assert re.fullmatch(r"moelora-[\d.]+-cp310-abi3-linux_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (n for n in names if n.endswith("/METADATA"))
        headers = HeaderParser().parsestr(archive.read(metadata).decode())
        (entry_points,) = (n for n in names if n.endswith("/entry_points.txt"))
        plugins = archive.read(entry_points).decode()
    modules = {p.relative_to(ROOT).as_posix() for p in (ROOT / "moelora").rglob("*.py")}
    assert modules <= names
    assert {"moelora/_C.abi3.so", "moelora/_C.pyi", "moelora/py.typed"} <= names
    assert any(n.endswith("/LICENSE") for n in names)
    assert not any(n.startswith(("tests", "csrc", "benchmarks", "examples")) for n in names)
    assert "torch>=2.11" in headers.get_all("Requires-Dist")
    assert headers["Requires-Python"] == ">=3.10"
    assert headers["Version"] == _C.version()
    assert "[vllm.general_plugins]\nmoelora = moelora.integrations.vllm:register" in plugins


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


def build(tmp_path, **environment):
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(tmp_path)]
    return output(*command, cwd=ROOT, env={**os.environ, **environment})


def test_a_second_build_compiles_nothing(tmp_path):
    build(tmp_path, MOELORA_CUDA="0")
    again = build(tmp_path, MOELORA_CUDA="0")
    assert "CPU-only build (MOELORA_CUDA=0)" in again
    assert "csrc/" not in again
    assert (tmp_path / "moelora/_C.abi3.so").exists()


def test_objects_follow_their_headers(setup_py, tmp_path, monkeypatch):
    monkeypatch.setattr(setup_py, "ROOT", tmp_path)
    monkeypatch.setattr(setup_py, "WERROR", False)
    source, header = tmp_path / "csrc/core/a.c", tmp_path / "csrc/core/a.h"
    source.parent.mkdir(parents=True)
    header.write_text("#define VALUE 1\n")
    source.write_text('#include "core/a.h"\nint value(void);\nint value(void) { return VALUE; }\n')
    compiler = setup_py.Compiler(tmp_path / "obj", None)
    relative = source.relative_to(tmp_path)
    obj = compiler.compile(relative)
    first = obj.stat().st_mtime_ns
    assert compiler.compile(relative).stat().st_mtime_ns == first
    later = obj.stat().st_mtime + 1
    os.utime(header, (later, later))
    assert compiler.compile(relative).stat().st_mtime_ns > first

    source.write_text("static int unused;\n")
    compiler.compile(relative)
    monkeypatch.setattr(setup_py, "WERROR", True)
    with pytest.raises(SystemExit, match="warnings are errors"):
        compiler.compile(relative)


PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4gemmv' for 'sm_90a'
ptxas info    : Function properties for _Z4gemmv
    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers
"""


def test_spills_and_serialised_products_are_found(setup_py, capsys):
    source = Path("csrc/cuda/gemm.cu")
    assert setup_py.report_ptxas(source, PTXAS.format(stack=0, stores=0, loads=0)) == ""
    assert "1 kernels, at most 168 registers" in capsys.readouterr().out
    text = setup_py.report_ptxas(source, PTXAS.format(stack=8, stores=4, loads=12))
    assert "_Z4gemmv" in text
    assert "4 bytes spill stores" in text
    assert "warning" in setup_py.report_ptxas(source, "gemm.cu(3): warning #177-D: unused")
    loss = "ptxas info    : (C7520) Potential Performance Loss: wgmma.mma_async instructions are "
    assert "C7520" in setup_py.report_ptxas(source, loss + "serialized due to ... '_Z4gemmv'")


@pytest.mark.parametrize(
    ("archs", "flags"),
    [
        (None, ["arch=compute_80,code=[sm_80,compute_80]", "arch=compute_90a,code=sm_90a"]),
        ("90a", ["arch=compute_90a,code=[sm_90a,compute_90a]"]),
        ("sm_89;80", ["arch=compute_80,code=[sm_80,compute_80]", "arch=compute_89,code=sm_89"]),
    ],
)
def test_cuda_architectures(setup_py, monkeypatch, archs, flags):
    monkeypatch.delenv("MOELORA_CUDA_ARCH", raising=False)
    if archs:
        monkeypatch.setenv("MOELORA_CUDA_ARCH", archs)
    assert setup_py.cuda_arch_flags()[1::2] == flags


def test_info_command():
    text = output(sys.executable, "-m", "moelora", "info")
    assert _C.version() in text
    assert all(name in text for name in _C.variants())
    failed = subprocess.run([sys.executable, "-m", "moelora"], capture_output=True, text=True)
    assert failed.returncode == 2
    assert "command" in failed.stderr
