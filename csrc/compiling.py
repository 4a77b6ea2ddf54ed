"""What compiles the sources below csrc, for setup.py: which files, with which flags, into a cache.

An object is found again by its command, its compiler and the contents of all that it was made from.
Objects are shared by all checkouts of a user: another branch, another clone and other settings
compile nothing twice.
"""

import contextlib
import functools
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
CC = shlex.split(os.environ.get("CC", "cc"))
WERROR = os.environ.get("MOELORA_WERROR") == "1"
SANITIZE = os.environ.get("MOELORA_SANITIZE") == "1"
FAST = os.environ.get("MOELORA_CUDA_FAST") == "1"

AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
AVX512BF16 = [*AVX512, "-mavx512bf16"]
AMX = [*AVX512, "-mamx-tile", "-mamx-bf16"]
# Kernels of one instruction set live in files of that suffix; everything else is baseline code.
ISA_FLAGS = {"_avx2": AVX2, "_avx512": AVX512, "_avx512bf16": AVX512BF16, "_amx": AMX}
# Machine code of portable kernels. Without an "f" or "a" it runs on all later minor versions too:
# that of 100 on 10.3, that of 120 on 12.1.
CUDA_ARCHS = "80;90a"
RELEASE_CUDA_ARCHS = "80;90a;100;120"
TORCH_NAMES = {  # of torch.utils.cpp_extension
    "Volta": "7.0",
    "Turing": "7.5",
    "Ampere": "8.0;8.6",
    "Ada": "8.9",
    "Hopper": "9.0",
    "Blackwell": "10.0;12.0",
}
# A CUDA source with this name in its path uses features of this architecture only and is compiled
# for no other, regardless of the list above. "sm80" denotes portable code.
ONLY_FOR = {"sm90": "90a"}
# Memory to reserve per job. The largest source takes a third of it per compiler process, of which
# nvcc may run four at once.
JOB_BYTES = 1 << 30
# Objects of one source that the cache keeps, those used last.
KEPT = 24


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


def nvcc_release(nvcc):
    """(13, 0) of "Cuda compilation tools, release 13.0, V13.0.88"; (0, 0) of another compiler."""
    release = re.search(r"release (\d+)\.(\d+)", identity((nvcc,)))
    return tuple(map(int, release.groups())) if release else (0, 0)


def compression_flags(nvcc):
    """Flags for the smallest machine code. zstd, from nvcc 12.8 on, needs the driver 550.54 with
    CUDA 12, and none beyond what CUDA 13 needs anyway; older compilers have LZ4."""
    if nvcc_release(nvcc) >= (12, 8):
        return ["--compress-mode=size"]
    return ["-Xfatbin", "-compress-all"]


def cuda_archs():
    """The architectures of portable sources, the lowest first: MOELORA_CUDA_ARCH, else those that
    torch's own variable names for extensions, TORCH_CUDA_ARCH_LIST."""
    given = os.environ.get("MOELORA_CUDA_ARCH", "") or torch_archs() or CUDA_ARCHS
    given = RELEASE_CUDA_ARCHS if given == "release" else given
    archs = {a.strip().removeprefix("sm_") for a in given.replace(",", ";").split(";") if a.strip()}
    return sorted(archs, key=lambda arch: int(re.match(r"\d+", arch).group()))


def torch_archs():
    """TORCH_CUDA_ARCH_LIST ("8.0;9.0a+PTX Ada") in the words of MOELORA_CUDA_ARCH; "" if unset.
    9.0 is 9.0a, as Hopper's kernels are built in any case; older GPUs than 8.0 are left out."""
    text = os.environ.get("TORCH_CUDA_ARCH_LIST", "")
    names = re.sub("|".join(TORCH_NAMES), lambda name: TORCH_NAMES[name[0]], text)
    words = [w for w in re.split(r"[;,\s]+", names) if w]
    archs = []
    for word in words:
        found = re.fullmatch(r"(\d+)\.(\d)([af]?)(?:\+PTX)?", word)
        if not found:
            raise SystemExit(
                f"TORCH_CUDA_ARCH_LIST is {text!r}: {word!r} is not an architecture such as 8.0 or "
                "9.0a+PTX; MOELORA_CUDA_ARCH replaces it"
            )
        if int(found[1]) >= 8:
            arch = "".join(found.groups())
            archs.append("90a" if arch == "90" else arch)
    if words and not archs:
        raise SystemExit(
            f"TORCH_CUDA_ARCH_LIST is {text!r}: moelora's CUDA kernels need 8.0 or later; "
            "MOELORA_CUDA=0 builds without them"
        )
    return ";".join(archs)


