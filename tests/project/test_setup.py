"""The build: what setup.py and make compile, when, and what they say of it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from small_project import CUDA, Project, project, script, setups
from test_packaging import ROOT, compiling, output

FIXTURES = (compiling, project, setups)


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
    copied = Project(tmp_path / "copy", project.cache, project.setups)
    shutil.copytree(project.root, copied.root, copy_function=shutil.copyfile)
    (copied.root / "bin/nvcc").chmod(0o755)
    for path in sorted(copied.root.rglob("*"), reverse=True):
        os.utime(path)
    environment["NVCC"] = str(copied.root / "bin/nvcc")
    assert copied.build(**environment) == ""
    assert copied.build("build_core") == ""


def test_checkouts_share_objects(project, tmp_path):
    """A clone compiles what differs; with MOELORA_CACHE=0 a checkout has objects of its own."""
    project.build()
    clone = Project(tmp_path / "clone", project.cache, project.setups)
    shutil.copytree(project.root, clone.root, ignore=shutil.ignore_patterns("build", "_C.*"))
    assert clone.build() == "moelora for CPU (MOELORA_CUDA=0): linked\n"
    (clone.root / "csrc/core/a.h").write_text("#define VALUE 2\n")
    assert "compiling 1 of 3" in clone.build()
    assert project.build() == ""
    shutil.rmtree(clone.root / "build")
    assert "compiling 3 of 3" in clone.build(MOELORA_CACHE="0")
    assert "compiling" not in clone.build(MOELORA_CACHE="0")
    assert len(list((clone.root / "build/obj").rglob("*.o"))) == 3
    (tmp_path / "file").write_text("")
    said = clone.build(MOELORA_CACHE=str(tmp_path / "file"))
    assert said.startswith("objects stay in build/obj, for the cache cannot be made")


def test_the_cache_keeps_what_was_used_last(project):
    header = project.root / "csrc/core/a.h"
    builder = project.root / "csrc/compiling.py"
    builder.write_text(builder.read_text().replace("KEPT = 24", "KEPT = 2"))
    for value in (1, 2, 1, 3):
        header.write_text(f"#define VALUE {value}\n")
        project.build()
    assert len(list(project.cache.glob("core/a.*.o"))) == 2
    header.write_text("#define VALUE 1\n")
    assert "compiling" not in project.build()
    header.write_text("#define VALUE 2\n")
    assert "compiling 1 of 3" in project.build()


def test_variants_that_are_left_out(project):
    """MOELORA_VARIANTS: only rows that match have a source, and a launcher in the table."""
    environment = project.nvcc()
    project.build(**environment)
    assert set(project.nvcc_commands()) == CUDA
    table = project.root / "build/generated/cuda/gemm/launchers.c"
    assert table.read_text().count("] = moelora_cuda_gemm_") == 4
    said = project.build(**environment, MOELORA_VARIANTS="_bf16_.*sm90")
    assert "compiling 1 of" in said and "launchers.c" in said
    assert "[CUDA_gemm_bf16_sm90] = moelora_cuda_gemm_bf16_sm90,\n}" in table.read_text()
    assert {str(path.relative_to(project.root)) for path in table.parent.rglob("*.cu")} == {
        f"build/generated/cuda/gemm/sm90/{kind}_bf16_native_1.cu" for kind in ("gemm", "saving")
    }
    assert "compiling" not in project.build(**environment)
    for wrong, why in (("gemm_f64", "which no GEMM variant matches"), ("(", "expected a regular")):
        with pytest.raises(AssertionError, match=f"MOELORA_VARIANTS is .*{why}"):
            project.build(**environment, MOELORA_VARIANTS=wrong)


def test_modules_that_moved_are_not_packed(project):
    gone = project.root / "moelora/gone.py"
    gone.write_text("")
    project.build("build")
    (built,) = project.root.glob("build/lib.*")
    assert (built / "moelora/gone.py").exists()
    gone.unlink()
    project.build("build")
    files = {path.name for path in built.rglob("*.*") if path.is_file()}
    assert files == {"__init__.py", "_C.abi3.so"}


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
        script(cc, f'[ "$1" = --version ] && echo {version} && exit\nexec cc "$@"')
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
    source = project.root / "csrc/core/a.c"
    edit = f'cc "$@" || exit\ncase "$*" in *core/a.c*) echo >> {source};; esac'
    cc = script(project.root / "cc", edit)
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


HOPPER = ["arch=compute_90a,code=sm_90a"]
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


def codes(words):
    return [after for word, after in zip(words, words[1:], strict=False) if word == "-gencode"]


def test_builds_with_cuda_and_without_share_what_they_can(project):
    environment = project.nvcc()
    assert "compiling 3 of 3" in project.build()
    cuda = project.build(**environment)
    assert cuda.startswith(f"moelora for CPU and CUDA ({environment['NVCC']}): compiling 12 of 14")
    assert "csrc/cpu/device.c" in cuda
    commands = project.nvcc_commands()
    assert set(commands) == CUDA
    for source, words in commands.items():
        assert codes(words) == (HOPPER if "sm90" in source else PORTABLE[None])
    assert project.build() == "moelora for CPU (MOELORA_CUDA=0): linked\n"
    assert "compiling" not in project.build(**environment)
    assert "compiling" not in project.build("build_core")
    assert "compiling" not in project.build("build_core", "--cuda", **environment)
    archives = [project.root / f"build/{name}/libmoelora.a" for name in ("core", "core-cuda")]
    assert [len(output("ar", "t", str(path)).split()) for path in archives] == [2, 13]


@pytest.mark.parametrize("archs", PORTABLE)
def test_a_source_is_compiled_for_what_its_folder_says(compiling, monkeypatch, archs):
    """Portable code for the architectures asked for, that of one architecture for no other."""
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setenv("MOELORA_CUDA_ARCH", archs or "")
    for source in CUDA:
        wanted = HOPPER if "sm90" in source else PORTABLE[archs]
        assert codes(compiling.cuda_arch_flags(Path(source))) == wanted, source


@pytest.mark.parametrize(
    ("torchs", "ours", "archs"),
    [
        ("8.0;9.0", None, ["80", "90a"]),
        ("7.5 8.9 9.0a 12.0+PTX", None, ["89", "90a", "120"]),
        ("Turing;Ampere;Hopper", None, ["80", "86", "90a"]),
        ("8.6", "100", ["100"]),
        ("", "", ["80", "90a"]),
        ("7.0;7.5", None, "need 8.0 or later; MOELORA_CUDA=0"),
        ("8.0;sm_90", None, "'sm_90' is not an architec"),
    ],
)
def test_the_architectures_of_torchs_variable(compiling, monkeypatch, torchs, ours, archs):
    """As for torch's own extensions; ours goes first. Those that are none are named."""
    monkeypatch.delenv("MOELORA_CUDA_ARCH", raising=False)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", torchs)
    if ours is not None:
        monkeypatch.setenv("MOELORA_CUDA_ARCH", ours)
    if isinstance(archs, list):
        assert compiling.cuda_archs() == archs
    else:
        with pytest.raises(SystemExit, match=archs):
            compiling.cuda_archs()


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_x86_sources_are_for_compilers_of_x86(compiling, monkeypatch, tmp_path, machine):
    """Whatever this machine is: cross compilers."""
    cc = script(tmp_path / "cc", f"echo {machine}-linux-gnu")
    monkeypatch.setattr(compiling, "CC", [str(cc)])
    names = {source.stem for source in compiling.sources(["cpu"], None)}
    assert "gemm_scalar" in names
    for name in ("gemm_avx2", "gemm_avx512bf16"):
        assert (name in names) == (machine == "x86_64")


