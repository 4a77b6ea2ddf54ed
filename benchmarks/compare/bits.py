"""Do two builds of moelora give the same bits? Digests of every output, over benchmarks/grid.

    python -m benchmarks.compare bits before=/tmp/before/_C.abi3.so after=moelora/_C.abi3.so
    python -m benchmarks.compare bits before=../before after=. --device cpu
    python -m benchmarks.compare bits --device cpu --out digests.json
    python -m benchmarks.compare bits before=digests.json after=. --device cpu

A build is an extension module, a checkout (benchmarks/processes.py) or the file of an earlier run.
Each has a process of its own, in which uninitialized memory holds known bytes. What differs
is listed: the call, how many elements, the largest difference, and the exit status is 1. What the
first build refuses and another one takes is new, and no difference; the other way round it is one.
Files compare on the same machine with the same torch, without the sizes of differences.

Without a build: this repository's. `--budget 30` ends after about so many seconds, in which
families take turns; `--only edges,lists` takes the families or groups that begin so.
"""

import argparse
import collections
import hashlib
import pathlib
import tempfile
import time

import torch

from benchmarks import ROOT, grid
from benchmarks.compare.processes import Build
from moelora import _C
from moelora.bench import results

# Exceptions of a build for a call that it does not have or does not support.
REFUSALS = (AttributeError, TypeError, ValueError, NotImplementedError)
# Large and finite in bfloat16 and float32, NaN in float16, no index. glibc wants it inverted.
POISON = 0x7F
ENVIRONMENT = {"MALLOC_PERTURB_": str(POISON ^ 0xFF)}
# Blocks of both pools of torch's allocator: those below and from 1 MiB on.
POISONED = (1 << 28, 1 << 19, 1 << 19, 1 << 12)


# ---- in the process of a build ----


def digest(tensor):
    flat = tensor.cpu().reshape(-1)
    bits = hashlib.sha1(flat.view(torch.uint8).numpy()).hexdigest()
    return f"{str(tensor.dtype)[6:]} {list(tensor.shape)} {bits}"


def outputs(made):
    """{name: tensor} of what a call returned."""
    made = made if isinstance(made, tuple) else (made,)
    return {f"output {i}" if len(made) > 1 else "output": t for i, t in enumerate(made)}


class Worker:
    """The process of one build: runs groups of the grid, and keeps what the last one made."""

    def __init__(self, device):
        self.device, self.groups, self.made = device, grid.groups(device), {}
        self.met = set()

    def run(self, group):
        """Digests of every output by call, and why calls were refused."""
        self.made, refused, digests = {}, {}, {}
        for name, call in self.groups[group]():
            self.poison()
            try:
                self.made[name] = {k: t.cpu() for k, t in outputs(call()).items()}
                digests[name] = {k: digest(t) for k, t in self.made[name].items()}
            except REFUSALS as error:
                refused[name] = f"{type(error).__name__}: {error}"
            except RuntimeError as error:
                digests[name] = {"raises": f"{type(error).__name__}: {error}"}
            self.met.update(word.partition("=")[2] for word in _C.last_plan().split())
        return {"digests": digests, "refused": refused}

    def poison(self):
        """On a GPU; malloc does so on a CPU."""
        if self.device == "cuda":
            for block in [torch.empty(n, dtype=torch.uint8, device="cuda") for n in POISONED]:
                block.fill_(POISON)

    def save(self, call, path):
        torch.save(self.made[call], path)

    def unmet(self):
        """Kernel variants for this device that no call has run."""
        kinds = *grid.BASE, *grid.AROUND, *grid.DELTA
        usable = (
            grid.rows(self.device, dtype, *kinds) for dtype in grid.DTYPES[self.device].values()
        )
        return [v for v in dict.fromkeys(v for names in usable for v in names) if v not in self.met]


# ---- on our side ----


class Recorded:
    """A file of digests in the place of a build's process."""

    def __init__(self, name, path, device):
        self.name, self.groups = name, {}
        meta, rows = results.read(path)
        if meta.get("digests_of") != device:
            raise SystemExit(f"{path} has no digests of {device}, but of {meta.get('digests_of')}")
        for row in rows:
            group = self.groups.setdefault(row["group"], {"digests": {}, "refused": {}})
            kind = "digests" if "digests" in row else "refused"
            group[kind][row["call"]] = row[kind]

    def send(self, do, group):
        self.asked = group

    def receive(self):
        return self.groups.get(self.asked)

    def end(self):
        pass


def open_build(text, device, folder):
    name, _, rest = text.partition("=")
    if rest.endswith(".json"):
        return Recorded(name, rest, device)
    return Build(text, folder, "benchmarks.compare.bits:Worker", device, **ENVIRONMENT)


