"""vLLM on several GPUs, with moelora and without: answers and bits.

    python -m benchmarks.vllm_parallel --gpus 2 --at-once 11 --out ...-answers-parallel-2.json

As `benchmarks.vllm_e2e`, on GPUs of one host that share each layer's experts (tensor parallel, with
adapters sharded or not) or have whole ones each (expert parallel), also where each GPU has requests
of its own (data parallel), and its slots filled in another order. Answers of every engine are
compared with those of moelora on one GPU, and with transformers in float32 with merged adapters;
rows of MoE layers of data-parallel ranks in a mixed batch with those of each request alone, bit for
bit. With `--at-once` so many engines share the GPUs, with the references of those that have ended.
They capture graphs of decode, and do not compile the model.
"""

import argparse
import sys

from benchmarks.engines.answers import SAME, WORSE, compare_batches, compare_engines, judge
from benchmarks.engines.jobs import REFERENCE, as_ended
from benchmarks.vllm_e2e import Bench, arguments, parse

SINGLE = "moelora single"
TENSOR, DATA = "--tensor-parallel", "--data-parallel"
WAYS = {
    "tensor": (TENSOR,),
    "expert": (TENSOR, "--expert-parallel"),
    "fully sharded": (TENSOR, "--fully-sharded"),
    "data and expert": (DATA, "--expert-parallel"),
}
BITS = ", eager"  # the run whose rows are compared


class Parallel(Bench):
    def rows(self):
        rows = []
        for way in WAYS:
            rows += judge(self.said, f"moelora {way}", f"vllm {way}")
        return rows + answers(self.replies())

    def answers(self):
        model = self.model("tiny", dense=True)
        if model is None:
            return
        runs = [(SINGLE, (), {"CUDA_VISIBLE_DEVICES": "0"})]
        for way in self.args.ways:
            by, *flags = WAYS[way]
            for engine in ("moelora", "vllm"):
                runs.append((f"{engine} {way}", (by, self.args.gpus, *flags), {}))
                if by == DATA:
                    name, words, _ = runs[-1]
                    runs.append((f"{name}{BITS}", (*words, "--bits"), {}))
        many, more = self.args.at_once, ["--graphs"]
        more += ["--gib", 2] if many > 1 else []
        for first in range(0, len(runs), many):
            jobs = {
                name: self.started(name, model, *words, *more, **environment)
                for name, words, environment in runs[first : first + many]
            }
            for name, job in as_ended(jobs):
                if name.startswith(REFERENCE):
                    self.held(name.removeprefix(REFERENCE), job)
                    continue
                self.ended(name, job)
                if name.endswith(BITS):
                    self.bits(name)
                else:
                    jobs[REFERENCE + name] = self.reference(name, model, reported=mixes(name))


def mixes(name):
    """Whether requests of an engine may get each other's adapters: vLLM's data-parallel ranks
    number slots by themselves."""
    return name.startswith("vllm") and DATA in WAYS[name[5:].removesuffix(BITS)]


def answers(checks):
    """Every engine's mixed batch against uniform ones, and both against one GPU's.

    One GPU and several round differently. vLLM's own engines, which differ from moelora's on one
    GPU by nothing but rounding, say how much that is in the model: their rows are just reported.
    Those that mix adapters up say nothing of rounding.
    """
    rows, same = [], SAME
    for name in sorted(checks.keys() - {SINGLE}, reverse=True):  # vLLM's first
        made = compare_batches(name, checks[name])
        compared = compare_engines(name, SINGLE, checks, same)
        if name.startswith("vllm"):
            if not mixes(name):
                same = max([same, *(WORSE * row["prompt_median"] for row in compared)])
            made, compared = ([row | {"ok": True} for row in some] for some in (made, compared))
        rows += made + compared
    return rows


def main(argv=None):
    p = arguments(__doc__)
    p.add_argument("--gpus", type=int, default=2)
    p.add_argument("--at-once", type=int, default=1, help="engines (default: %(default)s)")
    p.add_argument("--only", choices=("answers",), help=argparse.SUPPRESS)  # of commands of files
    p.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    bench = Parallel(parse(p, argv))
    bench.answers()
    return bench.report()


if __name__ == "__main__":
    sys.exit(main())
