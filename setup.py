"""Builds moelora/_C.abi3.so: C with cc, CUDA with nvcc when there is one.

Environment:
  MOELORA_CUDA=0        build without CUDA although nvcc is there
  MOELORA_CUDA_ARCH     semicolon-separated architectures instead of "80;90a"; "release" is those of
                        the wheels: "80;90a;100;120"
  TORCH_CUDA_ARCH_LIST  as for torch's own extensions, where MOELORA_CUDA_ARCH is not set
  MOELORA_CUDA_FAST=1   CUDA without optimization, in a fifth of the time: a check that it compiles,
                        which reports no register spills; nvcc before 12.9 optimizes all the same
  MOELORA_WERROR=1      warnings and CUDA register spills of more than 16 bytes are errors
  MOELORA_SANITIZE=1    address and undefined-behavior sanitizers (build_core, for the C tests)
  CFLAGS, NVCCFLAGS     more of their arguments; NVCCFLAGS=-lineinfo for profilers
  CC, NVCC, CUDA_HOME   the compilers
  MAX_JOBS              compilers run at once; by default one for each usable core, and fewer where
                        memory is short
  MOELORA_VARIANTS      a regular expression: of the grouped GEMM kernels those whose names match;
                        plans that need another one are refused
  MOELORA_CACHE         where objects stay, for all checkouts and settings, by default moelora/obj
                        in the user's cache; 0: in build/obj, only for this checkout
  MOELORA_REPOSITORY    where the sources are published, for the links of the package's page; by
                        default the repository of the workflow that builds, what a source
                        distribution says, or the remote `origin` of the checkout
"""

import contextlib
import fcntl
import filecmp
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import setuptools
from setuptools import Command, Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).resolve().parent / "csrc"))
from compiling import (  # noqa: E402
    BUILD,
    CC,
    ROOT,
    SANITIZE,
    Compiler,
    cuda_compiler,
    cuda_library_dirs,
    digest,
    digest_of,
    sources,
)

SETUPTOOLS = 77  # as in pyproject.toml


def version():
    header = (ROOT / "csrc/moelora.h").read_text()
    return re.search(r'#define MOELORA_VERSION "([^"]+)"', header).group(1)


def check_setuptools():
    """Before setuptools reads pyproject.toml, of which old releases say "2 matches found"."""
    if int(setuptools.__version__.partition(".")[0]) < SETUPTOOLS:
        raise SystemExit(
            f"setuptools is {setuptools.__version__}, wanted {SETUPTOOLS} or later: "
            f'{sys.executable} -m pip install "setuptools>={SETUPTOOLS}"'
        )


def repository():
    """The address of the published sources without a slash at its end, "" if nothing names it."""
    given = os.environ.get("MOELORA_REPOSITORY", "")
    if not given and os.environ.get("GITHUB_REPOSITORY"):
        given = f"{os.environ['GITHUB_SERVER_URL']}/{os.environ['GITHUB_REPOSITORY']}"
    if not given and (ROOT / "PKG-INFO").exists():
        text = (ROOT / "PKG-INFO").read_text()
        given = "".join(re.findall(r"^Project-URL: Repository, (\S+)$", text, re.M))
    if not given and (ROOT / ".git").exists():
        command = ["git", "-C", str(ROOT), "remote", "get-url", "origin"]
        with contextlib.suppress(OSError):
            given = web_address(subprocess.run(command, capture_output=True, text=True).stdout)
    return given.rstrip("/")


def web_address(remote):
    """The page of a git remote, without user name and password; "" for a remote that has none."""
    host = r"([\w-]+(?:\.[\w-]+)+)(?::\d+)?"
    scheme = r"(?:(?:https?|ssh)://(?:[^@/]+@)?|\w+@)"
    found = re.fullmatch(rf"{scheme}{host}[/:](.+)", remote.strip().rstrip("/"))
    return f"https://{found[1]}/{found[2].removesuffix('.git')}" if found else ""


PICTURE = r"(!)\[([^\]]*)\]\(([^)\s]+)\)"
LINK = (
    r"(?<!!)()\[((?:!\[[^\]]*\]\([^)]*\)|[^\[\]])*)\]\(([^)\s]+)\)"  # a badge is a picture in one
)


def package_page():
    """README.md for a package index, where relative links lead nowhere, and the project's URLs.

    Links get the address of the repository; where none is known, text stays and pictures go.
    """
    home = repository()
    if not home and {"sdist", "bdist_wheel"} & {*sys.argv}:
        print("moelora: the package has no links, as nothing names its repository")

    def absolute(link):
        picture, text, target = link.groups()
        if target.startswith(("http:", "https:", "#")):
            return link[0]
        if not home:
            return "" if picture else text
        if target.startswith("../../"):  # pages that GitHub makes, seen from README.md
            return f"{picture}[{text}]({home}/{target.removeprefix('../../')})"
        return f"{picture}[{text}]({home}/{'raw' if picture else 'blob'}/v{version()}/{target})"

    found = {}
    if (ROOT / "README.md").exists():
        text = (ROOT / "README.md").read_text()
        for kind in (PICTURE, LINK):
            text = re.sub(kind, absolute, text)
        found["long_description"] = text
        found["long_description_content_type"] = "text/markdown"
    if home:
        pages = {"Changelog": "CHANGELOG.md", "Documentation": "docs/README.md"}
        urls = {name: f"{home}/blob/v{version()}/{path}" for name, path in pages.items()}
        found["project_urls"] = {"Repository": home, "Issues": f"{home}/issues", **urls}
    return found


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
    """Only the C library, for C programs: needs neither torch nor Python at run time."""

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
    check_setuptools()
    setup(
        version=version(),
        **package_page(),
        ext_modules=[Extension("moelora._C", sources=[], py_limited_api=True)],
        cmdclass={"build_py": BuildPy, "build_ext": BuildExt, "build_core": BuildCore},
        options={"bdist_wheel": {"py_limited_api": "cp310"}},
    )