def cuda_archs_of(source):
    """(architectures of machine code, that of the PTX for GPUs not among them or None)."""
    names = {*source.parts, *source.stem.split("_")}
    only = [arch for name, arch in ONLY_FOR.items() if name in names]
    return (only, None) if only else (cuda_archs(), cuda_archs()[0])


def cuda_arch_flags(source):
    """The -gencode flags of a source. SASS for 9.x to 11.x is assembled from one PTX, that of the
    lowest of them: generating PTX takes as long as assembling it, and portable sources use no
    feature newer than programmatic dependent launch (9.0). From 12.0 on SMs are smaller, and some
    kernels have other launch bounds, so that these need a second PTX."""
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


# Bytes that a kernel may spill outside of its main loop: per-tile state of the epilogue and, with
# quantized weights, also of producers, which leave registers to consumers.
SPILL_LIMIT = 16
SPILL_LIMITS = {
    r"(gemm|saving)_\w+_w8a8_\d+": 704,
    r"sm90/(gemm|saving)_\w+_fp8_\d+": 984,
    r"(gemm|saving)_\w+4_\d+": 400,  # four-bit formats
    r"blocks|windows": 128,
    r"decode_\w+": 104,
    r"back_\w+_\d+": 64,
}


def spill_limit(source):
    path = Path(source).with_suffix("").as_posix()
    found = (n for name, n in SPILL_LIMITS.items() if re.search(f"(^|/)({name})$", path))
    return next(found, SPILL_LIMIT)


def report_ptxas(source, text):
    """(summary, problems) of the output of ptxas -v: problems are warnings, kernels that spill more
    than their limit and, of optimized code, kernels whose wgmmas are serialized."""
    problems, registers, kernel = [], [], "?"
    for line in text.splitlines():
        if found := re.search(r"entry function '(\w+)' for '(\w+)'", line):
            kernel = " for ".join(found.groups())
        if found := re.search(r"(\d+) bytes spill stores", line):
            if int(found.group(1)) > spill_limit(source):
                problems.append(f"{source}: {kernel}: {line.strip()}\n")
        elif found := re.search(r"Used (\d+) registers", line):
            registers.append(int(found.group(1)))
        elif ("serialized" in line and not FAST) or not line.startswith("ptxas info"):
            problems.append(line + "\n")
    summary = f", {len(registers)} kernels, at most {max(registers)} registers" if registers else ""
    return summary, "".join(problems)


@functools.cache
def identity(compiler):
    """Version text of a compiler: with another release everything is recompiled."""
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
    """SHA-256 of files by name, relative to ROOT; each file is read once.

    Files below csrc are read at the start. If one is edited while a compiler runs, the digest
    stored with the object no longer matches, and the next build compiles it again.
    """

    def __init__(self):
        files = [path for path in (ROOT / "csrc").rglob("*") if path.is_file()]
        super().__init__((str(path.relative_to(ROOT)), digest(path)) for path in files)

    def __missing__(self, name):
        self[name] = digest(ROOT / name)
        return self[name]


def digest_of(command):
    """SHA-256 of a command, independent of the location of the tree."""
    return hashlib.sha256(shlex.join(command).replace(f"{ROOT}/", "").encode()).hexdigest()


def cache_folder():
    """Where objects lie: MOELORA_CACHE, by default moelora/obj in the user's cache; build/obj if
    that is 0 or cannot be written."""
    given = os.environ.get("MOELORA_CACHE", "")
    if given == "0":
        return BUILD / "obj"
    user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(given or f"{user}/moelora/obj")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"objects stay in build/obj, for the cache cannot be made: {error}", flush=True)
        return BUILD / "obj"
    return folder


