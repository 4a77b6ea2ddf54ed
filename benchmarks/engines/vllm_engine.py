"""One vLLM engine: who runs its MoE layers, and what its requests get.

    python -m benchmarks.engines.vllm_engine --model /tmp/tiny --out /tmp/run.json

Started by `benchmarks.vllm_e2e`, in a process of its own for each engine; whether moelora serves
the layers is decided by its environment (`MOELORA_VLLM`), as in production. vLLM compiles the model
and captures graphs as it does by default; with `--graphs` it captures those of decode alone. The
result file is written after each part, so that what was measured survives what comes after it.

With `--data-parallel`, ranks share the prompts, and fill their slots in different orders before the
first one.
"""

import argparse
import json
import os
import pathlib
import random
import sys
import time

from benchmarks.engines.answers import check
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

GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
GRAPHS["cudagraph_capture_sizes"] = [1, 2, 4, 8, 16, 32, 64]


def parse(argv=None):
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--model", type=pathlib.Path, required=True, help="folder with manifest.json")
    p.add_argument("--out", type=pathlib.Path, required=True)
    p.add_argument("--bits", action="store_true", help="rows of MoE layers, mixed and alone")
    p.add_argument("--rows", type=pathlib.Path, help="file for rows of MoE layers")
    p.add_argument("--graphs", action="store_true", help="of decode, without compilation")
    p.add_argument("--tensor-parallel", type=int, default=1)
    p.add_argument("--data-parallel", type=int, default=1, help="ranks that take turns in prompts")
    p.add_argument("--expert-parallel", action="store_true")
    p.add_argument("--fully-sharded", action="store_true", help="adapters, over all ranks")
    p.add_argument("--gib", type=float, help="of keys and values: engines share the GPUs")
    return p.parse_args(argv)


class Engine:
    """Of a folder with a manifest."""

    def __init__(self, args):
        from vllm import LLM
        from vllm.lora.request import LoRARequest

        manifest = json.loads((args.model / "manifest.json").read_text())
        folders = [pathlib.Path(f) for f in manifest["adapters"]]
        ranks = [int(f.name.rpartition("-r")[2]) for f in folders]
        more = {"gpu_memory_utilization": 0.6}
        if args.gib:
            more = {"kv_cache_memory_bytes": int(args.gib * 2**30), "gpu_memory_utilization": 0.1}
        if args.bits or args.rows:  # hooks see no replays of graphs
            more["enforce_eager"] = True
        elif args.graphs:
            more["compilation_config"] = GRAPHS
        self.llm = LLM(
            model=manifest["base"],
            skip_tokenizer_init=True,
            dtype="bfloat16",
            seed=0,
            load_format="safetensors",
            max_model_len=4096,
            max_num_batched_tokens=8192,
            max_num_seqs=64,
            enable_prefix_caching=False,
            tensor_parallel_size=args.tensor_parallel,
            enable_expert_parallel=args.expert_parallel,
            disable_custom_all_reduce=True,
            enable_lora=True,
            max_loras=len(folders),
            max_cpu_loras=len(folders),
            max_lora_rank=max(ranks),
            fully_sharded_loras=args.fully_sharded,
            **more,
        )
        self.ranks = Ranks()
        self.vocab, self.random = range(3, manifest["vocab"]), random.Random(1)
        self.names = [f.name for f in folders]
        self.adapters = [LoRARequest(f.name, i + 1, str(f)) for i, f in enumerate(folders)]
        if self.ranks.size > 1:
            for adapter in self.adapters[:: -1 if self.ranks.rank % 2 else 1]:
                self.llm.llm_engine.add_lora(adapter)

    def prompts(self, lengths):
        return [self.random.choices(self.vocab, k=n) for n in lengths]

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
        options = {"max_tokens": new, "logprobs": 20, "prompt_logprobs": 0}
        made = [reply(output) for output in self.run(prompts, adapters, **options)]
        return self.ranks.gather(made)


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
    args = parse()
    if args.data_parallel > 1 and RANK not in os.environ:
        return start(__spec__.name, sys.argv[1:], args.data_parallel)
    result = {}

    def save(**more):
        result.update(more)
        if engine.ranks.rank == 0:
            args.out.write_text(json.dumps(result))

    began = time.time()
    engine = Engine(args)
    layers = engine.ranks.gather(engine.llm.collective_rpc(moe_layers))
    slots = engine.ranks.gather(engine.llm.collective_rpc(adapter_slots))
    save(start_s=round(time.time() - began, 1), layers=layers, slots=slots)
    print(f"engine up in {result['start_s']} s, MoE layers: {layers}")
    save(check=check(engine))
    if args.bits:
        save(bits=bits(engine))
    if args.rows:
        save(rows=rows(engine, args.rows))
    engine.ranks.gather([])  # none leaves while another one steps
    sys.stdout.flush()
    os._exit(0)  # no teardown of the engine


if __name__ == "__main__":
    sys.exit(main())
