"""vLLM on several GPUs, with moelora and without: tokens per second, and answers.

    python -m benchmarks.vllm_parallel --gpus 2 --layers 12 --at-once 3 --out ...-parallel.json
    python -m benchmarks.vllm_parallel --gpus 4 --layers 12 --at-once 4 --out ...-parallel-4.json
    python -m benchmarks.vllm_parallel --gpus 4 --only answers --at-once 4 --out ...-answers.json

As `benchmarks.vllm_e2e`, on GPUs of one host that share each layer's experts (tensor parallel, with
adapters sharded or not) or have whole ones each (expert parallel), also where each GPU has requests
of its own (data parallel), by vLLM's own exchange over NCCL. Answers of every engine are compared
with those of moelora on one GPU. They say most of few layers (--layers 4): in twelve layers of
random weights rounding alone moves log-probabilities by 0.2 to 0.5, also vLLM's own from a mixed
batch to a uniform one. With --only answers, engines of a small model are also held against
transformers in float32 with merged adapters.
"""

import sys

from benchmarks.engines.answers import SAME, WORSE, compare_batches, compare_engines, judge
from benchmarks.vllm_e2e import Bench, Run, arguments, describe, parse, speeds

SINGLE = "moelora single"
TENSOR, DATA = "--tensor-parallel", "--data-parallel"
WAYS = {
    "tensor": (TENSOR,),
    "expert": (TENSOR, "--expert-parallel"),
    "fully sharded": (TENSOR, "--fully-sharded"),
    "data and expert": (DATA, "--expert-parallel"),
}


class Parallel(Bench):
    def rows(self):
        rows = sorted(speeds(self.runs), key=lambda row: [*WAYS].index(row["parallel"]))
        for way in WAYS:
            rows += judge(self.said, f"moelora {way}", f"vllm {way}")
        return rows + answers(self.replies())

    def answers(self):
        if model := self.model("tiny", dense=True):
            runs = [single(model)]
            for way in self.args.ways:
                by, *flags = WAYS[way]
                words = ("--lora", "--check", by, self.args.gpus, *flags)
                for engine in ("moelora", "vllm"):
                    runs.append(Run(f"{engine} {way}", model, words, engine == "moelora"))
            self.together(runs)
            self.hold([run.name for run in runs], model)

    def speed(self):
        model = self.timed_model()
        if model is None:
            return
        check = () if self.args.only == "speed" else ("--check",)
        runs = [single(model)] if check else []
        for way in self.args.ways:
            by, *flags = WAYS[way]
            flags = (by, self.args.gpus, *flags)
            how = {"parallel": way, "gpus": self.args.gpus}
            for engine in ("vllm", "moelora"):
                runs.append(self.timed(engine, model, True, *check, *flags, **how))
            if way == "tensor" and not self.args.lora_only:
                runs.append(self.timed("vllm", model, False, *flags, **how))
        self.together(runs)


def single(model):
    """moelora on one GPU, which the others are compared with."""
    alone = {"CUDA_VISIBLE_DEVICES": "0"}
    return Run(SINGLE, model, ("--lora", "--check"), environment=alone)


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
    p.add_argument("--only", choices=("speed", "answers"), help="leave the other out")
    p.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    p.add_argument("--lora-only", action="store_true", help="time no engines without LoRA")
    bench = Parallel(parse(p, argv))
    (bench.answers if bench.args.only == "answers" else bench.speed)()
    return bench.report(lambda row: f"{row['parallel']:14} {describe(row)}")


if __name__ == "__main__":
    sys.exit(main())