class Compiler:
    """Compiles sources to objects, each only if the contents of the source or of a header, the
    command or the compiler changed. Times are ignored: they change when a tree is copied.

    STEM.COMMAND.CONTENTS.o in the cache comes with a list of its inputs, in the format of
    sha256sum. Objects with warnings or spills are not cached, so that every build shows them.
    """

    def __init__(self, nvcc):
        self.nvcc = nvcc
        self.digests = Digests()
        self.cache = cache_folder()

    def command(self, source):
        where = ["-I", "csrc", "-c", str(source)]
        # C that does not test for it has the same object in builds with CUDA and without.
        is_cuda = source.suffix == ".cu"
        if is_cuda or (self.nvcc and "MOELORA_WITH_CUDA" in (ROOT / source).read_text()):
            where.insert(0, "-DMOELORA_WITH_CUDA")
        if is_cuda:
            flags = ["-std=c++17"]
            if FAST:
                flags.append("-Ofc=max" if nvcc_release(self.nvcc) >= (12, 9) else "-O3")
            else:
                flags += ["-O3", "-Xptxas", "-v", *compression_flags(self.nvcc)]
            flags += ["-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall"]
            flags += shlex.split(os.environ.get("NVCCFLAGS", ""))
            return [self.nvcc, *flags, *cuda_arch_flags(source), *where]
        flags = ["-std=c11", "-O3", "-fno-math-errno", "-fno-trapping-math"]
        flags += ["-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
        if SANITIZE:
            flags += ["-O0", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined"]
            flags += ["-fno-sanitize-recover=all"]
        if source.parent.name == "glue":
            # torch reports errors by C++ exceptions, which pass through our boxed functions.
            flags += ["-fexceptions", "-I", sysconfig.get_path("include")]
        for suffix, isa in ISA_FLAGS.items():
            if source.stem.endswith(suffix):
                flags += isa
        return [*CC, *flags, *shlex.split(os.environ.get("CFLAGS", "")), *where]

    def stem(self, source):
        """Of its objects, below the cache and below build/obj."""
        first = "build/generated" if source.parts[0] == BUILD.name else "csrc"
        key = [*self.command(source), identity(tuple(CC))]
        if source.suffix == ".cu":
            key.append(identity((self.nvcc,)))
        return f"{source.with_suffix('').relative_to(first)}.{digest_of(key)[:12]}"

    def find(self, source):
        """Its object that is up to date, or None."""
        stem = self.cache / self.stem(source)
        for made_from in stem.parent.glob(f"{stem.name}.*.sha256"):
            with contextlib.suppress(OSError):  # a file is not in this tree, or another build
                lines = [line.split("  ", 1) for line in made_from.read_text().splitlines()]
                obj = made_from.with_suffix(".o")
                if all(self.digests[name] == was for was, name in lines) and obj.exists():
                    os.utime(made_from)
                    return obj
        return None

    def store(self, source, obj, names):
        """Moves an object into the cache, where it takes the place of the one used least lately."""
        listed = "".join(f"{self.digests[name]}  {name}\n" for name in names)
        contents = hashlib.sha256(listed.encode()).hexdigest()[:12]
        stored = self.cache / f"{self.stem(source)}.{contents}.o"
        stored.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=stored.parent) as folder:
            new = Path(folder) / "new"
            shutil.move(obj, new)
            os.replace(new, stored)
            new.write_text(listed)
            os.replace(new, stored.with_suffix(".sha256"))
        lists = list(stored.parent.glob(f"{source.stem}.*.*.sha256"))
        for old in sorted(lists, key=lambda path: path.stat().st_mtime)[:-KEPT]:
            old.unlink(missing_ok=True)
            old.with_suffix(".o").unlink(missing_ok=True)
        return stored

    def compile(self, source, threads=1):
        """(object, text of the compiler about it)."""
        obj = BUILD / "obj" / f"{self.stem(source)}.o"
        obj.parent.mkdir(parents=True, exist_ok=True)
        rule = Path(f"{obj}.d")
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
        names = shlex.split(rule.read_text().replace("\\\n", " ").split(":", 1)[1])
        rule.unlink()
        if not problems:
            obj = self.store(source, obj, [name.removeprefix(f"{ROOT}/") for name in names])
        return obj, summary

    def compile_all(self, sources, title):
        """Return the objects of sources; compile stale ones and print progress."""
        objects = {source: self.find(source) for source in sources}
        stale = [source for source in sources if objects[source] is None]
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
            objects[source], summary = self.compile(source, threads)
            with lock:
                finished.append(source)
                count = f"[{len(finished):{len(str(len(stale)))}}/{len(stale)}]"
                seconds = f"{time.monotonic() - start:.1f} s"
                print(f"{count} {source}: {seconds}{summary}", flush=True)

        counts = f"{len(stale)} of {len(sources)} files, {jobs} at once"
        print(f"{title}: compiling {counts}", flush=True)
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(compile_one, stale))
        print(f"{title}: compiled in {time.monotonic() - began:.0f} s", flush=True)
        return list(objects.values())


def gemm_sources():
    """Those of the grouped GEMM kernels, which csrc/cuda/gemm/rows.py makes."""
    where = ROOT / "csrc/cuda/gemm/rows.py"
    spec = importlib.util.spec_from_file_location("rows", where)
    rows = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rows)
    variants = os.environ.get("MOELORA_VARIANTS", "")
    return rows.write(BUILD / "generated", variants, together=FAST)


def sources(rooms, nvcc):
    """Relative to ROOT, those that take long first."""
    found = []
    for room in rooms:
        found += sorted((ROOT / "csrc" / room).rglob("*.c"))
    if not makes_x86():
        found = [s for s in found if not s.stem.endswith(tuple(ISA_FLAGS))]
    if nvcc:
        found = gemm_sources() + sorted((ROOT / "csrc/cuda").rglob("*.cu")) + found
    return [s.relative_to(ROOT) for s in found]
