"""Builds moelora/_C.abi3.so: C with cc, CUDA with nvcc when there is one.

Environment:
  MOELORA_CUDA=0        build without CUDA although nvcc is there
  MOELORA_CUDA_ARCH     semicolon-separated architectures instead of "80;90a"; "release" is those of
                        the wheels: "80;90a;100;120"
  MOELORA_WERROR=1      warnings and CUDA register spills of more than 16 bytes are errors
  MOELORA_SANITIZE=1    address and undefined-behaviour sanitizers (build_core, for the C tests)
  CFLAGS, NVCCFLAGS     more of their arguments; NVCCFLAGS=-lineinfo for profilers
  CC, NVCC, CUDA_HOME   the compilers
  MAX_JOBS              compilers run at once; by default one for each usable core, and fewer where
                        memory is short
  MOELORA_REPOSITORY    where the sources are published: the package's page links there

Every object stays in build/obj, under a name made from its command: going from one of these
settings to another and back compiles nothing twice. `make clean` empties it.
"""

import contextlib
import fcntl
import filecmp
import functools
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from setuptools import Command, Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
BUILD = ROOT / "build"
CC = shlex.split(os.environ.get("CC", "cc"))
WERROR = os.environ.get("MOELORA_WERROR") == "1"
SANITIZE = os.environ.get("MOELORA_SANITIZE") == "1"

AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
AVX512BF16 = [*AVX512, "-mavx512bf16"]
# Kernels of one instruction set live in files of that suffix; everything else is baseline code.
ISA_FLAGS = {
    "_avx2": AVX2,
    "_avx512": AVX512,
    "_avx512bf16": AVX512BF16,
}
# Machine code of portable kernels. Without an "f" or "a" it runs on all later minor versions too:
# that of 100 on 10.3, that of 120 on 12.1.
CUDA_ARCHS = "80;90a"
RELEASE_CUDA_ARCHS = "80;90a;100;120"
# A CUDA source with this name in its folders or its own is not portable: it uses what this
# architecture alone has, and is compiled for nothing else, whatever the list above. "sm80" is where
# portable code starts.
ONLY_FOR = {"sm90": "90a"}
# A compiler takes a third of that for the largest of our sources; nvcc may run four at once.
JOB_BYTES = 1 << 30


def version():
    header = (ROOT / "csrc/moelora.h").read_text()
    return re.search(r'#define MOELORA_VERSION "([^"]+)"', header).group(1)


def package_page():
    """README.md for a package index, where relative links lead nowhere, and the project's URLs.

    Links get the address of the repository; where none is known, text stays and pictures go.
    """
    repository = os.environ.get("MOELORA_REPOSITORY", "").rstrip("/")

    def absolute(link):
        picture, text, target = link.groups()
        if target.startswith(("http:", "https:", "#")):
            return link[0]
        if not repository:
            return "" if picture else text
        return (
            f"{picture}[{text}]({repository}/{'raw' if picture else 'blob'}/v{version()}/{target})"
        )

    found = {}
    if (ROOT / "README.md").exists():
        text = (ROOT / "README.md").read_text()
        found["long_description"] = re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", absolute, text)
        found["long_description_content_type"] = "text/markdown"
    if repository:
        pages = {"Changelog": "CHANGELOG.md", "Documentation": "docs"}
        urls = {name: f"{repository}/blob/v{version()}/{path}" for name, path in pages.items()}
        found["project_urls"] = {"Repository": repository, "Issues": f"{repository}/issues", **urls}
    return found


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


def compression_flags(nvcc):
    """The smallest machine code. zstd, from nvcc 12.8 on, asks for the driver 550.54 with CUDA 12,
    for nothing that CUDA 13 does not ask for by itself; older compilers have LZ4."""
    release = re.search(r"release (\d+)\.(\d+)", identity((nvcc,)))
    if release and tuple(map(int, release.groups())) >= (12, 8):
        return ["--compress-mode=size"]
    return ["-Xfatbin", "-compress-all"]


def cuda_archs():
    """The architectures of portable sources, the lowest first."""
    given = os.environ.get("MOELORA_CUDA_ARCH", CUDA_ARCHS)
    given = RELEASE_CUDA_ARCHS if given == "release" else given
    archs = {a.strip().removeprefix("sm_") for a in given.replace(",", ";").split(";") if a.strip()}
    return sorted(archs, key=lambda arch: int(re.match(r"\d+", arch).group()))