def difference(a, b):
    """What differs between two tensors, in words."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"{a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}"
    size = a.element_size()
    bits = [t.contiguous().view(-1).view(torch.uint8).view(-1, size) for t in (a, b)]
    other = (bits[0] != bits[1]).any(dim=1)
    gap = (a.reshape(-1)[other].double() - b.reshape(-1)[other].double()).abs()
    by = f"{gap.nan_to_num(0, 0, 0).max().item():.3g}"
    strange = int((~gap.isfinite()).sum())
    by += f", {strange} not finite" if strange else ""
    return f"{int(other.sum())} of {a.numel()} elements, by up to {by}"


class Comparison:
    """Differences between the first build and another one, accumulated over groups."""

    def __init__(self, first, other, folder):
        self.first, self.other, self.folder = first, other, pathlib.Path(folder)
        self.same = self.raised = self.refused = 0  # calls
        self.missing = 0  # groups that a file does not have
        self.new, self.different = collections.Counter(), collections.Counter()

    def add(self, group, one, two):
        """Answers of the two builds to a group."""
        if one is None or two is None:
            self.missing += 1
            return
        family = group.split(" ", 1)[0]
        self.refused += len(one["refused"].keys() & two["refused"].keys())
        self.new[family] += len(two["digests"].keys() - one["digests"].keys())
        for call, digests in one["digests"].items():
            if call not in two["digests"]:
                text = f"no longer taken: {two['refused'].get(call, 'it is not there')}"
            elif digests != two["digests"][call]:
                text = self.describe(call, digests, two["digests"][call])
            else:
                self.same += 1
                self.raised += "raises" in digests
                continue
            self.different[family] += 1
            print(f"{self.other.name} differs: {group}: {call}: {text}", flush=True)

    def describe(self, call, one, two):
        names = [name for name in {**one, **two} if one.get(name) != two.get(name)]
        raised = [f"{b.name} {d['raises']}" for b, d in self.sides(one, two) if "raises" in d]
        if raised:
            return ", ".join(raised)
        if any(isinstance(build, Recorded) for build in (self.first, self.other)):
            return ", ".join(f"other bits in {name}" for name in names)
        tensors = []
        for build in (self.first, self.other):
            path = self.folder / f"{build.name}.pt"
            build.ask("save", call=call, path=str(path))
            tensors.append(torch.load(path))
        return "; ".join(f"{name}: {difference(*(t[name] for t in tensors))}" for name in names)

    def sides(self, one, two):
        return (self.first, one), (self.other, two)

    def report(self):
        """The summary; true if the builds agree, on something."""
        print(f"{self.other.name}: {self.same} calls as {self.first.name}", end="")
        for what, counts in (("differ", self.different), ("only here", self.new)):
            if counts.total():
                parts = ", ".join(f"{family} {n}" for family, n in counts.items() if n)
                print(f", {counts.total()} {what} ({parts})", end="")
        print(f", {self.raised} of them fail" if self.raised else "", end="")
        print(f", {self.refused} taken by neither" if self.refused else "", end="")
        print(f", {self.missing} groups not in a file" if self.missing else "")
        return self.same > 0 and not self.different


def run(builds, names, budget, folder):
    """(comparisons with the first build, rows of the first one's digests) of the groups."""
    first, *others = builds
    comparisons = [Comparison(first, other, folder) for other in others]
    rows, end, done = [], time.monotonic() + budget, 0
    for group in names:
        if done and time.monotonic() > end:
            break
        for build in builds:
            build.send("run", group=group)
        answers = [build.receive() for build in builds]
        for comparison, answer in zip(comparisons, answers[1:], strict=True):
            comparison.add(group, answers[0], answer)
        for kind, calls in (answers[0] or {}).items():
            rows += [{"group": group, "call": name, kind: d} for name, d in calls.items()]
        done += 1
    print(f"{done} of {len(names)} groups, {len(rows)} calls, {len(builds)} builds")
    return comparisons, rows


def unmet(builds):
    for build in builds:
        names = build.ask("unmet") if isinstance(build, Build) else []
        if names:
            print(f"{build.name}: not met: {', '.join(names)}")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    help = "NAME=MODULE or NAME=DIR[,VARIABLE=VALUE...], or NAME=FILE.json"
    parser.add_argument("builds", nargs="*", default=[f"here={ROOT}"], help=help)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--only", default="", help="beginnings of families or groups")
    parser.add_argument("--budget", default=1e9, type=float, help="seconds")
    parser.add_argument("--out", help="result file to write, of one build")
    args = parser.parse_args(argv)
    if args.out and len(args.builds) > 1:
        parser.error("--out is for one build")
    if len({text.partition("=")[0] for text in args.builds}) < len(args.builds):
        parser.error("builds need different names")
    names = [g for g in grid.groups(args.device) if g.startswith(tuple(args.only.split(",")))]
    if not names:
        parser.error(f"no group begins with {args.only}; families: {', '.join(grid.FAMILIES)}")
    builds = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for text in args.builds:
                builds.append(open_build(text, args.device, folder))
            comparisons, rows = run(builds, names, args.budget, folder)
            if not args.only and args.budget > 1e8:
                unmet(builds)
        finally:
            for build in builds:
                build.end()
    if args.out:
        results.write(args.out, rows, digests_of=args.device)
    agree = [comparison.report() for comparison in comparisons]
    return 0 if all(agree) else 1
