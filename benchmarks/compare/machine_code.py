"""Which kernels of two builds differ in machine code? Needs CUDA's cuobjdump, and no GPU.

    python -m benchmarks.compare machine-code before=/tmp/before/_C.abi3.so after=moelora/_C.abi3.so
    python -m benchmarks.compare machine-code before=a.o after=b.o --arch sm_90a --only shrink

A build is an extension module, an object or a cubin. Kernels are compared by name; one whose
template was renamed, with the most similar of the new ones. A change that should change no time
leaves them "the same", or with other offsets of their parameters ("only offsets"). Of those that
differ it says how many instructions are not in both, in whatever order and registers, and which
became more or less. The exit status is 1 where kernels differ.
"""

import argparse
import collections
import functools
import os
import re
import subprocess

ARCH = re.compile(r"\s*code for (sm_\w+)")
FUNCTION = re.compile(r"\s*Function : (\S+)")
INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(.+?)\s*;")
CONSTANT = re.compile(r"c\[0x0\]\[[^]]*\]")
REGISTER = re.compile(r"\b(U?[RPB])\d+\b")
PREDICATE = re.compile(r"@!?U?P\w+\s+")
PARAMETERS = re.compile(r"^void |\([^()]*\)$")
CASTS = re.compile(r"\((\w+)\)")
MOST_CHANGES = 6  # opcodes that a line names
LIKE = 0.2  # of its instructions that a renamed kernel may lack


class Kernel:
    def __init__(self, arch, name, code):
        self.arch, self.name, self.code = arch, name, code
        self.stem = name.partition("<")[0]

    @functools.cached_property
    def shape(self):
        """The code, wherever parameters lie."""
        return [CONSTANT.sub("c[]", line) for line in self.code]

    @functools.cached_property
    def opcodes(self):
        return collections.Counter(PREDICATE.sub("", line).split()[0] for line in self.code)

    @functools.cached_property
    def instructions(self):
        """How often each is there, whatever its registers are."""
        return collections.Counter(REGISTER.sub(r"\1", line) for line in self.shape)


def read_kernels(path, tool, arch):
    """Every kernel of a file, its machine code as nvdisasm prints it."""
    command = [tool, "-sass", *(["-arch", arch] if arch else []), path]
    kernels, lines, found = [], [], None
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **quiet) as process:
        for line in process.stdout:
            if match := ARCH.match(line):
                found = match[1]
            elif match := FUNCTION.match(line):
                lines = []
                kernels.append((found, match[1], lines))
            elif match := INSTRUCTION.match(line):
                lines.append(re.sub(r"\s+", " ", match[1]))
    if process.returncode or not kernels:
        raise SystemExit(f"{path}: {' '.join(command)} finds no kernels")
    names = "\n".join(name for _, name, _ in kernels)
    run = subprocess.run(["c++filt"], input=names, capture_output=True, text=True, check=True)
    names = run.stdout.replace("(anonymous namespace)::", "").splitlines()
    names = [CASTS.sub(r"\1", PARAMETERS.sub("", name)) for name in names]  # without parameters
    return [Kernel(a, name, code) for (a, _, code), name in zip(kernels, names, strict=True)]


def distance(one, two):
    """Instructions of two kernels that the other one lacks."""
    a, b = one.instructions, two.instructions
    return max((a - b).total(), (b - a).total())


def pair(before, after):
    """Matches kernels of two builds: [(before, after)], None where there is no counterpart."""
    named = {(k.arch, k.name): k for k in after}
    pairs = [(k, named.pop((k.arch, k.name), None)) for k in before]
    for i, (kernel, other) in enumerate(pairs):
        alike = [k for k in named.values() if (k.arch, k.stem) == (kernel.arch, kernel.stem)]
        if other is None and alike:
            other = min(alike, key=lambda k: distance(kernel, k))
            if distance(kernel, other) <= LIKE * len(kernel.code):
                pairs[i] = kernel, named.pop((other.arch, other.name))
    return pairs + [(None, kernel) for kernel in named.values()]


def changes(one, two):
    """The opcodes whose numbers changed most."""
    gap = {op: two.opcodes[op] - one.opcodes[op] for op in one.opcodes | two.opcodes}
    most = sorted((op for op in gap if gap[op]), key=lambda op: (-abs(gap[op]), op))
    more = f", {len(most) - MOST_CHANGES} more" if len(most) > MOST_CHANGES else ""
    return ", ".join(f"{op} {gap[op]:+}" for op in most[:MOST_CHANGES]) + more


def compare(before, after):
    """Prints what differs; true if nothing does."""
    counts, lines = collections.Counter(), []
    for one, two in pair(before, after):
        kernel = one or two
        if one is None or two is None:
            kind, gap = "only after" if one is None else "only before", len(kernel.code)
            lines.append((gap, f"{kernel.arch} {kernel.name}: {kind}, {gap} instructions"))
        elif one.code == two.code:
            kind = "the same"
        elif one.shape == two.shape:
            kind = "only offsets"
        else:
            kind, gap = "differ", distance(one, two)
            what = f"{kernel.arch} {two.name}: {len(one.code)} -> {len(two.code)} instructions"
            named = changes(one, two)
            lines.append((gap, f"{what}, {gap} not in both{': ' * bool(named)}{named}"))
        counts[kind] += 1
    for _, line in sorted(lines, key=lambda found: -found[0]):
        print(line)
    print(", ".join(f"{kind}: {n}" for kind, n in counts.most_common()))
    return counts.keys() <= {"the same", "only offsets"}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("builds", nargs=2, metavar="NAME=FILE", help="before, then after")
    parser.add_argument("--arch", help="sm_80, sm_90a, ...; all of the files by default")
    parser.add_argument("--only", default="", help="kernels whose name has this in it")
    tool = os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin", "cuobjdump")
    parser.add_argument("--cuobjdump", default=tool if os.path.exists(tool) else "cuobjdump")
    args = parser.parse_args(argv)
    paths = [text.rpartition("=")[2] for text in args.builds]
    try:
        sides = [read_kernels(path, args.cuobjdump, args.arch) for path in paths]
    except FileNotFoundError as error:
        why = f"{error.filename} is not here: it comes with CUDA's Toolkit"
        raise SystemExit(why) from None
    sides = [[kernel for kernel in side if args.only in kernel.name] for side in sides]
    return 0 if compare(*sides) else 1
