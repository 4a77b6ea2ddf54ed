"""Checks the files of a release: sizes, names, metadata, the page of the package.

    python release/check.py build/release/dist
    python release/check.py dist --tag v0.1.0

Wheels of version X have CUDA kernels, those of X+cpu have none; with `--tag` there must be both
for x86-64 and aarch64. Prints one line for each file, and whether PyPI takes the source
distribution and the wheels of version X: it refuses files of more than 100 MB. In a workflow the
same is the output `pypi` of the step. Exit status 1, with all problems: a file is not fit to
publish.
"""

import argparse
import email.parser
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

SDIST_BYTES = 2_000_000
PYPI_BYTES = 100_000_000  # per file, unless PyPI grants a project more
KINDS = {"cuda-x86_64", "cuda-aarch64", "cpu-x86_64", "cpu-aarch64"}
URLS = {"Repository", "Issues", "Documentation", "Changelog"}


def metadata(path):
    """The headers of a wheel's METADATA, or of a source distribution's PKG-INFO."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
            text = archive.read(name).decode()
    else:
        with tarfile.open(path) as archive:
            (name,) = (n for n in archive.getnames() if re.fullmatch(r"[^/]+/PKG-INFO", n))
            text = archive.extractfile(name).read().decode()
    return email.parser.HeaderParser().parsestr(text)


def kind_of(wheel):
    """cuda or cpu, by its extension, and the machine of its name: cuda-x86_64."""
    with zipfile.ZipFile(wheel) as archive:
        cuda = b".nv_fatbin" in archive.read("moelora/_C.abi3.so")
    return f"{'cuda' if cuda else 'cpu'}-{re.search('x86_64|aarch64', wheel.name)[0]}"


def problems_of(path):
    """What is wrong with one file."""
    found, size = [], path.stat().st_size
    if path.suffix == ".whl":
        if not re.fullmatch(r"moelora-[\w.+]+-cp310-abi3-manylinux[\w.]+\.whl", path.name):
            found.append("is not an abi3 wheel with a manylinux tag: make release-wheels makes one")
        elif kind_of(path).startswith("cpu") != ("+cpu-" in path.name):
            found.append(f"is a wheel for {kind_of(path)}: only those without CUDA are of X+cpu")
    elif size > SDIST_BYTES:
        found.append(f"has {size} bytes, wanted at most {SDIST_BYTES}: MANIFEST.in leaves data out")
    headers = metadata(path)
    urls = {line.partition(",")[0] for line in headers.get_all("Project-URL", ())}
    if missing := URLS - urls:
        why = "no address of the repository was known (MOELORA_REPOSITORY)"
        found.append(f"has no Project-URL {', '.join(sorted(missing))}: {why}")
    return found


def check(paths, tag=None):
    """All problems, one line each."""
    wheels = [p for p in paths if p.suffix == ".whl"]
    archives = [p for p in paths if p.name.endswith(".tar.gz")]
    problems = [
        f"{p.name} is neither a wheel nor a .tar.gz" for p in {*paths} - {*wheels, *archives}
    ]
    if len(archives) != 1 or not wheels:
        counts = f"{len(archives)} source distributions and {len(wheels)} wheels"
        problems.append(f"there are {counts}, wanted one source distribution and its wheels")
    for path in (*archives, *wheels):
        problems += [f"{path.name} {problem}" for problem in problems_of(path)]
    versions = {metadata(path)["Version"].removesuffix("+cpu") for path in (*archives, *wheels)}
    if len(versions) > 1:
        problems.append(f"files are of several versions: {', '.join(sorted(versions))}")
    if tag is not None and versions != {tag.removeprefix("v")}:
        problems.append(f"the tag is {tag}, files are of version {', '.join(sorted(versions))}")
    if tag is not None and (missing := KINDS - {*map(kind_of, wheels)}):
        problems.append(f"there is no wheel for {', '.join(sorted(missing))}")
    return problems


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="with one source distribution and its wheels")
    parser.add_argument("--tag", help="of the release: v and the version of every file")
    args = parser.parse_args(argv)
    paths = sorted(args.folder.iterdir())
    for path in paths:
        print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB")
    problems = check(paths, args.tag)
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        return 1
    fits = all(path.stat().st_size <= PYPI_BYTES for path in paths if "+cpu-" not in path.name)
    print("PyPI takes these files" if fits else "wheels exceed PyPI's limit and need the index")
    if output := os.environ.get("GITHUB_OUTPUT"):
        with open(output, "a") as file:
            file.write(f"pypi={'true' if fits else 'false'}\n")
    return subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *paths]).returncode


if __name__ == "__main__":
    sys.exit(main())
