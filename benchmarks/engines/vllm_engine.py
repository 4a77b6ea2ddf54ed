"""One vLLM engine: who runs its MoE layers, and what its requests get.

    python -m benchmarks.engines.vllm_engine --model /tmp/tiny --out /tmp/run.json

Started by `benchmarks.vllm_e2e`; whether moelora serves the layers is decided by its environment
(`MOELORA_VLLM`), as in production. The result file is written after each part, so that what was
measured survives what comes after it.

With `--data-parallel`, ranks share the prompts, and fill their slots in different orders before the
first one.
"""

import argparse
import json
import os
import pathlib
import sys

from benchmarks.engines import answers
from benchmarks.engines.vllm_bits import bits
from benchmarks.engines.vllm_ranks import RANK, Ranks, start
from benchmarks.engines.vllm_rows import rows

for name, value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",  # uses NVLink multicast, which not every host allows
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}.items():
    os.environ.setdefault(name, value)


class Engine(answers.Engine):
    """vLLM's, in this process."""

    def __init__(self, args):
        from vllm import LLM
        from vllm.lora.request import LoRARequest

        super().__init__(args.model)
        slots, ranks = len(self.names), [int(name.rpartition("-r")[2]) for name in self.names]
        options = {"dtype": "bfloat16", "load_format": "safetensors", "skip_tokenizer_init": True}
        options |= {"max_model_len": 4096, "max_num_batched_tokens": 8192, "max_num_seqs": 64}
        options |= {"seed": 0, "enable_prefix_caching": False, "disable_custom_all_reduce": True}
        options |= {"enable_lora": True, "max_lora_rank": max(ranks), "max_loras": slots}
        options |= {"max_cpu_loras": slots, "gpu_memory_utilization": 0.6} | args.llm
        if args.bits or args.rows:  # hooks see no replays of graphs
            options["enforce_eager"] = True
        self.llm = LLM(model=self.base, **options)
        self.ranks = Ranks()
        numbered = enumerate(self.folders, 1)
        self.adapters = [LoRARequest(f.name, i, str(f)) for i, f in numbered]
        if self.ranks.size > 1:
            for adapter in self.adapters[:: -1 if self.ranks.rank % 2 else 1]:
                self.llm.llm_engine.add_lora(adapter)

    def run(self, prompts, adapters, **sampling):
        from vllm import SamplingParams

        prompts, adapters = self.ranks.share(prompts), self.ranks.share(adapters)
        idle = not prompts
        if idle:  # others' requests do not wake this rank's engine, and their steps wait for it
            prompts, adapters, sampling = [[self.vocab[0]]], [None], {"max_tokens": 1}
        params = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, **sampling)
        given = [{"prompt_token_ids": ids} for ids in prompts]
        adapters = adapters if any(adapters) else None
        outputs = self.llm.generate(given, params, use_tqdm=False, lora_request=adapters)
        return [] if idle else outputs

    def generate(self, prompts, adapters, new):
        self.run(prompts, adapters, max_tokens=new)

    def replies(self, prompts, adapters, new):
        outputs = self.run(prompts, adapters, max_tokens=new, logprobs=20, prompt_logprobs=0)
        return self.ranks.gather([reply(output) for output in outputs])


def moe_layers(worker):
    """The experts classes in a worker's model."""
    found = set()
    for module in worker.get_model().modules():
        method = getattr(module, "quant_method", None)
        for kernel in (getattr(module, "_moe_kernel", None), getattr(method, "moe_kernel", None)):
            if kernel is not None:
                found.add(type(kernel.fused_experts).__name__)
    return ", ".join(sorted(found)) or "no MoE kernel found"


def adapter_slots(worker):
    """Numbers of the adapters in a worker's slots."""
    manager = worker.model_runner.lora_manager._adapter_manager
    return list(manager.lora_index_to_id)


def reply(output):
    """A request's result, as plain numbers: `top` has the best tokens at each step."""
    ids = output.prompt_token_ids
    prompt = [output.prompt_logprobs[i][ids[i]].logprob for i in range(1, len(ids))]
    top = [{str(t): p.logprob for t, p in step.items()} for step in output.outputs[0].logprobs]
    return {"prompt": prompt, "tokens": list(output.outputs[0].token_ids), "top": top}


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--model", type=pathlib.Path, required=True, help="folder with manifest.json")
    p.add_argument("--out", type=pathlib.Path, required=True)
    p.add_argument("--bits", action="store_true", help="rows of MoE layers, mixed and alone")
    p.add_argument("--rows", type=pathlib.Path, help="file for rows of MoE layers")
    p.add_argument("--data-parallel", type=int, default=1, help="ranks that take turns in prompts")
    p.add_argument("--llm", type=json.loads, default={}, help="more options of LLM, as JSON")
    args = p.parse_args()
    if args.data_parallel > 1 and RANK not in os.environ:
        return start(__spec__.name, sys.argv[1:], args.data_parallel)
    engine, result = Engine(args), {}

    def save(**more):
        result.update(more)
        if engine.ranks.rank == 0:
            args.out.write_text(json.dumps(result))

    ask, gather = engine.llm.collective_rpc, engine.ranks.gather
    save(layers=gather(ask(moe_layers)), slots=gather(ask(adapter_slots)))
    save(check=answers.check(engine))
    if args.bits:
        save(bits=bits(engine))
    if args.rows:
        save(rows=rows(engine, args.rows))
    gather([])  # none leaves while another one steps
    sys.stdout.flush()
    os._exit(0)  # no teardown of the engine


if __name__ == "__main__":
    sys.exit(main())
