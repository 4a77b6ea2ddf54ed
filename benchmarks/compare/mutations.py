"""Do the tests of two checkouts catch the same one-line faults?

    python -m benchmarks.compare mutations before=../before after=. --faults 50 --out faults.json

A checkout is a folder with a module built for CPUs. Its tests run once, and the lines that each of
them runs are recorded, of C by gcc's trace-pc. A fault changes a line that both checkouts have once
and that a test of the first one runs. In each checkout, tests that run the line then follow until
one fails: as many as took --seconds of the CPU, then all parameters of their functions and, for a
fault in C, the C programs, within three times --seconds. Sources are restored at the end. The same
command goes on with the faults of --out.
"""

import argparse
import collections
import ctypes
import gc
import itertools
import json
import os
import pathlib
import random
import re
import resource
import shlex
import shutil
import subprocess
import sys
import threading
import time
import types

import pytest
import torch  # noqa: F401  (once for all processes of tests, which are forked)

from benchmarks.compare.processes import MODULE

FILES = {".py": ["moelora/**/*.py"], ".c": [f"csrc/{d}/*.[ch]" for d in ("core", "cpu", "glue")]}
PROGRAMS = "tests/c/test_c_api.py::test_program"  # no lines are recorded in their processes
MOST = 40  # tests that run before their functions do with all parameters
TRACE = """unsigned char moelora_ran[1 << 22];
void __sanitizer_cov_trace_pc(void) {
  moelora_ran[(unsigned long)__builtin_return_address(0) % sizeof moelora_ran] = 1;
}
"""
SWAPS = "< <=,> >=,== !=,+ -,+= -=,&& ||,and or,min max,fminf fmaxf,True False,true false,is is not"
SWAPS = dict(pair.split(" ", 1) for pair in SWAPS.split(","))
SWAPS |= {b: a for a, b in SWAPS.items()} | {"not": "", "continue": "break"}
TOKEN = r"->|\+\+|--|<<|>>|[-<>=!+*/%&|^]=|&&|\|\||is not|[A-Za-z_]\w*|\b\d+(?![\w.])|[-+<>]"
LEFT_OUT = r"""["'#@]|//|/\*|^\*|\b(raise|assert|import|strict|\w*({})\w*)\b"""
LEFT_OUT = LEFT_OUT.format("warn|log|print|fail|error|prefetch")
CODE = {".py": r".*", ".c": r".*[;{]"}  # other lines of C may belong to a comment
REWRITES = {
    ".py": [(r"((?:el)?if )(.+):", r"\1not (\2):"), (r"[\w.]+\(.*\)", "pass")],
    ".c": [(r"((?:\} else )?if )(\(.+\)) \{", r"\1(!\2) {"), (r"[\w.>-]+\(.*\);", ";")],
}


