"""vLLM on several GPUs, with moelora and without: answers.

    python -m benchmarks.vllm_parallel --gpus 4 --out ...-answers-parallel-4.json

As `benchmarks.vllm_e2e`, on GPUs of one host that share each layer's experts (tensor parallel, with
adapters sharded or not) or have whole ones each (expert parallel). Answers of every engine are
compared with those of moelora on one GPU, and with transformers in float32 with merged adapters.
"""

import argparse
import sys

from benchmarks.engines.answers import SAME, WORSE, compare_batches, compare_engines, judge
from benchmarks.vllm_e2e import Bench, arguments, parse

SINGLE = "moelora single"
WAYS = {
    "tensor": (),
    "expert": ("--expert-parallel",),
    "fully sharded": ("--fully-sharded",),
}


class Parallel(Bench):
    def rows(self):
        rows = []
        for way in WAYS:
            rows += judge(self.said, f"moelora {way}", f"vllm {way}")
        return rows + answers(self.replies())

    def answers(self):
        if model := self.model("tiny", dense=True):
            self.engine(SINGLE, model, CUDA_VISIBLE_DEVICES="0")
            names = [f"{engine} {way}" for way in self.args.ways for engine in ("moelora", "vllm")]
            for name in names:
                flags = WAYS[name.partition(" ")[2]]
                self.engine(name, model, "--tensor-parallel", self.args.gpus, *flags)
            self.hold([SINGLE, *names], model)


def answers(checks):
    """Every engine's mixed batch against uniform ones, and both against one GPU's.

    One GPU and several round differently. vLLM's own engines, which differ from moelora's on one
    GPU by nothing but rounding, say how much that is in the model: their rows are just reported.
    """
    rows, same = [], SAME
    for name in sorted(checks.keys() - {SINGLE}, reverse=True):  # vLLM's first
        made = compare_batches(name, checks[name])
        compared = compare_engines(name, SINGLE, checks, same)
        if name.startswith("vllm"):
            same = max([same, *(WORSE * row["prompt_median"] for row in compared)])
            made, compared = ([row | {"ok": True} for row in some] for some in (made, compared))
        rows += made + compared
    return rows


def main(argv=None):
    p = arguments(__doc__)
    p.add_argument("--gpus", type=int, default=2)
    for option in ("--only", "--at-once"):  # of commands of files: answers, of one at a time
        p.add_argument(option, help=argparse.SUPPRESS)
    p.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    bench = Parallel(parse(p, argv))
    bench.answers()
    return bench.report()


if __name__ == "__main__":
    sys.exit(main())
