"""The build: what the extension exports and needs, the wheel, and how setup.py reads compilers."""

import importlib.util
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
import torch

from moelora import _C, startup

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
    assert wheel.stat().st_size < 16e6, "machine code is not compressed, or has line tables"
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
    assert "[console_scripts]\nmoelora = moelora.__main__:main" in plugins
    assert headers.get_all("Provides-Extra") == ["cli", "hf", "plot", "dev"]
    needed = [r for r in headers.get_all("Requires-Dist") if "extra ==" not in r]
    assert needed == ["torch>=2.11", "numpy", "safetensors"]


def test_links_of_the_packages_page_lead_somewhere(setup_py, monkeypatch):
    """Relative ones do not; without the address of a repository their text stays."""
    readme = (ROOT / "README.md").read_text()
    assert "](docs/install.md)" in readme
    monkeypatch.delenv("MOELORA_REPOSITORY", raising=False)
    page = setup_py.package_page()
    assert "](" not in page["long_description"]
    assert "project_urls" not in page
    monkeypatch.setenv("MOELORA_REPOSITORY", "https://example.org/moelora/")
    page = setup_py.package_page()
    links = re.findall(r"!?\[[^\]]*\]\(([^)]*)\)", page["long_description"])
    assert f"https://example.org/moelora/blob/v{_C.version()}/docs/install.md" in links
    assert f"https://example.org/moelora/raw/v{_C.version()}/docs/h200-beside.png" in links
    assert all(link.startswith("https://example.org/moelora/") for link in links)
    assert page["project_urls"]["Repository"] == "https://example.org/moelora"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no git history here")