def cuda_archs_of(source):
    """(architectures of machine code, that of the PTX for GPUs not among them or None)."""
    names = {*source.parts, *source.stem.split("_")}
    only = [arch for name, arch in ONLY_FOR.items() if name in names]
    return (only, None) if only else (cuda_archs(), cuda_archs()[0])


def cuda_arch_flags(source):
    """Portable machine code for 9.x to 11.x is made from one PTX, that of the lowest of them: to
    make PTX takes as long as to make machine code of it, and programmatic launches, which are all
    that portable sources have from 9.0 on, are in each. From 12.0 on SMs are smaller, and so are
    the bounds of some kernels: these have a PTX of their own."""
    archs, ptx = cuda_archs_of(source)
    if ptx is None:
        return [f for arch in archs for f in ("-gencode", f"arch=compute_{arch},code=sm_{arch}")]
    plain = [arch.rstrip("af") for arch in archs]
    large = [arch for arch in plain if 90 <= int(arch) < 120]
    small = [arch for arch in plain if int(arch) >= 120]
    groups = [[arch] for arch in plain if int(arch) < 90] + [g for g in (large, small) if g]
    flags = []
    for number, group in enumerate(groups):
        codes = [f"sm_{arch}" for arch in group]
        if number == 0:
            codes.append(f"compute_{group[0]}")
        code = f"[{','.join(codes)}]" if len(codes) > 1 else codes[0]
        flags += ["-gencode", f"arch=compute_{group[0]},code={code}"]
    return flags


# Spilled by a kernel that no main loop notices: numbers of a tile that wait for its end. Of
# quantized weights what producers know of a tile, too: they leave their registers to the consumers.
SPARED_BYTES = 16
SPARED_BYTES_OF = {
    "gemm_w8a8.cu": 600,
    "gemm_int4.cu": 336,
    "gemm_mxfp4.cu": 224,
    "blocks.cu": 32,
    "decode.cu": 96,
    "back.cu": 64,
}


def report_ptxas(source, text):
    """What ptxas -v says: a summary, and the rest: warnings, kernels that spill registers, and
    those whose wgmma it runs one by one."""
    problems, registers, kernel = [], [], "?"
    for line in text.splitlines():
        if found := re.search(r"entry function '(\w+)' for '(\w+)'", line):
            kernel = " for ".join(found.groups())
        if found := re.search(r"(\d+) bytes spill stores", line):
            if int(found.group(1)) > SPARED_BYTES_OF.get(Path(source).name, SPARED_BYTES):
                problems.append(f"{source}: {kernel}: {line.strip()}\n")
        elif found := re.search(r"Used (\d+) registers", line):
            registers.append(int(found.group(1)))
        elif not line.startswith("ptxas info") or "serialized" in line:
            problems.append(line + "\n")
    summary = f", {len(registers)} kernels, at most {max(registers)} registers" if registers else ""
    return summary, "".join(problems)


