"""Builds moelora/_C.abi3.so: C with cc, CUDA with nvcc when there is one.

Environment:
  MOELORA_CUDA=0        build without CUDA although nvcc is there
  MOELORA_CUDA_ARCH     semicolon-separated architectures instead of "80;90a"
  MOELORA_WERROR=1      warnings and CUDA register spills are errors
  MOELORA_SANITIZE=1    address and undefined-behaviour sanitizers (build_core, for the C tests)
  CFLAGS, NVCCFLAGS     more of their arguments
  CC, NVCC, CUDA_HOME   the compilers; MAX_JOBS  compilers run at once, 2 if not given
"""

import contextlib
import fcntl
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from setuptools import Command, Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
BUILD = ROOT / "build"
CC = shlex.split(os.environ.get("CC", "cc"))
WERROR = os.environ.get("MOELORA_WERROR") == "1"
SANITIZE = os.environ.get("MOELORA_SANITIZE") == "1"
X86 = platform.machine() in ("x86_64", "AMD64")

AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
AVX512BF16 = [*AVX512, "-mavx512bf16"]
# Kernels of one instruction set live in files of that suffix; everything else is baseline code.
ISA_FLAGS = {
    "_avx2": AVX2,
    "_avx512": AVX512,
    "_avx512bf16": AVX512BF16,
}
DEFAULT_CUDA_ARCHS = "80;90a"


def version():
    header = (ROOT / "csrc/moelora.h").read_text()
    return re.search(r'#define MOELORA_VERSION "([^"]+)"', header).group(1)


def cuda_compiler():
    """(the nvcc command or None, why not)."""
    if os.environ.get("MOELORA_CUDA") == "0":
        return None, "MOELORA_CUDA=0"
    if not any((ROOT / "csrc/cuda").rglob("*.cu")):
        return None, "no CUDA sources here"
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    found = os.environ.get("NVCC") or shutil.which("nvcc", path=f"{home}/bin")
    return found or shutil.which("nvcc"), "nvcc is neither in CUDA_HOME nor on PATH"


def cuda_library_dirs(nvcc):
    """Where nvcc itself would look for cudart; nvcc may be a wrapper far from its toolkit."""
    dry = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True, check=True
    )
    line = re.search(r"^#\$ LIBRARIES=(.*)$", dry.stderr, re.M).group(1)
    return [flag for flag in shlex.split(line) if flag.startswith("-L")]


def cuda_arch_flags():
    """Machine code for every architecture, and PTX of the lowest for GPUs not in the list."""
    archs = os.environ.get("MOELORA_CUDA_ARCH", DEFAULT_CUDA_ARCHS).replace(",", ";").split(";")
    archs = sorted((a.strip().removeprefix("sm_") for a in archs if a.strip()), key=arch_number)
    flags = []
    for i, arch in enumerate(archs):
        code = f"sm_{arch}" if i else f"[sm_{arch},compute_{arch}]"
        flags += ["-gencode", f"arch=compute_{arch},code={code}"]
    return flags


def arch_number(arch):
    return int(re.match(r"\d+", arch).group())


def report_ptxas(source, text):
    """Sums up what ptxas -v says; returns the rest: warnings, kernels that spill registers, and
    those whose wgmma it runs one by one."""
    problems, registers, kernel = [], [], "?"
    for line in text.splitlines():
        if found := re.search(r"(?:entry function|properties for) '?(\w+)", line):
            kernel = found.group(1)
        if found := re.search(r"(\d+) bytes spill stores", line):
            if int(found.group(1)):
                problems.append(f"{source}: {kernel}: {line.strip()}\n")
        elif found := re.search(r"Used (\d+) registers", line):
            registers.append(int(found.group(1)))
        elif not line.startswith("ptxas info") or "serialized" in line:
            problems.append(line + "\n")
    if registers:
        print(f"  {source}: {len(registers)} kernels, at most {max(registers)} registers")
    return "".join(problems)


class Compiler:
    """Compiles sources to objects, each only when it, one of its headers or its command changed.

    An object with warnings or spills is never taken for current, so that they show again.
    """

    def __init__(self, objects, nvcc):
        self.objects = objects
        self.nvcc = nvcc

    def command(self, source, obj):
        depfile = ["-MMD", "-MF", f"{obj}.d"]
        defines = ["-DMOELORA_WITH_CUDA"] if self.nvcc else []
        where = ["-I", "csrc", *defines, "-c", str(source), "-o", str(obj), *depfile]
        if source.suffix == ".cu":
            flags = ["-std=c++17", "-O3", "-lineinfo", "-Xptxas", "-v"]
            flags += ["-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall"]
            flags += shlex.split(os.environ.get("NVCCFLAGS", ""))
            return [self.nvcc, *flags, *cuda_arch_flags(), *where]
        flags = ["-std=c11", "-O3", "-fno-math-errno", "-fPIC", "-fvisibility=hidden"]
        flags += ["-Wall", "-Wextra"]
        if SANITIZE:
            flags += ["-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined"]
            flags += ["-fno-sanitize-recover=all"]
        if source.parent.name == "glue":
            # torch reports errors by C++ exceptions, which pass through our boxed functions.
            flags += ["-fexceptions", "-I", sysconfig.get_path("include")]
        for suffix, isa in ISA_FLAGS.items():
            if source.stem.endswith(suffix):
                flags += isa
        return [*CC, *flags, *shlex.split(os.environ.get("CFLAGS", "")), *where]

    def is_current(self, obj, command):
        try:
            if Path(f"{obj}.cmd").read_text() != shlex.join(command):
                return False
            built = obj.stat().st_mtime
            rule = Path(f"{obj}.d").read_text().replace("\\\n", " ").split(":", 1)[1]
            return all((ROOT / name).stat().st_mtime <= built for name in shlex.split(rule))
        except OSError:
            return False

    def compile(self, source):
        obj = self.objects / source.with_suffix(".o").relative_to("csrc")
        obj.parent.mkdir(parents=True, exist_ok=True)
        command = self.command(source, obj)
        if self.is_current(obj, command):
            return obj
        print(f"  {source}", flush=True)
        Path(f"{obj}.cmd").unlink(missing_ok=True)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        problems = report_ptxas(source, done.stderr) if source.suffix == ".cu" else done.stderr
        sys.stderr.write(problems)
        if done.returncode != 0:
            raise SystemExit(f"{shlex.join(command)}\nfailed with status {done.returncode}")
        if problems and WERROR:
            raise SystemExit(f"{source}: warnings are errors (MOELORA_WERROR=1)")
        if not problems:
            Path(f"{obj}.cmd").write_text(shlex.join(command))
        return obj

    def compile_all(self, sources):
        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", "2"))) as pool:
            return list(pool.map(self.compile, sources))