class Nvcc:
    """A small project that is built with CUDA."""

    def __init__(self, project):
        self.project, self.environment = project, project.nvcc()
        self.script = Path(self.environment["NVCC"])

    def replace(self, *texts):
        self.script.write_text(self.script.read_text().replace(*texts))

    def commands(self, **environment):
        self.project.build(**self.environment, **environment)
        return [" ".join(words) for words in self.project.nvcc_commands().values()]


def test_machine_code_is_small(project):
    """No line tables unless asked for, and the best compression that the compiler has."""
    nvcc = Nvcc(project)
    for words in nvcc.commands():
        assert "--compress-mode=size" in words and "-lineinfo" not in words
    assert all("-lineinfo" in words for words in nvcc.commands(NVCCFLAGS="-lineinfo"))
    nvcc.replace("13.0", "12.6")
    for words in nvcc.commands():
        assert "--compress-mode=size" not in words and " -Xfatbin -compress-all " in words


def test_a_fast_build_only_compiles(project):
    """Without optimization, and without what ptxas says of optimized code alone."""
    nvcc = Nvcc(project)
    loss = "ptxas info    : (C7520) Potential Performance Loss: wgmma.mma_async are serialized"
    nvcc.replace("cp ", f"echo '{loss}' >&2; cp ")
    for words in nvcc.commands(MOELORA_CUDA_FAST="1", MOELORA_WERROR="1"):
        assert "-Ofc=max" in words and not {"-O3", "-v", "--compress-mode=size"} & {*words.split()}
    with pytest.raises(AssertionError, match="warnings are errors"):
        nvcc.commands(MOELORA_WERROR="1")
    nvcc.replace("13.0", "12.8")
    assert all("-Ofc=max" not in words for words in nvcc.commands(MOELORA_CUDA_FAST="1"))


