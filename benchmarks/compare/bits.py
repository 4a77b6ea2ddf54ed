"""Do two builds of moelora give the same bits? Digests of what every operator returns in the tests.

    python -m benchmarks.compare bits before=/tmp/before/_C.abi3.so after=moelora/_C.abi3.so
    python -m benchmarks.compare bits before=../before after=. -- tests/operators -m gpu -k layer

A build is an extension module or a checkout (builds.py). Each runs the same tests of this
repository, by default those of operators, formats and training, in a process of its own, in which
uninitialized memory holds known bytes (recorder.py). What differs is listed: the test, the call in
it and its tensors; the exit status is 1. A test that fails with the first build is new, and no
difference; the other way round it is one.

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

from benchmarks import ROOT
from benchmarks.compare.builds import prepare

TESTS = ("tests/operators", "tests/formats", "tests/training")
PERTURB = str(0x7F ^ 0xFF)  # glibc wants the byte of recorder.py inverted


class Tests:
    """Pytest in a process, with a build."""

    def __init__(self, text, folder, words):
        self.name = text.partition("=")[0]
        self.out = pathlib.Path(folder) / f"{self.name}-digests"
        command = [sys.executable, "-m", "pytest", "-p", "benchmarks.compare.recorder", "-q"]
        command += ["-p", "no:cacheprovider", "--tb=no", f"--rootdir={ROOT}"]
        home, variables = prepare(text, folder)
        places = os.pathsep.join([home, str(ROOT), os.environ.get("PYTHONPATH", "")])
        variables |= {"MOELORA_DIGESTS": str(self.out), "MALLOC_PERTURB_": PERTURB}
        self.process = subprocess.Popen(
            [*command, "-c", ROOT / "pyproject.toml", *words],
            env=os.environ | {"PYTHONPATH": places} | variables,
            cwd=folder,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait(self):
        """{test: its line of the recorder}."""
        said = self.process.communicate()[0].splitlines()
        print(f"{self.name}: {said[-1] if said else 'no output'}", flush=True)
        lines = (line for path in self.out.glob("*.jsonl") for line in path.open())
        return {row["test"]: row for row in map(json.loads, lines)}


def words_of(words):
    """Pytest's words, with the places of tests in this checkout."""
    places = [word for word in words if (ROOT / word.partition("::")[0]).exists()]
    others = [word for word in words if word not in places]
    return [*(ROOT / place for place in places or TESTS), *others]


def difference(one, two):
    """What differs between two runs of a test, in words; "" if nothing does."""
    if not two["passed"]:
        return "it fails"
    for number, (a, b) in enumerate(zip(one["calls"], two["calls"], strict=False)):
        if a[0] != b[0]:
            return f"call {number}: {a[0]}, {b[0]}"
        if a != b:
            other = [str(i) for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y]
            return f"call {number}: {a[0]}, tensors {', '.join(other)}"
    counts = len(one["calls"]), len(two["calls"])
    return "" if counts[0] == counts[1] else f"{counts[0]} calls, then {counts[1]}"


def compare(names, one, two):
    """Print what differs; true if the builds agree, on something."""
    counts, same = collections.Counter(), []
    for test, row in one.items():
        if not row["passed"]:
            counts["new" if two.get(test, row)["passed"] else "passed by neither"] += 1
        elif why := difference(row, two[test]) if test in two else "it makes no calls":
            counts["tests differ"] += 1
            print(f"{names[1]} differs: {test}: {why}")
        else:
            same.append(len(row["calls"]))
    more = "".join(f", {n} {what}" for what, n in counts.items())
    print(f"{names[1]}: {sum(same)} calls in {len(same)} tests as {names[0]}{more}")
    return bool(same) and not counts["tests differ"]


def main(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    help = "NAME=MODULE or NAME=DIR[,VARIABLE=VALUE...]"
    parser.add_argument("builds", nargs="+", help=help)
    split = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:split])
    names = [text.partition("=")[0] for text in args.builds]
    if len(set(names)) < max(2, len(names)):
        parser.error("wanted two builds or more, of different names")
    with tempfile.TemporaryDirectory() as folder:
        words = words_of(argv[split + 1 :])
        found = [test.wait() for test in [Tests(text, folder, words) for text in args.builds]]
    first, *others = zip(names, found, strict=True)
    agree = [compare((first[0], name), first[1], rows) for name, rows in others]
    return 0 if all(agree) else 1
