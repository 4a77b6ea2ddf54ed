"""vLLM on several GPUs, with moelora and without: answers and bits.

    python -m benchmarks.vllm_parallel --gpus 2 --at-once 11 --out ...-answers-parallel-2.json

As `benchmarks.vllm_e2e`, on GPUs of one host that share each layer's experts (tensor parallel, with
adapters sharded or not) or have whole ones each (expert parallel), also where each GPU has requests
of its own (data parallel), and its slots filled in another order. Answers are held against
transformers in float32 with merged adapters, those in a mixed batch against those of each adapter
alone; rows of MoE layers of data-parallel ranks likewise, bit for bit. With `--at-once` so many
engines share the GPUs, with the references of those that have ended. They capture graphs of decode,
and do not compile the model.
"""

import json
import sys

from benchmarks import vllm_e2e
from benchmarks.engines import jobs
from benchmarks.engines.answers import judge

DATA = "data and expert"
BITS = ", eager"  # the run whose rows are compared
WAYS = {  # options of vLLM's LLM beside the number of GPUs
    "tensor": {},
    "expert": {"enable_expert_parallel": True},
    "fully sharded": {"fully_sharded_loras": True},
    DATA: {"enable_expert_parallel": True},
}
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
GRAPHS["cudagraph_capture_sizes"] = [1, 2, 4, 8, 16, 32, 64]


class Bench(vllm_e2e.Bench):
    def compared(self, checks):
        pairs = ((f"moelora {way}", f"vllm {way}") for way in WAYS)
        return [row for pair in pairs for row in judge(self.said, *pair)]

    def tolerance(self, run):
        """vLLM's data-parallel ranks number slots by themselves, so that its requests may get each
        other's adapters: their distance is just reported."""
        return float("inf") if run.startswith(f"vllm {DATA}") else super().tolerance(run)


def engines(gpus, many):
    """{name: options of `engines/vllm_engine.py`}."""
    memory = {"kv_cache_memory_bytes": 2 << 30, "gpu_memory_utilization": 0.1} if many > 1 else {}
    runs = {}
    for way, options in WAYS.items():
        ranks = ("--data-parallel", gpus) if way == DATA else ()
        eager = memory | options | ({} if ranks else {"tensor_parallel_size": gpus})
        llm = json.dumps(eager | {"compilation_config": GRAPHS})
        for name in (f"moelora {way}", f"vllm {way}"):
            runs[name] = (*ranks, "--llm", llm)
            if ranks:
                runs[name + BITS] = (*ranks, "--bits", "--llm", json.dumps(eager))
    return runs


def main(argv=None):
    p = vllm_e2e.arguments(__doc__)
    p.add_argument("--gpus", type=int, default=2)
    p.add_argument("--at-once", type=int, default=1, help="engines (default: %(default)s)")
    p.add_argument("--only", choices=("answers",), help=jobs.UNUSED)
    bench = Bench(p.parse_args(argv))
    if model := bench.model():
        many, held = bench.args.at_once, lambda name: not name.endswith(BITS)
        bench.run(engines(bench.args.gpus, many), model, many, held)
    return bench.report()


if __name__ == "__main__":
    sys.exit(main())