def test_spare_cores_share_the_architectures_of_a_file(project):
    environment = {**project.nvcc(), "MAX_JOBS": "16", "MOELORA_CUDA_ARCH": "80;90a;120"}
    project.build(**environment)
    threads = {name: "--threads 2" in " ".join(c) for name, c in project.nvcc_commands().items()}
    assert threads == {name: "sm90" not in name for name in threads}
    (project.root / "csrc/cuda/align/small.cu").write_text("// new\n")
    project.build(**environment)
    ((_, words),) = project.nvcc_commands().items()
    assert "--threads 3" in " ".join(words)
    assert project.build(**{**environment, "MAX_JOBS": "1"}) == ""


def test_jobs_are_as_many_as_cores_and_memory_allow(compiling, monkeypatch, tmp_path):
    monkeypatch.delenv("MAX_JOBS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    for jobs, memory in ((6, 100 * compiling.JOB_BYTES), (3, 3.5 * compiling.JOB_BYTES), (1, 0)):
        monkeypatch.setattr(compiling, "usable_memory", lambda memory=memory: int(memory))
        assert compiling.num_jobs() == jobs
    monkeypatch.setenv("MAX_JOBS", "9")
    assert compiling.num_jobs() == 9
    for wrong in ("0", "-1", "many"):
        monkeypatch.setenv("MAX_JOBS", wrong)
        with pytest.raises(SystemExit, match=f"MAX_JOBS is '{wrong}', expected a number"):
            compiling.num_jobs()


def test_usable_memory_is_the_less_of_machine_and_container(compiling, tmp_path):
    meminfo, limit = tmp_path / "meminfo", tmp_path / "memory.max"
    meminfo.write_text("MemTotal:       20 kB\nMemAvailable:      10 kB\n")
    assert compiling.usable_memory(meminfo, limit) == 10240
    for text, expected in (("max\n", 10240), ("4096\n", 4096), ("1000000\n", 10240)):
        limit.write_text(text)
        assert compiling.usable_memory(meminfo, limit) == expected


PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4gemmv' for 'sm_90a'
ptxas info    : Function properties for _Z4gemmv
    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers
"""


def test_spills_and_serialized_products_are_found(compiling, monkeypatch):
    monkeypatch.setattr(compiling, "FAST", False)
    source = Path("csrc/cuda/gemm.cu")
    clean = compiling.report_ptxas(source, PTXAS.format(stack=0, stores=0, loads=0))
    assert clean == (", 1 kernels, at most 168 registers", "")
    assert compiling.report_ptxas(source, PTXAS.format(stack=16, stores=16, loads=40))[1] == ""
    large = source.with_name("gemm_bf16_w8a8_1.cu")
    assert compiling.report_ptxas(large, PTXAS.format(stack=208, stores=404, loads=372))[1] == ""
    loss = "ptxas info    : (C7520) Potential Performance Loss: wgmma.mma_async instructions are "
    for path, said, problem in (
        (source, PTXAS.format(stack=24, stores=20, loads=12), "_Z4gemmv for sm_90a"),
        (source, PTXAS.format(stack=24, stores=20, loads=12), "20 bytes spill stores"),
        (large, PTXAS.format(stack=9, stores=800, loads=9), "800 bytes"),
        (source, "gemm.cu(3): warning #177-D: unused", "warning"),
        (source, loss + "serialized due to ... '_Z4gemmv'", "C7520"),
    ):
        assert problem in compiling.report_ptxas(path, said)[1]


def make(words, folder, programs, environment):
    """What make says where these scripts are in its environment's folder, and first on PATH."""
    for name, text in programs.items():
        script(folder / name, text)
    environment = {k: v for k, v in environment.items() if not k.startswith("MAKE")}
    environment["PATH"] = f"{folder}:{environment['PATH']}"
    words = ("make", "-s", *words, f"VENV={folder}", f"PY={folder}/python")
    return output(*words, cwd=ROOT, env=environment)


FIRST = "cuda=0 arch=\ndemo\n"  # the C code, and the demo on it
THEN = "That was the demo. Now the CUDA kernels for this machine, some minutes:\n"


@pytest.mark.parametrize(
    ("target", "gpu", "given", "wanted"),
    [
        ("demo", "9.0\n9.0", "", f"{FIRST}{THEN}cuda= arch=90a\n"),
        ("demo", "8.0\n12.0", "", f"{FIRST}{THEN}cuda= arch=120;80\n"),
        ("demo", "9.0", "MOELORA_CUDA_ARCH=80", f"cuda=0 arch=80\ndemo\n{THEN}cuda= arch=80\n"),
        ("demo", "9.0", "TORCH_CUDA_ARCH_LIST=8.0", f"{FIRST}{THEN}cuda= arch=\n"),
        ("demo", "9.0", "MOELORA_CUDA=0", FIRST),
        ("demo", "", "", FIRST),
        ("demo", "", "MOELORA_CUDA=1", f"{FIRST}{THEN}cuda=1 arch=\n"),
        ("build", "", "", "cuda= arch=\n"),
        ("test", "9.0", "", "cuda= arch=\n"),
        ("test", "9.0", "FEW_KERNELS=1", "cuda= arch=80 few\n"),
        ("test", "", "", "cuda= arch=80 few\n"),
        ("test", "", "MOELORA_CUDA_ARCH=90a", "cuda= arch=90a few\n"),
        ("test", "", "MOELORA_VARIANTS= MOELORA_CUDA_FAST=0", "cuda= arch=80\n"),
        ("nightly", "", "", "cuda= arch=release\n"),
        ("wheel", "", "", "cuda= arch=release\n"),
        ("wheel", "", "MOELORA_CUDA_ARCH=90a", "cuda= arch=90a\n"),
        ("wheel", "", "TORCH_CUDA_ARCH_LIST=9.0", "cuda= arch=\n"),
    ],
)
def test_what_make_builds(tmp_path, target, gpu, given, wanted):
    """The demo before CUDA kernels, and those only for a GPU; a wheel code of all architectures.
    Tests without a GPU a few kernels, as CI."""
    few = "${MOELORA_VARIANTS:+ few}"
    settings = f'echo "cuda=$MOELORA_CUDA arch=$MOELORA_CUDA_ARCH{few}"'
    builds = f'*build_ext*|*"pip wheel"*) {settings}'
    for name in (".ready", ".editable"):
        (tmp_path / name).write_text("")
    drop = ("MOELORA_", "TORCH_CUDA_ARCH_LIST", "FEW_KERNELS")
    environment = dict(word.split("=") for word in given.split())
    more = ["MAKE=true"] if target in ("test", "nightly") else []  # only what is built first
    said = make(
        (target, *more),
        tmp_path,
        {
            "nvidia-smi": f"""test "$1" = -L || printf '%s\\n' '{gpu}'; test '{gpu}'""",
            "python": f'case "$*" in *demo.py) echo demo;; {builds};; esac',
        },
        {k: v for k, v in os.environ.items() if not k.startswith(drop)} | environment,
    )
    assert said == wanted


CPU_INDEX = ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]