class Recorder:
    """A plugin of pytest that records seconds of the CPU, and which tests run a line: of each
    function two."""

    def __init__(self, tree, trace):
        self.tree, self.seconds, self.failed = tree, {}, set()
        self.tests, self.function = collections.defaultdict(list), ""
        library = ctypes.CDLL(trace, ctypes.RTLD_GLOBAL)
        self.pcs = (ctypes.c_char * (1 << 22)).in_dll(library, "moelora_ran")

    def call(self, frame, event, arg):
        return self.line if frame.f_code.co_filename.startswith(self.tree.package) else None

    def line(self, frame, event, arg):
        self.ran.add((frame.f_code.co_filename, frame.f_lineno))
        return self.line

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item):
        if self.function != (function := item.nodeid.partition("[")[0]):
            self.function, self.count = function, collections.Counter()
        self.ran = set()
        ctypes.memset(self.pcs, 0, len(self.pcs))
        threading.settrace(self.call)
        sys.settrace(self.call)
        began = time.process_time()
        yield
        self.seconds[item.nodeid] = time.process_time() - began
        sys.settrace(None)
        threading.settrace(None)
        self.ran |= {match.start() for match in re.finditer(rb"[^\0]", self.pcs.raw)}
        self.count.update(self.ran)
        for place in self.ran:
            if self.count[place] <= 2:
                self.tests[place].append(item.nodeid)

    def pytest_runtest_logreport(self, report):
        self.failed |= set() if report.passed else {report.nodeid}

    def pytest_sessionfinish(self):
        maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
        bases = (line.partition("-")[0] for line in maps if line.endswith(str(self.tree.module)))
        base = min(int(text, 16) for text in bases)
        pcs = [place for place in self.tests if isinstance(place, int)]
        asked = "\n".join(hex((pc - base) % len(self.pcs) - 1) for pc in pcs)
        command = ["addr2line", "-a", "-i", "-e", self.tree.module]
        said = subprocess.run(command, input=asked, capture_output=True, text=True, check=True)
        for pc, frames in zip(pcs, re.split(r"(?m)^0x.*\n", said.stdout)[1:], strict=True):
            tests = self.tests.pop(pc)
            for name, line in re.findall(r"(?m)(csrc/\S+):(\d+)", frames):
                self.tests[f"{self.tree.root}/{os.path.normpath(name)}", int(line)] += tests
        seconds = {test: s for test, s in self.seconds.items() if test not in self.failed}
        numbers = {test: number for number, test in enumerate(seconds)}
        lines = {}
        for (name, line), tests in self.tests.items():
            place = f"{os.path.relpath(name, self.tree.root)}:{line}"
            lines[place] = sorted({*map(numbers.get, tests)} - {None})
        self.tree.recorded.write_text(json.dumps({"seconds": seconds, "lines": lines}))


class Runner:
    """A plugin of pytest that runs tests with one fault after the other, in forked processes."""

    def __init__(self, tree, cases, seconds, write):
        self.tree, self.cases, self.limit, self.write = tree, cases, seconds, write
        self.state, self.failed = tree.work / "state", ""

    def pytest_runtest_logreport(self, report):
        self.failed = self.failed or (report.nodeid if report.failed else "")

    def pytest_runtestloop(self, session):
        items = {item.nodeid: item for item in session.items}
        for case in self.cases:
            tests = self.tree.tests_of(case)
            functions = {test.partition("[")[0] for test in tests}
            tests = [test for test in tests if test in items]
            total = itertools.accumulate(map(self.tree.seconds.get, tests))
            first = tests[: sum(t <= self.limit for t in total) + 1]
            more = [i for i in items if i.partition("[")[0] in functions]
            more += [i for i in items if case["ending"] == ".c" and i.startswith(PROGRAMS)]
            chosen = list(dict.fromkeys(first + more))
            self.state.write_text('[0, ""]')
            source = self.tree.once[case["ending"]][case["line"]][0]
            text = source.read_text()
            if (child := os.fork()) == 0:
                resource.setrlimit(resource.RLIMIT_CPU, (10 + 3 * self.limit,) * 2)
                with open(os.devnull, "w") as null:
                    os.dup2(null.fileno(), 1)
                applied = case["ending"] == ".c" or replace_functions(self.tree, case)
                for number, test in enumerate(chosen if applied else (), 1):
                    session.config.hook.pytest_runtest_protocol(item=items[test], nextitem=None)
                    self.state.write_text(json.dumps([number, self.failed]))
                    if self.failed:
                        break
                os._exit(0 if applied else 9)
            status = os.waitpid(child, 0)[1]
            source.write_text(text)
            ran, failed = json.loads(self.state.read_text())
            caught = failed or (status and ran < len(first))  # or crashed, or took too long
            outcome = "caught" if caught else "survived"
            outcome = "not applied" if os.waitstatus_to_exitcode(status) == 9 else outcome
            self.write(case, outcome=outcome, ran=ran, of=len(chosen), failed=failed)
        return True


