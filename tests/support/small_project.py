"""A small tree with the setup.py of this one, for tests of what it compiles and when."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

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
    "csrc/cuda/shrink/segments_sm90.cu": "",
    "csrc/cuda/variants.inc": "".join(
        f"MOELORA_CUDA_GEMM({family}, NATIVE, {family.upper()}, 16, 128, 64, 4, 1)\n"
        for family in ("sm80", "sm90")
    ),
    "csrc/cuda/gemm/launchers.h": "typedef int moelora_gemm_launcher(void);\n"
    "typedef int moelora_back_launcher(void);\n"
    "enum { CUDA_gemm_bf16_sm80, CUDA_gemm_bf16_sm90, CUDA_gemm_f16_sm80, CUDA_gemm_f16_sm90,\n"
    "       MOELORA_CUDA_ROWS };\n"
    + "".join(
        f"int moelora_cuda_{kind}gemm_{dtype}_{family}(void);\n"
        for kind in ("", "saving_")
        for dtype in ("bf16", "f16")
        for family in ("sm80", "sm90")
    ),
    # Linker scripts: torch's own libraries take longer to read than all else here.
    "torch/__init__.py": "",
    "torch/lib/libtorch.so": "INPUT(-lc)\n",
    "torch/lib/libtorch_cpu.so": "INPUT(-lc)\n",
}
# Beside setup.py itself, from here.
BUILDERS = ("setup.py", "csrc/compiling.py", "csrc/cuda/gemm/rows.py")
GEMMS = {
    f"build/generated/cuda/gemm/{family}/{kind}_{dtype}_native_1.cu"
    for kind in ("gemm", "saving")
    for dtype in ("bf16", "f16")
    for family in ("sm80", "sm90")
}
CUDA = {name for name in PROJECT if name.endswith(".cu")} | GEMMS
# Compiles nothing but does what setup.py relies on; tells its arguments to nvcc.log.
NVCC = """\
here=$(dirname "$0")
case "$1" in
  --version) echo "Cuda compilation tools, release 13.0, V13.0.1"; exit;;
  --dryrun) echo "#$ LIBRARIES=\\"-L$here\\"" >&2; exit;;
esac
echo "$@" >> "$here/nvcc.log"
while [ $# -gt 0 ]; do
  case "$1" in -c) source=$2;; -o) object=$2;; -MF) rule=$2;; esac
  shift
done
echo "$object : $source" > "$rule"
cp "$here/empty.o" "$object"
"""


def script(path: Path, text: str) -> Path:
    """A shell script where a program is looked for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


# Runs setup.py for each line on stdin, in forks: setuptools is imported once, which takes most of
# the time of such a build.
SETUPS = """
import json, os, runpy, sys
import setuptools.command.build_ext, setuptools.command.build_py, setuptools.config.pyprojecttoml
for line in sys.stdin:
    folder, words, environment, said = json.loads(line)
    if os.fork() == 0:
        out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        err = os.open(said + ".errors", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number, to in enumerate((os.open(os.devnull, os.O_RDONLY), out, err)):
            os.dup2(to, number)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv, sys.path[0] = ["setup.py", *words], folder
        runpy.run_path("setup.py", run_name="__main__")
        sys.exit()
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


@pytest.fixture(scope="module")
def setups():
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", SETUPS]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        process.stdin.close()


class Project:
    """A small tree with the setup.py of this one, and a cache of objects."""

    def __init__(self, root, cache, setups):
        self.root = root
        self.cache = cache
        self.setups = setups
        self.library = root / "moelora/_C.abi3.so"

    def build(self, *command, **environment):
        """What setup.py says, the command and the environment given."""
        command = command or ("build_ext", "--inplace")
        drop = ("MAX_JOBS", "CFLAGS", "NVCCFLAGS", "NVCC", "CUDA_HOME")
        kept = {k: v for k, v in os.environ.items() if k not in drop and "MOELORA" not in k}
        ours = {"MOELORA_CUDA": "0", "MOELORA_CACHE": str(self.cache)}
        environment = ours | kept | environment
        said = f"{self.root}.said"
        request = [str(self.root), ["-q", *command], environment, said]
        print(json.dumps(request), file=self.setups.stdin, flush=True)
        status = self.setups.stdout.readline()
        assert status == "0\n", Path(f"{said}.errors").read_text()
        return Path(said).read_text()

    def nvcc(self):
        """The environment of a build with CUDA by a stand-in for nvcc."""
        (self.root / "bin").mkdir()
        nvcc = script(self.root / "bin/nvcc", NVCC)
        for command in ("ar rcs libcudart_static.a", "cc -fPIC -x c -c /dev/null -o empty.o"):
            subprocess.run(command.split(), cwd=nvcc.parent, check=True)
        return {"MOELORA_CUDA": "1", "NVCC": str(nvcc), "MAX_JOBS": "1"}

    def nvcc_commands(self):
        """{source: its arguments} since the last call."""
        log = self.root / "bin/nvcc.log"
        lines = [line.split() for line in log.read_text().splitlines()]
        log.write_text("")
        return {words[words.index("-c") + 1]: words for words in lines}


@pytest.fixture
def project(tmp_path, setups):
    root = tmp_path / "tree"
    for name, text in PROJECT.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    for name in BUILDERS:
        shutil.copy(ROOT / name, root / name)
    return Project(root, tmp_path / "cache", setups)