@pytest.mark.parametrize(
    ("gpu", "configured", "index", "size"),
    [
        (False, "global.timeout='60'", CPU_INDEX, "for the CPU: 0.2 GB"),
        (True, "", [], "with CUDA's libraries: 2 to 3 GB"),
        (False, ":env:.index-url='https://example.org/simple'", [], "indexes of pip's config"),
        (False, "global.extra-index-url='https://example.org/cpu'", [], "indexes of pip's config"),
        (True, "global.find-links='/wheels'", [], "indexes of pip's config"),
    ],
)
def test_torch_is_that_of_the_machine_and_its_size_is_said_first(
    tmp_path, gpu, configured, index, size
):
    """Without a GPU nobody downloads CUDA's libraries; pip's configuration goes first."""
    programs = {
        "nvidia-smi": f"exit {0 if gpu else 9}",
        "python3": "exit 0",
        "python": f'case "$*" in *config*) echo "{configured}";; *) echo "$@";; esac',
    }
    words = (f"{tmp_path}/.ready", f"PYTHON={tmp_path}/python3")
    said = make(words, tmp_path, programs, os.environ)
    first, torch, others = said.splitlines()
    assert size in first
    wanted = (ROOT / "requirements-torch.txt").read_text().split()
    assert torch.split() == ["-m", "pip", "install", "--quiet", "--no-compile", *index, *wanted]
    assert others.endswith("-r requirements.txt")


def test_the_setuptools_that_it_needs_is_named():
    old = "setuptools.__version__ = '76.1.0'; sys.argv = ['setup.py', '--version']"
    code = f"import runpy, setuptools, sys; {old}; runpy.run_path('setup.py', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    wanted = f'{sys.executable} -m pip install "setuptools>=77"'
    assert '"setuptools >= 77"' in (ROOT / "pyproject.toml").read_text()
    assert done.stderr == f"setuptools is 76.1.0, wanted 77 or later: {wanted}\n"


def test_a_python_that_does_not_start_is_named(tmp_path):
    words = ["make", "-s", f"{tmp_path}/.ready", f"VENV={tmp_path}", "PYTHON=python3.99"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert "PYTHON is python3.99, which does not start: make PYTHON=..." in done.stdout