class Tree:
    """A checkout, its lines that occur once, and the tests that run each of them."""

    def __init__(self, text, args):
        self.name, _, path = text.partition("=")
        self.root, self.work = pathlib.Path(path).resolve(), args.out.resolve().with_suffix(".work")
        self.package, self.module = f"{self.root}/moelora/", self.root / "moelora" / MODULE
        self.work.mkdir(parents=True, exist_ok=True)
        self.words, self.recorded = shlex.split(args.tests), self.work / f"{self.name}.json"
        if not self.recorded.exists():
            trace = f"{self.work}/trace.so"
            command = [os.environ.get("CC", "cc"), *"-O2 -shared -fPIC -xc - -o".split(), trace]
            subprocess.run(command, input=TRACE.encode(), check=True)
            self.build("-g -fsanitize-coverage=trace-pc")
            self.pytest(self.words, lambda: Recorder(self, trace))
            self.build()
        recorded = json.loads(self.recorded.read_text())
        self.seconds, self.tests = recorded["seconds"], recorded["lines"]
        self.once = {}
        for ending, patterns in FILES.items():
            places = collections.defaultdict(list)
            for source in sorted(p for pattern in patterns for p in self.root.glob(pattern)):
                for number, line in enumerate(source.read_text().splitlines(), 1):
                    places[line.strip()].append((source, number))
            self.once[ending] = {line: at[0] for line, at in places.items() if len(at) == 1}

    def build(self, flags=""):
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        env = os.environ | {"CFLAGS": flags, "MOELORA_CUDA": "0"}
        return subprocess.run(command, cwd=self.root, env=env, capture_output=True).returncode == 0

    def pytest(self, words, plugin):
        """Run pytest in a process of its own, which imports the package of this tree."""
        if (child := os.fork()) == 0:
            log = os.open(self.work / f"{self.name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.chdir(self.root)
            os.environ["PYTHONPATH"] = f"{self.root}:{os.environ.get('PYTHONPATH', '')}"
            sys.path.insert(0, str(self.root))
            for name in [n for n in sys.modules if n.startswith(("benchmarks", "moelora"))]:
                del sys.modules[name]
            more = ["-q", "-p", "no:cacheprovider", "--tb=no", "-m", "not gpu"]
            os._exit(pytest.main([*more, *words], [plugin()]))
        os.waitpid(child, 0)

    def tests_of(self, case):
        """Tests that run a line, or up to two lines above it, all functions in turn."""
        source, number = self.once[case["ending"]][case["line"]]
        keys = (f"{source.relative_to(self.root)}:{number - up}" for up in range(3))
        ids = next(filter(None, map(self.tests.get, keys)), [])
        names, turns = list(self.seconds), []
        functions = collections.Counter()
        for test in sorted((names[i] for i in ids), key=self.seconds.get):
            functions[test.partition("[")[0]] += 1
            turns.append((functions[test.partition("[")[0]], self.seconds[test], test))
        return [test for _, _, test in sorted(turns)[:MOST]]

    def outcomes(self, out, batch, seconds):
        """Run the tests with faults, all of Python or one of C, and restore the sources."""
        cases = load(out)
        left = [cases[i] for i in batch if self.name not in cases[i]]
        sources = {self.once[case["ending"]][case["line"]][0] for case in left}
        sources = {source: source.read_text() for source in sources}
        words, kept = self.words, shutil.copy2(self.module, self.work / MODULE)
        console = os.fdopen(os.dup(1), "w")  # processes of tests write to a log instead

        def write(case, **result):
            case[self.name] = result
            save(out, cases)
            print(self.name, result["outcome"], case["fault"], file=console, flush=True)

        try:
            if left and left[0]["ending"] == ".c":
                apply(self, left[0])
                if not self.build():
                    return write(left[0], outcome="not built")
                tests = self.tests_of(left[0]) + [t for t in self.seconds if t.startswith(PROGRAMS)]
                words = sorted({test.partition("[")[0] for test in tests})
            if left:
                self.pytest(words, lambda: Runner(self, left, seconds, write))
        finally:
            for source, text in sources.items():
                source.write_text(text)
            os.replace(shutil.copy2(kept, f"{self.module}.new"), self.module)


def checkout(text):
    """NAME=DIR, refused unless the folder has a module."""
    name, _, path = text.partition("=")
    if not name or not path or not (pathlib.Path(path) / "moelora" / MODULE).is_file():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NAME=DIR of a checkout with a moelora/{MODULE}: build it there with "
            "MOELORA_CUDA=0 python setup.py build_ext --inplace"
        )
    return text


