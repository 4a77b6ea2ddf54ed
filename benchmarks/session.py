"""All that a GPU has to say of this tree, the most wanted first, each part with a deadline.

    python -m benchmarks.session --out /tmp/session --before /tmp/before/_C.abi3.so
    python -m benchmarks.session --out /tmp/session --only tests,formats --budget-s 600
    python -m benchmarks.session --list

For a GPU that is there for an hour: a part that fails or hangs costs its own deadline and no other
part. Result files have the names of benchmarks/results/, everything else goes to NAME.log. --before
is a module of an earlier commit, --peers the folder of vLLM's kernels and engine; what needs one of
these is left out without it. The exit status is 1 where a part failed.
"""

import argparse
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time

import moelora

HERE = pathlib.Path(moelora.__file__).parent / "_C.abi3.so"
FP8 = "qwen3@fp8_block,mixtral@fp8_block"
FOUR_BITS = "gpt-oss-20b@mxfp4,qwen3@int4,mixtral@int4"
BUILDS = "-m benchmarks.builds before={before} now={here} --ranks 0,16 --turns 5 --budget-ms 2.5"
E2E = "-m benchmarks.vllm_e2e --peers {peers}/vllm_e2e --own-kernels --layers 12 --lora-only"


@dataclasses.dataclass(frozen=True)
class Part:
    """Words for Python, which take up to `seconds`; {deadline} is a little before that."""

    name: str
    seconds: int
    words: str

    def needs(self, given: dict) -> list[str]:
        """What it names and nobody gave."""
        return [
            name for name, value in given.items() if value is None and f"{{{name}}}" in self.words
        ]

    def command(self, given: dict, seconds: float) -> list[str]:
        deadline = max(1, round(seconds) - 20)
        words = self.words.format(**given, deadline=deadline, quantized=f"{FOUR_BITS},{FP8}")
        return [sys.executable, *words.split()]


PARTS = (
    Part("info", 60, "-m moelora info"),
    Part("tests", 280, "-m pytest -v -rfE --tb=short -m gpu -n 15 --timeout=100 tests"),
    Part("variants", 150, "-m benchmarks.variants --models {quantized} --deadline-s {deadline}"
         " --out {out}/h200-variants.json"),
    Part("builds-fp8", 110, f"{BUILDS} --models {FP8} --tokens 16,64,256,1024,4096,16384"
         " --deadline-s {deadline} --out {out}/h200-builds-fp8.json"),
    Part("builds-four-bits", 110, f"{BUILDS} --models {FOUR_BITS} --tokens 1,4,16,64,256,1024,4096"
         " --deadline-s {deadline} --out {out}/h200-builds-four-bits.json"),
    Part("formats", 330, "-m benchmarks.formats --peers {peers}/vllm_quant --budget-ms 6"
         " --deadline-s {deadline} --out {out}/h200-formats.json"),
    Part("invariance", 300, "-m benchmarks.invariance --deadline-s 200"
         " --out {out}/h200-invariance.json"),
    Part("digests", 120, "-m benchmarks.digests before={before} now={here} --device cuda"
         " --budget {deadline}"),
    Part("builds", 110, f"{BUILDS} --models qwen3,mixtral --tokens 1,4,16,64,256,1024,4096"
         " --deadline-s {deadline} --out {out}/h200-builds.json"),
    Part("layer", 130, "-m benchmarks.layer --baselines base,default --budget-ms 7"
         " --deadline-s {deadline} --out {out}/h200-layer.json"),
    Part("delta", 130, "-m benchmarks.delta --budget-ms 4 --deadline-s {deadline}"
         " --out {out}/h200-delta.json"),
    Part("align", 60, "-m benchmarks.align --deadline-s {deadline} --out {out}/h200-align.json"),
    Part("e2e-fp8", 300, f"{E2E} --format fp8 --budget-s 280"
         " --out {out}/h200-e2e-fp8.json"),
    Part("e2e-mxfp4", 300, f"{E2E} --format mxfp4 --budget-s 280"
         " --out {out}/h200-e2e-mxfp4.json"),
    Part("e2e-int4", 300, f"{E2E} --format int4 --budget-s 280"
         " --out {out}/h200-e2e-int4.json"),
    Part("e2e-sglang", 480, "-m benchmarks.sglang_e2e --only speed"
         " --budget-s 460 --out {out}/h200-e2e-sglang.json"),
    Part("e2e-invariance", 160, "-m benchmarks.vllm_e2e --peers {peers}/vllm_e2e"
         " --only invariance --budget-s 140 --out {out}/h200-e2e-invariance.json"),
    Part("sanitizers", 300, "tests/cuda/sanitize_gpu.py --tools memcheck,initcheck,synccheck"
         " --jobs 8 --log {out}/h200-sanitize.log"),
)  # fmt: skip


def run(part: Part, given: dict, seconds: float) -> str:
    """Runs a part for so long at most; how it ended, in a word or two."""
    log = pathlib.Path(given["out"], f"{part.name}.log")
    with log.open("w") as out:
        process = subprocess.Popen(
            part.command(given, seconds),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return "too long"
    return "done" if status == 0 else f"failed ({status})"


def main(argv=None, parts=PARTS) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="folder of result files and logs")
    parser.add_argument("--before", help="module of an earlier commit")
    parser.add_argument("--peers", help="folder with vllm_quant and vllm_e2e")
    parser.add_argument("--only", default="", help="parts whose names begin so, commas between")
    parser.add_argument("--budget-s", default=1e9, type=float, help="no part runs longer")
    parser.add_argument("--list", action="store_true", help="names, seconds, commands")
    args = parser.parse_args(argv)
    given = {"out": args.out, "before": args.before, "peers": args.peers, "here": str(HERE)}
    wanted = [part for part in parts if part.name.startswith(tuple(args.only.split(",")))]
    if args.list:
        for part in wanted:
            print(f"{part.name:18} {part.seconds:4} s   python {part.words}")
        return 0
    if not wanted or not args.out:
        parser.error(f"--only is {args.only!r}: no part's name begins so" if args.out else "--out?")
    pathlib.Path(args.out).mkdir(parents=True, exist_ok=True)
    end, failed = time.monotonic() + args.budget_s, False
    for part in wanted:
        started = time.monotonic()
        if missing := part.needs(given):
            said = f"left out: no --{', no --'.join(missing)}"
        elif started >= end:
            said = "left out: no time"
        else:
            said = run(part, given, min(part.seconds, end - started))
            failed = failed or said != "done"
        print(f"{part.name:18} {time.monotonic() - started:5.0f} s   {said}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