def test_the_source_distribution_holds_what_its_tests_need(tmp_path):
    command = [sys.executable, "setup.py", "-q", "egg_info", "-e", str(tmp_path)]
    subprocess.run([*command, "sdist", "-d", str(tmp_path)], cwd=ROOT, check=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    tracked = output("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    left_out = {name for name in set(tracked.split("\n")) - names if name}
    assert {name for name in left_out if not name.startswith(".")} == set()
    assert not any(name.endswith((".so", ".o")) for name in names)


def test_why_the_extension_does_not_load():
    """Said in words: an older torch, a tree that is not built, a symbol that is gone."""
    with pytest.raises(ImportError, match=r"torch is 2\.10\.1, moelora needs 2\.11 or later"):
        startup.check_torch("2.10.1")
    for version in (torch.__version__, "2.11.0+cu130", "3.0.0a0", "nightly"):
        startup.check_torch(version)
    absent = startup.explain(ModuleNotFoundError("No module named 'moelora._C'"))
    assert "python setup.py build_ext --inplace" in str(absent)
    symbol = startup.explain(ImportError("_C.abi3.so: undefined symbol: aoti_torch_gone"))
    assert "undefined symbol: aoti_torch_gone" in str(symbol)
    assert torch.__version__ in str(symbol)


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


def test_modules_that_are_not_strict_yet_exist():
    text = (ROOT / "pyproject.toml").read_text()
    (names,) = re.findall(r"Not strict yet.*?module = \[\n(.*?)\]", text, re.S)
    names = re.findall(r'"(.*)"', names)
    assert names == sorted(set(names))
    for name in names:
        path = ROOT / name.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__init__.py").exists(), name


def test_the_citation_is_of_this_version():
    text = (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.*)$", text, re.M) == [_C.version()]


PROJECT = {
    "pyproject.toml": '[project]\nname = "moelora"\ndynamic = ["version"]\n'
    '[tool.setuptools]\npackages = ["moelora"]\n',
    "moelora/__init__.py": "",
    "csrc/moelora.h": '#define MOELORA_VERSION "1"\n',
    "csrc/core/a.h": "#define VALUE 1\n",
    "csrc/core/a.c": '#include "core/a.h"\nint value(void);\nint value(void) { return VALUE; }\n',
    "csrc/cpu/device.c": "#ifdef MOELORA_WITH_CUDA\n#endif\nint device(void);\n",
    "csrc/glue/module.c": "#include <Python.h>\nPyMODINIT_FUNC PyInit__C(void) { return NULL; }\n",
    "csrc/glue/exports.map": "{ global: PyInit__C; local: *; };\n",
    "csrc/cuda/align/small.cu": "",
    "csrc/cuda/gemm/sm80/gemm.cu": "",
    "csrc/cuda/gemm/sm90/gemm.cu": "",
    "csrc/cuda/adapters/shrink_sm90.cu": "",
}
# Compiles nothing but does what setup.py relies on; tells its arguments to nvcc.log.
NVCC = """\
#!/bin/sh
here=$(dirname "$0")
case "$1" in
  --version) echo "Cuda compilation tools, release {release}, V{release}.1"; exit;;
  --dryrun) echo "#$ LIBRARIES=\\"-L$here\\"" >&2; exit;;
esac
echo "$@" >> "$here/nvcc.log"
while [ $# -gt 0 ]; do
  case "$1" in -c) source=$2;; -o) object=$2;; -MF) rule=$2;; esac
  shift
done
echo "$object : $source" > "$rule"
echo | cc -fPIC -x c -c - -o "$object"
"""


class Project:
    """A small tree with the setup.py of this one."""

    def __init__(self, root):
        self.root = root
        self.library = root / "moelora/_C.abi3.so"

    def build(self, *command, **environment):
        """What setup.py says, the command and the environment given."""
        command = command or ("build_ext", "--inplace")
        drop = ("MAX_JOBS", "CFLAGS", "NVCCFLAGS", "NVCC", "CUDA_HOME")
        kept = {k: v for k, v in os.environ.items() if k not in drop and "MOELORA" not in k}
        environment = {"MOELORA_CUDA": "0", **kept, **environment}
        run = subprocess.run(
            [sys.executable, "setup.py", "-q", *command],
            cwd=self.root,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stderr
        return run.stdout

    def nvcc(self, release="13.0"):
        """The environment of a build with CUDA by a stand-in for nvcc."""
        (self.root / "bin").mkdir()
        nvcc = self.root / "bin/nvcc"
        nvcc.write_text(NVCC.format(release=release))
        nvcc.chmod(0o755)
        subprocess.run(["ar", "rcs", "bin/libcudart_static.a"], cwd=self.root, check=True)
        return {"MOELORA_CUDA": "1", "NVCC": str(nvcc), "MAX_JOBS": "1"}

    def nvcc_commands(self):
        """{source: its arguments} since the last call."""
        log = self.root / "bin/nvcc.log"
        lines = [line.split() for line in log.read_text().splitlines()]
        log.write_text("")
        return {words[words.index("-c") + 1]: words for words in lines}


@pytest.fixture
def project(tmp_path):
    root = tmp_path / "tree"
    for name, text in PROJECT.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    shutil.copy(ROOT / "setup.py", root)
    return Project(root)


def test_a_build_says_what_it_does(project):
    lines = project.build(MAX_JOBS="1").splitlines()
    assert lines[0] == "moelora for CPU (MOELORA_CUDA=0): compiling 3 of 3 files, 1 at once"
    assert re.fullmatch(r"\[1/3\] csrc/core/a.c: \d+\.\d s", lines[1])
    assert [line[:5] for line in lines[1:4]] == ["[1/3]", "[2/3]", "[3/3]"]
    assert re.fullmatch(r"moelora for CPU \(MOELORA_CUDA=0\): compiled in \d+ s", lines[4])
    assert lines[5:] == ["moelora for CPU (MOELORA_CUDA=0): linked"]
    before = project.library.stat()
    assert project.build() == ""
    assert project.library.stat().st_ino == before.st_ino, "nothing to do, but linked anew"


def test_a_copied_tree_is_built_already(project, tmp_path):
    environment = project.nvcc()
    project.build(**environment)
    project.build("build_core")
    copied = Project(tmp_path / "copy")
    shutil.copytree(project.root, copied.root, copy_function=shutil.copyfile)
    (copied.root / "bin/nvcc").chmod(0o755)
    for path in sorted(copied.root.rglob("*"), reverse=True):
        os.utime(path)
    environment["NVCC"] = str(copied.root / "bin/nvcc")
    assert copied.build(**environment) == ""
    assert copied.build("build_core") == ""


def test_modules_that_moved_are_not_packed(project):
    gone = project.root / "moelora/gone.py"
    gone.write_text("")
    project.build("build")
    (built,) = project.root.glob("build/lib.*")
    assert (built / "moelora/gone.py").exists()
    gone.unlink()
    project.build("build")
    assert {path.name for path in built.rglob("*.*") if path.is_file()} == {
        "__init__.py",
        "_C.abi3.so",
    }


def test_objects_follow_contents(project):
    """Of sources, headers, commands and compilers; and what was built before needs no building."""
    project.build()
    header = project.root / "csrc/core/a.h"
    os.utime(header)
    assert project.build() == ""
    header.write_text("#define VALUE 2\n")
    os.utime(header, (0, 0))
    again = project.build()
    assert "[1/1] csrc/core/a.c" in again
    assert "linked" in again
    assert "compiling 3 of 3" in project.build(CFLAGS="-DMORE")
    assert "compiling" not in project.build()
    cc = project.root / "cc"
    for version in (1, 2):
        cc.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo {version} && exit\nexec cc "$@"\n')
        cc.chmod(0o755)
        assert "compiling 3 of 3" in project.build(CC=str(cc))
        assert project.build(CC=str(cc)) == ""
    (project.root / "csrc/core/a.c").write_text('#include "core/b.h"\n')
    (project.root / "csrc/core/b.h").write_text("")
    project.build()
    (project.root / "csrc/core/b.h").rename(header)
    (project.root / "csrc/core/a.c").write_text('#include "core/a.h"\n')
    assert "compiling 1 of 3" in project.build()


def test_an_edit_under_way_is_compiled_next_time(project):
    """A file that changes while it is compiled: its object may be of the old text."""
    cc, source = project.root / "cc", project.root / "csrc/core/a.c"
    cc.write_text(f'#!/bin/sh\ncc "$@" || exit\ncase "$*" in *core/a.c*) echo >> {source};; esac\n')
    cc.chmod(0o755)
    assert "compiling 3 of 3" in project.build(CC=str(cc))
    assert "[1/1] csrc/core/a.c" in project.build(CC=str(cc))


def test_warnings_show_until_they_are_gone(project):
    source = project.root / "csrc/core/a.c"
    source.write_text("static int unused;\n")
    for _ in range(2):
        assert "[1/" in project.build()
    with pytest.raises(AssertionError, match="a.c: warnings are errors"):
        project.build(MOELORA_WERROR="1")
    source.write_text("")
    project.build()
    assert project.build(MOELORA_WERROR="1") == ""


def test_builds_with_cuda_and_without_share_what_they_can(project):
    environment = project.nvcc()
    assert "compiling 3 of 3" in project.build()
    cuda = project.build(**environment)
    assert cuda.startswith(f"moelora for CPU and CUDA ({environment['NVCC']}): compiling 5 of 7")
    assert "csrc/cpu/device.c" in cuda
    assert set(project.nvcc_commands()) == {name for name in PROJECT if name.endswith(".cu")}
    assert project.build() == "moelora for CPU (MOELORA_CUDA=0): linked\n"
    assert "compiling" not in project.build(**environment)
    assert "compiling" not in project.build("build_core")
    assert "compiling" not in project.build("build_core", "--cuda", **environment)
    archives = [project.root / f"build/{name}/libmoelora.a" for name in ("core", "core-cuda")]
    assert [len(output("ar", "t", str(path)).split()) for path in archives] == [2, 6]


PORTABLE = {
    None: ["arch=compute_80,code=[sm_80,compute_80]", "arch=compute_90,code=sm_90"],
    "90a": ["arch=compute_90,code=[sm_90,compute_90]"],
    "80;120": ["arch=compute_80,code=[sm_80,compute_80]", "arch=compute_120,code=sm_120"],
    "sm_89;80": ["arch=compute_80,code=[sm_80,compute_80]", "arch=compute_89,code=sm_89"],
    "release": [
        "arch=compute_80,code=[sm_80,compute_80]",
        "arch=compute_90,code=[sm_90,sm_100]",
        "arch=compute_120,code=sm_120",
    ],
}


@pytest.mark.parametrize("archs", PORTABLE)
def test_a_source_is_compiled_for_what_its_folder_says(project, archs):
    """Portable code for the architectures asked for, that of one architecture for no other."""
    environment = project.nvcc()
    if archs:
        environment["MOELORA_CUDA_ARCH"] = archs
    project.build(**environment)
    for source, words in project.nvcc_commands().items():
        only = "sm90" in source
        codes = [after for word, after in zip(words, words[1:], strict=False) if word == "-gencode"]
        assert codes == (["arch=compute_90a,code=sm_90a"] if only else PORTABLE[archs]), source


def test_machine_code_is_small(project):
    """No line tables unless asked for, and the best compression that the compiler has."""
    environment = project.nvcc()
    project.build(**environment)
    for words in project.nvcc_commands().values():
        assert "--compress-mode=size" in words
        assert "-lineinfo" not in words
    project.build(**environment, NVCCFLAGS="-lineinfo")
    assert all("-lineinfo" in words for words in project.nvcc_commands().values())
    nvcc = Path(environment["NVCC"])
    nvcc.write_text(nvcc.read_text().replace("13.0", "12.6"))
    project.build(**environment)
    for words in project.nvcc_commands().values():
        assert "--compress-mode=size" not in words
        assert " -Xfatbin -compress-all " in " ".join(words)


def test_spare_cores_share_the_architectures_of_a_file(project):
    environment = {**project.nvcc(), "MAX_JOBS": "8", "MOELORA_CUDA_ARCH": "80;90a;120"}
    project.build(**environment)
    threads = {name: "--threads 2" in " ".join(c) for name, c in project.nvcc_commands().items()}
    assert threads == {name: "sm90" not in name for name in threads}
    (project.root / "csrc/cuda/align/small.cu").write_text("// new\n")
    project.build(**environment)
    ((_, words),) = project.nvcc_commands().items()
    assert "--threads 3" in " ".join(words)
    assert project.build(**{**environment, "MAX_JOBS": "1"}) == ""


def test_jobs_are_as_many_as_cores_and_memory_allow(setup_py, monkeypatch, tmp_path):
    monkeypatch.delenv("MAX_JOBS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    for jobs, memory in ((6, 100 * setup_py.JOB_BYTES), (3, 3.5 * setup_py.JOB_BYTES), (1, 0)):
        monkeypatch.setattr(setup_py, "usable_memory", lambda memory=memory: int(memory))
        assert setup_py.num_jobs() == jobs
    monkeypatch.setenv("MAX_JOBS", "9")
    assert setup_py.num_jobs() == 9
    for wrong in ("0", "-1", "many"):
        monkeypatch.setenv("MAX_JOBS", wrong)
        with pytest.raises(SystemExit, match=f"MAX_JOBS is '{wrong}', expected a number"):
            setup_py.num_jobs()


def test_usable_memory_is_the_less_of_machine_and_container(setup_py, tmp_path):
    meminfo, limit = tmp_path / "meminfo", tmp_path / "memory.max"
    meminfo.write_text("MemTotal:       20 kB\nMemAvailable:      10 kB\n")
    assert setup_py.usable_memory(meminfo, limit) == 10240
    for text, expected in (("max\n", 10240), ("4096\n", 4096), ("1000000\n", 10240)):
        limit.write_text(text)
        assert setup_py.usable_memory(meminfo, limit) == expected


FIRST = "cuda=0 arch=\ndemo\n"  # the C code, and the demo on it
THEN = "That was the demo. Now the CUDA kernels for this machine, some minutes:\n"


@pytest.mark.parametrize(
    ("target", "gpu", "given", "wanted"),
    [
        ("demo", "9.0\n9.0", {}, f"{FIRST}{THEN}cuda= arch=90a\n"),
        ("demo", "8.0\n12.0", {}, f"{FIRST}{THEN}cuda= arch=120;80\n"),
        (
            "demo",
            "9.0",
            {"MOELORA_CUDA_ARCH": "80"},
            f"cuda=0 arch=80\ndemo\n{THEN}cuda= arch=80\n",
        ),
        ("demo", "9.0", {"MOELORA_CUDA": "0"}, FIRST),
        ("demo", "", {}, FIRST),
        ("demo", "", {"MOELORA_CUDA": "1"}, f"{FIRST}{THEN}cuda=1 arch=\n"),
        ("build", "", {}, "cuda= arch=\n"),
        ("wheel", "", {}, "cuda= arch=release\n"),
        ("wheel", "", {"MOELORA_CUDA_ARCH": "90a"}, "cuda= arch=90a\n"),
    ],
)
def test_what_make_builds(tmp_path, target, gpu, given, wanted):
    """The demo before CUDA kernels, and those only for a GPU; a wheel code of all architectures."""
    settings = 'echo "cuda=$MOELORA_CUDA arch=$MOELORA_CUDA_ARCH"'
    for name, text in {
        "nvidia-smi": f"""test "$1" = -L || printf '%s\\n' '{gpu}'; test '{gpu}'""",
        "python": 'case "$*" in *demo.py) echo demo;; '
        f'*build_ext*|*"pip wheel"*) {settings};; esac',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    for name in (".ready", ".editable"):
        (tmp_path / name).write_text("")
    drop = ("MOELORA_CUDA", "MOELORA_CUDA_ARCH", "MAKEFLAGS", "MAKELEVEL")
    environment = {k: v for k, v in os.environ.items() if k not in drop}
    environment |= {"PATH": f"{tmp_path}:{environment['PATH']}", **given}
    words = [f"VENV={tmp_path}", f"PY={tmp_path}/python"]
    assert output("make", "-s", target, *words, cwd=ROOT, env=environment) == wanted


def fat_binaries(data):
    """Of each fat binary in an object file: ([architectures of machine code], [those of PTX])."""
    magic = struct.pack("<I", 0xBA55ED50)
    at = data.find(magic)
    while at >= 0:
        header, size = struct.unpack_from("<HQ", data, at + 6)
        at, end, found = at + header, at + header + size, ([], [])
        while at < end:
            kind, header, size = struct.unpack_from("<HxxIQ", data, at)
            found[kind == 1].append(struct.unpack_from("<I", data, at + 28)[0])
            at += header + size
        yield found
        at = data.find(magic, end)


def test_the_extension_holds_the_architectures_asked_for(setup_py):
    found = list(fat_binaries(Path(_C.__file__).read_bytes()))
    if not found:
        pytest.skip("built without CUDA")
    wanted = [int(re.match(r"\d+", arch).group()) for arch in setup_py.cuda_archs()]
    portable = [archs for archs in found if archs != ([90], [])]
    assert 0 < len(portable) < len(found)
    for native, ptx in portable:
        assert set(wanted) <= set(native)
        assert ptx == native[:1]


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc")
@pytest.mark.parametrize("arch", ["90", "100", "120"])
def test_kernels_overlap_on_every_architecture_that_can(arch):
    """Programmatic dependent launch is in native code, as csrc/cuda/backend.cu expects of it."""
    source = "csrc/cuda/align/pad.cu"
    flags = ["-std=c++17", "-I", "csrc", "-ptx", f"-arch=compute_{arch}"]
    assert "griddepcontrol.wait" in output("nvcc", *flags, source, "-o", "-", cwd=ROOT)


PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4gemmv' for 'sm_90a'
ptxas info    : Function properties for _Z4gemmv
    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers
"""


def test_spills_and_serialised_products_are_found(setup_py):
    source = Path("csrc/cuda/gemm.cu")
    clean = setup_py.report_ptxas(source, PTXAS.format(stack=0, stores=0, loads=0))
    assert clean == (", 1 kernels, at most 168 registers", "")
    assert setup_py.report_ptxas(source, PTXAS.format(stack=16, stores=16, loads=40))[1] == ""
    _, text = setup_py.report_ptxas(source, PTXAS.format(stack=24, stores=20, loads=12))
    assert "_Z4gemmv for sm_90a" in text
    assert "20 bytes spill stores" in text
    assert "warning" in setup_py.report_ptxas(source, "gemm.cu(3): warning #177-D: unused")[1]
    loss = "ptxas info    : (C7520) Potential Performance Loss: wgmma.mma_async instructions are "
    assert "C7520" in setup_py.report_ptxas(source, loss + "serialized due to ... '_Z4gemmv'")[1]


def test_info_command():
    text = output(sys.executable, "-m", "moelora", "info")
    assert _C.version() in text
    assert all(name in text for name in _C.variants())
    failed = subprocess.run([sys.executable, "-m", "moelora"], capture_output=True, text=True)
    assert failed.returncode == 2
    assert "command" in failed.stderr