def load(out):
    return json.loads(out.read_text())["cases"]


def save(out, cases):
    meta = {"command": f"python {shlex.join(sys.orig_argv[1:])}"}
    out.write_text(json.dumps({"meta": meta, "cases": cases}, indent=1))


def apply(tree, case):
    """Change a source; returns its path and the texts before and after."""
    source, number = tree.once[case["ending"]][case["line"]]
    text = source.read_text()
    lines = text.splitlines(keepends=True)
    lines[number - 1] = lines[number - 1].replace(case["line"], case["fault"])
    source.write_text("".join(lines))
    return source, text, "".join(lines)


def replace_functions(tree, case):
    """Apply a fault to functions that exist already; False if it is in none of them."""
    source, *texts = apply(tree, case)
    before, after = ([compile(text, str(source), "exec")] for text in texts)
    for codes in (before, after):
        for code in codes:  # which grow
            codes += (value for value in code.co_consts if isinstance(value, types.CodeType))
    pairs = zip(before[1:], after[1:], strict=True)
    pairs = {old: new for old, new in pairs if old != new}
    gc.unfreeze()
    for value in gc.get_objects():
        if type(value) is types.FunctionType and value.__code__ in pairs:
            value.__code__ = pairs[value.__code__]
    return bool(pairs)


def faults_of(line, ending):
    if re.search(LEFT_OUT, line) or not re.fullmatch(CODE[ending], line):
        return
    for pattern, other in REWRITES[ending]:
        if re.fullmatch(pattern, line):
            yield re.sub(pattern, other, line)
    for token in re.finditer(TOKEN, line):
        new = str(int(token[0]) + 1) if token[0].isdigit() else SWAPS.get(token[0])
        if new is not None:
            yield line[: token.start()] + new + line[token.end() :]


def draw(trees, ending, seed):
    """Faults in lines that all trees have once and that tests of the first one run."""
    rng, common = random.Random(seed), set.intersection(*(set(t.once[ending]) for t in trees))
    for line in rng.sample(sorted(common), len(common)):
        faults = sorted(set(faults_of(line, ending)))
        case = {"ending": ending, "line": line}
        if faults and trees[0].tests_of(case):
            yield case | {"fault": rng.choice(faults)}


def main(argv=None):
    parser = argparse.ArgumentParser(prog="benchmarks.compare mutations", description=__doc__)
    parser.add_argument("checkouts", nargs="+", type=checkout, metavar="NAME=DIR")
    parser.add_argument("--faults", type=int, default=50, help="in each of both languages")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--tests", default="tests", help="pytest's words, default: %(default)s")
    parser.add_argument("--out", type=pathlib.Path, default="mutations.json")
    args = parser.parse_args(argv)
    trees = [Tree(text, args) for text in args.checkouts]
    if not args.out.exists():
        cases = (itertools.islice(draw(trees, end, args.seed), args.faults) for end in FILES)
        save(args.out, list(itertools.chain(*cases)))
    python = [i for i, case in enumerate(load(args.out)) if case["ending"] == ".py"]
    for batch in [python, *([i] for i in range(len(python), len(load(args.out))))]:
        for tree in trees:
            tree.outcomes(args.out, batch, args.seconds)
    for tree in trees:
        counts = collections.Counter(case[tree.name]["outcome"] for case in load(args.out))
        print(tree.name, *(f"{outcome}: {count}" for outcome, count in counts.items()))


if __name__ == "__main__":
    sys.exit(main())
