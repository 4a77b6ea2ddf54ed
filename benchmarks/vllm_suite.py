"""vLLM's own tests of MoE LoRA, with moelora and without: the same results.

    python -m benchmarks.vllm_suite --tests vllm-0.33.0/tests --at-once 6 --out ...-vllm-suite.json

`--tests` is the folder of that name in vLLM's source distribution, beside which there is no vLLM:

    pip download --no-deps --no-binary vllm --no-build-isolation vllm==0.33.0

Tests of kernels and of the LoRA manager run as they are, on random numbers, twice: with moelora's
plugin off, and with it on and moelora's `fused_moe_lora` in place of vLLM's
(`engines/suite_plugin.py`). None that passes with it off may fail with it on, but for those in
`OTHERWISE`.

Tests of whole models compare texts of published models and adapters. Here the same architectures
run on models of random weights, in each format of weights: log-probabilities and greedy replies
with the plugin on and off are compared as in `benchmarks.vllm_e2e`. `NOT_RUN` says why others are
not run.
"""

import argparse
import os
import pathlib
import sys
from xml.etree import ElementTree

from benchmarks.engines.answers import SAME, SAME_FP8, compare_batches, compare_engines
from benchmarks.vllm_e2e import Bench, Run, arguments, parse
from moelora.integrations.vllm import SWITCH

FILES = (
    "lora/test_fused_moe_lora_kernel.py",
    "lora/test_punica_ops.py",
    "lora/test_lora_manager.py",
    "lora/test_lora_weights.py",
)
NAMES = "moe or Moe or early_exit"  # of the tests in them
OTHERWISE = {
    "rejects_bad_block_size_m": "blocks of any size are taken, which vLLM's kernel cannot",
}
NOT_RUN = {
    "lora/test_moe_lora_align_sum.py": "of an operator of vLLM that moelora leaves as it is",
    "lora/test_trtllm_mxfp4_lora_moe.py": "needs FlashInfer and a GPU of compute capability 10.0",
    "lora/test_moe_lora_ep_load.py": "a published adapter; loading is vLLM's in both cases",
    "lora/test_olmoe_tp.py": "published weights and texts; its architecture runs here: olmoe",
    "lora/test_qwen3moe_tp.py": "published weights and texts; its architecture runs here: bf16",
    "lora/test_gptoss_tp.py": "published weights and texts; its architecture runs here: mxfp4",
    "lora/test_mixtral.py": "published weights and texts; its architecture runs here: mixtral",
    "lora/test_deepseekv2_tp.py": "published weights and texts; attention with its own kernels",
    "lora/test_qwen36_moe_lora.py": "vLLM skips it itself: the model is too large",
}
FORMATS = ("fp8", "fp8_channel", "fp8_tensor", "int4", "gptq", "awq", "nvfp4", "mxfp4")
CASES = ("bf16", "olmoe", "mixtral", *FORMATS)


class Suite(Bench):
    # -- vLLM's tests --

    def tests(self):
        """Both runs of the tests at once: they need little of the GPU."""
        jobs, found = {which: self.pytest(which) for which in ("off", "on")}, {}
        for which, job in jobs.items():
            self.done(job)
            report = self.work / f"{which}.xml"
            found[which] = outcomes(report) if report.exists() else {}
        self.checks += compare_outcomes(**found)
        self.write()

    def pytest(self, which):
        tests = self.args.tests.resolve()
        plugins = ("-p", "benchmarks.engines.suite_plugin", "-p", "tests.lora.conftest")
        options = ("--noconftest", "-c", os.devnull, "-q", "--tb=short", "-k", NAMES)
        report = self.work / f"{which}.xml"
        words = ["-m", "pytest", *plugins, *options, f"--junitxml={report}"]
        files = [tests / file for file in FILES if (tests / file).exists()]
        return self.job(
            f"tests {which}",
            [*words, "--rootdir", tests, *files],
            self.args.tests_s,
            tests.parent,
            SUITE_EACH=str(self.args.each),
            **{SWITCH: "0" if which == "off" else "1"},
        )

    # -- whole models --

    def engines(self):
        runs = []
        for case in self.args.cases:
            format = case if case in FORMATS else None
            family = ["--family", case] if case in ("olmoe", "mixtral") else []
            model = self.model("tiny", *family, format=format, source="bf16" if format else case)
            for engine in ("vllm", "moelora") if model else ():
                flags = ("--lora", "--check")
                runs.append(Run(f"{engine} {case}", model, flags, engine == "moelora"))
        self.together(runs)

    def rows(self):
        rows = []
        for case in self.args.cases:
            names, checks = (f"moelora {case}", f"vllm {case}"), self.replies()
            same = SAME_FP8 if case.startswith("fp8") else SAME
            rows += compare_engines(*names, checks, same)
            rows += compare_batches(names[0], checks[names[0]]) if names[0] in checks else []
        return rows + [
            {"topic": "not run", "file": file, "why": why, "ok": True}
            for file, why in NOT_RUN.items()
        ]


def outcomes(report):
    """{test: (passed, failed, or skipped; seconds)} of a JUnit file."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        bad = kinds & {"failure", "error"}
        how = "failed" if bad else "skipped" if "skipped" in kinds else "passed"
        found[f"{case.get('classname')}::{case.get('name')}"] = how, float(case.get("time"))
    return found


def compare_outcomes(off, on):
    """A row for each file: it is ok if whatever passes with the plugin off passes with it on."""
    rows = []
    for file in sorted({name.partition("::")[0] for name in {*off, *on}}):
        row = {"topic": "tests", "file": file}
        for which, found in (("off", off), ("on", on)):
            mine = [one for name, one in found.items() if name.startswith(f"{file}::")]
            hows = [how for how, _ in mine]
            row |= {f"{how}_{which}": hows.count(how) for how in ("passed", "failed", "skipped")}
            row[f"seconds_{which}"] = round(sum(seconds for _, seconds in mine), 1)
        passing = [
            n for n, (how, _) in off.items() if how == "passed" and n.startswith(f"{file}::")
        ]
        worse = [name for name in passing if on.get(name, ("not run", 0))[0] != "passed"]
        row["otherwise"] = [name for name in worse if any(part in name for part in OTHERWISE)]
        row["worse"] = [name for name in worse if name not in row["otherwise"]]
        rows.append(row | {"ok": not row["worse"]})
    return rows or [{"topic": "tests", "file": "none", "ok": False}]


def main(argv=None):
    p = arguments(__doc__)
    p.add_argument("--reps", help=argparse.SUPPRESS)  # of commands of files
    p.add_argument("--tests", type=pathlib.Path, help="vLLM's tests; without it only models run")
    p.add_argument("--tests-s", type=float, default=150, help="deadline of each run of the tests")
    p.add_argument("--each", type=int, default=8, help="most parametrizations of each test")
    p.add_argument("--cases", nargs="*", choices=CASES, default=[*CASES], help="models that run")
    suite = Suite(parse(p, argv))
    if suite.args.tests:
        suite.tests()
    suite.engines()
    return suite.report()


if __name__ == "__main__":
    sys.exit(main())
