"""Do two builds of moelora give the same bits? Digests of what every operator returns in the tests.

    python -m benchmarks.compare bits before=/tmp/before/_C.abi3.so after=moelora/_C.abi3.so
    python -m benchmarks.compare bits before=../before after=. -- tests/operators -m gpu -k layer

A build is an extension module or a checkout (builds.py). Each runs the same tests of this
repository, by default those of operators, formats and training, in a process of its own, in which
uninitialized memory holds known bytes (recorder.py). What differs is listed: the test, the call in
it, how many elements and the largest difference; the exit status is 1. A test that fails with the
first build is new, and no difference; the other way round it is one.

Words after `--` are pytest's.
"""

import argparse
import collections
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import torch

from benchmarks import ROOT
from benchmarks.compare.builds import prepare

TESTS = ("tests/operators", "tests/formats", "tests/training")
PERTURB = str(0x7F ^ 0xFF)  # glibc wants the byte of recorder.py inverted
MOST_SIZES = 20  # tests that run again, so that the sizes of differences are known


class Build:
    """Runs the tests with a build."""

    def __init__(self, text, folder, words):
        self.name, self.folder, self.words = text.partition("=")[0], pathlib.Path(folder), words
        self.environment, self.runs = prepare(text, folder), 0

    def start(self, tests=(), **more):
        self.runs += 1
        self.out = self.folder / f"{self.name}-digests-{self.runs}"
        words = ["-p", "benchmarks.compare.recorder", "-p", "no:cacheprovider", "-q", "--tb=no"]
        words += ["--rootdir", ROOT, "-c", ROOT / "pyproject.toml"]
        words += [*(ROOT / test for test in tests), *(() if tests else self.words)]
        more |= {"MOELORA_DIGESTS": self.out, "MALLOC_PERTURB_": PERTURB}
        environment = os.environ | self.environment | {k: str(v) for k, v in more.items()}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *map(str, words)],
            env=environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait(self):
        """{test: its line, with the file of its tensors}."""
        said = self.process.communicate()[0].splitlines()
        print(f"{self.name}: {said[-1] if said else 'no output'}", flush=True)
        found = {}
        for path in self.out.glob("*.jsonl"):
            for number, line in enumerate(path.read_text().splitlines()):
                row = json.loads(line)
                found[row["test"]] = row | {"kept": path.with_name(f"{path.stem}-{number}.pt")}
        return found


def words_of(words):
    """Pytest's words, with the places of tests in this checkout."""
    places = [word for word in words if (ROOT / word.partition("::")[0]).exists()]
    others = [word for word in words if word not in places]
    return [*(ROOT / place for place in places or TESTS), *others]


def difference(a, b):
    """What differs between two tensors, in words; "" if nothing does."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"{a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}"
    bits = [t.view(-1).view(torch.uint8).view(-1, a.element_size()) for t in (a, b)]
    other = (bits[0] != bits[1]).any(dim=1)
    gap = (a.view(-1)[other].double() - b.view(-1)[other].double()).abs()
    strange = int((~gap.isfinite()).sum())
    by = f"{gap.nan_to_num(0, 0, 0).max().item() if gap.numel() else 0:.3g}"
    by += f", {strange} not finite" if strange else ""
    return f"{int(other.sum())} of {a.numel()} elements, by up to {by}" if other.any() else ""


def first_difference(one, two):
    """(number of the first call that differs, what differs) of a test; None if nothing does."""
    if not two["passed"]:
        return None, "it fails"
    for number, (a, b) in enumerate(zip(one["calls"], two["calls"], strict=False)):
        if a != b:
            other = [str(i) for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y]
            same = a[0] == b[0]
            return number, f"{a[0]}, tensors {', '.join(other)}" if same else f"{a[0]}, {b[0]}"
    if len(one["calls"]) != len(two["calls"]):
        return None, f"{len(one['calls'])} calls, then {len(two['calls'])}"
    return None


def sizes(builds, found):
    """Differing elements of the first call that differs, by test, from running some tests again."""
    tests = [test for test, (number, _) in found.items() if number is not None][:MOST_SIZES]
    if not tests:
        return {}
    for build in builds:
        build.start(tests, MOELORA_KEEP=1)
    one, two = (build.wait() for build in builds)
    made = {}
    for test in tests:
        number = found[test][0]
        a, b = (torch.load(rows[test]["kept"])[number] for rows in (one, two))
        made[test] = "; ".join(filter(None, map(difference, a, b)))
    return made


def compare(first, other, one, two):
    """Print what differs; true if the builds agree, on something."""
    counts, found, same = collections.Counter(), {}, []
    for test, row in one.items():
        if not row["passed"]:
            counts["new" if two.get(test, row)["passed"] else "passed by neither"] += 1
        elif test not in two:
            found[test] = None, "it makes no calls"
        elif why := first_difference(row, two[test]):
            found[test] = why
        else:
            same.append(len(row["calls"]))
    measured = sizes((first, other), found)
    for test, (number, why) in found.items():
        call = "" if number is None else f"call {number}: "
        size = f": {measured[test]}" if measured.get(test) else ""
        print(f"{other.name} differs: {test}: {call}{why}{size}")
    more = f", {len(found)} tests differ" if found else ""
    more += "".join(f", {n} {what}" for what, n in counts.items())
    print(f"{other.name}: {sum(same)} calls in {len(same)} tests as {first.name}{more}")
    return bool(same) and not found


def main(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    help = "NAME=MODULE or NAME=DIR[,VARIABLE=VALUE...]"
    parser.add_argument("builds", nargs="+", help=help)
    split = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:split])
    if len({text.partition("=")[0] for text in args.builds}) < max(2, len(args.builds)):
        parser.error("wanted two builds or more, of different names")
    with tempfile.TemporaryDirectory() as folder:
        words = words_of(argv[split + 1 :])
        builds = [Build(text, folder, words) for text in args.builds]
        for build in builds:
            build.start()
        rows = [build.wait() for build in builds]
        pairs = zip(builds[1:], rows[1:], strict=True)
        agree = [compare(builds[0], build, rows[0], found) for build, found in pairs]
    return 0 if all(agree) and rows[0] else 1