def sources(rooms, nvcc):
    found = []
    for room in rooms:
        found += sorted((ROOT / "csrc" / room).glob("*.c"))
    if not X86:
        found = [s for s in found if not s.stem.endswith(tuple(ISA_FLAGS))]
    if nvcc:  # the slow ones first
        found = sorted((ROOT / "csrc/cuda").rglob("*.cu")) + found
    return [s.relative_to(ROOT) for s in found]


@contextlib.contextmanager
def build_lock():
    """One build at a time in a checkout."""
    BUILD.mkdir(exist_ok=True)
    with open(BUILD / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def torch_libraries():
    """Link flags for torch's C ABI; nothing of the build machine is recorded in the result."""
    spec = find_spec("torch")
    if spec is None:
        raise SystemExit(
            "moelora builds against the torch that it will run with: install torch >= 2.11 first, "
            "then build with --no-build-isolation"
        )
    return [
        f"-L{Path(spec.origin).parent / 'lib'}",
        "-Wl,--no-as-needed",
        "-ltorch",
        "-ltorch_cpu",
        "-Wl,--as-needed",
        "-Wl,-rpath,$ORIGIN/../torch/lib",
        "-Wl,--enable-new-dtags",
    ]


class BuildExt(build_ext):
    def run(self):
        with build_lock():
            super().run()

    def build_extension(self, ext):
        if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
            raise SystemExit("Python.h not found: install Python's headers (python3-dev)")
        nvcc, reason = cuda_compiler()
        print(
            f"moelora: CPU and CUDA build ({nvcc})"
            if nvcc
            else f"moelora: CPU-only build ({reason})"
        )
        compiler = Compiler(BUILD / ("obj-cuda" if nvcc else "obj-cpu"), nvcc)
        objects = compiler.compile_all(sources(["core", "cpu", "glue"], nvcc))
        cuda = [*cuda_library_dirs(nvcc), "-lcudart_static", "-lstdc++", "-lrt"] if nvcc else []
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        command = [*CC, "-shared", "-o", f"{target}.new", *map(str, objects), *cuda]
        command += [
            "-Wl,--version-script=csrc/glue/exports.map",
            *torch_libraries(),
            "-lm",
            "-lpthread",
            "-ldl",
        ]
        if subprocess.run(command, cwd=ROOT).returncode != 0:
            raise SystemExit(f"{shlex.join(command)}\nfailed")
        os.replace(f"{target}.new", target)

    def copy_extensions_to_source(self):
        """In one step, because another process may have the old file mapped."""
        for ext in self.extensions:
            source = Path(self.build_lib) / self.get_ext_filename(ext.name)
            target = ROOT / self.get_ext_filename(ext.name)
            shutil.copy2(source, f"{target}.new")
            os.replace(f"{target}.new", target)


class BuildCore(Command):
    """The C library alone, for C programs: needs neither torch nor Python at run time."""

    description = "build libmoelora.a (no Python, no torch)"
    user_options = []

    def initialize_options(self):
        pass

    def finalize_options(self):
        pass

    def run(self):
        where = BUILD / ("sanitize" if SANITIZE else "core")
        with build_lock():
            nvcc = None
            objects = Compiler(where / "obj", nvcc).compile_all(sources(["core", "cpu"], nvcc))
            archive = where / "libmoelora.a"
            newest = max(obj.stat().st_mtime_ns for obj in objects)
            if archive.exists() and archive.stat().st_mtime_ns >= newest:
                return
            fresh = archive.with_suffix(".new")
            fresh.unlink(missing_ok=True)
            subprocess.run(["ar", "rcs", str(fresh), *map(str, objects)], check=True)
            os.replace(fresh, archive)


if __name__ == "__main__":
    setup(
        version=version(),
        ext_modules=[Extension("moelora._C", sources=[], py_limited_api=True)],
        cmdclass={"build_ext": BuildExt, "build_core": BuildCore},
        options={"bdist_wheel": {"py_limited_api": "cp310"}},
    )
