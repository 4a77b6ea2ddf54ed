"""A real SGLang server, with moelora and without: the same answers.

    python -m benchmarks.sglang_e2e --format modelopt --checked "sglang, marlin" --out ...
    python -m benchmarks.sglang_e2e --alone --out ...  # one server: mixed batches and each alone

Two servers with SGLang's defaults (CUDA graphs of prefill and decode, overlapped scheduling, radix
cache) on a model of random weights with four PEFT adapters of ranks 16 and 64
(`engines/sglang_engine.py`): SGLang with its own MoE LoRA, and with moelora, which it finds by its
entry point as after `pip install`. The model has four layers, for more of random weights make other
numbers of a rounding; transformers in float32 with merged adapters judges the answers. Needs SGLang
0.5.23 or later, one GPU and Python 3.11. The result file is written after each stage.
"""

import sys

from benchmarks.engines import jobs
from benchmarks.engines.sglang_engine import COMMON
from moelora.integrations.sglang import SWITCH

OWN_PATH, SERVED = "SGLang's own path runs", "runs MoE layers with LoRA"
V2, MARLIN = {"moelora, v2": "lora_triton"}, {"moelora, marlin": "lora_marlin"}
CHECKED = {  # servers whose answers are compared: --moe-runner-backend, moelora's server and its
    "sglang, v2": ("lora_triton", V2),
    "sglang, v2 cutedsl": ("lora_cutedsl", V2),  # needs nvidia-cutlass-dsl
    "sglang, marlin": ("lora_marlin", MARLIN),  # NVFP4 of ModelOpt: its only one
}


class Bench(jobs.Bench):
    """Runs servers of SGLang."""

    engine, switch, package = "benchmarks.engines.sglang_engine", SWITCH, "sglang"
    meta = {"server_options": " ".join(COMMON)}

    def served(self, run, log):
        return {"served": SERVED in log and OWN_PATH not in log}


def main(argv=None):
    p = jobs.arguments(__doc__, "/tmp/moelora-sglang", 240, ("fp8", "modelopt"))
    p.add_argument("--only", choices=("answers",), help=jobs.UNUSED)
    p.add_argument("--at-once", "--sequences", help=jobs.UNUSED)
    p.add_argument("--port", type=int, default=30211)
    p.add_argument("--alone", action="store_true", help="moelora's server, compared with itself")
    p.add_argument("--checked", choices=CHECKED, default="sglang, v2", help="whose answers")
    args = p.parse_args(argv)
    runner, ours = CHECKED[args.checked]
    runners = ours if args.alone else {args.checked: runner} | ours
    bench = Bench(args, *ours, args.checked)
    if model := bench.model():
        runs = {name: ("--port", args.port, "--runner", r) for name, r in runners.items()}
        bench.run(runs, model, held=lambda name: not args.alone)
    return bench.report()


if __name__ == "__main__":
    sys.exit(main())
