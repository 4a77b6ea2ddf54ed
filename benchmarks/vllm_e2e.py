"""vLLM end to end, with moelora and without: the same answers and bits.

    python -m benchmarks.vllm_e2e --only answers --out ...-e2e-answers.json
    python -m benchmarks.vllm_e2e --only invariance --out ...-e2e-invariance.json
    python -m benchmarks.vllm_e2e --only sampler --format fp8 --out ...-e2e-sampler-fp8.json

One engine of vLLM after the other, each in its own process (`engines/vllm_engine.py`), on models of
random weights with four PEFT adapters of ranks 16 and 64. moelora is found by its entry point, as
after `pip install`. `--format` quantizes experts (`engines/vllm_quantize.py`; `mxfp4` is a
gpt-oss). Needs vLLM, one GPU and Python 3.11. The result file is written after each stage.

answers     the model is compiled and graphs are captured as vLLM does by default; adapters change
            attention, too; judged by transformers in float32 with merged adapters
invariance  rows of the MoE layers of both engines in a mixed batch beside those of each request
            alone, bit for bit (`engines/vllm_bits.py`), and again under VLLM_BATCH_INVARIANT
sampler     a trainer (`engines/trainer.py`: transformers with moelora, and tenants) on the folder
            that the engine serves: it repeats the rows of the engine's MoE layers, of which no
            element may differ, and log-probabilities of prompts are compared, beside those of the
            usual pair, a trainer in bfloat16 and vLLM's own engine
"""

import sys

from benchmarks.engines import jobs
from benchmarks.engines.vllm_quantize import FORMATS
from moelora.integrations.vllm import OWN_PATH, SWITCH

OURS = ("TritonExpertsWithLoRA", "QuantizedExpertsWithLoRA")


class Bench(jobs.Bench):
    """Runs engines of vLLM."""

    engine, switch, package = "benchmarks.engines.vllm_engine", SWITCH, "vllm"

    def served(self, run, log):
        """Who runs the MoE layers, and the slots of adapters where ranks have different ones."""
        layers = ", ".join(sorted(set(run["layers"])))
        row = {"experts": layers, "served": layers in OURS and OWN_PATH not in log}
        return row | ({"slots": run["slots"]} if len(set(map(tuple, run["slots"]))) > 1 else {})

    def answers(self):
        if model := self.model(attention=True):
            self.run({"moelora": (), "vllm": ()}, model)

    def invariance(self):
        if model := self.model(dense=False):
            runs = {}
            for flag, name in (("0", ""), ("1", " invariant")):
                words = "--bits", {"VLLM_BATCH_INVARIANT": flag}
                runs |= {f"moelora{name}": words, f"vllm{name}": words}
            self.run(runs, model, held=lambda name: False)

    def sampler(self):
        model, rows = self.model(dense=False), ("--rows", self.work / "rows.pt")
        if model is None:
            return
        self.run({"moelora": rows, "vllm": ()}, model, held=lambda name: False)
        plain = model.removesuffix(f"-{self.args.format}")
        for kind, run, folder, pair, flags in (
            ("trainer", "moelora", model, "moelora, moelora", rows),
            ("usual", "vllm", plain, "bfloat16 trainer, vllm", ()),
        ):
            self.done(self.trainer(kind, run, folder, 90, *flags))
            found = self.found(f"{kind} of {run}")
            if flags:
                bits = found.get("bits", {"differing": None})
                row = {"topic": "sampler", "run": "trainer, engine"} | bits
                self.checks.append(row | {"ok": bits["differing"] == 0})
            for who, gap in found.get("gap", {}).items():
                gap = {name: round(gap[name], 5) for name in ("mean", "median", "most")}
                row = {"topic": "gap", "pair": pair, "who": who}
                self.checks.append(row | gap | {"ok": True})


def arguments(doc):
    return jobs.arguments(doc, "/tmp/moelora-e2e", 180, FORMATS)


def main(argv=None):
    p = arguments(__doc__)
    p.add_argument("--only", choices=("answers", "invariance", "sampler"), default="answers")
    bench = Bench(p.parse_args(argv), "moelora", "vllm")
    getattr(bench, bench.args.only)()
    return bench.report()


if __name__ == "__main__":
    sys.exit(main())