@functools.cache
def identity(compiler):
    """What a compiler calls itself; another release of it compiles all anew."""
    done = subprocess.run([*compiler, "--version"], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{shlex.join(compiler)} --version failed: {done.stderr}")
    return done.stdout


def makes_x86():
    """Whether CC does: a cross compiler makes code for another machine than this."""
    target = subprocess.run([*CC, "-dumpmachine"], capture_output=True, text=True)
    return target.stdout.startswith("x86_64")


def num_jobs():
    given = os.environ.get("MAX_JOBS", "")
    if given:
        if not given.isdecimal() or int(given) == 0:
            raise SystemExit(f"MAX_JOBS is {given!r}, expected a number of at least 1")
        return int(given)
    return max(1, min(len(os.sched_getaffinity(0)), usable_memory() // JOB_BYTES))


def usable_memory(meminfo="/proc/meminfo", limit="/sys/fs/cgroup/memory.max"):
    """Bytes that processes may still have on this machine, and in its container if that has a
    limit."""
    available = re.search(r"^MemAvailable: *(\d+) kB", Path(meminfo).read_text(), re.M)
    usable = int(available.group(1)) << 10
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
        usable = min(usable, int(Path(limit).read_text()))
    return usable


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Digests(dict):
    """SHA-256 of files by name, relative to ROOT, as they were at first sight.

    Ours are all seen at the start: what is edited while a compiler runs then differs from what
    is noted for its object, which is compiled again next time.
    """

    def __init__(self):
        files = [path for path in (ROOT / "csrc").rglob("*") if path.is_file()]
        super().__init__((str(path.relative_to(ROOT)), digest(path)) for path in files)

    def __missing__(self, name):
        self[name] = digest(ROOT / name)
        return self[name]


def digest_of(command):
    """Of a command's words; where the tree lies makes no difference."""
    return hashlib.sha256(shlex.join(command).replace(f"{ROOT}/", "").encode()).hexdigest()


class Compiler:
    """Compiles sources to objects, each only when it, one of its headers, its command or the
    compiler changed: their contents, for times change when a tree is copied.

    An object with warnings or spills is never taken for current, so that they show again.
    """

    def __init__(self, nvcc):
        self.nvcc = nvcc
        self.digests = Digests()

    def command(self, source):
        where = ["-I", "csrc", "-c", str(source)]
        # C that does not ask for it has the same object in builds with CUDA and without.
        is_cuda = source.suffix == ".cu"
        if is_cuda or (self.nvcc and "MOELORA_WITH_CUDA" in (ROOT / source).read_text()):
            where.insert(0, "-DMOELORA_WITH_CUDA")
        if is_cuda:
            flags = ["-std=c++17", "-O3", "-Xptxas", "-v", *compression_flags(self.nvcc)]
            flags += ["-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall"]
            flags += shlex.split(os.environ.get("NVCCFLAGS", ""))
            return [self.nvcc, *flags, *cuda_arch_flags(source), *where]
        flags = [
            "-std=c11",
            "-O3",
            "-fno-math-errno",
            "-fno-trapping-math",
            "-fPIC",
            "-fvisibility=hidden",
        ]
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

    def object_of(self, source):
        key = [*self.command(source), identity(tuple(CC))]
        if source.suffix == ".cu":
            key.append(identity((self.nvcc,)))
        stem = BUILD / "obj" / source.with_suffix("").relative_to("csrc")
        return Path(f"{stem}.{digest_of(key)[:12]}.o")

    def is_current(self, obj):
        """Beside an object lies a list of what it was made from, as sha256sum writes it."""
        try:
            made_from = [
                line.split("  ", 1) for line in Path(f"{obj}.sha256").read_text().splitlines()
            ]
            return obj.exists() and all(self.digests[name] == was for was, name in made_from)
        except OSError:
            return False

    def compile(self, source, obj, threads=1):
        """What there is to say about it."""
        obj.parent.mkdir(parents=True, exist_ok=True)
        made_from, rule = Path(f"{obj}.sha256"), Path(f"{obj}.d")
        made_from.unlink(missing_ok=True)
        places = [str(path.relative_to(ROOT)) for path in (obj, rule)]
        command = [*self.command(source), "-o", places[0], "-MMD", "-MF", places[1]]
        if threads > 1:
            command += ["--threads", str(threads)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        summary, problems = "", done.stderr
        if source.suffix == ".cu":
            summary, problems = report_ptxas(source, problems)
        sys.stderr.write(problems)
        if done.returncode != 0:
            raise SystemExit(f"{shlex.join(command)}\nfailed with status {done.returncode}")
        if problems and WERROR:
            raise SystemExit(f"{source}: warnings are errors (MOELORA_WERROR=1)")
        if not problems:
            names = shlex.split(rule.read_text().replace("\\\n", " ").split(":", 1)[1])
            names = [name.removeprefix(f"{ROOT}/") for name in names]
            made_from.write_text("".join(f"{self.digests[name]}  {name}\n" for name in names))
        rule.unlink()
        return summary

    def compile_all(self, sources, title):
        """Their objects. Says what it does, if there is anything to do."""
        objects = {source: self.object_of(source) for source in sources}
        stale = [source for source in sources if not self.is_current(objects[source])]
        if not stale:
            return list(objects.values())
        jobs, began = num_jobs(), time.monotonic()
        # Cores without a source of their own help with the architectures of others.
        spare = -(-jobs // max(1, sum(source.suffix == ".cu" for source in stale)))
        lock, finished = threading.Lock(), []

        def compile_one(source):
            start = time.monotonic()
            is_cuda = source.suffix == ".cu"
            threads = min(spare, len(cuda_archs_of(source)[0])) if is_cuda else 1
            summary = self.compile(source, objects[source], threads)
            with lock:
                finished.append(source)
                count = f"[{len(finished):{len(str(len(stale)))}}/{len(stale)}]"
                seconds = f"{time.monotonic() - start:.1f} s"
                print(f"{count} {source}: {seconds}{summary}", flush=True)

        print(
            f"{title}: compiling {len(stale)} of {len(sources)} files, {jobs} at once", flush=True
        )
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(compile_one, stale))
        print(f"{title}: compiled in {time.monotonic() - began:.0f} s", flush=True)
        return list(objects.values())


def make(target, command, inputs):
    """Runs `command`, which makes `target`.new of `inputs`, unless it made `target` of the same."""
    made_from = Path(f"{target}.sha256")
    state = digest_of([*command, *map(digest, inputs)])
    with contextlib.suppress(OSError):
        if target.exists() and made_from.read_text() == state:
            return
    target.parent.mkdir(parents=True, exist_ok=True)
    for old in (made_from, Path(f"{target}.new")):
        old.unlink(missing_ok=True)
    if subprocess.run(command, cwd=ROOT).returncode != 0:
        raise SystemExit(f"{shlex.join(command)}\nfailed")
    os.replace(f"{target}.new", target)
    made_from.write_text(state)


def copy(source, target):
    """In one step, because another process may have the old file mapped. False if it was a copy."""
    if target.exists() and filecmp.cmp(source, target, shallow=False):
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, f"{target}.new")
    os.replace(f"{target}.new", target)
    return True


def sources(rooms, nvcc):
    found = []
    for room in rooms:
        found += sorted((ROOT / "csrc" / room).rglob("*.c"))
    if not makes_x86():
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


class BuildPy(build_py):
    def run(self):
        """Without what earlier builds left: modules that have moved since would be packed too."""
        where = Path(self.build_lib).resolve()
        if BUILD in where.parents and not self.editable_mode:
            shutil.rmtree(where, ignore_errors=True)
        super().run()


class BuildExt(build_ext):
    def run(self):
        with build_lock():
            super().run()

    def build_extension(self, ext):
        if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
            raise SystemExit("Python.h not found: install Python's headers (python3-dev)")
        nvcc, reason = cuda_compiler()
        compiler = Compiler(nvcc)
        title = f"moelora for CPU and CUDA ({nvcc})" if nvcc else f"moelora for CPU ({reason})"
        objects = compiler.compile_all(sources(["core", "cpu", "glue"], nvcc), title)
        cuda = [*cuda_library_dirs(nvcc), "-lcudart_static", "-lstdc++", "-lrt"] if nvcc else []
        linked = BUILD / ("cuda" if nvcc else "cpu") / "_C.abi3.so"
        command = [*CC, "-shared", "-o", f"{linked}.new", *map(str, objects), *cuda]
        command += [
            "-Wl,--version-script=csrc/glue/exports.map",
            *torch_libraries(),
            "-lm",
            "-lpthread",
            "-ldl",
        ]
        make(linked, command, [*objects, ROOT / "csrc/glue/exports.map"])
        if copy(linked, Path(self.get_ext_fullpath(ext.name))):
            print(f"{title}: linked", flush=True)

    def copy_extensions_to_source(self):
        for ext in self.extensions:
            name = self.get_ext_filename(ext.name)
            copy(Path(self.build_lib) / name, ROOT / name)


class BuildCore(Command):
    """The C library alone, for C programs: needs neither torch nor Python at run time."""

    description = "build libmoelora.a (no Python, no torch)"
    user_options = [("cuda", None, "with the CUDA kernels: build/core-cuda instead of build/core")]
    boolean_options = ["cuda"]

    def initialize_options(self):
        self.cuda = False

    def finalize_options(self):
        pass

    def run(self):
        nvcc, reason = cuda_compiler() if self.cuda else (None, "")
        if self.cuda and not nvcc:
            raise SystemExit(f"no CUDA kernels: {reason}")
        where = BUILD / ("sanitize" if SANITIZE else "core-cuda" if nvcc else "core")
        with build_lock():
            archive = where / "libmoelora.a"
            title = str(archive.relative_to(ROOT))
            objects = Compiler(nvcc).compile_all(sources(["core", "cpu"], nvcc), title)
            make(archive, ["ar", "rcs", f"{archive}.new", *map(str, objects)], objects)


if __name__ == "__main__":
    setup(
        version=version(),
        **package_page(),
        ext_modules=[Extension("moelora._C", sources=[], py_limited_api=True)],
        cmdclass={"build_py": BuildPy, "build_ext": BuildExt, "build_core": BuildCore},
        options={"bdist_wheel": {"py_limited_api": "cp310"}},
    )
